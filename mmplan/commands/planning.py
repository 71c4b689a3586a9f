"""``mmplan solve``, ``compare`` and ``explain``: commands that plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmplan.commands.options import (
    ClusterOption,
    DevicesOption,
    JsonOption,
    PlanPath,
    PlansProfileOption,
    ProfileOption,
    ReplanOption,
    TasksOption,
    WorkloadPath,
    check_output,
    counts,
    names,
)
from mmplan.errors import RunFailedError
from mmplan.report.terminal.console import Output, Progress

if TYPE_CHECKING:
    from mmplan.planning.measured_trials import Trials
    from mmplan.report.explain import Reason
    from mmplan.schema.plan import Plan

    # Plan, a file beside which its paths are relative, its workload's file -> seconds of a real
    # step. The context of the commands has one: the runtime is above this package.
    StepSeconds = Callable[[Plan, Path, Path], float]

# Seconds of planning before it says how far it is.
SILENT_S = 5.0


def solve(
    context: typer.Context,
    workload: WorkloadPath,
    profile: ProfileOption,
    cluster: ClusterOption = None,
    devices: DevicesOption = None,
    solver: Annotated[
        str,
        typer.Option(
            "--solver", metavar="NAME", help="auto, distmm, convex, mpsp, colocated, megatron, ..."
        ),
    ] = "auto",
    method: Annotated[
        str | None,
        typer.Option(
            "--method", metavar="NAME", help="of the solver: exact, even, paper, cvxpy, wavefront"
        ),
    ] = None,
    tasks: TasksOption = None,
    top: Annotated[
        int, typer.Option("--top", metavar="K", min=1, help="simulate the K best, keep the best")
    ] = 8,
    budget: Annotated[
        float, typer.Option("--budget", metavar="SECONDS", help="bound of searches not exact")
    ] = 1.0,
    measure: Annotated[
        int,
        typer.Option(
            "--measure", metavar="K", min=0, help="run a few steps of the K best, keep the fastest"
        ),
    ] = 0,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="PLAN", help="where it is written")
    ] = Path("plan.json"),
    as_json: JsonOption = False,
) -> None:
    """Find devices, degrees, shares and schedule for every module."""
    from mmplan.planning import planner
    from mmplan.proof.certificate import write_certificate
    from mmplan.proof.prove import prove
    from mmplan.report.terminal.tables import plan_grids, warn_belief, warn_unused
    from mmplan.schema.agreement import belief
    from mmplan.schema.base import save_document
    from mmplan.schema.cluster import load_cluster
    from mmplan.schema.profile import load_profile
    from mmplan.schema.workload import load_workload

    out = Output(as_json=as_json)
    check_output("--output", output)
    loaded = load_workload(workload)
    costs = load_profile(profile)
    warn_unused(out, loaded)
    warn_belief(out, belief(costs))
    with out.progress("planning", after_s=SILENT_S) as bar:
        trials = _trials(out, bar, context.obj, measure, workload, output) if measure else None
        plan = planner.solve(
            loaded,
            workload_path=workload,
            profile=costs,
            profile_path=profile,
            cluster=None if cluster is None else load_cluster(cluster),
            devices=devices,
            solver=solver,
            method=method,
            tasks=names("--tasks", tasks),
            top=top,
            budget_s=budget,
            plan_path=output,
            trials=trials,
            progress=bar.update,
        )
        proof = prove(plan, loaded, costs)
    if proof.faults:
        raise RunFailedError(
            f"the plan of {plan.solver.name} is not proven: {proof.faults[0]}",
            hint="choose another --solver; this is a fault of the planner, please report it",
        )
    save_document(plan, output)
    wrote = f"wrote {output}"
    if proof.compiled is not None and not proof.compiled.folded:
        wrote += f", and {write_certificate(output, workload, compiled=proof.compiled)}"
    out.grids(*plan_grids(plan))
    out.text(f"{wrote}: it trains what the workload says")
    later = [item for item in loaded.task_sets if item.from_step and tasks is None]
    if later:
        steps = "; ".join(f"from step {s.from_step} {', '.join(s.tasks)}" for s in later)
        out.hint(f"mmlaunch run plans for the later task sets by itself: {steps}")
    out.hint(f"mmlaunch verify {output}; mmlaunch run {output}")
    out.data(plan.model_dump(mode="json", exclude_none=True))


def _trials(
    out: Output, bar: Progress, step_seconds: StepSeconds, count: int, workload: Path, output: Path
) -> Trials:
    """Real steps of the best plans on this machine."""
    from mmplan.planning.measured_trials import Trials, plan_label

    def measure(plan: Plan) -> float:
        bar.close()
        measured_s = step_seconds(plan, output, workload)
        predicted = plan.predicted.iteration_s
        out.text(
            f"measured {1e3 * measured_s:.1f} ms (predicted {1e3 * predicted:.1f}): "
            f"{plan.solver.name}, {plan_label(plan)}"
        )
        return measured_s

    return Trials(count=count, measure=measure)


def compare(
    workload: WorkloadPath,
    profile: ProfileOption,
    cluster: ClusterOption = None,
    devices: Annotated[
        str | None,
        typer.Option("--devices", metavar="N,M", help="the cluster's first N; several: a sweep"),
    ] = None,
    batches: Annotated[
        str | None, typer.Option("--batches", metavar="B,C", help="other batches: a sweep")
    ] = None,
    solvers: Annotated[
        str | None, typer.Option("--solvers", metavar="A,B,C", help="default: all that apply")
    ] = None,
    tasks: TasksOption = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="NAME", help="solver that ratios refer to")
    ] = None,
    budget: Annotated[
        float, typer.Option("--budget", metavar="SECONDS", help="of each solver's searches")
    ] = 0.5,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="HTML", help="a page with pictures")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Plans of several solvers side by side, best first."""
    from mmplan.planning.compare import compare as start
    from mmplan.report.terminal.comparison_tables import comparison_grids, left_out_lines
    from mmplan.report.terminal.tables import warn_belief
    from mmplan.schema.agreement import belief
    from mmplan.schema.cluster import load_cluster
    from mmplan.schema.profile import load_profile
    from mmplan.schema.workload import load_workload

    out = Output(as_json=as_json)
    check_output("--output", output)
    costs = load_profile(profile)
    warn_belief(out, belief(costs))
    with out.progress("planning") as bar:
        comparison = start(
            load_workload(workload),
            workload_path=workload,
            profile=costs,
            profile_path=profile,
            cluster=None if cluster is None else load_cluster(cluster),
            devices=counts("--devices", devices),
            batches=counts("--batches", batches),
            solvers=names("--solvers", solvers),
            tasks=names("--tasks", tasks),
            baseline=baseline,
            budget_s=budget,
            with_details=output is not None,
            progress=bar.update,
        )
    for line in left_out_lines(comparison):
        out.hint(line)
    out.grids(*comparison_grids(comparison))
    if output is not None:
        from mmplan.report.comparison_page import render_comparison
        from mmplan.schema.base import write_text

        write_text(output, render_comparison(comparison))
        out.text(f"wrote {output}")
    out.data([plan.model_dump(mode="json", exclude_none=True) for plan in comparison.plans])


