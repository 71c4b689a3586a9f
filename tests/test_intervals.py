"""Sums of intervals against counting every sample."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from mmplan.program.checks.sample_coverage import first_deviation, normal

pieces = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(-2, 3)).map(
        lambda p: (min(p[:2]), max(p[:2]), p[2])
    ),
    max_size=8,
)


@given(pieces)
@example([(0, 4, 1), (4, 8, 1)])
@example([(0, 4, 1), (0, 4, -1)])
def test_normal_form_counts_every_sample_alike(items: list[tuple[int, int, int]]) -> None:
    def counts(some: list[tuple[int, int, int]]) -> list[int]:
        return [sum(t for a, b, t in some if a <= i < b) for i in range(13)]

    result = normal(items)
    assert counts(result) == counts(items)
    assert all(t and a < b for a, b, t in result)
    for (_, b, t), (a2, _, t2) in pairwise(result):
        assert b < a2 or (b == a2 and t != t2)


@given(pieces, st.integers(0, 6), st.integers(6, 12), st.integers(0, 2))
def test_first_deviation_is_the_first_sample_counted_otherwise(
    items: list[tuple[int, int, int]], start: int, stop: int, times: int
) -> None:
    off = first_deviation(items, start, stop, times)
    for i in range(13):
        count = sum(t for a, b, t in items if a <= i < b)
        expected = times if start <= i < stop else 0
        if count != expected:
            assert off is not None
            assert off[0] == i
            assert off[2] == count
            return
    assert off is None
