"""Whole modules, as one process has them: with their initial weights, or with those of a run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from mmlaunch.checkpoint.exported_weights import load_initial
from mmlaunch.comm.batches import Tree
from mmplan.errors import InvalidInputError
from mmplan.program.model import Program
from mmplan.schema.factories import build_loss, build_module
from mmplan.schema.workload import Workload
from mmplan.wording import counted

# One block of a module, by the module under whose name its parameters live.
BlockKey = tuple[str, int]


def trainable_blocks(program: Program) -> dict[BlockKey, bool]:
    """Every block of the program and whether any task trains it."""
    blocks: dict[BlockKey, bool] = {}
    for stage in program.stages:
        for block in range(*stage.blocks):
            trains = any(a <= block < b for a, b in stage.trainable)
            blocks[stage.owner, block] = blocks.get((stage.owner, block), False) or trains
    return blocks


def build_owner(
    workload: Workload, owner: str, folder: Path, trains: Mapping[BlockKey, bool] | None
) -> nn.Sequential:
    """A whole module with its initial weights and its frozen parameters marked.

    A parameter that two blocks share is frozen when one of them is.

    Args:
        workload: gives the factory and the weights to start from.
        owner: the module's name.
        folder: the workload file's folder.
        trains: for every block of the program whether any task trains it; None where the program
            does not have the module: then nothing is marked.

    Raises:
        InvalidInputError: the factory or the initial weights are wrong, or the plan was
            made for another number of blocks.
    """
    module = build_module(workload, owner, folder)
    if trains is not None:
        mark_frozen(module, owner, trains)
    init = workload.modules[owner].init
    if init is not None:
        load_initial(module, folder / init, owner)
    return module


def call_blocks(blocks: Iterable[nn.Module], arguments: Sequence[Tree]) -> Tree:
    """The forward of consecutive blocks: the first takes the inputs, each other one value."""
    given = tuple(arguments)
    for block in blocks:
        given = (block(*given),)
    return given[0]


def mark_frozen(module: nn.Sequential, owner: str, trains: Mapping[BlockKey, bool]) -> None:
    """Mark the parameters of blocks that no task trains.

    Raises:
        InvalidInputError: the plan was made for another number of blocks.
    """
    planned = 1 + max(block for name, block in trains if name == owner)
    if len(module) != planned:
        raise InvalidInputError(
            f"modules.{owner}: the factory makes {counted(len(module), 'block')}, the plan has "
            f"{planned}",
            hint="profile and solve the workload again",
        )
    for index, block in enumerate(module):
        for parameter in block.parameters():
            if not trains[owner, index]:
                parameter.requires_grad_(False)


class WholeModule(nn.Sequential):
    """A module's blocks, called with the module's inputs, of which there may be several."""

    def forward(self, input: Tree, *more: Tree) -> Tree:
        """One block after another, as a rank that has all of them runs them."""
        return call_blocks(self, (input, *more))


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
        blocks = OrderedDict(_with_weights(module, weights, owner).named_children())
        modules[owner] = WholeModule(blocks).eval()
    # A module that shares another's parameters is that module, under its own name too.
    modules |= {stage.module: modules[stage.owner] for stage in program.stages}
    for name in dict.fromkeys(loss.name for loss in program.losses):
        loss = build_loss(workload, name, folder)
        modules[f"losses.{name}"] = _with_weights(loss, weights, f"losses.{name}")
    return modules


def _with_weights(module: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> nn.Module:
    own = {
        name.removeprefix(f"{prefix}."): value
        for name, value in weights.items()
        if name.startswith(f"{prefix}.")
    }
    module.load_state_dict(own, strict=False)
    return module.eval()
