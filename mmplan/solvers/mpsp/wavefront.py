"""Spindle's wavefront scheduler as printed (arXiv:2409.03365): waves whose slices end together.

Level by level, every MetaOp's continuous optimum becomes bi-point segments. A wave then takes the
segments that fill the devices: the largest count first, then the longest, one segment of a chain at
a time. Devices left over go to the chains with most time left (to their next valid count). All
segments are cut to the span of the shortest, in whole blocks and at least one each. A wave ends
when its last segment does. Neighbouring segments on the same count are merged at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmplan.solvers.mpsp.bounds import continuous_optimum
from mmplan.solvers.mpsp.initial_schedules import append_merged, bi_point
from mmplan.solvers.mpsp.instance import Chain, Instance
from mmplan.solvers.mpsp.list_schedule import ChainSchedule, ChainSegment, ChainSegments

# Times that differ by less than this share are equal: sums of times are rounded.
_SAME_TIME = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Wavefront:
    """The waves as a schedule whose priorities are the waves' numbers; their number, and the
    seconds of forward and backward with a barrier at every wave's end."""

    schedule: ChainSchedule
    seconds: float
    waves: int


@dataclass(slots=True)
class _Remaining:
    """The blocks of a chain that no wave has taken.

    Attributes:
        segments: (position of the count, number of blocks), in block order.
        done: blocks that waves have taken.
    """

    chain: Chain
    segments: list[tuple[int, int]]
    done: int = 0

    def seconds(self, k: int, blocks: int) -> float:
        """Forward and backward of the next blocks on a count."""
        return float(self.chain.both_s[k, self.done : self.done + blocks].sum())

    def total_s(self) -> float:
        """Forward and backward of all segments, each timed from the first remaining block."""
        return sum(self.seconds(k, blocks) for k, blocks in self.segments)

    def take(self, blocks: int) -> None:
        """Remove the next blocks."""
        self.done += blocks
        while blocks:
            k, first = self.segments[0]
            if first > blocks:
                self.segments[0] = k, first - blocks
                return
            self.segments.pop(0)
            blocks -= first


def wavefront(instance: Instance) -> Wavefront:
    """The schedule in waves."""
    segments: ChainSegments = [[] for _ in instance.chains]
    seconds, waves = 0.0, 0
    for level in range(instance.levels):
        remaining = _bi_point_segments(instance, instance.of_level(level))
        while any(own.segments for own in remaining.values()):
            longest = 0.0
            for m, k, blocks in _wave(remaining, instance.devices):
                own = remaining[m]
                longest = max(longest, own.seconds(k, blocks))
                segment = ChainSegment(k, own.done, own.done + blocks, float(waves))
                append_merged(segments[m], segment)
                own.take(blocks)
            seconds += longest
            waves += 1
    return Wavefront(schedule=ChainSchedule(segments), seconds=seconds, waves=waves)


def _bi_point_segments(instance: Instance, members: list[int]) -> dict[int, _Remaining]:
    """A level's chains, each cut so that it takes the level's continuous optimum."""
    span_s = continuous_optimum(instance, members)
    found: dict[int, _Remaining] = {}
    for m in members:
        chain = instance.chains[m]
        cuts = bi_point(chain.counts, chain.both_s, span_s, hull=False, larger_first=True)
        found[m] = _Remaining(chain, [(k, end - first) for k, first, end in cuts])
    return found


def _wave(remaining: dict[int, _Remaining], devices: int) -> list[tuple[int, int, int]]:
    """(chain, position of its count, blocks) of the next wave."""
    offers = sorted(
        ((m, k, blocks) for m, own in remaining.items() for k, blocks in own.segments),
        key=lambda o: (-remaining[o[0]].chain.counts[o[1]], -remaining[o[0]].seconds(o[1], o[2])),
    )
    chosen: dict[int, tuple[int, int]] = {}
    free = devices
    for m, k, blocks in offers:
        count = remaining[m].chain.counts[k]
        if m not in chosen and count <= free:
            chosen[m] = k, blocks
            free -= count
    # Devices left over go to the chains with most time left, each to its next valid count.
    for m in sorted(chosen, key=lambda m: -remaining[m].total_s()):
        k, blocks = chosen[m]
        counts = remaining[m].chain.counts
        if k + 1 < len(counts) and counts[k + 1] - counts[k] <= free:
            free -= counts[k + 1] - counts[k]
            chosen[m] = k + 1, blocks
    span_s = min(remaining[m].seconds(k, blocks) for m, (k, blocks) in chosen.items())
    until_s, wave = span_s * (1 + _SAME_TIME), list[tuple[int, int, int]]()
    for m, (k, blocks) in chosen.items():
        ending = (n for n in range(1, blocks + 1) if remaining[m].seconds(k, n) <= until_s)
        wave.append((m, k, max(ending, default=1)))
    return wave
