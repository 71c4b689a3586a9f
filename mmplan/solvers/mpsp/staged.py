"""Drafts for models that no device can hold: the modules' blocks divided among groups of devices.

All modules' blocks, those that others take outputs from first, are cut into k stretches of equal
work (or of equal bytes, where those do not fit), at the same places for every task, and the
devices into k groups of equal size. A task's slices then pass from group to group, and while one
task is in the second group another is in the first; the micro-batches of one task follow each
other in the same way, as in a pipeline. A device holds a k-th of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

import numpy as np

from mmplan.arrays import Floats
from mmplan.solvers.mpsp.instance import Instance
from mmplan.solvers.mpsp.list_schedule import ChainSchedule, SchedulePiece
from mmplan.solvers.mpsp.scaling_curves import Scaling

_MOST_GROUPS = 16
RankRange = tuple[int, int]
"""The first rank, and the one after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A draft whose pieces run on given ranks.

    Attributes:
        groups: k.
        rank_bytes: parameters, gradient and state on a rank of the fullest group.
        starts: of each chain's pieces, seconds.
        within: where each piece runs.
    """

    groups: int
    rank_bytes: float
    draft: ChainSchedule
    starts: list[list[float]]
    within: list[list[RankRange]]


def staged(
    scalings: Sequence[Scaling], instance: Instance, block_bytes: Mapping[str, Sequence[float]]
) -> Iterator[Staged]:
    """Drafts for 2, 3, ... groups, where the devices can be divided so.

    Args:
        block_bytes: least parameters, gradient and state of each block on a rank, by owner.
    """
    largest = lcm(*(a.tp for own in scalings for a in own.allocations))
    for groups in range(2, _MOST_GROUPS + 1):
        size, rest = divmod(instance.devices, groups)
        if not rest and size % largest == 0:
            for weights in (_work(scalings, instance), block_bytes):
                places = _places(scalings, instance, weights, groups)
                held = [0.0] * groups
                for owner, own in places.items():
                    for place, more in zip(own, block_bytes[owner], strict=True):
                        held[place] += more
                made = _staged(scalings, instance, places, size, max(held))
                if made is not None:
                    yield made


def _staged(
    scalings: Sequence[Scaling],
    instance: Instance,
    places: Mapping[str, Sequence[int]],
    size: int,
    rank_bytes: float,
) -> Staged | None:
    """The draft for groups of so many devices; None where a chain needs more."""
    chains, groups = instance.chains, instance.devices // size
    if any(chain.counts[0] > size for chain in chains):
        return None
    pieces: list[list[SchedulePiece]] = []
    starts: list[list[float]] = []
    within: list[list[RankRange]] = []
    free, ends = [0.0] * groups, [0.0] * len(chains)
    for m, chain in enumerate(chains):
        k = max(i for i, count in enumerate(chain.counts) if count <= size)
        own = places[scalings[m].op.owner]
        cuts = [0, *(b for b in range(1, chain.blocks) if own[b] != own[b - 1]), chain.blocks]
        now = max((ends[i] for i in chain.after), default=0.0)
        for rows in (pieces, starts, within):
            rows.append([])
        for a, b in pairwise(cuts):
            place = own[a]
            now = max(now, free[place])
            pieces[m].append((k, a, b, now))
            starts[m].append(now)
            within[m].append((place * size, (place + 1) * size))
            now += float(chain.forward_s[k, a:b].sum())
            free[place] = now
        ends[m] = now
    return Staged(
        groups=groups,
        rank_bytes=rank_bytes,
        draft=ChainSchedule(pieces),
        starts=starts,
        within=within,
    )


def _work(scalings: Sequence[Scaling], instance: Instance) -> dict[str, list[float]]:
    """Least device-seconds of each block in all tasks together, by owner."""
    work: dict[str, Floats] = {}
    for own, chain in zip(scalings, instance.chains, strict=True):
        counts = np.array(chain.counts, dtype=np.float64)[:, None]
        least = (counts * chain.both_s).min(axis=0)
        work[own.op.owner] = work.get(own.op.owner, 0.0) + least
    return {owner: own.tolist() for owner, own in work.items()}


def _places(
    scalings: Sequence[Scaling],
    instance: Instance,
    weights: Mapping[str, Sequence[float]],
    groups: int,
) -> dict[str, list[int]]:
    """Per owner, the group of each of its blocks: stretches of equal weight."""
    level: dict[str, int] = {}
    for own, chain in zip(scalings, instance.chains, strict=True):
        level[own.op.owner] = max(level.get(own.op.owner, 0), chain.level)
    order = sorted(level, key=lambda owner: level[owner])
    total = np.concatenate([weights[owner] for owner in order])
    middle = (np.cumsum(total) - total / 2) / max(float(total.sum()), 1e-300)
    place = np.minimum((middle * groups).astype(int), groups - 1)
    edges = np.cumsum([0, *(len(weights[owner]) for owner in order)])
    return {
        owner: place[a:b].tolist() for owner, a, b in zip(order, edges[:-1], edges[1:], strict=True)
    }
