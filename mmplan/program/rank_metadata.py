"""Metadata of a program for its costs: collective groups, trained blocks, gathered edges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from mmplan.program.model import BlockReduction, Edge, Program, Reduction, Stage

# Bytes of a gradient bucket. A sum needs one bucket of memory beside the gradients; smaller
# buckets would pay the latency more often. Chosen by hand.
BUCKET_BYTES = 1 << 26

# A part of a block: first and end in shards of a tp, that tp, and the number of ranks that sum it.
StatePart = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInfo:
    """A block of a module: the stage that its costs are asked for, and whether it trains."""

    stage: Stage
    trainable: bool


def collective_groups(program: Program) -> set[frozenset[int]]:
    """Ranks of every collective."""
    return {
        *(frozenset(group) for stage in program.stages for group in stage.ranks),
        *(frozenset(reduction.ranks) for reduction in program.reductions),
        *(frozenset(loss.ranks) for loss in program.losses),
    }


def gathered_edges(program: Program) -> dict[tuple[int, bool], list[Edge]]:
    """(stage, whether its backward) to the edges whose messages its groups gather."""
    found: defaultdict[tuple[int, bool], list[Edge]] = defaultdict(list)
    for edge in program.edges:
        for backward in (False, True):
            if program.shares(edge, backward=backward) > 1:
                found[edge.producer if backward else edge.consumer, backward].append(edge)
    return dict(found)


def trained_blocks(program: Program) -> dict[tuple[str, int], BlockInfo]:
    """Every block of the program, by owner; it trains where any task trains it."""
    blocks: dict[tuple[str, int], BlockInfo] = {}
    for stage in program.stages:
        for block in range(*stage.blocks):
            trains = any(a <= block < b for a, b in stage.trainable)
            known = blocks.get((stage.owner, block))
            blocks[stage.owner, block] = BlockInfo(
                stage=known.stage if known else stage,
                trainable=trains or (known is not None and known.trainable),
            )
    return blocks


def state_parts(reductions: Iterable[Reduction]) -> dict[tuple[str, int], list[StatePart]]:
    """The parts of each block, with the number of ranks that may shard their optimizer state."""
    found: defaultdict[tuple[str, int], list[StatePart]] = defaultdict(list)
    for item in reductions:
        if isinstance(item, BlockReduction) and item.parameters != "whole":
            for block in range(*item.blocks):
                found[item.owner, block].append((*item.shards, item.tp, len(item.ranks)))
    return dict(found)
