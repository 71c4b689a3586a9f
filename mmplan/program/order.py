"""The order of each stage's forwards and backwards.

For replica d of a stage, ``forwards_before[m]`` is how many forwards come before backward
m. That list is the whole order: forwards up to it, backward m, and so on. It is built
from the losses upstream:

- a stage that ends in a cross-sample loss must finish the sync batch first: with K
  micro-batches in it, ``m + K``, which alternates strictly after K forwards;
- one that ends in a per-sample loss, or in none: ``m + 1`` (1F1B is batch-sync with K = 1);
- a stage before others must have sent what they need before the matching backward, and
  ``lead`` micro-batches more, so that they have work while it runs that backward.

With equal stages this is DESIGN's optimal order: stage p of P runs K + (P-1-p) forwards
first. ``gpipe`` waits for its whole round instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from mmplan.program.model import Stage
from mmplan.program.samples import RangeIndex, SampleRange
from mmplan.schema.plan import Schedule


def order_stage(
    stage: Stage,
    schedule: Schedule,
    sync_batches: Sequence[int],
    consumers: Sequence[tuple[Stage, Sequence[Sequence[int]]]],
) -> list[list[int]]:
    """``forwards_before[d][m]`` of one stage.

    Args:
        stage: the stage.
        schedule: its unit's schedule.
        sync_batches: sizes of the sync batches of the cross-sample losses it feeds.
        consumers: the stages that take its output, each with its own result.

    Returns:
        Non-decreasing lists, at least m + 1 at m, at most the number of micro-batches.
    """
    result: list[list[int]] = []
    for d, spans in enumerate(stage.microbatches):
        before = _terminal(spans, sync_batches, schedule)
        if schedule.kind == "gpipe":
            before = _whole_rounds(len(spans), stage.rounds[d])
        for consumer, consumer_before in consumers:
            needed = _needed_by(stage, d, consumer, consumer_before, schedule.lead)
            before = [max(pair) for pair in zip(before, needed, strict=True)]
        result.append(_settle(before, schedule.in_flight))
    return result


def _terminal(
    spans: Sequence[SampleRange], sync_batches: Sequence[int], schedule: Schedule
) -> list[int]:
    before = [m + 1 for m in range(len(spans))]
    starts = [start for start, _ in spans]
    for size in sync_batches:
        # Last micro-batch that reaches into the sync batch where micro-batch m ends.
        needed = [bisect_left(starts, -(-stop // size) * size) for _, stop in spans]
        warm_up = max(n - m for m, n in enumerate(needed)) + schedule.sync_lead
        before = [min(len(spans), max(b, m + warm_up)) for m, b in enumerate(before)]
    return before


def _whole_rounds(count: int, per_round: int) -> list[int]:
    return [(m // per_round + 1) * per_round for m in range(count)]


def _needed_by(
    stage: Stage, d: int, consumer: Stage, consumer_before: Sequence[Sequence[int]], lead: int
) -> list[int]:
    spans = stage.microbatches[d]
    own = RangeIndex([spans])
    # reach[d2][n]: own micro-batches that the first n of consumer replica d2 draw from.
    reach = [_reach(own, sizes) for sizes in consumer.microbatches]
    others = RangeIndex(consumer.microbatches)
    needed: list[int] = []
    for m, span in enumerate(spans):
        most = m + 1
        for _, d2, j in others.overlapping(span):
            before = consumer_before[d2][j]
            ahead = reach[d2][min(len(reach[d2]) - 1, before + lead)]
            most = max(most, ahead, reach[d2][before] + lead)
        needed.append(min(most, len(spans)))
    return needed


def _reach(own: RangeIndex, consumer_spans: Sequence[SampleRange]) -> list[int]:
    reach = [0]
    for span in consumer_spans:
        last = max((k + 1 for _, _, k in own.overlapping(span)), default=0)
        reach.append(max(reach[-1], last))
    return reach


def _settle(before: Sequence[int], in_flight: int | None) -> list[int]:
    """Non-decreasing, and within the memory cap."""
    settled: list[int] = []
    highest = 0
    for m, value in enumerate(before):
        highest = max(highest, value)
        settled.append(highest if in_flight is None else max(m + 1, min(highest, m + in_flight)))
    return settled
