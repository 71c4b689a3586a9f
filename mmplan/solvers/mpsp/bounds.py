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
  tighter where the valid counts do not fill N. In a graph the chains' seconds in all combinations
  keep the order, and no two of a combination's chains are on one path.

``continuous_optimum`` is Spindle's Eq. 11 (arXiv:2409.03365). It interpolates T linearly and is no
bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

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
# Knapsacks of a graph's chains are divided so many times at most. Chosen by hand: their bound is
# seldom loose after it.
_MAX_NODES = 100
# Seconds of a quiet core: a master program, and each entry of its matrix; pricing, and each value
# of the knapsack.
_MASTER_S = 6e-4
_ENTRY_S = 3e-7
_PRICE_S = 1.5e-4
_CELL_S = 5e-9


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
class Configuration:
    """Counts that run at the same time.

    Attributes:
        counts: by chain; others do not run.
        seconds: for which they do.
    """

    counts: dict[int, int]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBound:
    """A bound, and the configurations of about the same length, in no order.

    Attributes:
        seconds: no schedule takes less.
        configurations: all chains run to their ends in them, but not always in their order.
    """

    seconds: float
    configurations: tuple[Configuration, ...] = ()


def configuration_bound(
    chains: Sequence[Chain], tables: Sequence[Floats], devices: int, *, budget: SearchBudget
) -> PhaseBound:
    """The bound over combinations of counts and the order of the chains, by column generation.

    With duals y and the best column's value z, sum(y) / z is a bound however many columns are
    still missing (Farley). So the search may end at any time. Bounds are in seconds.

    Args:
        tables: ``[K, L]`` seconds of each chain: of one phase, or of both.
        budget: no further column is looked for when it is over.
    """
    return _ColumnGeneration(chains, tables, devices).run(budget)


class _ChainOrder:
    """The order of chains in the dual program: flows along the graph's paths.

    A unit of flow is a path whose chains end before C; it costs each of its chains a unit for every
    second. Chains without others before or after them have no flow.

    Attributes:
        paths: a cover of the chains by as few paths as possible; no two chains of one run at once.
        leaving: ``[M, F]``, 1 where a flow leaves a chain; the last flow of a path ends it.
        surplus: ``[P, F]``, of each chain with others before it, what leaves less what enters.
        total: ``[F]``, 1 where a flow begins a path.
        related: of each chain, those that end before it starts and those that start after it ends.
    """

    def __init__(self, chains: Sequence[Chain]) -> None:
        flows = [(i, m) for m, chain in enumerate(chains) for i in sorted(set(chain.after))]
        leads = {i for i, _ in flows}
        flows += [(m, -1) for m, chain in enumerate(chains) if chain.after and m not in leads]
        ends = np.array(flows, dtype=int).reshape(-1, 2)
        self.leaving, entering = (
            (ends[:, side] == np.arange(len(chains))[:, None]).astype(float) for side in (0, 1)
        )
        follows = np.array([bool(chain.after) for chain in chains])
        self.surplus = (self.leaving - entering)[follows]
        self.total = self.leaving[~follows].sum(axis=0)
        self._entering, self._followers = entering, np.flatnonzero(follows)
        before: list[set[int]] = []
        for chain in chains:
            before.append(set(chain.after).union(*(before[i] for i in chain.after)))
        self.paths = _path_cover(before)
        self.related = [
            own | {m for m, others in enumerate(before) if i in others}
            for i, own in enumerate(before)
        ]

    def prices(self, flows: Floats) -> tuple[Floats, float]:
        """``[M]``, what a second of each chain costs, and the flow of all paths together.

        Where more leaves a chain than enters it, by smoothing or rounding, less leaves it.
        """
        flows = flows.copy()
        for m in self._followers:
            left, entered = float(self.leaving[m] @ flows), float(self._entering[m] @ flows)
            if left > entered:
                flows[self.leaving[m] > 0] *= entered / left
        return self.leaving @ flows, float(self.total @ flows)


def _path_cover(before: Sequence[set[int]]) -> list[list[int]]:
    """The chains on as few paths as possible (Dilworth): a matching of each with a later one.

    Args:
        before: of each chain, all that end before it starts.
    """
    earlier: dict[int, int] = {}

    def is_matched(i: int, seen: set[int]) -> bool:
        for m in range(i + 1, len(before)):
            if i in before[m] and m not in seen:
                seen.add(m)
                if m not in earlier or is_matched(earlier[m], seen):
                    earlier[m] = i
                    return True
        return False

    for i in range(len(before)):
        is_matched(i, set())
    paths: list[list[int]] = []
    for m in range(len(before)):
        path = next((own for own in paths if own[-1] == earlier.get(m)), None)
        if path is None:
            paths.append([m])
        else:
            path.append(m)
    return paths


