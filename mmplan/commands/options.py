"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

WorkloadPath = Annotated[Path, typer.Argument(metavar="WORKLOAD", help="workload.yaml")]
PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json")]
ProfileOption = Annotated[
    Path, typer.Option("--profile", metavar="PROFILE", help="profile.json of this workload")
]
PlansProfileOption = Annotated[
    Path | None,
    typer.Option("--profile", metavar="PROFILE", help="default: the one the plan names"),
]
ClusterOption = Annotated[
    str | None,
    typer.Option("--cluster", metavar="CLUSTER", help="cluster.yaml, or a shipped name (p3-8)"),
]
DevicesOption = Annotated[
    int | None, typer.Option("--devices", metavar="N", help="use the cluster's first N devices")
]
TasksOption = Annotated[
    str | None, typer.Option("--tasks", metavar="A,B", help="only these tasks of the workload")
]
ReplanOption = Annotated[
    bool,
    typer.Option("--replan", help="also plan for a node more or less, faster links, other batches"),
]
WorkloadOption = Annotated[
    Path | None,
    typer.Option("--workload", metavar="FILE", help="default: the one the plan names"),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="longest silence of a rank")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="one JSON document on stdout, nothing else")
]
