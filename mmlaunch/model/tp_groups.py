"""Blocks that a rank runs in several tensor-parallel groups: for several tasks, say.

A rank that is the same shard of all of them holds that shard, and only its partners change. One
that is different shards holds the block whole, and each group uses its shard of it. There whole
parameters would be brought once too often, so the first rank of each group brings them, and
the backwards of the others leave them out (:mod:`mmplan.program.shards`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmlaunch.model.tensor_parallel import CutLinear, TensorParallelComm, window_block
from mmplan.program.model import Program, Stage
from mmplan.program.shards import Ranks, held_shards, is_crowded

Comm = Callable[[Ranks], TensorParallelComm]
# A Linear, the attribute that says what it computes, and its value.
_Setting = tuple[nn.Module, str, Any]


class Partners:
    """Which shard of each block a rank holds, and what its blocks compute in which group.

    Args:
        program: the whole program.
        rank: this rank.

    Attributes:
        running: stage whose instruction the rank runs now.
    """

    def __init__(self, program: Program, rank: int) -> None:
        self._program, self._rank = program, rank
        self.running: int | None = None
        self._groups: dict[tuple[str, int], list[Ranks]] = {}
        self._settings: dict[tuple[int, int], list[_Setting]] = {}
        # (stage, block) whose whole parameters another rank of the group brings.
        self._quiet: set[tuple[int, int]] = set()

    def groups(self, owner: str, index: int) -> list[Ranks]:
        """The tensor-parallel groups of all ranks that run a block."""
        if (owner, index) not in self._groups:
            users = (
                stage
                for stage in self._program.stages
                if stage.owner == owner and stage.blocks[0] <= index < stage.blocks[1]
            )
            groups = dict.fromkeys(group for stage in users for group in stage.ranks)
            self._groups[owner, index] = list(groups)
        return self._groups[owner, index]

    def shard(self, owner: str, index: int) -> tuple[int, int]:
        """(shard, of how many) of a block that the rank holds."""
        return held_shards(self.groups(owner, index))[self._rank]

    def is_crowded(self, owner: str, index: int) -> bool:
        """Whether some rank runs a block as two different shards."""
        return is_crowded(self.groups(owner, index))

    def note(
        self, owner: str, blocks: Mapping[int, nn.Module], stages: Sequence[Stage], comm: Comm
    ) -> None:
        """Prepare blocks of a module that the rank runs in several groups.

        Args:
            owner: the module.
            blocks: the rank's, by index, cut or whole.
            stages: the rank's that run them.
            comm: the tensor-parallel group of given ranks.
        """
        users: defaultdict[int, dict[int, Ranks]] = defaultdict(dict)
        for stage in stages:
            for group in stage.ranks:
                for index in range(*stage.blocks) if self._rank in group else ():
                    users[index][stage.index] = group
        for index, groups in users.items():
            if len(set(groups.values())) > 1:
                whole = self.shard(owner, index) == (0, 1)
                for stage, group in groups.items():
                    sums = comm(tuple(sorted(group)))
                    self._settings[stage, index] = (
                        self._windows(f"{owner}.{index}", blocks[index], group, sums)
                        if whole
                        else _partners(blocks[index], sums)
                    )

    def _windows(
        self, where: str, block: nn.Module, group: Ranks, comm: TensorParallelComm
    ) -> list[_Setting]:
        """Which share of a whole block its Linears use in a group."""
        index, count = group.index(self._rank), len(group)
        found = window_block(block, index=index, count=count, comm=comm, where=where)
        return [(linear, "tp_window", window if count > 1 else None) for linear, window in found]

    def meet(self, stage: Stage, index: int) -> None:
        """Let a block compute its share in the group of the stage that runs it now."""
        for linear, name, value in self._settings.get((stage.index, index), ()):
            # Past nn.Module's __setattr__: a comm that is a module must not become a child.
            object.__setattr__(linear, name, value)

    def quieten(self, stage: Stage, index: int) -> None:
        """Take no gradients of a crowded block's whole parameters from a stage's later ranks."""
        if stage.place(self._rank)[1] > 0:
            self._quiet.add((stage.index, index))

    def watch(self, index: int, parameter: nn.Parameter) -> None:
        """Leave out what :meth:`quieten` says of a whole parameter of a crowded block."""
        parameter.register_hook(partial(self._brought, index))

    def _brought(self, index: int, gradient: Tensor) -> Tensor | None:
        return torch.zeros_like(gradient) if (self.running, index) in self._quiet else None


def _partners(block: nn.Module, comm: TensorParallelComm) -> list[_Setting]:
    """Whom the Linears of a cut block sum with."""
    linears = (module for module in block.modules() if isinstance(module, CutLinear))
    return [(linear, "tp_comm", comm) for linear in linears]
