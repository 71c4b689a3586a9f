"""The least time that chains of blocks can take on N devices: three relaxations.

All let work be cut anywhere. A chain that may take C seconds then costs at least D(C)
device-seconds: on n devices a part takes T(n) seconds and n T(n) device-seconds, and running it
on several counts one after another gives every point between. D is the lower convex hull of
these points, convex and non-increasing; it is constant where more time does not help, which is
how fractions of a device and more chains than devices are counted. In terms of speed 1/T it is
the upper concave envelope with speed(0) = 0.

- a level: the least C with sum D(C) <= N C, by bisection; the chains all end together;
- a graph: the same with start times, a linear program;
- configurations: at each instant the chains' counts fit in N. A linear program over how long
  each combination of counts lasts, whose columns a knapsack finds. Tighter where the valid
  counts do not fill N; it knows no order.

``paper_value`` is Spindle's Eq. 11 (arXiv:2409.03365), which interpolates T linearly and is no
bound.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats
from mmplan.solvers.mpsp.instance import BlockRange, Chain, Instance, parts

_HALVINGS = 100
# What linear programs may be off by.
_SLACK = 1e-7
# Columns are added while they could still improve the bound by more than this share.
_CLOSE = 5e-4
# Weight of the best prices so far when columns are looked for.
_CALM = 0.8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceSecondsCurve:
    """D(C): least device-seconds of a chain that may take C seconds.

    Attributes:
        time_s: ascending corners; the first is the least time possible.
        area_s: device-seconds there, descending; constant after the last.
    """

    time_s: Floats
    area_s: Floats

    def at(self, seconds: float) -> float:
        """Device-seconds within that time, which the least possible does not exceed."""
        return float(np.interp(seconds, self.time_s, self.area_s))

    def price(self, seconds: float) -> float:
        """Device-seconds that one second less would cost there."""
        k = max(1, int(np.searchsorted(self.time_s, seconds)))
        if k >= len(self.time_s):
            return 0.0
        fall = self.area_s[k - 1] - self.area_s[k]
        return float(fall / (self.time_s[k] - self.time_s[k - 1]))


def curve(counts: Sequence[int], own: Sequence[BlockRange]) -> DeviceSecondsCurve:
    """The curve of a chain's parts, which run one after another."""
    starts: list[tuple[float, float]] = []
    moves: list[tuple[float, float]] = []
    for part in own:
        corners = _hull(np.array(counts), part.time_s)
        starts.append(corners[0])
        moves += [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(corners)]
    # The steepest fall first: that keeps the sum convex.
    moves.sort(key=lambda move: move[1] / move[0])
    path = np.array([np.sum(starts, axis=0) if starts else (0.0, 0.0), *moves], dtype=np.float64)
    times, areas = np.cumsum(path, axis=0).T
    return DeviceSecondsCurve(time_s=times, area_s=areas)


