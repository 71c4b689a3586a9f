"""Run a program's instructions against clocks: when each starts and ends, or where it sticks.

Sends return at once and a link carries the messages of one pair of ranks one after another;
so does a loss with the gathers of its sync batches. A compute waits for the receives posted
for it; a gang (the compute of a tensor parallel group, COUNT, REDUCE, SYNC_WAIT) starts when
its last rank is there. All of this waits for the latest of some times, so the result does
not depend on the order in which ranks are visited and no event queue is needed.

Where transfers share the network interfaces of nodes (:mod:`mmplan.program.network`) the
order matters. Ranks then run as far as they get without the transfers under way; when all
of them wait, nothing can be sent any more before the next transfer is over, and time goes
on to that.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmplan.program.dependencies import ALONE, GANG, POST, SEND, START, Wiring
from mmplan.program.network import Network, Traffic

_NEVER = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What a wiring's transfers have on nodes' interfaces; None where they use none.

    Attributes:
        message: per message.
        gather: per sync.
        gang: per gang.
    """

    message: Sequence[Traffic | None]
    gather: Sequence[Traffic | None]
    gang: Sequence[Traffic | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of everything in a wiring, each as if it had the network to itself.

    Attributes:
        instruction: ``[rank][position]``; only computes and gangs are read.
        message: per message.
        gather: per sync, from its last start to the features' arrival everywhere.
        shared: what takes longer where others use the same interfaces; None where none do.
    """

    instruction: Sequence[Sequence[float]]
    message: Sequence[float]
    gather: Sequence[float]
    shared: Shared | None = None


@dataclass(slots=True, kw_only=True)
class Clocks:
    """When everything happened.

    Attributes:
        start: ``[rank][position]``, seconds; 0 where never reached.
        end: likewise. A receive ends when its message is there.
        exposed: per rank, seconds waited for data that were on their way, and seconds that
            its reductions took longer because others used the network.
        order: (rank, position) in an order in which all can happen.
        stuck: per rank, the position that it could not pass; only ranks that stick.
    """

    start: list[list[float]]
    end: list[list[float]]
    exposed: list[float]
    order: list[tuple[int, int]]
    stuck: dict[int, int]


def no_durations(wiring: Wiring) -> Durations:
    """Everything takes no time: what is left is the order."""
    return Durations(
        instruction=[[0.0] * len(row) for row in wiring.kind],
        message=[0.0] * len(wiring.messages),
        gather=[0.0] * len(wiring.syncs),
    )


def replay(wiring: Wiring, durations: Durations) -> Clocks:
    """Run every rank as far as it gets."""
    if durations.shared is None:
        return _Replay(wiring, durations).run()
    return _SharedReplay(wiring, durations, durations.shared).run()


class _Replay:
    def __init__(self, wiring: Wiring, durations: Durations) -> None:
        num_ranks, num_messages = len(wiring.kind), len(wiring.messages)
        self._wiring = wiring
        self._durations = durations
        self._start = [[0.0] * len(row) for row in wiring.kind]
        self._end = [[0.0] * len(row) for row in wiring.kind]
        self._order: list[tuple[int, int]] = []
        self._clock = [0.0] * num_ranks
        self._position = [0] * num_ranks
        self._exposed = [0.0] * num_ranks
        self._ready = list(range(num_ranks - 1, -1, -1))
        self._sent = [_NEVER] * num_messages
        self._arrival = [_NEVER] * num_messages
        self._waiting = [-1] * num_messages
        self._posted: list[tuple[int, int]] = [(-1, -1)] * num_messages
        self._link_free = [0.0] * wiring.num_links
        self._arrived: list[list[int]] = [[] for _ in wiring.gang_size]
        self._starts = [0] * len(wiring.syncs)
        self._started = [0.0] * len(wiring.syncs)
        self._gathered = [_NEVER] * len(wiring.syncs)
        # Per loss, when its last gather was over.
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
                if position < len(self._wiring.kind[rank])
            },
        )

    def _run_ready(self) -> None:
        while self._ready:
            self._run_rank(self._ready.pop())

    def _run_rank(self, rank: int) -> None:
        """Advance one rank until it has to wait. The hot loop: locals, few calls."""
        wiring = self._wiring
        kinds, args, needs = wiring.kind[rank], wiring.arg[rank], wiring.needs[rank]
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
            elif kind in (ALONE, GANG):
                begins = self._inputs_at(rank, now, needs.get(position, ()))
                if begins is None:
                    break
                if kind == GANG:
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
        free = self._link_free[self._wiring.link[message]]
        leaves = free if free > now else now
        self._arrive(message, leaves + self._durations.message[message])

    def _arrive(self, message: int, when: float) -> None:
        self._arrival[message] = self._link_free[self._wiring.link[message]] = when
        rank = self._waiting[message]
        if rank >= 0:
            self._ready.append(rank)
            self._waiting[message] = -1

    def _inputs_at(self, rank: int, now: float, needs: tuple[int, ...]) -> float | None:
        """When the messages are there, at the earliest now; None when one is not known yet."""
        latest, last = now, -1
        for message in needs:
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
        if self._starts[sync] == self._wiring.sync_size[sync]:
            self._gather(sync)

    def _gather(self, sync: int) -> None:
        """Gather the features of a sync that all its ranks have started."""
        begins = max(self._started[sync], self._channel_free[self._wiring.syncs[sync][0]])
        self._end_gather(sync, begins + self._durations.gather[sync])

    def _end_gather(self, sync: int, when: float) -> None:
        self._gathered[sync] = self._channel_free[self._wiring.syncs[sync][0]] = when
        gang = self._wiring.sync_gang[sync]
        if gang >= 0:
            self._try_gang(gang)

    def _meet(self, rank: int, gang: int) -> None:
        self._arrived[gang].append(rank)
        self._try_gang(gang)

    def _try_gang(self, gang: int) -> None:
        """Let a gang happen if all its ranks, and the gather it waits for, are there."""
        ranks, sync = self._arrived[gang], self._wiring.gate[gang]
        if len(ranks) < self._wiring.gang_size[gang]:
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
        self._run_gang(gang, begins)

    def _run_gang(self, gang: int, begins: float) -> None:
        seconds = self._durations.instruction
        for rank in self._arrived[gang]:
            self._end_on(rank, begins + seconds[rank][self._position[rank]])
        self._arrived[gang] = []

    def _end_on(self, rank: int, when: float) -> None:
        """End a gang's instruction on one rank."""
        position = self._position[rank]
        self._end[rank][position] = self._clock[rank] = when
        self._position[rank] = position + 1
        self._order.append((rank, position))
        self._ready.append(rank)


class _SharedReplay(_Replay):
    """Transfers that use interfaces take their latency first, then what is shared out."""

    def __init__(self, wiring: Wiring, durations: Durations, shared: Shared) -> None:
        super().__init__(wiring, durations)
        self._shared = shared
        self._network = Network()
        # Keys of transfers: messages, then gathers, then gangs.
        self._first_gather = len(wiring.messages)
        self._first_gang = self._first_gather + len(wiring.syncs)
        # Of links and losses that carry something, what they carry next.
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
            _next(self._links, self._wiring.link[key], self._send)
        elif key < self._first_gang:
            sync = key - self._first_gather
            self._end_gather(sync, when)
            _next(self._channels, self._wiring.syncs[sync][0], self._send_features)
        else:
            gang = key - self._first_gang
            longer = max(0.0, when - self._alone_until.pop(gang))
            for rank in self._arrived[gang]:
                self._exposed[rank] += longer
                self._end_on(rank, when)
            self._arrived[gang] = []

    def _flow(self, message: int, now: float) -> None:
        if self._shared.message[message] is None:
            super()._flow(message, now)
        else:
            self._sent[message] = now
            _queue(self._links, self._wiring.link[message], message, self._send)

    def _send(self, message: int) -> None:
        leaves = max(self._sent[message], self._link_free[self._wiring.link[message]])
        seconds = self._durations.message[message]
        self._add(message, self._shared.message[message], leaves, seconds)

    def _gather(self, sync: int) -> None:
        if self._shared.gather[sync] is None:
            super()._gather(sync)
        else:
            _queue(self._channels, self._wiring.syncs[sync][0], sync, self._send_features)

    def _send_features(self, sync: int) -> None:
        begins = max(self._started[sync], self._channel_free[self._wiring.syncs[sync][0]])
        seconds = self._durations.gather[sync]
        self._add(self._first_gather + sync, self._shared.gather[sync], begins, seconds)

    def _run_gang(self, gang: int, begins: float) -> None:
        traffic = self._shared.gang[gang]
        if traffic is None:
            super()._run_gang(gang, begins)
            return
        rank = self._arrived[gang][0]
        seconds = self._durations.instruction[rank][self._position[rank]]
        self._alone_until[gang] = begins + seconds
        self._add(self._first_gang + gang, traffic, begins, seconds)

    def _add(self, key: int, traffic: Traffic | None, begins: float, seconds: float) -> None:
        """Latency first, and whatever else does not need the interfaces; then the transfer."""
        if traffic is not None:
            self._network.add(begins + max(0.0, seconds - traffic.seconds), traffic, key)


def _queue(
    lanes: dict[int, deque[int]], lane: int, item: int, begin: Callable[[int], None]
) -> None:
    """Begin a transfer, or let it wait until its lane is free."""
    waiting = lanes.get(lane)
    if waiting is not None:
        waiting.append(item)
        return
    lanes[lane] = deque()
    begin(item)


def _next(lanes: dict[int, deque[int]], lane: int, begin: Callable[[int], None]) -> None:
    """A lane is free: begin what waits for it."""
    if lanes[lane]:
        begin(lanes[lane].popleft())
    else:
        del lanes[lane]
