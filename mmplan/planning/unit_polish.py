"""The last changes of a chosen plan: micro-batches and kinds of schedule of single units.

The search orders all layouts by one rule and two leads, and refinement finds the order in which the
best of them idles least. In that order other micro-batches may be best, or all forwards before all
backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mmplan.schema.plan import Plan, ScheduleKind, Unit
from mmplan.schema.workload import Pins, Workload
from mmplan.solvers.sample_split import cut, microbatch_sizes


def polished(plan: Plan, workload: Workload, better: Callable[[Plan, Plan], Plan | None]) -> Plan:
    """The plan after changes of one unit at a time, as long as one makes it better.

    All micro-batches come before kinds of schedule, which gain less often.

    Args:
        plan: simulated, without waves.
        workload: its pins limit the micro-batches.
        better: simulates the second plan; it, where it is better than the first, else None.
    """
    for changes_of in (_other_sizes, _as_gpipe):
        in_vain = index = 0
        while in_vain < len(plan.units):
            unit, best = plan.units[index], plan
            for changed in changes_of(unit, workload.modules[unit.module].plan):
                units = (*plan.units[:index], changed, *plan.units[index + 1 :])
                best = better(best, plan.model_copy(update={"units": units})) or best
            in_vain = in_vain + 1 if best is plan else 0
            plan, index = best, (index + 1) % len(plan.units)
    return plan


def _other_sizes(unit: Unit, pins: Pins) -> Iterator[Unit]:
    """The unit with the next smaller micro-batches, and with the next larger ones."""
    share, own = max(map(sum, unit.microbatches)), _size(unit)
    sizes = list(microbatch_sizes(share, pins))
    smaller, larger = [s for s in sizes if s < own], [s for s in sizes if s > own]
    for size in (*smaller[-1:], *larger[:1]):
        is_pinned = pins.microbatch is not None
        rows = (
            cut(sum(row), size, pinned=is_pinned, largest_share=share) for row in unit.microbatches
        )
        yield unit.model_copy(update={"microbatches": tuple(rows)})


def _as_gpipe(unit: Unit, pins: Pins) -> Iterator[Unit]:
    """The unit with all forwards of a round first, and with other micro-batches too."""
    kinds: tuple[ScheduleKind, ...] = ("1f1b", "batch-sync")
    if unit.schedule.kind in kinds:
        schedule = unit.schedule.model_copy(update={"kind": "gpipe"})
        for own in (unit, *_other_sizes(unit, pins)):
            yield own.model_copy(update={"schedule": schedule})


def _size(unit: Unit) -> int:
    return max(map(max, unit.microbatches))


def polish_notes(plan: Plan, before: Plan) -> list[str]:
    """What the last changes were and what they gain; nothing without any."""
    changed = [
        _what_changed(unit, old)
        for unit, old in zip(plan.units, before.units, strict=True)
        if unit != old
    ]
    if not changed:
        return []
    gain = 1 - plan.predicted.iteration_s / before.predicted.iteration_s
    return [f"{', '.join(changed)}: in this order the step takes {gain:.1%} less"]


def _what_changed(unit: Unit, old: Unit) -> str:
    size, before = _size(unit), _size(old)
    parts = [f"{unit.name} has micro-batches of {size} in place of {before}"] * (size != before)
    if unit.schedule != old.schedule:
        parts.append(f"{'' if parts else f'{unit.name} has '}all forwards first (gpipe)")
    return " and ".join(parts)
