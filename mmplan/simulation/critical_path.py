"""The chain of waits that ends a simulated step: what is not on it makes the step no shorter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from functools import cache

from mmplan.program.instructions import Collective, Compute, Message, Op, Sync
from mmplan.program.model import BlockReduction
from mmplan.simulation.step import Simulation

# Times within this share of the step are equal but for rounding.
_SAME = 1e-9
# What only begins something, or is over at once.
_PASSING = (Op.SYNC_START, Op.REDUCE_START, Op.STEP)

Place = tuple[int, int]
"""Rank and position of an instruction."""


def critical_modules(simulation: Simulation) -> frozenset[tuple[str, str]]:
    """(task, module) of all that the end of a step waits for.

    Where other modules alone run otherwise, on their ranks, the step is no shorter, unless they
    leave more of the network to what it waits for.
    """
    program = simulation.program
    found: set[tuple[str, str]] = set()
    for rank, position in critical_path(simulation):
        item = program.instructions[rank][position]
        if isinstance(item, Compute):
            stage = program.stages[item.stage]
            found.add((stage.task, stage.module))
        elif isinstance(item, Collective) and item.op is Op.REDUCE:
            reduction = program.reductions[item.index]
            if isinstance(reduction, BlockReduction):
                stages = (s for s in program.stages if s.owner == reduction.owner)
                found.update((s.task, s.module) for s in stages)
    return frozenset(found)


def seconds_on_path(simulation: Simulation) -> dict[str, float]:
    """Seconds of each module's computes on the critical path, most first."""
    program, found = simulation.program, defaultdict[str, float](float)
    for rank, position in critical_path(simulation):
        item = program.instructions[rank][position]
        if isinstance(item, Compute):
            start_s = simulation.clocks.start[rank][position]
            own_s = simulation.clocks.end[rank][position] - start_s
            found[program.stages[item.stage].module] += own_s
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def critical_path(simulation: Simulation) -> list[Place]:
    """Computes, waits for losses and sums, each of which waits for the next, from the last on."""
    chain = _WaitChain(simulation)
    place, found = chain.last(), list[Place]()
    while place is not None:
        found.append(place)
        place = chain.cause(place)
    return found


class _WaitChain:
    """What instructions of a simulated step waited for."""

    def __init__(self, simulation: Simulation) -> None:
        self._program, self._clocks = simulation.program, simulation.clocks
        self._rows = simulation.program.instructions
        self._same_s = _SAME * simulation.iteration_s
        self._index = cache(self._index_of)

    def last(self) -> Place | None:
        """The end of the step."""
        ends = [(row[-1], rank) for rank, row in enumerate(self._clocks.end) if row]
        rank = max(ends)[1] if ends else 0
        return self._before(rank, len(self._rows[rank]))

    def cause(self, place: Place) -> Place | None:
        """What an instruction waited for: of all that it needs what ended last, about."""
        rank, position = place
        item, start_s = self._rows[rank][position], self._clocks.start[rank][position]
        found = [own for own in self._waited(place) if own[1] is not None]
        if not isinstance(item, Compute) and (not found or found[0][0] < start_s - self._same_s):
            # A collective begins when its last rank is there, and may wait for those before it.
            others = (self._before(*other) for other in self._met(rank, item))
            found += [(self._clocks.end[r][p], (r, p)) for r, p in filter(None, others)]
        # The rank's own comes first of equals.
        return max(found, key=lambda own: min(own[0], start_s), default=(0.0, None))[1]

    def _waited(self, place: Place) -> Iterator[tuple[float, Place | None]]:
        """The ends of what comes before on all ranks that meet, and arrivals of messages."""
        rank, position = place
        item = self._rows[rank][position]
        for own in (place, *(self._met(rank, item) if isinstance(item, Compute) else ())):
            before = self._before(*own)
            if before is not None:
                yield self._clocks.end[before[0]][before[1]], before
            if isinstance(item, Compute) and item.op is not Op.WEIGHT:
                for receive in self._index(own[0]).get((item.stage, item.is_backward, item.mb), ()):
                    yield self._clocks.end[own[0]][receive], self._sent(own[0], receive)

    def _sent(self, rank: int, receive: int) -> Place | None:
        """What came before the send of a message."""
        item = self._rows[rank][receive]
        if not isinstance(item, Message):
            return None
        positions = self._index(item.peer).get(item.key(rank), ())
        return self._before(item.peer, positions[0]) if positions else None

    def _met(self, rank: int, item: object) -> list[Place]:
        """The same instruction, or the start of the collective, on all of its ranks."""
        program = self._program
        ranks: tuple[int, ...] = ()
        if isinstance(item, Compute):
            stage = program.stages[item.stage]
            ranks = stage.meeting(item.op, stage.place(rank)[0])
        elif isinstance(item, Sync):
            ranks = program.cross_sample(item.loss).ranks
            item = Sync(Op.SYNC_START, item.loss, item.batch)
        elif isinstance(item, Collective):
            is_count = item.op is Op.COUNT
            ranks = (program.losses if is_count else program.reductions)[item.index].ranks
        return [(r, p) for r in ranks if r != rank for p in self._index(r).get(item, ())]

    def _before(self, rank: int, position: int) -> Place | None:
        """The last compute or wait of a rank before a position."""
        row = self._rows[rank]
        for own in range(position - 1, -1, -1):
            item = row[own]
            if not isinstance(item, Message) and item.op not in _PASSING:
                return rank, own
        return None

    def _index_of(self, rank: int) -> dict[Hashable, list[int]]:
        """By what others know of them, positions of instructions; receives by their compute."""
        found: dict[Hashable, list[int]] = {}
        for position, item in enumerate(self._rows[rank]):
            key: Hashable = item
            if isinstance(item, Message):
                is_back = item.op is Op.RECV_B
                key = item.key(rank) if item.is_send else (item.stage, is_back, item.mb)
            found.setdefault(key, []).append(position)
        return found
