"""Run a program's instructions against clocks: their starts and ends, or where ranks get stuck.

Sends return at once. A link carries the messages of one pair of ranks one after another, and a
loss gathers its sync batches one after another. A compute waits for the receives posted for it. A
group instruction (the compute of a tensor-parallel group, COUNT, REDUCE, SYNC_WAIT) starts when its
last rank is there. So each start is the latest of some times: the result does not depend on the
order in which ranks are visited, and no event queue is needed.

Where transfers share the network interfaces of nodes (:mod:`mmplan.program.network`) the order
matters. Ranks then run as far as they get without the transfers in flight. When all ranks wait,
nothing can be sent before the next transfer ends, and time advances to that end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmplan.program.dependencies import ALONE, GROUP, POST, SEND, START, Dependencies
from mmplan.program.network import Network, Traffic

_NEVER = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A program's transfers have on nodes' interfaces; None where they use none.

    Attributes:
        message: per message.
        gather: per sync.
        group: per group.
    """

    message: Sequence[Traffic | None]
    gather: Sequence[Traffic | None]
    group: Sequence[Traffic | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of instructions, messages and gathers, each with the network to itself.

    Attributes:
        instruction: ``[rank][position]``; read for computes and group instructions only.
        message: per message.
        gather: per sync, from its last start to the features' arrival everywhere.
        shared: the use of nodes' interfaces; None where no two transfers share one.
    """

    instruction: Sequence[Sequence[float]]
    message: Sequence[float]
    gather: Sequence[float]
    shared: Shared | None = None


@dataclass(slots=True, kw_only=True)
class Clocks:
    """The times of all instructions.

    Attributes:
        start: ``[rank][position]``, seconds; 0 where never reached.
        end: likewise. A receive ends when its message arrives.
        exposed: per rank, seconds of waiting for data in flight, and seconds by which sharing the
            network made its reductions longer.
        order: (rank, position) in an order in which all can run.
        stuck: per stuck rank, the position that it cannot pass.
    """

    start: list[list[float]]
    end: list[list[float]]
    exposed: list[float]
    order: list[tuple[int, int]]
    stuck: dict[int, int]


def no_durations(dependencies: Dependencies) -> Durations:
    """Zero seconds for everything: only the order of the instructions is left."""
    return Durations(
        instruction=[[0.0] * len(row) for row in dependencies.kind],
        message=[0.0] * len(dependencies.messages),
        gather=[0.0] * len(dependencies.syncs),
    )


def replay(dependencies: Dependencies, durations: Durations) -> Clocks:
    """Run every rank as far as it gets."""
    if durations.shared is None:
        return _Replay(dependencies, durations).run()
    return _SharedReplay(dependencies, durations, durations.shared).run()


class _Replay:
    def __init__(self, dependencies: Dependencies, durations: Durations) -> None:
        num_ranks, num_messages = len(dependencies.kind), len(dependencies.messages)
        self._dependencies = dependencies
        self._durations = durations
        self._start = [[0.0] * len(row) for row in dependencies.kind]
        self._end = [[0.0] * len(row) for row in dependencies.kind]
        self._order: list[tuple[int, int]] = []
        self._clock = [0.0] * num_ranks
        self._position = [0] * num_ranks
        self._exposed = [0.0] * num_ranks
        self._ready = list(range(num_ranks - 1, -1, -1))
        self._sent = [_NEVER] * num_messages
        self._arrival = [_NEVER] * num_messages
        self._waiting = [-1] * num_messages
        self._posted: list[tuple[int, int]] = [(-1, -1)] * num_messages
        self._link_free = [0.0] * dependencies.num_links
        self._arrived: list[list[int]] = [[] for _ in dependencies.group_size]
        self._starts = [0] * len(dependencies.syncs)
        self._started = [0.0] * len(dependencies.syncs)
        self._gathered = [_NEVER] * len(dependencies.syncs)
        # Per loss, the end of its last gather.
        self._channel_free: defaultdict[int, float] = defaultdict(float)

    def run(self) -> Clocks:
        self._run_ready()
        for message, (rank, position) in enumerate(self._posted):
            if rank >= 0:
                end = self._end[rank]
                end[position] = max(end[position], self._arrival[message])
        return Clocks(
            start=self._start,
            end=self._end,
            exposed=self._exposed,
            order=self._order,
            stuck={
                rank: position
                for rank, position in enumerate(self._position)
                if position < len(self._dependencies.kind[rank])
            },
        )

    def _run_ready(self) -> None:
        while self._ready:
            self._run_rank(self._ready.pop())

    def _run_rank(self, rank: int) -> None:
        """Advance one rank until it has to wait. This is the hot loop: locals, few calls."""
        kinds, args = self._dependencies.kind[rank], self._dependencies.arg[rank]
        inputs = self._dependencies.input_messages[rank]
        start, end = self._start[rank], self._end[rank]
        seconds = self._durations.instruction[rank]
        position, now = self._position[rank], self._clock[rank]
        flow = self._flow
        stop = len(kinds)
        while position < stop:
            kind, arg = kinds[position], args[position]
            start[position] = end[position] = now
            if kind == SEND:
                flow(arg, now)
            elif kind == POST:
                self._posted[arg] = (rank, position)
            elif kind == START:
                self._start_sync(arg, now)
            elif kind in (ALONE, GROUP):
                begins = self._inputs_at(rank, now, inputs.get(position, ()))
                if begins is None:
                    break
                if kind == GROUP:
                    self._position[rank], self._clock[rank] = position, begins
                    self._meet(rank, arg)
                    return
                start[position] = begins
                end[position] = now = begins + seconds[position]
            self._order.append((rank, position))
            position += 1
        self._position[rank], self._clock[rank] = position, now

    def _flow(self, message: int, now: float) -> None:
        """Carry a message that is sent now."""
        self._sent[message] = now
        free = self._link_free[self._dependencies.link[message]]
        leaves = free if free > now else now
        self._arrive(message, leaves + self._durations.message[message])

    def _arrive(self, message: int, when: float) -> None:
        self._arrival[message] = self._link_free[self._dependencies.link[message]] = when
        rank = self._waiting[message]
        if rank >= 0:
            self._ready.append(rank)
            self._waiting[message] = -1

    def _inputs_at(self, rank: int, now: float, messages: tuple[int, ...]) -> float | None:
        """The arrival of the last message, at the earliest now; None while one is not known."""
        latest, last = now, -1
        for message in messages:
            arrival = self._arrival[message]
            if arrival < 0:
                self._waiting[message] = rank
                return None
            if arrival > latest:
                latest, last = arrival, message
        if last >= 0:
            self._exposed[rank] += latest - max(now, self._sent[last])
        return latest

    def _start_sync(self, sync: int, now: float) -> None:
        self._starts[sync] += 1
        self._started[sync] = max(self._started[sync], now)
        if self._starts[sync] == self._dependencies.sync_size[sync]:
            self._gather(sync)

    def _gather(self, sync: int) -> None:
        """Gather the features of a sync once all its ranks have started it."""
        begins = max(self._started[sync], self._channel_free[self._dependencies.syncs[sync][0]])
        self._end_gather(sync, begins + self._durations.gather[sync])

    def _end_gather(self, sync: int, when: float) -> None:
        self._gathered[sync] = self._channel_free[self._dependencies.syncs[sync][0]] = when
        group = self._dependencies.sync_group[sync]
        if group >= 0:
            self._try_group(group)

    def _meet(self, rank: int, group: int) -> None:
        self._arrived[group].append(rank)
        self._try_group(group)

    def _try_group(self, group: int) -> None:
        """Start a group instruction if all its ranks, and the gather it waits for, are there."""
        ranks, sync = self._arrived[group], self._dependencies.gate[group]
        if len(ranks) < self._dependencies.group_size[group]:
            return
        begins = max(self._clock[rank] for rank in ranks)
        if sync >= 0:
            gathered = self._gathered[sync]
            if gathered < 0:
                return
            begins = max(begins, gathered)
            started = self._started[sync]
            for rank in ranks:
                self._exposed[rank] += max(0.0, gathered - max(self._clock[rank], started))
        for rank in ranks:
            self._start[rank][self._position[rank]] = begins
        self._run_group(group, begins)

    def _run_group(self, group: int, begins: float) -> None:
        seconds = self._durations.instruction
        for rank in self._arrived[group]:
            self._end_on(rank, begins + seconds[rank][self._position[rank]])
        self._arrived[group] = []

    def _end_on(self, rank: int, when: float) -> None:
        """End a group instruction on one rank."""
        position = self._position[rank]
        self._end[rank][position] = self._clock[rank] = when
        self._position[rank] = position + 1
        self._order.append((rank, position))
        self._ready.append(rank)


class _SharedReplay(_Replay):
    """Replay in which transfers that use interfaces share their bandwidth after the latency."""

    def __init__(self, dependencies: Dependencies, durations: Durations, shared: Shared) -> None:
        super().__init__(dependencies, durations)
        self._shared = shared
        self._network = Network()
        # Keys of transfers: messages, then gathers, then groups.
        self._first_gather = len(dependencies.messages)
        self._first_group = self._first_gather + len(dependencies.syncs)
        # Per busy link and per busy loss, the transfers that wait for it.
        self._links: dict[int, deque[int]] = {}
        self._channels: dict[int, deque[int]] = {}
        self._alone_until: dict[int, float] = {}

    def _run_ready(self) -> None:
        super()._run_ready()
        while (over := self._network.advance()) is not None:
            when, keys = over
            for key in keys:
                self._over(key, when)
            super()._run_ready()

    def _over(self, key: int, when: float) -> None:
        if key < self._first_gather:
            self._arrive(key, when)
            _next(self._links, self._dependencies.link[key], self._send)
        elif key < self._first_group:
            sync = key - self._first_gather
            self._end_gather(sync, when)
            _next(self._channels, self._dependencies.syncs[sync][0], self._send_features)
        else:
            group = key - self._first_group
            longer = max(0.0, when - self._alone_until.pop(group))
            for rank in self._arrived[group]:
                self._exposed[rank] += longer
                self._end_on(rank, when)
            self._arrived[group] = []

    def _flow(self, message: int, now: float) -> None:
        if self._shared.message[message] is None:
            super()._flow(message, now)
        else:
            self._sent[message] = now
            _queue(self._links, self._dependencies.link[message], message, self._send)

    def _send(self, message: int) -> None:
        leaves = max(self._sent[message], self._link_free[self._dependencies.link[message]])
        seconds = self._durations.message[message]
        self._add(message, self._shared.message[message], leaves, seconds)

    def _gather(self, sync: int) -> None:
        if self._shared.gather[sync] is None:
            super()._gather(sync)
        else:
            _queue(self._channels, self._dependencies.syncs[sync][0], sync, self._send_features)

    def _send_features(self, sync: int) -> None:
        begins = max(self._started[sync], self._channel_free[self._dependencies.syncs[sync][0]])
        seconds = self._durations.gather[sync]
        self._add(self._first_gather + sync, self._shared.gather[sync], begins, seconds)

    def _run_group(self, group: int, begins: float) -> None:
        traffic = self._shared.group[group]
        if traffic is None:
            super()._run_group(group, begins)
            return
        rank = self._arrived[group][0]
        seconds = self._durations.instruction[rank][self._position[rank]]
        self._alone_until[group] = begins + seconds
        self._add(self._first_group + group, traffic, begins, seconds)

    def _add(self, key: int, traffic: Traffic | None, begins: float, seconds: float) -> None:
        """Begin a transfer after its latency and other seconds without interfaces."""
        if traffic is not None:
            self._network.add(begins + max(0.0, seconds - traffic.seconds), traffic, key)


def _queue(
    lanes: dict[int, deque[int]], lane: int, item: int, begin: Callable[[int], None]
) -> None:
    """Begin a transfer, or queue it until its link or loss (its lane) is free."""
    waiting = lanes.get(lane)
    if waiting is not None:
        waiting.append(item)
        return
    lanes[lane] = deque()
    begin(item)


def _next(lanes: dict[int, deque[int]], lane: int, begin: Callable[[int], None]) -> None:
    """A lane is free: begin the next transfer of its queue."""
    if lanes[lane]:
        begin(lanes[lane].popleft())
    else:
        del lanes[lane]
