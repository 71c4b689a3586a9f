"""Post receives in the order in which their messages are sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

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
    sent: defaultdict[_Route, list[_Parcel]] = defaultdict(list)
    for rank, row in enumerate(rows):
        for item in row:
            if isinstance(item, Message) and item.is_send:
                sent[_route(rank, item)].append(_parcel(item))
    turn = {
        (route, parcel): n for route, parcels in sent.items() for n, parcel in enumerate(parcels)
    }
    return tuple(_match_row(rank, row, turn) for rank, row in enumerate(rows))


def _match_row(rank: int, row: Row, turn: dict[tuple[_Route, _Parcel], int]) -> Row:
    routes: defaultdict[_Route, list[tuple[int, int]]] = defaultdict(list)
    for position, item in enumerate(row):
        if isinstance(item, Message) and not item.is_send:
            route = _route(rank, item)
            routes[route].append((turn[route, _parcel(item)], position))
    # Sort key of each instruction; a moved receive stands just before its new place.
    keys = [(position, 1, 0) for position in range(len(row))]
    for receives in routes.values():
        latest = len(row)
        for n, position in sorted(receives, reverse=True):
            if position > latest:
                keys[position] = (latest, 0, n)
            latest = min(latest, position)
    return tuple(row[position] for position in sorted(range(len(row)), key=keys.__getitem__))


def _route(rank: int, item: Message) -> _Route:
    source, target = (rank, item.peer) if item.is_send else (item.peer, rank)
    return source, target, item.op in (Op.SEND_B, Op.RECV_B)


def _parcel(item: Message) -> _Parcel:
    return item.edge, item.start, item.stop
