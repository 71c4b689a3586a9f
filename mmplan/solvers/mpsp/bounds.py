"""Lower bounds on the time that chains of blocks take on N devices: three relaxations.

In all of them work may be cut anywhere. A chain that may take C seconds then costs at least D(C)
device-seconds: on n devices a scaling class takes T(n) seconds and n T(n) device-seconds, and one
count after another gives every point between. D is the lower convex hull of these points, convex
and non-increasing. It is constant where more time does not help; in this way fractions of a device
and more chains than devices are counted. In terms of the speed 1/T it is the upper concave
envelope with speed(0) = 0.

- one level: the least C with sum D(C) <= N C; the chains all end together;
- a graph of chains: the same with start times, a linear program;
- configurations: at each instant the chains' counts fit in N. The variables of this linear program
  are the durations of all combinations of counts; a knapsack finds the columns. The bound is
  tighter where the valid counts do not fill N; it ignores the order of the chains.

``continuous_optimum`` is Spindle's Eq. 11 (arXiv:2409.03365). It interpolates T linearly and is no
bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmplan.arrays import Floats, Indices
from mmplan.schema.plan import ScalingCurve
from mmplan.solvers.mpsp.instance import (
    Chain,
    Instance,
    backward_ratio,
    faster_counts,
    scaling_classes,
)
from mmplan.solvers.pareto import lower_hull
from mmplan.solvers.search_budget import SearchBudget
from mmplan.wording import counted

# Bisection steps of the continuous optimum: more than a double has bits.
_BISECTIONS = 100
# Share that is taken off a linear program's bound, above its rounding errors.
_LP_TOLERANCE = 1e-7
# Column generation ends once the bound can rise by no more than this share. Chosen by hand: a
# tighter bound costs more rounds.
_COLUMN_GAP = 5e-4
# Weight of the best dual prices so far in pricing (Wentges' smoothing). Chosen by hand.
_SMOOTHING = 0.8
# Seconds of a quiet core: a master program, and each entry of its matrix; pricing, and each value
# of the knapsack.
_MASTER_S = 6e-4
_ENTRY_S = 3e-7
_PRICE_S = 1.5e-4
_CELL_S = 1.5e-8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceSecondsCurve:
    """D(C): least device-seconds of a chain that may take C seconds.

    Attributes:
        time_s: corners of D, ascending; the first is the least time possible.
        area_s: device-seconds at the corners, descending; constant after the last corner.
    """

    time_s: Floats
    area_s: Floats

    def price(self, seconds: float) -> float:
        """Device-seconds that one second less would cost at this time."""
        k = max(1, int(np.searchsorted(self.time_s, seconds)))
        if k >= len(self.time_s):
            return 0.0
        fall = self.area_s[k - 1] - self.area_s[k]
        return float(fall / (self.time_s[k] - self.time_s[k - 1]))


def curve(counts: Sequence[int], table_s: Floats) -> DeviceSecondsCurve:
    """The curve of a chain, whose scaling classes run one after another.

    Args:
        counts: valid device counts, K of them.
        table_s: ``[K, L]`` seconds of its blocks.
    """
    hulls = [
        lower_hull(np.stack([time_s, np.array(counts) * time_s], axis=1))
        for time_s in scaling_classes(table_s)
    ]
    start = np.sum([hull[0] for hull in hulls], axis=0) if hulls else np.zeros(2)
    # Edges in the order of their slopes make the sum of convex curves (a Minkowski sum).
    edges = [edge for hull in hulls for edge in np.diff(hull, axis=0)]
    path = np.array([start, *sorted(edges, key=lambda edge: edge[1] / edge[0])])
    times, areas = np.cumsum(path, axis=0).T
    return DeviceSecondsCurve(time_s=times, area_s=areas)


def level_bound(curves: Sequence[DeviceSecondsCurve], devices: int) -> float:
    """The least C, in seconds, with sum D(C) <= N C; no schedule of the chains ends earlier.

    The sum is linear between the corners of all curves, so C is exact.
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
    """The level bound with the order of the chains: a linear program.

    Variables: start s, seconds c and device-seconds a of each chain, and the end C.

        min C   s.t.  s_j >= s_i + c_i,  s + c <= C,  a >= D(c),  sum a <= N C.

    The dual is solved. Rounding can violate its constraints; the violation times the largest value
    that the variables can have is taken off the bound.

    Args:
        after: for each chain the chains that must end before it starts.

    Returns:
        The bound in seconds, and the seconds c of each chain.
    """
    count, least_s = len(curves), level_bound(curves, devices)
    scale = max(least_s, 1e-300)
    # Constraints: sum of coefficient x variable >= value. Variables: s, c and a of each chain, then
    # C; c and a are counted from their least values.
    rows: list[tuple[list[tuple[int, float]], float]] = []
    for m, own in enumerate(curves):
        times, areas = own.time_s / scale, own.area_s / scale / devices
        rows.append(([(3 * count, 1.0), (m, -1.0), (count + m, -1.0)], times[0]))
        for i in after[m]:
            first_s = float(curves[i].time_s[0]) / scale
            rows.append(([(m, 1.0), (i, -1.0), (count + i, -1.0)], first_s))
        for k in range(len(times) - 1):
            slope = (areas[k + 1] - areas[k]) / (times[k + 1] - times[k])
            value = areas[k] - areas[-1] + slope * (times[0] - times[k])
            rows.append(([(2 * count + m, 1.0), (count + m, -slope)], value))
    base = sum(float(c.area_s[-1]) for c in curves) / scale / devices
    rows.append(([(3 * count, 1.0), *((2 * count + m, -1.0) for m in range(count))], base))
    matrix = np.zeros((3 * count + 1, len(rows)))
    for column, (terms, _) in enumerate(rows):
        for row, value in terms:
            matrix[row, column] = value
    costs = np.append(np.zeros(3 * count), 1.0)
    demand = np.array([value for _, value in rows])
    x, prices = maximize(demand, matrix, costs)
    sequential = sum(float(c.time_s[-1]) for c in curves) / scale
    violation = float(np.minimum(costs - matrix @ x, 0.0).sum()) * sequential
    bound_s = (float(demand @ x) + violation) * scale * (1 - _LP_TOLERANCE)
    durations_s = [
        float(own.time_s[0]) + float(more) * scale
        for own, more in zip(curves, prices[count : 2 * count], strict=True)
    ]
    return max(bound_s, least_s), durations_s


