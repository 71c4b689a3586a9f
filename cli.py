"""The commands ``mmplan`` and ``mmlaunch``: arguments in, library calls, output out.

Nothing heavy is imported before a command needs it: ``--help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmplan.arguments import counts, names
from mmplan.errors import InvalidInputError, MMPlanError, RunFailedError, StoppedError
from mmplan.report.console import Output

if TYPE_CHECKING:
    from mmlaunch.run import RunOptions
    from mmplan.program.timings import Timings
    from mmplan.report.explain import Reason
    from mmplan.schema.plan import Plan
    from mmplan.trials import Trials

_SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 100},
}
mmplan_app = typer.Typer(
    help="Plan each module of a multimodal model on its own devices.", **_SETTINGS
)
mmlaunch_app = typer.Typer(help="Train exactly what a plan says.", **_SETTINGS)

WorkloadPath = Annotated[Path, typer.Argument(metavar="WORKLOAD", help="workload.yaml")]
PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json")]
ProfileOption = Annotated[
    Path, typer.Option("--profile", metavar="PROFILE", help="profile.json of this workload")
]
ClusterOption = Annotated[
    str | None,
    typer.Option("--cluster", metavar="CLUSTER", help="cluster.yaml, or a shipped name (p3-8)"),
]
Json = Annotated[bool, typer.Option("--json", help="one JSON document on stdout, nothing else")]
DevicesOption = Annotated[
    int | None, typer.Option("--devices", metavar="N", help="use the cluster's first N devices")
]
TasksOption = Annotated[
    str | None, typer.Option("--tasks", metavar="A,B", help="only these tasks of the workload")
]


def mmplan_main() -> None:
    """Entry point of ``mmplan``."""
    _main(mmplan_app)


def mmlaunch_main() -> None:
    """Entry point of ``mmlaunch``."""
    _main(mmlaunch_app)


def _main(app: typer.Typer) -> None:
    """Run a command; every failure meant for the user becomes one line and an exit code."""
    out = Output(as_json="--json" in sys.argv)
    try:
        # Not standalone: typer would word and end wrong command lines in its own way.
        code = app(standalone_mode=False)
    except MMPlanError as error:
        out.error(error, documented=error in _documented)
        sys.exit(error.exit_code)
    except _COMMAND_LINE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        else:
            out.error(_command_line_fault(error))
        sys.exit(2)
    except KeyboardInterrupt:
        code = 130
    if code == 130:
        out.text("interrupted")
    sys.exit(code or 0)


# typer carries its own copy of click: the class is found through what typer exports.
_COMMAND_LINE_ERROR: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)


def _command_line_fault(error: Any) -> InvalidInputError:
    """Typer's own complaint (a missing argument, an unknown option) in our words and form."""
    message = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else Path(sys.argv[0]).name
    return InvalidInputError(
        f"{message[:1].lower()}{message[1:]}", hint=f"{command} --help lists what there is"
    )


# --- mmplan --------------------------------------------------------------------------


