"""Pareto fronts: choices that no other choice dominates. An exact search needs no others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats, Indices

Choice = TypeVar("Choice")

# Rows compared with the front at a time: a table of 256 x front x columns stays in the cache.
_CHUNK = 256
# Weight of the columns that a corner of the weight cube neglects.
_SMALL_WEIGHT = 0.03
# Columns with corners of their own: 2**6 rows are tried first. Chosen by hand.
_CORNER_COLUMNS = 6


def pareto_rows(values: Floats) -> Indices:
    """Rows [n, c] that no other row dominates; the first of equal rows.

    Returns:
        Their positions, in lexicographic order of the rows.
    """
    order = np.lexsort(values.T[::-1])
    ordered = values[order]
    # A few rows with small weighted sums dominate most other rows.
    scale = ordered.max(axis=0) - ordered.min(axis=0)
    unit = (ordered - ordered.min(axis=0)) / np.where(scale > 0, scale, 1.0)
    count = min(values.shape[1], _CORNER_COLUMNS)
    corners = np.array([*itertools.product((_SMALL_WEIGHT, 1.0), repeat=count)])
    weights = corners[:, np.arange(values.shape[1]) % count]
    strong = np.unique([int((unit @ weight).argmin()) for weight in weights])
    alive = np.ones(len(ordered), dtype=np.bool_)
    for row in strong:
        dominated = np.all(ordered[row] <= ordered, axis=1)
        dominated[: row + 1] = False
        alive &= ~dominated
    # In this order only earlier rows can dominate a row.
    front, kept = ordered[:0], list[int]()
    rows = np.flatnonzero(alive)
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        chunk = chunk[~_dominated(ordered[chunk], front).any(axis=1)]
        inside = np.tril(_dominated(ordered[chunk], ordered[chunk]), k=-1).any(axis=1)
        front = np.vstack([front, ordered[chunk[~inside]]])
        kept += chunk[~inside].tolist()
    return order[kept]


def staircase(
    choices: Iterable[Choice],
    costs: Callable[[Choice], tuple[float, float]],
    *,
    group: Callable[[Choice], Hashable] = lambda _: None,
) -> list[Choice]:
    """The Pareto front of two costs within each group, by ascending first cost."""
    least: dict[Hashable, float] = {}
    kept: list[Choice] = []
    for choice in sorted(choices, key=costs):
        second, own = costs(choice)[1], group(choice)
        if second < least.get(own, np.inf):
            least[own] = second
            kept.append(choice)
    return kept


def lower_hull(points: Floats) -> Floats:
    """Corners [h, 2], by ascending x, where ``rate * x + y`` is least for some rate >= 0.

    Args:
        points: [n, 2], x and y.
    """
    ordered = points[np.lexsort((points[:, 1], points[:, 0]))]
    lowest = np.minimum.accumulate(ordered[:, 1])
    better = np.append(True, ordered[1:, 1] < lowest[:-1])[: len(ordered)]
    hull: list[tuple[float, float]] = []
    for x, y in ordered[better].tolist():
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((x, y))
    return np.array(hull).reshape(-1, 2)


def sum_of_hulls(hulls: Sequence[Floats]) -> Floats:
    """Corners [h, 2], by ascending x, of the least sum of y for each sum of x.

    One point of each hull is chosen, or a mix of two: no choice of points has less.

    Args:
        hulls: of :func:`lower_hull`, at least one.
    """
    start = np.sum([hull[0] for hull in hulls], axis=0)
    steps = np.concatenate([np.diff(hull, axis=0) for hull in hulls])
    # Those that lower y most for each unit of x come first.
    steps = steps[np.argsort(steps[:, 1] / steps[:, 0], kind="stable")]
    return np.cumsum(np.vstack([start, steps]), axis=0)


def _dominated(rows: Floats, others: Floats) -> NDArray[np.bool_]:
    """[i, j]: whether other row j equals or dominates row i."""
    result = np.ones((len(rows), len(others)), dtype=np.bool_)
    for column in range(rows.shape[1]):
        result &= others[None, :, column] <= rows[:, None, column]
    return result
