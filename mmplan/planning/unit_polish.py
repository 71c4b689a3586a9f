"""The last changes of a chosen plan: other micro-batches and kinds of schedule of single units.

The search orders all of a plan's layouts by one rule, and refinement finds the order in which the
best of them idles least. In that order smaller micro-batches, or all forwards before all backwards,
may be better than those that were best before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mmplan.schema.plan import Plan, Schedule, ScheduleKind, Unit
from mmplan.schema.workload import Pins, Workload
from mmplan.solvers.sample_split import cut, microbatch_sizes

# Kinds of schedule that a unit may have in place of its own.
_OTHER_KINDS: dict[ScheduleKind, tuple[ScheduleKind, ...]] = {
    "1f1b": ("gpipe",),
    "batch-sync": ("gpipe",),
}
# Sizes below and above a unit's own that are tried; chosen by hand.
_SIZES_BESIDE = 2


def polished(plan: Plan, workload: Workload, better: Callable[[Plan, Plan], Plan | None]) -> Plan:
    """The plan after changes of one unit at a time, as long as one makes it better.

    Args:
        plan: simulated.
        workload: its pins limit the changes.
        better: simulates the second plan; it, where it is better than the first, else None.
    """
    in_vain, index = 0, 0
    while in_vain < len(plan.units):
        unit = plan.units[index]
        found = None
        for changed in _changes(unit, workload.modules[unit.module].plan):
            units = (*plan.units[:index], changed, *plan.units[index + 1 :])
            other = better(found or plan, plan.model_copy(update={"units": units}))
            found = other or found
        in_vain = 0 if found else in_vain + 1
        plan, index = found or plan, (index + 1) % len(plan.units)
    return plan


def _changes(unit: Unit, pins: Pins) -> Iterator[Unit]:
    """The unit with other micro-batches, another kind of schedule, or both."""
    share = max(map(sum, unit.microbatches))
    own = max(map(max, unit.microbatches))
    sizes = list(microbatch_sizes(share, pins))
    smaller = [s for s in sizes if s < own][-_SIZES_BESIDE:]
    larger = [s for s in sizes if s > own][:_SIZES_BESIDE]
    kinds = (unit.schedule.kind, *_OTHER_KINDS.get(unit.schedule.kind, ()))
    for kind in kinds if unit.vpp == 1 else kinds[:1]:
        for size in (own, *reversed(smaller), *larger):
            if (kind, size) != (unit.schedule.kind, own):
                yield _changed(unit, kind, size if size != own else None, share, pins)


def _changed(
    unit: Unit, kind: ScheduleKind, size: int | None, share: int, pins: Pins
) -> Unit:
    schedule = unit.schedule.model_copy(update={"kind": kind})
    rows = unit.microbatches
    if size is not None:
        is_pinned = pins.microbatch is not None
        rows = tuple(
            cut(sum(row), size, pinned=is_pinned, largest_share=share) for row in unit.microbatches
        )
    return unit.model_copy(update={"schedule": schedule, "microbatches": rows})
