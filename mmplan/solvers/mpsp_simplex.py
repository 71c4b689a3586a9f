"""A dense simplex method for the small linear programs of the bounds.

Why not ``scipy.optimize.linprog``: planning ten tasks on 64 devices has one second and solves 140
of these programs. HiGHS takes 2.6 ms for each by way of linprog and 0.3 s to be imported, 0.6 s
in all; this takes 0.6 ms and is there. Right-hand sides are not negative, so the slack variables
are a first basis, and there are a hundred rows or fewer. A test compares it with HiGHS, and what
is made of its answer is safe for any answer: see how the callers turn prices into proven bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Smaller entries are taken for zero, as pivots and as gains.
_PIVOT, _GAIN = 1e-9, 1e-10
# Right-hand sides are raised by up to this, so that no two pivots tie for ever.
_APART = 1e-10
_MOST_PIVOTS = 5000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """Of :func:`maximize`.

    Attributes:
        x: ``[C]``.
        prices: ``[R]``, what a little more of each limit would gain.
    """

    x: Floats
    prices: Floats


def maximize(gain: Floats, matrix: Floats, limit: Floats) -> Answer:
    """The x >= 0 with the most gain x and matrix x <= limit, up to rounding.

    Args:
        gain: ``[C]``.
        matrix: ``[R, C]``, entries near 1 where they are not 0.
        limit: ``[R]``, not negative.
    """
    rows, columns = matrix.shape
    table = np.zeros((rows + 1, columns + rows + 1))
    table[:rows, :columns] = matrix
    table[:rows, columns:-1] = np.eye(rows)
    # Other for each row, and the same in every run.
    table[:rows, -1] = limit + _APART * (1 + np.modf(np.arange(rows) * 0.6180339887)[0])
    table[rows, :columns] = -gain
    basis = columns + np.arange(rows)
    for _ in range(_MOST_PIVOTS):
        column = int(table[rows, :-1].argmin())
        if table[rows, column] >= -_GAIN:
            break
        entries = table[:rows, column]
        possible = entries > _PIVOT
        if not possible.any():
            break
        ratios = np.where(possible, table[:rows, -1], np.inf) / np.where(possible, entries, 1.0)
        row = int(ratios.argmin())
        table[row] /= table[row, column]
        factors = table[:, column].copy()
        factors[row] = 0.0
        table -= np.outer(factors, table[row])
        basis[row] = column
    x = np.zeros(columns + rows)
    x[basis] = table[:rows, -1]
    return Answer(x=x[:columns], prices=np.maximum(table[rows, columns:-1], 0.0))
