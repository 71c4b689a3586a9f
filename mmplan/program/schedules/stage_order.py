"""The order of each stage's forwards and backwards.

For replica d of a stage, ``forwards_before[m]`` is how many forwards come before backward
m. That list is the whole order: forwards up to it, backward m, and so on. It is built
from the losses upstream:

- a stage that ends in a cross-sample loss must finish the sync batch first: with K
  micro-batches in it, ``m + K``, which alternates strictly after K forwards;
- one that ends in a per-sample loss, or in none: ``m + 1`` (1F1B is batch-sync with K = 1);
- a stage before others must have sent what they need before the matching backward, and
  ``lead`` micro-batches more, so that they have work while it runs that backward.

With equal stages this order is optimal: stage p of P runs K + (P-1-p) forwards
first. ``gpipe`` waits for its whole round instead.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from mmplan.program.model import Stage
from mmplan.program.samples import RangeIndex, SampleRange
from mmplan.program.schedules.registry import POLICIES
from mmplan.schema.plan import Schedule


def order_stage(
    stage: Stage,
    schedule: Schedule,
    sync_batches: Sequence[int],
    consumers: Sequence[tuple[Stage, Sequence[Sequence[int]]]],
    frontiers: Sequence[Sequence[Sequence[int]]] = (),
) -> list[list[int]]:
    """``forwards_before[d][m]`` of one stage.

    Args:
        stage: the stage.
        schedule: its unit's schedule.
        sync_batches: sizes of the sync batches of the cross-sample losses it feeds.
        consumers: the stages that take its output, each with its own result.
        frontiers: :func:`sample_frontier` of each consumer.

    Returns:
        Non-decreasing lists, at least m + 1 at m, at most the number of micro-batches.
    """
    result: list[list[int]] = []
    policy = POLICIES[schedule.kind]
    lead = schedule.lead if policy.runs_ahead else 0
    # Of those that have other micro-batches.
    indices = [
        None if stage.microbatches == consumer.microbatches else RangeIndex(consumer.microbatches)
        for consumer, _ in consumers
    ]
    reaching = [
        forwards_that_reach(stage, consumer, frontier)
        for (consumer, _), frontier in zip(consumers, frontiers, strict=False)
    ]
    for d, spans in enumerate(stage.microbatches):
        before = policy.forwards_before(spans, stage.rounds[d], sync_batches, schedule.sync_lead)
        for (consumer, consumer_before), others in zip(consumers, indices, strict=True):
            if others is None:
                own = enumerate(consumer_before[d])
                needed = [min(max(m + 1, first + lead), len(spans)) for m, first in own]
            else:
                needed = _needed_by(spans, consumer, others, consumer_before, lead)
            before = list(map(max, before, needed))
        for needed in reaching:
            before = list(map(max, before, needed[d]))
        result.append(_settle(before, schedule.in_flight))
    return result


def forwards_that_reach(
    stage: Stage, consumer: Stage, frontier: Sequence[Sequence[int]]
) -> list[list[int]]:
    """``[d][m]``: forwards that send all that the consumer's frontier at backward m is about."""
    result: list[list[int]] = []
    alike = stage.microbatches == consumer.microbatches
    others = None if alike else RangeIndex(consumer.microbatches)
    for d, spans in enumerate(stage.microbatches):
        starts = [start for start, _ in spans]
        reached = frontier[d] if others is None else _frontier_of(spans, others, frontier)
        result.append([bisect_left(starts, samples) for samples in reached])
    return result