@mmplan_app.command()
def profile(
    workload: WorkloadPath,
    cluster: ClusterOption = None,
    analytic: Annotated[
        bool, typer.Option("--analytic", help="count FLOPs on the meta device; needs --cluster")
    ] = False,
    device: Annotated[
        str | None, typer.Option("--device", metavar="cpu|cuda", help="default: cuda if there is")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", metavar="N", help="processes that measure together")
    ] = None,
    data: Annotated[
        bool, typer.Option("--data", help="how much work the samples of the data are")
    ] = False,
    data_samples: Annotated[
        int | None,
        typer.Option("--data-samples", metavar="N", help="that --data looks at, default 512"),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="PROFILE", help="where it is written")
    ] = Path("profile.json"),
    as_json: Json = False,
) -> None:
    """Time the modules, losses and links of a workload, and fit their curves."""
    from mmplan.report.showing import show_profile, warn_unused
    from mmplan.schema.base import save_document
    from mmplan.schema.cluster import load_cluster
    from mmplan.schema.workload import load_workload

    out = Output(as_json=as_json)
    loaded = load_workload(workload)
    warn_unused(out, loaded)
    if data_samples is not None and not (data and data_samples > 0):
        raise InvalidInputError(
            f"--data-samples {data_samples}: how many samples --data looks at",
            hint="give 1 or more, together with --data",
        )
    if device not in (None, "cpu", "cuda"):
        raise InvalidInputError(f"--device {device}", hint="choose cpu or cuda")
    machine = load_cluster(cluster) if cluster is not None else None
    state = output.with_name(f".{output.name}.partial")
    if analytic:
        if machine is None:
            raise InvalidInputError(
                "--analytic needs --cluster: there is no device to ask", hint="--cluster p3-8"
            )
        from mmplan.profiling.analytic import analytic_profile

        made = analytic_profile(loaded, workload.parent, machine)
    else:
        made = _measure(out, workload, machine, device, nproc, state)
    if data:
        made = _with_data(out, made, loaded, workload.parent, data_samples, state)
    save_document(made, output)
    state.unlink(missing_ok=True)
    show_profile(out, made)
    out.text(f"wrote {output}")
    out.data({"profile": str(output), "source": made.source, "cluster": made.cluster.name})


def _measure(
    out: Output, workload: Path, machine: Any, device: Any, nproc: int | None, state: Path
) -> Any:
    from mmplan.profiling.measure import measure_profile

    with out.progress("profiling") as bar:
        return measure_profile(
            workload,
            cluster=machine,
            device=device,
            num_processes=nproc,
            progress=lambda done, total, _left_s, note: bar.update(done, total, note),
            state_path=state,
        )


def _with_data(
    out: Output, profile: Any, workload: Any, folder: Path, samples: int | None, state: Path
) -> Any:
    """The profile with the work of its data; says which tasks' samples all cost the same."""
    from mmplan.profiling.data import SAMPLES, profile_data

    with out.progress("reading data") as bar:
        made = profile_data(
            profile,
            workload,
            folder,
            samples=samples or SAMPLES,
            progress=lambda done, total, _left_s, note: bar.update(done, total, note),
            state_path=state,
        )
    for task in made.provenance["data"]["equal"]:
        out.hint(
            f"task {task}: no work(index) in its data set and no ragged fields that a module "
            "takes; all samples count alike"
        )
    return made


@mmplan_app.command()
def solve(
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
    as_json: Json = False,
) -> None:
    """Find devices, degrees, shares and schedule for every module."""
    from mmplan import planner
    from mmplan.report.showing import show_plan, warn_unused
    from mmplan.schema.base import save_document
    from mmplan.schema.cluster import load_cluster
    from mmplan.schema.profile import load_profile
    from mmplan.schema.workload import load_workload

    out = Output(as_json=as_json)
    loaded = load_workload(workload)
    warn_unused(out, loaded)
    trials = _trials(out, measure, workload, output) if measure else None
    plan = planner.solve(
        loaded,
        workload_path=workload,
        profile=load_profile(profile),
        profile_path=profile,
        cluster=None if cluster is None else load_cluster(cluster),
        devices=devices,
        solver=solver,
        method=method,
        tasks=names(tasks),
        top=top,
        budget_s=budget,
        plan_path=output,
        trials=trials,
    )
    save_document(plan, output)
    show_plan(out, plan)
    out.text(f"wrote {output}")
    later = [item for item in loaded.task_sets if item.from_step and tasks is None]
    if later:
        steps = "; ".join(f"from step {s.from_step} {', '.join(s.tasks)}" for s in later)
        out.hint(f"mmlaunch run plans for the later task sets by itself: {steps}")
    out.hint(f"mmlaunch verify {output}; mmlaunch run {output}")
    out.data(plan.model_dump(mode="json", exclude_none=True))


