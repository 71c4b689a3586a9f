"""Where a plan or a profile says something else than the workload that it was made for.

The workload is what a user wants trained; the other two are made from it, and edited by hand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mmplan.errors import InvalidInputError
from mmplan.schema.plan import Plan, PlannedLoss, PlannedModule, PlannedTask
from mmplan.schema.profile import Fingerprint, Profile
from mmplan.schema.workload import (
    DataSpec,
    LossSpec,
    ModuleSpec,
    TaskView,
    Workload,
    resolve_tasks,
)
from mmplan.wording import counted


def planned_task(
    workload: Workload,
    task: TaskView,
    blocks: Mapping[str, int],
    ties: Mapping[str, tuple[tuple[int, ...], ...]],
) -> PlannedTask:
    """What a plan has to say of a task.

    Args:
        workload: whose task it is.
        task: with its defaults filled in.
        blocks: of every module of the task, which the workload does not know.
        ties: likewise, the blocks of each parameter that several blocks share.
    """
    spec = workload.tasks.get(task.name)
    changed: Mapping[str, tuple[str | None, ...]] = spec.inputs if spec else {}
    return PlannedTask(
        batch=task.batch,
        weight=task.weight,
        modules={
            name: PlannedModule(
                inputs=changed.get(name, workload.modules[name].inputs),
                blocks=blocks[name],
                frozen=task.frozen[name],
                share=workload.modules[name].share,
                recompute=workload.modules[name].recompute,
                backbone=bool(workload.modules[name].backbone),
                ties=ties.get(name, ()),
            )
            for name in task.modules
        },
        losses={
            name: PlannedLoss(
                inputs=changed.get(name, workload.losses[name].inputs),
                sync_batch=task.sync_batches.get(name),
                weight=workload.losses[name].weight,
            )
            for name in task.loss_inputs
        },
    )


# Stands before the hash of a factory's name.
_HASH = "sha256:"
_ABSENT = object()


def depended_on(
    workload: Workload, tasks: Collection[str], *, working: Collection[str]
) -> dict[str, Any]:
    """Field to value, of what a plan depends on beside the fields that it has of its own.

    A factory is there as a hash: a plan names no code.

    Args:
        workload: that is planned.
        tasks: of the plan.
        working: those of which the profile knows how much work each sample is.
    """
    views = {name: view for name, view in resolve_tasks(workload).items() if name in tasks}
    found: dict[str, Any] = {"train.zero": workload.train.zero}
    for name, spec in workload.modules.items():
        if any(name in view.modules for view in views.values()):
            found[f"modules.{name}"] = _made_by(spec)
            found[f"modules.{name}.plan"] = spec.plan.model_dump(mode="json", exclude_defaults=True)
    for name, spec in workload.losses.items():
        if any(name in view.loss_inputs for view in views.values()):
            found[f"losses.{name}"] = _made_by(spec)
    for name, view in views.items():
        if name in working and view.data is not None:
            found[f"tasks.{name}.data"] = _made_by(view.data)
    # JSON has no infinity.
    return json.loads(json.dumps(flat_fields(found)), parse_constant=str)


def _made_by(spec: ModuleSpec | LossSpec | DataSpec) -> dict[str, Any]:
    factory = hashlib.sha256(spec.factory.encode()).hexdigest()
    return {"factory": _HASH + factory, "args": spec.model_dump(mode="json")["args"]}


def flat_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings inside mappings as one, with dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat_fields({f"{name}.{key}": inner for key, inner in value.items()})
        else:
            found[name] = value
    return found


def field_changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between a workload's fields then and now, each one line."""
    return [
        _change(name, was, now)
        for name in dict.fromkeys([*now, *was])
        if was.get(name, _ABSENT) != now.get(name, _ABSENT)
    ]