def explain(
    plan: PlanPath,
    profile: PlansProfileOption = None,
    replan: ReplanOption = False,
    as_json: JsonOption = False,
) -> None:
    """Why a plan is as it is: what binds it, what waits, what it was chosen over."""
    from dataclasses import asdict

    from mmplan.planning.what_if import part_effects, replans
    from mmplan.report.explain import best_batch, reason_grid, replan_reason
    from mmplan.report.explain import explain as reasons_of
    from mmplan.report.terminal.tables import warn_belief
    from mmplan.schema.load import load_plan
    from mmplan.schema.workload import load_workload
    from mmplan.simulation.peak_memory import ExpectedMemory
    from mmplan.simulation.predict import check_plans_model, costs_of, plan_profile
    from mmplan.simulation.step import simulate as simulated

    out = Output(as_json=as_json)
    document = load_plan(plan)
    loaded = plan_profile(document, plan, profile)
    warn_belief(out, check_plans_model(document, plan, profile))
    effects = part_effects(document, loaded)
    costs = costs_of(document, loaded)
    step = simulated(costs.program, costs)
    reasons = reasons_of(document, loaded, step, effects, run_memory=ExpectedMemory(costs))
    out.grids(reason_grid(document.name, reasons))
    changed: list[Reason] = []
    if replan:
        path = plan.parent / document.workload.path
        with out.progress("planning again") as bar:
            others = replans(
                document,
                plan,
                profile=loaded,
                profile_path=profile or plan.parent / document.profile.path,
                workload=load_workload(path),
                workload_path=path,
                progress=bar.update,
            )
        changed = [
            *(replan_reason(document, item) for item in others),
            best_batch(document, others),
        ]
        out.grids(reason_grid("with other settings", changed))
    out.data(
        {
            "reasons": [asdict(reason) for reason in reasons],
            "effects": [asdict(effect) for effect in effects],
            "replans": [asdict(reason) for reason in changed],
        }
    )
