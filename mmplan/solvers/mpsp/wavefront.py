"""Spindle's scheduler as printed (arXiv:2409.03365): bi-point slices, then waves with one end.

Level by level: slices are proposed that fill the devices (the largest count first, then the
longest, one slice of a chain at a time), devices left over go to the chains with most time left
(to their next valid count), and all are cut to the span of the shortest, in whole blocks and at
least one each. A wave ends when its last slice does. Equal neighbours are merged at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from mmplan.solvers.mpsp.bounds import paper_value
from mmplan.solvers.mpsp.initial_schedules import bi_point
from mmplan.solvers.mpsp.instance import Chain, Instance
from mmplan.solvers.mpsp.list_schedule import ChainSchedule, SchedulePiece

# Times that differ by less than this share are equal.
_SAME = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Wavefront:
    """The waves, as a draft whose urgencies are their numbers.

    Attributes:
        seconds: with every wave's end a barrier, forward and backward together.
    """

    draft: ChainSchedule
    seconds: float
    waves: int


@dataclass(slots=True)
class _Left:
    """What is left of a chain: its slices, and their blocks in order."""

    chain: Chain
    slices: list[tuple[int, int]]
    """Index of the count, blocks."""
    done: int = 0

    def seconds(self, k: int, blocks: int) -> float:
        return float(self.chain.both_s[k, self.done : self.done + blocks].sum())

    def left_s(self) -> float:
        return sum(self.seconds(k, blocks) for k, blocks in self.slices)


def wavefront(instance: Instance) -> Wavefront:
    """The schedule in waves."""
    pieces: list[list[SchedulePiece]] = [[] for _ in instance.chains]
    seconds, waves = 0.0, 0
    for level in range(instance.levels):
        members = instance.of_level(level)
        left = {m: _Left(instance.chains[m], _bi_point(instance, members, m)) for m in members}
        while any(own.slices for own in left.values()):
            longest = 0.0
            for m, k, blocks in _wave(left, instance.devices):
                own = left[m]
                longest = max(longest, own.seconds(k, blocks))
                _append(pieces[m], (k, own.done, own.done + blocks, float(waves)))
                _take(own, blocks)
            seconds += longest
            waves += 1
    return Wavefront(draft=ChainSchedule(pieces), seconds=seconds, waves=waves)


def _bi_point(instance: Instance, members: list[int], m: int) -> list[tuple[int, int]]:
    chains = [instance.chains[i] for i in members]
    span_s = paper_value(
        [c.counts for c in chains], [c.both_s.sum(axis=1) for c in chains], instance.devices
    )
    own = instance.chains[m]
    cut = bi_point(own.counts, own.both_s, span_s, hull=False, larger_first=True)
    return [(k, b - a) for k, a, b in cut]


def _wave(left: dict[int, _Left], devices: int) -> list[tuple[int, int, int]]:
    """(chain, count index, blocks) of the next wave."""
    offers = sorted(
        ((m, k, blocks) for m, own in left.items() for k, blocks in own.slices),
        key=lambda o: (-left[o[0]].chain.counts[o[1]], -left[o[0]].seconds(o[1], o[2])),
    )
    chosen: dict[int, tuple[int, int]] = {}
    free = devices
    for m, k, blocks in offers:
        count = left[m].chain.counts[k]
        if m not in chosen and count <= free:
            chosen[m] = k, blocks
            free -= count
    chosen = _extended(left, chosen, free)
    span_s = min(left[m].seconds(k, blocks) for m, (k, blocks) in chosen.items())
    return [(m, k, _fitting(left[m], k, blocks, span_s)) for m, (k, blocks) in chosen.items()]


def _extended(
    left: dict[int, _Left], chosen: dict[int, tuple[int, int]], free: int
) -> dict[int, tuple[int, int]]:
    """Leftover devices go to the chains with most time left, each to its next valid count."""
    grown = dict(chosen)
    for m in sorted(chosen, key=lambda m: -left[m].left_s()):
        k, blocks = grown[m]
        counts = left[m].chain.counts
        if k + 1 < len(counts) and counts[k + 1] - counts[k] <= free:
            free -= counts[k + 1] - counts[k]
            grown[m] = k + 1, blocks
    return grown


def _fitting(own: _Left, k: int, blocks: int, span_s: float) -> int:
    """Whole blocks that end within the span, at least one."""
    return max(
        (n for n in range(1, blocks + 1) if own.seconds(k, n) <= span_s * (1 + _SAME)), default=1
    )


def _take(own: _Left, blocks: int) -> None:
    """The blocks are done; they are taken off the slices from the first on."""
    own.done += blocks
    while blocks:
        k, first = own.slices[0]
        if first > blocks:
            own.slices[0] = k, first - blocks
            return
        own.slices.pop(0)
        blocks -= first


def _append(pieces: list[SchedulePiece], piece: SchedulePiece) -> None:
    if pieces and pieces[-1][0] == piece[0]:
        pieces[-1] = (piece[0], pieces[-1][1], piece[2], pieces[-1][3])
    else:
        pieces.append(piece)


def is_tiled(draft: ChainSchedule, instance: Instance) -> bool:
    """Whether every block of every chain is in exactly one piece, in order."""
    return all(
        own[0][1] == 0
        and own[-1][2] == chain.blocks
        and all(a[2] == b[1] for a, b in pairwise(own))
        and all(p[1] < p[2] for p in own)
        for own, chain in zip(draft.pieces, instance.chains, strict=True)
    )
