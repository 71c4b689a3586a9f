"""The predicted timeline above the measured one: a static picture, and data to zoom in it.

Rows are Chrome trace events of a program; a page has the longest instructions of some ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from mmplan.reporting import numbers as fmt
from mmplan.reporting.html import markup
from mmplan.reporting.source import ReportData, TraceEvent
from mmplan.schema.plan import Plan

# Kinds in drawing order; keys are the letters that bars carry.
KINDS: dict[str, str] = {
    "F": "forward",
    "B": "backward",
    "W": "weight gradients of a split backward",
    "S": "batch-sync and loss",
    "R": "gradient reduction",
    "M": "message: sending, or waiting for one",
    "O": "other: counts, update",
}
_CATEGORY = {
    "F": "F",
    "B": "B",
    "I": "B",
    "W": "W",
    "SYNC": "S",
    "REDUCE": "R",
    "SEND": "M",
    "RECV": "M",
}
# Most instructions and most ranks of a page's timelines: they bound its size; chosen by hand.
MOST_BARS = 20_000
MOST_ROWS = 64
# Ranks of a page where there are more instructions than that.
_FEW_ROWS = 16
# Width of the picture in its user units; the script draws with the same ones.
WIDTH = 1120
# Space for the labels of rows.
LEFT = 164
_RIGHT = 12
# Space for the axis.
_TOP = 22
# Height of a timeline's heading.
_HEADING = 24
# Ticks of the script's clock from the left to the right end of the picture.
_TICKS = 2_000_000
# (top, height) of a kind's bar as shares of its row: kinds differ in shape, not in colour alone.
SHAPES: dict[str, tuple[float, float]] = {
    "F": (0.08, 0.84),
    "B": (0.26, 0.66),
    "W": (0.5, 0.42),
    "S": (0.08, 0.84),
    "R": (0.26, 0.66),
    "M": (0.46, 0.12),
    "O": (0.46, 0.12),
}
# Kinds whose bars have a label.
_LABELLED = "FBWSR"
# Bars narrower than it have no room for a label.
_LABEL_WIDTH = 17.0
# Space between two bars without idle time between them.
_GAP = 0.8
# Characters of a rank's units, beside its row.
LABEL_LENGTH = 16


class Bar(NamedTuple):
    """One instruction; seconds from the step's start."""

    start_s: float
    end_s: float
    kind: str
    name: str
    what: str
    microbatch: int | None
    samples: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rank's bars in one of the two timelines, in order of their start."""

    rank: int
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """One step of the ranks shown.

    Attributes:
        title: heading of the rows.
        name: short title, for single bars.
        labels: rank to its units.
        hidden: instructions of these rows that are not drawn.
        num_ranks: ranks that had instructions, shown or not.
    """

    title: str
    rows: tuple[Row, ...]
    hidden: int
    num_ranks: int
    name: str = ""
    labels: Mapping[int, str] = field(default_factory=dict[int, str])

    @property
    def end_s(self) -> float:
        """End of the last bar."""
        return max((row.bars[-1].end_s for row in self.rows if row.bars), default=0.0)


def timeline(
    title: str,
    events: Sequence[TraceEvent],
    *,
    ranks: Sequence[int],
    most_bars: int = MOST_BARS,
    name: str = "",
    labels: Mapping[int, str] | None = None,
) -> StepTimeline:
    """Rows of the given ranks, without their shortest bars where there are too many.

    Args:
        title: of the :class:`StepTimeline`; also its ``name``, where none is given.
        events: complete slices, microseconds.
        ranks: rows in this order.
        most_bars: over all rows.
    """
    by_rank: defaultdict[int, list[Bar]] = defaultdict(list)
    for event in events:
        by_rank[event["tid"]].append(_bar(event))
    shown = [bar for rank in ranks for bar in by_rank.get(rank, [])]
    least_s = _least_length_s(shown, most_bars)
    rows = tuple(
        Row(
            rank=rank,
            bars=tuple(
                sorted(
                    (b for b in by_rank.get(rank, []) if b.end_s - b.start_s > least_s),
                    key=attrgetter("start_s", "end_s", "kind", "name", "what"),
                )
            ),
        )
        for rank in ranks
    )
    return StepTimeline(
        title=title,
        rows=rows,
        hidden=sum(b.end_s > b.start_s for b in shown) - sum(len(row.bars) for row in rows),
        num_ranks=len(by_rank),
        name=name or title,
        labels=labels or {},
    )


def chosen_ranks(ranks: Sequence[int], first: Sequence[int], *, most: int) -> tuple[int, ...]:
    """At most ``most`` ranks in ascending order; those of ``first`` are preferred."""
    known = set(ranks)
    order = dict.fromkeys([r for r in first if r in known] + sorted(known))
    return tuple(sorted(list(order)[:most]))


