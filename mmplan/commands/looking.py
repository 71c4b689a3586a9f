"""``mmplan show``, ``check``, ``simulate`` and ``report``: commands on files of others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmplan.commands.options import (
    JsonOption,
    PlanPath,
    PlansProfileOption,
    ReplanOption,
    check_output,
)
from mmplan.errors import InvalidInputError, RunFailedError
from mmplan.report.terminal.console import Output
from mmplan.wording import counted

if TYPE_CHECKING:
    from mmplan.schema.plan import Plan


def show(
    file: Annotated[Path, typer.Argument(metavar="WORKLOAD|PROFILE|PLAN")],
    program: Annotated[
        bool, typer.Option("--program", help="a plan's program: one row of instructions per rank")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Tables of a file; for a plan a timeline as well."""
    from mmplan.report.terminal.tables import (
        plan_grids,
        profile_grids,
        timeline_lines,
        warn_belief,
        workload_grids,
    )
    from mmplan.schema.load import load_any
    from mmplan.schema.plan import Plan
    from mmplan.schema.profile import Profile
    from mmplan.schema.workload import Workload
    from mmplan.simulation.predict import check_plans_model, simulate_plan

    out = Output(as_json=as_json)
    document = load_any(file)
    if isinstance(document, Plan):
        if program:
            from mmplan.program.compile import compile_plan
            from mmplan.program.text import format_program

            out.text(format_program(compile_plan(document)))
        else:
            warn_belief(out, check_plans_model(document, file))
            out.grids(*plan_grids(document))
            try:
                lines = list(timeline_lines(simulate_plan(document, file)))
            except InvalidInputError as error:
                out.hint(f"no timeline: {error.message}")
            else:
                out.text("\n".join(lines))
    elif isinstance(document, Profile):
        out.grids(*profile_grids(document))
    elif isinstance(document, Workload):
        out.grids(*workload_grids(document))
    else:
        out.text(document.model_dump_json(indent=1, exclude_none=True))
    out.data(document.model_dump(mode="json", exclude_none=True))


