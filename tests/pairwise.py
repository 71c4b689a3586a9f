"""Few rows in which every two values of any two factors meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
_CANDIDATES = 60


def pairwise_rows(
    factors: Mapping[str, Sequence[Any]],
    *,
    valid: Callable[[Row], bool] = lambda row: True,
    most: int | None = None,
    seed: int = 0,
) -> list[Row]:
    """A greedy covering array: each row meets as many new pairs as any of 60 random ones.

    Pairs that no valid candidate holds are left out; ``most`` cuts the list, the rows with
    the most new pairs first. The same arguments give the same rows.
    """
    chance = random.Random(seed)
    left = {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(factors, 2)
        for x in range(len(factors[a]))
        for y in range(len(factors[b]))
    }
    rows: list[Row] = []
    while left and (most is None or len(rows) < most):
        # Sorted: the order of a set of strings changes from process to process.
        wanted = dict(chance.choice(sorted(left, key=sorted)))
        best: dict[str, int] | None = None
        for _ in range(_CANDIDATES):
            picked = {f: chance.randrange(len(v)) for f, v in factors.items()} | wanted
            if valid(_values(factors, picked)) and (
                best is None or len(left & _pairs(picked)) > len(left & _pairs(best))
            ):
                best = picked
        if best is None:
            left.discard(frozenset(wanted.items()))
            continue
        left -= _pairs(best)
        rows.append(_values(factors, best))
    return rows


def few_rows(factors: Mapping[str, Sequence[Any]], rare: str, *, seed: int = 0) -> list[Row]:
    """Pairwise rows of all factors but one, whose values come in turn, each at least once."""
    others = {name: values for name, values in factors.items() if name != rare}
    rows, values = pairwise_rows(others, seed=seed), factors[rare]
    return [
        rows[k % len(rows)] | {rare: values[k % len(values)]}
        for k in range(max(len(rows), len(values)))
    ]


def _values(factors: Mapping[str, Sequence[Any]], picked: Mapping[str, int]) -> Row:
    return {name: factors[name][index] for name, index in picked.items()}


def _pairs(picked: Mapping[str, int]) -> set[frozenset[tuple[str, int]]]:
    return {frozenset(pair) for pair in itertools.combinations(picked.items(), 2)}