def _seconds_by_kind(row: Row) -> dict[str, float]:
    totals = dict.fromkeys(KINDS, 0.0)
    for bar in row.bars:
        totals[bar.kind] += bar.end_s - bar.start_s
    return totals


def _least_length_s(bars: Sequence[Bar], most_bars: int) -> float:
    """Length that at most ``most_bars`` bars exceed; 0 where no bar is left out."""
    lengths = sorted((bar.end_s - bar.start_s for bar in bars), reverse=True)
    return max(0.0, lengths[most_bars]) if len(lengths) > most_bars else 0.0


def _bar(event: TraceEvent) -> Bar:
    arguments: dict[str, Any] = event.get("args") or {}
    start_s = float(event["ts"]) * 1e-6
    samples, microbatch = arguments.get("samples"), arguments.get("microbatch")
    return Bar(
        start_s=start_s,
        end_s=start_s + max(0.0, float(event["dur"])) * 1e-6,
        kind=_CATEGORY.get(str(event.get("cat")), "O"),
        name=str(event.get("name", "")),
        what=_what(arguments),
        microbatch=microbatch if isinstance(microbatch, int) else None,
        samples=(int(samples[0]), int(samples[1])) if samples else None,
    )


def _what(arguments: dict[str, Any]) -> str:
    if "unit" in arguments:
        return str(arguments["unit"]) + _blocks(arguments)
    if "loss" in arguments:
        return f"loss {arguments['loss']}"
    if "owner" in arguments:
        return f"gradients of {arguments['owner']}" + _blocks(arguments)
    return ""


def _blocks(arguments: dict[str, Any]) -> str:
    blocks = arguments.get("blocks")
    return f", blocks {blocks[0]}-{blocks[1]}" if blocks and blocks[1] > blocks[0] else ""


def timeline_section(data: ReportData) -> str:
    """Both timelines on one time axis, a row per rank."""
    lines = _timelines(data)
    notes = "".join(map(markup.note, data.timeline_notes))
    median_s = data.run.iteration_s if data.run else None
    if median_s and data.measured:
        notes += markup.note(
            f"The {data.time_source} step shown took {fmt.seconds(lines[-1].end_s)}; "
            f"the median of the run is {fmt.seconds(median_s)}."
        )
    if data.run is None:
        notes += markup.note("Measured rows appear in the report of a run's folder.")
    shown = [line for line in lines if line.rows and line.end_s > 0]
    if not shown:
        return notes or markup.note("There is no timeline to show.")
    return (
        timeline_legend()
        + notes
        + timeline_picture(shown, label="Timelines, predicted above measured")
        + thinned_notes(shown)
        + _totals(shown, data.plan)
    )


def _timelines(data: ReportData) -> list[StepTimeline]:
    pairs = (
        ("predicted", f"Predicted from {data.source_label}", data.predicted),
        (data.time_source, f"{data.time_source.capitalize()}, last step", data.measured),
    )
    ranks = sorted({event["tid"] for _, _, events in pairs for event in events})
    num_events = sum(len(events) for *_, events in pairs)
    # A complete row says more than many rows without their short bars.
    most = MOST_ROWS if num_events <= MOST_BARS else _FEW_ROWS
    chosen = chosen_ranks(ranks, representatives(data.plan), most=most)
    share = MOST_BARS // max(1, sum(bool(events) for *_, events in pairs))
    return [
        timeline(
            title,
            events,
            ranks=chosen,
            most_bars=share,
            name=name.capitalize(),
            labels=rank_labels(data.plan, LABEL_LENGTH),
        )
        for name, title, events in pairs
        if events
    ]


def representatives(plan: Plan) -> list[int]:
    """A rank of each stage's replicas: every unit's first replica, then every unit's second, ..."""
    ranks = (
        group[0]
        for d in range(max(unit.dp for unit in plan.units))
        for unit in plan.units
        if d < unit.dp
        for group in unit.ranks[d]
    )
    return list(dict.fromkeys(ranks))


def timeline_legend() -> str:
    """Keys of a timeline's bars."""
    return markup.legend(
        (markup.text("span", kind if kind in _LABELLED else "", class_=f"key k{kind}"), meaning)
        for kind, meaning in KINDS.items()
    )


def timeline_picture(lines: Sequence[StepTimeline], *, label: str) -> str:
    """Timelines with rows and a length on one time axis, with the data for the script that zooms.

    A page has one such picture.
    """
    picture, data = timeline_figure(lines, label=label)
    return markup.element("div", _CONTROLS + picture, id="timeline") + markup.json_script(
        data, id_="timeline-data"
    )


