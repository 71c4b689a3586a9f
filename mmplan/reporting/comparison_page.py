"""compare.html: plans of several solvers side by side, in one self-contained page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from mmplan.planning.compare import ComparedSetting, Comparison, evenly
from mmplan.reporting import numbers as fmt
from mmplan.reporting.html import markup, plots
from mmplan.reporting.sections.memory import in_sight, memory_plot
from mmplan.reporting.sections.timelines import (
    LABEL_LENGTH,
    MOST_BARS,
    StepTimeline,
    rank_labels,
    timeline,
    timeline_legend,
    timeline_picture,
)
from mmplan.reporting.sections.utilisation import utilisation_matrix
from mmplan.reporting.source import TraceEvent
from mmplan.reporting.terminal.comparison_tables import (
    COLUMNS,
    Axis,
    baseline_words,
    batch_axis,
    batch_words,
    comparison_row,
    left_out_lines,
    setting_words,
    sweep,
)
from mmplan.wording import counted

# Rates within this factor have ticks between powers of two, which would be one or two.
FEW_POWERS = 8
# Instructions of all timelines: one page has one picture of them.
_BARS = 2 * MOST_BARS
# Lines differ in marker and dash too, not in colour alone.
_COLOURS = (plots.BLUE, plots.RED, plots.GREEN, plots.INK, plots.GREY)
_MARKERS = "osD^vPX*<>ph"
_DASHES = ("-", "--", "-.", ":")


def render_comparison(comparison: Comparison) -> str:
    """The page of a comparison with details, as HTML."""
    uses = {i.solver: i.details.uses for i in comparison.best_first if i.details is not None}
    modules = utilisation_matrix(uses) if uses else ""
    sections = (
        markup.Section("plans", "Plans, best first", plans_section(comparison)),
        markup.Section("timelines", "One step of each, on one time scale", _timelines(comparison)),
        markup.Section("memory", "Memory per device, predicted", _memory(comparison)),
        markup.Section("modules", "What each module makes of its devices", modules),
        markup.Section("devices", "More and fewer devices", _devices(comparison)),
        markup.Section("batches", "Other batches", _batches(comparison)),
    )
    shown = [section for section in sections if section.content]
    return markup.document(comparison.name, "mmplan comparison of plans", shown)


def plans_section(comparison: Comparison) -> str:
    """What the best plan gains, the rates as bars, and a table of all plans."""
    best = comparison.best_first[0]
    cluster = best.plan.cluster
    summary = (
        f"On {setting_words(comparison, comparison.main)}, cluster {cluster.name} "
        f"({cluster.device.name}): {best.solver} has the most samples/s, "
        f"{comparison.ratio(best.plan):.2f} times those of {comparison.baseline}. "
        "All figures are of simulated steps, without the update."
    )
    columns = ("solver", ">samples/s", f">× {comparison.baseline}", *(f">{c}" for c in COLUMNS))
    rows = [comparison_row(comparison, item.solver, item.plan) for item in comparison.best_first]
    notes = left_out_lines(comparison)
    return (
        markup.text("p", summary)
        + _rate_bars(comparison)
        + markup.table(columns, rows, label="Plans of all solvers")
        + markup.note(
            f"{baseline_words(comparison, '×')}. Gap: the step over the lower bound of all plans, "
            "less 1. Idle and communication: shares of the devices used."
        )
        + (markup.text("h3", "Left out") + markup.bullets(notes) if notes else "")
    )


def _rate_bars(comparison: Comparison) -> str:
    """Samples per second; the baseline's bar is grey."""
    amounts = [
        markup.Amount(
            name=item.solver,
            value=item.plan.predicted.samples_per_s,
            words=f"{fmt.count(item.plan.predicted.samples_per_s)}/s, "
            f"× {comparison.ratio(item.plan):.2f}",
            marked=item.solver == comparison.baseline,
        )
        for item in comparison.best_first
    ]
    return markup.bars(amounts, label="Samples per second of every solver")


def _timelines(comparison: Comparison) -> str:
    lines = step_timelines(comparison, _BARS)
    if not lines:
        return ""
    hidden = [f"{line.name} {line.hidden:,}" for line in lines if line.hidden]
    thinned = f" Left out are the shortest instructions: {', '.join(hidden)}." if hidden else ""
    return (
        markup.text(
            "p",
            "Best first. Of every plan some ranks are drawn: one for each set of stages that ranks "
            f"run, more where these are few, fewer and no messages of very long programs.{thinned}",
        )
        + timeline_legend()
        + timeline_picture(lines, label="Timelines of the plans")
    )


def step_timelines(comparison: Comparison, most_bars: int) -> list[StepTimeline]:
    """A step of every plan with details, best first; all together have at most so many bars."""
    return [line for line in _lines(comparison, most_bars) if line.rows and line.end_s > 0]


def _lines(comparison: Comparison, most_bars: int) -> Iterator[StepTimeline]:
    shown = [(item, item.details) for item in comparison.best_first if item.details is not None]
    for item, details in shown:
        most = most_bars // len(shown)
        events, ranks = _fitting(details.events, most)
        yield timeline(
            item.solver,
            events,
            ranks=ranks,
            most_bars=most,
            labels=rank_labels(item.plan, LABEL_LENGTH),
        )


