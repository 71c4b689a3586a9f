"""Small plots by matplotlib as inline SVG whose colours and font are the page's."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from mmplan.reporting import numbers as fmt
from mmplan.reporting.html import markup

# matplotlib draws with these colours; the page's style then decides what they look like.
INK = "#010203"
DIM = "#040506"
GRID = "#070809"
GROUND = "#0a0b0c"
BLUE = "#0d0e0f"
RED = "#101112"
GREEN = "#131415"
GREY = "#161718"
_VARIABLES = {
    INK: "--ink",
    DIM: "--dim",
    GRID: "--grid",
    GROUND: "--panel",
    BLUE: "--F",
    RED: "--B",
    GREEN: "--S",
    GREY: "--M",
}
# Inches: three panels fit beside each other.
PANEL_WIDTH = 3.6
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    # Ids of clip paths and markers depend on the drawing alone.
    "svg.hashsalt": "mmplan",
    "font.size": 9,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": DIM,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": DIM,
    "ytick.color": DIM,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "path.simplify": True,
}


def plot(
    draw: Callable[[Any], None], *, width: float, height: float, label: str, prefix: str
) -> str:
    """Draw a figure and return it as an inline ``svg`` element.

    Args:
        draw: gets an empty matplotlib figure.
        width: inches, as ``height``; 72 CSS pixels each.
        label: the picture's text alternative.
        prefix: makes the ids of this picture differ from those of others on the page.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    return _inline(buffer.getvalue(), label=label, prefix=prefix)


def panel(
    draw: Callable[[Any], None],
    *,
    title: str,
    beside: str = "",
    width: float = PANEL_WIDTH,
    height: float,
    label: str,
    prefix: str,
) -> str:
    """One of several small pictures, as :func:`plot` makes it, below a title and markup."""
    picture = plot(draw, width=width, height=height, label=label, prefix=prefix)
    return markup.panel(picture, label=label, title=title, beside=beside)


def _inline(document: str, *, label: str, prefix: str) -> str:
    body = document[document.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r'\s(xmlns(:\w+)?|version)="[^"]*"', "", body)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", body)
    body = body.replace("xlink:href", "href")
    body = re.sub(r"font: ([\w. ]*?)([\d.]+px)[^;\"]*", r"font: \1\2 var(--font)", body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    body = re.sub(r"\s*\n\s*", "\n", body)
    return body.replace("<svg", f'<svg class="plot" role="img" aria-label="{markup.esc(label)}"', 1)


def powers_of_two(axes: Any, ticks: Sequence[float]) -> None:
    """A logarithmic x axis with ticks at exactly these numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
    axes.minorticks_off()


def plain_numbers(*both: Any) -> None:
    """Plain numbers at the major ticks of logarithmic axes, no minor ticks."""
    from matplotlib.ticker import NullLocator

    for axis in both:
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())


def count_ticks(axis: Any) -> None:
    """Large numbers as tables have them."""
    axis.set_major_formatter(lambda value, _: fmt.count(value))


def time_unit(values: Sequence[float]) -> tuple[float, str]:
    """Factor and name of the unit in which the largest of these seconds reads well."""
    largest = max(values, default=0.0)
    if largest < 1e-3:
        return 1e6, "us"
    return (1e3, "ms") if largest < 1 else (1.0, "s")


def thinned(
    points: Sequence[tuple[float, float]], *, most: int = 1500
) -> tuple[list[float], list[float]]:
    """Coordinates of at most ``most`` points: the lowest and the highest of each interval."""
    kept = list(points)
    if len(points) > most:
        size, kept = -(-len(points) // (most // 2)), []
        for start in range(0, len(points), size):
            part = points[start : start + size]
            ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
            kept += sorted(ends, key=part.index)
    return [float(x) for x, _ in kept], [y for _, y in kept]
