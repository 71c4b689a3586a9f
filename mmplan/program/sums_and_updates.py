"""The end of a step: gradients summed over ranks, and which rank updates what from them.

An update holds for parameters that the same ranks hold and sum. Parameters that tensor
parallelism leaves whole are on all ranks of a group. Where the groups are alike, the ranks of
each tensor-parallel index sum and update them apart, with equal results, and those of the first
index alone count in the norm of all gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any, TypeVar

from mmplan.program.model import (
    BlockReduction,
    BlockUpdate,
    Graph,
    LossReduction,
    LossUpdate,
    ParameterUpdate,
    Reduction,
    Stage,
    TieReduction,
    TieUpdate,
)
from mmplan.program.shards import Kind, Ranks, ShardSum, Span, shard_sums, writing_ranks
from mmplan.program.ties import groups_of

T = TypeVar("T")


def sums_and_updates(
    graph: Graph, *, loss_zero: bool
) -> tuple[list[Reduction], list[ParameterUpdate]]:
    """The reductions and the updates of a graph with all its stages and losses.

    Args:
        graph: the graph.
        loss_zero: whether the optimizer's state of losses' parameters is cut over the ranks of
            each sum (ZeRO-1); of blocks their stages say it.
    """
    reductions: list[Reduction] = []
    updates: list[ParameterUpdate] = []
    for owner in dict.fromkeys(stage.owner for stage in graph.stages):
        stages = [s for s in graph.stages if s.owner == owner]
        zero = any(stage.zero for stage in stages)
        held = [
            (blocks, shard_sums(groups), writing_ranks(groups))
            for blocks, groups in _trained_ranges(stages)
        ]
        for blocks, total in _merged((blocks, sums) for blocks, sums, _ in held):
            if _is_summed(total):
                index = len(reductions)
                reductions.append(
                    BlockReduction(index=index, owner=owner, blocks=blocks, **_fields(total))
                )
        together = ((blocks, [(x, writing) for x in sums]) for blocks, sums, writing in held)
        for blocks, (total, writing) in _merged(together):
            updates += (
                BlockUpdate(owner=owner, blocks=blocks, **own)
                for own in _updates(total, writing, zero=zero)
            )
        for tied in graph.ties.get(owner, ()):
            if not all(_trains(stages, block) for block in tied):
                continue
            # They are saved under the name of the first block.
            writing = writing_ranks(groups_of(stages, owner, tied[:1]))
            for total in shard_sums(groups_of(stages, owner, tied)):
                updates += (
                    TieUpdate(owner=owner, blocks=tied, **own)
                    for own in _updates(total, writing, zero=zero)
                )
                if _is_summed(total):
                    index = len(reductions)
                    reductions.append(
                        TieReduction(index=index, owner=owner, blocks=tied, **_fields(total))
                    )
    for name in dict.fromkeys(loss.name for loss in graph.losses):
        ranks = tuple(sorted({r for loss in graph.losses if loss.name == name for r in loss.ranks}))
        sharded = loss_zero and len(ranks) > 1
        counted = ranks if sharded else ranks[:1]
        updates.append(LossUpdate(owner=name, ranks=ranks, sharded=sharded, counted=counted))
        if len(ranks) > 1:
            reductions.append(LossReduction(index=len(reductions), owner=name, ranks=ranks))
    return reductions, updates


def _trained_ranges(stages: Sequence[Stage]) -> Iterator[tuple[Span, list[Ranks]]]:
    """Ranges of a module's blocks that some stage trains, with the groups that hold them."""
    cuts = sorted({x for s in stages for span in (s.blocks, *s.trainable) for x in span})
    for a, b in pairwise(cuts):
        holders = [s for s in stages if s.blocks[0] <= a and b <= s.blocks[1]]
        if any(x <= a and b <= y for s in holders for x, y in s.trainable):
            yield (a, b), list(dict.fromkeys(group for s in holders for group in s.holders))


def _merged(found: Iterable[tuple[Span, list[T]]]) -> Iterator[tuple[Span, T]]:
    """The values of ranges of blocks, each with the largest range that has the same ones."""
    merged: list[tuple[Span, list[T]]] = []
    for (a, b), values in found:
        if merged and merged[-1][0][1] == a and merged[-1][1] == values:
            merged[-1] = (merged[-1][0][0], b), values
        else:
            merged.append(((a, b), values))
    for blocks, values in merged:
        for value in values:
            yield blocks, value


def _fields(total: ShardSum) -> dict[str, Any]:
    """By name; ``asdict`` would copy the ranks one by one."""
    return {field.name: getattr(total, field.name) for field in fields(total)}


def _is_summed(total: ShardSum) -> bool:
    # A part that one rank has alone is summed too: ZeRO-1 updates shards by their parts.
    return len(total.ranks) > 1 or total.parameters == "cut"


def _updates(total: ShardSum, writing: Ranks, *, zero: bool) -> Iterator[dict[str, Any]]:
    """The updates of what one sum has: cut and whole parameters count on other ranks."""
    sharded = zero and _is_summed(total)
    alone = total.ranks if sharded else tuple(rank for rank in writing if rank in total.ranks)
    # Kind of parameters to their shards and to the ranks that count.
    kinds: dict[Kind, tuple[Span, Ranks]] = {total.parameters: (total.shards, alone)}
    if total.parameters == "all" and total.tp > 1:
        first = total.shards[0] == 0
        kinds = {"cut": (total.shards, alone), "whole": ((0, total.tp), alone if first else ())}
    elif total.parameters == "whole" and not sharded:
        kinds = {"whole": (total.shards, writing[:1])}
    for parameters, (shards, counted) in kinds.items():
        yield {
            "parameters": parameters,
            "tp": total.tp,
            "shards": shards,
            "ranks": total.ranks,
            "sharded": sharded,
            "counted": counted,
        }


def _trains(stages: Sequence[Stage], block: int) -> bool:
    return any(a <= block < b for stage in stages for a, b in stage.trainable)
