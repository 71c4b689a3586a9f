"""Schedules of slices by list scheduling.

A draft says for each chain how its blocks are cut, on which of its counts each slice runs and
how urgent it is. Decoding starts at every instant the most urgent slices that are ready and
fit; nothing waits for a wave to end. The backward runs the same slices in mirror image: what
ended last starts first.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from mmplan.arrays import Floats
from mmplan.solvers.mpsp.instance import Instance, in_proportion

SchedulePiece = tuple[int, int, int, float]
"""Index of the count, first block, block after the last, urgency (less is more urgent)."""
Pieces = list[list[SchedulePiece]]
# Times that differ by less than this share are one instant.
_SAME = 1e-12
# What a piece more costs, as a share of the time: little, and more than nothing.
_PIECE = 1e-5
# Weight of the device-seconds used: where the end does not move, what is spared may move it later.
_AREA = 0.2


@dataclass(frozen=True, slots=True)
class ChainSchedule:
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
        after: chains that end before each one starts, all with lower indices or all with higher.
        cuts: ``[L]`` of every chain, seconds that a slice waits which begins at a block.
    """

    def __init__(
        self,
        counts: Sequence[Sequence[int]],
        tables: Sequence[Floats],
        after: Sequence[Sequence[int]],
        cuts: Sequence[Floats],
        devices: int,
    ) -> None:
        self._cuts: list[list[float]] = [own.tolist() for own in cuts]
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
        # Least seconds from each block to the end of all chains that follow.
        self._after: list[list[float]] = [[] for _ in tables]
        upwards = all(other < chain for chain, own in enumerate(after) for other in own)
        for chain in reversed(range(len(tables))) if upwards else range(len(tables)):
            rest = max((self._after[other][0] for other in self._then[chain]), default=0.0)
            fastest = tables[chain].min(axis=0)[::-1]
            self._after[chain] = (rest + np.append(0.0, np.cumsum(fastest)))[::-1].tolist()

    def seconds(self, chain: int, piece: SchedulePiece) -> float:
        """Time of a piece, what it waits for its input included."""
        row = self._until[chain][piece[0]]
        return row[piece[2]] - row[piece[1]] + self._cuts[chain][piece[1]]

    def run(
        self, draft: ChainSchedule, limit_s: float = math.inf
    ) -> tuple[float, list[list[float]]]:
        """The end, and the start of each piece. The hot loop of the search: locals, no calls.

        Args:
            limit_s: where the end is later than this, it is infinite.
        """
        pieces, strict = draft.pieces, draft.strict
        counts, until, then, after = self._counts, self._until, self._then, self._after
        cuts = self._cuts
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
                    end = now + row[piece[2]] - row[piece[1]] + cuts[m][piece[1]]
                    if end + after[m][piece[2]] > limit_s:
                        return math.inf, starts
                    heappush(running, (end, m, count))
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
        self._ratio = in_proportion(chains)
        # Where the backward is a multiple of the forward, both waits together still are twice one.
        scale = 1.0 if self._ratio is None else 2 / (1 + self._ratio)
        cuts = [scale * c.cut_s if c.cut_s is not None else np.zeros(c.blocks) for c in chains]
        forward, backward = [c.forward_s for c in chains], [c.backward_s[:, ::-1] for c in chains]
        self._forward = Decoder(counts, forward, after, cuts, instance.devices)
        # The cut before block b of L stands before block L - b in the mirror.
        mirrored = [np.append(0.0, own[:0:-1]) for own in cuts]
        self._backward = Decoder(counts, backward, before, mirrored, instance.devices)
        # Running device-seconds of the forward on each count.
        self._areas: list[list[list[float]]] = [
            [
                [0.0, *(n * np.cumsum(row)).tolist()]
                for n, row in zip(c.counts, c.forward_s, strict=True)
            ]
            for c in chains
        ]

    def run(self, draft: ChainSchedule, limit_s: float = math.inf) -> Timed:
        """Times of both phases; infinite where the forward ends later than a limit."""
        forward_s, starts = self._forward.run(draft, limit_s)
        if forward_s == math.inf:
            return Timed(forward_s=forward_s, backward_s=forward_s, starts=starts)
        if self._ratio is not None:
            return Timed(forward_s=forward_s, backward_s=self._ratio * forward_s, starts=starts)
        backward_s, _ = self._backward.run(self._mirrored(draft, starts))
        return Timed(forward_s=forward_s, backward_s=backward_s, starts=starts)

    def area(self, chain: int, own: Sequence[SchedulePiece]) -> float:
        """Device-seconds of a chain's forward."""
        rows = self._areas[chain]
        return sum(rows[k][b] - rows[k][a] for k, a, b, _ in own)

    def cost(
        self, draft: ChainSchedule, area: float, most_s: float = math.inf
    ) -> tuple[float, float, list[list[float]]]:
        """What counts, what guides a search towards it, and the forward's starts.

        Args:
            area: device-seconds of all chains' forwards.
            most_s: where the guide is more than this, it may be infinite.
        """
        more = 1 + _PIECE * sum(map(len, draft.pieces))
        used_s = _AREA * area / self.instance.devices
        limit_s = (
            most_s / more if self._ratio is None else most_s / more / (1 + self._ratio) - used_s
        )
        timed = self.run(draft, limit_s)
        if timed.forward_s == math.inf:
            return math.inf, math.inf, timed.starts
        cost_s = timed.total_s * more
        return cost_s, cost_s * (1 + used_s / timed.forward_s), timed.starts

    def lateness(self, draft: ChainSchedule, starts: Sequence[Sequence[float]]) -> list[float]:
        """When each chain's forward ends; one before a late one is as late as that, less the
        time between them."""
        ends = [
            own[-1] + self._forward.seconds(m, draft.pieces[m][-1]) for m, own in enumerate(starts)
        ]
        late = list(ends)
        for m in reversed(range(len(ends))):
            for other in self._after[m]:
                late[other] = max(late[other], late[m] - (starts[m][0] - ends[other]))
        return late

    def _mirrored(self, draft: ChainSchedule, starts: list[list[float]]) -> ChainSchedule:
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
        return ChainSchedule(mirrored, draft.strict)
