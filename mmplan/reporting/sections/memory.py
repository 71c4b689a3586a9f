"""Memory of ranks: counted by the plan, expected of a run, measured in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmplan.program.communicators import most_communicators, most_held_blocks
from mmplan.reporting import numbers as fmt
from mmplan.reporting.html import markup, plots
from mmplan.reporting.source import ReportData
from mmplan.simulation.peak_memory import ExpectedMemory, MemoryUse

# Up to this many ranks have a bar each.
_MOST_BARS = 24
# Bars of the fullest ranks where there are more.
_SHOWN_BARS = 8
# Times the longest bar: a capacity beyond would make every bar a hair.
_IN_SIGHT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankPeaks:
    """Peak memory of one rank, bytes; None where it is not known.

    Attributes:
        planned: counted by the plan.
        expected: of a run (:mod:`mmplan.simulation.peak_memory`).
        measured: in the page's run.
    """

    rank: int
    planned: float
    expected: float | None
    measured: float | None

    @property
    def most(self) -> float:
        return max(self.planned, self.expected or 0.0, self.measured or 0.0)


def memory_section(data: ReportData) -> str:
    """Peak memory of each rank and a device's memory; the fullest rank over time."""
    planned = data.plan.predicted.memory_bytes
    if not planned:
        return markup.note("The plan holds no prediction of memory.")
    peaks = data.run_memory.peaks() if data.run_memory is not None else []
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
    if data.run_memory is not None:
        caption += _expected_words(peaks, data.run_memory)
    if data.simulation is not None and not data.plan.cluster.device.is_cpu:
        device, program = data.plan.cluster.device, data.simulation.program
        held = most_held_blocks(program)
        caption += f" On GPUs {fmt.communicators(most_communicators(program), device)}; "
        caption += f"{fmt.held_multiprocessors(held, device)}."
        if too_many := fmt.held_too_many(held, device):
            caption += f" {too_many[0].upper()}{too_many[1:]}."
    caption += _measured_words(rows, is_cpu=data.plan.cluster.device.is_cpu)
    return _pictures(rows, capacity, caption) + _over_time(data, peaks, capacity)


def _pictures(rows: Sequence[_RankPeaks], capacity: float, caption: str) -> str:
    if len(rows) <= _MOST_BARS:
        picture = _memory_bars(rows, capacity=capacity)
        return markup.figure(picture, label="Memory per rank", caption=markup.esc(caption))
    fullest = sorted(sorted(rows, key=lambda row: -row.most)[:_SHOWN_BARS], key=lambda r: r.rank)
    planned = [row.planned for row in rows]
    overview = memory_plot(planned, capacity, prefix="memory-all", xlabel="rank", width=8.0)
    caption += (
        f" Above what the plan counts, below the {len(fullest)} fullest of {len(rows):,} ranks."
    )
    return markup.figure(
        overview, label="Memory of all ranks", caption=markup.esc(caption)
    ) + markup.figure(_memory_bars(fullest, capacity=capacity), label="Memory of the fullest ranks")


def _planned_words(planned: Sequence[float], capacity: float) -> str:
    most, mean = max(planned), sum(planned) / len(planned)
    return (
        f"The plan counts {fmt.size(most)} on the fullest rank (bars), "
        f"{fmt.percent(most / capacity)} of a device's {fmt.size(capacity)}, and "
        f"{most / mean if mean else 1:.2f} times the mean of all ranks (imbalance): weights, "
        "gradients, optimizer state, activations of the micro-batches in flight, messages under "
        "way, and communicators."
    )


