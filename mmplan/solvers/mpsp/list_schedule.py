"""List scheduling of segments.

A :class:`ChainSchedule` says how each chain's blocks are cut into segments, on which count each
segment runs, and its priority. Decoding starts at every instant the segments that are ready and
fit, by priority; nothing waits for a wave to end. The backward runs the same segments in mirror
image: the segment that ended last starts first.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from mmplan.arrays import Floats
from mmplan.solvers.mpsp.instance import GradientSum, Instance, backward_ratio

# Times that differ by less than this share are one instant: sums of times are rounded.
_SAME_INSTANT = 1e-12
# Cost of one more segment as a share of the time, to break ties. Chosen by hand.
_SEGMENT_COST = 1e-5
# Weight of ScheduleTimes.packed_s in the guide: spared devices, and work done earlier, may move the
# end later. Chosen by hand.
_PACKED_WEIGHT = 0.5


class ChainSegment(NamedTuple):
    """Consecutive blocks of a chain on one device count.

    Attributes:
        k: position in the chain's counts.
        first: the first block.
        end: the block after the last.
        priority: of all segments that are ready, the one with the least value starts first.
    """

    k: int
    first: int
    end: int
    priority: float


ChainSegments = list[list[ChainSegment]]
"""The segments of each chain, in block order; each block is in one segment."""


@dataclass(frozen=True, slots=True)
class ChainSchedule:
    """One way to run the chains.

    Attributes:
        strict: no segment starts before another that is ready and has a better priority.
    """

    segments: ChainSegments
    strict: bool = False


class TimedSegment(NamedTuple):
    """A segment as the hot loop of the search wants it.

    Attributes:
        priority: of the segment.
        m: its chain.
        devices: on which it runs.
        seconds: of the segment, with the wait for its input.
        rest_s: least seconds from its end to the end of all that follows.
        then: the next segment of the chain.
        area: device-seconds of this segment and of those after it in the chain.
        holding: sum over the blocks of these of the devices that run each.
    """

    priority: float
    m: int
    devices: int
    seconds: float
    rest_s: float
    then: TimedSegment | None
    area: float
    holding: int


class Decoder:
    """List scheduling of one phase.

    Args:
        tables: ``[K, L]`` seconds of every chain.
        after: the chains before each one, all with lower indices or all with higher ones.
        then: the chains that come directly after each one.
        cuts_s: ``[L]`` of every chain, seconds that a segment waits which begins at a block.
    """

    def __init__(
        self,
        counts: Sequence[Sequence[int]],
        tables: Sequence[Floats],
        after: Sequence[Sequence[int]],
        then: Sequence[Sequence[int]],
        cuts_s: Sequence[Floats],
        devices: int,
    ) -> None:
        self._counts = [list(own) for own in counts]
        self._cuts_s: list[list[float]] = [own.tolist() for own in cuts_s]
        # Seconds of all blocks before each one, on each count.
        self._until_s: list[list[list[float]]] = [
            np.hstack([np.zeros((len(t), 1)), np.cumsum(t, axis=1)]).tolist() for t in tables
        ]
        self._devices = devices
        self._num_before = [len(set(own)) for own in after]
        self._first = [m for m, count in enumerate(self._num_before) if not count]
        self._then = then
        # Least seconds from the end of each chain to the end of all that follow.
        self._rest_s = [0.0] * len(tables)
        ascends = all(other < m for m, own in enumerate(after) for other in own)
        for m in reversed(range(len(tables))) if ascends else range(len(tables)):
            rest_s = self._rest_s[m] + float(tables[m].min(axis=0).sum())
            for other in after[m]:
                self._rest_s[other] = max(self._rest_s[other], rest_s)

    def seconds(self, m: int, segment: ChainSegment) -> float:
        """Time of a segment, with the wait for its input."""
        until_s = self._until_s[m][segment.k]
        return until_s[segment.end] - until_s[segment.first] + self._cuts_s[m][segment.first]

    def timed(self, m: int, own: Sequence[ChainSegment]) -> TimedSegment:
        """The first of a chain's segments."""
        counts, until_s, cuts_s = self._counts[m], self._until_s[m], self._cuts_s[m]
        rest_s, timed, area, holding = self._rest_s[m], None, 0.0, 0
        for k, first, end, priority in reversed(own):
            row, count = until_s[k], counts[k]
            seconds = row[end] - row[first] + cuts_s[first]
            area += count * seconds
            holding += count * (end - first)
            timed = TimedSegment(priority, m, count, seconds, rest_s, timed, area, holding)
            rest_s += seconds
        assert timed is not None
        return timed

    def run(
        self, heads: Sequence[TimedSegment], strict: bool, limit_s: float = math.inf
    ) -> tuple[float, float, list[list[float]]]:
        """Decode a schedule. This is the hot loop of the search: locals, no calls.

        Args:
            heads: the first segment of each chain.
            strict: see :class:`ChainSchedule`.
            limit_s: decoding is given up once the end must be later than this.

        Returns:
            Seconds until the last segment ends, infinite where decoding was given up; the sum of
            each segment's device-seconds times its start and end; and the start of each segment.
        """
        then = self._then
        starts: list[list[float]] = [[] for _ in heads]
        num_before = self._num_before.copy()
        ready = sorted([heads[m] for m in self._first])
        running: list[tuple[float, int, TimedSegment]] = []
        # With fewer free devices than ``least`` no segment that waits can start.
        free, now, least, moment = self._devices, 0.0, 1, 0.0
        while True:
            if free >= least:
                left: list[TimedSegment] = []
                least = free + 1
                for position, one in enumerate(ready):
                    _, m, count, seconds, rest_s, _, _, _ = one
                    if count > free:
                        if strict:
                            left, least = ready[position:], count
                            break
                        left.append(one)
                        if count < least or len(left) == 1:
                            least = count
                        continue
                    free -= count
                    starts[m].append(now)
                    end_s = now + seconds
                    moment += count * seconds * (now + end_s)
                    if end_s + rest_s > limit_s:
                        return math.inf, moment, starts
                    heappush(running, (end_s, m, one))
                ready = left
            if not running:
                return now, moment, starts
            instant_s = running[0][0] * (1 + _SAME_INSTANT)
            while running and running[0][0] <= instant_s:
                now, m, (_, _, count, _, _, following, _, _) = heappop(running)
                instant_s = now * (1 + _SAME_INSTANT)
                free += count
                if following is not None:
                    insort(ready, following)
                    least = 1
                    continue
                for other in then[m]:
                    num_before[other] -= 1
                    if not num_before[other]:
                        insort(ready, heads[other])
                        least = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTimes:
    """Seconds of both phases of a schedule, and the start of each segment's forward.

    Attributes:
        packed_s: of forwards without idle devices whose device-seconds times the instants at which
            they are spent add up to the same. It falls with less work, and with work done earlier.
    """

    forward_s: float
    backward_s: float
    packed_s: float
    starts: list[list[float]]

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


