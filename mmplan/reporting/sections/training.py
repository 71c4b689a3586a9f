"""What a run did: its loss, its iteration times and its throughput beside the predicted ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from mmplan.reporting import numbers as fmt
from mmplan.reporting.html import markup, plots
from mmplan.reporting.source import ReportData, Run, RunSegment
from mmplan.schema.evaluation import TOTAL
from mmplan.wording import counted

# Ranks in the table of those that waited for data.
_MOST_RANKS = 8
_MOST_EVALUATIONS = 8


def training_section(data: ReportData) -> str:
    """Loss, iteration time and throughput per step; where the tasks or ranks changed.

    An emulated run has no loss.
    """
    run = data.run
    if run is None:
        return markup.note("Loss and iteration times appear in the report of a run's folder.")
    notes = "".join(markup.note(f"{fault}.") for fault in run.faults)
    if not run.steps:
        return notes + markup.note("No step was recorded.")
    unfinished = sum(step.loss is None for step in run.steps)
    if run.is_emulated:
        notes += markup.note("An emulated run trains nothing: it has no loss.")
    elif unfinished:
        steps = "1 step has" if unfinished == 1 else f"{unfinished} steps have"
        notes += markup.note(f"{steps} a loss that is no finite number.")
    segments = _segments(data, run)
    pictures = (
        ("" if run.is_emulated else _loss_picture(run, segments))
        + _evaluation_picture(run, segments)
        + _time_picture(run, segments)
        + _throughput_picture(run, segments)
    )
    tables = _evaluation_table(run) + _time_table(data, run) + _waiting_table(run)
    tables += "".join(markup.note(f"{line}.") for line in run.slow_ranks[:_MOST_RANKS])
    tables += markup.left_out(len(run.slow_ranks) - _MOST_RANKS, "slow rank")
    return notes + markup.element("div", pictures, class_="pair") + tables


def _segments(data: ReportData, run: Run) -> tuple[RunSegment, ...]:
    """The run's segments; where its record has none, the plan of the page from the first step."""
    predicted = data.plan.predicted
    alone = RunSegment(
        from_step=run.steps[0].step,
        tasks=tuple(data.plan.tasks),
        devices=data.plan.devices,
        iteration_s=predicted.iteration_s,
        samples_per_s=predicted.samples_per_s,
    )
    return run.segments or (alone,)


def _draw_predicted(
    axes: Any, run: Run, segments: Sequence[RunSegment], values: list[float | None]
) -> None:
    """One dashed level for each segment."""
    ends = [s.from_step for s in segments[1:]] + [run.steps[-1].step + 1]
    label = "predicted (dashed)"
    for segment, end, value in zip(segments, ends, values, strict=True):
        if value is not None and end > segment.from_step:
            span = [segment.from_step - 0.5, end - 0.5]
            axes.plot(span, [value, value], color=plots.BLUE, linestyle="--", label=label)
            label = None


def _changes(segments: Sequence[RunSegment]) -> str:
    """A sentence on the dotted lines."""
    if len(segments) < 2:
        return ""
    changes = "; ".join(
        f"from step {s.from_step} {', '.join(s.tasks)} on {counted(s.devices, 'rank')}"
        for s in segments[1:]
    )
    return f" Dotted: {changes}."


