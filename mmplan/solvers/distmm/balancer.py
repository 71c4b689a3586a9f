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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats, Ints
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.wording import counted

__all__ = ["Balance", "OptionTable", "balance", "balance_best_first", "make_table", "objective_s"]

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
    _check_table(table)
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
    weight, counter = rounds - 1, itertools.count()
    heap: list[tuple[tuple[float, float, int], int, _PartialBalance, Balance | None]] = []

    def push(kept: tuple[Ints, ...], split_from: int) -> None:
        bound = lower_bound(tables, kept, devices=devices, weight=weight)
        if bound is not None:
            heapq.heappush(heap, ((bound, 0.0, 0), next(counter), (kept, split_from), None))

    push(tuple(np.arange(len(table)) for table in tables), 0)
    while heap:
        _, _, (kept, split_from), found = heapq.heappop(heap)
        if found is None:
            # Only bounded so far: most parts are never solved.
            found = search(tables, kept, devices=devices, weight=weight)
            key = (found.objective_s, found.device_s, sum(found.devices))
            heapq.heappush(heap, (key, next(counter), (kept, split_from), found))
            continue
        yield found
        for index in range(split_from, len(tables)):
            push(_without(tables, kept, found.choice, index), index)


def objective_s(tables: Sequence[OptionTable], choice: Sequence[int], *, rounds: int) -> float:
    """T of a choice."""
    first, cycle, last = (
        max(float(getattr(table, name)[o]) for table, o in zip(tables, choice, strict=True))
        for name in TIMES
    )
    return first + (rounds - 1) * cycle + last


def min_devices(table: OptionTable) -> int:
    """Fewest devices that any option of a module takes."""
    return int(table.devices.min())


def _without(
    tables: Sequence[OptionTable], kept: tuple[Ints, ...], choice: Sequence[int], index: int
) -> tuple[Ints, ...]:
    """Modules before ``index`` keep the chosen group, module ``index`` loses it."""
    rows: list[Ints] = []
    for m, (table, options) in enumerate(zip(tables, kept, strict=True)):
        same = table.group[options] == table.group[choice[m]]
        rows.append(options[same] if m < index else options[~same] if m == index else options)
    return tuple(rows)


def _check_table(table: OptionTable) -> None:
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


def _check_feasible(tables: Sequence[OptionTable], devices: int) -> None:
    empty = [m for m, table in enumerate(tables) if not len(table)]
    if empty:
        raise InfeasibleError(
            f"module {empty[0]} has no option", hint="loosen its pins, or give devices more memory"
        )
    needed = [min_devices(table) for table in tables]
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
    times: tuple[Floats, Floats, Floats]
    total: Floats
    device_s: Floats

    def where(self, mask: NDArray[np.bool_]) -> _Columns:
        if mask.all():
            return self
        return _Columns(
            self.index[mask],
            self.devices[mask],
            (self.times[0][mask], self.times[1][mask], self.times[2][mask]),
            self.total[mask],
            self.device_s[mask],
        )


@dataclass(slots=True)
class _Incumbent:
    """The best choice so far, as positions in the whole tables."""

    value: float = np.inf
    device_s: float = np.inf
    devices: int = 0
    choice: tuple[int, ...] | None = None

    def better(self, value: float, device_s: float, devices: int) -> bool:
        return (value, device_s, devices) < (self.value, self.device_s, self.devices)


ThresholdBox = tuple[list[_Columns], tuple[float, float, float]]


def lower_bound(
    tables: Sequence[OptionTable], kept: Sequence[Ints], *, devices: int, weight: int
) -> float | None:
    """A bound on T over the options kept; None when nothing fits."""
    if any(not len(options) for options in kept):
        return None
    box = [_columns(t, o, weight) for t, o in zip(tables, kept, strict=True)]
    bounds = _bounds(box, (0.0, 0.0, 0.0), devices=devices, weight=weight)
    return None if bounds is None else bounds[0]