class _ColumnGeneration:
    """Duals are the seconds that each row is worth, then the flows of the order."""

    def __init__(self, chains: Sequence[Chain], tables: Sequence[Floats], devices: int) -> None:
        self._devices = devices
        self._curves = [curve(c.counts, own) for c, own in zip(chains, tables, strict=True)]
        self._counts = [np.array(chain.counts) for chain in chains]
        self._classes = [scaling_classes(table) for table in tables]
        self._rows = [(m, c) for m, own in enumerate(self._classes) for c in range(len(own))]
        self._row = {key: index for index, key in enumerate(self._rows)}
        self._order = _ChainOrder(chains)
        sizes = np.arange(devices + 1)
        # Index of the knapsack that is left after each count; the last index, whose value is minus
        # infinity, where the count does not fit.
        self._left = [
            np.where(sizes >= counts[:, None], sizes - counts[:, None], devices + 1)
            for counts in self._counts
        ]
        self._columns: list[ConfigurationChoices] = []
        # Of the columns at the last master program.
        self._seconds: list[float] = []
        self._max_nodes = 0

    def run(self, budget: SearchBudget) -> PhaseBound:
        rows = len(self._rows)
        if not rows:
            return PhaseBound(seconds=0.0)
        for m, c in self._rows:
            self._columns.append(((m, c, int(self._classes[m][c].argmin())),))
        centre = self._first_duals()
        bound_s = 0.0
        while True:
            duals = self._master(budget)
            total, added = float(duals[:rows].sum()), False
            # Prices between the best so far and the master's need fewer rounds (Wentges).
            for prices in (_SMOOTHING * centre + (1 - _SMOOTHING) * duals, duals):
                value, column = self._price(prices, budget)
                least_s = float(prices[:rows].sum()) / value * (1 - _LP_TOLERANCE)
                if least_s > bound_s:
                    bound_s, centre = least_s, prices
                is_better = float(self._worth(column) @ duals) > 1 + _COLUMN_GAP / 10
                if is_better and column not in self._columns:
                    self._columns.append(column)
                    added = True
                    break
            if budget.is_over:
                break
            if not added or total <= bound_s * (1 + _COLUMN_GAP):
                if self._max_nodes or all(self._clash(own) is None for own in self._columns):
                    break
                # Only now: it takes longer.
                self._max_nodes = _MAX_NODES
                self._columns = [own for own in self._columns if self._clash(own) is None]
        found = tuple(
            Configuration(
                counts={m: int(self._counts[m][k]) for m, _, k in column}, seconds=seconds
            )
            for column, seconds in zip(self._columns, self._seconds, strict=False)
            if seconds > 0
        )
        return PhaseBound(seconds=bound_s, configurations=found)

    def _first_duals(self) -> Floats:
        """Duals of the level bound: device-seconds, and seconds at each chain's own price."""
        least_s = level_bound(self._curves, self._devices)
        duals = np.zeros(len(self._rows) + len(self._order.total))
        for index, (m, c) in enumerate(self._rows):
            price = self._curves[m].price(least_s)
            duals[index] = ((self._counts[m] + price) * self._classes[m][c]).min()
        return duals

    def _worth(self, column: ConfigurationChoices) -> Floats:
        """What a second of a configuration is worth, by dual."""
        worth = np.zeros(len(self._rows))
        for m, c, k in column:
            worth[self._row[m, c]] = 1 / self._classes[m][c][k]
        busy = [m for m, _, _ in column]
        return np.append(worth, self._order.total - self._order.leaving[busy].sum(axis=0))

    def _master(self, budget: SearchBudget) -> Floats:
        """The duals."""
        order, num_rows = self._order, len(self._rows)
        # Rows are scaled by their least time, so that every rate is at most 1.
        least = np.array([float(self._classes[m][c].min()) for m, c in self._rows])
        unit = np.append(least, np.ones(len(order.total)))
        of_order = np.vstack([order.surplus, order.total])
        worth = np.array([self._worth(column) for column in self._columns]) * unit
        matrix = np.vstack([worth, np.pad(of_order, ((0, 0), (num_rows, 0)))])
        limit = np.concatenate([np.ones(len(worth)), np.zeros(len(order.surplus)), [1.0]])
        budget.spend(_MASTER_S + _ENTRY_S * matrix.size)
        gain = np.append(least / least.max(), 0 * order.total)
        duals, prices = maximize(gain, matrix, limit)
        self._seconds = (prices[: len(worth)] * least.max()).tolist()
        return duals * unit

    def _price(self, duals: Floats, budget: SearchBudget) -> tuple[float, ConfigurationChoices]:
        """The most valuable configuration, and no less than its value: branch and bound.

        Of a chain with others of its paths beside it, either these are left out or the chain is.
        """
        of_order, total = self._order.prices(duals[len(self._rows) :])
        numbers = itertools.count()
        nodes: list[tuple[float, int, ConfigurationChoices, set[int]]] = []

        def look(left_out: set[int]) -> None:
            cells = sum(own.size for m, own in enumerate(self._left) if m not in left_out)
            budget.spend(_PRICE_S + _CELL_S * cells)
            value, column = self._knapsack(duals, of_order, left_out)
            heappush(nodes, (-value, next(numbers), column, left_out))

        look(set())
        for _ in range(self._max_nodes):
            _, _, column, left_out = nodes[0]
            m = self._clash(column)
            if m is None or budget.is_over:
                break
            heappop(nodes)
            look(left_out | self._order.related[m])
            look(left_out | {m})
        return total - nodes[0][0], nodes[0][2]

    def _clash(self, column: ConfigurationChoices) -> int | None:
        """The chain with most others of its paths beside it; None where none has any."""
        busy = {m for m, _, _ in column}
        most, m = max(((len(self._order.related[m] & busy), m) for m in busy), default=(0, -1))
        return m if most else None

    def _knapsack(
        self, duals: Floats, of_order: Floats, left_out: set[int]
    ) -> tuple[float, ConfigurationChoices]:
        """The most valuable configuration with one choice at most for each path of the cover.

        Args:
            of_order: what a second of each chain costs.
        """
        best = np.append(np.zeros(self._devices + 1), -np.inf)
        sizes = np.arange(self._devices + 1)
        classes: dict[int, Indices] = {}
        taken: list[Indices] = []
        for path in self._order.paths:
            most, chosen = best[:-1].copy(), np.full((2, self._devices + 1), -1)
            for m in (m for m in path if self._classes[m] and m not in left_out):
                values = np.array(
                    [duals[self._row[m, c]] / x for c, x in enumerate(self._classes[m])]
                )
                classes[m] = values.argmax(axis=0)
                value = best[self._left[m]] + (values.max(axis=0) - of_order[m])[:, None]
                k = value.argmax(axis=0)
                own = value[k, sizes]
                better = own > most
                most[better] = own[better]
                chosen[:, better] = np.stack([np.full_like(k, m), k])[:, better]
            best[:-1] = most
            taken.append(chosen)
        free, column = self._devices, list[tuple[int, int, int]]()
        for chosen in reversed(taken):
            m, k = chosen[:, free].tolist()
            if m >= 0:
                column.append((m, int(classes[m][k]), k))
                free -= int(self._counts[m][k])
        return float(best[self._devices]), tuple(sorted(column))


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


