"""All stages' orders of a plan, consumers before producers."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from mmplan.program.instructions import Op, ReplicaCompute
from mmplan.program.model import Graph, Stage
from mmplan.program.schedules.policy import ChunkOrders, Interleaving
from mmplan.program.schedules.registry import POLICIES
from mmplan.program.schedules.stage_order import forwards_that_reach, order_stage, sample_frontier
from mmplan.program.schedules.waves import turns, wave_precedences
from mmplan.schema.plan import Plan, Unit


@dataclass(slots=True)
class Orders:
    """What comes before what on every stage and rank.

    Attributes:
        forwards_before: per stage ``[d][m]``,
            :func:`mmplan.program.schedules.stage_order.order_stage`.
        sequences: computes that follow each other as listed: one list for each replica of a
            stage, or of all chunks that a rank of an interleaved unit runs.
        precedences: pairs of computes of different units, the first before the second.
        turns: per rank and round, the computes before and after the round's syncs.
        following: task and rank to the computes that begin the task that comes next there.
    """

    forwards_before: list[list[list[int]]]
    sequences: list[list[ReplicaCompute]]
    precedences: list[tuple[ReplicaCompute, ReplicaCompute]]
    turns: dict[int, list[tuple[ReplicaCompute, ReplicaCompute | None]]]
    following: dict[tuple[str, int], list[ReplicaCompute]]


def order_stages(plan: Plan, graph: Graph) -> Orders:
    """The orders of every stage of a plan."""
    return _Orderer(plan, graph).run()


class _Orderer:
    def __init__(self, plan: Plan, graph: Graph) -> None:
        self._plan = plan
        self._graph = graph
        self._before: list[list[list[int]]] = [[] for _ in graph.stages]
        self._frontiers: list[list[list[int]]] = [[] for _ in graph.stages]
        self._sequences: list[list[ReplicaCompute]] = []
        self._consumers: list[list[int]] = [[] for _ in graph.stages]
        for edge in graph.edges:
            self._consumers[edge.producer].append(edge.consumer)

    def run(self) -> Orders:
        stages = list(self._graph.stages)
        while stages:
            last = stages[-1]
            unit = self._plan.unit(last.unit)
            chunks = [stage for stage in stages if stage.unit == unit.name]
            merged = POLICIES[unit.schedule.kind].chunk_orders
            if merged is not None and unit.vpp > 1 and _are_together(chunks, len(stages)):
                self._interleave(unit, chunks, merged)
                del stages[-len(chunks) :]
            else:
                self._order(stages.pop(), unit)
        waves = self._plan, self._graph.stages
        return Orders(
            self._before,
            self._sequences,
            wave_precedences(*waves),
            turns(*waves),
            _following(self._plan.in_turn, self._graph.stages, self._sequences),
        )

    def _order(self, stage: Stage, unit: Unit) -> None:
        before = self._own_order(stage, unit)
        self._settle(stage, before)
        for d, row in enumerate(before):
            self._sequences.append(list(_sequence(stage, d, row)))

    def _own_order(self, stage: Stage, unit: Unit) -> list[list[int]]:
        after = self._consumers[stage.index]
        return order_stage(
            stage,
            unit.schedule,
            self._sync_batches(stage),
            [(self._graph.stages[i], self._before[i]) for i in after],
            [self._frontiers[i] for i in after],
        )

    def _settle(self, stage: Stage, before: list[list[int]]) -> None:
        after = self._consumers[stage.index]
        self._before[stage.index] = before
        self._frontiers[stage.index] = sample_frontier(
            stage,
            before,
            self._sync_batches(stage),
            [(self._graph.stages[i], self._frontiers[i]) for i in after],
        )

    def _sync_batches(self, stage: Stage) -> list[int]:
        return [self._graph.cross_sample(index).sync_batch for index in stage.syncs]

    def _interleave(self, unit: Unit, chunks: Sequence[Stage], merged: ChunkOrders) -> None:
        needs = self._own_order(chunks[-1], unit)
        extra = 0

        def orders_with(extra: int) -> list[Interleaving]:
            return [
                merged.interleave(len(row), unit.pp, unit.vpp, row, unit.schedule, extra)
                for row in needs
            ]

        orders = orders_with(extra)
        # Replicas that meet again further on may need more of each other than each by itself.
        # With all forwards first nothing is left to wait for.
        while not self._settle_chunks(unit, chunks, orders) and extra < len(orders[0].forwards):
            extra += unit.pp
            orders = orders_with(extra)
        ends = [merged.group_ends(len(spans), unit.pp) for spans in chunks[0].microbatches]
        self._take_in_groups(ends, chunks[0], self._frontiers[chunks[-1].index])
        positions = _positions(unit)
        for d, order in enumerate(orders):
            for position in range(unit.pp):
                own = [chunks[c] for c, p in enumerate(positions) if p == position]
                self._sequences.append(
                    [
                        (op, own[row].index, d, mb)
                        for op, row, mb in order.sequence(position)
                        if op is Op.FORWARD or own[row].has_backward
                    ]
                )

    def _settle_chunks(
        self, unit: Unit, chunks: Sequence[Stage], orders: Sequence[Interleaving]
    ) -> bool:
        """Settle the chunks' orders; whether each sends what those ahead of it wait for."""
        enough = True
        positions = _positions(unit)
        for c in reversed(range(len(chunks))):
            position = positions[c]
            row = positions[:c].count(position)
            before = [order.chunk_order(position, row) for order in orders]
            if c < len(chunks) - 1:
                reached = forwards_that_reach(
                    chunks[c], chunks[c + 1], self._frontiers[chunks[c + 1].index]
                )
                enough &= all(
                    n >= least
                    for own, wanted in zip(before, reached, strict=True)
                    for n, least in zip(own, wanted, strict=True)
                )
            self._settle(chunks[c], before)
        return enough

    def _take_in_groups(
        self, ends: Sequence[Sequence[int]], first: Stage, left: Sequence[Sequence[int]]
    ) -> None:
        """What producers must send before a backward of the first chunk.

        That is what the chunk itself takes in first; and of the other replicas all that
        ``left`` the last chunk before that chunk's backwards of the same group are over, with
        the groups around it: a rank takes in a whole group before its next chunk runs.
        """
        pieces = sorted(
            (start, spans[end - 1][1])
            for spans, of_group in zip(first.microbatches, ends, strict=True)
            for (start, _), end in zip(spans, of_group, strict=True)
        )
        starts = [start for start, _ in pieces]
        taken = list(accumulate((end for _, end in pieces), max))
        self._frontiers[first.index] = [
            [
                max(spans[n - 1][1], taken[bisect_left(starts, reached[end - 1]) - 1])
                for n, end in zip(before, of_group, strict=True)
            ]
            for spans, before, reached, of_group in zip(
                first.microbatches, self._before[first.index], left, ends, strict=True
            )
        ]