def search(
    tables: Sequence[OptionTable], kept: Sequence[Ints], *, devices: int, weight: int
) -> Balance:
    """Best-first search over boxes of thresholds; something is known to fit."""
    columns = [_columns(t, o, weight) for t, o in zip(tables, kept, strict=True)]
    best = _Incumbent()
    heap: list[tuple[float, int, ThresholdBox]] = [(0.0, 0, (columns, (0.0, 0.0, 0.0)))]
    ties_left, counter = TIE_BOXES, itertools.count(1)
    while heap:
        bound, _, (box, floors) = heapq.heappop(heap)
        if bound > best.value or (bound == best.value and ties_left <= 0):
            break
        ties_left -= bound == best.value
        for child in _look_into(box, floors, best, devices=devices, weight=weight):
            heapq.heappush(heap, (child[0], next(counter), child[1]))
    assert best.choice is not None  # the fewest devices of the first box fit
    return Balance(
        choice=best.choice,
        devices=tuple(int(t.devices[o]) for t, o in zip(tables, best.choice, strict=True)),
        objective_s=best.value,
        device_s=best.device_s,
    )


def _columns(table: OptionTable, options: Ints, weight: int) -> _Columns:
    first, cycle, last = (
        column[options] for column in (table.first_s, table.round_s, table.last_s)
    )
    return _Columns(
        options,
        table.devices[options],
        (first, cycle, last),
        first + weight * cycle + last,
        table.device_s[options],
    )


def _look_into(
    box: list[_Columns],
    floors: tuple[float, float, float],
    best: _Incumbent,
    *,
    devices: int,
    weight: int,
) -> list[tuple[float, ThresholdBox]]:
    """Bound a box, try its choices, and split what may still hold a better one."""
    weights = (1.0, float(weight), 1.0)
    while True:
        bounds = _bounds(box, floors, devices=devices, weight=weight)
        if bounds is None:
            return []
        bound, total, lows = bounds
        for most in (total, np.inf):
            _try_choice(box, most, best, devices=devices, weights=weights)
        smaller = _tighten(box, lows, best.value, weights)
        if bound > best.value or any(not len(c.index) for c in smaller):
            return []
        if all(len(a.index) == len(b.index) for a, b in zip(box, smaller, strict=True)):
            return [(bound, child) for child in _split(box, lows, weights)]
        box = smaller


def _bounds(
    box: list[_Columns], floors: tuple[float, float, float], *, devices: int, weight: int
) -> tuple[float, float, tuple[float, float, float]] | None:
    """(bound on T, least maximum of the options' own totals, least maxima); None: nothing fits."""
    taken = [c.devices for c in box]
    total = _least_maximum([c.total for c in box], taken, devices)
    if total is None:
        return None
    lows: list[float] = []
    for d, floor in enumerate(floors):
        low = _least_maximum([c.times[d] for c in box], taken, devices)
        lows.append(max(floor, 0.0 if low is None else low))
    bound = max(total, lows[0] + weight * lows[1] + lows[2])
    return bound, total, (lows[0], lows[1], lows[2])


def _highs(box: list[_Columns]) -> tuple[float, float, float]:
    first, cycle, last = (max(float(c.times[d].max()) for c in box) for d in range(3))
    return first, cycle, last


def _least_maximum(
    values: Sequence[Floats], devices_taken: Sequence[Ints], devices: int
) -> float | None:
    """Smallest t such that options of at most t, fewest devices first, fit N together.

    A larger t never needs more devices, so bisecting over the values is exact.
    """
    sorted_values: list[Floats] = []
    fewest: list[Ints] = []
    for value, taken in zip(values, devices_taken, strict=True):
        order = np.argsort(value, kind="stable")
        sorted_values.append(value[order])
        fewest.append(np.minimum.accumulate(taken[order]))
    if sum(int(f[-1]) for f in fewest) > devices:
        return None
    # Every module needs an option: nothing below the largest of the least values can do.
    start = max(float(v[0]) for v in sorted_values)
    candidates = np.unique(np.concatenate([v[np.searchsorted(v, start) :] for v in sorted_values]))

    def fits(t: float) -> bool:
        positions = [int(np.searchsorted(v, t, side="right")) - 1 for v in sorted_values]
        return sum(int(f[p]) for f, p in zip(fewest, positions, strict=True)) <= devices

    return float(candidates[_first_true(len(candidates), lambda i: fits(float(candidates[i])))])


def _first_true(count: int, test: Callable[[int], bool]) -> int:
    """Least i with a monotone ``test``; the last one is known to be true."""
    low, high = -1, count - 1
    while high - low > 1:
        middle = (low + high) // 2
        if test(middle):
            high = middle
        else:
            low = middle
    return high


