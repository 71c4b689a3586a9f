"""What costs ask of a program: who meets, which blocks are held and trained, what is gathered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from mmplan.program.model import BlockReduction, Edge, Program, Reduction, Stage

# Gradients are summed so many bytes at a time: what a sum needs beside them is no larger.
BUCKET_BYTES = 1 << 26

# First and end in shards of a tp, that tp, and the ranks that sum this part of a block.
StatePart = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBlock:
    """A block's shard on some rank, and the stage through which its costs are asked."""

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
    """(stage, in its backward) to the edges whose messages its groups gather."""
    found: defaultdict[tuple[int, bool], list[Edge]] = defaultdict(list)
    for edge in program.edges:
        for backward in (False, True):
            if program.shares(edge, backward=backward) > 1:
                found[edge.producer if backward else edge.consumer, backward].append(edge)
    return dict(found)


def trained_blocks(program: Program) -> dict[tuple[str, int], HeldBlock]:
    """Every block that is run, by owner; it trains where any task trains it."""
    blocks: dict[tuple[str, int], HeldBlock] = {}
    for stage in program.stages:
        for block in range(*stage.blocks):
            trains = any(a <= block < b for a, b in stage.trainable)
            known = blocks.get((stage.owner, block))
            blocks[stage.owner, block] = HeldBlock(
                stage=known.stage if known else stage,
                trainable=trains or (known is not None and known.trainable),
            )
    return blocks


def state_parts(reductions: Iterable[Reduction]) -> dict[tuple[str, int], list[StatePart]]:
    """Of each block, its parts and over how many ranks their optimizer state may be spread."""
    found: defaultdict[tuple[str, int], list[StatePart]] = defaultdict(list)
    for item in reductions:
        if isinstance(item, BlockReduction) and item.parameters != "whole":
            for block in range(*item.blocks):
                found[item.owner, block].append((*item.shards, item.tp, len(item.ranks)))
    return dict(found)
