"""Zero-shot accuracy of every sense of a finished run, on scans that it never saw."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from mmplan.schema.factories import build_module
from mmplan.schema.workload import load_workload
from mmplan.zoo.senses import zero_shot_accuracies

HERE = Path(__file__).parent


def main(run_dir: Path) -> None:
    """Print each accuracy as a percentage, and their mean."""
    torch.set_num_threads(1)
    workload = load_workload(HERE / "workload.yaml")
    weights = load_file(run_dir / "final.safetensors")
    towers: dict[str, torch.nn.Module] = {}
    for name in workload.modules:
        tower = build_module(workload, name, HERE)
        prefix = f"{name}."
        own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        tower.load_state_dict(own)
        towers[name] = tower.eval()
    fields = {name: str(spec.inputs[0]) for name, spec in workload.modules.items()}
    found = zero_shot_accuracies(towers, fields)
    with_text = {
        m for task in workload.tasks.values() if "text" in task.modules for m in task.modules
    }
    for name, accuracy in found.items():
        how = "" if name in with_text else " (never paired with text)"
        print(f"{name:8} zero-shot accuracy: {100 * accuracy:.1f}%{how}")  # noqa: T201
    mean = sum(found.values()) / len(found)
    print(f"mean of {len(found)} senses: {100 * mean:.1f}% (chance 10%)")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
