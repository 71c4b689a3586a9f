"""``mmplan show``, ``check``, ``simulate``, ``diff``, ``report``: commands on files of others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmplan.commands.options import (
    SILENT_S,
    JsonOption,
    PlanPath,
    PlansProfileOption,
    ReplanOption,
    check_output,
)
from mmplan.errors import InvalidInputError, RunFailedError
from mmplan.reporting.terminal.console import Output
from mmplan.wording import counted


def show(
    file: Annotated[Path, typer.Argument(metavar="WORKLOAD|PROFILE|PLAN")],
    program: Annotated[
        bool, typer.Option("--program", help="a plan's program: one row of instructions per rank")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Tables of a file; for a plan a timeline as well."""
    from mmplan import api
    from mmplan.program.compile import compile_plan
    from mmplan.program.text import format_program
    from mmplan.reporting.terminal.tables import profile_grids, workload_grids
    from mmplan.results import Planned
    from mmplan.schema.profile import Profile
    from mmplan.schema.workload import Workload
    from mmplan.simulation.predict import check_plans_model

    out, found = Output(as_json=as_json), api.load(file)
    document = found.plan if isinstance(found, Planned) else found
    if isinstance(found, Planned):
        if program:
            out.text(format_program(compile_plan(found.plan)))
        else:
            if note := check_plans_model(found.plan, file):
                out.hint(note)
            out.grids(*found.grids())
            try:
                step = api.simulate(found, draws=0)
            except InvalidInputError as error:
                out.hint(f"no timeline: {error.message}")
            else:
                out.text("\n".join(step.timeline(out.width)))
    elif isinstance(found, Profile):
        out.grids(*profile_grids(found))
    elif isinstance(found, Workload):
        out.grids(*workload_grids(found))
    else:
        out.text(found.model_dump_json(indent=1, exclude_none=True))
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
    """Prove that a plan trains its workload. Nothing is run."""
    from mmplan import api
    from mmplan.proof.certificate import certificate_path
    from mmplan.reporting.numbers import communicators, held_multiprocessors, held_too_many

    out = Output(as_json=as_json)
    checked = api.check(
        plan, try_it=try_it, certificate=certificate or certificate_path(plan), hint=out.hint
    )
    workload, proof, faults = checked.workload, checked.proof, checked.faults
    if try_it:
        out.text(f"tried {workload}: data, modules, losses and optimizer work on two samples")
    if not checked.compared:
        out.text(f"compared with nothing: its workload {workload} is not there")
    elif proof or faults:
        out.text(f"compared with {workload}: what is trained")
    if proof is not None:
        out.text(
            f"{plan}: {counted(proof.instructions, 'instruction')} on "
            f"{counted(proof.rows, 'rank')}{_stands_for(proof.rows, checked.plan.devices)}"
        )
    for fault in faults:
        out.text(f"fault: {fault}")
    most = proof.communicators if proof else None
    out.data(
        {
            "plan": str(plan),
            "workload": str(workload) if checked.compared else None,
            "faults": list(faults),
            "most_communicators": most and most.total,
            "most_held_blocks": proof and proof.held_blocks,
        }
    )
    if faults:
        raise RunFailedError(
            f"{plan} has {counted(len(faults), 'fault')}",
            hint="solve the workload again",
            documented=True,
        )
    trains = "it trains its workload, " if checked.compared else ""
    out.text(f"no faults: {trains}every sample reaches every gradient once, no rank waits for ever")
    out.text("no rank waits for ever either where sends wait for receives and there are no tags")
    if proof is not None and most is not None:
        device = checked.plan.cluster.device
        out.text(f"on GPUs {communicators(most, device)}")
        out.text(f"on GPUs {held_multiprocessors(proof.held_blocks, device)}")
        if too_many := held_too_many(proof.held_blocks, device):
            out.text(f"warning: {too_many}")
    if checked.certificate is not None:
        out.text(f"wrote {checked.certificate}")


def _stands_for(rows: int, ranks: int) -> str:
    """What the rows of some ranks say of all."""
    return "" if rows == ranks else f" that stand for {counted(ranks, 'rank')}"


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
    """Predicted timeline of one step. With data: how times spread."""
    from dataclasses import asdict

    from mmplan import api

    out = Output(as_json=as_json)
    check_output("--trace", trace)
    simulated = api.simulate(plan, profile, draws=draws, hint=out.hint)
    for line in (*simulated.timeline(out.width), *simulated.figures()):
        out.text(line)
    out.grids(*simulated.grids())
    if trace is not None:
        simulated.write_trace(trace)
        out.text(f"wrote {trace} (open it in ui.perfetto.dev or chrome://tracing)")
    sampled = simulated.sampled
    spread = {} if sampled is None else {"sampled": asdict(sampled)}
    out.data(simulated.predicted.model_dump(mode="json") | spread)


def diff(
    plan: PlanPath,
    other: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json")],
    as_json: JsonOption = False,
) -> None:
    """What differs between two plans, and in their predicted steps."""
    from dataclasses import asdict

    from mmplan import api

    out = Output(as_json=as_json)
    differing = api.diff(plan, other)
    out.grids(*differing.grids())
    changes = [asdict(change) for change in differing.changes]
    out.data({"plans": [str(plan), str(other)], "changes": changes})


def report(
    source: Annotated[Path, typer.Argument(metavar="PLAN|RUN_DIR")],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="HTML", help="where it is written")
    ] = Path("report.html"),
    replan: ReplanOption = False,
    as_json: JsonOption = False,
) -> None:
    """One self-contained page with pictures of a plan, or of a run."""
    from mmplan import api

    out = Output(as_json=as_json)
    check_output("--output", output)
    title = "planning again" if replan else "drawing"
    with out.progress(title, after_s=0.0 if replan else SILENT_S) as bar:
        api.report(source, output, replan=replan, hint=out.hint, progress=bar.update)
    out.text(f"wrote {output}")
    out.data({"report": str(output)})
