"""Modules that take each other's outputs: the step's formula along paths, by branch and bound.

With F the forwards before the first sync and B the backwards after the last one,

    F = max over paths of  sum_m fill_m + max_m steady_m      (fill = P f, steady = (K - 1) f)
    T = F + (G - 1) * max_m round_m + B,                        B likewise, with b

which for a single module is the formula of :mod:`.balancer`. Where the micro-batches of a
path's modules do not hold the same samples, a consumer waits for the end of a micro-batch
that it uses in part: each module between the path's ends then takes one f more, and the
slowest K f. Bounds leave that out, so the search stays exact.

Modules are chosen in order; a part of a choice is bounded by the smallest times of the
modules still free, and by the most that any of them must have left over: its least
steady + (G - 1) round + steady that fits the devices.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats
from mmplan.solvers.distmm.module_options import Option
from mmplan.solvers.search_budget import SearchBudget

# Degrees of all modules to the best choice with them: its value, and a row of each module.
Best = dict[tuple[tuple[int, int, int], ...], tuple[float, tuple[int, ...]]]
COLUMNS = (
    "fill_forward_s",
    "steady_forward_s",
    "round_s",
    "drain_backward_s",
    "steady_backward_s",
    "reduce_s",
)
FILL_F, STEADY_F, ROUND, DRAIN_B, STEADY_B, REDUCE = range(len(COLUMNS))
# Choices that are improved before the search: more of them ended in the same optima.
CLIMBED_CHOICES = 4
# Share of the budget for that; the rest is for the proof.
CLIMBING_SHARE = 0.5
# Rows of a module that a change may take, of each number of devices; by hand.
ROWS_PER_DEVICES = 4
# Changes of two modules that are valued exactly, the best by the estimate first; by hand.
MOST_CHANGES = 48
# Seconds on a quiet core: of extending a partial choice, of each of its options, of a change, of
# each pair of rows in a change where these are many.
EXTEND_S = 1e-4
OPTION_S = 3e-6
CHANGE_S = 3e-3
PAIR_S = 3.5e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Options for all modules: the formula without its syncs, and the proof so far.

    Attributes:
        objective_s: the formula without G s.
        bound_s: no later choice has a smaller one.
    """

    options: tuple[Option, ...]
    objective_s: float
    bound_s: float


