"""``mmplan profile`` and ``mmplan doctor``: commands on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmplan.commands.options import ClusterOption, JsonOption, WorkloadPath, check_output
from mmplan.reporting.terminal.console import Output


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
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds", metavar="N", min=1, help="measure N times; from 2 on at more points, too"
        ),
    ] = 1,
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
    """Time modules, losses and links of a workload; fit their curves."""
    from mmplan.profiling.worker import Worker

    out, worker = Output(as_json=as_json), Worker()
    check_output("--output", output)
    state = output.with_name(f".{output.name}.partial")
    with worker, out.progress("profiling") as bar:
        if not analytic:
            # Its libraries take as long to load as all that this process does until it needs them.
            worker.start()
        from mmplan import api

        profiled = api.profile(
            workload,
            cluster=cluster,
            analytic=analytic,
            device=device,
            processes=nproc,
            rounds=rounds,
            data=data,
            data_samples=data_samples,
            state=state,
            hint=out.hint,
            progress=bar.update,
            worker=worker,
        )
    from mmplan.reporting.terminal.tables import profile_grids
    from mmplan.schema.base import save_document

    save_document(profiled, output)
    state.unlink(missing_ok=True)
    out.grids(*profile_grids(profiled))
    out.text(f"wrote {output}")
    out.data({"profile": str(output), "source": profiled.source, "cluster": profiled.cluster.name})


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
