"""Other schedules of a plan's units: split backwards, and orders that have the same formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from mmplan.errors import InvalidInputError
from mmplan.planning.measured_trials import peak_bytes
from mmplan.program.lower import lower
from mmplan.schema.cluster import Cluster
from mmplan.schema.plan import Plan, Unit
from mmplan.schema.workload import Workload

# A plan with split backwards must shorten the step to less than this share; chosen by hand.
SHORTER = 0.99


def other_orders(units: Sequence[Unit]) -> Iterator[tuple[Unit, ...]]:
    """The same units in orders that have the same formula.

    One or two more forwards before a batch-sync may hide it; and where memory holds one round
    only, batch-sync order without warm-up forwards may idle less than gpipe.
    """
    for sync_lead in (1, 2):
        yield tuple(
            _changed(unit, sync_lead=sync_lead)
            if unit.schedule.kind == "batch-sync" and unit.samples[0] > sum(unit.microbatches[0])
            else unit
            for unit in units
        )
    yield tuple(
        _changed(unit, kind="batch-sync", lead=0) if unit.schedule.kind == "gpipe" else unit
        for unit in units
    )


def pinned_backwards(units: Sequence[Unit], workload: Workload) -> tuple[Unit, ...]:
    """The units with the backwards that the workload asks for; "auto" leaves them as they are."""
    pins = [workload.modules[unit.module].plan.split_backward for unit in units]
    return tuple(
        unit if pin == "auto" else _changed(unit, split_backward=pin, even_in_flight=False)
        for unit, pin in zip(units, pins, strict=True)
    )


def fused_backwards(units: Sequence[Unit], workload: Workload) -> tuple[Unit, ...]:
    """The units with fused backwards where the workload leaves them to the plan."""
    fused = (_changed(unit, split_backward=False, even_in_flight=False) for unit in units)
    return pinned_backwards(tuple(fused), workload)


def best_backwards(
    plan: Plan, workload: Workload, cluster: Cluster, simulated: Callable[[Plan], Plan]
) -> Plan:
    """The plan as it is, or with split backwards where that is faster and fits the memory.

    Args:
        plan: simulated.
        workload: its pins decide which modules may change.
        cluster: its devices' memory is the limit.
        simulated: adds the prediction to a plan.
    """
    best = plan
    for units in _variants(plan.units, workload):
        changed = plan.model_copy(update={"units": units})
        if not any(stage.split for stage in lower(changed).stages):
            return best
        with suppress(InvalidInputError):
            changed = simulated(changed)
            faster = changed.predicted.iteration_s < SHORTER * best.predicted.iteration_s
            if faster and peak_bytes(changed.predicted) <= cluster.device.memory_bytes:
                best = changed
    return best


def _variants(units: Sequence[Unit], workload: Workload) -> Iterator[tuple[Unit, ...]]:
    """First with the fused backwards' micro-batches in flight, then with the same on all stages."""
    free = [workload.modules[unit.module].plan.split_backward == "auto" for unit in units]
    for even in (False, True):
        if any(free) and (not even or any(unit.pp > 1 for unit in units)):
            yield tuple(
                _changed(unit, split_backward=True, even_in_flight=even) if is_free else unit
                for unit, is_free in zip(units, free, strict=True)
            )


def _changed(unit: Unit, **changes: str | int) -> Unit:
    """The unit with changes of its schedule."""
    return unit.model_copy(update={"schedule": unit.schedule.model_copy(update=changes)})


def split_notes(plan: Plan, fused: Plan) -> list[str]:
    """The gain of splitting, if the plan is not the one with fused backwards."""
    if plan is fused:
        return []
    names = [unit.name for unit in plan.units if unit.schedule.split_backward]
    gain = 1 - plan.predicted.iteration_s / fused.predicted.iteration_s
    even = any(unit.schedule.even_in_flight for unit in plan.units)
    more = ", later stages hold more micro-batches for it" if even else ""
    return [
        f"{', '.join(names)}: weight gradients wait for idle times (split backward){more}; the "
        f"step takes {gain:.1%} less than with fused backwards, which are what the formula knows"
    ]
