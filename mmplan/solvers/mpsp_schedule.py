"""Schedules of slices: list scheduling, and the slices to start from.

A draft says for each chain how its blocks are cut, on which of its counts each slice runs and
how urgent it is. Decoding starts at every instant the most urgent slices that are ready and
fit; nothing waits for a wave to end. The backward runs the same slices in mirror image: what
ended last starts first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from mmplan.solvers.mpsp_bounds import Column
from mmplan.solvers.mpsp_model import Chain, Floats, Instance, Part, in_proportion

Piece = tuple[int, int, int, float]
"""Index of the count, first block, block after the last, urgency (less is more urgent)."""
Pieces = list[list[Piece]]
# Times that differ by less than this share are one instant.
_SAME = 1e-12
# What a piece more costs, as a share of the time: little, and more than nothing.
_PIECE = 1e-5
# Instants at which chains side by side are balanced.
_BINS = 64
# Weight of the device-seconds used: where the end does not move, what is spared may move it later.
_AREA = 0.2


@dataclass(frozen=True, slots=True)
class Draft:
    """One way to run the chains.

    Attributes:
        pieces: per chain, in block order; each block in one piece.
        strict: nothing starts before a more urgent slice that is ready.
    """

    pieces: Pieces
    strict: bool = False


class Decoder:
    """List scheduling of one phase.

    Args:
        tables: ``[K, L]`` seconds of every chain.
        after: chains that end before each one starts.
    """

    def __init__(
        self,
        counts: Sequence[Sequence[int]],
        tables: Sequence[Floats],
        after: Sequence[Sequence[int]],
        devices: int,
    ) -> None:
        self._counts = [list(own) for own in counts]
        self._until: list[list[list[float]]] = [
            np.hstack([np.zeros((len(t), 1)), np.cumsum(t, axis=1)]).tolist() for t in tables
        ]
        self._devices = devices
        self._waits = [len(set(own)) for own in after]
        self._then: list[list[int]] = [[] for _ in tables]
        for chain, own in enumerate(after):
            for other in set(own):
                self._then[other].append(chain)

    def seconds(self, chain: int, piece: Piece) -> float:
        """Time of a piece."""
        row = self._until[chain][piece[0]]
        return row[piece[2]] - row[piece[1]]

    def run(self, draft: Draft) -> tuple[float, list[list[float]]]:
        """The end, and the start of each piece. The hot loop of the search: locals, no calls."""
        pieces, strict = draft.pieces, draft.strict
        counts, until, then = self._counts, self._until, self._then
        starts: list[list[float]] = [[] for _ in pieces]
        waits = list(self._waits)
        ready = sorted((own[0][3], m) for m, own in enumerate(pieces) if not waits[m])
        running: list[tuple[float, int, int]] = []
        # Devices that some waiting slice could start with: below it nothing is looked at.
        free, now, least = self._devices, 0.0, 1
        while True:
            if free >= least:
                left: list[tuple[float, int]] = []
                least = free + 1
                for position, item in enumerate(ready):
                    m = item[1]
                    own = starts[m]
                    piece = pieces[m][len(own)]
                    count = counts[m][piece[0]]
                    if count > free:
                        left.append(item)
                        if count < least or len(left) == 1:
                            least = count
                        if strict:
                            left += ready[position + 1 :]
                            break
                        continue
                    free -= count
                    own.append(now)
                    row = until[m][piece[0]]
                    heappush(running, (now + row[piece[2]] - row[piece[1]], m, count))
                ready = left
            if not running:
                return now, starts
            now, m, count = heappop(running)
            until_s, ended = now * (1 + _SAME), [m]
            free += count
            while running and running[0][0] <= until_s:
                now, m, count = heappop(running)
                until_s = now * (1 + _SAME)
                ended.append(m)
                free += count
            for m in ended:
                done = len(starts[m])
                if done < len(pieces[m]):
                    insort(ready, (pieces[m][done][3], m))
                    least = 1
                    continue
                for other in then[m]:
                    waits[other] -= 1
                    if not waits[other]:
                        insort(ready, (pieces[other][0][3], other))
                        least = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A draft's times.

    Attributes:
        starts: per chain and piece, of the forward.
    """

    forward_s: float
    backward_s: float
    starts: list[list[float]]

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


