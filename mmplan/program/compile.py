"""Compile a plan: pure data in, one instruction list per rank out. No profile, no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from mmplan.program.instructions import Collective, Compute, Instruction, Message, Op, Step, Sync
from mmplan.program.lower import lower
from mmplan.program.model import Edge, Graph, PerSampleLoss, Program, Stage
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
    return compile_graph(plan, graph, order_stages(plan, graph))


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
    timeline = OrderBuilder(graph, batches, orders, links)
    projection = _Projection(graph, links, plan.devices)
    for event in timeline.run():
        projection.add(event)
    rows = [hoist_receives(row, RECEIVES_AHEAD) for row in projection.rows()]
    return Program.of(plan, graph, match_receives(rows))


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
        self._to_forward = self._forwards_per_sync()
        self._started: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._complete: defaultdict[tuple[int, int], int] = defaultdict(int)
        for loss in graph.losses:
            if isinstance(loss, PerSampleLoss):
                for rank in loss.ranks:
                    self._rows[rank].append(Collective(Op.COUNT, loss.index))

    def _forwards_per_sync(self) -> dict[tuple[int, int, int], int]:
        """(rank, loss, sync batch) to the local forwards that must come before its start."""
        counts: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        for stage in self._graph.stages:
            for d, spans in enumerate(stage.microbatches):
                for mb in range(len(spans)):
                    for rank in stage.ranks[d]:
                        for loss, g in self._syncs_of(stage, d, mb):
                            counts[rank, loss, g] += 1
        return dict(counts)

    def _syncs_of(self, stage: Stage, d: int, mb: int) -> list[tuple[int, int]]:
        span = stage.microbatches[d][mb]
        return [(i, g) for i in stage.syncs for g in self._graph.cross_sample(i).batches_of(span)]

    def add(self, event: Event) -> None:
        """Append the event to every rank that takes part."""
        for t, rank in enumerate(event.ranks):
            row = self._rows[rank]
            match event.op:
                case Op.FORWARD:
                    key = event.index, event.d, event.mb
                    row += self._compute(event, t, self._incoming[key], self._outgoing[key])
                    row += self._starts_after(event, rank)
                case Op.BACKWARD | Op.INPUT:
                    key = event.index, event.d, event.mb
                    row += self._compute(event, t, self._outgoing[key], self._incoming[key])
                case Op.WEIGHT:
                    row.append(Compute(event.op, event.index, event.mb))
                case Op.SYNC_WAIT:
                    row += self._starts(rank, event.index, event.mb)
                    row.append(Sync(event.op, event.index, event.mb))
                case _:
                    row.append(Collective(event.op, event.index))

    def _compute(
        self, event: Event, t: int, taken: Sequence[_Transfer], given: Sequence[_Transfer]
    ) -> Iterator[Instruction]:
        """A forward or backward on rank t of its group, with the messages around it."""
        forward = event.op is Op.FORWARD
        receive, send = (Op.RECV_F, Op.SEND_F) if forward else (Op.RECV_B, Op.SEND_B)
        for edge, group, span in taken:
            if forward or edge.carries_gradient:
                peer = group[t % len(group)]
                yield Message(receive, event.index, event.mb, edge.index, peer, *span)
        yield Compute(event.op, event.index, event.mb)
        for edge, group, span in given:
            if forward or edge.carries_gradient:
                for peer in group[t :: len(event.ranks)]:
                    yield Message(send, event.index, event.mb, edge.index, peer, *span)

    def _starts_after(self, event: Event, rank: int) -> list[Instruction]:
        """Starts of the sync batches of which a forward is the rank's last."""
        items: list[Instruction] = []
        for loss, g in self._syncs_of(self._graph.stages[event.index], event.d, event.mb):
            self._to_forward[rank, loss, g] -= 1
            if self._to_forward[rank, loss, g] == 0:
                items += self._starts(rank, loss, g)
        return items

    def _starts(self, rank: int, loss: int, last: int) -> list[Instruction]:
        """Starts of a loss's sync batches up to ``last`` that are not there yet.

        Every rank of a loss starts all of its syncs in the same order. One that holds no
        sample of a sync batch starts it with the next one, or before the wait.
        """
        self._complete[rank, loss] = max(self._complete[rank, loss], last + 1)
        items: list[Instruction] = []
        # A later sync batch may be complete first: its start waits for those before it.
        for g in range(self._started[rank, loss], self._complete[rank, loss]):
            if self._to_forward.get((rank, loss, g), 0):
                break
            items.append(Sync(Op.SYNC_START, loss, g))
        self._started[rank, loss] += len(items)
        return items

    def rows(self) -> list[tuple[Instruction, ...]]:
        """Every rank's program; a rank without work has an empty row."""
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
# (source rank, target rank, is backward)
_Route = tuple[int, int, bool]
# (edge, first sample, end of samples): unique on a route
_Parcel = tuple[int, int, int]


def match_receives(rows: Sequence[ProgramRow]) -> tuple[ProgramRow, ...]:
    """Move receives ahead until each route's receives stand in the order of its sends.

    NCCL ignores tags: the n-th receive from a rank gets what that rank sends n-th. Orders
    differ where two stages of one rank feed two of another and work in another order
    (interleaved chunks). A receive only posts, so that moving it ahead cannot deadlock.
    """
    sent: defaultdict[_Route, dict[_Parcel, int]] = defaultdict(dict)
    for rank, row in enumerate(rows):
        for item in row:
            if isinstance(item, Message) and item.is_send:
                parcels = sent[rank, item.peer, item.op is Op.SEND_B]
                parcels[item.edge, item.start, item.stop] = len(parcels)
    return tuple(_match_row(rank, row, sent) for rank, row in enumerate(rows))


def _match_row(
    rank: int, row: ProgramRow, sent: Mapping[_Route, Mapping[_Parcel, int]]
) -> ProgramRow:
    routes: defaultdict[_Route, list[tuple[int, int]]] = defaultdict(list)
    for position, item in enumerate(row):
        if isinstance(item, Message) and not item.is_send:
            route = item.peer, rank, item.op is Op.RECV_B
            turn = sent[route][item.edge, item.start, item.stop]
            routes[route].append((turn, position))
    # Sort key of each instruction; a moved receive stands just before its new place.
    keys: dict[int, tuple[int, int, int]] = {}
    for receives in routes.values():
        latest = len(row)
        for n, position in sorted(receives, reverse=True):
            if position > latest:
                keys[position] = (latest, 0, n)
            latest = min(latest, position)
    if not keys:
        return row
    order = sorted(range(len(row)), key=lambda position: keys.get(position, (position, 1, 0)))
    return tuple(row[position] for position in order)
