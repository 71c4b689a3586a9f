"""One global order of all events, so that the ranks' programs cannot deadlock.

Every stage replica has a fixed order of its own, the chunks of an interleaved rank have one
together (:mod:`mmplan.program.schedules.plan_order`). Events that several ranks take part in (a
tensor-parallel compute, a sync, a reduction, a compute with a sum or a gather inside) happen on
all of them at once. List scheduling with nominal durations puts all events into one sequence in
which each comes after what it depends on; a rank's program is its part of that sequence.
Any set of programs made this way runs to the end under blocking semantics, however long
the events really take. So the durations, and the rule that chooses among events that could
begin at one time (:class:`mmplan.schema.plan.Order`), are free.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, product

from mmplan.errors import InvalidInputError
from mmplan.program.instructions import Op, ReplicaCompute
from mmplan.program.model import (
    BlockReduction,
    CrossSampleLoss,
    Edge,
    Graph,
    LossReduction,
    Reduction,
    Stage,
)
from mmplan.program.reduction_starts import rounds_of
from mmplan.program.samples import RangeIndex, SampleRange
from mmplan.program.schedules.plan_order import Orders
from mmplan.program.schedules.split_backward import Room, SplitSequence, room_of, split_sequence
from mmplan.schema.plan import Order

# Ties at one instant: free memory first, then feed others; collectives last.
_FIRST = 1
_SECOND = 2
_PRIORITY = {
    Op.SYNC_WAIT: 0,
    Op.REDUCE_START: _FIRST,
    Op.BACKWARD: _FIRST,
    Op.INPUT: _FIRST,
    Op.FORWARD: _SECOND,
    Op.REDUCE: 3,
    # When nothing else can start; a forward that would take too much memory waits for it.
    Op.WEIGHT: 4,
}
# Rules of an order put these before or behind each other.
_COMPUTES = (Op.FORWARD, Op.BACKWARD, Op.INPUT)


@dataclass(frozen=True, slots=True)
class Handover:
    """Samples that micro-batch ``mb`` of producer replica ``d`` gives to ``(d2, mb2)``."""

    d: int
    mb: int
    d2: int
    mb2: int
    span: SampleRange


def edge_links(stages: Sequence[Stage], edge: Edge) -> list[Handover]:
    """Every non-empty intersection of a producer's and a consumer's micro-batch."""
    producers, consumers = (stages[i].microbatches for i in (edge.producer, edge.consumer))
    if producers == consumers:
        return [
            Handover(d, mb, d, mb, span)
            for d, spans in enumerate(producers)
            for mb, span in enumerate(spans)
        ]
    index = RangeIndex(producers)
    return [
        Handover(d, mb, d2, mb2, span)
        for d2, spans in enumerate(consumers)
        for mb2, wanted in enumerate(spans)
        for span, d, mb in index.overlapping(wanted)
    ]


@dataclass(slots=True, eq=False)
class Event:
    """Something that happens once, on ``ranks`` together.

    ``index`` is the stage of a compute, the loss of a sync, the reduction of a REDUCE;
    ``d`` and ``mb`` place a compute, ``mb`` is the sync batch of a sync. ``start`` is its nominal
    time, known when it is scheduled.
    """

    op: Op
    index: int
    ranks: tuple[int, ...]
    first_sample: int
    d: int = 0
    mb: int = 0
    duration: int = 0
    waiting_for: int = 0
    ready_at: int = 0
    start: int = 0
    # Less is more urgent.
    urgency: tuple[int, int] = (0, 0)
    then: list[Event] = field(default_factory=list)

    def after(self, other: Event) -> None:
        """Declare that this event needs the other one to be over."""
        other.then.append(self)
        self.waiting_for += 1


class OrderBuilder:
    """Builds the events of a graph and schedules them.

    Args:
        graph: whose events they are.
        batches: samples of a step, by task.
        orders: :func:`mmplan.program.schedules.plan_order.order_stages`.
        links: per edge, :func:`edge_links`.
        order: the plan's.
    """

    def __init__(
        self,
        graph: Graph,
        batches: dict[str, int],
        orders: Orders,
        links: Sequence[Sequence[Handover]],
        order: Order | None = None,
    ) -> None:
        self._order = order or Order()
        self._stages, self._edges, self._losses = graph.stages, graph.edges, graph.losses
        self._batches = batches
        self._each: dict[tuple[Op, int], int] = {}
        self._computes: dict[ReplicaCompute, Event] = {}
        self._sequences: list[list[Event]] = []
        self._syncs: dict[tuple[int, int], Event] = {}
        self._forwards_before = orders.forwards_before
        self._turns = orders.turns
        self._weights: list[Event] = []
        # Per sequence, those that nothing in it waits for.
        self._left_over: list[list[Event]] = []
        for parts in self._split(orders.sequences):
            self._sequences.append(self._events(parts))
        for first, second in orders.precedences:
            self._computes[second].after(self._computes[first])
        for edge in graph.edges:
            self._connect(edge, links[edge.index])
        for loss in graph.cross_sample_losses:
            self._add_syncs(loss)
        self._take_turns(orders.following)
        self._reductions = [self._reduction(r) for r in graph.reductions]
        self._meetings = self._meet(graph)

    def _split(self, sequences: Sequence[list[ReplicaCompute]]) -> Iterator[SplitSequence]:
        """The sequences, backwards in two parts where stages have them so."""
        split = {stage.index for stage in self._stages if stage.split}
        if not split:
            yield from map(SplitSequence, sequences)
            return
        for sequence, room in zip(sequences, self._rooms(sequences), strict=True):
            yield split_sequence(sequence, split, self._work, room)

    def _rooms(self, sequences: Sequence[Sequence[ReplicaCompute]]) -> list[Room]:
        """What each sequence may hold while weight gradients wait."""
        rooms = [room_of(sequence, self._work) for sequence in sequences]
        stages = [self._stages[sequence[0][1]] for sequence in sequences]
        fullest: Counter[str] = Counter()
        for stage, room in zip(stages, rooms, strict=True):
            fullest[stage.unit] = max(fullest[stage.unit], room.size)
        return [
            Room({}, fullest[stage.unit]) if stage.even_in_flight else room
            for stage, room in zip(stages, rooms, strict=True)
        ]

    def _events(self, sequence: SplitSequence) -> list[Event]:
        """A sequence's computes; what they leave for later goes to the loose ones."""
        events = {item: self._compute(item) for item in sequence.items}
        self._left_over.append([])
        weights = None
        for item, before in sequence.due:
            # One after the other: only the first is ever looked at.
            earlier, weights = weights, self._compute(item)
            weights.after(events[Op.INPUT, *item[1:]])
            if earlier is not None:
                weights.after(earlier)
            if before is None:
                self._left_over[-1].append(weights)
            else:
                events[before].after(weights)
            self._weights.append(weights)
        return list(events.values())

    def _work(self, item: ReplicaCompute) -> int:
        _, index, d, mb = item
        stage = self._stages[index]
        start, stop = stage.microbatches[d][mb]
        return (stop - start) * (stage.blocks[1] - stage.blocks[0])

    def _duration(self, item: ReplicaCompute) -> int:
        op, index, d, mb = item
        start, stop = self._stages[index].microbatches[d][mb]
        if (op, index) not in self._each:
            self._each[op, index] = self._each_of(op, index)
        return (stop - start) * self._each[op, index]

    def _each_of(self, op: Op, index: int) -> int:
        """Nominal duration of one sample in a stage."""
        stage = self._stages[index]
        if not self._order.times:
            return (stage.blocks[1] - stage.blocks[0]) * (2 if op is Op.BACKWARD else 1)
        times = self._order.times[stage.unit][stage.chunk]
        return {
            Op.FORWARD: times.forward,
            Op.BACKWARD: times.backward,
            Op.INPUT: times.input_backward,
            Op.WEIGHT: max(1, times.backward - times.input_backward),
        }[op]

    def _compute(self, item: ReplicaCompute) -> Event:
        op, index, d, mb = item
        stage = self._stages[index]
        event = Event(
            op=op,
            index=index,
            d=d,
            mb=mb,
            ranks=stage.ranks[d],
            duration=self._duration(item),
            first_sample=stage.microbatches[d][mb][0],
        )
        # To all others I is the backward: it takes gradients and gives them.
        self._computes[Op.BACKWARD if op is Op.INPUT else op, index, d, mb] = event
        return event

    def _connect(self, edge: Edge, links: Sequence[Handover]) -> None:
        for link in links:
            consumer = self._computes[Op.FORWARD, edge.consumer, link.d2, link.mb2]
            consumer.after(self._computes[Op.FORWARD, edge.producer, link.d, link.mb])
            if edge.carries_gradient:
                producer = self._computes[Op.BACKWARD, edge.producer, link.d, link.mb]
                producer.after(self._computes[Op.BACKWARD, edge.consumer, link.d2, link.mb2])

    def _add_syncs(self, loss: CrossSampleLoss) -> None:
        batch = self._batches[loss.task]
        syncs = [
            Event(
                op=Op.SYNC_WAIT,
                index=loss.index,
                mb=g,
                ranks=loss.ranks,
                first_sample=g * loss.sync_batch,
            )
            for g in range(batch // loss.sync_batch)
        ]
        self._syncs.update(((loss.index, sync.mb), sync) for sync in syncs)
        for stage in self._stages:
            if loss.index in stage.syncs:
                self._join(stage, syncs, loss.sync_batch)
        for rank in loss.ranks:
            turns = self._turns.get(rank, [])
            for sync in syncs if turns else []:
                last, first = turns[((sync.mb + 1) * len(turns) - 1) // len(syncs)]
                sync.after(self._computes[last])
                if first is not None and self._computes[first] not in sync.then:
                    self._computes[first].after(sync)

    def _join(self, stage: Stage, syncs: Sequence[Event], size: int) -> None:
        feeds_others = any(edge.producer == stage.index for edge in self._edges)
        for d, spans in enumerate(stage.microbatches):
            joined: set[int] = set()
            starts = [start for start, _ in spans]
            for sync in syncs:
                # Syncs of a loss start in one order everywhere, so a replica without samples
                # in this one has forwarded what it holds of those before.
                earlier = bisect_left(starts, (sync.mb + 1) * size)
                if earlier:
                    sync.after(self._computes[Op.FORWARD, stage.index, d, earlier - 1])
            for mb, span in enumerate(spans):
                for sync in syncs[span[0] // size : -(-span[1] // size)]:
                    if stage.has_backward:
                        self._computes[Op.BACKWARD, stage.index, d, mb].after(sync)
                        if sync.mb not in joined and not feeds_others:
                            # The forwards that hide the sync stand between its start and end.
                            # Where a stage feeds others, one of its earlier backwards may wait
                            # for the sync by way of them, and those forwards for that backward.
                            last = self._forwards_before[stage.index][d][mb] - 1
                            sync.after(self._computes[Op.FORWARD, stage.index, d, last])
                            joined.add(sync.mb)
            if not stage.has_backward and not feeds_others:
                self._hold_back(stage, d, syncs, size)

    def _hold_back(self, stage: Stage, d: int, syncs: Sequence[Event], size: int) -> None:
        """Forwards beyond a sync batch come after its sync.

        A frozen tower has no backward that would hold it back: its ranks would compute
        features of later sync batches while others wait for them at the sync.
        """
        spans = stage.microbatches[d]
        for sync in syncs:
            beyond = (mb for mb, span in enumerate(spans) if span[0] >= (sync.mb + 1) * size)
            first = next(beyond, None)
            if first is not None:
                self._computes[Op.FORWARD, stage.index, d, first].after(sync)

    def _take_turns(self, following: Mapping[tuple[str, int], Sequence[ReplicaCompute]]) -> None:
        """Where tasks run in turn, a rank's next one waits for all that the last one has there."""
        ends = [
            (self._stages[sequence[0].index].task, last)
            for sequence, weights in zip(self._sequences, self._left_over, strict=True)
            for last in (sequence[-1], *weights)
        ]
        ends += [(self._losses[i].task, sync) for (i, _), sync in self._syncs.items()]
        for task, last in ends if following else ():
            begin = [item for rank in last.ranks for item in following.get((task, rank), ())]
            for item in dict.fromkeys(begin):
                self._computes[item].after(last)

    def _reduction(self, reduction: Reduction) -> Event:
        event = Event(
            op=Op.REDUCE,
            index=reduction.index,
            ranks=reduction.ranks,
            first_sample=max(self._batches.values()),
            duration=self._sum_duration(reduction),
        )
        # It blocks its ranks until the last is there, so it comes after all of their work.
        own = set(event.ranks)
        for sequence, weights in zip(self._sequences, self._left_over, strict=True):
            if not own.isdisjoint(sequence[-1].ranks):
                for last in (sequence[-1], *weights):
                    event.after(last)
        for (index, _), sync in self._syncs.items():
            if isinstance(reduction, LossReduction) and self._losses[index].name == reduction.owner:
                event.after(sync)
        return event

    def _sum_duration(self, reduction: Reduction) -> int:
        if not isinstance(reduction, BlockReduction):
            return 0
        first, end = reduction.blocks
        return (end - first) * self._order.sums.get(reduction.owner, 0)

    def _meet(self, graph: Graph) -> list[Event]:
        """What stands before computes that all replicas of a stage do at one time (ZeRO-2, ZeRO-3).

        They sum or gather inside, so that each waits for all others and for what these wait for.
        """
        meetings: dict[Event, Event] = {}
        cut = {stage.index for each in graph.reductions for stage, _ in rounds_of(graph, each)}
        for stage in (self._stages[index] for index in sorted(cut)):
            ops = (Op.FORWARD, Op.BACKWARD) if stage.gathers else (Op.BACKWARD,)
            for op, mb in product(ops, range(len(stage.microbatches[0]))):
                own = [self._computes[op, stage.index, d, mb] for d in range(stage.dp)]
                ranks, first = tuple(sorted(stage.members)), own[0].first_sample
                meeting = Event(Op.REDUCE_START, stage.index, ranks, first, mb=mb)
                meetings |= dict.fromkeys(own, meeting)
        if not meetings:
            return []
        for event in (*chain(*self._sequences), *self._loose()):
            for compute in [other for other in event.then if other in meetings]:
                event.then.remove(compute)
                compute.waiting_for -= 1
                if meetings[compute] not in event.then:
                    meetings[compute].after(event)
        for first, second in chain(*map(pairwise, self._sequences)):
            if second in meetings:
                meetings[second].after(first)
        for compute, meeting in meetings.items():
            compute.after(meeting)
        return [*dict.fromkeys(meetings.values())]

    def _loose(self) -> list[Event]:
        """Events that are in no sequence, without meetings."""
        return [*self._syncs.values(), *self._weights, *self._reductions]

    def run(self) -> Iterator[Event]:
        """All events, each after those that it depends on.

        Raises:
            InvalidInputError: the orders of the stages wait for each other.
        """
        loose = [*self._loose(), *self._meetings]
        self._rank(loose)
        scheduled = _ListScheduler(self._sequences, loose).run()
        return (event for event in scheduled if event.op is not Op.REDUCE_START)

    def _rank(self, loose: Sequence[Event]) -> None:
        """Set the urgency of all events by the rule of the plan."""
        rule = self._order.rule
        tails = _tails(self._sequences, loose) if rule == "longest-path" else {}
        for event in chain(*self._sequences, loose):
            op = event.then[0].op if event.op is Op.REDUCE_START else event.op
            if op is Op.REDUCE:
                event.urgency = _PRIORITY[op], -event.duration
            elif op not in _COMPUTES or rule == "backward-first":
                event.urgency = _PRIORITY[op], 0
            elif rule == "longest-path":
                event.urgency = _FIRST, -tails.get(event, 0)
            elif op is Op.FORWARD:
                event.urgency = _FIRST, event.index
            else:
                event.urgency = _SECOND, -event.index
        # Who has met begins, before anything else does.
        for meeting in self._meetings:
            for event in meeting.then:
                event.urgency = -1, 0


def _tails(sequences: Sequence[Sequence[Event]], loose: Sequence[Event]) -> dict[Event, int]:
    """Nominal time from the start of each event to the end of the last that waits for it.

    Events that wait for each other, and those after them, are left out.
    """
    after: defaultdict[Event, list[Event]] = defaultdict(list)
    missing: dict[Event, int] = {}
    for event in chain(*sequences, loose):
        after[event] += event.then
        missing[event] = event.waiting_for
    for one, other in chain(*map(pairwise, sequences)):
        after[one].append(other)
        missing[other] += 1
    ordered = [event for event, number in missing.items() if not number]
    for event in ordered:
        for other in after[event]:
            missing[other] -= 1
            if not missing[other]:
                ordered.append(other)
    tails: dict[Event, int] = {}
    for event in reversed(ordered):
        longest = max((tails.get(other, 0) for other in after[event]), default=0)
        tails[event] = event.duration + longest
    return tails


class _ListScheduler:
    """Starts at each instant what can start, first by time, then by priority."""

    def __init__(self, sequences: list[list[Event]], loose: list[Event]) -> None:
        self._remaining = sum(map(len, sequences)) + len(loose)
        self._next: dict[Event, Event] = {}
        self._held: set[Event] = set()
        self._free_at: defaultdict[int, int] = defaultdict(int)
        self._heap: list[tuple[int, int, int, int, int, int, int, int, Event]] = []
        self._ticket = 0
        self._ready_syncs: set[Event] = set()
        self._syncs_of: defaultdict[Event, list[Event]] = defaultdict(list)
        for sync in loose:
            if sync.op is Op.SYNC_WAIT:
                for event in sync.then:
                    self._syncs_of[event].append(sync)
        for sequence in sequences:
            for first, second in pairwise(sequence):
                self._next[first] = second
                self._held.add(second)
        for event in (*(s[0] for s in sequences if s), *loose):
            self._offer(event)

    def run(self) -> Iterator[Event]:
        while self._heap:
            offered, *_, event = heapq.heappop(self._heap)
            start = self._start(event)
            # Only times that are still true decide, so that what other ranks do changes nothing.
            if start > offered:
                self._push(event)
                continue
            event.start = start
            yield event
            self._finish(event, start + event.duration)
        if self._remaining:
            raise InvalidInputError(
                f"the units' schedules wait for each other: {self._remaining} instructions "
                "can never start",
                hint="raise schedule.in_flight or schedule.lead, or solve the workload again",
            )

    def _start(self, event: Event) -> int:
        start = event.ready_at
        for rank in event.ranks:
            if self._free_at[rank] > start:
                start = self._free_at[rank]
        return start

    def _finish(self, event: Event, end: int) -> None:
        self._remaining -= 1
        for rank in event.ranks:
            self._free_at[rank] = end
        for other in event.then:
            other.waiting_for -= 1
            if end > other.ready_at:
                other.ready_at = end
            self._offer(other)
        following = self._next.get(event)
        if following is not None:
            self._held.discard(following)
            self._offer(following)

    def _offer(self, event: Event) -> None:
        if event in self._held:
            return
        if event.waiting_for:
            self._demand(event)
        elif event.op is Op.SYNC_WAIT and event.then:
            self._ready_syncs.add(event)
            for other in event.then:
                self._demand(other)
        else:
            self._push(event)

    def _demand(self, event: Event) -> None:
        """Let the syncs go that alone still hold up an event.

        A wait blocks its rank, so it comes when something needs its gradient, not when
        its features are there: what else the rank can do hides the gather.
        """
        if not self._ready_syncs:
            return
        ready = [s for s in self._syncs_of[event] if s in self._ready_syncs]
        if ready and len(ready) == event.waiting_for and event not in self._held:
            for sync in ready:
                self._ready_syncs.discard(sync)
                self._push(sync)

    def _push(self, event: Event) -> None:
        self._ticket += 1
        key = (
            self._start(event),
            *event.urgency,
            _PRIORITY[event.op],
            event.first_sample,
            -event.index,
            event.mb,
            self._ticket,
        )
        heapq.heappush(self._heap, (*key, event))
