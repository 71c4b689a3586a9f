"""Run a program's instructions against clocks: their starts and ends, or where ranks get stuck.

Sends return at once. A link carries the messages of one pair of ranks one after another, and a
communicator its collectives one after another: the gathers of a loss's sync batches, reductions. A
compute waits for the receives posted for it. A group instruction (the compute of a tensor-parallel
group, COUNT, REDUCE, SYNC_WAIT) starts when its last rank is there. So each start is the latest of
some times: the result does not depend on the order in which ranks are visited, and no event queue
is needed.

A reduction that starts inside a compute is carried in parts, each as soon as all ranks have its
gradients. A rank's computes are slower beside its reductions, for as long as these take once it has
come to them, without other ranks and transfers: this too depends on nothing that is not yet known.

Where transfers share the network interfaces of nodes (:mod:`mmplan.program.network`) the order
matters. Ranks then run as far as they get without the transfers in flight. When all ranks wait,
nothing can be sent before the next transfer ends, and time advances to that end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmplan.program.dependencies import ALONE, GROUP, POST, SEND, START, START_INSIDE, Dependencies
from mmplan.program.network import Network, Traffic

_NEVER = -1.0

# Of each part: the share of a compute after which it can begin, and its seconds.
Parts = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A program's transfers have on nodes' interfaces; None where they use none.

    Attributes:
        message: per message.
        started: per started collective, of each of its parts.
        group: per group.
    """

    message: Sequence[Traffic | None]
    started: Sequence[Traffic | None]
    group: Sequence[Traffic | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of instructions, messages and collectives, each with the network to itself.

    Attributes:
        instruction: ``[rank][position]``; read for computes and group instructions only.
        message: per message.
        started: per started collective, of each of its parts: the share of the compute inside which
            it starts after which the part can begin, and its seconds. Gathers have one part, and
            start between computes.
        slowdown: times that a compute takes beside a collective of its device.
        shared: the use of nodes' interfaces; None where no two transfers share one.
    """

    instruction: Sequence[Sequence[float]]
    message: Sequence[float]
    started: Sequence[Parts]
    slowdown: float = 1.0
    shared: Shared | None = None


@dataclass(slots=True, kw_only=True)
class Clocks:
    """The times of all instructions.

    Attributes:
        start: ``[rank][position]``, seconds; 0 where never reached.
        end: likewise. A receive ends when its message arrives.
        exposed: per rank, seconds of waiting for data in flight, and seconds by which sharing the
            network made its reductions longer.
        slowed: per rank, seconds by which reductions beside its computes made them longer.
        order: (rank, position) in an order in which all can run.
        stuck: per stuck rank, the position that it cannot pass.
    """

    start: list[list[float]]
    end: list[list[float]]
    exposed: list[float]
    slowed: list[float]
    order: list[tuple[int, int]]
    stuck: dict[int, int]


def no_durations(dependencies: Dependencies) -> Durations:
    """Zero seconds for everything: only the order of the instructions is left."""
    return Durations(
        instruction=[[0.0] * len(row) for row in dependencies.kind],
        message=[0.0] * len(dependencies.messages),
        started=[[(1.0, 0.0)]] * len(dependencies.started),
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
        # Per rank, until when its reductions make its computes slower, and the collectives that
        # start inside its next one.
        self._slow_until = [0.0] * num_ranks
        self._starting: list[list[int]] = [[] for _ in range(num_ranks)]
        self._slowed = [0.0] * num_ranks
        self._starts = [0] * len(dependencies.started)
        self._parts_at: list[Sequence[float]] = [()] * len(dependencies.started)
        self._over_at = [_NEVER] * len(dependencies.started)
        # Per communicator, the end of its last collective.
        self._free: defaultdict[int, float] = defaultdict(float)

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
            slowed=self._slowed,
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
        flow, starting = self._flow, self._starting[rank]
        stop = len(kinds)
        while position < stop:
            kind, arg = kinds[position], args[position]
            start[position] = end[position] = now
            if kind == SEND:
                flow(arg, now)
            elif kind == POST:
                self._posted[arg] = (rank, position)
            elif kind == START:
                self._come(arg, (now,))
            elif kind == START_INSIDE:
                starting.append(arg)
            elif kind in (ALONE, GROUP):
                begins = self._inputs_at(rank, now, inputs.get(position, ()))
                if begins is None:
                    break
                if kind == GROUP:
                    self._position[rank], self._clock[rank] = position, begins
                    self._meet(rank, arg)
                    return
                start[position] = begins
                if starting or begins < self._slow_until[rank]:
                    now = self._compute(rank, begins, seconds[position])
                else:
                    now = begins + seconds[position]
                end[position] = now
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

    def _compute(self, rank: int, begins: float, seconds: float) -> float:
        """The end of a compute; the collectives that start inside it begin as it goes on."""
        slow_until = self._slow_until[rank]
        if begins >= slow_until and not self._starting[rank]:
            return begins + seconds
        now, done = begins, 0.0
        for start in self._starting[rank]:
            ready: list[float] = []
            for share, part_s in self._durations.started[start]:
                now = self._beside(now, max(share * seconds - done, 0.0), slow_until)
                done = max(share * seconds, done)
                ready.append(now)
                slow_until = max(slow_until, now) + part_s
            self._come(start, ready)
        self._starting[rank].clear()
        self._slow_until[rank] = slow_until
        end = self._beside(now, seconds - done, slow_until)
        self._slowed[rank] += end - begins - seconds
        return end

    def _beside(self, now: float, seconds: float, slow_until: float) -> float:
        """The end of ``seconds`` of compute that are slower until some time."""
        slow, slowdown = slow_until - now, self._durations.slowdown
        if slow <= 0.0:
            return now + seconds
        if seconds * slowdown <= slow:
            return now + seconds * slowdown
        return slow_until + seconds - slow / slowdown

    def _come(self, start: int, ready: Sequence[float]) -> None:
        """A rank has its parts of a collective at these times; each begins when all ranks do."""
        self._starts[start] += 1
        known = self._parts_at[start]
        self._parts_at[start] = [*map(max, known, ready)] if known else ready
        if self._starts[start] == self._dependencies.started_size[start]:
            self._carry(start)

    def _carry(self, start: int) -> None:
        now = self._free[self._dependencies.channel[start]]
        for ready, (_, seconds) in zip(
            self._parts_at[start], self._durations.started[start], strict=True
        ):
            now = max(now, ready) + seconds
        self._end_collective(start, now)

    def _end_collective(self, start: int, when: float) -> None:
        self._over_at[start] = self._free[self._dependencies.channel[start]] = when
        for group in self._dependencies.started_groups[start]:
            self._try_group(group)

    def _meet(self, rank: int, group: int) -> None:
        self._arrived[group].append(rank)
        self._try_group(group)

    def _try_group(self, group: int) -> None:
        """Start a group instruction if its ranks are there and what it waits for is over."""
        ranks, start = self._arrived[group], self._dependencies.gate[group]
        if len(ranks) < self._dependencies.group_size[group]:
            return
        begins = max(self._clock[rank] for rank in ranks)
        if start >= 0:
            over = self._over_at[start]
            if over < 0:
                return
            begins = max(begins, over)
            # Until its last part can begin, a rank waits for others.
            ready = self._parts_at[start][-1]
            for rank in ranks:
                self._exposed[rank] += max(0.0, over - max(self._clock[rank], ready))
        for rank in ranks:
            self._start[rank][self._position[rank]] = begins
        self._run_group(group, begins)

    def _run_group(self, group: int, begins: float) -> None:
        ranks, self._arrived[group] = self._arrived[group], []
        reduces = self._dependencies.reduction[group] >= 0
        for rank in ranks:
            seconds = self._durations.instruction[rank][self._position[rank]]
            end = begins + seconds if reduces else self._compute(rank, begins, seconds)
            self._end_on(rank, end)

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
        # Keys of transfers: messages, then started collectives, then groups.
        self._first_started = len(dependencies.messages)
        self._first_group = self._first_started + len(dependencies.started)
        # Per busy link and per busy communicator, the transfers that wait for it.
        self._links: dict[int, deque[int]] = {}
        self._channels: dict[int, deque[int]] = {}
        self._parts_over = [0] * len(dependencies.started)
        self._alone_until: dict[int, float] = {}

    def _run_ready(self) -> None:
        super()._run_ready()
        while (over := self._network.advance()) is not None:
            when, keys = over
            for key in keys:
                self._over(key, when)
            super()._run_ready()

    def _over(self, key: int, when: float) -> None:
        if key < self._first_started:
            self._arrive(key, when)
            _next(self._links, self._dependencies.link[key], self._send)
        elif key < self._first_group:
            self._end_part(key - self._first_started, when)
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

    def _carry(self, start: int) -> None:
        if self._shared.started[start] is None:
            super()._carry(start)
        else:
            _queue(self._channels, self._dependencies.channel[start], start, self._send_part)

    def _send_part(self, start: int) -> None:
        part = self._parts_over[start]
        free = self._free[self._dependencies.channel[start]]
        begins = max(self._parts_at[start][part], free)
        seconds = self._durations.started[start][part][1]
        self._add(self._first_started + start, self._shared.started[start], begins, seconds)

    def _end_part(self, start: int, when: float) -> None:
        channel = self._dependencies.channel[start]
        self._free[channel] = when
        self._parts_over[start] += 1
        if self._parts_over[start] < len(self._parts_at[start]):
            self._send_part(start)
            return
        self._end_collective(start, when)
        _next(self._channels, channel, self._send_part)

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
    """Begin a transfer, or queue it until its link or communicator (its lane) is free."""
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
