"""Arguments and options that several commands take."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mmplan.errors import InvalidInputError, UnfitEnvironmentError

# Seconds of planning before it says how far it is.
SILENT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What commands do with the runtime, which is above this package.

    Attributes:
        step_seconds: of real steps, for ``solve --measure``.
        hold: a cut against its model, for ``init``.
    """

    step_seconds: Callable[..., float]
    hold: Callable[..., Any]


def names(option: str, text: str | None) -> tuple[str, ...] | None:
    """Names between commas, None where nothing was given.

    Raises:
        InvalidInputError: no name between the commas.
    """
    if text is None:
        return None
    listed = tuple(name.strip() for name in text.split(",") if name.strip())
    if not listed:
        raise InvalidInputError(f"{option} {text!r} names nothing", hint="separate names by commas")
    return listed


def counts(option: str, text: str | None) -> tuple[int, ...]:
    """Numbers from 1 on between commas, none where nothing was given.

    Raises:
        InvalidInputError: an item that is no such number.
    """
    parts = names(option, text) or ()
    if not all(name.isdecimal() and int(name) > 0 for name in parts):
        raise InvalidInputError(
            f"{option} {text}: numbers from 1 on, separated by commas", hint=f"{option} 8,16"
        )
    return tuple(map(int, parts))


def count_or_auto(option: str, text: str) -> int | None:
    """A number from 0 on; None for ``auto``.

    Raises:
        InvalidInputError: it is neither.
    """
    if text == "auto":
        return None
    if not text.isdecimal():
        raise InvalidInputError(
            f"{option} {text}: neither auto nor a number from 0 on", hint=f"{option} 4"
        )
    return int(text)


def check_output(option: str, path: Path | None) -> None:
    """Check before the work that its file can be written.

    Raises:
        InvalidInputError: it is a folder.
        UnfitEnvironmentError: its folder is none, or is read-only.
    """
    if path is None:
        return
    if path.is_dir():
        raise InvalidInputError(f"{option} {path}: is a folder", hint="name a file")
    # Missing folders are created later.
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise UnfitEnvironmentError(
            f"{path}: cannot be written: "
            + (f"{above} is read-only" if above.is_dir() else f"{above} is no folder"),
            hint="choose another folder",
        )


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
    float,
    typer.Option("--timeout", metavar="SECONDS", help="longest silence of all ranks in a step"),
]
StartTimeoutOption = Annotated[
    float,
    typer.Option("--start-timeout", metavar="SECONDS", help="while a rank starts, loads or saves"),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="one JSON document on stdout, nothing else")
]
