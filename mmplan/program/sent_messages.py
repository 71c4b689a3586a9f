"""The messages under way on a rank: what it sends is kept until it knows that it has come.

A send is over once its rank takes a message that the receiver sent after the compute that took the
first one. The ranks of a tensor-parallel group compute together, so a message of any of them will
do. No wait and no answer is added for it: on a GPU the stream has then passed the send, and gloo,
which never says that a send is over, need not be asked.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mmplan.program.instructions import Compute, Instruction, Message, MessageKey, Op
from mmplan.program.model import Program


class MessageSpan(NamedTuple):
    """A tensor that a rank keeps for a message, from one instruction to the end of another.

    A received one is let go once a compute has taken it. Of sends of one micro-batch's output, or
    of its gradients along one edge, one tensor is kept until the last is over.

    Attributes:
        message: one that the tensor is of.
        first: position of the first post.
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
        self._rows: dict[int, _RankMessages] = {}
        self._computes: dict[int, dict[Instruction, int]] = {}
        self._proofs: dict[tuple[int, int], _Proofs] = {}

    def last_positions(self, rank: int) -> dict[int, int]:
        """The position of each send of a rank, and of the instruction that shows that it is over.

        That is the first compute that waits for a proof, or the row's STEP. A faulty program may
        send what nobody receives: nothing but the STEP shows that it is over.
        """
        positions: dict[int, int] = {}
        for peer, sends in self._row(rank).sends.items():
            if peer != rank:
                positions.update(self._shown(rank, peer, sends))
        return positions

    def spans(self, rank: int) -> Iterator[MessageSpan]:
        """The tensors of a rank's messages to and from others."""
        row, shown = self._row(rank), self.last_positions(rank)
        for position, item, key in row.receives:
            if item.peer != rank:
                yield MessageSpan(item, position, row.taken.get(key, row.end))
        kept: dict[tuple[int, int, int], tuple[Message, int, int]] = {}
        sends = [send for peer, own in row.sends.items() if peer != rank for send in own]
        for position, item, _ in sends:
            tensor = item.stage, item.mb, -1 if item.op is Op.SEND_F else item.edge
            last, known = shown[position], kept.get(tensor)
            if known is None:
                kept[tensor] = item, position, last
            elif position < known[1] or last > known[2]:
                kept[tensor] = known[0], min(known[1], position), max(known[2], last)
        yield from itertools.starmap(MessageSpan, kept.values())

    def _shown(self, rank: int, peer: int, sends: Sequence[_Posted]) -> Iterator[tuple[int, int]]:
        """Positions of sends to a peer, and of the instructions that show that they are over."""
        last, taken = self._row(rank).end, self._row(peer).taken
        instructions = self._program.instructions[peer]
        # By stage that takes some.
        groups: dict[int, list[tuple[int, _Proofs]]] = {}
        for own, _, key in sends:
            end, position = last, taken.get(key)
            if position is not None:
                compute = instructions[position]
                assert isinstance(compute, Compute)
                if compute.stage not in groups:
                    groups[compute.stage] = self._proofs_of_group(rank, peer, compute.stage)
                for other, (places, shown) in groups[compute.stage]:
                    after = position if other == peer else self._computes_of(other)[compute]
                    first = bisect_left(places, after)
                    if first < len(shown) and shown[first] < end:
                        end = shown[first]
            yield own, end

    def _proofs_of_group(self, rank: int, peer: int, index: int) -> list[tuple[int, _Proofs]]:
        """Those of a peer's tensor-parallel group in a stage that send something to a rank."""
        stage = self._program.stages[index]
        group = stage.ranks[stage.place(peer)[0]]
        found = ((other, self._proofs_of(rank, other)) for other in group)
        return [(other, proofs) for other, proofs in found if proofs[0]]

    def _proofs_of(self, rank: int, peer: int) -> _Proofs:
        """What a peer sends to a rank."""
        found = self._proofs.get((rank, peer))
        if found is None:
            row, sends = self._row(rank), self._row(peer).sends.get(rank, ())
            shown = [row.taken.get(key, row.end) for _, _, key in sends]
            for n in reversed(range(len(shown) - 1)):
                shown[n] = min(shown[n], shown[n + 1])
            found = self._proofs[rank, peer] = [place for place, _, _ in sends], shown
        return found

    def _computes_of(self, rank: int) -> dict[Instruction, int]:
        """The positions of a rank's computes."""
        if rank not in self._computes:
            row = enumerate(self._program.instructions[rank])
            self._computes[rank] = {item: n for n, item in row if isinstance(item, Compute)}
        return self._computes[rank]

    def _row(self, rank: int) -> _RankMessages:
        if rank not in self._rows:
            self._rows[rank] = _RankMessages(self._program.instructions[rank], rank)
        return self._rows[rank]


# Position, message and key.
_Posted = tuple[int, Message, MessageKey]


class _RankMessages:
    """The messages of one rank.

    Attributes:
        end: the last position.
        receives: in order.
        sends: by peer, in order.
        taken: position of the compute that takes each message that the rank receives.
    """

    def __init__(self, row: Sequence[Instruction], rank: int) -> None:
        self.end = len(row) - 1
        self.receives: list[_Posted] = []
        self.sends: defaultdict[int, list[_Posted]] = defaultdict(list)
        self.taken: dict[MessageKey, int] = {}
        waiting: defaultdict[tuple[int, bool, int], list[MessageKey]] = defaultdict(list)
        for position, item in enumerate(row):
            if isinstance(item, Message):
                key = item.key(rank)
                if item.is_send:
                    self.sends[item.peer].append((position, item, key))
                else:
                    self.receives.append((position, item, key))
                    waiting[item.stage, item.op is Op.RECV_B, item.mb].append(key)
            elif isinstance(item, Compute) and item.op is not Op.WEIGHT:
                for key in waiting.pop((item.stage, item.is_backward, item.mb), ()):
                    self.taken[key] = position