def timeline_figure(lines: Sequence[StepTimeline], *, label: str) -> tuple[str, dict[str, object]]:
    """Timelines with rows and a length on one time axis, and the data of a script that zooms."""
    end_s = max(line.end_s for line in lines)
    height = 26 if sum(len(line.rows) for line in lines) <= 24 else 17
    drawn: list[str] = []
    rows: list[dict[str, object]] = []
    strings: dict[str, int] = {}
    y = _TOP
    for line in lines:
        heading = _heading(line, end_s, y, height)
        y += _HEADING
        for row in line.rows:
            units = line.labels.get(row.rank, "")
            drawn.append(_row(row, units, y, height, end_s, banded=len(rows) % 2 == 0))
            bars = [_packed(bar, end_s, strings) for bar in row.bars]
            rows.append({"y": y, "label": f"{line.name}, rank {row.rank}", "bars": bars})
            y += height
        # After the rows: the line that ends the step lies on top of them.
        drawn.append(heading)
        y += 6
    picture = markup.svg(
        markup.element("g", _axis(end_s, y), class_="axis") + "".join(drawn),
        width=WIDTH,
        height=y + 6,
        label=f"{label}, one row per rank",
        class_="timeline",
    )
    sizes = {"end": end_s, "bottom": y, "row": height}
    return markup.figure(picture, label=label), (
        _SCRIPT_CONSTANTS | sizes | {"strings": list(strings), "rows": rows}
    )


# The script draws with the same units and shapes.
_SCRIPT_CONSTANTS: dict[str, object] = {
    "ticks": _TICKS,
    "left": LEFT,
    "width": WIDTH - LEFT - _RIGHT,
    "top": _TOP,
    "shapes": SHAPES,
    "labelled": _LABELLED,
    "labelWidth": _LABEL_WIDTH,
    "gap": _GAP,
    "kinds": KINDS,
}


_BUTTONS = (
    ("in", "+", "Zoom in"),
    ("out", "−", "Zoom out"),
    ("left", "←", "Move to earlier"),
    ("right", "→", "Move to later"),
    ("all", "Whole step", "Show the whole step"),
    ("previous", "‹ instruction", "Previous instruction of the row"),
    ("next", "instruction ›", "Next instruction of the row"),
    ("row", "next row", "Next row"),
)
# Shown by the script: without it the controls would do nothing.
_CONTROLS = markup.element(
    "div",
    "".join(
        markup.text("button", sign, type="button", data_do=action, aria_label=label, title=label)
        for action, sign, label in _BUTTONS
    )
    + markup.text(
        "span",
        "Drag over a range to zoom into it; Ctrl and the wheel zoom too. "
        "In the picture: + − 0, arrow keys step through instructions and rows.",
        class_="hint",
    )
    + markup.element("output", "", aria_live="polite"),
    class_="controls",
    hidden="hidden",
)


def _heading(line: StepTimeline, end_s: float, y: float, height: float) -> str:
    x = LEFT + (WIDTH - LEFT - _RIGHT) * line.end_s / end_s
    title = markup.text(
        "text", f"{line.title}: {fmt.seconds(line.end_s)}", x=0, y=y + 16, class_="heading"
    )
    # Through all rows, where the last instruction of any of them ends.
    down = f"{y + _HEADING}v{len(line.rows) * height}"
    return title + markup.element(
        "path",
        d=f"M{x:.1f} {down}",
        class_="flag",
        data_end=f"{_TICKS * line.end_s / end_s:.0f}",
        data_down=down,
    )


def rank_labels(plan: Plan, most: int | None = None) -> dict[int, str]:
    """Rank to its units with replica and stage; ``most`` letters of the first unit."""
    labels: defaultdict[int, list[str]] = defaultdict(list)
    for unit in plan.units:
        for d, p, group in unit.grid.groups():
            position = f" r{d + 1}" if unit.dp > 1 else ""
            position += f" s{p + 1}" if unit.pp > 1 else ""
            name = unit.name
            if most is not None:
                name = fmt.shortened(name, most - len(position))
            for rank in group:
                labels[rank].append(name + position)
    if most is None:
        return {rank: ", ".join(names) for rank, names in labels.items()}
    return {
        rank: names[0] + (f" +{len(names) - 1}" if len(names) > 1 else "")
        for rank, names in labels.items()
    }


