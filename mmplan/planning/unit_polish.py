"""The last changes of a chosen plan: micro-batches and schedules of single units.

The search orders all layouts by one rule and two leads, and refinement finds the order in which the
best of them idles least. In that order other micro-batches may be best, or all forwards before all
backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mmplan.program.schedules.registry import POLICIES
from mmplan.schema.plan import Plan, ScheduleKind, Unit
from mmplan.schema.workload import Pins, Workload
from mmplan.solvers.sample_split import cut, microbatch_sizes


def polished(plan: Plan, workload: Workload, better: Callable[[Plan, Plan], Plan | None]) -> Plan:
    """The plan after changes of one unit at a time, as long as one makes it better.

    The next micro-batches come first, then kinds of schedule, leads and backwards; far ones last.

    Args:
        plan: simulated, without waves.
        workload: its pins limit the changes.
        better: simulates the second plan; it, where it is better than the first, else None.
    """
    for changes_of in (_next_sizes, _as_gpipe, _other_schedules, _other_sizes):
        in_vain = index = 0
        while in_vain < len(plan.units):
            unit, best = plan.units[index], plan
            for changed in changes_of(unit, workload.modules[unit.module].plan):
                units = (*plan.units[:index], changed, *plan.units[index + 1 :])
                best = better(best, plan.model_copy(update={"units": units})) or best
            in_vain = in_vain + 1 if best is plan else 0
            plan, index = best, (index + 1) % len(plan.units)
    return plan


def _next_sizes(unit: Unit, pins: Pins) -> Iterator[Unit]:
    """The unit with the next smaller micro-batches, and with the next larger ones."""
    sizes, own = _sizes(unit, pins), _size(unit)
    smaller, larger = [s for s in sizes if s < own], [s for s in sizes if s > own]
    yield from (_resized(unit, size, pins) for size in (*smaller[-1:], *larger[:1]))


def _other_sizes(unit: Unit, pins: Pins) -> Iterator[Unit]:
    """The unit with any other micro-batches, large ones first: these take less to simulate."""
    sizes = [size for size in _sizes(unit, pins) if size != _size(unit)]
    yield from (_resized(unit, size, pins) for size in reversed(sizes))


def _sizes(unit: Unit, pins: Pins) -> list[int]:
    return list(microbatch_sizes(max(map(sum, unit.microbatches)), pins))


def _resized(unit: Unit, size: int, pins: Pins) -> Unit:
    share, is_pinned = max(map(sum, unit.microbatches)), pins.microbatch is not None
    rows = (cut(sum(row), size, pinned=is_pinned, largest_share=share) for row in unit.microbatches)
    return unit.model_copy(update={"microbatches": tuple(rows)})


def _other_schedules(unit: Unit, pins: Pins) -> Iterator[Unit]:
    """The unit with other leads, with split backwards or whole ones, or as many in flight."""
    own = unit.schedule
    leads = (own.lead - 1, own.lead + 1, own.lead + 3) if POLICIES[own.kind].runs_ahead else ()
    changes: list[dict[str, int | bool]] = [{"lead": lead} for lead in leads if lead >= 0]
    if pins.split_backward == "auto":
        changes.append({"split_backward": not own.split_backward, "even_in_flight": False})
        if own.split_backward and unit.pp > 1:
            changes.append({"even_in_flight": not own.even_in_flight})
    for change in changes:
        yield unit.model_copy(update={"schedule": own.model_copy(update=change)})


def _as_gpipe(unit: Unit, pins: Pins) -> Iterator[Unit]:
    """The unit with all forwards of a round first, and with other micro-batches too."""
    kinds: tuple[ScheduleKind, ...] = ("1f1b", "batch-sync")
    if unit.schedule.kind in kinds:
        schedule = unit.schedule.model_copy(update={"kind": "gpipe", "sync_lead": 0})
        for own in (unit, *_next_sizes(unit, pins)):
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
    parts = [f"micro-batches of {size} in place of {before}"] * (size != before)
    own, new = old.schedule, unit.schedule
    if new.kind != own.kind:
        parts.append("all forwards first (gpipe)")
    if new.lead != own.lead:
        parts.append(f"a lead of {new.lead} in place of {own.lead}")
    if new.split_backward != own.split_backward:
        parts.append(f"{'split' if new.split_backward else 'whole'} backwards")
    elif new.even_in_flight != own.even_in_flight:
        parts.append("as many in flight" if new.even_in_flight else "fewer in flight")
    return f"{unit.name} has {' and '.join(parts)}"
