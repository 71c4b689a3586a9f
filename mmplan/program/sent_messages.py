"""How long a rank keeps what it sends: until it knows that the message has come.

A send is over once its rank takes a message that the receiver sent after the compute that took the
first one. No wait and no answer is added for it: on a GPU the stream has then passed the send, and
gloo, which never says that a send is over, need not be asked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from mmplan.program.instructions import Compute, Instruction, Message, MessageKey, Op
from mmplan.program.model import Program


def last_positions(program: Program, rank: int) -> dict[int, int]:
    """The position of each send of a rank, and of the instruction that shows that it is over.

    That is the first compute that waits for a proof, or the row's STEP. A faulty program may send
    what nobody receives: nothing but the STEP shows that it is over.
    """
    row = program.instructions[rank]
    taken = _taken(row, rank)
    by_peer: defaultdict[int, list[int]] = defaultdict(list)
    for position, item in enumerate(row):
        if isinstance(item, Message) and item.is_send and item.peer != rank:
            by_peer[item.peer].append(position)
    found: dict[int, int] = {}
    for peer, sends in by_peer.items():
        theirs = program.instructions[peer]
        consumed = _taken(theirs, peer)
        # What the peer sends here in its order, and the first compute that takes any from there.
        places: list[int] = []
        shown: list[int] = []
        for place, item in enumerate(theirs):
            if isinstance(item, Message) and item.is_send and item.peer == rank:
                places.append(place)
                shown.append(taken.get(item.key(peer), len(row) - 1))
        for n in reversed(range(len(shown) - 1)):
            shown[n] = min(shown[n], shown[n + 1])
        for position in sends:
            item = row[position]
            assert isinstance(item, Message)
            first = bisect_left(places, consumed.get(item.key(rank), len(theirs)))
            found[position] = shown[first] if first < len(shown) else len(row) - 1
    return found


def _taken(row: Sequence[Instruction], rank: int) -> dict[MessageKey, int]:
    """The position of the compute that takes each message that a rank receives."""
    found: dict[MessageKey, int] = {}
    waiting: defaultdict[tuple[int, bool, int], list[MessageKey]] = defaultdict(list)
    for position, item in enumerate(row):
        if isinstance(item, Message) and not item.is_send:
            waiting[item.stage, item.op is Op.RECV_B, item.mb].append(item.key(rank))
        elif isinstance(item, Compute) and item.op is not Op.WEIGHT:
            for key in waiting.pop((item.stage, item.is_backward, item.mb), ()):
                found[key] = position
    return found