def _trials(out: Output, count: int, workload: Path, output: Path) -> Trials:
    """Real steps of the best plans on this machine."""
    from mmlaunch.trial import step_seconds
    from mmplan.labels import labelled
    from mmplan.trials import Trials

    def measure(plan: Plan) -> float:
        found = step_seconds(plan, output, workload=workload)
        predicted = plan.predicted.iteration_s
        out.text(
            f"measured {1e3 * found:.1f} ms (predicted {1e3 * predicted:.1f}): "
            f"{plan.solver.name}, {labelled(plan)}"
        )
        return found

    return Trials(count=count, measure=measure)


@mmplan_app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="WORKLOAD|PROFILE|PLAN")],
    program: Annotated[
        bool, typer.Option("--program", help="a plan's program: one row of instructions per rank")
    ] = False,
    as_json: Json = False,
) -> None:
    """Tables of a file; for a plan a timeline as well."""
    from mmplan.report.showing import show_plan, show_profile, show_timeline
    from mmplan.report.tables import workload_grids
    from mmplan.schema.load import load_any
    from mmplan.schema.plan import Plan
    from mmplan.schema.profile import Profile
    from mmplan.schema.workload import Workload

    out = Output(as_json=as_json)
    document = load_any(file)
    if isinstance(document, Plan):
        if program:
            from mmplan.program.compile import compile_plan
            from mmplan.program.text import format_program

            out.text(format_program(compile_plan(document)))
        else:
            show_plan(out, document)
            show_timeline(out, document, file)
    elif isinstance(document, Profile):
        show_profile(out, document)
    elif isinstance(document, Workload):
        for grid in workload_grids(document):
            out.grid(grid)
    else:
        out.text(document.model_dump_json(indent=1, exclude_none=True))
    out.data(document.model_dump(mode="json", exclude_none=True))


@mmplan_app.command()
def check(plan: PlanPath, as_json: Json = False) -> None:
    """Every invariant of a plan and of its program, without running it."""
    from mmplan.program.check import check_program
    from mmplan.program.compile import compile_plan
    from mmplan.schema.base import load_document
    from mmplan.schema.faults import plan_faults
    from mmplan.schema.plan import Plan

    out = Output(as_json=as_json)
    document = load_document(Plan, plan)
    faults = plan_faults(document)
    if not faults:
        try:
            program = compile_plan(document)
        except InvalidInputError as error:
            faults = [error.message]
        else:
            faults = check_program(program)
            count = sum(map(len, program.instructions))
            out.text(f"{plan}: {count} instructions on {program.num_ranks} ranks")
    for fault in faults:
        out.text(f"fault: {fault}")
    out.data({"plan": str(plan), "faults": faults})
    if faults:
        raise _quiet(
            RunFailedError(
                f"{plan} has {len(faults)} fault{'s' * (len(faults) != 1)}",
                hint="solve the workload again",
            )
        )
    out.text("no faults: complete, free of deadlocks, every sample reaches every gradient once")