class ChainSearch:
    """The search for one task.

    Args:
        options: of every module, none empty.
        edges: (producer, consumer) as positions in ``options``, producers first.
        rounds: sync batches per step, G.
        devices: N; the least devices of all modules fit.
    """

    def __init__(
        self,
        options: Sequence[Sequence[Option]],
        *,
        edges: Sequence[tuple[int, int]],
        rounds: int,
        devices: int,
    ) -> None:
        self._options = [sorted(own, key=lambda o: o.first_s + o.last_s) for own in options]
        self._rounds, self._devices = rounds, devices
        self._paths = _paths(len(options), edges)
        self._times = [
            np.array([[getattr(o, name) for name in COLUMNS] for o in own]) for own in self._options
        ]
        self._taken = [np.array([o.devices for o in own]) for own in self._options]
        fewest = [int(taken.min()) for taken in self._taken]
        # Devices that the modules from i on take at least.
        self._fewest_from = [sum(fewest[i:]) for i in range(len(fewest) + 1)]
        self._own = [self._own_s(m) for m in range(len(options))]
        self._limits = [self._limits_from(m) for m in range(1, len(options))]

    def best_first(
        self, *, top: int, budget: SearchBudget, first: Sequence[Sequence[Option]] = ()
    ) -> list[Choice]:
        """The ``top`` best choices that differ in degrees, as far as the budget goes.

        A first, greedy descent always ends, so there is at least one.

        Args:
            top: how many, at least 1.
            budget: for the search.
            first: choices to begin with; the less good ones are then never looked at.
        """
        best: Best = {}
        rows = [{option: i for i, option in enumerate(own)} for own in self._options]
        for options in first:
            self._keep(best, tuple(own[o] for own, o in zip(rows, options, strict=True)), top)
        self._keep(best, self._descend(), top)
        kept_s = budget.left_s * (1 - CLIMBING_SHARE)
        for _, chosen in sorted(best.values())[:CLIMBED_CHOICES]:
            self._climb(best, chosen, top, budget, kept_s)
        # Of equal bounds the choice with most modules comes first, then the older one.
        heap: list[tuple[float, int, int, tuple[int, ...]]] = [(0.0, 0, 0, ())]
        ticket, unproven = itertools.count(1), float("inf")
        while heap:
            bound, _, _, chosen = heapq.heappop(heap)
            if bound >= self._worst(best, top):
                break
            # The first look at all modules gives a bound worth the name.
            if chosen and budget.is_over:
                unproven = bound
                break
            children = sorted(self._children(chosen))
            budget.spend(EXTEND_S + OPTION_S * len(children))
            for child_bound, child in children:
                if child_bound >= self._worst(best, top):
                    break
                if len(child) == len(self._options):
                    self._keep(best, child, top)
                else:
                    heapq.heappush(heap, (child_bound, -len(child), next(ticket), child))
        return [
            Choice(options=self._picked(c), objective_s=value, bound_s=min(value, unproven))
            for value, c in sorted(best.values())
        ]

    def value_s(self, chosen: Sequence[int]) -> float:
        """The formula of a whole choice."""
        rows = [self._times[m][o] for m, o in enumerate(chosen)]
        picked = self._picked(chosen)
        forward = max(_path_s(path, rows, picked, FILL_F, STEADY_F) for path in self._paths)
        backward = max(
            _path_s(path, rows, picked, DRAIN_B, STEADY_B) + max(rows[m][REDUCE] for m in path)
            for path in self._paths
        )
        round_s = max(row[ROUND] for row in rows)
        return float(forward + (self._rounds - 1) * round_s + backward)

    def _picked(self, chosen: Sequence[int]) -> tuple[Option, ...]:
        return tuple(own[o] for own, o in zip(self._options, chosen, strict=True))

    def _keep(self, best: Best, chosen: tuple[int, ...], top: int) -> None:
        key = tuple((o.tp, o.pp, o.dp) for o in self._picked(chosen))
        entry = self.value_s(chosen), chosen
        best[key] = min(entry, best.get(key, entry))
        while len(best) > top:
            del best[max(best, key=lambda k: best[k])]

    def _worst(self, best: Best, top: int) -> float:
        return max(best.values())[0] if len(best) >= top else float("inf")

    def _descend(self) -> tuple[int, ...]:
        """Follow the best bound down to one choice."""
        chosen: tuple[int, ...] = ()
        while len(chosen) < len(self._options):
            chosen = min(self._children(chosen))[1]
        return chosen

    def _climb(
        self, best: Best, chosen: tuple[int, ...], top: int, budget: SearchBudget, kept_s: float
    ) -> None:
        """Change two modules at a time for the better, as long as that helps.

        One alone could not take the devices that another one gives up.
        """
        value_s = self.value_s(chosen)
        modules = range(len(self._options))
        pairs = list(itertools.combinations(modules, 2)) or [(0, 0)]
        improved = True
        while improved:
            improved = False
            for a, b in pairs:
                if budget.left_s <= kept_s:
                    return
                for other in self._changed(chosen, a, b, budget):
                    self._keep(best, other, top)
                    if (now_s := self.value_s(other)) < value_s * (1 - 1e-9):
                        chosen, value_s, improved = other, now_s, True

    def _changed(
        self, chosen: tuple[int, ...], a: int, b: int, budget: SearchBudget
    ) -> list[tuple[int, ...]]:
        """The best choices that differ in modules ``a`` and ``b`` only, but for waits."""
        others = sum(int(self._taken[m][o]) for m, o in enumerate(chosen) if m not in (a, b))
        spare = self._devices - others
        rows_a, rows_b = self._promising(chosen, a, spare), self._promising(chosen, b, spare)
        budget.spend(max(CHANGE_S, PAIR_S * len(rows_a) * len(rows_b)))
        columns = [self._times[m][o][:, None, None] for m, o in enumerate(chosen)]
        columns[b] = self._times[b][rows_b].T[:, None, :]
        columns[a] = self._times[a][rows_a].T[:, :, None]
        if a == b:
            rows_b = rows_b[:1]
        fits = self._taken[a][rows_a][:, None] + (a != b) * self._taken[b][rows_b] <= spare
        values = np.where(fits, self._estimate(columns), np.inf)
        least = values.ravel()
        # Of equal values at the end, which come first must not depend on the processor.
        order = np.flatnonzero(least < np.inf)
        if len(order) > MOST_CHANGES:
            most = np.partition(least, MOST_CHANGES - 1)[MOST_CHANGES - 1]
            order = np.flatnonzero(least <= most)
        order = order[np.argsort(least[order], kind="stable")][:MOST_CHANGES]
        found: list[tuple[int, ...]] = []
        for i, j in zip(*np.unravel_index(order, values.shape), strict=True):
            new = list(chosen)
            new[b], new[a] = int(rows_b[j]), int(rows_a[i])
            found.append(tuple(new))
        return found

    def _promising(self, chosen: tuple[int, ...], m: int, spare: int) -> NDArray[np.intp]:
        """For each number of devices that a module may have, its best rows beside the others'."""
        columns = [self._times[i][o][:, None] for i, o in enumerate(chosen)]
        columns[m] = self._times[m].T
        values = np.broadcast_to(self._estimate(columns), len(self._taken[m]))
        rows = np.flatnonzero(self._taken[m] <= spare)
        order = rows[np.lexsort((values[rows], self._taken[m][rows]))]
        taken = self._taken[m][order]
        # How many rows of the same number of devices come before each.
        before = np.arange(len(order)) - np.searchsorted(taken, taken)
        return order[before < ROWS_PER_DEVICES]

    def _estimate(self, columns: Sequence[Floats]) -> Floats:
        """The formula without the waits for cut micro-batches."""
        reduce_s = [_longest(columns[m][REDUCE] for m in path) for path in self._paths]
        return self._along_paths(columns, reduce_s)

    def _along_paths(self, columns: Sequence[Floats], after_s: Sequence[Floats | float]) -> Floats:
        """The formula's lower bound, with what follows the backwards of each path."""
        forward = _longest(_lower(path, columns, FILL_F, STEADY_F) for path in self._paths)
        backward = _longest(
            _lower(path, columns, DRAIN_B, STEADY_B) + last
            for path, last in zip(self._paths, after_s, strict=True)
        )
        round_s = _longest(column[ROUND] for column in columns)
        return forward + (self._rounds - 1) * round_s + backward

    def _children(self, chosen: tuple[int, ...]) -> list[tuple[float, tuple[int, ...]]]:
        """Every option of the next module that leaves enough devices, with its bound."""
        m = len(chosen)
        used = sum(int(self._taken[i][o]) for i, o in enumerate(chosen))
        spare = self._devices - used - self._fewest_from[m + 1]
        rows = np.flatnonzero(self._taken[m] <= spare)
        bounds = self._bounds(chosen, rows, used)
        return [(float(b), (*chosen, int(o))) for b, o in zip(bounds, rows, strict=True)]

    def _bounds(self, chosen: tuple[int, ...], rows: NDArray[np.intp], used: int) -> Floats:
        """A bound for each option of the next module: smallest times of all free modules."""
        m = len(chosen)
        columns: list[Floats] = [self._times[i][o][:, None] for i, o in enumerate(chosen)]
        columns.append(self._times[m][rows].T)
        left = self._devices - used - int(self._taken[m][rows].min())
        for i in range(m + 1, len(self._options)):
            others = self._fewest_from[m + 1] - int(self._taken[i].min())
            possible = self._times[i][self._taken[i] <= left - others]
            columns.append(possible.min(axis=0)[:, None])
        summed = self._along_paths(columns, [0.0] * len(self._paths))
        return np.maximum(summed, self._left_over(chosen, rows, used))

    def _left_over(self, chosen: tuple[int, ...], rows: NDArray[np.intp], used: int) -> Floats:
        """Bound by one module's own work: all rounds of the slowest of the free modules.

        A step takes at least any module's K f + (G - 1) round + K b; the free modules
        share what is left, so the slowest of them is at least the least maximum that fits.
        """
        m = len(chosen)
        result = self._own[m][rows]
        if m + 1 == len(self._options):
            return result
        limits, fewest = self._limits[m]
        left = self._devices - used - self._taken[m][rows]
        # The least limit whose fewest devices fit what each row leaves; fewest falls.
        positions = np.searchsorted(-fewest, -left)
        return np.maximum(result, limits[positions])

    def _limits_from(self, first: int) -> tuple[Floats, Floats]:
        """Values that the slowest module from ``first`` on may have, and the devices they take."""
        modules = range(first, len(self._options))
        limits = np.unique(np.concatenate([self._own[m] for m in modules]))
        fewest = [_fewest_within(limits, self._own[m], self._taken[m]) for m in modules]
        return limits, np.sum(fewest, axis=0)

    def _own_s(self, m: int) -> Floats:
        times = self._times[m]
        return (
            times[:, FILL_F]
            + times[:, STEADY_F]
            + (self._rounds - 1) * times[:, ROUND]
            + times[:, DRAIN_B]
            + times[:, STEADY_B]
        )


