"""Checks of a plan and its workload before the workload's code is imported."""

from __future__ import annotations

from pathlib import Path

from mmplan.errors import InvalidInputError
from mmplan.schema.agreement import check_agrees
from mmplan.schema.base import file_sha256
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from mmplan.wording import counted


def find_workload(plan: Plan, plan_path: Path, given: str | Path | None) -> Path:
    """The workload file of a plan: the given one, or the one it names, unchanged.

    Raises:
        InvalidInputError: it is not there, or no longer the one that was planned.
    """
    path = Path(given) if given is not None else plan_path.parent / plan.workload.path
    if not path.is_file():
        raise InvalidInputError(
            f"{plan_path}: its workload {path} is not there",
            hint="name the file with --workload FILE",
        )
    if file_sha256(path) != plan.workload.sha256:
        raise InvalidInputError(
            f"{path} has changed since {plan_path} was made for it",
            hint="solve again: mmplan solve WORKLOAD --profile PROFILE -o PLAN",
        )
    return path


def check_runnable(plan: Plan, workload: Workload, world_size: int) -> None:
    """Refuse a plan for another number of ranks, or that trains something else.

    Raises:
        InvalidInputError: names what, and the mend.
    """
    check_agrees(plan, workload)
    if world_size != plan.devices:
        raise InvalidInputError(
            f"the plan is for {counted(plan.devices, 'rank')}, {world_size} were started",
            hint=f"start {counted(plan.devices, 'rank')}, or solve with --devices {world_size}",
        )
