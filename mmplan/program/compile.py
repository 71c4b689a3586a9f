"""Compile a plan: pure data in, one instruction list per rank out. No profile, no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from mmplan.program.folding import fold_large, unfold
from mmplan.program.instructions import (
    Collective,
    Compute,
    Instruction,
    Message,
    MessageKey,
    Op,
    Step,
    Sync,
)
from mmplan.program.lower import lower
from mmplan.program.model import Edge, Graph, PerSampleLoss, Program, Stage
from mmplan.program.reduction_starts import with_starts
from mmplan.program.samples import SampleRange
from mmplan.program.schedules.global_order import Event, Handover, OrderBuilder, edge_links
from mmplan.program.schedules.plan_order import Orders, order_stages
from mmplan.schema.plan import Plan

# Receives are posted this many computes before the one that waits for them.
RECEIVES_AHEAD = 2


def compile_plan(plan: Plan) -> Program:
    """The program of a plan without faults; the same plan always gives the same program.

    Raises:
        InvalidInputError: the plan's schedules wait for each other, or see
            :func:`mmplan.program.lower.lower`.
    """
    graph = lower(plan)
    folded = fold_large(plan, graph)
    if folded is None:
        return compile_graph(plan, graph, order_stages(plan, graph))
    return unfolded_program(plan, graph, compile_graph(*folded, order_stages(*folded)))


def unfolded_program(plan: Plan, graph: Graph, folded: Program) -> Program:
    """The program of a plan, from that of its folded plan (:mod:`mmplan.program.folding`)."""
    return Program.of(plan, graph, tuple(unfold(plan, graph, folded)))


def compile_graph(plan: Plan, graph: Graph, orders: Orders) -> Program:
    """The program of a graph that a plan lowers to, or of some of the replicas in it.

    Args:
        plan: the plan.
        graph: its graph.
        orders: of the graph's stages.

    Raises:
        InvalidInputError: as :func:`compile_plan`.
    """
    batches = {name: task.batch for name, task in plan.tasks.items()}
    links = [edge_links(graph.stages, edge) for edge in graph.edges]
    timeline = OrderBuilder(graph, batches, orders, links, plan.order)
    projection = _Projection(graph, links, plan.devices)
    for event in timeline.run():
        projection.add(event)
    rows = [hoist_receives(row, RECEIVES_AHEAD) if row else () for row in projection.rows()]
    return Program.of(plan, graph, with_starts(graph, order_receives(rows, graph, projection)))


# What comes first of things that end at one time: forwards give the features that a start gathers,
# a wait needs the gather.
_COMPUTE, _START, _MEETING = range(3)
# What messages come before and after.
_PASSED_ON = (Op.FORWARD, Op.BACKWARD, Op.INPUT)
# An edge, the ranks of the group at its other end, and the samples that it carries.
_Transfer = tuple[Edge, tuple[int, ...], SampleRange]


class _Projection:
    """Writes each event into the rows of its ranks, with the messages around it."""

    def __init__(self, graph: Graph, links: Sequence[Sequence[Handover]], num_ranks: int) -> None:
        self._graph = graph
        self._rows: list[list[Instruction]] = [[] for _ in range(num_ranks)]
        # By (stage, replica, micro-batch).
        self._incoming: defaultdict[tuple[int, int, int], list[_Transfer]] = defaultdict(list)
        self._outgoing: defaultdict[tuple[int, int, int], list[_Transfer]] = defaultdict(list)
        for edge in graph.edges:
            senders, receivers = (
                graph.stages[edge.producer].ranks,
                graph.stages[edge.consumer].ranks,
            )
            for link in links[edge.index]:
                outgoing = edge, receivers[link.d2], link.span
                self._outgoing[edge.producer, link.d, link.mb].append(outgoing)
                incoming = edge, senders[link.d], link.span
                self._incoming[edge.consumer, link.d2, link.mb2].append(incoming)
        # By (is backward, stage, replica, micro-batch): the nominal end of what messages follow.
        self.ends: dict[tuple[bool, int, int, int], int] = {}
        # By rank: the nominal start of each instruction that may wait, in order.
        self.starts: list[list[int]] = [[] for _ in range(num_ranks)]
        # By (loss, sync batch): the nominal time at which the last of its features is there.
        self._features_s: dict[tuple[int, int], int] = {}
        # By (rank, loss, sync batch): the place behind the rank's last forward of its samples.
        self._features_at: dict[tuple[int, int, int], int] = {}
        # By rank: nominal ends of what may need other ranks, and the places behind it.
        self._ends: list[list[tuple[tuple[int, int], int]]] = [[] for _ in range(num_ranks)]
        for loss in graph.losses:
            if isinstance(loss, PerSampleLoss):
                for rank in loss.ranks:
                    self._rows[rank].append(Collective(Op.COUNT, loss.index))
                    self.starts[rank].append(-1)
                    self._note_end(rank, -1, _MEETING)

    def _syncs_of(self, stage: Stage, d: int, mb: int) -> list[tuple[int, int]]:
        span = stage.microbatches[d][mb]
        return [(i, g) for i in stage.syncs for g in self._graph.cross_sample(i).batches_of(span)]

    def add(self, event: Event) -> None:
        """Append the event to every rank that takes part."""
        for rank in event.ranks:
            self.starts[rank].append(event.start)
        if event.op in _PASSED_ON:
            end = event.start + event.duration
            self.ends[event.op is not Op.FORWARD, event.index, event.d, event.mb] = end
            own = Compute(event.op, event.index, event.mb)
            for t, rank in enumerate(event.ranks):
                self._add_compute(self._rows[rank], event, own, t)
                self._note_end(rank, end, _COMPUTE)
            if event.op is Op.FORWARD:
                self._note_features(event)
            return
        if event.op is Op.WEIGHT:
            item = Compute(event.op, event.index, event.mb)
        elif event.op is Op.SYNC_WAIT:
            item = Sync(event.op, event.index, event.mb)
        else:
            item = Collective(event.op, event.index)
        for rank in event.ranks:
            self._rows[rank].append(item)
            if event.op is not Op.WEIGHT:
                self._note_end(rank, event.start, _MEETING)

    def _note_end(self, rank: int, time: int, kind: int) -> None:
        self._ends[rank].append(((time, kind), len(self._rows[rank])))

    def _add_compute(self, row: list[Instruction], event: Event, own: Compute, t: int) -> None:
        """A forward or backward on rank t of its group, with the messages around it."""
        forward = event.op is Op.FORWARD
        index, mb = event.index, event.mb
        key = index, event.d, mb
        taken, given = self._incoming.get(key, ()), self._outgoing.get(key, ())
        if not forward:
            taken, given = given, taken
        receive, send = (Op.RECV_F, Op.SEND_F) if forward else (Op.RECV_B, Op.SEND_B)
        for edge, group, (start, stop) in taken:
            if forward or edge.carries_gradient:
                peer = group[t % len(group)]
                row.append(Message(receive, index, mb, edge.index, peer, start, stop))
        row.append(own)
        for edge, group, (start, stop) in given:
            if forward or edge.carries_gradient:
                row += [
                    Message(send, index, mb, edge.index, peer, start, stop)
                    for peer in group[t :: len(event.ranks)]
                ]

    def _note_features(self, event: Event) -> None:
        """Note when and where the samples of a forward are there for their syncs."""
        for key in self._syncs_of(self._graph.stages[event.index], event.d, event.mb):
            end = event.start + event.duration
            self._features_s[key] = max(end, self._features_s.get(key, 0))
            for rank in event.ranks:
                self._features_at[rank, *key] = len(self._rows[rank])

    def _starts(self) -> Iterator[tuple[int, int, int]]:
        """(nominal time, loss, sync batch) of every start of a sync, in one order for all ranks.

        A sync starts when its last features are there, and not before the ones before it.
        """
        times: dict[int, int] = {}
        found: list[tuple[int, int, int]] = []
        for (loss, g), time in sorted(self._features_s.items()):
            times[loss] = max(time, times.get(loss, 0))
            found.append((times[loss], loss, g))
        yield from sorted(found)

    def rows(self) -> list[tuple[Instruction, ...]]:
        """Every rank's program; a rank without work has an empty row.

        A rank starts a sync after what nominally ends before the last features are there anywhere,
        and before all else. So the collectives of all ranks have one order, that of their ends. The
        gather loses no time by it: it begins when the last rank starts.
        """
        places: list[list[tuple[int, Instruction]]] = [[] for _ in self._rows]
        for time, loss, g in self._starts():
            for rank in self._graph.losses[loss].ranks:
                before = bisect_left(self._ends[rank], ((time, _START), 0))
                place = self._ends[rank][before - 1][1] if before else 0
                place = max(place, self._features_at.get((rank, loss, g), 0))
                place = max(place, places[rank][-1][0] if places[rank] else 0)
                places[rank].append((place, Sync(Op.SYNC_START, loss, g)))
        for row, starts in zip(self._rows, places, strict=True):
            for place, start in reversed(starts):
                row.insert(place, start)
        return [(*row, Step()) if row else () for row in self._rows]


def hoist_receives(row: Sequence[Instruction], ahead: int) -> tuple[Instruction, ...]:
    """Post each receive up to ``ahead`` computes early; receives keep their order.

    A receive that is posted before its message arrives needs no copy and lets the sender
    finish; the compute that uses it still waits for it.
    """
    slots: list[list[Instruction]] = [[]]
    for item in row:
        if isinstance(item, Message) and not item.is_send:
            slots[max(0, len(slots) - 1 - ahead)].append(item)
        elif isinstance(item, Compute):
            slots.append([item])
        else:
            slots[-1].append(item)
    return tuple(item for slot in slots for item in slot)


ProgramRow = tuple[Instruction, ...]
# The place of a message in the order of all: nominal time of the send, stage and first sample of
# the compute before it, place of the rank in its tensor-parallel group, edge, first sample. No rank
# is named in it, so that ranks that do the same in other places have the same order.
_Turn = tuple[int, int, int, int, int, int]


def order_receives(
    rows: Sequence[ProgramRow], graph: Graph, times: _Projection
) -> tuple[ProgramRow, ...]:
    """Move receives until the messages of each stream have one order on all ranks.

    It is the order in which they are sent, by the nominal ends of the computes before them. NCCL
    ignores tags: the n-th receive from a rank gets what that rank sends n-th, and a communicator
    serves one message after the other. A receive is also posted before all that nominally begins
    after its message is sent. So the first message of all that is not over can always go on, even
    where a rank posts nothing while it waits and a send waits for its receive.

    Args:
        rows: of all ranks.
        graph: of the rows.
        times: nominal ones of the rows' computes.
    """
    sent: dict[MessageKey, _Turn] = {}
    for rank, row in enumerate(rows):
        before, time, first, t = None, 0, 0, 0
        for item in row:
            if isinstance(item, Message) and item.is_send:
                # Of the compute before them most have the first three in common.
                own = item.op, item.stage, item.mb
                if own != before:
                    before, stage = own, graph.stages[item.stage]
                    d, t = stage.place(rank)
                    time = times.ends[item.op is Op.SEND_B, item.stage, d, item.mb]
                    first = stage.microbatches[d][item.mb][0]
                sent[item.key(rank)] = time, item.stage, first, t, item.edge, item.start
    return tuple(
        _in_order(rank, row, graph, sent, times.starts[rank]) if row else ()
        for rank, row in enumerate(rows)
    )


def _in_order(
    rank: int,
    row: ProgramRow,
    graph: Graph,
    sent: Mapping[MessageKey, _Turn],
    starts: Sequence[int],
) -> ProgramRow:
    queues: defaultdict[int, list[tuple[_Turn, int]]] = defaultdict(list)
    streams = [edge.streams for edge in graph.edges]
    for position, item in enumerate(row):
        if isinstance(item, Message):
            key = item.key(rank)
            queues[streams[key[0]][key[1]]].append((sent[key], position))
    begins, ends = _runs_of_sends(row)
    waits = [position for position, item in enumerate(row) if _may_wait(item)]
    # Sort key of each instruction: a moved receive stands before (0) or behind (2) another one.
    keys: dict[int, tuple[int, int, int]] = {}
    for queue in queues.values():
        queue.sort()
        # The last send before each message of the queue.
        after = list(accumulate((ends.get(p, -1) for _, p in queue), max))
        latest = len(row), 0, 0
        for n in reversed(range(len(queue))):
            position = queue[n][1]
            if position in begins:
                latest = begins[position], 1, 0
                continue
            key = (position, 1, 0) if position > after[n] else (after[n], 2, n)
            first = bisect_left(starts, queue[n][0][0])
            if first < len(waits):
                key = min(key, (waits[first], 0, n))
            if key > latest:
                # Just before the next of the queue.
                key = latest[0], 2 if latest[1] == 2 else 0, n
            if key != (position, 1, 0):
                keys[position] = key
            latest = key
    if not keys:
        return row
    places = [(position, 1, 0) for position in range(len(row))]
    for position, key in keys.items():
        places[position] = key
    order = sorted(range(len(row)), key=places.__getitem__)
    return tuple(row[position] for position in order)


def _may_wait(item: Instruction) -> bool:
    """Whether an instruction may wait for other ranks."""
    if isinstance(item, Message | Step):
        return False
    return not isinstance(item, Sync) or item.op is Op.SYNC_WAIT


def _runs_of_sends(row: ProgramRow) -> tuple[dict[int, int], dict[int, int]]:
    """The first and the last position of the sends around each send: those after one compute."""
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    first = -1
    for position, item in enumerate(row):
        if isinstance(item, Message) and item.is_send:
            first = position if first < 0 else first
            begins[position] = first
        elif first >= 0:
            ends.update(dict.fromkeys(range(first, position), position - 1))
            first = -1
    if first >= 0:
        ends.update(dict.fromkeys(range(first, len(row)), len(row) - 1))
    return begins, ends