class Evaluator:
    """Times both phases of schedules; one phase is decoded where the two are in proportion.

    Attributes:
        decoded: segments started in all schedules so far; mirrored ones, which must be made first,
            count 3 times.
    """

    def __init__(self, instance: Instance) -> None:
        chains = instance.chains
        self.instance = instance
        counts, after = [c.counts for c in chains], [c.after for c in chains]
        then = instance.successors()
        self.decoded = 0
        # With the module's number of blocks, and what is known by number of devices.
        self._sums: list[tuple[GradientSum, int, dict[int, float]]] = [
            (own, chains[own.chains[0]].blocks, {}) for own in instance.sums
        ]
        self._ratio = backward_ratio(chains)
        # The wait at a cut does not depend on the phase. Where the backward is computed as a
        # multiple of the forward, the forward's wait is scaled so that both together are twice one.
        scale = 1.0 if self._ratio is None else 2 / (1 + self._ratio)
        cuts_s = [scale * c.cut_s if c.cut_s is not None else np.zeros(c.blocks) for c in chains]
        forward, backward = [c.forward_s for c in chains], [c.backward_s[:, ::-1] for c in chains]
        self._forward = Decoder(counts, forward, after, then, cuts_s, instance.devices)
        # The cut before block b of L is before block L - b in the mirror image.
        mirrored = [np.append(0.0, own[:0:-1]) for own in cuts_s]
        self._backward = Decoder(counts, backward, then, after, mirrored, instance.devices)

    def timed(self, m: int, own: Sequence[ChainSegment]) -> TimedSegment:
        """The first of a chain's segments, with the times of the forward."""
        return self._forward.timed(m, own)

    def heads(self, schedule: ChainSchedule) -> list[TimedSegment]:
        """The first segment of each chain."""
        return [self._forward.timed(m, own) for m, own in enumerate(schedule.segments)]

    def run(
        self,
        schedule: ChainSchedule,
        limit_s: float = math.inf,
        heads: Sequence[TimedSegment] | None = None,
    ) -> ScheduleTimes:
        """Times of both phases; infinite where the forward ends later than ``limit_s``.

        Args:
            heads: the first segment of each chain; None where they must be made first.
        """
        if heads is None:
            heads = self.heads(schedule)
        forward_s, moment, starts = self._forward.run(heads, schedule.strict, limit_s)
        self.decoded += sum(map(len, starts))
        if forward_s == math.inf:
            backward_s = forward_s
        elif self._ratio is not None:
            backward_s = self._ratio * forward_s
        else:
            mirrored = enumerate(self._mirrored(schedule, starts))
            backward = [self._backward.timed(m, own) for m, own in mirrored]
            backward_s, _, _ = self._backward.run(backward, schedule.strict)
            self.decoded += 3 * sum(map(len, starts))
        return ScheduleTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            packed_s=math.sqrt(moment / self.instance.devices),
            starts=starts,
        )

    def cost(
        self,
        schedule: ChainSchedule,
        heads: Sequence[TimedSegment],
        max_guide_s: float = math.inf,
    ) -> tuple[float, float, list[list[float]]]:
        """The cost of a schedule, the guide that a search minimizes, and the forward's starts.

        Args:
            heads: the first segment of each chain, from :meth:`timed`.
            max_guide_s: a guide above this may be returned as infinite.
        """
        segments_factor = 1 + _SEGMENT_COST * sum(map(len, schedule.segments))
        # The forwards are not packed into less than this.
        area_s = sum([one.area for one in heads]) / self.instance.devices
        sums_s = self._sums_s(heads)
        limit_s = (max_guide_s - sums_s) / segments_factor
        if self._ratio is not None:
            limit_s = limit_s / (1 + self._ratio) - _PACKED_WEIGHT * area_s
        times = self.run(schedule, limit_s, heads)
        if times.forward_s == math.inf:
            return math.inf, math.inf, times.starts
        computes_s = times.total_s * segments_factor
        cost_s = computes_s + sums_s
        packed_s = computes_s * _PACKED_WEIGHT * times.packed_s / times.forward_s
        return cost_s, cost_s + packed_s, times.starts

    def _sums_s(self, heads: Sequence[TimedSegment]) -> float:
        """Seconds of each device for sums of gradients, if all have their share.

        A block of a module in several tasks is on devices of its own for each, since they run at
        one time.
        """
        found, devices = 0.0, self.instance.devices
        for own, blocks, known in self._sums:
            holding = sum([heads[m].holding for m in own.chains])
            holders = max(1, min(devices, round(holding / blocks)))
            if holders not in known:
                known[holders] = holders / devices * own.seconds(holders)
            found += known[holders]
        return found

    def lateness(
        self, heads: Sequence[TimedSegment], starts: Sequence[Sequence[float]]
    ) -> list[float]:
        """For each chain the latest end on a path from it, less the waits on that path."""
        ends: list[float] = []
        for one, own in zip(heads, starts, strict=True):
            while one.then is not None:
                one = one.then
            ends.append(own[-1] + one.seconds)
        late = list(ends)
        for m in reversed(range(len(ends))):
            for other in self.instance.chains[m].after:
                late[other] = max(late[other], late[m] - (starts[m][0] - ends[other]))
        return late

    def started_before(
        self, schedule: ChainSchedule, starts: Sequence[Sequence[float]], m: int, i: int
    ) -> list[float]:
        """Better priorities than a segment's, of segments that started while it waited."""
        segments, seconds = schedule.segments, self._forward.seconds
        before = [(m, i - 1)] if i else [(j, -1) for j in self.instance.chains[m].after]
        ready_s = max([starts[j][n] + seconds(j, segments[j][n]) for j, n in before], default=0.0)
        start_s, priority = starts[m][i], segments[m][i].priority
        if start_s <= ready_s * (1 + _SAME_INSTANT):
            return []
        ready_s *= 1 - _SAME_INSTANT
        return [
            segment.priority
            for own, own_starts in zip(segments, starts, strict=True)
            for segment, other_s in zip(own, own_starts, strict=True)
            if ready_s <= other_s <= start_s and segment.priority < priority
        ]

    def _mirrored(self, schedule: ChainSchedule, starts: list[list[float]]) -> ChainSegments:
        mirrored: ChainSegments = []
        for m, own in enumerate(schedule.segments):
            blocks = self.instance.chains[m].blocks
            mirrored.append(
                [
                    ChainSegment(
                        s.k,
                        blocks - s.end,
                        blocks - s.first,
                        -(start + self._forward.seconds(m, s)),
                    )
                    for s, start in zip(own, starts[m], strict=True)
                ][::-1]
            )
        return mirrored