class Evaluator:
    """Both phases of a draft. Where they are in proportion one of them is enough."""

    def __init__(self, instance: Instance) -> None:
        chains = instance.chains
        self.instance = instance
        counts = [c.counts for c in chains]
        after = [c.after for c in chains]
        before: list[list[int]] = [[] for _ in chains]
        for m, own in enumerate(after):
            for other in own:
                before[other].append(m)
        self._blocks = [c.blocks for c in chains]
        self._after = after
        self._forward = Decoder(counts, [c.forward_s for c in chains], after, instance.devices)
        self._backward = Decoder(
            counts, [c.backward_s[:, ::-1] for c in chains], before, instance.devices
        )
        self._ratio = in_proportion(chains)
        # Running device-seconds of the forward on each count, and that count at the end.
        self._areas: list[list[list[float]]] = [
            [
                [0.0, *(n * np.cumsum(row)).tolist(), float(n)]
                for n, row in zip(c.counts, c.forward_s, strict=True)
            ]
            for c in chains
        ]

    def run(self, draft: Draft) -> Timed:
        """Times of both phases."""
        forward_s, starts = self._forward.run(draft)
        if self._ratio is not None:
            return Timed(forward_s=forward_s, backward_s=self._ratio * forward_s, starts=starts)
        backward_s, _ = self._backward.run(self._mirrored(draft, starts))
        return Timed(forward_s=forward_s, backward_s=backward_s, starts=starts)

    def cost(self, draft: Draft) -> tuple[float, float, list[float]]:
        """What counts, what guides a search towards it, and how late each chain's forward ends."""
        timed = self.run(draft)
        area, ends = 0.0, []
        for chain, own, starts in zip(self._areas, draft.pieces, timed.starts, strict=True):
            for k, a, b, _ in own:
                row = chain[k]
                area += row[b] - row[a]
            k, a, b, _ = own[-1]
            row = chain[k]
            ends.append(starts[-1] + (row[b] - row[a]) / row[-1])
        own_ends = list(ends)
        # A chain before a late one is as late as that, less the time between them.
        for m in reversed(range(len(ends))):
            begun = timed.starts[m][0]
            for other in self._after[m]:
                ends[other] = max(ends[other], ends[m] - (begun - own_ends[other]))
        cost = timed.total_s * (1 + _PIECE * sum(map(len, draft.pieces)))
        share = area / self.instance.devices / timed.forward_s
        return cost, cost * (1 + _AREA * share), ends

    def _mirrored(self, draft: Draft, starts: list[list[float]]) -> Draft:
        mirrored: Pieces = []
        for m, own in enumerate(draft.pieces):
            blocks = self._blocks[m]
            pairs = zip(own, starts[m], strict=True)
            mirrored.append(
                [
                    (p[0], blocks - p[2], blocks - p[1], -(s + self._forward.seconds(m, p)))
                    for p, s in pairs
                ][::-1]
            )
        return Draft(mirrored, draft.strict)


# --- slices to start from ------------------------------------------------------------------


def bi_point(
    counts: Sequence[int], table_s: Floats, span_s: float, *, hull: bool, larger_first: bool
) -> list[tuple[int, int, int]]:
    """Two slices of a chain that together take the span: (count index, first, end).

    A fraction of the blocks on the next larger count, the rest on the smaller one, rounded to
    whole blocks; one slice where the span is beyond either end.

    Args:
        hull: only counts on the concave envelope of the speed.
    """
    total_s = table_s.sum(axis=1)
    steps = _corners(np.array(counts, dtype=np.float64), total_s) if hull else _falling(total_s)
    blocks = table_s.shape[1]
    if span_s <= total_s[steps[-1]]:
        return [(steps[-1], 0, blocks)]
    if span_s >= total_s[steps[0]]:
        return [(steps[0], 0, blocks)]
    low, high = next((a, b) for a, b in pairwise(steps) if total_s[b] <= span_s <= total_s[a])
    share = (total_s[low] - span_s) / (total_s[low] - total_s[high])
    first, second, cut = (high, low, share) if larger_first else (low, high, 1 - share)
    until = np.cumsum(table_s[first]) / total_s[first]
    block = int(np.abs(np.append(0.0, until) - cut).argmin())
    return [x for x in ((first, 0, block), (second, block, blocks)) if x[1] < x[2]]


def _falling(total_s: Floats) -> list[int]:
    """Counts that are faster than all smaller ones."""
    kept = [0]
    for k in range(1, len(total_s)):
        if total_s[k] < total_s[kept[-1]]:
            kept.append(k)
    return kept


def _corners(counts: Floats, total_s: Floats) -> list[int]:
    """Counts on the envelope, from the most efficient to the fastest."""
    speed, kept = 1 / total_s, [int((counts * total_s).argmin())]
    while True:
        k = kept[-1]
        rise = np.where(
            counts > counts[k], (speed - speed[k]) / np.maximum(counts - counts[k], 1), 0
        )
        if rise.max() <= 0:
            return kept
        kept.append(int(rise.argmax()))


def from_columns(
    instance: Instance,
    tables: Sequence[Sequence[Part]],
    columns: Sequence[Column],
    *,
    order: Sequence[int],
) -> Pieces:
    """The slices of a configuration program's answer, in an order of its columns.

    A slice is as urgent as its column comes early; blocks are rounded so that none is lost.

    Args:
        tables: the parts of each chain.
    """
    own: list[list[tuple[int, float, float]]] = [[] for _ in instance.chains]
    for place, index in enumerate(order):
        column = columns[index]
        for m, p, k in column.choices:
            part = tables[m][p]
            share = column.seconds / part.time_s[k] * part.time_s.min()
            own[m].append((k, share, float(place)))
    return [_rounded(chain.both_s, own[m]) for m, chain in enumerate(instance.chains)]


