"""Where a plan or a profile says something else than the workload that it was made for.

The workload is what a user wants trained; the other two are made from it, and edited by hand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from mmplan.errors import InvalidInputError
from mmplan.schema.plan import Plan, PlannedLoss, PlannedModule, PlannedTask
from mmplan.schema.profile import BlockRun, BuiltPart, Fingerprint, Profile
from mmplan.schema.recompute import Recompute
from mmplan.schema.workload import (
    DataSpec,
    LossSpec,
    ModuleSpec,
    TaskView,
    Workload,
    recomputing,
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
                recompute=_recompute(name, workload.modules[name].recompute, blocks[name]),
                backbone=bool(workload.modules[name].backbone),
                items=workload.modules[name].items,
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
    found: dict[str, Any] = {}
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


def _recompute(name: str, said: Recompute | Literal["auto"], blocks: int) -> Recompute:
    """What a plan has of it; what is left to a plan is none until it says otherwise."""
    if isinstance(said, int) and said > blocks:
        raise InvalidInputError(
            f"modules.{name}.recompute: {said} of {counted(blocks, 'block')}",
            hint="full is all of them",
        )
    return "none" if said == "auto" else said


def plan_differences(plan: Plan, workload: Workload) -> list[str]:
    """Fields in which a plan is for something else than its workload, each one line.

    A plan may be for some of the workload's tasks. How many blocks a module has, and which of them
    share parameters, is not in the workload: there the plan is believed. Older plans do not say
    all that they depend on; they are believed too. A solver may use ZeRO where the workload does
    not ask for it.
    """
    workload = recomputing(workload, plan.recomputing)
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
    training = workload.train.model_dump(
        include={"precision", "sequence_parallel", "optimizer", "reorder", "narrow_gradients"}
    )
    ours = plan.training.model_dump(include=set(training))
    if plan.training.zero < workload.train.zero:
        training["zero"], ours["zero"] = workload.train.zero, plan.training.zero
    found += _differences("training", ours, training)
    for unit in plan.units:
        if unit.module in workload.modules:
            least, own = workload.zero_of(unit.module), plan.zero_of(unit)
            if own < least and (unit.zero is not None or least != workload.train.zero):
                found.append(f"units.{unit.name}.zero: the plan has {own}, the workload {least}")
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


def fingerprints_of(profile: Profile) -> dict[str, Fingerprint | None]:
    """The fingerprint of each part of the model, by ``modules.NAME`` and ``losses.NAME``."""
    found = {f"modules.{name}": item.fingerprint for name, item in profile.modules.items()}
    return found | {f"losses.{name}": item.fingerprint for name, item in profile.losses.items()}


def check_profiled(profile: Profile, workload: Workload) -> None:
    """Refuse a profile of another model, where the profile says what it was made from, or of
    another tensor parallelism.

    Factories and arguments are compared; :func:`mmplan.schema.fingerprints.check_model` compares
    what the factories build.

    Raises:
        InvalidInputError: a factory or its arguments are others, or ``train.sequence_parallel``.
    """
    cut = any(point.tp > 1 for module in profile.modules.values() for point in module.points)
    wanted, had = workload.train.sequence_parallel, profile.sequence_parallel
    if cut and wanted != had:
        raise InvalidInputError(
            f"train.sequence_parallel is {str(wanted).lower()}, profile {profile.name} was made "
            f"with {str(had).lower()}",
            hint="profile this workload again: mmplan profile WORKLOAD -o PROFILE",
        )
    for where, made in fingerprints_of(profile).items():
        spec = _spec_of(workload, where)
        if made is not None and spec is not None:
            _refuse_another(profile, _other_factory(where, made, spec))


def check_built(profile: Profile, where: str, was: BuiltPart, now: BuiltPart) -> None:
    """Refuse a part of the model that is not as it was when it was profiled.

    Args:
        profile: whose part it was.
        where: ``modules.NAME`` or ``losses.NAME``.
        was: in the profile.
        now: built from the workload.

    Raises:
        InvalidInputError: says which block differs, and in what.
    """
    _refuse_another(profile, _other_parts(where, was, now))


def _refuse_another(profile: Profile, differences: Iterator[str]) -> None:
    difference = next(differences, None)
    if difference:
        raise InvalidInputError(
            f"profile {profile.name} is of another model: {difference}",
            hint="profile this workload again: mmplan profile WORKLOAD -o PROFILE",
        )


def _spec_of(workload: Workload, where: str) -> ModuleSpec | LossSpec | None:
    kind, _, name = where.partition(".")
    return (workload.modules if kind == "modules" else workload.losses).get(name)


def _other_factory(where: str, made: Fingerprint, spec: ModuleSpec | LossSpec) -> Iterator[str]:
    now = _fingerprint_of(spec, None)
    if made.factory != now.factory:
        yield f"{where}.factory was {made.factory}, the workload has {now.factory}"
    for name in sorted({*made.args, *now.args}):
        was, has = (json.dumps(args.get(name)) for args in (made.args, now.args))
        if was != has:
            yield f"{where}.args.{name} was {was}, the workload has {has}"


def _other_parts(where: str, was: BuiltPart, now: BuiltPart) -> Iterator[str]:
    if was.num_blocks != now.num_blocks:
        yield f"{where} has {counted(now.num_blocks, 'block')}, the profile's has {was.num_blocks}"
        return
    pairs = list(zip(_blocks(was), _blocks(now), strict=True))
    for index, (old, new) in enumerate(pairs):
        block = f"{where}: block {index}" if where.startswith("modules.") else where
        yield from _other_parameters(
            block, was.parameters[old.parameters], now.parameters[new.parameters]
        )
    for here, there, differs in (
        (now, was, "freezes {}, the profile's does not"),
        (was, now, "trains {}, the profile's froze it"),
    ):
        for name in sorted({*here.frozen} - {*there.frozen}):
            own = name if where.startswith("modules.") else name.partition(".")[2]
            yield f"{where}: its factory {differs.format(own)}"
    yield from _other_ties(where, was, now)
    # Another torch may write the same as other operations.
    if was.torch is None or now.torch not in (was.torch, None):
        return
    if now.untraced is not None:
        yield f"{where} cannot be run on the profile's inputs: {now.untraced}"
        return
    for index, (old, new) in enumerate(pairs):
        if old.trace != new.trace:
            block = f"{where}: block {index}" if where.startswith("modules.") else where
            yield f"{block} {_other_operations(_operations(was, old), _operations(now, new))}"


def _blocks(part: BuiltPart) -> Iterator[BlockRun]:
    return (run for run in part.blocks for _ in range(run.count))


def _operations(part: BuiltPart, run: BlockRun) -> Mapping[str, int]:
    return {} if run.operations is None else part.operations[run.operations]


def _other_parameters(block: str, was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in [*now, *(name for name in was if name not in now)]:
        if name not in was:
            yield f"{block} has {name} of {now[name]}, the profile's has none"
        elif name not in now:
            yield f"{block} has no {name}, the profile's has one of {was[name]}"
        elif was[name] != now[name]:
            yield f"{block} has {name} of {now[name]}, the profile's has {was[name]}"


def _other_ties(where: str, was: BuiltPart, now: BuiltPart) -> Iterator[str]:
    old, new = ({_tie_text(tie) for tie in part.ties} for part in (was, now))
    for text in sorted(new - old):
        yield f"{where}: {text} are one parameter, the profile's are not"
    for text in sorted(old - new):
        yield f"{where}: {text} are several parameters, the profile's are one"


def _tie_text(tie: Mapping[str, Sequence[tuple[int, int]]]) -> str:
    return " and ".join(
        f"{name} of block {low}" if high - low == 1 else f"{name} of blocks {low} to {high - 1}"
        for name, ranges in sorted(tie.items())
        for low, high in ranges
    )


def _other_operations(was: Mapping[str, int], now: Mapping[str, int]) -> str:
    names = [name for name in sorted({*was, *now}) if was.get(name, 0) != now.get(name, 0)]
    if not names:
        return "has the operations of the profile's in another order, or of other shapes or numbers"
    ours, theirs = (", ".join(f"{of.get(n, 0)} {n}" for n in names) for of in (now, was))
    return f"computes {ours}, the profile's {theirs}"


def fingerprinted(profile: Profile, workload: Workload, built: Mapping[str, BuiltPart]) -> Profile:
    """The profile, with what it was made from.

    Args:
        profile: without fingerprints.
        workload: that was profiled.
        built: what its factories built, by ``modules.NAME`` and ``losses.NAME``.
    """

    def marked(kind: str, found: Mapping[str, Any], specs: Mapping[str, Any]) -> dict[str, Any]:
        made = {name: _fingerprint_of(specs[name], built.get(f"{kind}.{name}")) for name in found}
        return {n: item.model_copy(update={"fingerprint": made[n]}) for n, item in found.items()}

    return profile.model_copy(
        update={
            "modules": marked("modules", profile.modules, workload.modules),
            "losses": marked("losses", profile.losses, workload.losses),
        }
    )


def _fingerprint_of(spec: ModuleSpec | LossSpec, built: BuiltPart | None) -> Fingerprint:
    args = spec.model_dump(mode="json")["args"]
    return Fingerprint(factory=spec.factory, args=args, built=built)


def belief(profile: Profile, precision: str) -> str | None:
    """A note on a profile that does not say all of its model, or whose times are others.

    Args:
        profile: that is planned with.
        precision: of the training.

    Returns:
        None where the profile is of this model and precision.
    """
    timed = profile.provenance.get("precision", precision)
    if timed != precision:
        return (
            f"profile {profile.name} is of {timed}, training is in {precision}: its times are "
            "believed; mmplan profile times this precision"
        )
    made = fingerprints_of(profile).values()
    if any(item is None for item in made):
        return f"profile {profile.name} does not say of which model it is: it is believed"
    if any(item is not None and item.built is None for item in made):
        return (
            f"profile {profile.name} says the factories of its model and not what they built: "
            "it is believed; mmplan profile writes both"
        )
    return None
