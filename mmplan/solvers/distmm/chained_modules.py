"""Modules that take each other's outputs: the step's formula along paths, by branch and bound.

With F the forwards before the first sync and B the backwards after the last one,

    F = max over paths of  sum_m ramp_m + max_m tail_m          (ramp = P f, tail = (K - 1) f)
    T = F + (G - 1) * max_m cycle_m + B,                        B likewise, with b

which for a single module is the formula of :mod:`.balancer`. Where the micro-batches of a
path's modules do not hold the same samples, a consumer waits for the end of a micro-batch
that it uses in part: each module between the path's ends then takes one f more, and the
slowest K f. Bounds leave that out, so the search stays exact.

Modules are chosen in order; a part of a choice is bounded by the smallest times of the
modules still free, and by the most that any of them must have left over: its least
tail + (G - 1) cycle + tail that fits the devices.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats
from mmplan.solvers.distmm.module_options import Option
from mmplan.solvers.search_budget import SearchBudget

# Degrees of all modules to the best choice with them: its value, and a row of each module.
Best = dict[tuple[tuple[int, int, int], ...], tuple[float, tuple[int, ...]]]
COLUMNS = (
    "ramp_forward_s",
    "tail_forward_s",
    "cycle_s",
    "ramp_backward_s",
    "tail_backward_s",
    "reduce_s",
)
RAMP_F, TAIL_F, CYCLE, RAMP_B, TAIL_B, REDUCE = range(len(COLUMNS))
# Choices that are improved before the search, and the share of its time that this may take.
STARTS, CLIMBING = 4, 0.5
# Rows of a module for each number of devices, and changes of two modules that are looked at.
ROWS_EACH, MOST_CHANGES = 4, 48
# Seconds of a look at the options of a module, of each of them, and of changing two modules.
LOOK_S, ROW_S, CHANGE_S = 1e-4, 3e-6, 3e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainPlan:
    """A choice, its formula value, and a bound on all that come after it."""

    options: tuple[Option, ...]
    value_s: float
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
        self, *, top: int, effort: SearchBudget, first: Sequence[Sequence[Option]] = ()
    ) -> list[ChainPlan]:
        """The ``top`` best choices that differ in degrees, as far as the effort goes.

        A first, greedy descent always ends, so there is at least one.

        Args:
            top: how many, at least 1.
            effort: for the search.
            first: choices to begin with; the less good ones are then never looked at.
        """
        best: Best = {}
        places = [{id(o): i for i, o in enumerate(own)} for own in self._options]
        for options in first:
            known = tuple(own[id(o)] for own, o in zip(places, options, strict=True))
            self._keep(best, known, top)
        self._keep(best, self._descend(), top)
        kept_s = effort.left_s * (1 - CLIMBING)
        for _, chosen in sorted(best.values())[:STARTS]:
            self._climb(best, chosen, top, effort, kept_s)
        heap: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, ())]
        ticket, unproven = itertools.count(1), float("inf")
        while heap:
            bound, _, chosen = heapq.heappop(heap)
            if bound >= self._worst(best, top):
                break
            # The first look at all modules gives a bound worth the name.
            if chosen and effort.is_over:
                unproven = bound
                break
            children = sorted(self._children(chosen))
            effort.spend(LOOK_S + ROW_S * len(children))
            for child_bound, child in children:
                if child_bound >= self._worst(best, top):
                    break
                if len(child) == len(self._options):
                    self._keep(best, child, top)
                else:
                    heapq.heappush(heap, (child_bound, -len(child) * 10**9 + next(ticket), child))
        return [
            ChainPlan(options=self._picked(c), value_s=value, bound_s=min(value, unproven))
            for value, c in sorted(best.values())
        ]

    def value_s(self, chosen: Sequence[int]) -> float:
        """The formula of a whole choice."""
        rows = [self._times[m][o] for m, o in enumerate(chosen)]
        picked = self._picked(chosen)
        forward = max(_path_s(path, rows, picked, RAMP_F, TAIL_F) for path in self._paths)
        backward = max(
            _path_s(path, rows, picked, RAMP_B, TAIL_B) + max(rows[m][REDUCE] for m in path)
            for path in self._paths
        )
        cycle = max(row[CYCLE] for row in rows)
        return float(forward + (self._rounds - 1) * cycle + backward)

    def _picked(self, chosen: Sequence[int]) -> tuple[Option, ...]:
        return tuple(own[o] for own, o in zip(self._options, chosen, strict=True))

    def _keep(
        self,
        best: Best,
        chosen: tuple[int, ...],
        top: int,
    ) -> None:
        key = tuple((o.tp, o.pp, o.dp) for o in self._picked(chosen))
        entry = self.value_s(chosen), chosen
        best[key] = min(entry, best.get(key, entry))
        while len(best) > top:
            del best[max(best, key=lambda k: best[k])]

    def _worst(
        self,
        best: Best,
        top: int,
    ) -> float:
        return max(best.values())[0] if len(best) >= top else float("inf")

    def _descend(self) -> tuple[int, ...]:
        """Follow the best bound down to one choice."""
        chosen: tuple[int, ...] = ()
        while len(chosen) < len(self._options):
            chosen = min(self._children(chosen))[1]
        return chosen

    def _climb(
        self, best: Best, chosen: tuple[int, ...], top: int, effort: SearchBudget, kept_s: float
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
                if effort.left_s <= kept_s:
                    return
                effort.spend(CHANGE_S)
                for other in self._changed(chosen, a, b):
                    self._keep(best, other, top)
                    if (now_s := self.value_s(other)) < value_s * (1 - 1e-9):
                        chosen, value_s, improved = other, now_s, True

    def _changed(self, chosen: tuple[int, ...], a: int, b: int) -> list[tuple[int, ...]]:
        """The best choices that differ in modules ``a`` and ``b`` only, but for waits."""
        others = sum(int(self._taken[m][o]) for m, o in enumerate(chosen) if m not in (a, b))
        spare = self._devices - others
        rows_a, rows_b = self._promising(chosen, a, spare), self._promising(chosen, b, spare)
        columns = [self._times[m][o][:, None, None] for m, o in enumerate(chosen)]
        columns[b] = self._times[b][rows_b].T[:, None, :]
        columns[a] = self._times[a][rows_a].T[:, :, None]
        if a == b:
            rows_b = rows_b[:1]
        fits = self._taken[a][rows_a][:, None] + (a != b) * self._taken[b][rows_b] <= spare
        values = np.where(fits, self._estimate(columns), np.inf)
        order = np.argsort(values, axis=None)[:MOST_CHANGES]
        found: list[tuple[int, ...]] = []
        for i, j in zip(*np.unravel_index(order, values.shape), strict=True):
            if values[i, j] < np.inf:
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
        return order[before < ROWS_EACH]

    def _estimate(self, columns: Sequence[Floats]) -> Floats:
        """The formula without the waits for cut micro-batches."""
        forward = _longest([self._lower(path, columns, RAMP_F, TAIL_F) for path in self._paths])
        backward = _longest(
            [
                self._lower(path, columns, RAMP_B, TAIL_B)
                + _longest([columns[m][REDUCE] for m in path])
                for path in self._paths
            ]
        )
        cycle = _longest([column[CYCLE] for column in columns])
        return forward + (self._rounds - 1) * cycle + backward

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
        forward = _longest([self._lower(path, columns, RAMP_F, TAIL_F) for path in self._paths])
        backward = _longest([self._lower(path, columns, RAMP_B, TAIL_B) for path in self._paths])
        cycle = _longest([column[CYCLE] for column in columns])
        summed = forward + (self._rounds - 1) * cycle + backward
        return np.maximum(summed, self._left_over(chosen, rows, used))

    @staticmethod
    def _lower(path: tuple[int, ...], columns: Sequence[Floats], ramp: int, tail: int) -> Floats:
        total = columns[path[0]][ramp]
        for m in path[1:]:
            total = total + columns[m][ramp]
        return total + _longest([columns[m][tail] for m in path])

    def _left_over(self, chosen: tuple[int, ...], rows: NDArray[np.intp], used: int) -> Floats:
        """Bound by one module's own work: all rounds of the slowest of the free modules.

        A step takes at least any module's K f + (G - 1) cycle + K b; the free modules
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
            times[:, RAMP_F]
            + times[:, TAIL_F]
            + (self._rounds - 1) * times[:, CYCLE]
            + times[:, RAMP_B]
            + times[:, TAIL_B]
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
    ramp: int,
    tail: int,
) -> float:
    """Time of a path, one way: the ramps, the longest tail, and waits for cut micro-batches."""
    total = sum(rows[m][ramp] for m in path)
    counts = {options[m].count for m in path}
    if len(path) == 1 or (len(counts) == 1 and all(options[m].even for m in path)):
        return float(total + max(rows[m][tail] for m in path))
    each = {m: options[m].forward_s if ramp == RAMP_F else options[m].backward_s for m in path}
    total += sum(each[m] for m in path[1:-1])
    return float(total + max(rows[m][tail] + each[m] for m in path))


def _longest(values: Sequence[Floats]) -> Floats:
    result = values[0]
    for value in values[1:]:
        result = np.maximum(result, value)
    return result


def _fewest_within(limits: Floats, values: Floats, taken: NDArray[np.int64]) -> Floats:
    """Fewest devices whose value is at most each limit; infinite where none is."""
    order = np.argsort(values, kind="stable")
    fewest = np.minimum.accumulate(taken[order]).astype(np.float64)
    position = np.searchsorted(values[order], limits, side="right") - 1
    return np.where(position < 0, np.inf, fewest[np.maximum(position, 0)])
