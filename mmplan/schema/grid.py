"""The ranks of a unit as a grid: replicas of pipeline stages of tensor-parallel groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

# Ranks of a tensor-parallel group, in the order of their shards.
TPGroup = tuple[int, ...]


@dataclass(frozen=True)
class RankGrid:
    """Ranks ``[dp][pp][tp]``, and the ways to walk over them. A new axis is added here.

    Attributes:
        ranks: as they stand in plan.json.
    """

    ranks: tuple[tuple[TPGroup, ...], ...]

    @staticmethod
    def consecutive(start: int, dp: int, pp: int, tp: int) -> RankGrid:
        """Ranks from ``start`` on: groups inside stages inside replicas."""
        firsts = [[start + (d * pp + p) * tp for p in range(pp)] for d in range(dp)]
        return RankGrid(tuple(tuple(tuple(range(r, r + tp)) for r in row) for row in firsts))

    @property
    def dp(self) -> int:
        """Number of replicas."""
        return len(self.ranks)

    @property
    def pp(self) -> int:
        """Pipeline stages of a replica."""
        return len(self.ranks[0])

    @property
    def tp(self) -> int:
        """Ranks of a tensor-parallel group."""
        return len(self.ranks[0][0])

    def groups(self) -> Iterator[tuple[int, int, TPGroup]]:
        """(replica, pipeline position, ranks) of every tensor-parallel group, in that order."""
        for d, replica in enumerate(self.ranks):
            for p, group in enumerate(replica):
                yield d, p, group

    def stage(self, position: int) -> tuple[TPGroup, ...]:
        """``[dp][tp]``: the group of every replica at a pipeline position."""
        return tuple(replica[position] for replica in self.ranks)

    def replica(self, d: int) -> tuple[int, ...]:
        """Ranks of a replica, position by position."""
        return tuple(rank for group in self.ranks[d] for rank in group)

    @cached_property
    def members(self) -> tuple[int, ...]:
        """Every rank, in the order of the grid."""
        return tuple(rank for _, _, group in self.groups() for rank in group)

    def on(self, ranks: Sequence[int]) -> RankGrid:
        """The same grid on other devices: rank r becomes ``ranks[r]``."""
        return RankGrid(
            tuple(tuple(tuple(ranks[r] for r in g) for g in replica) for replica in self.ranks)
        )
