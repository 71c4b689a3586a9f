"""``mmplan profile`` and ``mmplan doctor``: commands on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmplan.commands.options import ClusterOption, JsonOption, WorkloadPath, check_output
from mmplan.errors import InvalidInputError
from mmplan.report.terminal.console import Output


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
    as_json: JsonOption = False,
) -> None:
    """Time the modules, losses and links of a workload, and fit their curves."""
    from mmplan.report.terminal.tables import profile_grids, warn_unused
    from mmplan.schema.base import save_document
    from mmplan.schema.cluster import load_cluster
    from mmplan.schema.dry_run import dry_run
    from mmplan.schema.workload import load_workload

    out = Output(as_json=as_json)
    check_output("--output", output)
    loaded = load_workload(workload)
    warn_unused(out, loaded)
    if data_samples is not None and not (data and data_samples > 0):
        raise InvalidInputError(
            f"--data-samples {data_samples}: how many samples --data looks at",
            hint="give 1 or more, together with --data",
        )
    if device not in (None, "cpu", "cuda"):
        raise InvalidInputError(f"--device {device}: no kind of device", hint="choose cpu or cuda")
    machine = load_cluster(cluster) if cluster is not None else None
    state = output.with_name(f".{output.name}.partial")
    if analytic and machine is None:
        raise InvalidInputError(
            "--analytic needs --cluster: there is no device to ask", hint="--cluster p3-8"
        )
    for note in dry_run(loaded, workload.parent, on_meta=analytic):
        out.hint(note)
    if analytic and machine is not None:
        from mmplan.profiling.analytic import analytic_profile

        profiled = analytic_profile(loaded, workload.parent, machine)
    else:
        profiled = _measure(out, workload, machine, device, nproc, state)
    if data:
        profiled = _with_data(out, profiled, loaded, workload.parent, data_samples, state)
    save_document(profiled, output)
    state.unlink(missing_ok=True)
    out.grids(*profile_grids(profiled))
    out.text(f"wrote {output}")
    out.data({"profile": str(output), "source": profiled.source, "cluster": profiled.cluster.name})


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
    """The profile with the work of its data; a hint for each task without any."""
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


def doctor(as_json: JsonOption = False) -> None:
    """Whether this machine is fit, and what is wrong."""
    from dataclasses import asdict

    from mmplan.doctor.doctor import examine
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
        raise UnfitEnvironmentError(f"this machine is unfit: {', '.join(unfit)}", documented=True)
