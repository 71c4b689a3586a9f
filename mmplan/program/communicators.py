"""The communicators of a step, and what each rank issues on them, in order.

A communicator is a queue: its k-th operation must be the same on all of its ranks. Several
operations of one set of ranks share a communicator. The gathers of a loss have one of their own,
because ranks start them between other collectives, as their features come.

Messages have communicators of their own, *channels*. A channel carries what one set of ranks sends
to another, forward and backward. A rank posts the messages of a channel in the order in which they
are sent, which is one order for the whole plan (:mod:`mmplan.program.compile`). So the first
message that is not over is always the next one at both of its ends, and no order of other
operations can stop it: a channel needs no tags, and may serve many ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mmplan.program.dependencies import ALONE, GROUP, POST, SEND, Dependencies
from mmplan.program.features import holders_of, readers
from mmplan.program.instructions import Collective, Compute, Instruction, Message, Op, Sync
from mmplan.program.model import CrossSampleLoss, Program
from mmplan.program.shards import Ranks

# Thread blocks, one a multiprocessor, that a kernel takes on a GPU. A channel is made with this
# limit, because a posted receive spins until its message comes; a collective's is NCCL's own.
CHANNEL_CTAS = 4
COLLECTIVE_CTAS = 32

# Ranks, and a number for groups of the same ranks that are kept apart; below zero for channels.
CommGroup = tuple[Ranks, int]
# An operation's communicator and number in its queue; the end of one that has two parts.
_QueuePlace = tuple[CommGroup, int, bool]


class Channels:
    """The channels of a program.

    Of a stream (:attr:`mmplan.program.model.Edge.streams`), ranks that no message joins have
    channels apart.

    Args:
        program: the whole program.

    Attributes:
        groups: every channel once, in one order on all ranks.
        links: of each, the (source, target) pairs between which messages go, sorted.
    """

    def __init__(self, program: Program) -> None:
        self._edges = program.edges
        links: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        for rank, row in enumerate(program.instructions):
            for item in row:
                if isinstance(item, Message) and item.is_send and item.peer != rank:
                    links[self._stream(item)].add((rank, item.peer))
        self._of: dict[tuple[int, int], CommGroup] = {}
        self.links: dict[CommGroup, list[tuple[int, int]]] = {}
        for stream, pairs in sorted(links.items()):
            for joined in _joined(sorted(pairs)):
                ranks = tuple(sorted({rank for pair in joined for rank in pair}))
                number = -1
                while (ranks, number) in self.links:
                    number -= 1
                self.links[ranks, number] = joined
                self._of.update(((stream, rank), (ranks, number)) for rank in ranks)
        self.groups: list[CommGroup] = [*self.links]

    def of(self, rank: int, message: Message) -> CommGroup | None:
        """The channel of a rank's message; None of one to itself."""
        return None if message.peer == rank else self._of[self._stream(message), rank]

    def _stream(self, message: Message) -> int:
        return self._edges[message.edge].streams[message.op in (Op.SEND_B, Op.RECV_B)]


