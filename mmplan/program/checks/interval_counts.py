"""Counts of samples: sums of intervals with multiplicities."""

from __future__ import annotations

from collections.abc import Iterable

# (first sample, end of samples, count)
CountedInterval = tuple[int, int, int]


def normal(intervals: Iterable[CountedInterval]) -> list[CountedInterval]:
    """The same sum as sorted, disjoint, merged intervals with counts other than zero."""
    changes: dict[int, int] = {}
    for start, stop, times in intervals:
        changes[start] = changes.get(start, 0) + times
        changes[stop] = changes.get(stop, 0) - times
    result: list[CountedInterval] = []
    times, previous = 0, 0
    for position in sorted(changes):
        if not changes[position]:
            continue
        if times and previous < position:
            result.append((previous, position, times))
        times += changes[position]
        previous = position
    return result


def cut(intervals: Iterable[CountedInterval], start: int, stop: int) -> list[CountedInterval]:
    """The part of disjoint intervals inside ``[start, stop)``."""
    return [
        (max(a, start), min(b, stop), times) for a, b, times in intervals if a < stop and b > start
    ]


def first_deviation(
    intervals: Iterable[CountedInterval], start: int, stop: int, times: int
) -> CountedInterval | None:
    """The first samples of a sum that are not counted ``times`` in ``[start, stop)``.

    Samples outside should be counted 0 times.
    """
    expected = (start, stop, -times)
    difference = normal([*intervals, expected] if times else intervals)
    if not difference:
        return None
    a, b, off = difference[0]
    return a, b, off + (times if start <= a < stop else 0)
