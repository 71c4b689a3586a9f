"""Plan again for other tasks, with a plan's workload, profile, devices and solver."""

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
    """A plan for other tasks, with the plan's cluster, devices, solver and options.

    Args:
        plan: the present plan.
        plan_path: its file; the profile's path is relative to it.
        workload: of the plan.
        workload_path: its file.
        tasks: names of tasks of the workload.
        output: file of the new plan.

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
    """A new plan by the solver and the options of a plan.

    Args:
        plan: has the solver and its options.
        workload: may be another one.
        setting: files, cluster, devices and tasks; see :func:`mmplan.planning.planner.solve`.
    """
    asked = plan.solver.asked or _default_options(plan)
    return planner.solve(
        workload,
        solver=asked.solver,
        method=asked.method,
        top=asked.top,
        budget_s=asked.budget_s,
        **setting,
    )


def _default_options(plan: Plan) -> Asked:
    """Options for a plan without recorded ones: its solver, or any for a plan made by hand."""
    if plan.solver.name in planner.SOLVERS | planner.BASELINES:
        return Asked(solver=plan.solver.name, method=plan.solver.method)
    return Asked(solver="auto")
