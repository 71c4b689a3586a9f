"""Initial schedules: bi-point cuts under priority rules, and a configuration program's answer.

A chain that should take a given time runs on the next larger count first and then on the smaller
one, or the other way round, so that both together take that time (bi-point discretization,
Spindle, arXiv:2409.03365, section 3.3).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from mmplan.arrays import Floats
from mmplan.solvers.mpsp.bounds import Column
from mmplan.solvers.mpsp.instance import Instance, faster_counts
from mmplan.solvers.mpsp.list_schedule import ChainSchedule, ChainSegment, ChainSegments

# Instants at which the devices used by chains side by side are compared. Chosen by hand: more
# instants see shorter peaks and take longer.
_INSTANTS = 64
# In devices, what a later segment counts more where the larger count goes first: it breaks ties.
_LATER_SEGMENT = 1e-3

BlockCuts = list[tuple[int, int, int]]
"""(position of the count, first block, block after the last) of a chain's segments, in order."""


def bi_point(
    counts: Sequence[int], table_s: Floats, span_s: float, *, hull: bool, larger_first: bool
) -> BlockCuts:
    """One or two segments of a chain that together take ``span_s`` seconds.

    A fraction of the blocks runs on the next larger count and the rest on the smaller one, rounded
    to whole blocks; one segment where no count is slow or fast enough for the span.

    Args:
        table_s: ``[K, L]`` seconds.
        hull: use only counts on the concave envelope of the speed.
        larger_first: the first segment is on the larger count.
    """
    total_s = table_s.sum(axis=1)
    usable = (
        _envelope(np.array(counts, dtype=np.float64), total_s) if hull else faster_counts(total_s)
    )
    blocks = table_s.shape[1]
    if span_s <= total_s[usable[-1]]:
        return [(usable[-1], 0, blocks)]
    if span_s >= total_s[usable[0]]:
        return [(usable[0], 0, blocks)]
    low, high = next((a, b) for a, b in pairwise(usable) if total_s[b] <= span_s <= total_s[a])
    share = (total_s[low] - span_s) / (total_s[low] - total_s[high])
    first, second, cut = (high, low, share) if larger_first else (low, high, 1 - share)
    until = np.cumsum(table_s[first]) / total_s[first]
    block = int(np.abs(np.append(0.0, until) - cut).argmin())
    return [x for x in ((first, 0, block), (second, block, blocks)) if x[1] < x[2]]


def _envelope(counts: Floats, total_s: Floats) -> list[int]:
    """Counts on the envelope of the speed, from the most efficient to the fastest."""
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
    classes: Sequence[Sequence[Floats]],
    columns: Sequence[Column],
    *,
    order: Sequence[int],
) -> ChainSegments:
    """The segments of a configuration program's answer, in a given order of its columns.

    The priority of a segment is the position of its column in that order. Blocks are rounded so
    that none is lost.

    Args:
        classes: ``[K]`` seconds of the scaling classes of each chain, forward and backward.
    """
    shares: list[list[tuple[int, float, float]]] = [[] for _ in instance.chains]
    for position, index in enumerate(order):
        column = columns[index]
        for m, c, k in column.choices:
            time_s = classes[m][c]
            share = column.seconds / time_s[k] * time_s.min()
            shares[m].append((k, share, float(position)))
    totals = [sum(share for _, share, _ in own) for own in shares]
    return [
        whole_blocks(
            block_ends(chain.both_s),
            [(k, share / totals[m], priority) for k, share, priority in shares[m]],
        )
        for m, chain in enumerate(instance.chains)
    ]


def block_ends(table_s: Floats) -> list[float]:
    """Share of a chain's time before each end of a block, from 0 to 1, of a ``[K, L]`` table."""
    until = np.cumsum(table_s.sum(axis=0))
    return [0.0, *(until / until[-1]).tolist()]


def whole_blocks(
    ends: Sequence[float], shares: Sequence[tuple[int, float, float]]
) -> list[ChainSegment]:
    """Segments of whole blocks; each ends at the block end nearest to where its share ends.

    A share that gets no block is left out. Neighbouring shares of one count become one segment.

    Args:
        ends: of the blocks, see :func:`block_ends`.
        shares: (position of the count, share, priority) in block order; the shares add up to 1.
    """
    segments, done, block = list[ChainSegment](), 0.0, 0
    for position, (k, share, priority) in enumerate(shares):
        done += share
        end = len(ends) - 1
        if position < len(shares) - 1:
            end = min(bisect_left(ends, done), end)
            if end > 0 and ends[end] - done > done - ends[end - 1]:
                end -= 1
        if end > block:
            append_merged(segments, ChainSegment(k, block, end, priority))
            block = end
    return segments


