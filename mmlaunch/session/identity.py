"""The identity of a run: its workload, and the fields that a resumed run must not change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from mmlaunch.comm.transport import Transport
from mmplan.errors import InvalidInputError
from mmplan.schema.agreement import belief, field_changes, flat_fields
from mmplan.schema.base import file_sha256
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile, load_profile
from mmplan.schema.workload import Workload, resolve_tasks
from mmplan.wording import counted

_TRAIN = {"seed", "optimizer_args", "groups", "clip_grad_norm", "precision"}


def find_workload(plan: Plan, plan_path: Path, given: str | Path | None) -> Path:
    """The workload file of a plan: the given one, or the one it names.

    Raises:
        InvalidInputError: it is not there.
    """
    path = Path(given) if given is not None else plan_path.parent / plan.workload.path
    if not path.is_file():
        raise InvalidInputError(
            f"{plan_path}: its workload {path} is not there",
            hint="name the file with --workload FILE",
        )
    return path


def check_same_workload(workload: Workload, transport: Transport) -> None:
    """Refuse ranks that read different workloads, from files of their machines or by ``--set``.

    Raises:
        InvalidInputError: on all ranks; names the first field that differs.
    """
    mine = json.dumps(flat_fields(workload.model_dump(mode="json")))
    here, first = json.loads(mine), json.loads(transport.broadcast_object(mine, 0))
    others = [name for name in {**first, **here} if here.get(name) != first.get(name)]
    for rank, names in enumerate(transport.gather_objects(others[:1])):
        for name in names:
            raise InvalidInputError(
                f"rank {rank} has another workload than rank 0: {name} differs",
                hint="give every machine the same workload file and the same --set",
            )


def find_profile(plan: Plan, plan_path: Path) -> tuple[Profile | None, str | None]:
    """The profile that a plan was made from, which says what model it is for.

    Returns:
        The profile, and a note on what it does not say; None and a note where it is gone.

    Raises:
        InvalidInputError: it is there and cannot be read.
    """
    path = plan_path.parent / plan.profile.path
    without = "the model is not compared with the one that was profiled"
    if not path.is_file():
        return None, f"{plan_path}: its profile {path} is not there: {without}"
    if file_sha256(path) != plan.profile.sha256:
        return None, f"{path} has changed since {plan_path} was made from it: {without}"
    profile = load_profile(path)
    return profile, belief(profile, plan.training.precision)


def identity_of(workload: Workload) -> dict[str, Any]:
    """Field to value, of every field that decides a step's samples or its update.

    Numbers of steps and the model are not among them: a run may be made longer, and another
    model's shapes are refused anyway.
    """
    found: dict[str, Any] = {}
    for name, task in resolve_tasks(workload).items():
        where = f"tasks.{name}." if workload.tasks else ""
        found[f"{where}batch"] = task.batch
        found[f"{where}weight"] = task.weight
        found[f"{where}data"] = task.data and task.data.model_dump(mode="json")
        for loss, size in task.sync_batches.items():
            found[f"{where}losses.{loss}.sync_batch"] = size
    for name, loss in workload.losses.items():
        found[f"losses.{name}.weight"] = loss.weight
    train = workload.train
    for name, value in train.model_dump(mode="json", include=_TRAIN).items():
        found[f"train.{name}"] = value
    schedule = train.schedule.model_dump(mode="json")
    if train.schedule.kind != "constant":
        schedule["total_steps"] = train.schedule.total_steps or train.steps
    found["train.schedule"] = schedule
    return flat_fields(found)


def check_same_run(path: Path, saved: Any, workload: Workload, *, anyway: bool) -> list[str]:
    """Compare a checkpoint's identity with a workload's.

    Args:
        path: the checkpoint's.
        saved: the checkpoint's; None in older ones, which pass.
        workload: of the resumed run.
        anyway: let differences pass.

    Returns:
        The differences, in words.

    Raises:
        InvalidInputError: there are some.
    """
    if not isinstance(saved, Mapping):
        return []
    was, now = cast("Mapping[str, Any]", saved), json.loads(json.dumps(identity_of(workload)))
    found = field_changes(was, now)
    if found and not anyway:
        more = f" (and {counted(len(found) - 1, 'more difference')})" if len(found) > 1 else ""
        raise InvalidInputError(
            f"{path} was saved by a run that trains otherwise: {found[0]}{more}",
            hint="--resume-anyway goes on with what the workload has; samples may be repeated or "
            "left out",
        )
    return found