def _positions(unit: Unit) -> list[int]:
    """Of each chunk, the pipeline position that runs it."""
    policy = POLICIES[unit.schedule.kind]
    return [policy.position(chunk, unit.pp) for chunk in range(unit.pp * unit.vpp)]


def _are_together(chunks: Sequence[Stage], remaining: int) -> bool:
    """Whether a unit's chunks follow each other in its module, and are the last that remain."""
    return [stage.index for stage in chunks] == list(range(remaining - len(chunks), remaining))


def _following(
    in_turn: Sequence[str], stages: Sequence[Stage], sequences: Sequence[Sequence[ReplicaCompute]]
) -> dict[tuple[str, int], list[ReplicaCompute]]:
    """See :class:`Orders`; tasks that a rank does not run have no turn there."""
    firsts: defaultdict[int, dict[str, list[ReplicaCompute]]] = defaultdict(dict)
    for _, index, d, mb in (sequence[0] for sequence in sequences):
        for rank in stages[index].ranks[d] if stages[index].task in in_turn else ():
            firsts[rank].setdefault(stages[index].task, []).append((Op.FORWARD, index, d, mb))
    return {
        (task, rank): own[after]
        for rank, own in firsts.items()
        for task, after in pairwise(sorted(own, key=in_turn.index))
    }


def _sequence(stage: Stage, d: int, before: Sequence[int]) -> Iterator[ReplicaCompute]:
    """A replica's own order: forwards up to ``before[m]``, then backward m."""
    done = 0
    for mb, until in enumerate(before):
        yield from ((Op.FORWARD, stage.index, d, m) for m in range(done, until))
        done = until
        if stage.has_backward:
            yield Op.BACKWARD, stage.index, d, mb