def _joined(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The pairs, those apart that share no rank with each other by way of others."""
    parent: dict[int, int] = {}

    def root(rank: int) -> int:
        while parent.setdefault(rank, rank) != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    for source, target in pairs:
        parent[root(target)] = root(source)
    found: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for pair in pairs:
        found[root(pair[0])].append(pair)
    return list(found.values())


def communicators(program: Program) -> list[CommGroup]:
    """Every communicator of a step's collectives, once, in one order on all ranks."""
    groups: dict[Ranks, None] = {}
    for stage in program.stages:
        # Replicas that gather parameters do so on the communicator of these parameters' sums.
        of_tensor_parallel = (tuple(sorted(ranks)) for ranks in stage.ranks if stage.tp > 1)
        groups.update(dict.fromkeys(of_tensor_parallel))
    groups.update(dict.fromkeys(loss.ranks for loss in program.losses))
    groups.update(dict.fromkeys(reduction.ranks for reduction in program.reductions))
    gathers: dict[CommGroup, None] = {}
    for loss in program.cross_sample_losses:
        own = _gathers(program, loss)
        groups.update(dict.fromkeys(ranks for ranks, _ in own))
        gathers.update(dict.fromkeys(own))
    return [group for group in [*((ranks, 0) for ranks in groups), *gathers] if len(group[0]) > 1]


def _gathers(program: Program, loss: CrossSampleLoss) -> list[CommGroup]:
    """The communicators of a loss's gathers.

    A loss may compare rows with other inputs' alone: then their readers gather them. They do so in
    its starts and waits, which the loss's own communicator keeps in one order.
    """
    of_ranks = (loss.ranks, *readers(holders_of(program, loss), others_only=True))
    return [(ranks, loss.channel) for ranks in of_ranks]


@dataclass(frozen=True, slots=True)
class CommunicatorCount:
    """The communicators of a rank.

    Attributes:
        collectives: one of all ranks among them.
        channels: of messages.
    """

    rank: int
    collectives: int
    channels: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.collectives + self.channels


def communicator_counts(program: Program) -> list[CommunicatorCount]:
    """The communicators of every rank; of one without a row, its collectives' alone.

    Args:
        program: with the whole plan's stages, losses and reductions.
    """
    everyone = tuple(range(program.num_ranks))
    groups = {*communicators(program)} | ({(everyone, 0)} if len(everyone) > 1 else set())
    collectives = Counter(rank for ranks, _ in groups for rank in ranks)
    return [
        CommunicatorCount(rank, collectives[rank], len(_streams(program, rank)))
        for rank in everyone
    ]


def _streams(program: Program, rank: int) -> set[int]:
    """The streams of a rank's messages, which have a channel each."""
    ends = {
        (item.edge, item.op in (Op.SEND_B, Op.RECV_B))
        for item in program.instructions[rank]
        if isinstance(item, Message) and item.peer != rank
    }
    return {program.edges[edge].streams[backward] for edge, backward in ends}


def most_communicators(program: Program) -> CommunicatorCount:
    """The rank with the most communicators; see :func:`communicator_counts`."""
    none = CommunicatorCount(0, 0, 0)
    return max(communicator_counts(program), key=lambda count: count.total, default=none)


def most_held_blocks(program: Program) -> int:
    """The most thread blocks of a GPU that a rank's communication may hold at once.

    A posted message holds those of its channel until it comes, and may be posted long before. A
    collective holds its own from its start to its wait, beside those that begin in between.

    Args:
        program: the rows may be those of some ranks.
    """
    gathers = {loss.index: _gathers(program, loss) for loss in program.cross_sample_losses}
    ranks = range(len(program.instructions))
    return max((_held_blocks(program, rank, gathers) for rank in ranks), default=0)


def _held_blocks(program: Program, rank: int, gathers: Mapping[int, Sequence[CommGroup]]) -> int:
    begun: dict[tuple[Op, int, int | None], list[CommGroup]] = {}
    most = 0
    for item in program.instructions[rank]:
        group = communicator_of(program, rank, item)
        if group is None:
            continue
        begins = [group]
        if isinstance(item, Compute) and program.stages[item.stage].tp > 1:
            stage = program.stages[item.stage]
            # Where the stage gathers parameters, beside the sums of the tensor-parallel group.
            begins.append((tuple(sorted(stage.ranks[stage.place(rank)[0]])), 0))
        elif isinstance(item, Sync):
            key = (Op.SYNC_START, item.loss, item.batch)
            if item.op is Op.SYNC_START:
                begun[key] = [gather for gather in gathers[item.loss] if rank in gather[0]]
            else:
                del begun[key]
        elif isinstance(item, Collective):
            key = (Op.REDUCE_START, item.index, item.mb)
            if item.op is Op.REDUCE_START:
                begun[key] = begins
            elif item.op is Op.REDUCE:
                begins = begun.pop(key, begins)
        held = {*begins}.union(*begun.values())
        most = max(most, sum(len(ranks) > 1 for ranks, _ in held))
    return most * COLLECTIVE_CTAS + len(_streams(program, rank)) * CHANNEL_CTAS


def communicator_of(program: Program, rank: int, item: Instruction) -> CommGroup | None:
    """The communicator on which a rank issues an instruction; None where it issues nothing.

    Messages have channels (:class:`Channels`). A REDUCE that was started before issues nothing any
    more; it is counted, which forbids no order that occurs.
    """
    if isinstance(item, Compute):
        stage = program.stages[item.stage]
        ranks = stage.meeting(item.op, stage.place(rank)[0])
        return (ranks, 0) if ranks else None
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


def channel_faults(program: Program, dependencies: Dependencies) -> Iterator[str]:
    """Messages that two ranks post in different orders, and channels that wait for each other.

    A message is over when it is computed, posted at both ends, and the next of its channel there.
    A rank that waits posts nothing.
    """
    replay = _ChannelReplay(program, dependencies)
    faults = list(replay.pair_faults())
    yield from faults or list(replay.stuck_faults())


class _ChannelReplay:
    def __init__(self, program: Program, dependencies: Dependencies) -> None:
        self._program, self._dependencies = program, dependencies
        self._stream = [
            program.edges[edge].streams[backward] for edge, backward, *_ in dependencies.messages
        ]
        # By (rank, stream): messages in the order in which they are posted.
        self._queues: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        rows = zip(dependencies.kind, dependencies.arg, strict=True)
        for rank, (kinds, args) in enumerate(rows):
            for kind, arg in zip(kinds, args, strict=True):
                if kind in (POST, SEND) and not self._is_own(arg):
                    self._queues[rank, self._stream[arg]].append(arg)

    def _is_own(self, message: int) -> bool:
        _, _, source, target, *_ = self._dependencies.messages[message]
        return source == target

    def _ends(self, message: int) -> list[tuple[int, int]]:
        _, _, source, target, *_ = self._dependencies.messages[message]
        return [(source, self._stream[message]), (target, self._stream[message])]

    def pair_faults(self) -> Iterator[str]:
        """Between two ranks the n-th receive of a stream must be the n-th send, without tags."""
        routes: defaultdict[tuple[int, int, int], tuple[list[int], list[int]]]
        routes = defaultdict(lambda: ([], []))
        for (rank, stream), queue in self._queues.items():
            for message in queue:
                _, _, source, target, *_ = self._dependencies.messages[message]
                routes[source, target, stream][rank == target].append(message)
        for (source, target, _), (sent, received) in routes.items():
            for n, pair in enumerate(zip(sent, received, strict=False)):
                if pair[0] != pair[1]:
                    out, back = (self._dependencies.messages[message] for message in pair)
                    yield (
                        f"ranks {source} > {target}: message {n} is sent as edge {out[0]} "
                        f"[{out[4]},{out[5]}) and received as edge {back[0]} [{back[4]},{back[5]})"
                    )
                    break

    def stuck_faults(self) -> Iterator[str]:
        """The first instruction of a rank that waits for ever."""
        kinds = self._dependencies.kind
        positions = self._run()
        for rank, (position, row) in enumerate(zip(positions, kinds, strict=True)):
            if position < len(row):
                yield (
                    f"rank {rank}, instruction {position} "
                    f"({self._program.instructions[rank][position]}): waits for ever for a message "
                    "that is posted behind others"
                )
                return

    def _run(self) -> list[int]:
        """How far each rank comes."""
        found = self._dependencies
        self._heads: Counter[tuple[int, int]] = Counter()
        self._over = list(map(self._is_own, range(len(found.messages))))
        self._posted = [2 * own for own in self._over]
        self._waiting: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self._ready = list(range(len(found.kind)))
        positions = [0] * len(found.kind)
        arrived: Counter[int] = Counter()
        done: set[int] = set()
        while self._ready:
            rank = self._ready.pop()
            kinds, args = found.kind[rank], found.arg[rank]
            position = positions[rank]
            while position < len(kinds):
                kind, arg = kinds[position], args[position]
                if kind in (ALONE, GROUP):
                    missing = self._first_missing(rank, position)
                    if missing is not None:
                        self._waiting["message", missing].append(rank)
                        break
                if kind == GROUP and arg not in done:
                    arrived[arg] += 1
                    if arrived[arg] < found.group_size[arg]:
                        # It goes on when the last rank of the group comes.
                        self._waiting["group", arg].append(rank)
                        break
                    done.add(arg)
                    self._ready += self._waiting.pop(("group", arg), [])
                elif kind in (POST, SEND) and self._posted[arg] < 2:
                    self._posted[arg] += 1
                    self._advance(arg)
                position += 1
            positions[rank] = position
        return positions

    def _first_missing(self, rank: int, position: int) -> int | None:
        """A message that a compute needs and that has not come."""
        needed = self._dependencies.input_messages[rank].get(position, ())
        return next((message for message in needed if not self._over[message]), None)

    def _advance(self, message: int) -> None:
        """End a message if it is the next at both ends, and those that it held up."""
        turn = [message]
        while turn:
            current = turn.pop()
            ends = self._ends(current)
            if self._posted[current] < 2 or any(self._next(end) != current for end in ends):
                continue
            self._over[current] = True
            self._ready += self._waiting.pop(("message", current), [])
            for end in ends:
                self._heads[end] += 1
                following = self._next(end)
                if following is not None:
                    turn.append(following)

    def _next(self, end: tuple[int, int]) -> int | None:
        queue, head = self._queues[end], self._heads[end]
        return queue[head] if head < len(queue) else None