def _rounded(table_s: Floats, shares: Sequence[tuple[int, float, float]]) -> list[Piece]:
    """Whole blocks in proportion to the shares; slices without blocks drop out."""
    until = np.append(0.0, np.cumsum(table_s.sum(axis=0)))
    total, done, block = sum(s for _, s, _ in shares), 0.0, 0
    pieces: list[Piece] = []
    for position, (k, share, urgency) in enumerate(shares):
        done += share
        end = int(np.abs(until - done / total * until[-1]).argmin())
        if position == len(shares) - 1:
            end = len(until) - 1
        if end <= block:
            continue
        if pieces and pieces[-1][0] == k:
            pieces[-1] = (k, pieces[-1][1], end, pieces[-1][3])
        else:
            pieces.append((k, block, end, urgency))
        block = end
    return pieces


def portfolio(
    instance: Instance, targets: Sequence[Sequence[float]], stretches: Sequence[float]
) -> Iterator[Draft]:
    """Bi-point slices for several spans, under several rules of urgency.

    Args:
        targets: per way to set them, the seconds that each chain should take.
        stretches: factors of all targets.
    """
    for stretch in stretches:
        for target in targets:
            for hull in (True, False):
                first, second = (
                    [
                        bi_point(
                            c.counts, c.both_s, span * stretch, hull=hull, larger_first=larger_first
                        )
                        for c, span in zip(instance.chains, target, strict=True)
                    ]
                    for larger_first in (True, False)
                )
                for cut in (first, second, _balanced(instance, first, second)):
                    for pieces in _ruled(instance, cut):
                        yield Draft(pieces)
                        yield Draft(pieces, strict=True)


Cut = list[list[tuple[int, int, int]]]


def _balanced(instance: Instance, first: Cut, second: Cut) -> Cut:
    """Each chain's larger slice first or second, so that all together need alike at all times."""
    ways = [
        [_needs(c, cut) for cut in pair]
        for c, pair in zip(instance.chains, zip(first, second, strict=True), strict=True)
    ]
    horizon = max(float(ends[-1]) for pair in ways for ends, _ in pair)
    at = (np.arange(_BINS) + 0.5) / _BINS * horizon
    levels: dict[int, Floats] = {}
    chosen: Cut = list(first)
    for m in sorted(range(len(ways)), key=lambda m: -float(ways[m][0][1].max())):
        level = instance.chains[m].level
        used = levels.setdefault(level, np.zeros(_BINS))
        options = [
            used + np.append(counts, 0.0)[np.searchsorted(ends, at)] for ends, counts in ways[m]
        ]
        better = min((0, 1), key=lambda i: float((options[i] ** 2).sum()))
        levels[level] = options[better]
        chosen[m] = (first, second)[better][m]
    return chosen


def _needs(chain: Chain, cut: Sequence[tuple[int, int, int]]) -> tuple[Floats, Floats]:
    """When each slice ends if all start at once, and the devices that it takes."""
    seconds = [float(chain.both_s[k, a:b].sum()) for k, a, b in cut]
    return np.cumsum(seconds), np.array([chain.counts[k] for k, _, _ in cut], dtype=np.float64)


def _ruled(instance: Instance, cut: Sequence[Sequence[tuple[int, int, int]]]) -> Iterator[Pieces]:
    """The slices under each rule: most time left on the way to an end, or in
    the chain and level by level; largest; longest; most device-seconds."""
    chains = instance.chains
    left = [
        [sum(float(c.both_s[k, a:b].sum()) for k, a, b in own[i:]) for i in range(len(own))]
        for c, own in zip(chains, cut, strict=True)
    ]
    tail = [0.0] * len(chains)
    for m in reversed(range(len(chains))):
        for other in chains[m].after:
            tail[other] = max(tail[other], tail[m] + left[m][0])
    far = sum(own[0] for own in left)
    rules = (
        lambda m, i, k, a, b: -(left[m][i] + tail[m]),
        lambda m, i, k, a, b: chains[m].level * far - left[m][i],
        lambda m, i, k, a, b: -chains[m].counts[k] - 1e-3 * i,
        lambda m, i, k, a, b: -float(chains[m].both_s[k, a:b].sum()),
        lambda m, i, k, a, b: -float(chains[m].both_s[k, a:b].sum()) * chains[m].counts[k],
    )
    for rule in rules:
        yield [
            [(k, a, b, float(rule(m, i, k, a, b))) for i, (k, a, b) in enumerate(own)]
            for m, own in enumerate(cut)
        ]
