"""Initial schedules: bi-point cuts and fluid schedules.

A chain that should take a given time runs on the next larger count first and then on the smaller
one, or the other way round, so that both together take that time (bi-point discretization,
Spindle, arXiv:2409.03365, section 3.3).

Fluid schedules share the devices out anew whenever a chain ends. At every such instant each chain
that may run has a time left: until the end C, less its tail, which is the time of the chains after
it. A chain needs the smallest count that finishes it in that time; it needs none yet where it can
wait. Bisection finds the least C for which these needs fit the devices. Devices that are left over
go to chains that waited, then to those with the least slack. Blocks may be cut anywhere here and
are rounded at the end; list scheduling then makes a schedule. The tails decide. They start from the
seconds that the graph's bound gives each chain; a chain with none after it may have to end a little
before C. Random changes follow, of all chains' seconds or of some; a change stays where the
schedule became shorter.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from itertools import pairwise

import numpy as np

from mmplan.arrays import Floats
from mmplan.solvers.mpsp.instance import Instance, faster_counts
from mmplan.solvers.mpsp.list_schedule import ChainSchedule, ChainSegment, ChainSegments

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
                for larger_first in (True, False):
                    cuts = [
                        bi_point(
                            c.counts, c.both_s, span * factor, hull=hull, larger_first=larger_first
                        )
                        for c, span in zip(instance.chains, target, strict=True)
                    ]
                    for segments in _by_priority_rules(instance, cuts):
                        yield ChainSchedule(segments)
                        yield ChainSchedule(segments, strict=True)


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


# All values below are chosen by hand; they trade variety of the draws against depth.
# Slack with which a chain waits, as shares of the longest chain's seconds.
_WAIT_SHARES = (0.0, 0.1, 0.3, math.inf)
# Shares by which the time left may grow so that a chain keeps its count; 0 is drawn twice as often.
_KEEP_SHARES = (0.0, 0.0, 0.02, 0.1)
# Largest relative change of a chain's seconds, where all start from the bound or some change.
_LARGE_CHANGE = 0.3
# Largest relative change where all chains' seconds change together.
_SMALL_CHANGE = 0.1
# Share of the chains that change where some do.
_CHANGED_CHAINS = 0.3
# Chains with none after them end so much before the end at most, as a share of the longest chain's
# seconds: where all end together, their last counts are far from what they need.
_GAP_SHARE = 0.05
# Share of the chains whose gaps change.
_CHANGED_GAPS = 0.2
# Share of the draws that start from the best settings so far.
_FROM_BEST = 0.7
# Share of these that draw the other settings anew.
_NEW_RULES = 0.2
# Share of the draws that are patient.
_PATIENT = 0.2
# The end C is found to this part of the range.
_PARTS = 16_384
# The search for it goes from the last end in steps that become longer by this factor.
_FURTHER = 4
# Shares of a chain below this are rounding errors: it has ended.
_DONE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidSettings:
    """Parameters of a fluid schedule.

    Attributes:
        spans_s: assumed seconds of each chain; the tails are sums of them.
        gaps_s: the tail of each chain that has none after it.
        wait_s: a chain with more slack than this does not start yet.
        patient: slack is computed with the chain's largest count, else with its smallest.
        keep_share: share by which the time left may grow so that a chain keeps its count.
    """

    spans_s: tuple[float, ...]
    gaps_s: tuple[float, ...]
    wait_s: float
    patient: bool
    keep_share: float


class FluidScheduler:
    """Draws settings around the graph bound's seconds of each chain, and makes their segments.

    Attributes:
        looked: for how many devices it asked so far what one chain needs.
    """

    def __init__(self, instance: Instance, spans_s: Sequence[float], rng: random.Random) -> None:
        chains = instance.chains
        self.looked = 0
        self._devices = instance.devices
        self._rng = rng
        self._spans_s = tuple(spans_s)
        self._longest_s = max(spans_s)
        totals = [c.both_s.sum(axis=1) for c in chains]
        self._kept = [faster_counts(own) for own in totals]
        pairs = list(zip(chains, totals, self._kept, strict=True))
        self._counts = [[c.counts[k] for k in kept] for c, _, kept in pairs]
        # Speeds ascend with the counts: bisection finds the smallest count that is fast enough.
        self._seconds = [[float(total[k]) for k in kept] for _, total, kept in pairs]
        self._speeds = [[1 / x for x in own] for own in self._seconds]
        self._then = instance.successors()
        self._num_before = [len(set(c.after)) for c in chains]
        self._ends = [block_ends(chain.both_s) for chain in chains]

    def draw(self, best: FluidSettings | None) -> FluidSettings:
        """Random settings near the best ones, or anywhere."""
        rng = self._rng
        if best is None or rng.random() > _FROM_BEST:
            spans = tuple(self._changed(x, _LARGE_CHANGE) for x in self._spans_s)
            return self._with_new_rules(spans, tuple(self._gap() for _ in spans))
        if rng.random() < 0.5:
            spans = tuple(
                self._changed(x, _LARGE_CHANGE) if rng.random() < _CHANGED_CHAINS else x
                for x in best.spans_s
            )
        else:
            spans = tuple(self._changed(x, _SMALL_CHANGE) for x in best.spans_s)
        gaps = tuple(self._gap() if rng.random() < _CHANGED_GAPS else x for x in best.gaps_s)
        if rng.random() < _NEW_RULES:
            return self._with_new_rules(spans, gaps)
        return replace(best, spans_s=spans, gaps_s=gaps)

    def _changed(self, span_s: float, change: float) -> float:
        return span_s * (1 + self._rng.uniform(-change, change))

    def _gap(self) -> float:
        return self._longest_s * self._rng.uniform(0, _GAP_SHARE)

    def first(self) -> list[FluidSettings]:
        """The bound's own seconds, with each rule of waiting."""
        return [
            FluidSettings(
                spans_s=self._spans_s,
                gaps_s=(0.0,) * len(self._spans_s),
                wait_s=share * self._longest_s,
                patient=patient,
                keep_share=0.0,
            )
            for patient in (True, False)
            for share in _WAIT_SHARES
        ]

    def _with_new_rules(
        self, spans_s: tuple[float, ...], gaps_s: tuple[float, ...]
    ) -> FluidSettings:
        rng = self._rng
        return FluidSettings(
            spans_s=spans_s,
            gaps_s=gaps_s,
            wait_s=rng.choice(_WAIT_SHARES) * self._longest_s,
            patient=rng.random() < _PATIENT,
            keep_share=rng.choice(_KEEP_SHARES),
        )

    def segments(self, settings: FluidSettings) -> ChainSegments:
        """The segments of the settings' schedule; the priority of each is its start."""
        spans_s, tails = settings.spans_s, list(settings.gaps_s)
        for m in reversed(range(len(tails))):
            if self._then[m]:
                tails[m] = max(tails[j] + spans_s[j] for j in self._then[m])
        state = _State(self._num_before, tails)
        shares: list[list[tuple[int, float, float]]] = [[] for _ in self._num_before]
        while state.active:
            self._share_out(state, settings)
            self._advance(state, shares)
        return [whole_blocks(ends, own) for ends, own in zip(self._ends, shares, strict=True)]

    def _share_out(self, state: _State, settings: FluidSettings) -> None:
        """Choose counts for the chains that may run now."""
        end_s, wanted = self._least_end(state, settings)
        if settings.keep_share and state.chosen:
            later_s = state.now + (end_s - state.now) * (1 + settings.keep_share)
            smallest, _ = self._needs(state, later_s, settings)
            for m, i in state.chosen.items():
                if smallest[m] <= i <= wanted[m] + 2:
                    wanted[m] = i
        # The least slack on the smallest count comes first.
        order = sorted(
            state.active, key=lambda m: end_s - state.tails[m] - state.left[m] * self._seconds[m][0]
        )
        chosen, free = state.chosen, self._devices
        chosen.clear()
        for m in order:
            if wanted[m] >= 0:
                i = min(wanted[m], bisect_right(self._counts[m], free) - 1)
                if i >= 0:
                    chosen[m], free = i, free - self._counts[m][i]
        for m in order:
            if wanted[m] < 0 and self._counts[m][0] <= free:
                chosen[m], free = 0, free - self._counts[m][0]
        self._extend(state, end_s, free)

    def _extend(self, state: _State, end_s: float, free: int) -> None:
        """Give the free devices to the chain with the least slack, one count up at a time."""
        chosen = state.chosen
        slack = [
            (end_s - state.tails[m] - state.left[m] * self._seconds[m][i], m)
            for m, i in chosen.items()
        ]
        heapify(slack)
        while slack and free > 0:
            m = slack[0][1]
            counts, i = self._counts[m], chosen[m] + 1
            if i == len(counts) or counts[i] - counts[i - 1] > free:
                heappop(slack)
                continue
            chosen[m], free = i, free - counts[i] + counts[i - 1]
            heapreplace(slack, (end_s - state.tails[m] - state.left[m] * self._seconds[m][i], m))

    def _least_end(self, state: _State, settings: FluidSettings) -> tuple[float, dict[int, int]]:
        """The least end for which all needs fit the devices, and these needs."""
        low = high = 0.0
        for m in state.active:
            base, left = state.now + state.tails[m], state.left[m]
            low = max(low, base + left * self._seconds[m][-1])
            high = max(high, base + left * self._seconds[m][0])
        wanted, devices = self._needs(state, low, settings)
        if devices <= self._devices:
            return low, wanted
        least_s = step_s = (high - low) / _PARTS
        # Mostly it is about what it was when the last chain ended.
        middle, best = state.end_s, None
        if not low < middle < high:
            middle = (low + high) / 2
        while high - low > least_s and low < middle < high:
            wanted, devices = self._needs(state, middle, settings)
            if devices <= self._devices:
                high, best = middle, wanted
                middle = max(high - step_s, (low + high) / 2)
            else:
                low = middle
                middle = min(low + step_s, (low + high) / 2)
            step_s *= _FURTHER
        state.end_s = high
        return high, self._needs(state, high, settings)[0] if best is None else best

    def _needs(
        self, state: _State, end_s: float, settings: FluidSettings
    ) -> tuple[dict[int, int], int]:
        """Position of the count that each chain needs, -1 where it can wait; and all devices."""
        found: dict[int, int] = {}
        devices, fastest = 0, -1 if settings.patient else 0
        left, tails, chosen = state.left, state.tails, state.chosen
        counts, all_speeds, all_seconds = self._counts, self._speeds, self._seconds
        time_s, wait_s = (end_s - state.now) * (1 + _DONE), settings.wait_s
        self.looked += len(state.active)
        for m in state.active:
            own_s, speeds = time_s - tails[m], all_speeds[m]
            if m not in chosen and own_s - left[m] * all_seconds[m][fastest] > wait_s:
                found[m] = -1
                continue
            i = len(speeds) - 1
            if own_s > 0:
                i = min(bisect_left(speeds, left[m] / own_s), i)
            found[m] = i
            devices += counts[m][i]
        return found, devices

    def _advance(self, state: _State, shares: list[list[tuple[int, float, float]]]) -> None:
        """Run the chosen chains until the first one ends."""
        step_s = min(state.left[m] * self._seconds[m][i] for m, i in state.chosen.items())
        for m, i in list(state.chosen.items()):
            done = min(state.left[m], step_s * self._speeds[m][i])
            shares[m].append((self._kept[m][i], done, state.now))
            state.left[m] -= done
            if state.left[m] <= _DONE:
                state.end(m, self._then[m])
        state.now += step_s


class _State:
    """Progress of a fluid schedule: what share of each chain is left, and which chains may run.

    Attributes:
        chosen: position of the count of each chain that runs.
        end_s: the least end that was found last.
    """

    def __init__(self, num_before: Sequence[int], tails: list[float]) -> None:
        self.now, self.end_s = 0.0, 0.0
        self.tails = tails
        self.left = [1.0] * len(tails)
        self.active = [m for m, count in enumerate(num_before) if not count]
        self.chosen: dict[int, int] = {}
        self._num_before = list(num_before)

    def end(self, m: int, then: Sequence[int]) -> None:
        """End a chain; those after it may run once all their producers have ended."""
        self.active.remove(m)
        del self.chosen[m]
        for other in then:
            self._num_before[other] -= 1
            if not self._num_before[other]:
                self.active.append(other)
