"""Rows of a table that no other row equals or beats: what an exact search may choose from."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Rows compared with the front at a time.
CHUNK = 256


def pareto_rows(values: Floats) -> NDArray[np.intp]:
    """Rows [n, c] that no other row equals or beats in every column; one of equal rows."""
    order = np.lexsort(values.T[::-1])
    ordered = values[order]
    # A few rows that are good in many ways beat most others at once.
    scale = ordered.max(axis=0) - ordered.min(axis=0)
    unit = (ordered - ordered.min(axis=0)) / np.where(scale > 0, scale, 1.0)
    corners = itertools.product((0.03, 1.0), repeat=values.shape[1])
    strong = np.unique([int((unit @ np.array(c)).argmin()) for c in corners])
    alive = np.ones(len(ordered), dtype=np.bool_)
    for row in strong:
        beaten = np.all(ordered[row] <= ordered, axis=1)
        beaten[: row + 1] = False
        alive &= ~beaten
    front = ordered[:0]
    kept: list[int] = []
    rows = np.flatnonzero(alive)
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        chunk = chunk[~_beaten(ordered[chunk], front)]
        # In this order a row can only be beaten by an earlier one.
        for row in chunk:
            if not np.any(np.all(front <= ordered[row], axis=1)):
                kept.append(int(row))
                front = np.vstack([front, ordered[row]])
    return np.sort(order[kept])


def _beaten(rows: Floats, front: Floats) -> NDArray[np.bool_]:
    """Whether some row of the front is at most equal in every column."""
    result = np.ones((len(rows), len(front)), dtype=np.bool_)
    for column in range(rows.shape[1]):
        result &= front[None, :, column] <= rows[:, None, column]
    return np.asarray(np.any(result, axis=1), dtype=np.bool_)
