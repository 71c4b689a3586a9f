"""Faster parts, other devices, links and batches: bars, a table, a curve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mmplan.errors import InvalidInputError
from mmplan.planning.what_if import Effect, faster_links_s, replans
from mmplan.reporting import numbers as fmt
from mmplan.reporting.explain import best_batch
from mmplan.reporting.html import markup, plots
from mmplan.reporting.source import ReportData
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import load_workload

# Gains below this share of the step are not drawn: they would read 0.0%.
_LEAST_GAIN = 5e-4


def with_replans(data: ReportData, progress: Callable[[int, int, str], None]) -> ReportData:
    """The data with plans of other settings.

    Raises:
        InvalidInputError: the plan's profile or workload is gone.
    """
    if data.profile is None:
        raise InvalidInputError(
            f"--replan: {data.profile_note}", hint="put it back, or leave --replan out"
        )
    others = replans(
        data.plan,
        profile=data.profile,
        workload=data.workload or load_workload(data.original.parent / data.plan.workload.path),
        progress=progress,
    )
    return replace(data, replans=tuple(others))


def sensitivity_section(data: ReportData) -> str:
    """Parts of this plan made faster; other settings with plans of their batch_now."""
    if data.profile is None or data.simulation is None:
        return markup.note(f"Not known: {data.profile_note or data.simulation_note}")
    parts = _parts(data.plan, data.profile, data.effects)
    return markup.text("h3", "This plan with one part faster") + parts + _others(data)


def _parts(plan: Plan, profile: Profile, effects: Sequence[Effect]) -> str:
    gains = [
        (f"{e.part} in half the time" if e.is_module else f"no {e.part}", e.gain) for e in effects
    ]
    now_s = plan.predicted.iteration_s
    gains.append(("links twice as fast", 1 - faster_links_s(plan, profile) / now_s if now_s else 0))
    shown = sorted((pair for pair in gains if pair[1] >= _LEAST_GAIN), key=lambda pair: -pair[1])
    rest = ", ".join(name for name, gain in gains if gain < _LEAST_GAIN)
    nothing = markup.note(f"Would change nothing: {rest}.") if rest else ""
    amounts = [
        markup.Amount(name=name, value=gain, words=f"step {fmt.percent(gain)} shorter")
        for name, gain in shown
    ]
    return (markup.bars(amounts, label="What a faster part saves") if amounts else "") + nothing


def _others(data: ReportData) -> str:
    heading = markup.text("h3", "The best plan of other settings")
    if not data.replans:
        return heading + markup.note(
            "mmplan report --replan plans anew for a node more and less, faster links and other "
            "batches, and shows what that gives here."
        )
    rows = [("as it is", *_figures(data.plan, data.plan))]
    rows += [
        (item.change, *_figures(data.plan, item.plan))
        if item.plan is not None
        else (item.change, "–", "–", "–", "–", f"no plan: {item.why}")
        for item in data.replans
    ]
    columns = ("setting", ">samples/s", ">against now", ">step", ">MFU", "on")
    grid = markup.table(columns, rows, label="The best plan of other settings")
    return heading + grid + _batches(data)


def _figures(plan: Plan, then: Plan) -> tuple[str, ...]:
    now, other = plan.predicted, then.predicted
    ratio = other.samples_per_s / now.samples_per_s if now.samples_per_s else 0.0
    return (
        fmt.count(other.samples_per_s),
        f"× {ratio:.3f}",
        fmt.seconds(other.iteration_s),
        fmt.mfu(other.mfu),
        f"{other.devices_used} of {then.devices} devices, {then.solver.name}",
    )


def _batches(data: ReportData) -> str:
    """Samples per second over the batch."""
    batch_now = sum(task.batch for task in data.plan.tasks.values())
    points = [(batch_now, data.plan.predicted.samples_per_s)]
    points += [
        (int(batch_now * item.times), item.plan.predicted.samples_per_s)
        for item in data.replans
        if item.plan is not None and item.times != 1
    ]
    if len(points) == 1:
        return ""
    points.sort()
    label = "samples/s over samples a step: " + ", ".join(
        f"{batch:,}: {fmt.count(rate)}" for batch, rate in points
    )
    picture = plots.panel(
        lambda figure: _draw_batches(figure, points, batch_now),
        title="Batch",
        width=4.6,
        height=2.7,
        label=label,
        prefix="batches",
    )
    best = best_batch(data.plan, data.replans)
    return picture + markup.text("p", f"Best batch: {best.text}.")


def _draw_batches(figure: Any, points: Sequence[tuple[int, float]], batch_now: int) -> None:
    axes = figure.subplots()
    axes.plot([x for x, _ in points], [y for _, y in points], marker="o", color=plots.BLUE)
    axes.plot([batch_now], [dict(points)[batch_now]], marker="s", markersize=8, color=plots.RED)
    axes.annotate(
        "as planned",
        (batch_now, dict(points)[batch_now]),
        textcoords="offset points",
        xytext=(0, 9),
        ha="center",
        color=plots.INK,
    )
    plots.powers_of_two(axes, [x for x, _ in points])
    # Space for the text above the highest point.
    axes.margins(y=0.2)
    axes.set_ylim(bottom=0)
    plots.count_ticks(axes.yaxis)
    axes.set(xlabel="samples a step", ylabel="samples/s")
