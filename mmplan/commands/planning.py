"""``mmplan solve``, ``compare`` and ``explain``: commands that plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmplan.commands.options import (
    SILENT_S,
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
from mmplan.reporting.terminal.console import Output, Progress

if TYPE_CHECKING:
    from mmplan.planning.measured_trials import Trials
    from mmplan.schema.plan import Plan

    # Plan, a file beside which its paths are relative, its workload's file -> seconds of a real
    # step. The context of the commands has one: the runtime is above this package.
    StepSeconds = Callable[[Plan, Path, Path], float]


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
    from mmplan import api

    out = Output(as_json=as_json)
    check_output("--output", output)
    with out.progress("planning", after_s=SILENT_S) as bar:
        trials = (
            _trials(out, bar, context.obj.step_seconds, measure, workload, output)
            if measure
            else None
        )
        planned = api.solve(
            workload,
            profile,
            cluster=cluster,
            devices=devices,
            solver=solver,
            method=method,
            tasks=names("--tasks", tasks),
            top=top,
            budget_s=budget,
            trials=trials,
            path=output,
            hint=out.hint,
            progress=bar.update,
        )
    planned = planned.save(output)
    also = "" if planned.certificate is None else f", and {planned.certificate}"
    out.grids(*planned.grids())
    out.text(f"wrote {output}{also}: it trains what the workload says")
    if tasks is None and (steps := planned.later_tasks):
        out.hint(f"mmlaunch run plans for the later task sets by itself: {steps}")
    out.hint(f"mmlaunch verify {output}; mmlaunch run {output}")
    out.data(planned.plan.model_dump(mode="json", exclude_none=True))


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
    from mmplan import api
    from mmplan.reporting.terminal.comparison_tables import left_out_lines

    out = Output(as_json=as_json)
    check_output("--output", output)
    with out.progress("planning") as bar:
        compared = api.compare(
            workload,
            profile,
            cluster=cluster,
            devices=counts("--devices", devices),
            batches=counts("--batches", batches),
            solvers=names("--solvers", solvers),
            tasks=names("--tasks", tasks),
            baseline=baseline,
            budget_s=budget,
            details=output is not None,
            hint=out.hint,
            progress=bar.update,
        )
    for line in left_out_lines(compared.comparison):
        out.hint(line)
    out.grids(*compared.grids())
    if output is not None:
        compared.write_page(output)
        out.text(f"wrote {output}")
    plans = compared.comparison.plans
    out.data([plan.model_dump(mode="json", exclude_none=True) for plan in plans])


def explain(
    plan: PlanPath,
    profile: PlansProfileOption = None,
    replan: ReplanOption = False,
    as_json: JsonOption = False,
) -> None:
    """Why a plan is as it is: what binds it, what it was chosen over."""
    from dataclasses import asdict

    from mmplan import api

    out = Output(as_json=as_json)
    title = "planning again" if replan else "explaining"
    with out.progress(title, after_s=0.0 if replan else SILENT_S) as bar:
        explained = api.explain(plan, profile, replan=replan, hint=out.hint, progress=bar.update)
    out.grids(*explained.grids())
    out.data(
        {
            name: [asdict(item) for item in getattr(explained, name)]
            for name in ("reasons", "effects", "replans")
        }
    )
