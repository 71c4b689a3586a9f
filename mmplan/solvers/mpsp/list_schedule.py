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
from mmplan.solvers.mpsp.instance import Instance, backward_ratio

# Times that differ by less than this share are one instant: sums of times are rounded.
_SAME_INSTANT = 1e-12
# Cost of one more segment as a share of the time, to break ties. Chosen by hand.
_SEGMENT_COST = 1e-5
# Weight of the device-seconds in the guide: devices that are spared may move the end later.
_AREA_WEIGHT = 0.2


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
        self._then = then
        # Least seconds from each block to the end of all chains that follow.
        self._rest_s: list[list[float]] = [[] for _ in tables]
        ascends = all(other < m for m, own in enumerate(after) for other in own)
        for m in reversed(range(len(tables))) if ascends else range(len(tables)):
            rest = max((self._rest_s[other][0] for other in then[m]), default=0.0)
            fastest = tables[m].min(axis=0)[::-1]
            self._rest_s[m] = (rest + np.append(0.0, np.cumsum(fastest)))[::-1].tolist()

    def seconds(self, m: int, segment: ChainSegment) -> float:
        """Time of a segment, with the wait for its input."""
        until_s = self._until_s[m][segment.k]
        return until_s[segment.end] - until_s[segment.first] + self._cuts_s[m][segment.first]

    def run(
        self, schedule: ChainSchedule, limit_s: float = math.inf
    ) -> tuple[float, list[list[float]]]:
        """Decode a schedule. This is the hot loop of the search: locals, no calls.

        Args:
            limit_s: decoding is given up once the end must be later than this.

        Returns:
            Seconds until the last segment ends, infinite where decoding was given up, and the
            start of each segment.
        """
        segments, strict = schedule.segments, schedule.strict
        counts, all_until_s, then, rest_s = self._counts, self._until_s, self._then, self._rest_s
        cuts_s = self._cuts_s
        starts: list[list[float]] = [[] for _ in segments]
        num_before = list(self._num_before)
        ready = sorted((own[0].priority, m) for m, own in enumerate(segments) if not num_before[m])
        running: list[tuple[float, int, int]] = []
        # With fewer free devices than ``least`` no segment that waits can start.
        free, now, least = self._devices, 0.0, 1
        while True:
            if free >= least:
                left: list[tuple[float, int]] = []
                least = free + 1
                for position, item in enumerate(ready):
                    m = item[1]
                    own = starts[m]
                    k, first, end, _ = segments[m][len(own)]
                    count = counts[m][k]
                    if count > free:
                        left.append(item)
                        if count < least or len(left) == 1:
                            least = count
                        if strict:
                            left += ready[position + 1 :]
                            break
                        continue
                    free -= count
                    own.append(now)
                    until_s = all_until_s[m][k]
                    end_s = now + until_s[end] - until_s[first] + cuts_s[m][first]
                    if end_s + rest_s[m][end] > limit_s:
                        return math.inf, starts
                    heappush(running, (end_s, m, count))
                ready = left
            if not running:
                return now, starts
            now, m, count = heappop(running)
            instant_s, ended = now * (1 + _SAME_INSTANT), [m]
            free += count
            while running and running[0][0] <= instant_s:
                now, m, count = heappop(running)
                instant_s = now * (1 + _SAME_INSTANT)
                ended.append(m)
                free += count
            for m in ended:
                done = len(starts[m])
                if done < len(segments[m]):
                    insort(ready, (segments[m][done].priority, m))
                    least = 1
                    continue
                for other in then[m]:
                    num_before[other] -= 1
                    if not num_before[other]:
                        insort(ready, (segments[other][0].priority, other))
                        least = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTimes:
    """Seconds of both phases of a schedule, and the start of each segment's forward."""

    forward_s: float
    backward_s: float
    starts: list[list[float]]

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


class Evaluator:
    """Times both phases of schedules; one phase is decoded where the two are in proportion.

    Attributes:
        decoded: segments started in all schedules so far; mirrored ones count twice.
    """

    def __init__(self, instance: Instance) -> None:
        chains = instance.chains
        self.instance = instance
        counts, after = [c.counts for c in chains], [c.after for c in chains]
        then = instance.successors()
        self.decoded = 0
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
        # Device-seconds of the forward of all blocks before each one, on each count.
        self._areas: list[list[list[float]]] = [
            [
                [0.0, *(n * np.cumsum(row)).tolist()]
                for n, row in zip(c.counts, c.forward_s, strict=True)
            ]
            for c in chains
        ]

    def run(self, schedule: ChainSchedule, limit_s: float = math.inf) -> ScheduleTimes:
        """Times of both phases; infinite where the forward ends later than ``limit_s``."""
        forward_s, starts = self._forward.run(schedule, limit_s)
        self.decoded += sum(map(len, starts))
        if forward_s == math.inf:
            backward_s = forward_s
        elif self._ratio is not None:
            backward_s = self._ratio * forward_s
        else:
            backward_s, _ = self._backward.run(self._mirrored(schedule, starts))
            self.decoded += 2 * sum(map(len, starts))
        return ScheduleTimes(forward_s=forward_s, backward_s=backward_s, starts=starts)

    def area(self, m: int, own: Sequence[ChainSegment]) -> float:
        """Device-seconds of a chain's forward."""
        rows = self._areas[m]
        return sum(rows[k][end] - rows[k][first] for k, first, end, _ in own)

    def cost(
        self, schedule: ChainSchedule, area: float, max_guide_s: float = math.inf
    ) -> tuple[float, float, list[list[float]]]:
        """The cost of a schedule, the guide that a search minimizes, and the forward's starts.

        Args:
            area: device-seconds of all chains' forwards.
            max_guide_s: a guide above this may be returned as infinite.
        """
        segments_factor = 1 + _SEGMENT_COST * sum(map(len, schedule.segments))
        area_s = _AREA_WEIGHT * area / self.instance.devices
        limit_s = max_guide_s / segments_factor
        if self._ratio is not None:
            limit_s = limit_s / (1 + self._ratio) - area_s
        times = self.run(schedule, limit_s)
        if times.forward_s == math.inf:
            return math.inf, math.inf, times.starts
        cost_s = times.total_s * segments_factor
        return cost_s, cost_s * (1 + area_s / times.forward_s), times.starts

    def lateness(self, schedule: ChainSchedule, starts: Sequence[Sequence[float]]) -> list[float]:
        """For each chain the latest end on a path from it, less the waits on that path."""
        ends = [
            own[-1] + self._forward.seconds(m, schedule.segments[m][-1])
            for m, own in enumerate(starts)
        ]
        late = list(ends)
        for m in reversed(range(len(ends))):
            for other in self.instance.chains[m].after:
                late[other] = max(late[other], late[m] - (starts[m][0] - ends[other]))
        return late

    def _mirrored(self, schedule: ChainSchedule, starts: list[list[float]]) -> ChainSchedule:
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
        return ChainSchedule(mirrored, schedule.strict)
