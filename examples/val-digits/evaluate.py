"""How often a finished run names the digit that it is shown or played, on held-out scans."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from mmplan.schema.factories import build_module
from mmplan.schema.workload import load_workload
from mmplan.zoo.dialogues import digits_told

HERE = Path(__file__).parent
SENSES = {"image": "vision", "sound": "audio"}


def main(run_dir: Path) -> None:
    """Print the accuracy of every task as a percentage."""
    torch.set_num_threads(1)
    workload = load_workload(HERE / "workload.yaml")
    weights = load_file(run_dir / "final.safetensors")
    modules: dict[str, torch.nn.Sequential] = {}
    for name in workload.modules:
        module = build_module(workload, name, HERE)
        prefix = f"{name}."
        own = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
        module.load_state_dict(own)
        modules[name] = module.eval()
    for name, task in workload.tasks.items():
        used = {sense: modules[m] for sense, m in SENSES.items() if m in task.modules}
        accuracy = digits_told(used, modules["llm"], inputs=tuple(SENSES))
        print(f"{name}: digits told: {100 * accuracy:.1f}% (chance 10%)")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