def _hull(counts: NDArray[np.int64], time_s: Floats) -> list[tuple[float, float]]:
    """Lower left hull of (T, n T), by ascending T."""
    hull: list[tuple[float, float]] = []
    for point in sorted(zip(time_s.tolist(), (counts * time_s).tolist(), strict=True)):
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _is_above(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def level_bound(curves: Sequence[DeviceSecondsCurve], devices: int) -> float:
    """The least C with sum D(C) <= N C; no schedule of the chains ends earlier.

    The sum is linear between the corners of all curves, so the C is found exactly.
    """
    low = max(float(c.time_s[0]) for c in curves)
    corners = np.unique(np.concatenate([[low], *(c.time_s for c in curves)]))
    corners = corners[corners >= low]
    areas = np.sum([np.interp(corners, c.time_s, c.area_s) for c in curves], axis=0)
    spare = devices * corners - areas
    k = int(np.searchsorted(spare >= 0, True))
    if k == 0:
        return low
    if k == len(corners):
        return float(areas[-1]) / devices
    share = -spare[k - 1] / (spare[k] - spare[k - 1])
    return float(corners[k - 1] + share * (corners[k] - corners[k - 1]))


def dag_bound(
    curves: Sequence[DeviceSecondsCurve], after: Sequence[Sequence[int]], devices: int
) -> tuple[float, list[float]]:
    """The same over a graph, and the seconds that it gives each chain.

    Variables: start s, seconds c and device-seconds a of each chain, and the end C; least C with
    s_j >= s_i + c_i, s + c <= C, a >= D(c), sum a <= N C. Its dual is solved; what the prices
    violate by rounding is taken off the bound, each variable being within the end of the chains
    one after another.
    """
    count, least_s = len(curves), level_bound(curves, devices)
    scale = max(least_s, 1e-300)
    rows: list[list[tuple[int, float]]] = []
    demand: list[float] = []

    def need(terms: list[tuple[int, float]], value: float) -> None:
        rows.append(terms)
        demand.append(value)

    # c and a count from their least values.
    for m, own in enumerate(curves):
        times, areas = own.time_s / scale, own.area_s / scale / devices
        need([(3 * count, 1.0), (m, -1.0), (count + m, -1.0)], times[0])
        for i in after[m]:
            first_s = float(curves[i].time_s[0]) / scale
            need([(m, 1.0), (i, -1.0), (count + i, -1.0)], first_s)
        for k in range(len(times) - 1):
            slope = (areas[k + 1] - areas[k]) / (times[k + 1] - times[k])
            value = areas[k] - areas[-1] + slope * (times[0] - times[k])
            need([(2 * count + m, 1.0), (count + m, -slope)], value)
    base = sum(float(c.area_s[-1]) for c in curves) / scale / devices
    need([(3 * count, 1.0), *((2 * count + m, -1.0) for m in range(count))], base)
    matrix = np.zeros((3 * count + 1, len(rows)))
    for column, terms in enumerate(rows):
        for row, value in terms:
            matrix[row, column] = value
    costs = np.zeros(3 * count + 1)
    costs[-1] = 1.0
    answer = maximize(np.array(demand), matrix, costs)
    most = sum(float(c.time_s[-1]) for c in curves) / scale
    lost = float(np.minimum(costs - matrix @ answer.x, 0.0).sum()) * most
    bound_s = (float(np.array(demand) @ answer.x) + lost) * scale * (1 - _SLACK)
    spans = [
        float(own.time_s[0]) + float(more) * scale
        for own, more in zip(curves, answer.prices[count : 2 * count], strict=True)
    ]
    return max(bound_s, least_s), spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Counts that run at the same time, and for how long.

    Attributes:
        choices: (chain, part, index of the count).
    """

    seconds: float
    choices: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configurations:
    """The configuration program's bound, and its columns in use."""

    bound_s: float
    columns: tuple[Column, ...]


def configuration_bound(
    chains: Sequence[Chain], tables: Sequence[Floats], devices: int, *, limit_s: float
) -> Configurations:
    """The bound over combinations of counts, as tight as the seconds allow.

    With duals y and the best column's value z, sum(y) / max(1, z) is a bound however many
    columns are still missing (Farley).

    Args:
        tables: ``[K, L]`` seconds of each chain: of one phase, or of both.
    """
    return _Configurations(chains, tables, devices).run(time.monotonic() + limit_s)


class _Configurations:
    def __init__(self, chains: Sequence[Chain], tables: Sequence[Floats], devices: int) -> None:
        self._devices = devices
        self._counts = [np.array(chain.counts) for chain in chains]
        self._parts = [parts(table) for table in tables]
        self._rows = [(m, p) for m, own in enumerate(self._parts) for p in range(len(own))]
        self._row = {key: index for index, key in enumerate(self._rows)}
        room = np.arange(devices + 1)
        # Where a knapsack of each size looks back to; those without room look at the last place.
        self._back = [
            np.where(room >= counts[:, None], room - counts[:, None], devices + 1)
            for counts in self._counts
        ]
        self._columns: list[tuple[tuple[int, int, int], ...]] = []
        self._known: set[tuple[tuple[int, int, int], ...]] = set()

    def run(self, deadline: float) -> Configurations:
        if not self._rows:
            return Configurations(bound_s=0.0, columns=())
        for m, p in self._rows:
            self._add(((m, p, int(self._parts[m][p].time_s.argmin())),))
        centre = self._first_duals()
        bound_s = 0.0
        while True:
            seconds, duals = self._master()
            total, added = float(duals.sum()), False
            # Prices between the master's and the best so far: fewer rounds (Wentges).
            for prices in (_CALM * centre + (1 - _CALM) * duals, duals):
                value, column = self._price(prices)
                least_s = float(prices.sum()) / value * (1 - _SLACK)
                if least_s > bound_s:
                    bound_s, centre = least_s, prices
                worth = sum(self._value(duals, *choice) for choice in column)
                if worth > 1 + _CLOSE / 10 and self._add(column):
                    added = True
                    break
            if not added or total <= bound_s * (1 + _CLOSE) or time.monotonic() > deadline:
                break
        used = [
            Column(seconds=float(x), choices=choices)
            for x, choices in zip(seconds, self._columns, strict=False)
            if x > 1e-9 * total
        ]
        return Configurations(bound_s=bound_s, columns=tuple(used))

    def _value(self, duals: Floats, m: int, p: int, k: int) -> float:
        return float(duals[self._row[m, p]] / self._parts[m][p].time_s[k])

    def _first_duals(self) -> Floats:
        """Those of the level's bound: device-seconds, and seconds at each chain's own price."""
        curves = [curve(c.tolist(), own) for c, own in zip(self._counts, self._parts, strict=True)]
        least_s = level_bound(curves, self._devices)
        duals = np.empty(len(self._rows))
        for index, (m, p) in enumerate(self._rows):
            price = curves[m].price(least_s)
            duals[index] = ((self._counts[m] + price) * self._parts[m][p].time_s).min()
        return duals

    def _add(self, column: tuple[tuple[int, int, int], ...]) -> bool:
        if column in self._known:
            return False
        self._known.add(column)
        self._columns.append(column)
        return True

    def _master(self) -> tuple[Floats, Floats]:
        """Seconds of each column, and the duals."""
        least = np.array([self._least(m, p) for m, p in self._rows])
        scale = float(least.max())
        rates = np.zeros((len(self._columns), len(self._rows)))
        for j, column in enumerate(self._columns):
            for m, p, k in column:
                row = self._row[m, p]
                rates[j, row] = least[row] / self._parts[m][p].time_s[k]
        answer = maximize(least / scale, rates, np.ones(len(rates)))
        return answer.prices * scale, answer.x * least

    def _least(self, m: int, p: int) -> float:
        """Scale of a row: every rate is then at most 1."""
        return float(self._parts[m][p].time_s.min())

    def _price(self, duals: Floats) -> tuple[float, tuple[tuple[int, int, int], ...]]:
        """The most valuable combination: a knapsack with one choice for each chain."""
        best = np.append(np.zeros(self._devices + 1), -np.inf)
        taken: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
        for m, own in enumerate(self._parts):
            if not own:
                taken.append((np.empty(0, np.intp), np.empty(0, np.intp)))
                continue
            worth = np.array([duals[self._row[m, p]] / own[p].time_s for p in range(len(own))])
            part = worth.argmax(axis=0)
            value = best[self._back[m]] + worth.max(axis=0)[:, None]
            k = value.argmax(axis=0)
            most = value[k, np.arange(self._devices + 1)]
            chosen = np.where(most > best[:-1], k, -1)
            best[:-1] = np.maximum(best[:-1], most)
            taken.append((chosen, part))
        room, column = self._devices, []
        for m in reversed(range(len(taken))):
            chosen, part = taken[m]
            if len(chosen) and chosen[room] >= 0:
                k = int(chosen[room])
                column.append((m, int(part[k]), k))
                room -= int(self._counts[m][k])
        return float(best[self._devices]), tuple(reversed(column))


def paper_value(counts: Sequence[Sequence[int]], totals: Sequence[Floats], devices: int) -> float:
    """Spindle's continuous optimum of a level: Algorithm 2 with Eq. 11, as printed.

    T is linear between neighbouring valid counts; the bisection runs between the largest T(N)
    and the sum of the times on the fewest devices, and its upper end is the result.

    Args:
        totals: ``[K]`` seconds of each chain on its counts.
    """
    falling = [np.minimum.accumulate(t) for t in totals]

    def needed(seconds: float) -> float:
        total = 0.0
        for own, time_s in zip(counts, falling, strict=True):
            total += float(np.interp(-seconds, -time_s, np.array(own, dtype=np.float64)))
        return total

    low = max(float(t[-1]) for t in falling)
    high = sum(float(t[0]) for t in falling)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if needed(middle) <= devices else (middle, high)
    return high


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


def phase_bound(instance: Instance, tables: Sequence[Floats], limit_s: float) -> float:
    """The best proven bound of one phase.

    Args:
        tables: ``[K, L]`` seconds of every chain in that phase.
        limit_s: seconds for the configuration program.
    """
    chains, devices = instance.chains, instance.devices
    curves = [curve(c.counts, parts(table)) for c, table in zip(chains, tables, strict=True)]
    if not any(own.time_s[-1] for own in curves):
        return 0.0
    found = [level_bound(curves, devices)]
    if instance.levels > 1:
        found.append(dag_bound(curves, [c.after for c in chains], devices)[0])
    found.append(configuration_bound(chains, tables, devices, limit_s=limit_s).bound_s)
    return max(found)
