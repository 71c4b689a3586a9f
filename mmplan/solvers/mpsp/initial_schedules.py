"""Slices to start from: bi-point cuts under rules of urgency, and a configuration program's answer.

A chain that should take some seconds runs on the next larger count first, then on the smaller one,
or the other way round, so that both together take that long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from mmplan.arrays import Floats
from mmplan.solvers.mpsp.bounds import Column
from mmplan.solvers.mpsp.instance import BlockRange, Chain, Instance
from mmplan.solvers.mpsp.list_schedule import ChainSchedule, Pieces, SchedulePiece

# Instants at which chains side by side are balanced.
_BINS = 64


def bi_point(
    counts: Sequence[int], table_s: Floats, span_s: float, *, hull: bool, larger_first: bool
) -> list[tuple[int, int, int]]:
    """Two slices of a chain that together take the span: (count index, first, end).

    A fraction of the blocks on the next larger count, the rest on the smaller one, rounded to
    whole blocks; one slice where the span is beyond either end.

    Args:
        hull: only counts on the concave envelope of the speed.
    """
    total_s = table_s.sum(axis=1)
    steps = _corners(np.array(counts, dtype=np.float64), total_s) if hull else falling(total_s)
    blocks = table_s.shape[1]
    if span_s <= total_s[steps[-1]]:
        return [(steps[-1], 0, blocks)]
    if span_s >= total_s[steps[0]]:
        return [(steps[0], 0, blocks)]
    low, high = next((a, b) for a, b in pairwise(steps) if total_s[b] <= span_s <= total_s[a])
    share = (total_s[low] - span_s) / (total_s[low] - total_s[high])
    first, second, cut = (high, low, share) if larger_first else (low, high, 1 - share)
    until = np.cumsum(table_s[first]) / total_s[first]
    block = int(np.abs(np.append(0.0, until) - cut).argmin())
    return [x for x in ((first, 0, block), (second, block, blocks)) if x[1] < x[2]]


def falling(total_s: Floats) -> list[int]:
    """Counts that are faster than all smaller ones."""
    kept = [0]
    for k in range(1, len(total_s)):
        if total_s[k] < total_s[kept[-1]]:
            kept.append(k)
    return kept


def _corners(counts: Floats, total_s: Floats) -> list[int]:
    """Counts on the envelope, from the most efficient to the fastest."""
    speed, kept = 1 / total_s, [int((counts * total_s).argmin())]
    while True:
        k = kept[-1]
        rise = np.where(
            counts > counts[k], (speed - speed[k]) / np.maximum(counts - counts[k], 1), 0
        )
        if rise.max() <= 0:
            return kept
        kept.append(int(rise.argmax()))


def from_columns(
    instance: Instance,
    tables: Sequence[Sequence[BlockRange]],
    columns: Sequence[Column],
    *,
    order: Sequence[int],
) -> Pieces:
    """The slices of a configuration program's answer, in an order of its columns.

    A slice is as urgent as its column comes early; blocks are rounded so that none is lost.

    Args:
        tables: the parts of each chain.
    """
    own: list[list[tuple[int, float, float]]] = [[] for _ in instance.chains]
    for place, index in enumerate(order):
        column = columns[index]
        for m, p, k in column.choices:
            part = tables[m][p]
            share = column.seconds / part.time_s[k] * part.time_s.min()
            own[m].append((k, share, float(place)))
    totals = [sum(share for _, share, _ in shares) for shares in own]
    return [
        whole_blocks(block_ends(chain.both_s), [(k, s / totals[m], u) for k, s, u in own[m]])
        for m, chain in enumerate(instance.chains)
    ]


def block_ends(table_s: Floats) -> list[float]:
    """Share of a chain's time that lies before each end of a block, from 0 to 1."""
    until = np.cumsum(table_s.sum(axis=0))
    return [0.0, *(until / until[-1]).tolist()]


