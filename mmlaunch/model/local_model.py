"""The parameters that one rank holds: the blocks of its stages, and its losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.dropout import _DropoutNd

from mmlaunch.checkpoint.boxes import Box
from mmlaunch.model.deferred_init import MetaModule, UndeferrableError, check_gone
from mmlaunch.model.precision import matrix_names
from mmlaunch.model.shard_layout import ShardLayout
from mmlaunch.model.tensor_parallel import (
    GroupSums,
    Shards,
    TensorParallelComm,
    Tokens,
    TPGroups,
    VocabularyLinear,
    check_tied_alike,
    cut_parameters,
    gathered,
    group_name,
    shard_block,
    sums_of,
)
from mmlaunch.model.whole_modules import BlockKey, build_owner, mark_frozen, trainable_blocks
from mmplan.errors import InvalidInputError
from mmplan.program.model import Program, Stage
from mmplan.program.samples import intersect
from mmplan.program.shards import Ranks
from mmplan.proof.row_cuts import RowCuts
from mmplan.schema.factories import build_loss, tied_parameters
from mmplan.schema.workload import Workload
from mmplan.wording import size


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


def tensors_in(module: nn.Module) -> Iterator[Tensor]:
    """All parameters and buffers of a module."""
    yield from module.parameters()
    yield from module.buffers()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLogits:
    """The tokens of which a rank of a tensor-parallel group has logits, and its group's others.

    Attributes:
        gather: statistics of every rank.
    """

    tokens: Tokens
    gather: Callable[[Tensor], Tensor]


class LocalModel:
    """Builds every module this rank needs, keeps its own blocks, and cuts them for TP.

    A module of which the rank keeps a part only is built on the meta device, and the kept blocks
    are materialised tensor by tensor; values are the same either way.

    Args:
        workload: gives the factories.
        folder: the workload file's folder.
        program: says which blocks the rank runs.
        rank: this rank.
        device: where parameters live. On CUDA those of stages that gather them come to it cut
            (:class:`mmlaunch.execute.gathered_blocks.GatheredBlocks`); until then they are on the
            host, since they may not fit the device whole.
        comm: the tensor-parallel group of given ranks.

    Attributes:
        blocks: this rank's blocks.
        losses: this rank's losses, by name.
        layouts: shard layouts of cut parameters, by the full name under which they are saved; also
            of parameters that are whole here and cut on other ranks.
        canonical: full names of tied parameters to the name under which they are saved.
        ties: ties of the modules that this rank built.
        matrices: full names of the weights that may be narrow
            (:func:`mmlaunch.model.precision.matrix_names`).
        frozen_here: for each stage, trained parameters that must not get a gradient from it.
        tp_groups: which shards this rank holds, and in which groups it runs them.
        row_cuts: by stage and block, where the rows of its activations are cut.
        row_groups: by stage, the name of the group that shares out its rows.
        own_logits: by stage, of which tokens a loss takes logits of this rank.
        notes: modules that had to be built whole, and why, in words for the user.
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
        self.layouts: dict[str, ShardLayout] = {}
        self.canonical: dict[str, str] = {}
        self.ties: list[Tie] = []
        self.matrices: set[str] = set()
        self.notes: list[str] = []
        self.tp_groups = TPGroups(program, rank)
        self.row_cuts: dict[tuple[int, int], RowCuts] = {}
        self.row_groups: dict[int, str] = {}
        self.own_logits: dict[int, OwnLogits] = {}
        self._trains = trainable_blocks(program)
        self._workload, self._folder = workload, folder
        self._program, self._rank = program, rank
        self._device, self._comm = device, comm
        stages = program.stages_of(rank)
        for owner in dict.fromkeys(stage.owner for stage in stages):
            kept = [stage for stage in stages if stage.owner == owner]
            self._build(owner, kept)
        # Ranks that sum gradients hold the blocks in one order, whichever unit brought them.
        self.blocks = dict(sorted(self.blocks.items()))
        for loss in program.losses:
            if rank in loss.ranks and loss.name not in self.losses:
                self.losses[loss.name] = build_loss(workload, loss.name, folder).to(device)
        self.frozen_here = {stage.index: self._find_frozen_here(stage) for stage in stages}
        self._leave_out_replicated(stages)
        for stage in stages:
            if stage.items:
                self._share_items(stage)

    def _build(self, owner: str, kept: list[Stage]) -> None:
        """Build a module and keep the blocks of some stages."""
        reason = None
        blocks = {block for stage in kept for block in range(*stage.blocks)}
        planned = sum(name == owner for name, _ in self._trains)
        cut = any(stage.shards > 1 for stage in kept)
        if cut or len(blocks) < planned or self._workload.modules[owner].init is not None:
            try:
                check_gone(self._materialise(owner, kept))
                return
            except UndeferrableError as error:
                reason = str(error)
                self._forget(owner)
        module = build_owner(self._workload, owner, self._folder, self._trains)
        self._keep_all(owner, module, kept)
        for block in self._blocks_of(owner).values():
            block.to(self._device_of(kept))
        if reason is not None:
            whole_bytes = sum(parameter.nbytes for parameter in module.parameters())
            self.notes.append(
                f"modules.{owner}: every rank that runs a part of it builds all of it at first, "
                f"{size(whole_bytes)}: {reason}"
            )

    def _materialise(self, owner: str, kept: list[Stage]) -> list[StorageWeakRef]:
        """Keep materialised blocks of a meta module; returns the memory that must be free now."""
        meta = MetaModule(self._workload, owner, self._folder)
        mark_frozen(meta.module, owner, self._trains)
        cuts = self._keep_all(owner, meta.module, kept)
        meta.materialise(self._blocks_of(owner), cuts, self._device_of(kept))
        return meta.storages()

    def _device_of(self, kept: list[Stage]) -> torch.device:
        """Where the blocks of some stages are built."""
        on_host = self._device.type == "cuda" and all(stage.gathers for stage in kept)
        return torch.device("cpu") if on_host else self._device

    def _forget(self, owner: str) -> None:
        """Drop everything that was kept of a module."""
        self.blocks = {key: block for key, block in self.blocks.items() if key[0] != owner}
        self.layouts = {k: v for k, v in self.layouts.items() if k.split(".")[0] != owner}
        self.canonical = {k: v for k, v in self.canonical.items() if k.split(".")[0] != owner}
        self.ties = [tie for tie in self.ties if tie.owner != owner]

    def _blocks_of(self, owner: str) -> dict[int, nn.Module]:
        return {index: block for (name, index), block in self.blocks.items() if name == owner}

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
        self._check_ties(owner)

    def _check_ties(self, owner: str) -> None:
        """Refuse a module whose blocks share other parameters than the plan knows."""
        planned = set(self._program.ties.get(owner, ()))
        found = {tie.blocks: tie.name for tie in self.ties if tie.owner == owner}
        differing = min(planned.symmetric_difference(found), default=None)
        if differing is None:
            return
        *others, last = map(str, differing)
        blocks = f"blocks {', '.join(others)} and {last}"
        raise InvalidInputError(
            f"modules.{owner}: {blocks} share {found[differing]}, the plan has no such tie"
            if differing in found
            else f"modules.{owner}: the plan says that {blocks} share a parameter, in the model "
            "they do not",
            hint="profile and solve the workload again",
        )

    def _keep_all(
        self, owner: str, module: nn.Sequential, kept: list[Stage]
    ) -> dict[str, list[Box]]:
        """Keep the stages' blocks, cut; returns the kept parts of cut parameters."""
        self._note_ties(owner, module)
        if any(stage.shards > 1 for stage in self._program.stages if stage.owner == owner):
            check_tied_alike(module, owner)
        self.matrices |= {f"{owner}.{name}" for name in matrix_names(module)}
        cuts: dict[str, list[Box]] = {}
        shards: Shards = {}
        for stage in kept:
            for index in range(*stage.blocks):
                if (owner, index) not in self.blocks:
                    self.blocks[owner, index] = module[index]
                    cuts |= self._cut(stage, index, shards)
        self.tp_groups.prepare(owner, self._blocks_of(owner), kept, self._comm)
        return cuts

    def _leave_out_replicated(self, stages: Sequence[Stage]) -> None:
        """In blocks that some rank runs as two shards, let first ranks contribute alone."""
        several = {key for key in self.blocks if self.tp_groups.has_several_shards(*key)}
        for stage in stages:
            for index in range(*stage.blocks):
                if (stage.owner, index) in several:
                    self.tp_groups.leave_out(stage, index)
        for owner, index in several:
            for name, parameter in self.blocks[owner, index].named_parameters():
                if (
                    parameter.requires_grad
                    and self.saved_name(owner, index, name) not in self.layouts
                ):
                    self.tp_groups.hook(index, parameter)

    def _share_items(self, stage: Stage) -> None:
        """Let the ranks of a group share out the items of a stage that it runs."""
        group = tuple(sorted(stage.ranks[stage.place(self._rank)[0]]))
        self.row_groups[stage.index] = group_name(self._comm(group))
        for index in range(*stage.blocks):
            for name, module in self.blocks[stage.owner, index].named_modules():
                if isinstance(module, _DropoutNd) and module.p:
                    raise InvalidInputError(
                        f"modules.{stage.module}: block {index} has dropout ({name}), and ranks "
                        "that share out items would draw other numbers than one process",
                        hint="set dropout to 0, or items: false",
                    )

    def sum_partial(self, stage: Stage, partial: Mapping[int, Sequence[str]]) -> None:
        """Sum gradients of replicated parameters that are partial in a stage's groups.

        Args:
            stage: the stage; nothing is done on ranks that do not run it.
            partial: names of parameters by block.

        Raises:
            InvalidInputError: such a parameter stands in several blocks.
        """
        place = stage.find_place(self._rank)
        for index, names in partial.items() if place is not None else ():
            parameters = dict(self.blocks[stage.owner, index].named_parameters())
            group = tuple(sorted(stage.ranks[cast("tuple[int, int]", place)[0]]))
            for name in names:
                full = self.saved_name(stage.owner, index, name)
                if any(tie.name == full for tie in self.ties):
                    raise InvalidInputError(
                        f"{full} stands in several blocks, and each rank of a tp group has a part "
                        "of its gradient",
                        hint=f"take the Linears around it out of {stage.owner}'s tp_plan, or pin "
                        "it with plan: {tp: 1}",
                    )
                self.tp_groups.sum_partial(stage, index, parameters[name], self._comm(group))

    def cut_rows(self, stage: Stage, cuts: Mapping[int, RowCuts]) -> None:
        """Let a stage's blocks run with their rows cut.

        Args:
            stage: the stage; nothing is done on ranks that do not run it.
            cuts: by block.
        """
        place = stage.find_place(self._rank)
        for index, cut in cuts.items() if place is not None else ():
            block = self.blocks[stage.owner, index]
            cast(GroupSums, sums_of(block)).rows.hook(block, cut)
            self.row_cuts[stage.index, index] = cut
            group = tuple(sorted(stage.ranks[cast("tuple[int, int]", place)[0]]))
            self.row_groups[stage.index] = group_name(self._comm(group))

    def keep_logits(self, stage: Stage) -> None:
        """Let a stage's losses take each rank's own logits; nothing where the rank has no part."""
        place = stage.find_place(self._rank)
        if place is not None:
            block = self.blocks[stage.owner, stage.blocks[1] - 1]
            head = next(m for m in block.modules() if isinstance(m, VocabularyLinear))
            comm = self._comm(tuple(sorted(stage.ranks[place[0]])))
            gather = partial(gathered, comm=comm)
            self.own_logits[stage.index] = OwnLogits(tokens=head.tp_tokens, gather=gather)

    def _cut(self, stage: Stage, index: int, shards: Shards) -> dict[str, list[Box]]:
        """Cut one kept block; returns the kept parts by name in the module.

        Args:
            stage: that runs it.
            index: of the block.
            shards: of parameters that others of the module's blocks may share.
        """
        d, t = stage.place(self._rank)
        where = f"{stage.owner}.{index}"
        block = self.blocks[stage.owner, index]
        if self.tp_groups.shard(stage.owner, index) == (0, 1):
            self._note_uncut(stage.owner, index, block)
            return {}
        group = tuple(sorted(stage.ranks[d]))
        comm = self._comm(group)
        cut = shard_block(block, index=t, count=stage.tp, comm=comm, where=where, shards=shards)
        for name, layout in cut.items():
            self.layouts[self.saved_name(stage.owner, index, name)] = layout
        return {f"{index}.{name}": list(layout.boxes) for name, layout in cut.items()}

    def saved_name(self, owner: str, index: int, name: str) -> str:
        """The full name under which a block's parameter is saved."""
        full = f"{owner}.{index}.{name}"
        return self.canonical.get(full, full)

    def _note_uncut(self, owner: str, index: int, block: nn.Module) -> None:
        """Note the layouts of a whole block's parameters that other ranks hold cut."""
        if any(len(group) > 1 for group in self.tp_groups.groups(owner, index)):
            where = f"{owner}.{index}"
            for name, layout in cut_parameters(block, where=where).items():
                self.layouts[self.saved_name(owner, index, name)] = layout

    def _find_frozen_here(self, stage: Stage) -> list[nn.Parameter]:
        """Parameters that another task trains and this stage's task does not."""
        return [
            parameter
            for index in range(*stage.blocks)
            if not any(a <= index < b for a, b in stage.trainable)
            for parameter in self.blocks[stage.owner, index].parameters()
            if parameter.requires_grad
        ]

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for (owner, index), block in self.blocks.items():
            yield f"{owner}.{index}", block
        for name, loss in self.losses.items():
            yield f"losses.{name}", loss

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter of this rank once, by the name under which it is saved."""
        seen: set[nn.Parameter] = set()
        for prefix, module in self._named_modules():
            for name, parameter in module.named_parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    full = f"{prefix}.{name}"
                    yield self.canonical.get(full, full), parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Persistent buffers of this rank's blocks and losses."""
        for prefix, module in self._named_modules():
            kept = module.state_dict(keep_vars=True)
            for name, buffer in module.named_buffers():
                if name in kept:
                    yield f"{prefix}.{name}", buffer

    def tensors(self) -> Iterator[Tensor]:
        """All parameters and buffers."""
        for named in (self.named_parameters(), self.named_buffers()):
            yield from (tensor for _, tensor in named)

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