ConfigurationChoices = tuple[tuple[int, int, int], ...]
"""(chain, scaling class, position of its count) of all that runs at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A configuration, and for how many seconds it runs."""

    seconds: float
    choices: ConfigurationChoices


def configuration_bound(
    chains: Sequence[Chain], tables: Sequence[Floats], devices: int, *, budget: SearchBudget
) -> tuple[float, list[Column]]:
    """The bound over combinations of counts, by column generation.

    With duals y and the best column's value z, sum(y) / max(1, z) is a bound however many
    columns are still missing (Farley). So the search may end at any time.

    Args:
        tables: ``[K, L]`` seconds of each chain: of one phase, or of both.
        budget: no further column is looked for when it is over.

    Returns:
        The bound in seconds, and the configurations with a positive duration.
    """
    return _ColumnGeneration(chains, tables, devices).run(budget)


class _ColumnGeneration:
    def __init__(self, chains: Sequence[Chain], tables: Sequence[Floats], devices: int) -> None:
        self._devices = devices
        self._curves = [curve(c.counts, own) for c, own in zip(chains, tables, strict=True)]
        self._counts = [np.array(chain.counts) for chain in chains]
        self._classes = [scaling_classes(table) for table in tables]
        self._rows = [(m, c) for m, own in enumerate(self._classes) for c in range(len(own))]
        self._row = {key: index for index, key in enumerate(self._rows)}
        sizes = np.arange(devices + 1)
        # Index of the knapsack that is left after each count; the last index, whose value is minus
        # infinity, where the count does not fit.
        self._left = [
            np.where(sizes >= counts[:, None], sizes - counts[:, None], devices + 1)
            for counts in self._counts
        ]
        self._cells = sum(own.size for own in self._left)
        self._columns: list[ConfigurationChoices] = []

    def run(self, budget: SearchBudget) -> tuple[float, list[Column]]:
        if not self._rows:
            return 0.0, []
        for m, c in self._rows:
            self._columns.append(((m, c, int(self._classes[m][c].argmin())),))
        centre = self._first_duals()
        bound_s = 0.0
        while True:
            seconds, duals = self._master()
            budget.spend(_MASTER_S + _ENTRY_S * len(self._rows) * len(self._columns))
            total, added = float(duals.sum()), False
            # Prices between the best so far and the master's need fewer rounds (Wentges).
            for prices in (_SMOOTHING * centre + (1 - _SMOOTHING) * duals, duals):
                value, column = self._price(prices)
                budget.spend(_PRICE_S + _CELL_S * self._cells)
                least_s = float(prices.sum()) / value * (1 - _LP_TOLERANCE)
                if least_s > bound_s:
                    bound_s, centre = least_s, prices
                gain = sum(
                    float(duals[self._row[m, c]] / self._classes[m][c][k]) for m, c, k in column
                )
                if gain > 1 + _COLUMN_GAP / 10 and column not in self._columns:
                    self._columns.append(column)
                    added = True
                    break
            if not added or total <= bound_s * (1 + _COLUMN_GAP) or budget.is_over:
                break
        used = [
            Column(seconds=float(x), choices=choices)
            for x, choices in zip(seconds, self._columns, strict=False)
            if x > 1e-9 * total
        ]
        return bound_s, used

    def _first_duals(self) -> Floats:
        """Duals of the level bound: device-seconds, and seconds at each chain's own price."""
        least_s = level_bound(self._curves, self._devices)
        duals = np.empty(len(self._rows))
        for index, (m, c) in enumerate(self._rows):
            price = self._curves[m].price(least_s)
            duals[index] = ((self._counts[m] + price) * self._classes[m][c]).min()
        return duals

    def _master(self) -> tuple[Floats, Floats]:
        """Seconds of each column, and the duals."""
        # Rows are scaled by their least time, so that every rate is at most 1.
        least = np.array([float(self._classes[m][c].min()) for m, c in self._rows])
        scale = float(least.max())
        rates = np.zeros((len(self._columns), len(self._rows)))
        for j, column in enumerate(self._columns):
            for m, c, k in column:
                row = self._row[m, c]
                rates[j, row] = least[row] / self._classes[m][c][k]
        duals, seconds = maximize(least / scale, rates, np.ones(len(rates)))
        return seconds * scale, duals * least

    def _price(self, duals: Floats) -> tuple[float, ConfigurationChoices]:
        """The most valuable configuration: a knapsack with one choice for each chain."""
        best = np.append(np.zeros(self._devices + 1), -np.inf)
        taken: list[tuple[int, Indices, Indices]] = []
        for m in sorted({m for m, _ in self._rows}):
            own = self._classes[m]
            values = np.array([duals[self._row[m, c]] / own[c] for c in range(len(own))])
            best_class = values.argmax(axis=0)
            value = best[self._left[m]] + values.max(axis=0)[:, None]
            k = value.argmax(axis=0)
            most = value[k, np.arange(self._devices + 1)]
            chosen = np.where(most > best[:-1], k, -1)
            best[:-1] = np.maximum(best[:-1], most)
            taken.append((m, chosen, best_class))
        free, column = self._devices, list[tuple[int, int, int]]()
        for m, chosen, best_class in reversed(taken):
            if chosen[free] >= 0:
                k = int(chosen[free])
                column.append((m, int(best_class[k]), k))
                free -= int(self._counts[m][k])
        return float(best[self._devices]), tuple(reversed(column))