def append_merged(segments: list[ChainSegment], segment: ChainSegment) -> None:
    """Append a segment, or lengthen the last one where both are on the same count."""
    if segments and segments[-1].k == segment.k:
        segments[-1] = segments[-1]._replace(end=segment.end)
    else:
        segments.append(segment)


def portfolio(
    instance: Instance, targets: Sequence[Sequence[float]], factors: Sequence[float]
) -> Iterator[ChainSchedule]:
    """Bi-point segments for several target times, under several priority rules.

    Args:
        targets: each gives the seconds that each chain should take.
        factors: all targets are tried times each of these.
    """
    for factor in factors:
        for target in targets:
            for hull in (True, False):
                first, second = (
                    [
                        bi_point(
                            c.counts, c.both_s, span * factor, hull=hull, larger_first=larger_first
                        )
                        for c, span in zip(instance.chains, target, strict=True)
                    ]
                    for larger_first in (True, False)
                )
                for cuts in (first, second, _balanced(instance, first, second)):
                    for segments in _by_priority_rules(instance, cuts):
                        yield ChainSchedule(segments)
                        yield ChainSchedule(segments, strict=True)


def _balanced(
    instance: Instance, first: list[BlockCuts], second: list[BlockCuts]
) -> list[BlockCuts]:
    """Per chain the first or the second cuts, so that a level uses devices evenly over time."""
    # Of both cuts of each chain, the end and the devices of each segment from a start at 0.
    usages = [
        [
            (
                np.cumsum([float(c.both_s[k, a:b].sum()) for k, a, b in cuts]),
                np.array([c.counts[k] for k, _, _ in cuts], dtype=np.float64),
            )
            for cuts in pair
        ]
        for c, *pair in zip(instance.chains, first, second, strict=True)
    ]
    horizon = max(float(ends[-1]) for pair in usages for ends, _ in pair)
    at = (np.arange(_INSTANTS) + 0.5) / _INSTANTS * horizon
    used_by_level: dict[int, Floats] = {}
    chosen = list(first)
    for m in sorted(range(len(usages)), key=lambda m: -float(usages[m][0][1].max())):
        level = instance.chains[m].level
        used = used_by_level.setdefault(level, np.zeros(_INSTANTS))
        options = [
            used + np.append(counts, 0.0)[np.searchsorted(ends, at)] for ends, counts in usages[m]
        ]
        better = min((0, 1), key=lambda i: float((options[i] ** 2).sum()))
        used_by_level[level] = options[better]
        chosen[m] = (first, second)[better][m]
    return chosen


def _by_priority_rules(instance: Instance, cuts: Sequence[BlockCuts]) -> Iterator[ChainSegments]:
    """The segments under each priority rule.

    First comes the segment with the longest path to an end; on the first level and with most of
    its chain left; on most devices; that takes longest; that takes most device-seconds.
    """
    chains = instance.chains
    seconds = [
        [float(c.both_s[k, a:b].sum()) for k, a, b in own]
        for c, own in zip(chains, cuts, strict=True)
    ]
    left = [[sum(own[i:]) for i in range(len(own))] for own in seconds]
    tail = [0.0] * len(chains)
    for m in reversed(range(len(chains))):
        for other in chains[m].after:
            tail[other] = max(tail[other], tail[m] + left[m][0])
    all_s = sum(own[0] for own in left)
    rules = (
        lambda m, i, n: -(left[m][i] + tail[m]),
        lambda m, i, n: chains[m].level * all_s - left[m][i],
        lambda m, i, n: -n - _LATER_SEGMENT * i,
        lambda m, i, n: -seconds[m][i],
        lambda m, i, n: -seconds[m][i] * n,
    )
    for rule in rules:
        yield [
            [
                ChainSegment(k, a, b, float(rule(m, i, chains[m].counts[k])))
                for i, (k, a, b) in enumerate(own)
            ]
            for m, own in enumerate(cuts)
        ]
