"""The messages under way on a rank: what it sends is kept until it knows that it has come.

A send is over once its rank takes a message that the receiver sent after the compute that took the
first one. The ranks of a tensor-parallel group compute together, so a message of any of them will
do. No wait and no answer is added for it: on a GPU the stream has then passed the send, and gloo,
which never says that a send is over, need not be asked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mmplan.program.instructions import Compute, Instruction, Message, MessageKey, Op
from mmplan.program.model import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSpan:
    """A tensor that a rank keeps for a message, from one instruction to the end of another.

    A received one is let go once a compute has taken it. Of sends of one micro-batch's output, or
    of its gradients along one edge, one tensor is kept until the last is over.

    Attributes:
        message: the first that the tensor is of.
        first: position of its post.
        last: position of the instruction with whose end it is let go.
    """

    message: Message
    first: int
    last: int


# The positions of sends from one rank to another, and of the first compute that takes any from
# there on.
_Proofs = tuple[list[int], list[int]]


class MessagesUnderWay:
    """The messages under way on the ranks of a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._taken: dict[int, dict[MessageKey, int]] = {}
        self._computes: dict[int, dict[Instruction, int]] = {}
        self._proofs: dict[tuple[int, int], _Proofs] = {}

    def last_positions(self, rank: int) -> dict[int, int]:
        """The position of each send of a rank, and of the instruction that shows that it is over.

        That is the first compute that waits for a proof, or the row's STEP. A faulty program may
        send what nobody receives: nothing but the STEP shows that it is over.
        """
        found: dict[int, int] = {}
        for position, item in enumerate(self._program.instructions[rank]):
            if isinstance(item, Message) and item.is_send and item.peer != rank:
                found[position] = self._shown(rank, item)
        return found

    def spans(self, rank: int) -> Iterator[MessageSpan]:
        """The tensors of a rank's messages to and from others."""
        row = self._program.instructions[rank]
        shown, taken = self.last_positions(rank), self._taken_by(rank)
        kept: dict[tuple[int, int, int], MessageSpan] = {}
        for position, item in enumerate(row):
            if not isinstance(item, Message) or item.peer == rank:
                continue
            if not item.is_send:
                last = taken.get(item.key(rank), len(row) - 1)
                yield MessageSpan(message=item, first=position, last=last)
                continue
            key = item.stage, item.mb, -1 if item.op is Op.SEND_F else item.edge
            same = kept.get(key)
            kept[key] = MessageSpan(
                message=item if same is None else same.message,
                first=position if same is None else same.first,
                last=shown[position] if same is None else max(same.last, shown[position]),
            )
        yield from kept.values()

    def _shown(self, rank: int, item: Message) -> int:
        """The position of the instruction that shows that a send is over."""
        program, end = self._program, len(self._program.instructions[rank]) - 1
        position = self._taken_by(item.peer).get(item.key(rank))
        if position is None:
            return end
        compute = program.instructions[item.peer][position]
        assert isinstance(compute, Compute)
        stage = program.stages[compute.stage]
        for other in stage.ranks[stage.place(item.peer)[0]]:
            places, shown = self._proofs_of(rank, other)
            if places:
                after = position if other == item.peer else self._computes_of(other)[compute]
                first = bisect_left(places, after)
                end = min(end, shown[first]) if first < len(shown) else end
        return end

    def _proofs_of(self, rank: int, peer: int) -> _Proofs:
        """What a peer sends to a rank."""
        if (rank, peer) not in self._proofs:
            last, taken = len(self._program.instructions[rank]) - 1, self._taken_by(rank)
            places: list[int] = []
            shown: list[int] = []
            for place, item in enumerate(self._program.instructions[peer]):
                if isinstance(item, Message) and item.is_send and item.peer == rank:
                    places.append(place)
                    shown.append(taken.get(item.key(peer), last))
            for n in reversed(range(len(shown) - 1)):
                shown[n] = min(shown[n], shown[n + 1])
            self._proofs[rank, peer] = places, shown
        return self._proofs[rank, peer]

    def _computes_of(self, rank: int) -> dict[Instruction, int]:
        """The positions of a rank's computes."""
        if rank not in self._computes:
            row = enumerate(self._program.instructions[rank])
            self._computes[rank] = {item: n for n, item in row if isinstance(item, Compute)}
        return self._computes[rank]

    def _taken_by(self, rank: int) -> dict[MessageKey, int]:
        """The position of the compute that takes each message that a rank receives."""
        if rank not in self._taken:
            self._taken[rank] = _taken(self._program.instructions[rank], rank)
        return self._taken[rank]


def _taken(row: Sequence[Instruction], rank: int) -> dict[MessageKey, int]:
    found: dict[MessageKey, int] = {}
    waiting: defaultdict[tuple[int, bool, int], list[MessageKey]] = defaultdict(list)
    for position, item in enumerate(row):
        if isinstance(item, Message) and not item.is_send:
            waiting[item.stage, item.op is Op.RECV_B, item.mb].append(item.key(rank))
        elif isinstance(item, Compute) and item.op is not Op.WEIGHT:
            for key in waiting.pop((item.stage, item.is_backward, item.mb), ()):
                found[key] = position
    return found