def whole_blocks(
    ends: Sequence[float], shares: Sequence[tuple[int, float, float]]
) -> list[SchedulePiece]:
    """Slices of whole blocks, each end the nearest to where the shares end.

    What gets no block drops out; shares of one count that follow each other are one slice.

    Args:
        ends: of the blocks, see :func:`block_ends`.
        shares: (count index, share, urgency) of the slices in their order; together 1.
    """
    pieces, done, block = list[SchedulePiece](), 0.0, 0
    for position, (k, share, urgency) in enumerate(shares):
        done += share
        end = len(ends) - 1
        if position < len(shares) - 1:
            end = min(bisect_left(ends, done), end)
            if end > 0 and ends[end] - done > done - ends[end - 1]:
                end -= 1
        if end > block:
            if pieces and pieces[-1][0] == k:
                pieces[-1] = (k, pieces[-1][1], end, pieces[-1][3])
            else:
                pieces.append((k, block, end, urgency))
            block = end
    return pieces


def portfolio(
    instance: Instance, targets: Sequence[Sequence[float]], stretches: Sequence[float]
) -> Iterator[ChainSchedule]:
    """Bi-point slices for several spans, under several rules of urgency.

    Args:
        targets: per way to set them, the seconds that each chain should take.
        stretches: factors of all targets.
    """
    for stretch in stretches:
        for target in targets:
            for hull in (True, False):
                first, second = (
                    [
                        bi_point(
                            c.counts, c.both_s, span * stretch, hull=hull, larger_first=larger_first
                        )
                        for c, span in zip(instance.chains, target, strict=True)
                    ]
                    for larger_first in (True, False)
                )
                for cut in (first, second, _balanced(instance, first, second)):
                    for pieces in _ruled(instance, cut):
                        yield ChainSchedule(pieces)
                        yield ChainSchedule(pieces, strict=True)


Cut = list[list[tuple[int, int, int]]]


def _balanced(instance: Instance, first: Cut, second: Cut) -> Cut:
    """Each chain's larger slice first or second, so that all together need alike at all times."""
    ways = [
        [_needs(c, cut) for cut in pair]
        for c, pair in zip(instance.chains, zip(first, second, strict=True), strict=True)
    ]
    horizon = max(float(ends[-1]) for pair in ways for ends, _ in pair)
    at = (np.arange(_BINS) + 0.5) / _BINS * horizon
    levels: dict[int, Floats] = {}
    chosen: Cut = list(first)
    for m in sorted(range(len(ways)), key=lambda m: -float(ways[m][0][1].max())):
        level = instance.chains[m].level
        used = levels.setdefault(level, np.zeros(_BINS))
        options = [
            used + np.append(counts, 0.0)[np.searchsorted(ends, at)] for ends, counts in ways[m]
        ]
        better = min((0, 1), key=lambda i: float((options[i] ** 2).sum()))
        levels[level] = options[better]
        chosen[m] = (first, second)[better][m]
    return chosen


def _needs(chain: Chain, cut: Sequence[tuple[int, int, int]]) -> tuple[Floats, Floats]:
    """When each slice ends if all start at once, and the devices that it takes."""
    seconds = [float(chain.both_s[k, a:b].sum()) for k, a, b in cut]
    return np.cumsum(seconds), np.array([chain.counts[k] for k, _, _ in cut], dtype=np.float64)


def _ruled(instance: Instance, cut: Sequence[Sequence[tuple[int, int, int]]]) -> Iterator[Pieces]:
    """The slices under each rule: most time left on the way to an end, or in
    the chain and level by level; largest; longest; most device-seconds."""
    chains = instance.chains
    left = [
        [sum(float(c.both_s[k, a:b].sum()) for k, a, b in own[i:]) for i in range(len(own))]
        for c, own in zip(chains, cut, strict=True)
    ]
    tail = [0.0] * len(chains)
    for m in reversed(range(len(chains))):
        for other in chains[m].after:
            tail[other] = max(tail[other], tail[m] + left[m][0])
    far = sum(own[0] for own in left)
    rules = (
        lambda m, i, k, a, b: -(left[m][i] + tail[m]),
        lambda m, i, k, a, b: chains[m].level * far - left[m][i],
        lambda m, i, k, a, b: -chains[m].counts[k] - 1e-3 * i,
        lambda m, i, k, a, b: -float(chains[m].both_s[k, a:b].sum()),
        lambda m, i, k, a, b: -float(chains[m].both_s[k, a:b].sum()) * chains[m].counts[k],
    )
    for rule in rules:
        yield [
            [(k, a, b, float(rule(m, i, k, a, b))) for i, (k, a, b) in enumerate(own)]
            for m, own in enumerate(cut)
        ]
