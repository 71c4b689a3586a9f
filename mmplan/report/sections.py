"""Sections that are tables: units, how the plan was found, memory, where everything is from."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from itertools import islice
from textwrap import shorten
from typing import Any

from mmplan.report import format as fmt
from mmplan.report import markup, plots
from mmplan.report.bars import Amount, bars
from mmplan.report.source import ReportData
from mmplan.report.topology import unit_colour, unit_letter
from mmplan.schema.plan import Plan, Unit

_MOST_UNITS = 400
_MOST_BARS, _SHOWN_BARS = 24, 8
_MOST_RUNNERS_UP, _FIRST_RUNNERS_UP = 50, 8
# Characters of another plan's degrees.
_LABEL = 300


def units_section(data: ReportData) -> str:
    """Every unit's degrees, ranks and shares."""
    units = data.plan.units
    columns = ("unit", "module", "blocks", ">dp × pp × tp", "ranks", "samples", "micro-batches")
    rows = [_unit_row(unit, i) for i, unit in enumerate(units[:_MOST_UNITS])]
    grid = markup.table((*columns, "schedule"), rows, label="Units of the plan")
    if len(units) > _MOST_UNITS:
        grid += markup.note(f"The first {_MOST_UNITS} of {len(units):,} units.")
    return grid


def _unit_row(unit: Unit, index: int) -> tuple[str, ...]:
    sign = markup.text("span", unit_letter(index), class_=f"key {unit_colour(index)}")
    return (
        markup.Markup(sign + markup.esc(unit.name)),
        unit.module,
        ", ".join(f"[{a}, {b})" for a, b in unit.blocks),
        f"{unit.dp} × {unit.pp} × {unit.tp}" + (f", vpp {unit.vpp}" if unit.vpp > 1 else ""),
        fmt.ranks(unit.all_ranks),
        fmt.repeated(unit.samples),
        _microbatches(unit),
        unit.schedule.kind,
    )


def _microbatches(unit: Unit) -> str:
    different = list(dict.fromkeys(fmt.repeated(row) for row in unit.microbatches))
    return " | ".join(different[:4]) + (" | …" if len(different) > 4 else "")


def solver_section(data: ReportData) -> str:
    """Objective, bound, gap, what the solver notes, and the runners-up."""
    plan, solver = data.plan, data.plan.solver
    facts = [
        ("solver", f"{solver.name} ({solver.method}), {fmt.seconds(solver.seconds)}"),
        ("objective", f"{fmt.seconds(solver.objective_s)} (the solver's own formula)"),
        (
            "lower bound",
            f"{fmt.seconds(solver.lower_bound_s)}: the formula of no plan that the solver "
            f"may choose is below it, gap {100 * solver.gap:.2f}%",
        ),
        ("simulated", f"{fmt.seconds(plan.predicted.iteration_s)} (the plan's program)"),
        *(
            (("measured", f"{fmt.seconds(solver.measured_s)} in the trial that chose it"),)
            if solver.measured_s is not None
            else ()
        ),
        ("MFU", fmt.percent(plan.predicted.mfu)),
        ("communication", f"{fmt.percent(plan.predicted.communication_fraction)} not hidden"),
    ]
    facts += [
        (f"largest sync batch, {loss}", f"{samples:,} samples fit the memory")
        for loss, samples in solver.largest_sync_batch.items()
    ]
    notes = "".join(markup.text("li", text) for text in solver.notes)
    return (
        markup.table(("", ""), facts, label="How the plan was found", head=False)
        + (markup.element("ul", notes, class_="notes") if notes else "")
        + _other_solvers(plan)
        + _runners_up(plan)
    )


