"""Whole backwards or split ones: what the workload asks for, and where splitting gains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from mmplan.errors import InvalidInputError
from mmplan.program.lower import lower
from mmplan.schema.cluster import Cluster
from mmplan.schema.plan import Plan, Unit
from mmplan.schema.workload import Workload

# A split backward is worth its trouble where the step takes less than this share of its time.
WORTH = 0.99
# How the label of the same plan without ends.
WHOLE = ", whole backwards"


def pinned_backwards(units: Sequence[Unit], workload: Workload) -> tuple[Unit, ...]:
    """The units with the backwards that the workload asks for, whole ones where it is open."""
    return tuple(
        _changed(unit, split=workload.modules[unit.module].plan.split_backward is True, even=False)
        for unit in units
    )


def best_backwards(
    plan: Plan, workload: Workload, cluster: Cluster, simulated: Callable[[Plan], Plan]
) -> Plan:
    """The plan as it is, or with split backwards where that is faster and fits the memory.

    Args:
        plan: simulated.
        workload: which may leave the backward of a module open, or not.
        cluster: whose devices must hold it.
        simulated: a plan with its prediction.
    """
    best, memory_bytes = plan, cluster.device.memory_bytes
    for units in _variants(plan.units, workload):
        changed = plan.model_copy(update={"units": units})
        if not any(stage.split for stage in lower(changed).stages):
            return best
        with suppress(InvalidInputError):
            changed = simulated(changed)
            faster = changed.predicted.iteration_s < WORTH * best.predicted.iteration_s
            if faster and max(changed.predicted.memory_bytes, default=0.0) <= memory_bytes:
                best = changed
    return best


def _variants(units: Sequence[Unit], workload: Workload) -> Iterator[tuple[Unit, ...]]:
    """First with no more in flight than whole backwards have, then with as much on every stage."""
    free = [workload.modules[unit.module].plan.split_backward == "auto" for unit in units]
    for even in (False, True):
        if any(free) and (not even or any(unit.pp > 1 for unit in units)):
            yield tuple(
                _changed(unit, split=True, even=even) if is_free else unit
                for unit, is_free in zip(units, free, strict=True)
            )


def _changed(unit: Unit, *, split: bool, even: bool) -> Unit:
    changes = {"split_backward": split, "even_in_flight": even}
    return unit.model_copy(update={"schedule": unit.schedule.model_copy(update=changes)})


def split_notes(plan: Plan, whole: Plan) -> list[str]:
    """What splitting gained, if the plan is not the one with whole backwards."""
    if plan is whole:
        return []
    names = [unit.name for unit in plan.units if unit.schedule.split_backward]
    gain = 1 - plan.predicted.iteration_s / whole.predicted.iteration_s
    even = any(unit.schedule.even_in_flight for unit in plan.units)
    more = ", later stages hold more micro-batches for it" if even else ""
    return [
        f"{', '.join(names)}: weight gradients wait for idle times (split backward){more}; the "
        f"step takes {gain:.1%} less than with whole backwards, which are what the formula knows"
    ]
