"""The parameters that one rank holds: the blocks of its stages, and its losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mmlaunch.initial import load_initial
from mmlaunch.tp import ParameterShard, TensorParallelComm, shard_block
from mmlaunch.transport import Ranks
from mmplan.errors import InvalidInputError
from mmplan.program.model import Program, Stage
from mmplan.program.samples import intersect
from mmplan.schema.factories import build_loss, build_module, tied_parameters
from mmplan.schema.workload import Workload

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
    workload: Workload, owner: str, folder: Path, trains: Mapping[BlockKey, bool]
) -> nn.Sequential:
    """A whole module with its initial weights and its frozen parameters marked.

    A parameter that two blocks share is frozen when one of them is.

    Raises:
        InvalidInputError: the factory or the initial weights are wrong, or the plan was
            made for another number of blocks.
    """
    module = build_module(workload, owner, folder)
    planned = 1 + max(block for name, block in trains if name == owner)
    if len(module) != planned:
        raise InvalidInputError(
            f"modules.{owner}: the factory makes {len(module)} blocks, the plan has {planned}",
            hint="profile and solve the workload again",
        )
    init = workload.modules[owner].init
    if init is not None:
        load_initial(module, folder / init, owner)
    for index, block in enumerate(module):
        for parameter in block.parameters():
            if not trains[owner, index]:
                parameter.requires_grad_(False)
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """A parameter that stands in several blocks of a module.

    Attributes:
        name: its first full name, under which it is saved.
        blocks: the blocks in which it stands.
    """

    name: str
    owner: str
    blocks: tuple[int, ...]


class LocalModel:
    """Builds every module this rank needs, keeps its own blocks, and cuts them for TP.

    Args:
        workload: gives the factories.
        folder: the workload file's folder.
        program: says which blocks the rank runs.
        rank: this rank.
        device: where parameters live.
        comm: the tensor-parallel group of given ranks.

    Attributes:
        blocks: this rank's blocks.
        losses: this rank's losses, by name.
        shards: parameters that tensor parallelism cut, by full name.
        canonical: full names of tied parameters to the name under which they are saved.
        ties: ties of the modules that this rank built.
    """

    def __init__(
        self,
        *,
        workload: Workload,
        folder: Path,
        program: Program,
        rank: int,
        device: torch.device,
        comm: Callable[[Ranks], TensorParallelComm],
    ) -> None:
        self.blocks: dict[BlockKey, nn.Module] = {}
        self.losses: dict[str, nn.Module] = {}
        self.shards: dict[str, ParameterShard] = {}
        self.canonical: dict[str, str] = {}
        self.ties: list[Tie] = []
        self._trains = trainable_blocks(program)
        self._program, self._rank = program, rank
        stages = program.stages_of(rank)
        for owner in dict.fromkeys(stage.owner for stage in stages):
            module = build_owner(workload, owner, folder, self._trains)
            self._note_ties(owner, module)
            for stage in stages:
                if stage.owner == owner:
                    self._keep(stage, module, device, comm)
        # Ranks that sum gradients hold the blocks in one order, whichever unit brought them.
        self.blocks = dict(sorted(self.blocks.items()))
        for loss in program.losses:
            if rank in loss.ranks and loss.name not in self.losses:
                self.losses[loss.name] = build_loss(workload, loss.name, folder).to(device)
        self._frozen_here = {stage.index: self._find_frozen_here(stage) for stage in stages}

    def _note_ties(self, owner: str, module: nn.Sequential) -> None:
        blocks: defaultdict[str, set[int]] = defaultdict(set)
        for alias, first in tied_parameters(module).items():
            self.canonical[f"{owner}.{alias}"] = f"{owner}.{first}"
            blocks[first] |= {int(alias.split(".")[0]), int(first.split(".")[0])}
        for first, where in blocks.items():
            if len(where) > 1:
                self.ties.append(
                    Tie(name=f"{owner}.{first}", owner=owner, blocks=tuple(sorted(where)))
                )

    def _keep(
        self,
        stage: Stage,
        module: nn.Sequential,
        device: torch.device,
        comm: Callable[[Ranks], TensorParallelComm],
    ) -> None:
        place = stage.place(self._rank)
        if place is None:
            return
        d, t = place
        tied_across = {tie.name for tie in self.ties}
        for index in range(*stage.blocks):
            if (stage.owner, index) in self.blocks:
                continue
            block = module[index]
            where = f"{stage.owner}.{index}"
            if stage.tp > 1:
                group = tuple(sorted(stage.ranks[d]))
                cut = shard_block(block, index=t, count=stage.tp, comm=comm(group), where=where)
                for name, shard in cut.items():
                    full = self.canonical.get(f"{where}.{name}", f"{where}.{name}")
                    if full in tied_across:
                        raise InvalidInputError(
                            f"{where}: tp_plan cuts {name}, which another block shares",
                            hint="leave it out of tp_plan: tied parameters stay whole",
                        )
                    self.shards[f"{where}.{name}"] = shard
            self.blocks[stage.owner, index] = block.to(device)

    def _find_frozen_here(self, stage: Stage) -> list[nn.Parameter]:
        """Parameters that another task trains and this stage's task does not."""
        return [
            parameter
            for index in range(*stage.blocks)
            if not any(a <= index < b for a, b in stage.trainable)
            for parameter in self.blocks[stage.owner, index].parameters()
            if parameter.requires_grad
        ]

    def frozen_here(self, stage: int) -> list[nn.Parameter]:
        """Trained parameters that must not get a gradient from this stage."""
        return self._frozen_here[stage]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter of this rank once, by the name under which it is saved."""
        seen: set[int] = set()
        for (owner, index), block in self.blocks.items():
            for name, parameter in block.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    full = f"{owner}.{index}.{name}"
                    yield self.canonical.get(full, full), parameter
        for loss, module in self.losses.items():
            for name, parameter in module.named_parameters():
                yield f"losses.{loss}.{name}", parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Persistent buffers of this rank's blocks and losses."""
        for (owner, index), block in self.blocks.items():
            for name, buffer in _persistent_buffers(block):
                yield f"{owner}.{index}.{name}", buffer
        for loss, module in self.losses.items():
            for name, buffer in _persistent_buffers(module):
                yield f"losses.{loss}.{name}", buffer

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that the optimizer updates."""
        return [(name, p) for name, p in self.named_parameters() if p.requires_grad]

    def block_parameters(self, owner: str, blocks: tuple[int, int]) -> dict[str, nn.Parameter]:
        """Trained parameters of a range of blocks, without those that are tied across blocks."""
        apart = {tie.name for tie in self.ties}
        return {
            name: parameter
            for name, parameter in self.trained()
            if name not in apart
            and not name.startswith("losses.")
            and name.split(".")[0] == owner
            and intersect((int(name.split(".")[1]), int(name.split(".")[1]) + 1), blocks)
        }


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    kept = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if name in kept:
            yield name, buffer


def tie_groups(program: Program, ties: list[Tie]) -> list[tuple[Tie, list[Ranks]]]:
    """For each tie, the ranks that hold it, one group for each tensor-parallel index."""
    groups: list[tuple[Tie, list[Ranks]]] = []
    for tie in ties:
        holders = [
            stage
            for stage in program.stages
            if stage.owner == tie.owner
            and any(stage.blocks[0] <= b < stage.blocks[1] for b in tie.blocks)
        ]
        by_index: defaultdict[int, set[int]] = defaultdict(set)
        for stage in holders:
            for group in stage.ranks:
                for t, rank in enumerate(group):
                    by_index[t].add(rank)
        groups.append((tie, [tuple(sorted(ranks)) for ranks in by_index.values()]))
    return groups