def phase_bound(instance: Instance, tables: Sequence[Floats], budget: SearchBudget) -> PhaseBound:
    """The best of the three bounds for one phase, with the configurations of the third.

    Args:
        tables: ``[K, L]`` seconds of every chain in that phase.
        budget: of the configuration program.
    """
    chains, devices = instance.chains, instance.devices
    curves = [curve(c.counts, table) for c, table in zip(chains, tables, strict=True)]
    if not any(own.time_s[-1] for own in curves):
        return PhaseBound(seconds=0.0)
    best = configuration_bound(chains, tables, devices, budget=budget)
    found = [best.seconds, level_bound(curves, devices)]
    if instance.levels > 1:
        found.append(dag_bound(curves, [c.after for c in chains], devices)[0])
    return replace(best, seconds=max(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundBounds:
    """Bounds of one round, as the plan reports them.

    Attributes:
        total_s: no schedule's forwards and backwards take less.
        area_s: all device-seconds over the number of devices: the bound where segments of one
            MetaOp overlap in time, micro-batch by micro-batch.
        configurations: of the forward.
        note: both parts of the bound, and Spindle's continuous optimum.
        curves: seconds of every MetaOp against devices, for a whole step.
    """

    total_s: float
    area_s: float
    configurations: tuple[Configuration, ...]
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
    forward = phase_bound(instance, [c.forward_s for c in chains], budget.part(half_s))
    forward_s, ratio = forward.seconds, backward_ratio(chains)
    if ratio is not None:
        backward_s = ratio * forward_s
    else:
        backward = phase_bound(instance, [c.backward_s for c in chains], budget.part(half_s))
        backward_s = backward.seconds
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
        configurations=forward.configurations,
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
