"""What a finished run says of scans that it never saw: accuracy of the captions it writes."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from mmplan.schema.factories import build_module
from mmplan.schema.workload import load_workload
from mmplan.zoo.interleaved import caption_accuracy

HERE = Path(__file__).parent
NUM_SEQUENCES = 400


def main(run_dir: Path) -> None:
    """Print the accuracies as percentages."""
    torch.set_num_threads(1)
    workload = load_workload(HERE / "workload.yaml")
    weights = load_file(run_dir / "final.safetensors")
    modules: list[torch.nn.Sequential] = []
    for name in ("vision", "llm"):
        module = build_module(workload, name, HERE)
        own = {
            k.removeprefix(f"{name}."): v for k, v in weights.items() if k.startswith(f"{name}.")
        }
        module.load_state_dict(own)
        modules.append(module.eval())
    args = workload.data.args if workload.data else {}
    sizes = {**args, "split": "test", "sequences": NUM_SEQUENCES}
    accuracy = caption_accuracy(*modules, **sizes)
    print(f"caption words right: {100 * accuracy['tokens']:.1f}%")  # noqa: T201
    print(f"digits read: {100 * accuracy['digits']:.1f}% (chance 10%)")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
