"""Ranges of a module's blocks: trainable ones, those that a gradient passes, shares of a sum."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

Blocks = tuple[int, int]
Ranges = Sequence[Blocks]


def gradient_blocks(
    blocks: Blocks, trainable: Ranges | None, *, input_gradient: bool
) -> Blocks | None:
    """The blocks of a stage that a gradient passes: all from the first trainable one.

    Args:
        blocks: the stage.
        trainable: ranges of blocks that train, None for all.
        input_gradient: whether something before the stage takes a gradient.

    Returns:
        A range that ends where the stage ends, or None where no gradient is needed.
    """
    if input_gradient:
        return blocks
    starts = [start for start, _ in overlaps(blocks, trainable)]
    return (min(starts), blocks[1]) if starts else None


def overlaps(blocks: Blocks, ranges: Ranges | None) -> list[Blocks]:
    """The parts of ``blocks`` that lie in the ranges; all of it without ranges."""
    if ranges is None:
        return [blocks]
    cut = ((max(a, blocks[0]), min(b, blocks[1])) for a, b in ranges)
    return [(a, b) for a, b in cut if a < b]


def running_shares(weights: Sequence[float] | None, blocks: int) -> tuple[float, ...]:
    """Share of the first 0, 1, ... blocks; equal blocks without weights, or when all are zero."""
    if weights is None or not sum(weights):
        return tuple(i / blocks for i in range(blocks + 1))
    totals = [0.0, *accumulate(weights)]
    return tuple(total / totals[-1] for total in totals)
