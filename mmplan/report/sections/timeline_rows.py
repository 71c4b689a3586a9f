"""Timeline rows: Chrome trace events of a program, thinned to what a page can carry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mmplan.report.source import Event

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
MOST_BARS = 20_000
MOST_ROWS = 64


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
        name: its first word or two, for single bars.
        labels: rank to what it runs.
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
    events: Sequence[Event],
    *,
    ranks: Sequence[int],
    most_bars: int = MOST_BARS,
    name: str = "",
    labels: Mapping[int, str] | None = None,
) -> StepTimeline:
    """Rows of the given ranks; bars too short for any picture go first.

    Args:
        title: heading of the rows.
        events: complete slices, microseconds.
        ranks: which ones to show, in this order.
        most_bars: over all rows.
        name: for single bars.
        labels: rank to what it runs.
    """
    by_rank: defaultdict[int, list[Bar]] = defaultdict(list)
    for event in events:
        by_rank[event["tid"]].append(_bar(event))
    shown = [bar for rank in ranks for bar in by_rank.get(rank, [])]
    least_s = _least_length_s(shown, most_bars)
    rows = tuple(
        Row(
            rank=rank,
            bars=tuple(sorted(b for b in by_rank.get(rank, []) if b.end_s - b.start_s > least_s)),
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
    """At most ``most`` ranks in ascending order; those named ``first`` are kept before others."""
    known = set(ranks)
    order = dict.fromkeys([r for r in first if r in known] + sorted(known))
    return tuple(sorted(list(order)[:most]))


def seconds_by_kind(row: Row) -> dict[str, float]:
    """Kind to the seconds of a rank's step that go into it."""
    totals = dict.fromkeys(KINDS, 0.0)
    for bar in row.bars:
        totals[bar.kind] += bar.end_s - bar.start_s
    return totals


def _least_length_s(bars: Sequence[Bar], most_bars: int) -> float:
    """Length that at most ``most_bars`` of them exceed; 0 when all may stay."""
    lengths = sorted((bar.end_s - bar.start_s for bar in bars), reverse=True)
    return max(0.0, lengths[most_bars]) if len(lengths) > most_bars else 0.0


def _bar(event: Event) -> Bar:
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
