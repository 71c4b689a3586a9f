"""What ranks hold: as the plan counts it, as a run of it is expected to, as one did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmplan.report import numbers as fmt
from mmplan.report.html import markup, plots
from mmplan.report.source import ReportData
from mmplan.simulation.peak_memory import MemoryUse

_MOST_BARS, _SHOWN_BARS = 24, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankPeaks:
    """One rank's peaks, bytes; None where there is none.

    Attributes:
        planned: what the plan counts.
        expected: of a run (:mod:`mmplan.simulation.peak_memory`).
        measured: of the run that the page is of.
    """

    rank: int
    planned: float
    expected: float | None
    measured: float | None

    @property
    def most(self) -> float:
        """The largest of them."""
        return max(self.planned, self.expected or 0.0, self.measured or 0.0)


def memory_section(data: ReportData) -> str:
    """Most bytes that each rank holds, against a device's memory, and the fullest over time."""
    planned = data.plan.predicted.memory_bytes
    if not planned:
        return markup.note("The plan holds no prediction of memory.")
    peaks = data.held.peaks() if data.held is not None else []
    measured = data.run.memory_bytes if data.run else {}
    rows = [
        _RankPeaks(
            rank=rank,
            planned=value,
            expected=peaks[rank].total if rank < len(peaks) else None,
            measured=measured.get(rank),
        )
        for rank, value in enumerate(planned)
    ]
    capacity = data.plan.cluster.device.memory_bytes
    caption = _planned_words(planned, capacity)
    if data.held is not None:
        caption += _expected_words(peaks, knows_workspace=data.held.knows_workspace)
    caption += _measured_words(rows, is_cpu=data.plan.cluster.device.is_cpu)
    return _pictures(rows, capacity, caption) + _over_time(data, peaks, capacity)


def _pictures(rows: Sequence[_RankPeaks], capacity: float, caption: str) -> str:
    if len(rows) <= _MOST_BARS:
        picture = _memory_bars(rows, capacity=capacity)
        return markup.figure(picture, label="Memory per rank", caption=markup.esc(caption))
    fullest = sorted(sorted(rows, key=lambda row: -row.most)[:_SHOWN_BARS], key=lambda r: r.rank)
    held = [row.planned for row in rows]
    whole = memory_plot(held, capacity, prefix="memory-all", xlabel="rank", width=8.0)
    caption += (
        f" Above what the plan counts, below the {len(fullest)} fullest of {len(rows):,} ranks."
    )
    return markup.figure(
        whole, label="Memory of all ranks", caption=markup.esc(caption)
    ) + markup.figure(_memory_bars(fullest, capacity=capacity), label="Memory of the fullest ranks")


def _planned_words(planned: Sequence[float], capacity: float) -> str:
    most, mean = max(planned), sum(planned) / len(planned)
    return (
        f"The plan counts {fmt.size(most)} on the fullest rank (bars), "
        f"{fmt.percent(most / capacity)} of a device's {fmt.size(capacity)}, and "
        f"{most / mean if mean else 1:.2f} times the mean of all ranks (imbalance): weights, "
        "gradients, optimizer state, and the activations of the micro-batches in flight."
    )


def _expected_words(peaks: Sequence[MemoryUse], *, knows_workspace: bool) -> str:
    """What a run's fullest rank holds when it holds most, in two sentences."""
    most = max(peaks, key=lambda held: held.total)
    parts = {
        "weights and state": most.fixed,
        "activations": most.activations,
        "gradients made by then": most.gradients,
        "for the moment only": most.workspace,
        "messages, sums and losses": most.buffers,
    }
    listed = ", ".join(f"{fmt.size(value)} {name}" for name, value in parts.items() if value)
    text = f" A run is expected to hold {fmt.size(most.total)} (dashed lines): {listed}."
    if not knows_workspace:
        text += (
            " The profile does not say what a forward or a backward takes for the moment only, "
            "so that is not in it."
        )
    return text


def _measured_words(rows: Sequence[_RankPeaks], *, is_cpu: bool) -> str:
    """What the run's ranks held, in a few sentences; nothing where none was measured."""
    found = [row for row in rows if row.measured]
    if not found:
        return ""
    text = (
        f" The run's steps held {fmt.size(max(row.measured or 0.0 for row in found))} on their "
        "fullest rank (short lines)"
    )
    expected = [row.expected / row.measured for row in found if row.expected and row.measured]
    if expected:
        text += f"; expected / measured is {min(expected):.2f} to {max(expected):.2f}"
    planned = [row.planned / row.measured for row in found if row.measured]
    text += f"; planned / measured is {min(planned):.2f} to {max(planned):.2f}."
    if is_cpu:
        text += (
            " On a CPU malloc keeps what was freed, in pieces; a run with "
            "MALLOC_MMAP_THRESHOLD_=131072 in its environment holds what its tensors need."
        )
    return text