def check(
    plan: PlanPath,
    certificate: Annotated[
        Path | None,
        typer.Option(
            "--certificate", metavar="FILE", help="where it is written; default: beside the plan"
        ),
    ] = None,
    try_it: Annotated[
        bool,
        typer.Option("--try", help="import the workload's code, and run it on two samples first"),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Prove that a plan trains its workload: every invariant, without running it."""
    from mmplan.proof.certificate import write_certificate
    from mmplan.proof.prove import Proof, prove
    from mmplan.report.numbers import communicators
    from mmplan.report.terminal.tables import warn_belief
    from mmplan.schema.agreement import plan_differences
    from mmplan.schema.base import load_document
    from mmplan.schema.faults import plan_faults
    from mmplan.schema.plan import Plan
    from mmplan.schema.workload import load_workload
    from mmplan.simulation.predict import check_plans_model, memory_faults, plan_profile

    out = Output(as_json=as_json)
    document = load_document(Plan, plan)
    if try_it:
        _try(out, document, plan)
    warn_belief(out, check_plans_model(document, plan))
    faults = plan_faults(document)
    workload = plan.parent / document.workload.path
    asked = load_workload(workload) if workload.is_file() else None
    if asked is None:
        out.text(f"compared with nothing: its workload {workload} is not there")
    elif not faults:
        faults = plan_differences(document, asked)
        out.text(f"compared with {workload}: what is trained")
    proof: Proof | None = None
    if not faults:
        try:
            profile = plan_profile(document, plan)
        except InvalidInputError:
            profile = None
        proof = prove(document, asked, profile)
        faults = [*proof.faults, *(() if proof.faults else memory_faults(document, profile))]
        out.text(
            f"{plan}: {counted(proof.instructions, 'instruction')} on "
            f"{counted(proof.rows, 'rank')}{_stands_for(proof.rows, document.devices)}"
        )
    for fault in faults:
        out.text(f"fault: {fault}")
    compared = str(workload) if workload.is_file() else None
    most = proof.communicators if proof else None
    out.data(
        {
            "plan": str(plan),
            "workload": compared,
            "faults": faults,
            "most_communicators": most and most.total,
        }
    )
    if faults:
        raise RunFailedError(
            f"{plan} has {counted(len(faults), 'fault')}",
            hint="solve the workload again",
            documented=True,
        )
    trains = "" if asked is None else "it trains its workload, "
    out.text(f"no faults: {trains}every sample reaches every gradient once, no rank waits for ever")
    out.text("no rank waits for ever either where sends wait for receives and there are no tags")
    if most is not None:
        out.text(f"on GPUs {communicators(most, document.cluster.device)}")
    if asked is not None:
        compiled = proof.compiled if proof else None
        if compiled is None or not compiled.folded:
            out.text(f"wrote {write_certificate(plan, workload, certificate, compiled)}")


def _stands_for(rows: int, ranks: int) -> str:
    """What the rows of some ranks say of all."""
    return "" if rows == ranks else f" that stand for {counted(ranks, 'rank')}"


def _try(out: Output, plan: Plan, path: Path) -> None:
    """Run the workload of a plan on two samples.

    Raises:
        InvalidInputError: it is not there, or something of it is wrong.
    """
    from mmplan.schema.dry_run import dry_run
    from mmplan.schema.workload import load_workload

    workload = path.parent / plan.workload.path
    for note in dry_run(
        load_workload(workload), workload.parent, tasks=plan.tasks, sharded=plan.cuts_parameters
    ):
        out.hint(note)
    out.text(f"tried {workload}: data, modules, losses and optimizer work on two samples")


def simulate(
    plan: PlanPath,
    profile: PlansProfileOption = None,
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
    as_json: JsonOption = False,
) -> None:
    """Predicted timeline of one step; where the profile has data, how times spread."""
    from dataclasses import asdict

    from mmplan.program.trace import trace_events, write_trace
    from mmplan.report.terminal.tables import sampled_grid, timeline_lines, warn_belief
    from mmplan.schema.load import load_plan
    from mmplan.simulation.predict import check_plans_model, plan_costs
    from mmplan.simulation.sampled_batches import sample_steps
    from mmplan.simulation.step import prediction
    from mmplan.simulation.step import simulate as start

    out = Output(as_json=as_json)
    check_output("--trace", trace)
    document = load_plan(plan)
    warn_belief(out, check_plans_model(document, plan, profile))
    costs = plan_costs(document, plan, profile)
    simulated = start(costs.program, costs)
    predicted = prediction(simulated, document)
    for line in timeline_lines(simulated):
        out.text(line)
    out.text(
        f"iteration {predicted.iteration_s:.4g} s, {predicted.samples_per_s:.4g} samples/s, "
        f"idle {100 * predicted.bubble_fraction:.1f}%, MFU {100 * predicted.mfu:.1f}%"
    )
    sampled = None if draws == 0 else sample_steps(costs, draws=draws)
    if sampled is not None:
        out.grids(sampled_grid(sampled, predicted_s=predicted.iteration_s))
    elif draws:
        out.hint("--draws: the profile knows no data; mmplan profile --data looks at it")
    if trace is not None:
        events = trace_events(simulated.program, simulated.events(), process_name="predicted")
        write_trace(trace, events)
        out.text(f"wrote {trace} (open it in ui.perfetto.dev or chrome://tracing)")
    spread = {} if sampled is None else {"sampled": asdict(sampled)}
    out.data(predicted.model_dump(mode="json") | spread)


def report(
    source: Annotated[Path, typer.Argument(metavar="PLAN|RUN_DIR")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="HTML", help="where it is written")
    ] = Path("report.html"),
    replan: ReplanOption = False,
    as_json: JsonOption = False,
) -> None:
    """One self-contained page with pictures of a plan, or of a run."""
    from mmplan.report.report_page import write_report
    from mmplan.report.terminal.tables import warn_belief

    out = Output(as_json=as_json)
    check_output("--output", output)
    if replan:
        with out.progress("planning again") as bar:
            data = write_report(source, output, progress=bar.update)
    else:
        data = write_report(source, output)
    warn_belief(out, data.believed)
    out.text(f"wrote {output}")
    out.data({"report": str(output)})
