"""Post receives in the order in which their messages are sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from mmplan.program.instructions import Instruction, Message, Op

Row = tuple[Instruction, ...]
# (source rank, target rank, is backward)
_Route = tuple[int, int, bool]
# (edge, first sample, end of samples): unique on a route
_Parcel = tuple[int, int, int]


def match_receives(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Move receives ahead until each route's receives stand in the order of its sends.

    NCCL ignores tags: the n-th receive from a rank gets what that rank sends n-th. Orders
    differ where two stages of one rank feed two of another and work in another order
    (interleaved chunks). A receive only posts, so that moving it ahead cannot deadlock.
    """
    sent: defaultdict[_Route, dict[_Parcel, int]] = defaultdict(dict)
    for rank, row in enumerate(rows):
        for item in row:
            if isinstance(item, Message) and item.is_send:
                parcels = sent[rank, item.peer, item.op is Op.SEND_B]
                parcels[item.edge, item.start, item.stop] = len(parcels)
    return tuple(_match_row(rank, row, sent) for rank, row in enumerate(rows))


def _match_row(rank: int, row: Row, sent: Mapping[_Route, Mapping[_Parcel, int]]) -> Row:
    routes: defaultdict[_Route, list[tuple[int, int]]] = defaultdict(list)
    for position, item in enumerate(row):
        if isinstance(item, Message) and not item.is_send:
            route = item.peer, rank, item.op is Op.RECV_B
            turn = sent[route][item.edge, item.start, item.stop]
            routes[route].append((turn, position))
    # Sort key of each instruction; a moved receive stands just before its new place.
    keys: dict[int, tuple[int, int, int]] = {}
    for receives in routes.values():
        latest = len(row)
        for n, position in sorted(receives, reverse=True):
            if position > latest:
                keys[position] = (latest, 0, n)
            latest = min(latest, position)
    if not keys:
        return row
    order = sorted(range(len(row)), key=lambda position: keys.get(position, (position, 1, 0)))
    return tuple(row[position] for position in order)