def memory_plot(
    held: Sequence[float],
    capacity: float,
    *,
    prefix: str,
    xlabel: str,
    width: float,
    most: float | None = None,
) -> str:
    """Bytes of each device as steps, with the capacity where it is in sight.

    Args:
        held: bytes, in the order of the axis.
        capacity: of a device, bytes.
        prefix: of the picture's ids.
        xlabel: what the axis counts.
        width: inches.
        most: upper end of the scale, bytes; default the most of these.
    """
    top = most or max(held) or 1.0
    unit = fmt.size(top).split()[1]
    scale = 1000 ** fmt.SIZE_UNITS.index(unit)
    label = (
        f"{unit} by {xlabel}: most {fmt.size(max(held))}, least {fmt.size(min(held))}, "
        f"mean {fmt.size(sum(held) / len(held))}"
    )

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.stairs([value / scale for value in held], fill=True, color=plots.BLUE)
        shown = top
        if in_sight(capacity, top):
            axes.axhline(capacity / scale, color=plots.INK, linestyle="--", linewidth=1)
            shown = max(capacity, top)
        axes.set(xlabel=xlabel, ylabel=unit, xlim=(0, len(held)), ylim=(0, 1.08 * shown / scale))

    return plots.plot(draw, width=width, height=1.9, label=label, prefix=prefix)


def in_sight(capacity: float, most: float) -> bool:
    """Whether a capacity is drawn: far off the scale it would make everything else a hair."""
    return capacity <= 20 * most


def _memory_bars(rows: Sequence[_RankPeaks], *, capacity: float) -> str:
    width, left, height = 720.0, 70.0, 22
    most = max(row.most for row in rows)
    # A capacity far off the scale would make every bar a hair.
    on_scale = most >= 0.05 * capacity
    scale = (width - left - 220) / (max(capacity, most) if on_scale else most or 1.0)
    drawn = [
        _bar(row, y=22 + i * height, left=left, scale=scale, height=height, capacity=capacity)
        for i, row in enumerate(rows)
    ]
    bottom = 22 + len(rows) * height
    label = f"capacity {fmt.size(capacity)}"
    if on_scale:
        x = left + capacity * scale
        drawn.append(markup.element("path", d=f"M{x:.1f} 14V{bottom}", class_="capacity"))
        drawn.append(markup.text("text", label, x=f"{x - 4:.1f}", y=12, text_anchor="end"))
    else:
        label += f": {capacity / (most or 1):,.0f} times the longest bar"
        drawn.append(markup.text("text", label, x=left, y=12))
    return markup.svg(
        "".join(drawn),
        width=width,
        height=bottom + 4,
        label="Bytes per rank: "
        + ", ".join(f"{row.rank}: {fmt.size(row.planned)}" for row in rows[:16]),
        class_="memory",
    )


def _bar(
    row: _RankPeaks, *, y: float, left: float, scale: float, height: int, capacity: float
) -> str:
    """One rank: a bar as planned, lines where a run is expected and was found to be."""
    drawn = markup.text("text", f"rank {row.rank}", x=0, y=y + 14) + markup.element(
        "rect",
        x=left,
        y=y + 2,
        width=f"{max(1.0, row.planned * scale):.1f}",
        height=height - 6,
        class_="bar over" if row.planned > capacity else "bar",
    )
    for kind, value in (("expected", row.expected), ("measured", row.measured)):
        if value is not None:
            x = left + value * scale
            drawn += markup.element("path", d=f"M{x:.1f} {y}v{height - 2}", class_=kind)
    words = fmt.size(row.planned)
    if row.planned > capacity:
        words += " does not fit"
    elif row.expected is not None:
        words += f", expected {fmt.size(row.expected)}"
        words += " does not fit" if row.expected > capacity else ""
    return drawn + markup.text("text", words, x=f"{left + row.most * scale + 6:.1f}", y=y + 14)


def _over_time(data: ReportData, peaks: Sequence[MemoryUse], capacity: float) -> str:
    """The rank that is expected to be fullest, through a step."""
    if data.held is None or data.simulation is None:
        return ""
    rank = max(range(len(peaks)), key=lambda r: (peaks[r].total, -r))
    points = data.held.over_time(data.simulation, rank)
    planned = data.plan.predicted.memory_bytes[rank]
    unit = fmt.size(max(planned, peaks[rank].total)).split()[1]
    scale = 1000 ** fmt.SIZE_UNITS.index(unit)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.step([s for s, _ in points], [b / scale for _, b in points], where="post")
        axes.axhline(planned / scale, color=plots.GREY, linestyle=":", linewidth=1)
        if in_sight(capacity, planned):
            axes.axhline(capacity / scale, color=plots.INK, linestyle="--", linewidth=1)
        axes.set(xlabel="seconds of the step", ylabel=unit)
        axes.set_ylim(bottom=0)

    label = f"{unit} that rank {rank} holds over a step, at most {fmt.size(peaks[rank].total)}"
    picture = plots.plot(draw, width=8.0, height=2.1, label=label, prefix="memory-time")
    caption = (
        f"What rank {rank} is expected to hold over a step: gradients come with the first backward "
        f"and go with the update. Dotted: the {fmt.size(planned)} that the plan counts."
    )
    return markup.figure(picture, label="Memory over time", caption=markup.esc(caption))
