"""Fused or split backwards: the workload's choice, else the faster plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from mmplan.errors import InvalidInputError
from mmplan.planning.plan_parts import peak_bytes
from mmplan.program.lower import lower
from mmplan.schema.cluster import Cluster
from mmplan.schema.plan import Plan, Unit
from mmplan.schema.workload import Workload

# A plan with split backwards must shorten the step to less than this share; chosen by hand.
SHORTER = 0.99
# End of the label of the same plan with fused backwards.
FUSED = ", fused backwards"


def pinned_backwards(units: Sequence[Unit], workload: Workload) -> tuple[Unit, ...]:
    """The units with the backwards that the workload asks for; "auto" begins with fused ones."""
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
                _changed(unit, split=True, even=even) if is_free else unit
                for unit, is_free in zip(units, free, strict=True)
            )


def _changed(unit: Unit, *, split: bool, even: bool) -> Unit:
    changes = {"split_backward": split, "even_in_flight": even}
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