def _other_solvers(plan: Plan) -> str:
    """The best plan of each solver that was asked, where there are several."""
    best_s: dict[str, float] = {plan.solver.name: plan.predicted.iteration_s}
    for runner in plan.solver.runners_up:
        name = runner.label.partition(":")[0]
        best_s[name] = min(runner.iteration_s, best_s.get(name, runner.iteration_s))
    if len(best_s) == 1:
        return markup.note(
            "mmplan solve with --solver auto also looks at the plans of other solvers, and "
            "mmplan compare shows them side by side."
        )
    own_s = best_s[plan.solver.name]
    amounts = [
        Amount(
            name=name,
            value=seconds,
            words=f"{fmt.seconds(seconds)}, {seconds / own_s - 1:+.1%}" if own_s else "",
            marked=name == plan.solver.name,
        )
        for name, seconds in sorted(best_s.items(), key=lambda pair: pair[1])
    ]
    heading = markup.text("h3", "The best plan of every solver: seconds of a step")
    return heading + bars(amounts, label="Seconds of a step by solver")


def _runners_up(plan: Plan) -> str:
    runners = plan.solver.runners_up
    if not runners:
        return markup.note("No other plan was simulated.")
    best_s = plan.predicted.iteration_s
    trials = plan.solver.measured_s is not None
    rows = [
        (
            shorten(runner.label, _LABEL, placeholder=" …"),
            fmt.seconds(runner.objective_s),
            fmt.seconds(runner.iteration_s),
            *((fmt.measured(runner.measured_s),) if trials else ()),
            f"{runner.iteration_s / best_s - 1:+.1%}" if best_s else "–",
        )
        for runner in runners[:_MOST_RUNNERS_UP]
    ]
    measured = (">measured in a trial",) if trials else ()
    columns = ("runner-up", ">objective", ">simulated", *measured, ">slower, simulated")
    first, others = rows[:_FIRST_RUNNERS_UP], rows[_FIRST_RUNNERS_UP:]
    shown = markup.element(
        "div", markup.table(columns, first, label="Runners-up"), class_="first-wide"
    )
    if others:
        rest = markup.table(columns, others, label="More runners-up")
        summary = markup.text("summary", f"{len(others)} more")
        shown += markup.element("details", summary + rest, class_="first-wide")
    return markup.text("h3", "Runners-up") + shown


def memory_section(data: ReportData) -> str:
    """Most bytes that each rank is predicted to hold, against a device's memory."""
    plan = data.plan
    held = list(enumerate(plan.predicted.memory_bytes))
    if not held:
        return markup.note("The plan holds no prediction of memory.")
    count = len(held) if len(held) <= _MOST_BARS else _SHOWN_BARS
    fullest = sorted(sorted(held, key=lambda pair: -pair[1])[:count])
    capacity = plan.cluster.device.memory_bytes
    most = max(value for _, value in held)
    mean = sum(value for _, value in held) / len(held)
    caption = (
        f"The fullest rank is predicted to hold {fmt.size(most)}, {fmt.percent(most / capacity)} "
        "of a device's "
        f"{fmt.size(capacity)}, and {most / mean if mean else 1:.2f} times the mean of all ranks "
        f"(imbalance): weights, gradients, optimizer state, and the activations of the "
        "micro-batches in flight."
    )
    measured = data.run.memory_bytes if data.run else {}
    caption += _measured_memory(dict(held), measured, is_cpu=plan.cluster.device.is_cpu)
    picture = _memory_bars(fullest, measured, capacity=capacity, most=most)
    if count == len(held):
        return markup.figure(picture, label="Memory per rank", caption=markup.esc(caption))
    whole = memory_plot(
        [value for _, value in held], capacity, prefix="memory-all", xlabel="rank", width=8.0
    )
    caption += f" Below, the {count} fullest of {len(held):,} ranks."
    return markup.figure(
        whole, label="Memory of all ranks", caption=markup.esc(caption)
    ) + markup.figure(picture, label="Memory of the fullest ranks")


