"""What differs between two plans: workload, devices, degrees, shares, schedules, predicted step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from mmplan.schema.agreement import flat_fields
from mmplan.schema.plan import Plan, Unit
from mmplan.schema.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A value that two plans do not share.

    Attributes:
        part: ``plan``, ``workload``, ``predicted``, or what a unit runs: its module, before it
            its task where there are several.
        what: of that part; with the unit (``_s``, ``_bytes``) in its name. Of the workload a
            field, with dots.
        before: of the first plan, as JSON has it; None where it has none.
        after: of the second.
    """

    part: str
    what: str
    before: Any
    after: Any


def plan_changes(
    first: Plan, second: Plan, *, workloads: tuple[Workload | None, Workload | None]
) -> list[Change]:
    """The differences: of the whole plans, module by module, and of the predictions.

    Args:
        first: plan with the values before.
        second: with the values after.
        workloads: that they are for; None where one is not known any more: then the plans say
            in which fields that they depend on their workloads differ.
    """
    fields = tuple(map(_fields, workloads)) if None not in workloads else ()
    changed = list(_changes("workload", *(fields or (first.depends_on, second.depends_on))))
    known = bool(fields or changed)
    parts = [("plan", _whole(first, known=known), _whole(second, known=known))]
    parts += [(name, _unit(was), _unit(now)) for name, was, now in _same_work(first, second)]
    parts.append(("predicted", _predicted(first), _predicted(second)))
    return [*changed, *(change for part in parts for change in _changes(*part))]


def _fields(workload: Workload | None) -> dict[str, Any]:
    return flat_fields(workload.model_dump(mode="json", exclude_none=True)) if workload else {}


def _same_work(first: Plan, second: Plan) -> Iterator[tuple[str, Unit | None, Unit | None]]:
    """Units of the same task and module, whatever solvers call them; slices in their order."""
    several = len(first.tasks) > 1 or len(second.tasks) > 1
    before, after = _by_work(first), _by_work(second)
    for task, module in dict.fromkeys((*before, *after)):
        pairs = [*zip_longest(before.get((task, module), ()), after.get((task, module), ()))]
        name = f"{task}.{module}" if several else module
        for index, (was, now) in enumerate(pairs):
            yield f"{name}.{index}" if len(pairs) > 1 else name, was, now


def _by_work(plan: Plan) -> dict[tuple[str, str], list[Unit]]:
    found: dict[tuple[str, str], list[Unit]] = {}
    for unit in plan.units:
        found.setdefault((unit.task, unit.module), []).append(unit)
    return found


def _changes(part: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    for what in dict.fromkeys((*was, *now)):
        before, after = was.get(what), now.get(what)
        # What is off, empty or not there differs in no way that a reader looks for.
        if before != after and (before or after):
            yield Change(part=part, what=what, before=before, after=after)


def _whole(plan: Plan, *, known: bool) -> dict[str, Any]:
    """Values of the whole plan; the workload's hash where its fields are not known to differ."""
    document = plan.model_dump(mode="json")
    training = {f"training.{name}": value for name, value in document["training"].items()}
    return {
        **({} if known else {"workload": plan.workload.sha256}),
        "profile": plan.profile.sha256,
        "cluster": plan.cluster.name,
        "devices": plan.devices,
        "idle ranks": list(plan.solver.idle_ranks),
        "tasks": {name: task.batch for name, task in plan.tasks.items()},
        "in turn": list(plan.in_turn),
        "order": plan.order and document["order"],
        "waves": len(plan.waves),
        "solver": plan.solver.name,
        "method": plan.solver.method,
        **training,
    }


def _unit(unit: Unit | None) -> dict[str, Any]:
    if unit is None:
        return {}
    document = unit.model_dump(mode="json")
    schedule = {f"schedule.{name}": value for name, value in document["schedule"].items()}
    return {
        **{name: document[name] for name in ("tp", "pp", "vpp", "dp")},
        "ranks": list(unit.all_ranks),
        **{name: document[name] for name in ("blocks", "samples", "microbatches")},
        **schedule,
    }


def _predicted(plan: Plan) -> dict[str, Any]:
    """The step's seconds by cause, on average over the devices used, and its memory."""
    predicted = plan.predicted
    waiting_s = predicted.bubble_fraction * predicted.iteration_s
    communicating_s = predicted.communication_fraction * predicted.iteration_s
    return {
        "iteration_s": predicted.iteration_s,
        "computing_s": predicted.iteration_s - waiting_s - communicating_s,
        "communicating_s": communicating_s,
        "waiting_s": waiting_s,
        "samples_per_s": predicted.samples_per_s,
        "mfu": predicted.mfu,
        "most memory_bytes": max(predicted.memory_bytes, default=0.0),
        "devices used": predicted.devices_used,
    }
