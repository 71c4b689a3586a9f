"""Share N devices among modules so that the step's formula is smallest, exactly.

Each module m takes one option o. For w = rounds - 1 the step takes

    T = max_m first_s + w * max_m round_s + max_m last_s     s.t.  sum_m devices <= N

(DistMM's objective with the sync apart: forwards before the first one, whole rounds between,
backwards after the last). For given thresholds on the three maxima the least devices of each module
decide feasibility, so a search over boxes of thresholds is exact. A box limits the maxima from
above (by the options it keeps) and from below (its floors). It is bounded by the sum of its three
least feasible maxima, each found by bisection, and by the least feasible ``max_m (first_s + w *
round_s + last_s)``, which is the whole answer when one module is the slowest in all three. Boxes
are looked at best bound first, options that no better choice can hold are dropped, and what is
left is halved. The search ends with a proof: no box left has a bound below T.

Shape suffixes used in this file: O = options of a module.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats, Ints
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.solvers.pareto import staircase
from mmplan.wording import counted

__all__ = ["Balance", "OptionTable", "balance", "balance_best_first", "make_table"]

Times = TypeVar("Times", float, Floats)
TIMES = ("first_s", "round_s", "last_s")
# Boxes looked at for the sake of ties alone: the optimum is proven before.
TIE_BOXES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionTable:
    """What a module may choose from; all columns have length O.

    Attributes:
        devices: devices that the option takes.
        first_s: forwards before the first sync.
        round_s: one round of forwards and backwards between two syncs.
        last_s: backwards after the last sync, and the gradient reduction.
        device_s: busy device-seconds of one step; breaks ties.
        group: options of one group count as one plan among the K best (the same degrees
            with another micro-batch, say).
    """

    devices: Ints
    first_s: Floats
    round_s: Floats
    last_s: Floats
    device_s: Floats
    group: Ints

    def __len__(self) -> int:
        return len(self.devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """One choice for every module.

    Attributes:
        choice: position of the option in each module's table.
        devices: devices taken by each module.
        objective_s: T of this choice.
        device_s: busy device-seconds of the step.
    """

    choice: tuple[int, ...]
    devices: tuple[int, ...]
    objective_s: float
    device_s: float


# Options kept of each module, and the first module that may still be split.
_PartialBalance = tuple[tuple[Ints, ...], int]


def make_table(
    devices: Sequence[int] | Ints,
    first_s: Sequence[float] | Floats,
    *,
    round_s: Sequence[float] | Floats | None = None,
    last_s: Sequence[float] | Floats | None = None,
    device_s: Sequence[float] | Floats | None = None,
    group: Sequence[int] | Ints | None = None,
) -> OptionTable:
    """A table from columns; absent times are 0, every option is a group of its own.

    Raises:
        InvalidInputError: columns of different lengths, a count below 1, or a time that is
            negative or not finite.
    """
    count = len(devices)
    zeros = np.zeros(count)

    def times(values: Sequence[float] | Floats | None) -> Floats:
        return zeros if values is None else np.asarray(values, dtype=np.float64)

    table = OptionTable(
        devices=np.asarray(devices, dtype=np.int64),
        first_s=times(first_s),
        round_s=times(round_s),
        last_s=times(last_s),
        device_s=times(device_s),
        group=np.arange(count) if group is None else np.asarray(group, dtype=np.int64),
    )
    lengths = {len(getattr(table, name)) for name in OptionTable.__slots__}
    if len(lengths) != 1:
        raise InvalidInputError(f"columns of an option table have lengths {sorted(lengths)}")
    if (table.devices < 1).any():
        raise InvalidInputError("an option takes at least one device")
    for name in (*TIMES, "device_s"):
        column = getattr(table, name)
        bad = np.flatnonzero(~(np.isfinite(column) & (column >= 0)))
        if len(bad):
            raise InvalidInputError(
                f"{name}[{bad[0]}] is {column[bad[0]]}: times are finite and not negative"
            )
    return table


def balance(tables: Sequence[OptionTable], *, devices: int, rounds: int) -> Balance:
    """The optimal choice; ties go to fewest device-seconds, then fewest devices.

    Args:
        tables: one per module.
        devices: N.
        rounds: sync batches per step, G.

    Raises:
        InvalidInputError: no modules, or a count below 1.
        InfeasibleError: the least devices of the modules add up to more than N.
    """
    return next(balance_best_first(tables, devices=devices, rounds=rounds))


def balance_best_first(
    tables: Sequence[OptionTable], *, devices: int, rounds: int
) -> Iterator[Balance]:
    """Choices that differ in the group of some module, best first, each the best of its groups.

    Lawler's partition: what is left after taking a choice splits into the choices that
    first differ from it in module 0, in module 1, and so on.

    Raises:
        InvalidInputError: see :func:`balance`.
        InfeasibleError: see :func:`balance`.
    """
    if not tables or devices < 1 or rounds < 1:
        raise InvalidInputError(
            f"{len(tables)} modules, {devices} devices, {rounds} rounds: each must be at least 1"
        )
    _check_feasible(tables, devices)
    boxes, counter = _BoxSearch(tables, devices, rounds - 1), itertools.count()
    heap: list[tuple[tuple[float, float, int], int, _PartialBalance, Balance | None]] = []

    def push(kept: tuple[Ints, ...], split_from: int) -> None:
        bound = boxes.lower_bound(kept)
        if bound is not None:
            heapq.heappush(heap, ((bound, 0.0, 0), next(counter), (kept, split_from), None))

    push(tuple(np.arange(len(table)) for table in tables), 0)
    while heap:
        _, _, (kept, split_from), found = heapq.heappop(heap)
        if found is None:
            # Only bounded so far: most parts are never solved.
            found = boxes.search(kept)
            key = (found.objective_s, found.device_s, sum(found.devices))
            heapq.heappush(heap, (key, next(counter), (kept, split_from), found))
            continue
        yield found
        for index in range(split_from, len(tables)):
            push(_without(tables, kept, found.choice, index), index)


def _without(
    tables: Sequence[OptionTable], kept: tuple[Ints, ...], choice: Sequence[int], index: int
) -> tuple[Ints, ...]:
    """Modules before ``index`` keep the chosen group, module ``index`` loses it."""
    rows: list[Ints] = []
    for m, (table, options) in enumerate(zip(tables, kept, strict=True)):
        same = table.group[options] == table.group[choice[m]]
        rows.append(options[same] if m < index else options[~same] if m == index else options)
    return tuple(rows)


def _check_feasible(tables: Sequence[OptionTable], devices: int) -> None:
    empty = [m for m, table in enumerate(tables) if not len(table)]
    if empty:
        raise InfeasibleError(
            f"module {empty[0]} has no option", hint="loosen its pins, or give devices more memory"
        )
    needed = [int(table.devices.min()) for table in tables]
    if sum(needed) > devices:
        raise InfeasibleError(
            f"{counted(len(tables), 'module')} together need at least "
            f"{' + '.join(map(str, needed))} = {sum(needed)} "
            f"devices, there are {devices}",
            hint=f"give it {counted(sum(needed) - devices, 'more device')}",
        )


@dataclass(slots=True)
class _Columns:
    """A module's options inside a box, with each option's own bound on T in ``total``."""

    index: Ints
    devices: Ints
    # [3, O]: first, round and last.
    times: Floats
    total: Floats
    device_s: Floats

    def where(self, mask: NDArray[np.bool_]) -> _Columns:
        if mask.all():
            return self
        return _Columns(
            self.index[mask],
            self.devices[mask],
            self.times[:, mask],
            self.total[mask],
            self.device_s[mask],
        )


# Options of every module, and the floors of the three maxima.
ThresholdBox = tuple[list[_Columns], list[float]]


class _BoxSearch:
    """Best-first search over boxes of thresholds, with w of the rounds between syncs."""

    def __init__(self, tables: Sequence[OptionTable], devices: int, weight: int) -> None:
        self._tables, self._devices, self._weights = tables, devices, (1, weight, 1)

    def lower_bound(self, kept: Sequence[Ints]) -> float | None:
        """A bound on T over the options kept; None when nothing fits."""
        if any(not len(options) for options in kept):
            return None
        bounds = self._bounds(*self._box(kept))
        return None if bounds is None else bounds[0]

    def search(self, kept: Sequence[Ints]) -> Balance:
        """The best choice among the options kept; something is known to fit."""
        # T, device-seconds and devices of the best choice so far.
        self._best = (np.inf, np.inf, 0)
        heap: list[tuple[float, int, ThresholdBox]] = [(0.0, 0, self._box(kept))]
        ties_left, counter = TIE_BOXES, itertools.count(1)
        while heap:
            bound, _, (box, floors) = heapq.heappop(heap)
            if bound > self._best[0] or (bound == self._best[0] and ties_left <= 0):
                break
            ties_left -= bound == self._best[0]
            for child_bound, child in self._look_into(box, floors):
                heapq.heappush(heap, (child_bound, next(counter), child))
        return Balance(
            choice=self._choice,
            devices=tuple(
                int(t.devices[o]) for t, o in zip(self._tables, self._choice, strict=True)
            ),
            objective_s=self._best[0],
            device_s=self._best[1],
        )

    def _box(self, kept: Sequence[Ints]) -> ThresholdBox:
        """The box of all options kept."""
        box: list[_Columns] = []
        for table, options in zip(self._tables, kept, strict=True):
            times = np.stack([getattr(table, name)[options] for name in TIMES])
            devices, device_s = table.devices[options], table.device_s[options]
            box.append(_Columns(options, devices, times, self._total(*times), device_s))
        return box, [0.0, 0.0, 0.0]

    def _total(self, first: Times, cycle: Times, last: Times) -> Times:
        return first + self._weights[1] * cycle + last

    def _look_into(
        self, box: list[_Columns], floors: list[float]
    ) -> list[tuple[float, ThresholdBox]]:
        """Bound a box, try its choices, and split what may still hold a better one."""
        while True:
            bounds = self._bounds(box, floors)
            if bounds is None:
                return []
            bound, total, lows = bounds
            for most in (total, np.inf):
                self._try_choice(box, most)
            smaller = self._tightened(box, lows)
            if bound > self._best[0] or any(not len(c.index) for c in smaller):
                return []
            if all(len(a.index) == len(b.index) for a, b in zip(box, smaller, strict=True)):
                return [(bound, child) for child in self._split(box, lows)]
            box = smaller

    def _bounds(
        self, box: list[_Columns], floors: list[float]
    ) -> tuple[float, float, list[float]] | None:
        """(bound on T, least maximum of the options' own totals, least maxima).

        None where nothing fits.
        """
        if sum(int(c.devices.min()) for c in box) > self._devices:
            return None
        total = self._least_maximum(box, [c.total for c in box])
        lows = [
            max(floor, self._least_maximum(box, [c.times[d] for c in box]))
            for d, floor in enumerate(floors)
        ]
        return max(total, self._total(*lows)), total, lows

    def _least_maximum(self, box: list[_Columns], values: Sequence[Floats]) -> float:
        """Smallest t such that options of at most t, fewest devices first, fit N together.

        A larger t never needs more devices, so bisecting over the values is exact; the largest
        is known to fit.
        """
        sorted_values: list[Floats] = []
        fewest: list[Ints] = []
        for value, c in zip(values, box, strict=True):
            order = np.argsort(value, kind="stable")
            sorted_values.append(value[order])
            fewest.append(np.minimum.accumulate(c.devices[order]))
        # Every module needs an option: nothing below the largest of the least values can do.
        start = max(float(v[0]) for v in sorted_values)
        above = [v[np.searchsorted(v, start) :] for v in sorted_values]
        candidates: list[float] = np.unique(np.concatenate(above)).tolist()

        def fits(t: float) -> bool:
            positions = [int(np.searchsorted(v, t, side="right")) - 1 for v in sorted_values]
            taken = sum(int(f[p]) for f, p in zip(fewest, positions, strict=True))
            return taken <= self._devices

        return candidates[bisect_left(candidates[:-1], True, key=fits)]

    def _try_choice(self, box: list[_Columns], most_total_s: float) -> None:
        """Take the choice of fewest devices with totals up to a limit, if it is better.

        It fixes the thresholds; of all choices within them the one of least device-seconds is
        kept. A maximum that weighs nothing is no threshold.
        """
        chosen: list[Floats] = []
        for c in box:
            rows = np.flatnonzero(c.total <= most_total_s)
            chosen.append(c.times[:, rows[np.lexsort((c.total[rows], c.devices[rows]))[0]]])
        tops = np.max(chosen, axis=0).tolist()
        value = self._total(*tops)
        if value > self._best[0]:
            return
        limits = [
            top if weight else np.inf for top, weight in zip(tops, self._weights, strict=True)
        ]
        rows, taken, busy_s = self._least_device_seconds(box, limits)
        if (value, busy_s, taken) < self._best:
            self._best = value, busy_s, taken
            self._choice = tuple(int(c.index[i]) for c, i in zip(box, rows, strict=True))

    def _least_device_seconds(
        self, box: list[_Columns], tops: Sequence[float]
    ) -> tuple[tuple[int, ...], int, float]:
        """Rows within the thresholds with least (device-seconds, devices) on at most N devices.

        Merges the modules' fronts of devices against device-seconds.
        """
        front: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
        for c in box:
            rows = np.flatnonzero((c.times <= np.array(tops)[:, None]).all(axis=0))
            order = rows[np.lexsort((c.device_s[rows], c.devices[rows]))]
            busy = c.device_s[order]
            before = np.concatenate(([np.inf], np.minimum.accumulate(busy)[:-1]))
            own = [
                (int(c.devices[i]), float(c.device_s[i]), (int(i),)) for i in order[busy < before]
            ]
            merged = sorted(
                (a[0] + b[0], a[1] + b[1], a[2] + b[2])
                for a in front
                for b in own
                if a[0] + b[0] <= self._devices
            )
            front = staircase(merged, lambda entry: entry[:2])
        taken, busy_s, rows_of = front[-1]
        return rows_of, taken, busy_s

    def _tightened(self, box: list[_Columns], lows: list[float]) -> list[_Columns]:
        """The box without options that no choice as good as the best one can hold."""
        limit = self._best[0] * (1 + 1e-12)
        slack = limit - self._total(*lows)
        smaller: list[_Columns] = []
        for c in box:
            keep = c.total <= limit
            for weight, times, low in zip(self._weights, c.times, lows, strict=True):
                if weight:
                    keep &= weight * (times - low) <= slack
            smaller.append(c.where(keep))
        return smaller

    def _split(self, box: list[_Columns], lows: list[float]) -> Iterator[ThresholdBox]:
        """Halve the widest threshold's values: at most the middle one, or above it."""
        highs = np.max([c.times.max(axis=1) for c in box], axis=0)
        widths = self._weights * (highs - lows)
        d = int(np.argmax(widths))
        if (highs < lows).any() or widths[d] <= 0:
            return
        # The floor may be no option's value any more; without it the lower half could be the whole.
        values = np.unique(np.concatenate([[lows[d]], *(c.times[d] for c in box)]))
        values = values[(values >= lows[d]) & (values <= highs[d])]
        middle = float(values[(len(values) - 1) // 2])
        above = values[values > middle]
        lower = [c.where(c.times[d] <= middle) for c in box]
        if all(len(c.index) for c in lower):
            yield lower, lows
        if len(above):
            floors = list(lows)
            floors[d] = float(above[0])
            yield box, floors