def _row(row: Row, label: str, y: float, height: float, end_s: float, *, banded: bool) -> str:
    by_kind: defaultdict[str, list[str]] = defaultdict(list)
    names: list[str] = []
    scale = (WIDTH - LEFT - _RIGHT) / end_s
    for bar in row.bars:
        x, width = LEFT + bar.start_s * scale, (bar.end_s - bar.start_s) * scale
        top, share = SHAPES[bar.kind]
        drawn = max(0.3, width - _GAP if width > 4 * _GAP else width)
        by_kind[bar.kind].append(
            f"M{x:.1f} {y + top * height:.1f}h{drawn:.1f}v{share * height:.1f}h-{drawn:.1f}z"
        )
        if width >= _LABEL_WIDTH and bar.kind in _LABELLED:
            middle = y + (top + share / 2) * height + 3.5
            short = bar.kind if bar.microbatch is None else f"{bar.kind}{bar.microbatch}"
            names.append(f'<text x="{x + width / 2:.1f}" y="{middle:.1f}">{short}</text>')
    band = markup.element(
        "rect", x=0, y=y, width=WIDTH, height=height, class_="band" if banded else "no-band"
    )
    title = f"rank {row.rank}"
    units = markup.text("tspan", f" {fmt.shortened(label, 23 - len(title))}", class_="dim")
    name = markup.element("text", title + units, x=2, y=y + height / 2 + 4)
    paths = "".join(
        f'<path class="k{kind}" d="{"".join(by_kind.get(kind, []))}"/>' for kind in KINDS
    )
    bars = f'<g class="bars">{paths}<g class="names">{"".join(names)}</g></g>'
    return markup.element("g", band + bars + name, class_="row")


def _packed(bar: Bar, end_s: float, strings: dict[str, int]) -> list[object]:
    """A bar for the script: start, length (ticks), kind, name, what, micro-batch, samples.

    Names are places in ``strings``, to which new ones are added.
    """
    scale = _TICKS / end_s
    packed: list[object] = [
        round(bar.start_s * scale),
        max(1, round((bar.end_s - bar.start_s) * scale)),
        bar.kind,
        strings.setdefault(bar.name, len(strings)),
        strings.setdefault(bar.what, len(strings)),
        -1 if bar.microbatch is None else bar.microbatch,
    ]
    return packed + list(bar.samples or ())


def _axis(end_s: float, bottom: float) -> str:
    scale = (WIDTH - LEFT - _RIGHT) / end_s
    marks: list[str] = []
    for time_s in _round_times(end_s):
        x = f"{LEFT + time_s * scale:.1f}"
        name = fmt.seconds(time_s) if time_s else "0"
        marks.append(markup.element("path", d=f"M{x} {_TOP - 4}V{bottom:g}"))
        marks.append(markup.text("text", name, x=x, y=_TOP - 9))
    return "".join(marks)


def _round_times(end_s: float, parts: int = 8) -> Iterator[float]:
    """Multiples of 1, 2 or 5 times a power of ten that cut the step into at most ``parts``."""
    power = 10.0 ** math.floor(math.log10(end_s / parts))
    step = next(power * k for k in (1, 2, 5, 10) if power * k * parts >= end_s)
    yield from (step * i for i in range(int(end_s / step * (1 + 1e-12)) + 1))


def thinned_notes(lines: Sequence[StepTimeline]) -> str:
    """What the rows do not show."""
    notes: list[str] = []
    shown, ranks = len(lines[0].rows), max(line.num_ranks for line in lines)
    if shown < ranks:
        notes.append(f"{shown} of {ranks:,} ranks are drawn: of every unit the first replicas.")
    notes += [
        f"{line.name}: the {line.hidden:,} shortest instructions "
        "of these rows are left out; where they ran the row looks empty."
        for line in lines
        if line.hidden
    ]
    return "".join(markup.note(text) for text in notes)


def _totals(lines: Sequence[StepTimeline], plan: Plan) -> str:
    """Where the time of every rank goes, as a table."""
    kinds = [
        kind for kind in KINDS if any(_seconds_by_kind(r)[kind] for x in lines for r in x.rows)
    ]
    rows: list[list[object]] = []
    labels = rank_labels(plan)
    for index, first in enumerate(lines[0].rows):
        for line in lines:
            row = line.rows[index]
            spent = _seconds_by_kind(row)
            idle_s = max(0.0, line.end_s - sum(spent.values()))
            cells = [fmt.seconds(spent[kind]) for kind in kinds]
            name = line.name.lower()
            where = f"rank {first.rank} ({labels.get(first.rank, 'idle')})"
            rows.append([where, name, *cells, fmt.seconds(idle_s)])
    columns = ["rank", "timeline", *(f">{KINDS[kind].partition(':')[0]}" for kind in kinds)]
    grid = markup.table([*columns, ">nothing"], rows, label="Seconds of each rank by kind")
    return markup.details("Where each rank's time goes, as a table", grid)
