"""Plan again for other tasks: same workload, profile, devices and solver, as a plan names them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmplan.errors import InvalidInputError, MMPlanError
from mmplan.planning import planner
from mmplan.schema.plan import Asked, Plan
from mmplan.schema.workload import Workload
from mmplan.simulation.predict import plan_profile


def replan(
    plan: Plan,
    plan_path: Path,
    *,
    workload: Workload,
    workload_path: Path,
    tasks: Sequence[str],
    output: Path,
) -> Plan:
    """A plan for other tasks, which asks of the solver what the given plan asked.

    Args:
        plan: says which devices, and what the solver was asked.
        plan_path: its file; the profile's path is relative to it.
        workload: of the plan.
        workload_path: its file.
        tasks: names of the workload's.
        output: where the new plan will be written.

    Raises:
        InvalidInputError: an unknown task, or the profile is gone or has changed.
        InfeasibleError: these tasks do not fit the plan's devices.
    """
    what = f"planning for the tasks {', '.join(tasks)}"
    try:
        profile = plan_profile(plan, plan_path)
    except InvalidInputError as error:
        raise InvalidInputError(
            f"{what}: {error.message}",
            hint="put it back, or solve for them: mmplan solve WORKLOAD --profile PROFILE "
            f"--tasks {','.join(tasks)}",
        ) from None
    try:
        return solve_again(
            plan,
            workload=workload,
            workload_path=workload_path,
            profile=profile,
            profile_path=plan_path.parent / plan.profile.path,
            plan_path=output,
            cluster=plan.cluster,
            devices=plan.devices,
            tasks=tasks,
        )
    except MMPlanError as error:
        raise type(error)(f"{what}: {error.message}", hint=error.hint) from None


def solve_again(plan: Plan, *, workload: Workload, **setting: Any) -> Plan:
    """What the solver finds that is asked what the plan's own solving asked.

    Args:
        plan: says what that was.
        workload: perhaps another one.
        setting: files, cluster, devices and tasks; see :func:`mmplan.planning.planner.solve`.
    """
    asked = plan.solver.asked or _asked_of(plan)
    return planner.solve(
        workload,
        solver=asked.solver,
        method=asked.method,
        top=asked.top,
        budget_s=asked.budget_s,
        **setting,
    )


def _asked_of(plan: Plan) -> Asked:
    """What to ask where a plan does not say: its own solver, or any for a plan made by hand."""
    if plan.solver.name in planner.SOLVERS | planner.BASELINES:
        return Asked(solver=plan.solver.name, method=plan.solver.method)
    return Asked(solver="auto")