def continuous_optimum(instance: Instance, members: Sequence[int]) -> float:
    """Spindle's continuous optimum of a level, in seconds: Algorithm 2 with Eq. 11, as printed.

    T is linear between neighbouring valid counts. The bisection runs between the largest T(N)
    and the sum of the times on the fewest devices; its upper end is the result.

    Args:
        members: indices of the level's chains.
    """
    chains = [instance.chains[m] for m in members]
    counts = [np.array(chain.counts, dtype=np.float64) for chain in chains]
    falling = [np.minimum.accumulate(chain.both_s.sum(axis=1)) for chain in chains]

    def needed(seconds: float) -> float:
        pairs = zip(counts, falling, strict=True)
        return sum(float(np.interp(-seconds, -time_s, own)) for own, time_s in pairs)

    low = max(float(t[-1]) for t in falling)
    high = sum(float(t[0]) for t in falling)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if needed(middle) <= instance.devices else (middle, high)
    return high


# Entries below this are taken for zero where a pivot is looked for: they may be rounding errors.
_MIN_PIVOT = 1e-9
# A column whose gain is below this does not enter the basis: it may be a rounding error.
_MIN_GAIN = 1e-10
# Right-hand sides are raised by up to twice this: without ties between pivots no cycle is possible.
_PERTURBATION = 1e-10
# After so many pivots the answer is taken as it is. Chosen by hand, for a bounded time.
_MAX_PIVOTS = 5000


