"""Scaling curves of MetaOps: seconds on n devices, their concave envelope, its breaks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from mmplan.reporting import numbers as fmt
from mmplan.reporting.html import markup, plots
from mmplan.reporting.source import ReportData
from mmplan.schema.plan import ScalingCurve
from mmplan.solvers.mpsp.bounds import curve as convex_curve

# Each picture weighs some 15 kB.
_MOST_PICTURES = 40
# Points of the drawn line between its corners.
_STEPS = 80
# A corner lies above the line between its neighbours by more than this factor.
_CORNER = 1.001
# Breaks of the envelope that a caption lists.
_MOST_BREAKS = 8


def scaling_pictures(data: ReportData) -> str:
    """A picture for every MetaOp of a plan whose solver drew curves; nothing for others."""
    curves = data.plan.solver.curves
    if not curves:
        return ""
    used: defaultdict[str, set[int]] = defaultdict(set)
    for unit in data.plan.units:
        used[f"{unit.task}.{unit.module}"].add(unit.tp * unit.dp)
    pictures = "".join(
        _picture(curve, sorted(used[curve.name]), i)
        for i, curve in enumerate(curves[:_MOST_PICTURES])
    )
    return (
        markup.text("h3", "Scalability of every MetaOp")
        + markup.text(
            "p",
            "Seconds of a step's forward and backward on each number of devices that is allowed "
            "and faster than all smaller ones, with the best degrees. The line is the best that "
            "changing between two numbers of devices can do (the concave envelope of the speed, "
            "which the bound stands on).",
        )
        + markup.legend(
            (
                ('<span class="key dot kF"></span>', "circle: allowed number of devices"),
                ('<span class="key dot kB"></span>', "square: the plan's slices run on so many"),
                ('<span class="key dotted"></span>', "dotted: break of the envelope"),
            )
        )
        + markup.left_out(len(curves) - _MOST_PICTURES, "more MetaOp")
        + markup.element("div", pictures, class_="grid")
    )


def envelope(curve: ScalingCurve) -> tuple[list[float], list[float]]:
    """Corners of the envelope: numbers of devices, ascending, and seconds.

    A corner less than a thousandth above the line between its neighbours is left out.
    """
    table = np.array(curve.seconds, dtype=np.float64)[:, None]
    hull = convex_curve(curve.devices, table)
    counts = [float(round(n)) for n in (hull.area_s / hull.time_s)[::-1]]
    seconds = hull.time_s[::-1].tolist()
    kept = [0.0, *counts], [0.0, *(1 / s for s in seconds)]
    k = 1
    while k < len(kept[0]) - 1:
        (n0, n, n1), (v0, v, v1) = (row[k - 1 : k + 2] for row in kept)
        between = v0 + (v1 - v0) * (n - n0) / (n1 - n0)
        if v <= between * _CORNER:
            for row in kept:
                del row[k]
        else:
            k += 1
    return kept[0][1:], [1 / v for v in kept[1][1:]]


def envelope_s(curve: ScalingCurve, devices: float) -> float:
    """Seconds on a number of devices, by time-sharing between allowed ones."""
    counts, seconds = envelope(curve)
    speed = np.interp(devices, [0.0, *counts], [0.0, *(1 / s for s in seconds)])
    return 1 / float(speed)


def _picture(curve: ScalingCurve, used: Sequence[int], index: int) -> str:
    breaks = [f"{n:g}" for n in envelope(curve)[0]]
    shown = fmt.first_of(breaks, _MOST_BREAKS, separator=", ", rest="...")
    label = f"{curve.name}: seconds on each number of devices; breaks at {shown}"
    return plots.panel(
        lambda figure: _draw(figure, curve, used),
        title=curve.name,
        beside=markup.text("span", f" breaks at {shown}"),
        height=2.6,
        label=label,
        prefix=f"scaling{index}",
    )


def _draw(figure: Any, curve: ScalingCurve, used: Sequence[int]) -> None:
    from matplotlib.ticker import LogLocator

    axes = figure.subplots()
    factor, unit = plots.time_unit(curve.seconds)
    low, high = curve.devices[0], curve.devices[-1]
    corners, _ = envelope(curve)
    # Equal steps of the logarithm, and the corners themselves.
    steps = {low * (high / low) ** (i / _STEPS) for i in range(_STEPS + 1)}
    xs = sorted(steps | {n for n in corners if low <= n <= high})
    axes.plot(xs, [envelope_s(curve, n) * factor for n in xs], color=plots.GREEN)
    for n in corners:
        axes.axvline(n, color=plots.GREEN, linestyle=":", linewidth=0.8)
    axes.plot(
        curve.devices, [s * factor for s in curve.seconds], "o", color=plots.BLUE, markersize=3.5
    )
    seconds = dict(zip(curve.devices, curve.seconds, strict=True))
    chosen = [n for n in used if n in seconds]
    axes.plot(chosen, [seconds[n] * factor for n in chosen], "s", color=plots.RED, markersize=6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ends = min(curve.seconds) * factor, max(curve.seconds) * factor
    axes.set_ylim(ends[0] / 1.3, ends[1] * 1.3)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    plots.plain_numbers(axes.yaxis)
    axes.set(xlabel="devices", ylabel=f"time of a step ({unit})")
