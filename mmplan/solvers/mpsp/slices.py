"""Slices that wait for ranks, and the block shards that they share.

Shape suffixes: N = ranks; B = blocks of a slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mmplan.arrays import Floats

RankRange = tuple[int, int]
"""The first rank, and the one after the last."""

RankGroups = tuple[tuple[int, ...], ...]
"""Ranks of each replica; those of one tensor-parallel group together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnplacedSlice:
    """A segment of a MetaOp with its degrees, times and bytes, to be given ranks.

    Attributes:
        rank_range: ranks that it may use.
        start_s: its start in the schedule.
        after: the slices that end before it starts, each with the bytes a sample that it sends.
        samples: of a round.
        num_microbatches: of a replica; all but the last travel while others are computed.
        owner: the module whose parameters it uses.
        blocks: the first, and the one after the last.
        fixed_bytes: ``[B]`` parameters, gradients and optimizer state of each block on one rank.
        gradient_bytes: ``[B]`` what each rank contributes to the reduction of the gradients.
        activation_bytes: of a round, on one rank.
    """

    tp: int
    dp: int
    rank_range: RankRange
    start_s: float
    forward_s: float
    backward_s: float
    after: tuple[tuple[int, float], ...]
    samples: int
    num_microbatches: int
    owner: str
    blocks: tuple[int, int]
    fixed_bytes: Floats
    gradient_bytes: Floats
    activation_bytes: float

    @property
    def num_groups(self) -> int:
        """Tensor-parallel groups among which its replicas are chosen."""
        return (self.rank_range[1] - self.rank_range[0]) // self.tp

    @property
    def group_ranks(self) -> slice:
        """Ranks of these groups."""
        return slice(self.rank_range[0], self.rank_range[0] + self.num_groups * self.tp)

    def group_max(self, value_N: Floats) -> Floats:
        """The largest value in each of these groups."""
        own = value_N[self.group_ranks]
        return own if self.tp == 1 else own.reshape(-1, self.tp).max(axis=1)

    def group(self, index: int) -> tuple[int, ...]:
        """Ranks of a group."""
        first = self.rank_range[0] + index * self.tp
        return tuple(range(first, first + self.tp))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShard:
    """Blocks that the same slices (by index) run at one degree, and their bytes on one rank."""

    owner: str
    tp: int
    blocks: tuple[int, int]
    slices: tuple[int, ...]
    fixed_bytes: float
    gradient_bytes: float


def block_shards(slices: Sequence[UnplacedSlice]) -> Iterator[BlockShard]:
    """All blocks of the slices, cut wherever a slice of that module and degree begins or ends."""
    members: dict[tuple[str, int], list[int]] = {}
    for i, slice_ in enumerate(slices):
        members.setdefault((slice_.owner, slice_.tp), []).append(i)
    for (owner, tp), own in members.items():
        for a, b in pairwise(sorted({edge for i in own for edge in slices[i].blocks})):
            users = [i for i in own if slices[i].blocks[0] <= a < slices[i].blocks[1]]
            if users:
                cuts = [
                    (slices[i], a - slices[i].blocks[0], b - slices[i].blocks[0]) for i in users
                ]
                yield BlockShard(
                    owner=owner,
                    tp=tp,
                    blocks=(a, b),
                    slices=tuple(users),
                    fixed_bytes=max(float(x.fixed_bytes[c:d].sum()) for x, c, d in cuts),
                    gradient_bytes=max(float(x.gradient_bytes[c:d].sum()) for x, c, d in cuts),
                )
