"""What no other choice equals or beats: all that an exact search has to look at."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats, Indices

Choice = TypeVar("Choice")

# Rows compared with the front at a time: a table of 256 x front x columns stays in the cache.
CHUNK = 256


def pareto_rows(values: Floats) -> Indices:
    """Rows [n, c] that no other row equals or beats in every column; one of equal rows.

    Returns:
        Their positions, in lexicographic order of the rows.
    """
    order = np.lexsort(values.T[::-1])
    ordered = values[order]
    # A few rows that are good in many ways beat most others at once.
    scale = ordered.max(axis=0) - ordered.min(axis=0)
    unit = (ordered - ordered.min(axis=0)) / np.where(scale > 0, scale, 1.0)
    corners = itertools.product((0.03, 1.0), repeat=min(values.shape[1], 6))
    weights = (np.resize(np.array(corner), values.shape[1]) for corner in corners)
    strong = np.unique([int((unit @ weight).argmin()) for weight in weights])
    alive = np.ones(len(ordered), dtype=np.bool_)
    for row in strong:
        beaten = np.all(ordered[row] <= ordered, axis=1)
        beaten[: row + 1] = False
        alive &= ~beaten
    # In this order a row can only be beaten by an earlier one.
    front, kept = ordered[:0], list[int]()
    rows = np.flatnonzero(alive)
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        chunk = chunk[~_beaten(ordered[chunk], front).any(axis=1)]
        inside = np.tril(_beaten(ordered[chunk], ordered[chunk]), k=-1).any(axis=1)
        front = np.vstack([front, ordered[chunk[~inside]]])
        kept += chunk[~inside].tolist()
    return order[kept]


def staircase(
    choices: Iterable[Choice],
    costs: Callable[[Choice], tuple[float, float]],
    *,
    group: Callable[[Choice], Hashable] = lambda _: None,
) -> list[Choice]:
    """Choices by their first cost, each with less of the second than all before it of its group."""
    least: dict[Hashable, float] = {}
    kept: list[Choice] = []
    for choice in sorted(choices, key=costs):
        second, own = costs(choice)[1], group(choice)
        if second < least.get(own, np.inf):
            least[own] = second
            kept.append(choice)
    return kept


def _beaten(rows: Floats, others: Floats) -> NDArray[np.bool_]:
    """[i, j]: other row j is at most equal to row i in every column."""
    result = np.ones((len(rows), len(others)), dtype=np.bool_)
    for column in range(rows.shape[1]):
        result &= others[None, :, column] <= rows[:, None, column]
    return result