def _fitting(events: Sequence[TraceEvent], most: int) -> tuple[Sequence[TraceEvent], list[int]]:
    """Events of complete rows, at most ``most``: without messages, then of fewer ranks."""
    if len(events) > most:
        events = [event for event in events if event["cat"] not in ("SEND", "RECV")]
    ranks = sorted({event["tid"] for event in events})
    if len(events) > most:
        ranks = evenly(ranks, max(2, most * len(ranks) // len(events)))
    return events, ranks


def _memory(comparison: Comparison) -> str:
    shown = [item for item in comparison.best_first if item.plan.predicted.memory_bytes]
    if not shown:
        return ""
    capacity = shown[0].plan.cluster.device.memory_bytes
    most = max(max(item.plan.predicted.memory_bytes) for item in shown)
    pictures = ""
    for i, item in enumerate(shown):
        held = sorted(item.plan.predicted.memory_bytes, reverse=True)
        picture = memory_plot(
            held,
            capacity,
            prefix=f"memory{i}",
            xlabel="devices, fullest first",
            width=plots.PANEL_WIDTH,
            most=most,
        )
        beside = markup.text("span", f" {fmt.size(held[0])} to {fmt.size(held[-1])}")
        label = f"Memory, {item.solver}"
        pictures += markup.panel(picture, label=label, title=item.solver, beside=beside)
    has = "dashed: the {} that it has" if in_sight(capacity, most) else "it has {}"
    text = f"Most bytes that each device holds, fullest first; {has.format(fmt.size(capacity))}."
    return markup.text("p", text) + markup.element("div", pictures, class_="grid")


def _devices(comparison: Comparison) -> str:
    settings = sweep(comparison, "devices")
    if not settings:
        return ""
    rates = _rates(comparison, settings, "devices")
    efficiency = {
        solver: [(n, rate / n / (row[0][1] / row[0][0])) for n, rate in row]
        for solver, row in rates.items()
        if row[0][1]
    }
    pictures = _curves(rates, "devices", "samples/s", "rate-devices", log=True) + _curves(
        efficiency, "devices", "samples/s per device (first = 1)", "efficiency", log=False
    )
    return (
        markup.text(
            "p",
            "Every solver plans anew for every number of devices, "
            f"{batch_words(comparison, comparison.main)}. The second picture divides by the "
            "number of devices and by the solver's own first point: 1 is linear scaling.",
        )
        + markup.element("div", pictures, class_="grid wide")
        + _sweep_table(rates, settings, "devices")
    )


def _batches(comparison: Comparison) -> str:
    settings = sweep(comparison, "batch")
    if not settings:
        return ""
    rates = _rates(comparison, settings, "batch")
    axis = batch_axis(comparison)
    picture = _curves(rates, "batch", "samples/s", "rate-batches", log=True)
    return (
        markup.text(
            "p",
            "Every solver plans anew for every batch, on "
            f"{counted(comparison.main.devices, 'device')}. "
            "Larger batches fill pipelines and hide reductions; what they do to learning is not "
            f"said{f' ({axis})' if axis else ''}.",
        )
        + markup.element("div", picture, class_="grid wide")
        + _sweep_table(rates, settings, "batch")
    )


Curves = dict[str, list[tuple[int, float]]]


def _rates(comparison: Comparison, settings: Sequence[ComparedSetting], axis: Axis) -> Curves:
    """Solver to its points, in order of the settings; best solvers of the main setting first."""
    rates: Curves = {item.solver: [] for item in comparison.best_first}
    for setting in settings:
        for item in comparison.at(setting):
            point = getattr(setting, axis), item.plan.predicted.samples_per_s
            rates.setdefault(item.solver, []).append(point)
    return rates


def _curves(curves: Curves, xlabel: str, ylabel: str, prefix: str, *, log: bool) -> str:
    label = f"{ylabel} over {xlabel}; the table below says the same"
    return plots.panel(
        partial(_draw_curves, curves=curves, xlabel=xlabel, ylabel=ylabel, log=log),
        title=f"{ylabel} over {xlabel}",
        width=5.2,
        height=3.6,
        label=label,
        prefix=prefix,
    )


def _draw_curves(figure: Any, curves: Curves, xlabel: str, ylabel: str, log: bool) -> None:
    axes = figure.subplots()
    for i, (solver, row) in enumerate(curves.items()):
        axes.plot(
            [x for x, _ in row],
            [y for _, y in row],
            color=_COLOURS[i % len(_COLOURS)],
            marker=_MARKERS[i % len(_MARKERS)],
            linestyle=_DASHES[i // len(_COLOURS) % len(_DASHES)],
            markersize=4.5,
            label=solver,
        )
    ticks = sorted({x for row in curves.values() for x, _ in row})
    plots.powers_of_two(axes, ticks)
    if log:
        from matplotlib.ticker import MaxNLocator

        axes.set_yscale("log", base=2)
        rates = [y for row in curves.values() for _, y in row]
        if max(rates) < FEW_POWERS * min(rates):
            axes.yaxis.set_major_locator(MaxNLocator(5))
        plots.count_ticks(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    figure.legend(loc="outside right upper")


def _sweep_table(rates: Curves, settings: Sequence[ComparedSetting], axis: Axis) -> str:
    columns = [getattr(setting, axis) for setting in settings]
    rows = [
        (solver, *(fmt.count(dict(row)[x]) if x in dict(row) else "–" for x in columns))
        for solver, row in rates.items()
    ]
    heads = (f"samples/s with {axis}", *(f">{x:,}" for x in columns))
    return markup.table(heads, rows, label=f"Samples per second by {axis}")
