"""Sample intervals of micro-batches, and the intersections of two stages' micro-batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

SampleRange = tuple[int, int]


def number_samples(
    microbatches: Sequence[Sequence[int]], batch: int
) -> tuple[tuple[SampleRange, ...], ...]:
    """Global sample ranges ``[dp][mb]`` of a step, micro-batch-major within each round.

    Args:
        microbatches: sizes ``[dp][k]`` of one round; replicas may differ in number and size.
        batch: samples of a step, a whole number of rounds.
    """
    ranges: list[list[SampleRange]] = [[] for _ in microbatches]
    depth = max(len(sizes) for sizes in microbatches)
    position = 0
    while position < batch:
        for k in range(depth):
            for d, sizes in enumerate(microbatches):
                if k < len(sizes):
                    ranges[d].append((position, position + sizes[k]))
                    position += sizes[k]
    return tuple(map(tuple, ranges))


def intersect(a: SampleRange, b: SampleRange) -> SampleRange | None:
    """The samples in both ranges; None where there are none."""
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None


class RangeIndex:
    """Finds the micro-batches of a stage that hold given samples.

    Args:
        microbatches: ``[dp][mb]`` ranges that tile the batch.
    """

    def __init__(self, microbatches: Sequence[Sequence[SampleRange]]) -> None:
        self._pieces = sorted(
            (span, d, k) for d, spans in enumerate(microbatches) for k, span in enumerate(spans)
        )
        self._starts = [span[0] for span, _, _ in self._pieces]

    def overlapping(self, span: SampleRange) -> Iterator[tuple[SampleRange, int, int]]:
        """(shared samples, replica, micro-batch), in sample order."""
        start, stop = span
        for i in range(max(0, bisect_right(self._starts, start) - 1), len(self._pieces)):
            (first, last), d, k = self._pieces[i]
            if first >= stop:
                break
            if last > start:
                yield (max(first, start), min(last, stop)), d, k
