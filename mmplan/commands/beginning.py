"""``mmplan init``: from a model to a workload's folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from mmplan.commands.options import JsonOption, names
from mmplan.errors import MMPlanError, RunFailedError
from mmplan.reporting.terminal.console import Output
from mmplan.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldCut:
    """A cut against the uncut model.

    Attributes:
        compared: outputs and gradients.
        share: the largest part of what rounding allows that one differs by.
        differences: lines about those that differ by more.
    """

    compared: int
    share: float
    differences: tuple[str, ...]


# Workload, what --original takes -> the comparison. The runtime is above this package.
Hold = Callable[[Path, str], HeldCut]


def init(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="folder or config.json of a model, or MODULE:CALLABLE"
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="new folder of the workload")
    ],
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample",
            metavar="MODULE:CALLABLE",
            help="a plain model's inputs: tuple or dict of tensors",
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option("--layers", metavar="A,B", help="cut at these lists; default: all outermost"),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option("--length", metavar="N", min=2, help="tokens of a synthetic text"),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="hold it against the model at once")
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Write a workload that trains a model as it is."""
    from mmplan import api

    out = Output(as_json=as_json)
    out.text(f"reading {source}: its layers, and what stands around them")
    begun = api.init(
        source, output, sample=sample, layers=names("--layers", layers) or (), length=length
    )
    out.text(f"cut into {counted(begun.blocks, 'block')}")
    for note in begun.notes:
        out.hint(note)
    if check:
        out.text("holding the cut against the model: outputs and gradients")
    hold = cast(Hold, context.obj.hold)
    try:
        held = [hold(begun.workload, original) for original in begun.originals] if check else []
    except MMPlanError:
        begun.remove()
        raise
    wrong = [line for item in held for line in item.differences]
    for line in wrong[:10]:
        out.text(line)
    document: dict[str, Any] = {
        "files": [str(file) for file in begun.files],
        "blocks": begun.blocks,
        "compared": sum(item.compared for item in held),
        "differences": wrong,
    }
    out.data(document)
    if wrong:
        raise RunFailedError(
            f"{counted(len(wrong), 'value')} of the cut differ from the model's own",
            hint="see Debugging a cut in docs/your-hugging-face-model.md",
            documented=True,
        )
    out.text(f"wrote {', '.join(map(str, begun.files))}")
    for item in held:
        out.text(
            f"{counted(item.compared, 'output and gradient', 'outputs and gradients')} equal the "
            f"model's own: at most {item.share:.0%} of what rounding allows"
        )
    out.hint("the data is noise: put your own into workload.yaml")
    profile, plan = output / "profile.json", output / "plan.json"
    out.hint(f"mmplan profile {begun.workload} -o {profile}")
    out.hint(f"mmplan solve {begun.workload} --profile {profile} --devices 2 -o {plan}")
    original = f" --original {begun.originals[0]}" if begun.originals else ""
    out.hint(f"mmlaunch verify {plan}{original}")
    out.hint(f"mmlaunch run {plan}")
