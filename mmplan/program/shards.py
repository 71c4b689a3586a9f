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

A rank that runs a block as two different shards (in groups of two sizes, say) holds it whole,
and each group uses its shard of it. No choice of ranks would then bring whole parameters once
for each group, so in such a *crowded* block the first rank of each group brings them, and the
backwards of the others leave them out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

# Bytes of a gradient bucket. A sum needs one bucket of memory beside the gradients; smaller
# buckets would pay the latency more often. Chosen by hand.
BUCKET_BYTES = 1 << 26

Ranks = tuple[int, ...]
# Half-open, in shards.
Span = tuple[int, int]
# Of parameters: those that tensor parallelism cuts, those that it leaves whole, or both.
Kind = Literal["all", "cut", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSum:
    """One sum of gradients of a block.

    Attributes:
        tp: shards are of this size: a cut parameter has so many.
        shards: half-open range of the shards that are summed.
        parameters: of which kind.
        ranks: sorted; one only where a part of its shard is held by no other.
        contributors: those of them that bring the gradients of whole parameters; the others,
            which have the same ones, only take the sum.
    """

    tp: int
    shards: Span
    parameters: Kind
    ranks: Ranks
    contributors: Ranks


def shard_sums(groups: Sequence[Ranks]) -> list[ShardSum]:
    """All sums of a block, parts in order.

    Args:
        groups: distinct tensor-parallel groups that hold the block, ranks by shard.
    """
    if _are_alike(groups):
        # Each shard has one holder in each group.
        return [
            ShardSum(
                tp=len(groups[0]),
                shards=(index, index + 1),
                parameters="all",
                ranks=holders,
                contributors=holders,
            )
            for index, holders in enumerate(tuple(sorted(own)) for own in zip(*groups, strict=True))
        ]
    held = held_shards(groups)
    tp = math.lcm(*(count for _, count in held.values()))
    parts = _parts(held, tp)
    kind = "all" if len(parts) == 1 else "cut"
    sums = [
        ShardSum(tp=tp, shards=shards, parameters=kind, ranks=holders, contributors=holders)
        for shards, holders in parts
    ]
    if kind == "cut":
        ranks = tuple(sorted(held))
        # Every group has one rank that holds the first part; see the top for crowded blocks.
        bring = ranks if is_crowded(groups) else parts[0][1]
        sums.append(
            ShardSum(tp=tp, shards=(0, tp), parameters="whole", ranks=ranks, contributors=bring)
        )
    return sums


def held_shards(groups: Sequence[Ranks]) -> dict[int, tuple[int, int]]:
    """(shard, of how many) of a block that each rank holds; the whole where it runs two."""
    held: dict[int, tuple[int, int]] = {}
    for group in groups:
        for index, rank in enumerate(group):
            shard = index, len(group)
            held[rank] = shard if held.get(rank, shard) == shard else (0, 1)
    return held


def is_crowded(groups: Sequence[Ranks]) -> bool:
    """Whether a rank runs the block as two different shards."""
    if len(set().union(*groups)) == sum(map(len, groups)):
        return False  # no rank is in two groups
    held = held_shards(groups)
    return any(held[rank] != (t, len(g)) for g in groups for t, rank in enumerate(g))


def writing_ranks(groups: Sequence[Ranks]) -> Ranks:
    """The ranks that save a block: one for each shard, the first one also what is not cut.

    Of equal shards the lowest rank's is saved; where a block has several tp degrees, those of
    the degree under which the lowest rank of all holds it. A rank that runs a block as two
    shards has all of it, and saves it.

    Args:
        groups: as for :func:`shard_sums`.
    """
    if is_crowded(groups):
        return (min(rank for rank, shard in held_shards(groups).items() if shard == (0, 1)),)
    degree = len(min(groups, key=min))
    same = [group for group in groups if len(group) == degree]
    return tuple(min(ranks) for ranks in zip(*same, strict=True))


def _are_alike(groups: Sequence[Ranks]) -> bool:
    """Whether distinct groups are of one size and have no rank in common."""
    size = len(groups[0])
    return {*map(len, groups)} == {size} and len(set().union(*groups)) == len(groups) * size


def _parts(held: Mapping[int, tuple[int, int]], tp: int) -> list[tuple[Span, Ranks]]:
    """The coarsest parts with constant holders, in order; holders ascend."""
    spans = {rank: (i * (tp // n), (i + 1) * (tp // n)) for rank, (i, n) in held.items()}
    ends = sorted({end for span in spans.values() for end in span})
    parts: list[tuple[Span, Ranks]] = []
    for a, b in pairwise(ends):
        holders = tuple(sorted(rank for rank, (x, y) in spans.items() if x <= a and b <= y))
        if parts and parts[-1][1] == holders:
            parts[-1] = (parts[-1][0][0], b), holders
        else:
            parts.append(((a, b), holders))
    return parts
