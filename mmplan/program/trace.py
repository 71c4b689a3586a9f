"""Timelines as Chrome traces, for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mmplan.program.instructions import Collective, Compute, Instruction, Message, Op, Sync
from mmplan.program.model import LossReduction, Program
from mmplan.schema.base import write_text

_CATEGORIES = {
    Op.SEND_F: "SEND",
    Op.SEND_B: "SEND",
    Op.RECV_F: "RECV",
    Op.RECV_B: "RECV",
    Op.SYNC_START: "SYNC",
    Op.SYNC_WAIT: "SYNC",
    Op.REDUCE_START: "REDUCE",
}


class TimedInstruction(NamedTuple):
    """When a rank ran the instruction at ``position`` of its row; seconds of the step."""

    rank: int
    position: int
    start_s: float
    end_s: float


def trace_events(
    program: Program,
    events: Iterable[TimedInstruction],
    *,
    process_name: str,
    process: int = 0,
    offset_s: float = 0.0,
) -> list[dict[str, Any]]:
    """Chrome trace events: one row per rank, times in microseconds.

    A receive that is still open when a later instruction starts is cut there, because the
    slices of a row must not overlap.

    Args:
        program: whose instructions the events are.
        events: simulated or measured times, any order.
        process_name: heading of these rows, "predicted" or "measured".
        process: its number; headings of one file need different ones.
        offset_s: added to every time.
    """
    result: list[dict[str, Any]] = [_name(process, "process_name", process_name)]
    rows: defaultdict[int, list[TimedInstruction]] = defaultdict(list)
    for event in events:
        rows[event.rank].append(event)
    for rank in sorted(rows):
        result.append(_name(process, "thread_name", f"rank {rank}", rank))
        row = _without_overlap(program, sorted(rows[rank], key=lambda e: e.position))
        result.extend(_slice(program, event, process, offset_s) for event in row)
    return result


def write_trace(path: str | Path, *groups: Iterable[dict[str, Any]]) -> None:
    """Write groups of events to one file, whole or not at all.

    Raises:
        UnfitEnvironmentError: the file cannot be written.
    """
    events = [event for group in groups for event in group]
    write_text(Path(path), json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _name(process: int, kind: str, name: str, thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}


def _without_overlap(program: Program, row: list[TimedInstruction]) -> list[TimedInstruction]:
    """Receives end at the latest where the next instruction other than a message starts."""
    result: list[TimedInstruction] = []
    next_start_s = float("inf")
    for event in reversed(row):
        item = program.instructions[event.rank][event.position]
        if isinstance(item, Message):
            event = event._replace(end_s=max(event.start_s, min(event.end_s, next_start_s)))
        else:
            next_start_s = event.start_s
        result.append(event)
    return result[::-1]


def _slice(
    program: Program, event: TimedInstruction, process: int, offset_s: float
) -> dict[str, Any]:
    item = program.instructions[event.rank][event.position]
    return {
        "ph": "X",
        "pid": process,
        "tid": event.rank,
        "name": str(item),
        "cat": _CATEGORIES.get(item.op, str(item.op)),
        "ts": round((event.start_s + offset_s) * 1e6, 3),
        "dur": round((event.end_s - event.start_s) * 1e6, 3),
        "args": _arguments(program, event.rank, item),
    }


def _arguments(program: Program, rank: int, item: Instruction) -> dict[str, Any]:
    if isinstance(item, Sync):
        loss = program.cross_sample(item.loss)
        return {"loss": loss.name, "samples": list(loss.samples(item.batch))}
    if isinstance(item, Collective):
        if item.op is Op.COUNT:
            return {"loss": program.losses[item.index].name}
        reduction = program.reductions[item.index]
        blocks = (0, 0) if isinstance(reduction, LossReduction) else reduction.blocks
        return {"owner": reduction.owner, "blocks": list(blocks)}
    if isinstance(item, Compute | Message):
        stage = program.stages[item.stage]
        common = {"unit": stage.unit, "blocks": list(stage.blocks), "microbatch": item.mb}
        if isinstance(item, Message):
            return {**common, "peer": item.peer, "samples": [item.start, item.stop]}
        return {**common, "samples": list(stage.microbatches[stage.place(rank)[0]][item.mb])}
    return {}