def sample_frontier(
    stage: Stage,
    forwards_before: Sequence[Sequence[int]],
    sync_batches: Sequence[int],
    consumers: Sequence[tuple[Stage, Sequence[Sequence[int]]]],
) -> list[list[int]]:
    """``[d][m]``: every sample before this one enters the stages ahead before backward m.

    A producer's backward waits for backward m and must have sent those samples first, also
    to replicas whose gradient it does not take: they meet in a later stage or in a sync.

    Args:
        stage: the stage.
        forwards_before: :func:`order_stage` of it.
        sync_batches: sizes of the sync batches of the cross-sample losses it feeds.
        consumers: the stages that take its output, each with its own frontier.
    """
    result = [
        [spans[n - 1][1] for n in before]
        for spans, before in zip(stage.microbatches, forwards_before, strict=True)
    ]
    for size in sync_batches:
        reached = _sync_frontier(stage, result, size)
        for spans, row in zip(stage.microbatches, result, strict=True):
            for m, (_, stop) in enumerate(spans):
                row[m] = max(row[m], reached[(stop - 1) // size])
    for consumer, frontier in consumers:
        alike = stage.microbatches == consumer.microbatches
        others = None if alike else RangeIndex(consumer.microbatches)
        for d, (spans, row) in enumerate(zip(stage.microbatches, result, strict=True)):
            reached = frontier[d] if others is None else _frontier_of(spans, others, frontier)
            row[:] = map(max, row, reached)
    # A sample leaves this stage with its whole micro-batch, on whichever replica that is.
    pieces = sorted(span for spans in stage.microbatches for span in spans)
    starts = [start for start, _ in pieces]
    return [[pieces[bisect_left(starts, n) - 1][1] for n in row] for row in result]


def _sync_frontier(stage: Stage, own: Sequence[Sequence[int]], size: int) -> list[int]:
    """Per sync batch, the samples forwarded on any replica before the first of its backwards."""
    batch = max(spans[-1][1] for spans in stage.microbatches)
    # A replica that holds nothing of a sync batch has forwarded what comes before it.
    reached = [(g + 1) * size for g in range(-(-batch // size))]
    for spans, row in zip(stage.microbatches, own, strict=True):
        for m, (start, stop) in enumerate(spans):
            for g in range(start // size, -(-stop // size)):
                # The replica's first micro-batch in g is the one that waits for the sync.
                if m == 0 or spans[m - 1][1] <= g * size:
                    reached[g] = max(reached[g], row[m])
    return reached


def _frontier_of(
    spans: Sequence[SampleRange], others: RangeIndex, frontier: Sequence[Sequence[int]]
) -> list[int]:
    """Per micro-batch, the furthest frontier of the consumer's micro-batches that share it."""
    return [
        max((frontier[d2][j] for _, d2, j in others.overlapping(span)), default=0) for span in spans
    ]


def _needed_by(
    spans: Sequence[SampleRange],
    consumer: Stage,
    others: RangeIndex,
    consumer_before: Sequence[Sequence[int]],
    lead: int,
) -> list[int]:
    # reach[d2][n]: own micro-batches that the first n of consumer replica d2 draw from.
    reach: dict[int, list[int]] = {}
    needed: list[int] = []
    for m, span in enumerate(spans):
        most = m + 1
        for _, d2, j in others.overlapping(span):
            if d2 not in reach:
                reach[d2] = _reach(spans, consumer.microbatches[d2])
            before = consumer_before[d2][j]
            ahead = reach[d2][min(len(reach[d2]) - 1, before + lead)]
            most = max(most, ahead, reach[d2][before] + lead)
        needed.append(min(most, len(spans)))
    return needed


def _reach(spans: Sequence[SampleRange], consumer_spans: Sequence[SampleRange]) -> list[int]:
    starts = [start for start, _ in spans]
    reach = [0]
    for first, end in consumer_spans:
        # The last micro-batch before its end: where that ends too early, all do.
        last = bisect_left(starts, end)
        draws = last and spans[last - 1][1] > first
        reach.append(max(reach[-1], last) if draws else reach[-1])
    return reach


def _settle(before: Sequence[int], in_flight: int | None) -> list[int]:
    """Non-decreasing, and within the memory cap."""
    settled: list[int] = []
    highest = 0
    for m, value in enumerate(before):
        highest = max(highest, value)
        settled.append(highest if in_flight is None else max(m + 1, min(highest, m + in_flight)))
    return settled