def _change(name: str, was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    if name not in now:
        return f"{name} is gone, it was {json.dumps(was[name])}"
    if name in was and str(was[name]).startswith(_HASH):
        return f"{name} was another one"
    before = f"was {json.dumps(was[name])}" if name in was else "is new"
    return f"{name} {before}, the workload has {json.dumps(now[name])}"


def plan_differences(plan: Plan, workload: Workload) -> list[str]:
    """Fields in which a plan is for something else than its workload, each one line.

    A plan may be for some of the workload's tasks. How many blocks a module has, and which of them
    share parameters, is not in the workload: there the plan is believed. Older plans do not say
    all that they depend on; they are believed too. A solver may use ZeRO where the workload does
    not ask for it.
    """
    known, found = resolve_tasks(workload), list[str]()
    for name, task in plan.tasks.items():
        if name not in known:
            found.append(f"tasks.{name}: the workload has {', '.join(known)}")
            continue
        view = known[name]
        blocks = {m: task.modules[m].blocks if m in task.modules else 1 for m in view.modules}
        ties = {m: planned.ties for m, planned in task.modules.items()}
        wanted = planned_task(workload, view, blocks, ties)
        found += _differences(f"tasks.{name}", _data(task), _data(wanted))
    training = workload.train.model_dump(include={"precision", "optimizer", "reorder"})
    ours = plan.training.model_dump(include=set(training))
    if plan.training.zero < workload.train.zero:
        training["zero"], ours["zero"] = workload.train.zero, plan.training.zero
    found += _differences("training", ours, training)
    if plan.depends_on:
        working = {name for name in plan.tasks if f"tasks.{name}.data.factory" in plan.depends_on}
        now = depended_on(workload, plan.tasks, working=working)
        found += field_changes(plan.depends_on, now)
    return found


def check_agrees(plan: Plan, workload: Workload) -> None:
    """Refuse a plan that is for something else than its workload.

    Raises:
        InvalidInputError: names the first field, and how many differ.
    """
    found = plan_differences(plan, workload)
    if found:
        more = f" (and {counted(len(found) - 1, 'more difference')})" if len(found) > 1 else ""
        raise InvalidInputError(
            f"the plan is for something else than workload {workload.name}: {found[0]}{more}",
            hint="solve again: mmplan solve WORKLOAD --profile PROFILE -o PLAN",
        )


def _data(task: PlannedTask) -> dict[str, Any]:
    """Modules' order says nothing; ranges may be written in several ways."""
    data = task.model_dump(mode="json")
    for name, module in task.modules.items():
        data["modules"][name]["frozen"] = _frozen_blocks(module)
    return data


def _frozen_blocks(module: PlannedModule) -> bool | list[list[int]]:
    if isinstance(module.frozen, bool):
        return module.frozen
    blocks = sorted({b for low, high in module.frozen for b in range(low, high)})
    if len(blocks) in (0, module.blocks):
        return bool(blocks)
    starts = [b for b in blocks if b - 1 not in blocks]
    ends = [b + 1 for b in blocks if b + 1 not in blocks]
    return [[start, end] for start, end in zip(starts, ends, strict=True)]


def _differences(where: str, ours: Any, theirs: Any) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in [*theirs, *(name for name in ours if name not in theirs)]:
            if name not in theirs:
                yield f"{where}.{name}: the workload has none"
            elif name not in ours:
                yield f"{where}.{name}: is missing, and the workload has it"
            else:
                yield from _differences(f"{where}.{name}", ours[name], theirs[name])
    elif ours != theirs:
        yield f"{where}: the plan has {json.dumps(ours)}, the workload {json.dumps(theirs)}"


def check_profiled(profile: Profile, workload: Workload) -> None:
    """Refuse a profile of another model, where the profile says what it was made from.

    Raises:
        InvalidInputError: a factory or its arguments are others.
    """
    profiled = {f"modules.{name}": item for name, item in profile.modules.items()}
    profiled |= {f"losses.{name}": item for name, item in profile.losses.items()}
    specs = {f"modules.{name}": spec for name, spec in workload.modules.items()}
    specs |= {f"losses.{name}": spec for name, spec in workload.losses.items()}
    for where, spec in specs.items():
        made = profiled[where].fingerprint if where in profiled else None
        difference = next(_of_another(where, made, spec), None) if made else None
        if difference:
            raise InvalidInputError(
                f"profile {profile.name} is of another model: {difference}",
                hint="profile this workload again: mmplan profile WORKLOAD -o PROFILE",
            )


def _of_another(where: str, made: Fingerprint, spec: ModuleSpec | LossSpec) -> Iterator[str]:
    now = _fingerprint_of(spec)
    if made.factory != now.factory:
        yield f"{where}.factory was {made.factory}, the workload has {now.factory}"
    for name in sorted({*made.args, *now.args}):
        was, has = (json.dumps(args.get(name)) for args in (made.args, now.args))
        if was != has:
            yield f"{where}.args.{name} was {was}, the workload has {has}"


def fingerprinted(profile: Profile, workload: Workload) -> Profile:
    """The profile, with what it was made from."""

    def marked(found: Mapping[str, Any], specs: Mapping[str, ModuleSpec | LossSpec]) -> Any:
        return {
            name: item.model_copy(update={"fingerprint": _fingerprint_of(specs[name])})
            for name, item in found.items()
        }

    return profile.model_copy(
        update={
            "modules": marked(profile.modules, workload.modules),
            "losses": marked(profile.losses, workload.losses),
        }
    )


def _fingerprint_of(spec: ModuleSpec | LossSpec) -> Fingerprint:
    return Fingerprint(factory=spec.factory, args=spec.model_dump(mode="json")["args"])


def says_its_model(profile: Profile) -> bool:
    """Whether a profile says of every module what it was made from."""
    return all(module.fingerprint is not None for module in profile.modules.values())
