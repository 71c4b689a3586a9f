"""The fastest way to run several tasks one after another on devices that they share: exact.

Task i takes one of its options. With shared parameters held and summed once,

    T = sum_i time_i + max_d sum_o max(reduce_od),   s.t. for every device d
    sum_o parameters_od + max_i held_id + communicators <= memory,

o over the modules that own parameters; of options whose times hold their reductions T is the sum
of the times alone. Depth-first over the tasks, fastest option first; a branch
ends where the least that the other tasks can add is too slow or too large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from mmplan.arrays import Floats
from mmplan.solvers.baselines.shared_parameters import Ledger
from mmplan.solvers.baselines.task_options import TaskOption
from mmplan.solvers.search_budget import SearchBudget

# Seconds of a look at one option of a task after those of others.
_VISIT_S = 1e-4
Held = Mapping[str, frozenset[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """An option of every task.

    Attributes:
        time_s: T.
        fullest_bytes: on the device that holds most.
    """

    options: tuple[TaskOption, ...]
    time_s: float
    fullest_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinationResult:
    """The answer of a search.

    Attributes:
        best: None where nothing fits.
        bound_s: no combination that fits is faster.
        least_bytes: of the fullest device, where nothing was seen that fits; a bound or what the
            leanest one needs.
    """

    best: Combination | None
    bound_s: float
    least_bytes: float


def fastest(
    ledger: Ledger,
    options: Sequence[Sequence[TaskOption]],
    *,
    memory_bytes: float,
    communicator_bytes: float = 0.0,
    better_than_s: float = np.inf,
    limit_s: float = np.inf,
) -> CombinationResult:
    """The combination with the least T that fits.

    Args:
        ledger: knows the options' holdings.
        options: of every task.
        memory_bytes: of a device.
        communicator_bytes: of a device, for each communicator.
        better_than_s: others are not looked for.
        limit_s: of a quiet core for the search; where they do not suffice ``bound_s`` is less
            than T.
    """
    search = _CombinationSearch(ledger, options, memory_bytes, communicator_bytes, better_than_s)
    return search.run(SearchBudget(limit_s))


class _OutOfTimeError(Exception):
    pass


class _CombinationSearch:
    def __init__(
        self,
        ledger: Ledger,
        options: Sequence[Sequence[TaskOption]],
        memory_bytes: float,
        communicator_bytes: float,
        better_than_s: float,
    ) -> None:
        self._ledger, self._memory, self._each = ledger, memory_bytes, communicator_bytes
        self._options = [sorted(own, key=lambda o: o.alone_s) for own in options]
        self._summed = all(o.reduce_s is not None for own in options for o in own)
        self._best: Combination | None = None
        self._limit_s = better_than_s
        self._least_bytes = np.inf
        self._rest = _Rest(self._options)
        # Of the tasks from i on: [D] activations, and by owner [D] parameters, at least.
        self._rest_held: list[Floats] = [np.zeros(ledger.devices)]
        self._rest_owned: list[dict[str, Floats]] = [{}]
        for own in reversed(self._options):
            self._rest_held.insert(0, self._least_held(own))
            self._rest_owned.insert(0, self._least_owned(own))
        self._sums: dict[frozenset[tuple[str, frozenset[int]]], float] = {}

    def _least_held(self, own: Sequence[TaskOption]) -> Floats:
        least = np.min([o.held_bytes for o in own], axis=0)
        return np.maximum(least, self._rest_held[0])

    def _least_owned(self, own: Sequence[TaskOption]) -> dict[str, Floats]:
        found = dict(self._rest_owned[0])
        for owner in own[0].holdings:
            rows = {o.holdings[owner] for o in own}
            least = np.min([self._ledger.parameters_bytes(row) for row in rows], axis=0)
            found[owner] = np.maximum(found.get(owner, 0.0), least)
        return found

    def run(self, budget: SearchBudget) -> CombinationResult:
        """Search to the end, or as far as the budget goes."""
        self._budget = budget
        bound_s = self._rest.least_s(0, 0.0)
        try:
            self._go(0, (), {}, 0.0)
            bound_s = self._limit_s if self._best is None else self._best.time_s
        except _OutOfTimeError:
            # Of a bound nothing more is known than what the tasks take at least.
            bound_s = min(bound_s, self._limit_s)
        return CombinationResult(
            best=self._best, bound_s=bound_s, least_bytes=float(self._least_bytes)
        )

    def _go(self, i: int, chosen: tuple[TaskOption, ...], held: Held, time_s: float) -> None:
        reduce_s = self._reduce_s(held)
        if time_s + self._rest.least_s(i, reduce_s) >= self._limit_s:
            return
        needed = self._fullest_bytes(i, chosen, held)
        if needed > self._memory:
            self._least_bytes = min(self._least_bytes, needed)
            return
        if i == len(self._options):
            self._limit_s = time_s + reduce_s
            self._best = Combination(
                options=chosen, time_s=self._limit_s, fullest_bytes=float(needed)
            )
            return
        for option in self._options[i]:
            own_s = max(reduce_s, option.reduce_s or 0.0)
            if time_s + option.time_s + self._rest.least_s(i + 1, own_s) >= self._limit_s:
                continue
            if self._budget.is_over:
                raise _OutOfTimeError
            self._budget.spend(_VISIT_S)
            self._go(i + 1, (*chosen, option), joined(held, option), time_s + option.time_s)

    def _reduce_s(self, held: Held) -> float:
        if not self._summed:
            return 0.0
        key = frozenset(held.items())
        if key not in self._sums:
            self._sums[key] = summed_s(self._ledger, held)
        return self._sums[key]

    def _fullest_bytes(self, i: int, chosen: Sequence[TaskOption], held: Held) -> float:
        """Of the fullest device: what is chosen, and the least that the others add."""
        total = self._each * communicators(chosen) + np.zeros(self._ledger.devices)
        for numbers in held.values():
            total += self._ledger.parameters_bytes(numbers)
        for owner, least in self._rest_owned[i].items():
            if owner in held:
                total += np.maximum(least - self._ledger.parameters_bytes(held[owner]), 0)
            else:
                total += least
        total += reduce(np.maximum, (o.held_bytes for o in chosen), self._rest_held[i])
        return float(total.max())


class _Rest:
    """What tasks i, i + 1, ... add to T at least, reductions included.

    Reductions of all tasks together take no less than those of any one of them, r: where they
    take R, every task has an option with r <= R.
    """

    def __init__(self, options: Sequence[Sequence[TaskOption]]) -> None:
        self._reduce_R = np.unique([o.reduce_s or 0.0 for own in options for o in own] + [0.0])
        rest_R = np.zeros(len(self._reduce_R))
        rows = [rest_R]
        for own in reversed(options):
            rest_R = rest_R + self._fastest(own)
            rows.append(rest_R)
        self._rest_TR = rows[::-1]
        # The best with reductions of R or more.
        self._best_TR = [
            np.minimum.accumulate((row + self._reduce_R)[::-1])[::-1] for row in self._rest_TR
        ]

    def _fastest(self, own: Sequence[TaskOption]) -> Floats:
        """[R] the fastest option whose reductions take no more; infinite where there is none."""
        ordered = sorted(own, key=lambda o: o.reduce_s or 0.0)
        least = np.minimum.accumulate([o.time_s for o in ordered])
        count_R = np.searchsorted([o.reduce_s or 0.0 for o in ordered], self._reduce_R, "right")
        return np.where(count_R > 0, least[np.maximum(count_R, 1) - 1], np.inf)

    def least_s(self, i: int, reduce_s: float) -> float:
        """Of tasks from i on with all reductions, where those so far take ``reduce_s``."""
        above = int(np.searchsorted(self._reduce_R, reduce_s, "right"))
        now_s = float(self._rest_TR[i][above - 1]) + reduce_s
        return min(now_s, float(self._best_TR[i][above])) if above < len(self._reduce_R) else now_s


def joined(held: Held, option: TaskOption) -> Held:
    """What is held with one more task."""
    return {**held, **{o: held.get(o, frozenset()) | own for o, own in option.holdings.items()}}


def summed_s(ledger: Ledger, held: Held) -> float:
    """Seconds of the reductions on the device where they take longest."""
    total = np.zeros(ledger.devices)
    for numbers in held.values():
        total += reduce(np.maximum, (ledger.reduce_s(number) for number in sorted(numbers)))
    return float(total.max())


def communicators(chosen: Sequence[TaskOption]) -> int:
    """Of a device that runs all of the tasks."""
    groups = frozenset().union(*(o.communicators.groups for o in chosen))
    gathers = sum(o.communicators.gathers for o in chosen)
    return len(groups) + gathers + max((o.communicators.directions for o in chosen), default=0)
