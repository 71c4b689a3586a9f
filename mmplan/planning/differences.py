"""What differs between two plans: devices, degrees, shares, schedules, and the predicted step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mmplan.schema.plan import Plan, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A value that two plans do not share.

    Attributes:
        part: ``plan``, ``predicted``, or a unit's name.
        what: of that part; with the unit (``_s``, ``_bytes``) in its name.
        before: of the first plan, as JSON has it; None where it has none.
        after: of the second.
    """

    part: str
    what: str
    before: Any
    after: Any


def plan_changes(first: Plan, second: Plan) -> list[Change]:
    """The differences: of the whole plans, unit by unit, and of the predictions."""
    units = ({unit.name: unit for unit in plan.units} for plan in (first, second))
    before, after = units
    parts = [("plan", _whole(first), _whole(second))]
    parts += [
        (name, _unit(before.get(name)), _unit(after.get(name)))
        for name in dict.fromkeys((*before, *after))
    ]
    parts.append(("predicted", _predicted(first), _predicted(second)))
    return [change for part in parts for change in _changes(*part)]


def _changes(part: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    for what in dict.fromkeys((*was, *now)):
        if was.get(what) != now.get(what):
            yield Change(part=part, what=what, before=was.get(what), after=now.get(what))


def _whole(plan: Plan) -> dict[str, Any]:
    document = plan.model_dump(mode="json")
    training = {f"training.{name}": value for name, value in document["training"].items()}
    return {
        "workload": plan.workload.sha256,
        "profile": plan.profile.sha256,
        "cluster": plan.cluster.name,
        "devices": plan.devices,
        "idle ranks": list(plan.solver.idle_ranks),
        "tasks": {name: task.batch for name, task in plan.tasks.items()},
        "in turn": list(plan.in_turn),
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
