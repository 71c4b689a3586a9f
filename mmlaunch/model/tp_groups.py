"""Blocks that a rank runs in several tensor-parallel process groups: for several tasks, say.

A rank with the same shard in all of them holds that shard, and only the group of its sums
changes. A rank with different shards holds the block whole, and each group uses its shard of it.
There replicated parameters would contribute to a sum once too often, so the first rank of each
group contributes, and the backwards of the others leave their gradients out
(:mod:`mmplan.program.shards`).
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
# A Linear, the attribute that says in which group or on which shard it computes, and its value.
_GroupAttribute = tuple[nn.Module, str, Any]


class TPGroups:
    """The shard of each block that a rank holds, and the groups in which it runs the block.

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
        self._attributes: dict[tuple[int, int], list[_GroupAttribute]] = {}
        # (stage, block) for whose replicated parameters another rank of the group contributes.
        self._left_out: set[tuple[int, int]] = set()

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

    def has_several_shards(self, owner: str, index: int) -> bool:
        """Whether some rank runs a block as two different shards."""
        return is_crowded(self.groups(owner, index))

    def prepare(
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
                    self._attributes[stage, index] = (
                        self._windows(f"{owner}.{index}", blocks[index], group, sums)
                        if whole
                        else _comms(blocks[index], sums)
                    )

    def _windows(
        self, where: str, block: nn.Module, group: Ranks, comm: TensorParallelComm
    ) -> list[_GroupAttribute]:
        """The shard of a whole block that its Linears use in a group."""
        index, count = group.index(self._rank), len(group)
        found = window_block(block, index=index, count=count, comm=comm, where=where)
        return [(linear, "tp_window", window if count > 1 else None) for linear, window in found]

    def enter(self, stage: Stage, index: int) -> None:
        """Let a block compute its shard in the group of the stage that runs it now."""
        for linear, name, value in self._attributes.get((stage.index, index), ()):
            # Past nn.Module's __setattr__: a comm that is a module must not become a child.
            object.__setattr__(linear, name, value)

    def leave_out(self, stage: Stage, index: int) -> None:
        """Take a block's replicated gradients from the first rank of a stage's group only."""
        if stage.place(self._rank)[1] > 0:
            self._left_out.add((stage.index, index))

    def hook(self, index: int, parameter: nn.Parameter) -> None:
        """Let :meth:`leave_out` hold for a replicated parameter of a block."""
        parameter.register_hook(partial(self._contributed, index))

    def _contributed(self, index: int, gradient: Tensor) -> Tensor | None:
        return torch.zeros_like(gradient) if (self.running, index) in self._left_out else None


def _comms(block: nn.Module, comm: TensorParallelComm) -> list[_GroupAttribute]:
    """The group in which the Linears of a cut block sum."""
    linears = (module for module in block.modules() if isinstance(module, CutLinear))
    return [(linear, "tp_comm", comm) for linear in linears]