def _expected_words(peaks: Sequence[MemoryUse], memory: ExpectedMemory) -> str:
    """Expected peak memory of a run's fullest rank and its parts, in a few sentences."""
    fullest, most = max(enumerate(peaks), key=lambda item: item[1].total)
    parts = {
        "weights and state": most.fixed,
        "activations": most.activations,
        "gradients made by then": most.gradients,
        "for the moment only": most.workspace,
        "messages, sums and losses": most.buffers,
    }
    listed = ", ".join(f"{fmt.size(value)} {name}" for name, value in parts.items() if value)
    text = f" A run is expected to hold {fmt.size(most.total)} (dashed lines): {listed}."
    under_way = memory.message_bytes(fullest)
    if under_way:
        text += f" Messages under way take up to {fmt.size(under_way)} of it."
    if not memory.knows_workspace:
        text += (
            " The profile does not say what a forward or a backward takes for the moment only, "
            "so that is not in it."
        )
    return text


def _measured_words(rows: Sequence[_RankPeaks], *, is_cpu: bool) -> str:
    """Measured peak memory in a few sentences; nothing where none was measured."""
    measured = [row.measured for row in rows if row.measured]
    if not measured:
        return ""
    text = f" The run's steps held {fmt.size(max(measured))} on their fullest rank (short lines)"
    expected = [row.expected / row.measured for row in rows if row.expected and row.measured]
    if expected:
        text += f"; expected / measured is {min(expected):.2f} to {max(expected):.2f}"
    planned = [row.planned / row.measured for row in rows if row.measured]
    text += f"; planned / measured is {min(planned):.2f} to {max(planned):.2f}."
    if is_cpu:
        text += (
            " On a CPU malloc keeps what was freed, in pieces; a run with "
            "MALLOC_MMAP_THRESHOLD_=131072 in its environment holds what its tensors need."
        )
    return text


def _unit(num_bytes: float) -> tuple[str, float]:
    """Name and bytes of the unit in which a size reads well."""
    unit = fmt.size(num_bytes).split()[1]
    return unit, 1000 ** fmt.SIZE_UNITS.index(unit)


def memory_plot(
    sizes: Sequence[float],
    capacity: float,
    *,
    prefix: str,
    xlabel: str,
    width: float,
    most: float | None = None,
) -> str:
    """Memory of each device as steps, with the capacity where it is in sight.

    Args:
        sizes: bytes, in the order of the axis.
        capacity: of a device, bytes.
        prefix: see :func:`mmplan.reporting.html.plots.plot`.
        xlabel: name of the axis of devices.
        width: inches.
        most: upper end of the scale, bytes; default the largest size.
    """
    top = most or max(sizes) or 1.0
    unit, scale = _unit(top)
    label = (
        f"{unit} by {xlabel}: most {fmt.size(max(sizes))}, least {fmt.size(min(sizes))}, "
        f"mean {fmt.size(sum(sizes) / len(sizes))}"
    )

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.stairs([value / scale for value in sizes], fill=True, color=plots.BLUE)
        shown = top
        if in_sight(capacity, top):
            axes.axhline(capacity / scale, color=plots.INK, linestyle="--", linewidth=1)
            shown = max(capacity, top)
        axes.set(xlabel=xlabel, ylabel=unit, xlim=(0, len(sizes)), ylim=(0, 1.08 * shown / scale))

    return plots.plot(draw, width=width, height=1.9, label=label, prefix=prefix)


def in_sight(capacity: float, most: float) -> bool:
    """Whether a capacity is drawn on the scale of a picture."""
    return capacity <= _IN_SIGHT * most


def _memory_bars(rows: Sequence[_RankPeaks], *, capacity: float) -> str:
    width, left, height = 720.0, 70.0, 22
    most = max(row.most for row in rows)
    on_scale = in_sight(capacity, most)
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
    """One rank: a bar for the plan's count, lines for expected and measured memory."""
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
    """Expected memory of the fullest rank through a step."""
    if data.run_memory is None or data.simulation is None:
        return ""
    rank = max(range(len(peaks)), key=lambda r: (peaks[r].total, -r))
    points = data.run_memory.over_time(data.simulation, rank)
    planned = data.plan.predicted.memory_bytes[rank]
    unit, scale = _unit(max(planned, peaks[rank].total))

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
