"""Pictures of the page: SVG files beside it, drawn by matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmplan.schema.base import write_text

FOLDER = Path(__file__).parents[2] / "docs" / "reproduction"
# Distinct in colour and in grey.
COLOURS = ("#2f6db5", "#d98a2b", "#5a9b5a", "#9c5fa8", "#777777", "#b5473f")
HATCHES = ("", "//", "..", "xx", "--", "\\\\")
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mmplan",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": "white",
    "hatch.linewidth": 0.5,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """One system's bars; None where it has no plan."""

    label: str
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One system's line; None where it has no plan."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]


def bars(
    name: str,
    title: str,
    groups: Sequence[str],
    series: Sequence[Bars],
    *,
    unit: str,
    line: float | None = None,
) -> str:
    """Groups of bars; returns the file's name. A cross marks what has no plan."""

    def draw(axes: Any) -> None:
        width = 0.8 / len(series)
        for index, own in enumerate(series):
            offset = (index - (len(series) - 1) / 2) * width
            places = [group + offset for group in range(len(groups))]
            axes.bar(
                places,
                [value or 0.0 for value in own.values],
                width * 0.92,
                label=own.label,
                color=COLOURS[index % len(COLOURS)],
                hatch=HATCHES[index % len(HATCHES)],
                edgecolor="white",
            )
            missing = [x for x, value in zip(places, own.values, strict=True) if value is None]
            axes.plot(missing, [0.0] * len(missing), "x", color="#b5473f", clip_on=False)
        slanted = {"rotation": 30, "ha": "right"} if max(map(len, groups)) > 3 else {}
        axes.set_xticks(range(len(groups)), groups, **slanted)
        axes.grid(visible=False, axis="x")
        if line is not None:
            axes.axhline(line, color="#333333", linewidth=0.8)

    return _save(name, title, unit, draw, legend=len(series) > 1)


def lines(
    name: str, title: str, series: Sequence[Line], *, across: str, unit: str, steps: bool = False
) -> str:
    """Lines over a common axis; returns the file's name."""

    def draw(axes: Any) -> None:
        for index, own in enumerate(series):
            known = [(x, y) for x, y in zip(own.x, own.y, strict=True) if y is not None]
            axes.plot(
                [x for x, _ in known],
                [y for _, y in known],
                color=COLOURS[index % len(COLOURS)],
                linestyle=("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))[index % 6],
                marker="" if steps else "os^Dv*"[index % 6],
                markersize=4,
                label=own.label,
                drawstyle="steps-post" if steps else "default",
            )
        axes.set_xlabel(across)
        axes.set_ylim(bottom=0)
        if not steps:
            ticks = sorted({x for own in series for x in own.x})
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])

    return _save(name, title, unit, draw, legend=len(series) > 1)


def _save(name: str, title: str, unit: str, draw: Any, *, legend: bool) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(8.0, 3.2), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_title(title, loc="left")
        axes.set_ylabel(unit)
        if legend:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Trailing blanks are all that differs between versions of the library.
    write_text(FOLDER / f"{name}.svg", re.sub(r"[ \t]+\n", "\n", buffer.getvalue()))
    return f"{name}.svg"


def link(file: str, words: str) -> str:
    """The picture in Markdown."""
    return f"![{words}](reproduction/{file})"