@mmplan_app.command()
def simulate(
    plan: PlanPath,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="PROFILE", help="default: the one the plan names"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="TRACE.json", help="write a Chrome/Perfetto trace"),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(
            "--draws", metavar="N", min=0, help="batches of a profile's data to draw, 0 for none"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predicted timeline of one step; where the profile has data, how times spread."""
    from dataclasses import asdict

    from mmplan.draws import sample_steps
    from mmplan.predict import plan_costs
    from mmplan.program.trace import trace_events, write_trace
    from mmplan.report.tables import timeline_lines
    from mmplan.report.work_tables import sampled_grid
    from mmplan.schema.load import load_plan
    from mmplan.simulate import prediction
    from mmplan.simulate import simulate as start

    out = Output(as_json=as_json)
    document = load_plan(plan)
    costs = plan_costs(document, plan, profile)
    simulated = start(costs.program, costs)
    found = prediction(simulated, document)
    for line in timeline_lines(simulated):
        out.text(line)
    out.text(
        f"iteration {found.iteration_s:.4g} s, {found.samples_per_s:.4g} samples/s, "
        f"idle {100 * found.bubble_fraction:.1f}%, MFU {100 * found.mfu:.1f}%"
    )
    sampled = None if draws == 0 else sample_steps(costs, draws=draws)
    if sampled is not None:
        out.grid(sampled_grid(sampled, predicted_s=found.iteration_s))
    if trace is not None:
        events = trace_events(simulated.program, simulated.events(), process_name="predicted")
        write_trace(trace, events)
        out.text(f"wrote {trace} (open it in ui.perfetto.dev or chrome://tracing)")
    spread = {} if sampled is None else {"sampled": asdict(sampled)}
    out.data(found.model_dump(mode="json") | spread)


@mmplan_app.command()
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
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="NAME", help="solver that ratios refer to")
    ] = None,
    budget: Annotated[
        float, typer.Option("--budget", metavar="SECONDS", help="of each solver's searches")
    ] = 0.5,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="HTML", help="a page with pictures")
    ] = None,
    as_json: Json = False,
) -> None:
    """Plans of several solvers side by side, best first."""
    from mmplan.compare import compare as start
    from mmplan.report.comparing import comparison_grids, left_out_lines
    from mmplan.schema.cluster import load_cluster
    from mmplan.schema.profile import load_profile
    from mmplan.schema.workload import load_workload

    out = Output(as_json=as_json)
    with out.progress("planning") as bar:
        found = start(
            load_workload(workload),
            workload_path=workload,
            profile=load_profile(profile),
            profile_path=profile,
            cluster=None if cluster is None else load_cluster(cluster),
            devices=counts("--devices", devices),
            batches=counts("--batches", batches),
            solvers=names(solvers),
            baseline=baseline,
            budget_s=budget,
            with_details=output is not None,
            progress=bar.update,
        )
    for line in left_out_lines(found):
        out.hint(line)
    for grid in comparison_grids(found):
        out.grid(grid)
    if output is not None:
        from mmplan.report.comparison import write_comparison

        write_comparison(found, output)
        out.text(f"wrote {output}")
    out.data([plan.model_dump(mode="json", exclude_none=True) for plan in found.plans])


@mmplan_app.command()
def explain(
    plan: PlanPath,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="PROFILE", help="default: the one the plan names"),
    ] = None,
    replan: Annotated[
        bool,
        typer.Option(
            "--replan", help="also plan for a node more or less, faster links, other batches"
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Why a plan is as it is: what binds it, what waits, what it was chosen over."""
    from dataclasses import asdict

    from mmplan.predict import costs_of, plan_profile
    from mmplan.report.explain import best_batch, reason_grid, replan_reason
    from mmplan.report.explain import explain as reasons_of
    from mmplan.schema.load import load_plan
    from mmplan.schema.workload import load_workload
    from mmplan.simulate import simulate as simulated
    from mmplan.whatif import NUM_REPLANS, Replan, part_effects, replans

    out = Output(as_json=as_json)
    document = load_plan(plan)
    loaded = plan_profile(document, plan, profile)
    effects = part_effects(document, loaded)
    costs = costs_of(document, loaded)
    reasons = reasons_of(document, loaded, simulated(costs.program, costs), effects)
    out.grid(reason_grid(document.name, reasons))
    changed: list[Reason] = []
    if replan:
        path, found = plan.parent / document.workload.path, list[Replan]()
        with out.progress("planning again") as bar:
            for item in replans(
                document,
                plan,
                profile=loaded,
                profile_path=profile or plan.parent / document.profile.path,
                workload=load_workload(path),
                workload_path=path,
            ):
                found.append(item)
                bar.update(len(found), NUM_REPLANS, item.change)
        found.sort(key=lambda item: item.place)
        changed = [*(replan_reason(document, item) for item in found), best_batch(document, found)]
        out.grid(reason_grid("with other settings", changed))
    out.data(
        {
            "reasons": [asdict(reason) for reason in reasons],
            "effects": [asdict(effect) for effect in effects],
            "replans": [asdict(reason) for reason in changed],
        }
    )


@mmplan_app.command()
def report(
    source: Annotated[Path, typer.Argument(metavar="PLAN|RUN_DIR")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="HTML", help="where it is written")
    ] = Path("report.html"),
    replan: Annotated[
        bool,
        typer.Option(
            "--replan", help="also plan for a node more or less, faster links, other batches"
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """One self-contained page with pictures of a plan, or of a run."""
    from mmplan.report.page import write_report

    out = Output(as_json=as_json)
    if replan:
        with out.progress("planning again") as bar:
            write_report(source, output, progress=bar.update)
    else:
        write_report(source, output)
    out.text(f"wrote {output}")
    out.data({"report": str(output)})


@mmplan_app.command()
def doctor(as_json: Json = False) -> None:
    """Whether this machine is fit, and what is wrong."""
    from dataclasses import asdict

    from mmplan.doctor import examine
    from mmplan.errors import UnfitEnvironmentError

    out = Output(as_json=as_json)
    findings = examine()
    for finding in findings:
        mark = {True: "ok  ", False: "FAIL", None: "note"}[finding.ok]
        out.text(f"{mark}  {finding.name}: {finding.detail}")
        if finding.hint and not finding.ok:
            out.text(f"      hint: {finding.hint}")
    out.data([asdict(finding) for finding in findings])
    unfit = [finding.name for finding in findings if finding.ok is False]
    if unfit:
        raise _quiet(UnfitEnvironmentError(f"this machine is unfit: {', '.join(unfit)}"))


# --- mmlaunch ------------------------------------------------------------------------

WorkloadOption = Annotated[
    Path | None,
    typer.Option("--workload", metavar="FILE", help="default: the one the plan names"),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="longest silence of a rank")
]


@mmlaunch_app.command()
def run(
    plan: PlanPath,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", min=0, help="default: train.steps")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="default: runs/NAME")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the newest checkpoint of the run folder")
    ] = False,
    save_every: Annotated[
        int, typer.Option("--save-every", metavar="N", min=0, help="steps between checkpoints")
    ] = 0,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", metavar="N", min=0, help="after a worker's failure")
    ] = 0,
    workload: WorkloadOption = None,
    tasks: TasksOption = None,
    nnodes: Annotated[int, typer.Option("--nnodes", metavar="N", min=1, help="machines")] = 1,
    node_rank: Annotated[
        int, typer.Option("--node-rank", metavar="R", min=0, help="which machine this is")
    ] = 0,
    rdzv_endpoint: Annotated[
        str | None, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="of machine 0")
    ] = None,
    num_workers: Annotated[
        int, typer.Option("--num-workers", metavar="N", min=0, help="data processes per rank")
    ] = 0,
    emulate: Annotated[
        bool,
        typer.Option(
            "--emulate", help="train nothing: computes are waits of the profile's times, on the CPU"
        ),
    ] = False,
    timeout: TimeoutOption = 300.0,
    as_json: Json = False,
) -> None:
    """Train in one process per rank, following the plan's program."""
    from mmlaunch.run import RunOptions, prepare
    from mmlaunch.run import run as start
    from mmplan.report.following import follow, write_run_trace

    out = Output(as_json=as_json)
    if emulate and (resume or save_every or tasks):
        raise InvalidInputError(
            "--emulate trains nothing that could be saved or resumed, and runs the plan as it is",
            hint="leave --save-every, --resume and --tasks out",
        )
    chosen, emulation = names(tasks), None
    if emulate:
        # Times are those of one plan: the tasks are its own, whatever comes later in the run.
        chosen, emulation = _emulation(out, plan)
    options = RunOptions(
        plan=plan,
        steps=steps,
        run_dir=run_dir,
        resume=resume,
        save_every=save_every,
        max_restarts=max_restarts,
        workload=workload,
        tasks=chosen,
        nnodes=nnodes,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
        timeout_s=timeout,
        num_workers=num_workers,
        emulation=emulation,
    )
    prepared = prepare(options)
    out.text(f"importing {', '.join(prepared.imports)}")
    total = prepared.workload.train.steps if steps is None else steps
    with out.progress("emulating" if emulate else "training") as bar:
        show = follow(out, bar, prepared.plan, total)
        summary = start(options, prepared, show, _planner(out, options, prepared))
    segment = summary.segment
    write_run_trace(out, segment.plan, segment.path, summary.spans, summary.run_dir / "trace.json")
    out.data({"run_dir": str(summary.run_dir), "steps": summary.steps, "stopped": summary.stopped})
    if summary.stopped:
        raise StoppedError(
            f"stopped on request after step {summary.steps}, saved in {summary.run_dir}",
            hint=f"go on with: mmlaunch run {plan} --resume --run-dir {summary.run_dir}",
        )
    out.text(f"{summary.steps} steps done; see {summary.run_dir}")
    out.hint(f"mmplan report {summary.run_dir} -o report.html")


