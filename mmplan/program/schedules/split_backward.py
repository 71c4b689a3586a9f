"""Backwards in two parts: which stages split theirs, and when each ``W`` is due.

``I`` stands where ``B`` stood. A ``W`` may wait for a time in which its rank has nothing
else to do, but its micro-batch's activations wait with it: it is due before a forward
that would make its rank hold more than with whole backwards; or, where the schedule is
``even_in_flight``, more than the fullest rank of its unit does with them.

Source: ZB-H1 of Qi et al., arXiv:2401.10241, which is ``even_in_flight``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mmplan.program.instructions import Op, ReplicaCompute


@dataclass(slots=True)
class SplitSequence:
    """A sequence with its backwards in two parts.

    Attributes:
        items: the sequence, ``I`` in place of ``B``.
        due: each ``W`` with the forward that it must come before, None where there is none.
    """

    items: list[ReplicaCompute]
    due: list[tuple[ReplicaCompute, ReplicaCompute | None]] = field(
        default_factory=list[tuple[ReplicaCompute, ReplicaCompute | None]]
    )


@dataclass(frozen=True, slots=True)
class Room:
    """Most that a rank may hold of a sequence of computes at any time.

    Attributes:
        count: by stage, micro-batches; stages that are not in it are not limited.
        size: of all stages, in the unit of ``size_of``.
    """

    count: Mapping[int, int]
    size: int


def room_of(sequence: Sequence[ReplicaCompute], size_of: Callable[[ReplicaCompute], int]) -> Room:
    """What a sequence with whole backwards holds.

    Args:
        sequence: computes of one rank that follow each other.
        size_of: what a compute's micro-batch holds, in any unit.
    """
    held = _Held(sequence, size_of)
    for item in sequence:
        held.run(item)
    return Room(held.most, held.most_size)


def split_sequence(
    sequence: Sequence[ReplicaCompute],
    split: Container[int],
    size_of: Callable[[ReplicaCompute], int],
    room: Room,
) -> SplitSequence:
    """Split the backwards of some stages in a sequence of computes.

    Args:
        sequence: see :func:`room_of`.
        split: indices of the stages.
        size_of: likewise.
        room: at least that of the sequence.
    """
    held = _Held(sequence, size_of)
    waiting: deque[ReplicaCompute] = deque()
    result = SplitSequence([])
    for item in sequence:
        op, stage, d, mb = item
        if op is Op.BACKWARD and stage in split:
            result.items.append((Op.INPUT, stage, d, mb))
            waiting.append((Op.WEIGHT, stage, d, mb))
            continue
        # Without what waits, no more is held than with whole backwards.
        while op is Op.FORWARD and waiting and (lack := held.lacks(room, item)):
            own = [weights for weights in waiting if weights[1] == stage]
            first = own[0] if own and lack == "count" else waiting[0]
            waiting.remove(first)
            result.due.append((first, item))
            held.run(first)
        held.run(item)
        result.items.append(item)
    result.due += [(item, None) for item in waiting]
    return result


class _Held:
    """Micro-batches between their forward and the end of their backward.

    Args:
        sequence: what will run; stages without a backward in it hold nothing.
        size_of: see :func:`room_of`.
    """

    def __init__(
        self, sequence: Sequence[ReplicaCompute], size_of: Callable[[ReplicaCompute], int]
    ) -> None:
        self._size_of = size_of
        self._holding = {stage for op, stage, _, _ in sequence if op is Op.BACKWARD}
        self._count: Counter[int] = Counter()
        self._size = 0
        self.most: Counter[int] = Counter()
        self.most_size = 0

    def run(self, item: ReplicaCompute) -> None:
        """A compute has begun, or ended if it is no forward."""
        op, stage, _, _ = item
        if stage not in self._holding:
            return
        sign = 1 if op is Op.FORWARD else -1
        self._count[stage] += sign
        self._size += sign * self._size_of(item)
        self.most[stage] = max(self.most[stage], self._count[stage])
        self.most_size = max(self.most_size, self._size)

    def lacks(self, room: Room, forward: ReplicaCompute) -> Literal["count", "size"] | None:
        """What another forward would take too much of."""
        stage = forward[1]
        if stage not in self._holding:
            return None
        if self._count[stage] >= room.count.get(stage, self._count[stage] + 1):
            return "count"
        return "size" if self._size + self._size_of(forward) > room.size else None