def _measured_memory(
    held: Mapping[int, float], measured: Mapping[int, float], *, is_cpu: bool
) -> str:
    """What the run's ranks held, in a sentence or three; nothing where none was measured."""
    both = sorted(set(held) & set(measured))
    if not both:
        return ""
    ratios = [held[rank] / measured[rank] for rank in both if measured[rank]]
    text = (
        f" The run's steps held {fmt.size(max(measured[rank] for rank in both))} on their fullest "
        "rank (short lines)"
    )
    if ratios:
        text += f"; predicted / measured is {min(ratios):.2f} to {max(ratios):.2f}"
    if is_cpu:
        text += (
            ". On a CPU this is the growth of resident memory, with what libraries and malloc "
            "keep for themselves"
        )
    return text + "."


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


def _memory_bars(
    held: Sequence[tuple[int, float]],
    measured: Mapping[int, float],
    *,
    capacity: float,
    most: float,
) -> str:
    width, left, height = 720.0, 70.0, 22
    most = max([most, *(measured.get(rank, 0.0) for rank, _ in held)])
    # A capacity far off the scale would make every bar a hair.
    on_scale = most >= 0.05 * capacity
    scale = (width - left - 90) / (max(capacity, most) if on_scale else most or 1.0)
    drawn: list[str] = []
    for i, (rank, value) in enumerate(held):
        y = 22 + i * height
        full = value > capacity
        drawn.append(
            markup.text("text", f"rank {rank}", x=0, y=y + 14)
            + markup.element(
                "rect",
                x=left,
                y=y + 2,
                width=f"{max(1.0, value * scale):.1f}",
                height=height - 6,
                class_="bar over" if full else "bar",
            )
            + markup.text(
                "text",
                fmt.size(value) + (" does not fit" if full else ""),
                x=f"{left + max(value, measured.get(rank, 0.0)) * scale + 6:.1f}",
                y=y + 14,
            )
        )
        if rank in measured:
            x = left + measured[rank] * scale
            drawn.append(markup.element("path", d=f"M{x:.1f} {y}v{height - 2}", class_="measured"))
    bottom = 22 + len(held) * height
    if on_scale:
        x = left + capacity * scale
        drawn.append(markup.element("path", d=f"M{x:.1f} 14V{bottom}", class_="capacity"))
        label = f"capacity {fmt.size(capacity)}"
        drawn.append(markup.text("text", label, x=f"{x - 4:.1f}", y=12, text_anchor="end"))
    else:
        label = (
            f"capacity {fmt.size(capacity)}: {capacity / (most or 1):,.0f} times the longest bar"
        )
        drawn.append(markup.text("text", label, x=left, y=12))
    return markup.svg(
        "".join(drawn),
        width=width,
        height=bottom + 4,
        label="Bytes per rank: " + ", ".join(f"{r}: {fmt.size(v)}" for r, v in held[:16]),
        class_="memory",
    )


def provenance_section(data: ReportData) -> str:
    """Versions, machine, and the files by their hashes."""
    rows = [("mmplan", _version("mmplan")), ("Python", platform.python_version())]
    rows += [(name, _version(name)) for name in ("torch", "numpy", "matplotlib")]
    run = data.run
    if run is not None:
        known = {"run started": "started_at", "cores of the run's machine": "cores"}
        rows += [(n, str(run.record[key])) for n, key in known.items() if key in run.record]
    if data.profile is not None:
        rows.append(("profile", f"{data.profile.name} ({data.profile.source})"))
        rows += [
            (f"profile: {name}", value)
            for name, value in islice(_flat(data.profile.provenance), 60)
        ]
    made = markup.table(("", ""), rows, label="Versions and machine", head=False)
    files = markup.table(
        ("file", "path", "SHA-256 written down", "now"),
        [(what, path, sha[:16], _state(sha, found)) for what, path, sha, found in data.hashes],
        label="Files",
    )
    return made + markup.text("h3", "Files") + files


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _flat(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested provenance as dotted names with short texts."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif values not in ([], "", None):
        shown = f"{values:.6g}" if isinstance(values, float) else str(values)
        yield prefix, shown if len(shown) <= 300 else shown[:299] + "…"


def _state(recorded: str, found: str | None) -> str:
    if found is None:
        return "not found"
    return "the same" if found == recorded else f"differs: {found[:16]}"
