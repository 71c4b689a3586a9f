"""Run a program's instructions against clocks: when each starts and ends, or where it sticks.

Sends return at once and a link carries the messages of one pair of ranks one after
another; a compute waits for the receives posted for it; a gang (the compute of a tensor
parallel group, COUNT, REDUCE, SYNC_WAIT) starts when its last rank is there. All waiting is
for the latest of some times, so the result does not depend on the order in which ranks are
visited and no event queue is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmplan.program.wiring import ALONE, GANG, POST, SEND, START, Wiring

_NEVER = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of everything in a wiring.

    Attributes:
        instruction: ``[rank][position]``; only computes and gangs are read.
        message: per message.
        gather: per sync, from its last start to the features' arrival everywhere.
    """

    instruction: Sequence[Sequence[float]]
    message: Sequence[float]
    gather: Sequence[float]


@dataclass(slots=True, kw_only=True)
class Clocks:
    """When everything happened.

    Attributes:
        start: ``[rank][position]``, seconds; 0 where never reached.
        end: likewise. A receive ends when its message is there.
        exposed: per rank, seconds waited for data that were on their way.
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
    return _Replay(wiring, durations).run()


class _Replay:
    def __init__(self, wiring: Wiring, durations: Durations) -> None:
        num_ranks = len(wiring.kind)
        self._wiring = wiring
        self._durations = durations
        self._start = [[0.0] * len(row) for row in wiring.kind]
        self._end = [[0.0] * len(row) for row in wiring.kind]
        self._order: list[tuple[int, int]] = []
        self._clock = [0.0] * num_ranks
        self._position = [0] * num_ranks
        self._exposed = [0.0] * num_ranks
        self._ready = list(range(num_ranks - 1, -1, -1))
        self._sent = [_NEVER] * len(wiring.messages)
        self._arrival = [_NEVER] * len(wiring.messages)
        self._waiting = [-1] * len(wiring.messages)
        self._posted: list[tuple[int, int]] = [(-1, -1)] * len(wiring.messages)
        self._link_free = [0.0] * wiring.num_links
        self._arrived: list[list[int]] = [[] for _ in wiring.gang_size]
        self._starts = [0] * len(wiring.syncs)
        self._started = [0.0] * len(wiring.syncs)

    def run(self) -> Clocks:
        while self._ready:
            self._run_rank(self._ready.pop())
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

    def _run_rank(self, rank: int) -> None:
        """Advance one rank until it has to wait. The hot loop: locals, no calls for messages."""
        wiring = self._wiring
        kinds, args, needs = wiring.kind[rank], wiring.arg[rank], wiring.needs[rank]
        start, end = self._start[rank], self._end[rank]
        seconds, message_s = self._durations.instruction[rank], self._durations.message
        position, now = self._position[rank], self._clock[rank]
        while position < len(kinds):
            kind, arg = kinds[position], args[position]
            start[position] = end[position] = now
            if kind == SEND:
                pair = wiring.link[arg]
                self._sent[arg] = now
                leaves = max(now, self._link_free[pair])
                self._arrival[arg] = self._link_free[pair] = leaves + message_s[arg]
                if self._waiting[arg] >= 0:
                    self._ready.append(self._waiting[arg])
                    self._waiting[arg] = -1
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

    def _inputs_at(self, rank: int, now: float, needs: tuple[int, ...]) -> float | None:
        """When the messages are there, at the earliest now; None when one was never sent."""
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
        gang = self._wiring.sync_gang[sync]
        if gang >= 0 and self._starts[sync] == self._wiring.sync_size[sync]:
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
            if self._starts[sync] < self._wiring.sync_size[sync]:
                return
            started = self._started[sync]
            gathered = started + self._durations.gather[sync]
            begins = max(begins, gathered)
            for rank in ranks:
                self._exposed[rank] += max(0.0, gathered - max(self._clock[rank], started))
        for rank in ranks:
            position = self._position[rank]
            self._start[rank][position] = begins
            ends = begins + self._durations.instruction[rank][position]
            self._end[rank][position] = self._clock[rank] = ends
            self._position[rank] = position + 1
            self._order.append((rank, position))
            self._ready.append(rank)
        self._arrived[gang] = []
