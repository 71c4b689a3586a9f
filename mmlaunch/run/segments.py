"""The segments of a run: which plan trains which steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmlaunch.checkpoint.folder import step_folders
from mmplan.errors import InvalidInputError, MMPlanError, UnfitEnvironmentError
from mmplan.schema.agreement import plan_differences
from mmplan.schema.base import save_document
from mmplan.schema.load import load_plan
from mmplan.schema.plan import Plan
from mmplan.schema.train import TaskSet
from mmplan.schema.workload import Workload, check_tasks

# Makes a plan for these tasks that will be written to this path.
Planner = Callable[[tuple[str, ...], Path], Plan]
PLANS = "plans"
# Other machines look so often for machine 0's plan; chosen by hand.
_POLL_S = 0.5
# Longest wait for that plan, as long as for the machines to come together.
_PATIENCE_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Steps [from_step, until) of a run, trained by one plan."""

    from_step: int
    until: int
    plan: Plan
    path: Path


def sets_of_run(plan: Plan, workload: Workload, tasks: Sequence[str] | None) -> tuple[TaskSet, ...]:
    """The task sets of a run, each from a step on.

    Args:
        plan: the one that was given.
        workload: its workload.
        tasks: of ``--tasks``, which goes before everything else.

    Raises:
        InvalidInputError: an unknown task, or the plan is for other tasks than the workload's
            ``train.tasks_from_step`` ever has.
    """
    if tasks is not None:
        return (TaskSet(from_step=0, tasks=tuple(check_tasks(workload, tasks))),)
    if not workload.train.tasks_from_step:
        return (TaskSet(from_step=0, tasks=tuple(plan.tasks)),)
    sets = workload.task_sets
    if not any(set(plan.tasks) == set(item.tasks) for item in sets):
        raise InvalidInputError(
            f"the plan is for {', '.join(plan.tasks)}, and train.tasks_from_step has "
            f"{'; '.join(', '.join(item.tasks) for item in sets)}",
            hint=f"--tasks {','.join(plan.tasks)} trains these alone; for the others solve again",
        )
    return sets


def first_step(run_dir: Path, checkpoints: str, *, resume: bool) -> int:
    """The first step of a run, or an earlier one: its workers clean up after a killed save."""
    found = step_folders(run_dir / checkpoints) if resume else []
    return found[-1][0] if found else 0


def make_segments(
    sets: Sequence[TaskSet],
    *,
    start: int,
    steps: int,
    plan: Plan,
    workload: Workload,
    path: Path,
    run_dir: Path,
    planner: Planner,
    is_first_node: bool = True,
) -> list[Segment]:
    """A plan for each set from a step on; one that fits is the given one or was made before.

    Every plan exists before the first step, so that a set without a plan ends the run there
    and not in the middle.

    Args:
        sets: by steps, from 0.
        start: steps done.
        steps: of the whole run.
        plan: the one that was given, of which the others have devices and solver.
        workload: of the run.
        path: the plan's file.
        run_dir: the others are kept there.
        planner: makes them.
        is_first_node: the other machines take the plans that it writes.

    Raises:
        MMPlanError: from the planner.
    """
    live = [item for item in sets if item.from_step < steps] or [sets[0]]
    ends = [item.from_step for item in live[1:]] + [steps]
    made = {frozenset(plan.tasks): (plan, path)}
    segments: list[Segment] = []
    for item, until in zip(live, ends, strict=True):
        if until <= start and item is not live[-1]:
            continue
        key = frozenset(item.tasks)
        if key not in made:
            target = run_dir.absolute() / PLANS / f"step-{item.from_step}.json"
            if is_first_node:
                made[key] = _made(target, plan, workload, item.tasks, planner), target
            else:
                made[key] = _awaited(target, plan, workload, item.tasks), target
        found, file = made[key]
        segments.append(Segment(from_step=item.from_step, until=until, plan=found, path=file))
    return segments


def _made(
    target: Path, plan: Plan, workload: Workload, tasks: tuple[str, ...], planner: Planner
) -> Plan:
    found = _made_before(target, plan, workload, tasks)
    if found is None:
        found = planner(tasks, target)
        save_document(found, target)
    return found


def _made_before(
    target: Path, plan: Plan, workload: Workload, tasks: tuple[str, ...]
) -> Plan | None:
    """The plan that an earlier start of this run wrote, if it would be asked for again."""
    try:
        found = load_plan(target)
    except MMPlanError:
        return None
    same = (
        set(found.tasks) == set(tasks)
        and not plan_differences(found, workload)
        and found.profile.sha256 == plan.profile.sha256
        and (found.cluster, found.devices) == (plan.cluster, plan.devices)
        and (plan.solver.asked is None or found.solver.asked == plan.solver.asked)
    )
    return found if same else None


def _awaited(target: Path, plan: Plan, workload: Workload, tasks: tuple[str, ...]) -> Plan:
    """The plan that the first machine writes."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        found = _made_before(target, plan, workload, tasks)
        if found is not None:
            return found
        time.sleep(_POLL_S)
    raise UnfitEnvironmentError(
        f"{target} has not come: machine 0 plans for the tasks {', '.join(tasks)}",
        hint="give --run-dir a file system that all nodes share, and start machine 0",
    )
