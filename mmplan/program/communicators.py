"""The communicators of a step, and what each rank issues on them, in order.

A communicator is a queue: its k-th operation must be the same on all of its ranks. Several
operations of one set of ranks share a communicator. The gathers of a loss have one of their own,
because ranks start them between other collectives, as their features come.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mmplan.program.dependencies import ALONE, GROUP, POST, SEND, Dependencies
from mmplan.program.instructions import Collective, Compute, Instruction, Op, Sync
from mmplan.program.model import Program
from mmplan.program.shards import Ranks

# Ranks, and a number for groups of the same ranks that are kept apart.
CommGroup = tuple[Ranks, int]
# An operation's communicator and number in its queue; the end of one that has two parts.
_QueuePlace = tuple[CommGroup, int, bool]


def communicators(program: Program) -> list[CommGroup]:
    """Every communicator of a step's collectives, once, in one order on all ranks."""
    groups: dict[Ranks, None] = {}
    for stage in program.stages:
        if stage.tp > 1:
            groups.update(dict.fromkeys(tuple(sorted(group)) for group in stage.ranks))
    groups.update(dict.fromkeys(loss.ranks for loss in program.losses))
    groups.update(dict.fromkeys(reduction.ranks for reduction in program.reductions))
    gathers = [(loss.ranks, loss.channel) for loss in program.cross_sample_losses]
    return [group for group in [*((ranks, 0) for ranks in groups), *gathers] if len(group[0]) > 1]


def communicator_of(program: Program, rank: int, item: Instruction) -> CommGroup | None:
    """The communicator on which a rank issues an instruction; None where it issues nothing.

    Messages have queues of their own, one for each pair of ranks and direction. A REDUCE that was
    started before issues nothing any more; it is counted, which forbids no order that occurs.
    """
    if isinstance(item, Compute):
        stage = program.stages[item.stage]
        # Weight gradients are computed without the group.
        if stage.tp == 1 or item.op is Op.WEIGHT:
            return None
        return tuple(sorted(stage.ranks[stage.place(rank)[0]])), 0
    if isinstance(item, Collective):
        owners = program.losses if item.op is Op.COUNT else program.reductions
        return owners[item.index].ranks, 0
    if isinstance(item, Sync):
        loss = program.cross_sample(item.loss)
        return loss.ranks, loss.channel if item.op is Op.SYNC_START else 0
    return None


def queue_faults(program: Program) -> Iterator[str]:
    """Communicators that ranks use in different orders, and orders that contradict each other.

    Ranks that issue the operations of two communicators in different orders may wait for each
    other for ever: on a GPU, an operation holds its place until all ranks have begun it.
    """
    queues: dict[CommGroup, tuple[int, list[Instruction]]] = {}
    orders: list[tuple[int, list[_QueuePlace]]] = []
    around_starts = _computes_around_starts(program)
    for rank, row in enumerate(program.instructions):
        own: defaultdict[CommGroup, list[Instruction]] = defaultdict(list)
        order: list[_QueuePlace] = []
        starts: list[_QueuePlace] = []
        for item in row:
            group = communicator_of(program, rank, item)
            if group is None or len(group[0]) == 1:
                continue
            place = group, len(own[group]), False
            own[group].append(item)
            if item.op is Op.REDUCE_START:
                starts.append(place)
            elif isinstance(item, Compute) and (group, item) in around_starts:
                order += [place, *starts, (*place[:2], True)]
                starts = []
            else:
                order += [*starts, place]
                starts = []
        order += starts
        for group, items in own.items():
            first, known = queues.setdefault(group, (rank, items))
            if known != items:
                place = next(
                    (
                        n
                        for n, pair in enumerate(zip(items, known, strict=False))
                        if len({*pair}) > 1
                    ),
                    min(len(items), len(known)),
                )
                yield (
                    f"ranks {list(group[0])}: operation {place} of their communicator is "
                    f"{_named(items, place)} on rank {rank} and {_named(known, place)} on rank "
                    f"{first}"
                )
                return
        orders.append((rank, order))
    yield from _circle_faults(orders, queues)