def _try_choice(
    box: list[_Columns],
    most_total_s: float,
    best: _Incumbent,
    *,
    devices: int,
    weights: tuple[float, float, float],
) -> None:
    """Take the choice of fewest devices with totals up to a limit, if it is better.

    It fixes the thresholds; of all choices within them the one of least device-seconds is
    kept. A maximum that weighs nothing is no threshold.
    """
    picked: list[int] = []
    for c in box:
        rows = np.flatnonzero(c.total <= most_total_s)
        if not len(rows):
            return
        order = np.lexsort((c.total[rows], c.devices[rows]))
        picked.append(int(rows[order[0]]))
    if sum(int(c.devices[i]) for c, i in zip(box, picked, strict=True)) > devices:
        return
    tops = [max(float(c.times[d][i]) for c, i in zip(box, picked, strict=True)) for d in range(3)]
    value = tops[0] + weights[1] * tops[1] + tops[2]
    if value > best.value:
        return
    limits = [top if weight else np.inf for top, weight in zip(tops, weights, strict=True)]
    rows, taken, busy_s = _least_device_seconds(box, limits, devices)
    if best.better(value, busy_s, taken):
        best.value, best.device_s, best.devices = value, busy_s, taken
        best.choice = tuple(int(c.index[i]) for c, i in zip(box, rows, strict=True))


def _least_device_seconds(
    box: list[_Columns], tops: Sequence[float], devices: int
) -> tuple[tuple[int, ...], int, float]:
    """Rows within the thresholds with least (device-seconds, devices) on at most N devices.

    Merges the modules' fronts of devices against device-seconds.
    """
    front: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
    for c in box:
        inside = (c.times[0] <= tops[0]) & (c.times[1] <= tops[1]) & (c.times[2] <= tops[2])
        rows = np.flatnonzero(inside)
        order = rows[np.lexsort((c.device_s[rows], c.devices[rows]))]
        own = [(int(c.devices[i]), float(c.device_s[i]), (int(i),)) for i in _stairs(c, order)]
        merged = sorted(
            (a[0] + b[0], a[1] + b[1], a[2] + b[2])
            for a in front
            for b in own
            if a[0] + b[0] <= devices
        )
        front, lowest = [], np.inf
        for entry in merged:
            if entry[1] < lowest:
                front.append(entry)
                lowest = entry[1]
    taken, busy_s, rows_of = front[-1]
    return rows_of, taken, busy_s


def _stairs(c: _Columns, order: Ints) -> Ints:
    """Of rows sorted by devices, those with fewer device-seconds than all before."""
    busy = c.device_s[order]
    before = np.concatenate(([np.inf], np.minimum.accumulate(busy)[:-1]))
    return order[busy < before]


def _tighten(
    box: list[_Columns],
    lows: tuple[float, float, float],
    value: float,
    weights: tuple[float, float, float],
) -> list[_Columns]:
    """Drop options that no choice as good as the incumbent can hold."""
    base = lows[0] + weights[1] * lows[1] + lows[2]
    slack = value * (1 + 1e-12) - base
    smaller: list[_Columns] = []
    for c in box:
        keep = c.total <= value * (1 + 1e-12)
        for d in range(3):
            if weights[d]:
                keep &= weights[d] * (c.times[d] - lows[d]) <= slack
        smaller.append(c.where(keep))
    return smaller


def _split(
    box: list[_Columns], lows: tuple[float, float, float], weights: tuple[float, float, float]
) -> Iterator[ThresholdBox]:
    """Halve the widest threshold's values: at most the middle one, or above it."""
    highs = _highs(box)
    if any(high < low for high, low in zip(highs, lows, strict=True)):
        return
    widths = [w * (high - low) for w, high, low in zip(weights, highs, lows, strict=True)]
    d = int(np.argmax(widths))
    if widths[d] <= 0:
        return
    values = np.unique(np.concatenate([c.times[d] for c in box]))
    values = values[(values >= lows[d]) & (values <= highs[d])]
    middle = float(values[(len(values) - 1) // 2])
    above = values[values > middle]
    lower = [c.where(c.times[d] <= middle) for c in box]
    if all(len(c.index) for c in lower):
        yield lower, lows
    if len(above):
        floors = list(lows)
        floors[d] = max(lows[d], float(above[0]))
        yield box, (floors[0], floors[1], floors[2])