def _picture(
    draw: Callable[[Any], None],
    segments: Sequence[RunSegment],
    *,
    label: str,
    prefix: str,
    caption: str,
) -> str:
    """A picture over the run's steps; ``draw`` gets its axes."""

    def draw_all(figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        draw(axes)
        for segment in segments[1:]:
            axes.axvline(segment.from_step - 0.5, color=plots.DIM, linestyle=":", linewidth=1)
        # There is no step 0.5.
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    # Two pictures fit beside each other.
    picture = plots.plot(draw_all, width=5.4, height=2.9, label=label, prefix=prefix)
    return markup.figure(picture, label=label, caption=markup.esc(caption))


def _draw_measured(axes: Any, run: Run, xs: Sequence[float], ys: Sequence[float]) -> None:
    axes.plot(xs, ys, color=plots.RED, linewidth=1, marker="o", markersize=2, label=run.time_source)


def _loss_picture(run: Run, segments: Sequence[RunSegment]) -> str:
    pairs = [(step.step, step.loss) for step in run.steps if step.loss is not None]
    if not pairs:
        return ""
    xs, ys = plots.thinned(pairs)

    def draw(axes: Any) -> None:
        axes.plot(xs, ys, color=plots.BLUE, marker="o" if len(xs) == 1 else None)
        axes.set(xlabel="step", ylabel="loss")

    (first, first_loss), (last, last_loss) = pairs[0], pairs[-1]
    return _picture(
        draw,
        segments,
        label=f"Loss by step: {first_loss:.4g} at first, {last_loss:.4g} at last",
        prefix="loss",
        caption=f"Loss: {first_loss:.4g} at step {first}, {last_loss:.4g} at step {last}."
        f"{_changes(segments)}",
    )


def _evaluation_picture(run: Run, segments: Sequence[RunSegment]) -> str:
    """The weighted sum of the losses on held-out data, over the steps."""
    pairs = [
        (each.step, value)
        for each in run.evaluations
        if (value := each.values.get(TOTAL)) is not None
    ]
    if len(pairs) < 2:
        return ""
    xs, ys = plots.thinned(pairs)

    def draw(axes: Any) -> None:
        axes.plot(xs, ys, color=plots.RED, marker="o", markersize=3)
        axes.set(xlabel="step", ylabel="loss, held out")

    best, at = min((value, step) for step, value in pairs)
    return _picture(
        draw,
        segments,
        label=f"Loss of held-out data by step, {best:.4g} at best",
        prefix="evaluation",
        caption=f"Loss of held-out data: {best:.4g} at best, after step {at}.{_changes(segments)}",
    )


def _evaluation_table(run: Run) -> str:
    """The last evaluations, newest first."""
    if not run.evaluations:
        return ""
    shown = run.evaluations[: -_MOST_EVALUATIONS - 1 : -1]
    names = list(dict.fromkeys(name for each in shown for name in each.values))
    rows = [
        (
            f"after step {each.step}",
            *("–" if (v := each.values.get(name)) is None else f"{v:.5g}" for name in names),
        )
        for each in shown
    ]
    columns = ("evaluation", *(f">{name}" for name in names))
    rest = markup.left_out(len(run.evaluations) - len(shown), "earlier evaluation")
    return markup.table(columns, rows, label="Evaluations of held-out data") + rest


def _time_picture(run: Run, segments: Sequence[RunSegment]) -> str:
    pairs = [(step.step, step.iteration_s) for step in run.steps if step.iteration_s is not None]
    if not pairs:
        return ""
    predicted_s = max((s.iteration_s or 0.0 for s in segments), default=0.0)
    factor, unit = plots.time_unit([predicted_s, sorted(t for _, t in pairs)[len(pairs) // 2]])
    xs, ys = plots.thinned([(step, t * factor) for step, t in pairs])
    top = _top(ys, predicted_s * factor)
    warm_up = [step.step for step in run.current[: run.warm_up]]

    def draw(axes: Any) -> None:
        _draw_measured(axes, run, xs, ys)
        levels = [None if s.iteration_s is None else s.iteration_s * factor for s in segments]
        _draw_predicted(axes, run, segments, levels)
        if warm_up and len(pairs) > 1:
            axes.axvspan(warm_up[0], warm_up[-1] + 0.5, color=plots.GREY, alpha=0.25, linewidth=0)
        axes.set(xlabel="step", ylabel=f"iteration ({unit})")
        axes.set_ylim(bottom=0, top=top)
        axes.legend(loc="best")

    caption = "Forward, backward, communication and losses, without the update."
    if warm_up:
        since = " of the last plan" if len(segments) > 1 else ""
        caption += (
            f" Grey: the first {counted(len(warm_up), 'step')}{since}, left out of the median."
        )
    clipped = sum(y > top for y in ys)
    if clipped:
        caption += f" Above the picture: {clipped} of the points."
    label = f"Iteration time by step, {run.time_source} and predicted"
    return _picture(draw, segments, label=label, prefix="iteration", caption=caption)


def _throughput_picture(run: Run, segments: Sequence[RunSegment]) -> str:
    pairs = [(s.step, s.samples_per_s) for s in run.steps if s.samples_per_s is not None]
    if not pairs:
        return ""
    xs, ys = plots.thinned(pairs)

    def draw(axes: Any) -> None:
        _draw_measured(axes, run, xs, ys)
        _draw_predicted(axes, run, segments, [s.samples_per_s for s in segments])
        axes.set(xlabel="step", ylabel="samples/s")
        plots.count_ticks(axes.yaxis)
        axes.set_ylim(bottom=0)
        axes.legend(loc="best")

    label = f"Throughput by step, {run.time_source} and predicted"
    caption = f"Samples of all tasks of a step, by its iteration time.{_changes(segments)}"
    return _picture(draw, segments, label=label, prefix="throughput", caption=caption)


def _top(ys: list[float], predicted: float) -> float:
    """Upper end of the axis; one slow first step does not flatten all the others."""
    ordered = sorted(ys)
    usual = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return 1.25 * max(usual, predicted, 1e-12)


def _time_table(data: ReportData, run: Run) -> str:
    measured = run.current[run.warm_up :]
    rows: list[tuple[str, ...]] = []
    for name, values in (
        ("iteration", [s.iteration_s for s in measured]),
        ("update of the parameters", [s.update_s for s in measured]),
        ("waiting for data", [s.data_s for s in measured]),
    ):
        known = sorted(v for v in values if v is not None)
        if known:
            low, middle, high = (known[int(q * (len(known) - 1))] for q in (0.1, 0.5, 0.9))
            is_iteration = name == "iteration"
            predicted = fmt.seconds(data.plan.predicted.iteration_s) if is_iteration else "–"
            rows.append((name, predicted, *(fmt.seconds(v) for v in (low, middle, high))))
    columns = ("per step", ">predicted", ">10th percentile", ">median", ">90th percentile")
    return markup.table(columns, rows, label="Times of a step") if rows else ""


def _waiting_table(run: Run) -> str:
    """The ranks that waited for data, longest first."""
    waited_s: defaultdict[int, float] = defaultdict(float)
    steps = [s for s in run.current[run.warm_up :] if s.waits and s.iteration_s is not None]
    for rank, wait_s in chain.from_iterable(step.waits for step in steps):
        waited_s[rank] += wait_s
    took_s = sum((s.iteration_s or 0.0) + (s.update_s or 0.0) + (s.data_s or 0.0) for s in steps)
    longest = sorted(waited_s, key=lambda rank: -waited_s[rank])[:_MOST_RANKS]
    rows = [
        (str(rank), fmt.seconds(waited_s[rank] / len(steps)), fmt.percent(waited_s[rank] / took_s))
        for rank in longest
        if took_s > 0
    ]
    columns = ("rank", ">waiting for data, mean of a step", ">of the time")
    return markup.table(columns, rows, label="Waiting for data by rank") if rows else ""