def _emulation(out: Output, plan: Path) -> tuple[tuple[str, ...], Timings]:
    """A plan's tasks, and what its computes take, for processes that wait instead."""
    from mmplan.predict import compute_timings, plan_costs
    from mmplan.schema.load import load_plan

    os.environ["MMLAUNCH_DEVICE"] = "cpu"
    out.text("EMULATED: computes are waits of the profile's times; nothing is trained")
    document = load_plan(plan)
    return tuple(document.tasks), compute_timings(plan_costs(document, plan))


def _planner(out: Output, options: RunOptions, prepared: Any) -> Callable[..., Plan]:
    """Plans for other tasks with the given plan's profile, devices and solver."""

    def planned(tasks: tuple[str, ...], output: Path) -> Plan:
        from mmplan.replan import replan

        out.text(f"planning for the tasks {', '.join(tasks)}")
        return replan(
            prepared.plan,
            options.plan,
            workload=prepared.workload,
            workload_path=prepared.workload_path,
            tasks=tasks,
            output=output,
        )

    return planned


@mmlaunch_app.command()
def verify(
    plan: PlanPath,
    workload: WorkloadOption = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="ranks as threads of this process")
    ] = False,
    timeout: TimeoutOption = 300.0,
    as_json: Json = False,
) -> None:
    """One planned step against one process: every gradient, by name."""
    from mmlaunch.run import RunOptions, prepare
    from mmlaunch.run import verify as start

    out = Output(as_json=as_json)
    options: RunOptions = RunOptions(plan=plan, workload=workload, timeout_s=timeout)
    prepared = prepare(options)
    out.text(f"importing {', '.join(prepared.imports)}")
    verdict = start(options, prepared, in_process=in_process)
    for item in verdict.differences[:10]:
        where = f"rank {item.rank}" if item.rank >= 0 else "no rank has a gradient"
        out.text(f"differs: {item.name} ({where}): {item.error:.3g}")
    out.data(
        {
            "compared": verdict.compared,
            "worst": min(verdict.worst, 1e308),
            "tolerance": verdict.tolerance,
            "loss": verdict.loss,
            "reference_loss": verdict.reference_loss,
            "differences": [[d.name, d.rank, min(d.error, 1e308)] for d in verdict.differences],
        }
    )
    if verdict.differences:
        raise _quiet(
            RunFailedError(
                f"{len(verdict.differences)} of {verdict.compared} gradients differ from one "
                f"process's by up to {verdict.worst:.3g} (allowed {verdict.tolerance:g})",
                hint="mmplan check PLAN; a module whose forward is not deterministic differs too",
            )
        )
    out.text(
        f"{verdict.compared} gradients on {prepared.plan.devices} ranks equal one process's: "
        f"worst difference {verdict.worst:.2g} of the largest gradient "
        f"(allowed {verdict.tolerance:g})"
    )


# --- shared --------------------------------------------------------------------------


_documented: list[MMPlanError] = []


def _quiet(error: MMPlanError) -> MMPlanError:
    """Mark an error whose JSON document was already written."""
    _documented.append(error)
    return error
