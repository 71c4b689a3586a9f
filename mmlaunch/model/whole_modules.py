"""Whole modules in one process, with the weights of a run, for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from mmlaunch.model.local_model import build_owner, trainable_blocks
from mmplan.program.model import Program
from mmplan.schema.factories import build_loss
from mmplan.schema.workload import Workload


def whole_modules(
    workload: Workload, folder: Path, program: Program, weights: Mapping[str, Tensor]
) -> dict[str, nn.Module]:
    """Modules by name and losses as ``losses.NAME``, in evaluation mode, on the CPU.

    Args:
        workload: gives the factories.
        folder: the workload file's folder.
        program: says which modules and losses there are.
        weights: by full name, as a single process would name them.
    """
    modules: dict[str, nn.Module] = {}
    trains = trainable_blocks(program)
    for owner in dict.fromkeys(stage.owner for stage in program.stages):
        module = build_owner(workload, owner, folder, trains)
        modules[owner] = _filled(module, weights, owner)
    # A module that shares another's parameters is that module, under its own name too.
    modules |= {stage.module: modules[stage.owner] for stage in program.stages}
    for name in dict.fromkeys(loss.name for loss in program.losses):
        loss = build_loss(workload, name, folder)
        modules[f"losses.{name}"] = _filled(loss, weights, f"losses.{name}")
    return modules


def _filled(module: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> nn.Module:
    own = {
        name.removeprefix(f"{prefix}."): value
        for name, value in weights.items()
        if name.startswith(f"{prefix}.")
    }
    module.load_state_dict(own, strict=False)
    return module.eval()
