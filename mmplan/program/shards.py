"""Which ranks sum which part of a block, when its tensor-parallel groups may differ in size.

A group of d ranks cuts every cut parameter into d equal shards, in order. The ends of all
groups' shards cut the parameter into *parts*, the coarsest ones that always have the same
holders: of groups of 2 and of 4 the four quarters, of 2 and 3 the sixths [0,2), [2,3), [3,4)
and [4,6). The gradient of a part is summed over its holders, one in each group.

Parameters that tensor parallelism leaves whole have equal gradients on all ranks of a group,
so of each group one rank brings it. Where all groups are of one size and have no rank in
common, one sum for each shard serves cut and whole parameters alike. Else whole parameters
have one sum over all ranks: sums of other ranks in another order differ in their last bits,
and copies would drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from mmplan.errors import InvalidInputError

Ranks = tuple[int, ...]
# Half-open, in shards.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSum:
    """One sum of gradients of a block.

    Attributes:
        tp: shards are of this size: a cut parameter has so many.
        shards: the shards summed.
        parameters: cut ones, whole ones, or both.
        ranks: who gets the sum, in ascending order.
        adds: those of them whose gradients of whole parameters are summed.
    """

    tp: int
    shards: Span
    parameters: Literal["all", "cut", "whole"]
    ranks: Ranks
    adds: Ranks


def shard_sums(groups: Sequence[Ranks]) -> list[ShardSum]:
    """All sums of a block, parts in order.

    Args:
        groups: distinct tensor-parallel groups that hold the block, ranks by shard. A rank may
            be in several, as the same shard.
    """
    tp = math.lcm(*map(len, groups))
    parts = _parts(groups, tp)
    kind = "all" if _are_alike(groups) else "cut"
    sums = [
        ShardSum(tp=tp, shards=shards, parameters=kind, ranks=holders, adds=holders)
        for shards, holders in parts
    ]
    if kind == "cut":
        ranks = tuple(sorted({rank for group in groups for rank in group}))
        # Every group has one rank that holds the first part.
        sums.append(
            ShardSum(tp=tp, shards=(0, tp), parameters="whole", ranks=ranks, adds=parts[0][1])
        )
    return sums


def whole_sums(groups: Sequence[Ranks]) -> list[tuple[Ranks, Ranks]]:
    """(ranks, those that bring a gradient) of each sum of a parameter that is not cut.

    Args:
        groups: as for :func:`shard_sums`, but a rank may be in them as different shards.

    Raises:
        InvalidInputError: no choice of ranks has one of each group.
    """
    if _are_alike(groups):
        return [(ranks, ranks) for ranks in (tuple(sorted(r)) for r in zip(*groups, strict=True))]
    ranks = tuple(sorted({rank for group in groups for rank in group}))
    return [(ranks, _one_of_each(groups))]


def _are_alike(groups: Sequence[Ranks]) -> bool:
    """Whether distinct groups are of one size and have no rank in common."""
    size = len(groups[0])
    num_ranks = len({rank for group in groups for rank in group})
    return all(len(group) == size for group in groups) and num_ranks == len(groups) * size


def shard_clash(groups: Sequence[Ranks]) -> tuple[int, Ranks, Ranks] | None:
    """The first rank that would hold a block as two different shards, and in which groups.

    A rank has room for one shard of a block: plans that ask for two are refused when they are
    compiled, so who places units must leave them out.
    """
    held: dict[int, tuple[int, Ranks]] = {}
    for group in groups:
        for index, rank in enumerate(group):
            first, other = held.setdefault(rank, (index, group))
            if (first, len(other)) != (index, len(group)):
                return rank, other, group
    return None


def _parts(groups: Sequence[Ranks], tp: int) -> list[tuple[Span, Ranks]]:
    """The coarsest parts with constant holders, in order; holders ascend."""
    ends = sorted({index * (tp // len(g)) for g in groups for index in range(len(g) + 1)})
    parts: list[tuple[Span, Ranks]] = []
    for a, b in pairwise(ends):
        holders = tuple(sorted({group[a * len(group) // tp] for group in groups}))
        if parts and parts[-1][1] == holders:
            parts[-1] = (parts[-1][0][0], b), holders
        else:
            parts.append(((a, b), holders))
    return parts


def _one_of_each(groups: Sequence[Ranks]) -> Ranks:
    """Ranks of which every group has exactly one."""
    chosen: set[int] = set()
    refused: set[int] = set()
    for group in sorted(groups, key=len):
        if not chosen & set(group):
            chosen.update([rank for rank in group if rank not in refused][:1])
        refused |= set(group) - chosen
    if any(len(chosen & set(group)) != 1 for group in groups):
        raise InvalidInputError(
            f"no ranks stand for each of the tp groups {[list(group) for group in groups]} once, "
            "which a tied parameter needs",
            hint="keep the order of ranks inside the tp groups of a module with tied parameters",
        )
    return tuple(sorted(chosen))
