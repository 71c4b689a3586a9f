"""Zero-shot accuracy of a finished run on the fifth of the scans that it never saw."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from mmplan.schema.factories import build_module
from mmplan.schema.workload import load_workload
from mmplan.zoo.digits import zero_shot_accuracy

HERE = Path(__file__).parent


def main(run_dir: Path) -> None:
    """Print the accuracy as a percentage."""
    torch.set_num_threads(1)
    workload = load_workload(HERE / "workload.yaml")
    weights = load_file(run_dir / "final.safetensors")
    towers: list[torch.nn.Module] = []
    for name in ("vision", "text"):
        tower = build_module(workload, name, HERE)
        prefix = f"{name}."
        own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        tower.load_state_dict(own)
        towers.append(tower.eval())
    accuracy = zero_shot_accuracy(*towers)
    print(f"zero-shot accuracy: {100 * accuracy:.1f}%")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