def _paths(count: int, edges: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """All paths from a module without producers to one without consumers."""
    after: dict[int, list[int]] = {m: [] for m in range(count)}
    for producer, consumer in edges:
        after[producer].append(consumer)
    fed = {consumer for _, consumer in edges}

    def walk(m: int) -> list[tuple[int, ...]]:
        return [(m, *rest) for n in after[m] for rest in walk(n)] or [(m,)]

    return [path for m in range(count) if m not in fed for path in walk(m)]


def _path_s(
    path: tuple[int, ...],
    rows: Sequence[Floats],
    options: Sequence[Option],
    fill: int,
    steady: int,
) -> float:
    """Time of a path, one way: fills, the longest steady phase, waits for cut micro-batches."""
    total = sum(rows[m][fill] for m in path)
    counts = {options[m].count for m in path}
    if len(path) == 1 or (len(counts) == 1 and all(options[m].even for m in path)):
        return float(total + max(rows[m][steady] for m in path))
    each = {m: options[m].forward_s if fill == FILL_F else options[m].backward_s for m in path}
    total += sum(each[m] for m in path[1:-1])
    return float(total + max(rows[m][steady] + each[m] for m in path))


def _lower(path: tuple[int, ...], columns: Sequence[Floats], fill: int, steady: int) -> Floats:
    """The path's time without waits for cut micro-batches."""
    return sum(columns[m][fill] for m in path) + _longest(columns[m][steady] for m in path)


def _longest(values: Iterable[Floats]) -> Floats:
    return reduce(np.maximum, values)


def _fewest_within(limits: Floats, values: Floats, taken: NDArray[np.int64]) -> Floats:
    """Fewest devices whose value is at most each limit; infinite where none is."""
    order = np.argsort(values, kind="stable")
    fewest = np.minimum.accumulate(taken[order]).astype(np.float64)
    position = np.searchsorted(values[order], limits, side="right") - 1
    return np.where(position < 0, np.inf, fewest[np.maximum(position, 0)])