def maximize(gain: Floats, matrix: Floats, limit: Floats) -> tuple[Floats, Floats]:
    """The x >= 0 with the largest gain x subject to matrix x <= limit: the simplex method.

    Args:
        gain: ``[C]``.
        matrix: ``[R, C]``, entries near 1 where they are not 0.
        limit: ``[R]``, not negative.

    Returns:
        ``[C]`` the optimal x, and ``[R]`` the dual prices, both up to rounding. The program must
        have an optimum.
    """
    rows, columns = matrix.shape
    table = np.zeros((rows + 1, columns + rows + 1))
    table[:rows, :columns] = matrix
    table[:rows, columns:-1] = np.eye(rows)
    # The perturbation differs from row to row (golden ratio) and is the same in every run.
    table[:rows, -1] = limit + _PERTURBATION * (1 + np.modf(np.arange(rows) * 0.6180339887)[0])
    table[rows, :columns] = -gain
    basis = columns + np.arange(rows)
    for _ in range(_MAX_PIVOTS):
        column = int(table[rows, :-1].argmin())
        if table[rows, column] >= -_MIN_GAIN:
            break
        entries = table[:rows, column]
        possible = entries > _MIN_PIVOT
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
    return x[:columns], np.maximum(table[rows, columns:-1], 0.0)


def phase_bound(instance: Instance, tables: Sequence[Floats], budget: SearchBudget) -> float:
    """The best of the three bounds for one phase, in seconds.

    Args:
        tables: ``[K, L]`` seconds of every chain in that phase.
        budget: of the configuration program.
    """
    chains, devices = instance.chains, instance.devices
    curves = [curve(c.counts, table) for c, table in zip(chains, tables, strict=True)]
    if not any(own.time_s[-1] for own in curves):
        return 0.0
    found = [level_bound(curves, devices)]
    if instance.levels > 1:
        found.append(dag_bound(curves, [c.after for c in chains], devices)[0])
    found.append(configuration_bound(chains, tables, devices, budget=budget)[0])
    return max(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundBounds:
    """Bounds of one round, as the plan reports them.

    Attributes:
        total_s: no schedule's forwards and backwards take less.
        area_s: all device-seconds over the number of devices: the bound where segments of one
            MetaOp overlap in time, micro-batch by micro-batch.
        note: both parts of the bound, and Spindle's continuous optimum.
        curves: seconds of every MetaOp against devices, for a whole step.
    """

    total_s: float
    area_s: float
    note: str
    curves: tuple[ScalingCurve, ...]


def round_bounds(instance: Instance, rounds: int, budget: SearchBudget) -> RoundBounds:
    """The bounds of one round.

    Args:
        instance: every MetaOp on its own best degrees.
        rounds: of a step.
        budget: of the configuration programs of both phases.
    """
    chains, half_s = instance.chains, budget.left_s / 2
    forward_s = phase_bound(instance, [c.forward_s for c in chains], budget.part(half_s))
    ratio = backward_ratio(chains)
    if ratio is not None:
        backward_s = ratio * forward_s
    else:
        backward_s = phase_bound(instance, [c.backward_s for c in chains], budget.part(half_s))
    area_s = sum(
        float((np.array(c.counts)[:, None] * table).min(axis=0).sum())
        for c in chains
        for table in (c.forward_s, c.backward_s)
    )
    note = (
        f"{counted(len(chains), 'MetaOp')} on {counted(instance.levels, 'level')}; bound "
        f"{forward_s:.4g} s forward + {backward_s:.4g} s backward a round"
    )
    levels = [instance.of_level(level) for level in range(instance.levels)]
    # Eq. 11 gives every MetaOp of a level devices of its own at the same time.
    if max(map(len, levels)) <= instance.devices:
        optimum_s = sum(continuous_optimum(instance, members) for members in levels)
        note += f"; Spindle's continuous optimum (Eq. 11, no bound) is {optimum_s:.4g} s"
    return RoundBounds(
        total_s=forward_s + backward_s,
        area_s=area_s / instance.devices,
        note=note,
        curves=tuple(_scaling_curve(chain, rounds) for chain in chains),
    )


def _scaling_curve(chain: Chain, rounds: int) -> ScalingCurve:
    seconds = rounds * chain.both_s.sum(axis=1)
    faster = faster_counts(seconds)
    return ScalingCurve(
        name=chain.name,
        devices=tuple(chain.counts[k] for k in faster),
        seconds=tuple(seconds[faster].tolist()),
    )