def _computes_around_starts(program: Program) -> set[tuple[CommGroup | None, Instruction]]:
    """Computes of tensor-parallel groups inside which reductions start, with the communicator.

    They count as two operations, a begin and an end, with the starts between them. In the compute
    each start lies between two of the group's sums, the same two on all of its ranks, which run the
    same blocks. So a circle through such a sum is one through the begin or the end as well.
    """
    return {
        (communicator_of(program, rank, after), after)
        for rank, row in enumerate(program.instructions)
        for item, after in pairwise(row)
        if item.op is Op.REDUCE_START and isinstance(after, Compute)
    }


def _named(items: Sequence[Instruction], place: int) -> str:
    return str(items[place]) if place < len(items) else "none"


def _circle_faults(
    orders: Sequence[tuple[int, Sequence[_QueuePlace]]],
    queues: dict[CommGroup, tuple[int, list[Instruction]]],
) -> Iterator[str]:
    """Operations that come before each other in the orders of different ranks."""
    after: defaultdict[_QueuePlace, set[_QueuePlace]] = defaultdict(set)
    for _, order in orders:
        for one, other in pairwise(order):
            after[one].add(other)
    waits_for = Counter(other for others in after.values() for other in others)
    ready = deque(one for one in after if not waits_for[one])
    while ready:
        for other in after[ready.popleft()]:
            waits_for[other] -= 1
            if not waits_for[other]:
                ready.append(other)
    stuck = {one for one, count in waits_for.items() if count}
    if not stuck:
        return
    rank, one, other = next(
        (rank, one, other)
        for rank, order in orders
        for one, other in pairwise(order)
        if one in stuck and other in stuck
    )
    names = [str(queues[group][1][number]) for group, number, _ in (one, other)]
    yield (
        f"rank {rank}: issues {names[0]} of ranks {list(one[0][0])} before {names[1]} of ranks "
        f"{list(other[0][0])}, other ranks by way of others after it"
    )


def is_safe_with_blocking_sends(dependencies: Dependencies) -> bool:
    """Whether no rank waits for ever where a send waits until its receive is posted."""
    posted = [False] * len(dependencies.messages)
    sent = [False] * len(dependencies.messages)
    arrived: Counter[int] = Counter()
    done: set[int] = set()
    positions = [0] * len(dependencies.kind)
    waiting: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    ready = list(range(len(dependencies.kind)))

    def blocked_by(rank: int, position: int) -> tuple[str, int] | None:
        kind, arg = dependencies.kind[rank][position], dependencies.arg[rank][position]
        if kind == SEND and not posted[arg]:
            return "posted", arg
        if kind in (ALONE, GROUP):
            for message in dependencies.input_messages[rank].get(position, ()):
                if not sent[message]:
                    return "sent", message
        return None

    while ready:
        rank = ready.pop()
        row = dependencies.kind[rank]
        while positions[rank] < len(row):
            position = positions[rank]
            kind, arg = row[position], dependencies.arg[rank][position]
            reason = blocked_by(rank, position)
            if reason is not None:
                waiting[reason].append(rank)
                break
            if kind == GROUP and arg not in done:
                arrived[arg] += 1
                if arrived[arg] < dependencies.group_size[arg]:
                    # It goes on when the last rank of the group comes.
                    waiting["group", arg].append(rank)
                    break
                done.add(arg)
                ready += waiting.pop(("group", arg), [])
            if kind == POST:
                posted[arg] = True
                ready += waiting.pop(("posted", arg), [])
            elif kind == SEND:
                sent[arg] = True
                ready += waiting.pop(("sent", arg), [])
            positions[rank] += 1
    return all(p == len(row) for p, row in zip(positions, dependencies.kind, strict=True))
