"""Share N devices among modules so that the step's formula is smallest, exactly.

Each module m takes one option o. For w = rounds - 1 the step takes

    T = max_m first_s + w * max_m round_s + max_m last_s     s.t.  sum_m devices <= N

(DistMM's objective with the sync apart: forwards before the first one, whole rounds between,
backwards after the last). For given thresholds on the three maxima the least devices of each module
decide feasibility, so the search of :mod:`mmplan.solvers.distmm.threshold_boxes` over thresholds is
exact.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from mmplan.arrays import Floats, Ints
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.solvers.distmm.threshold_boxes import Balance, OptionTable, lower_bound, search
from mmplan.wording import counted

__all__ = ["Balance", "OptionTable", "balance", "balance_best_first", "make_table", "objective_s"]

TIMES = ("first_s", "round_s", "last_s")
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
