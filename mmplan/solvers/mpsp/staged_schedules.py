"""Schedules for models that no device can hold: modules' blocks divided among groups of devices.

All modules' blocks, producers first, are cut into k stages of equal work (or of equal bytes), at
the same places for every task, and the devices into k groups of equal size. A task's slices pass
from group to group. While one task is in the second group another is in the first; the
micro-batches of one task follow each other in the same way, as in a pipeline. A device holds about
1/k of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

import numpy as np

from mmplan.arrays import Floats
from mmplan.solvers.mpsp.instance import Instance
from mmplan.solvers.mpsp.list_schedule import ChainSchedule, ChainSegment
from mmplan.solvers.mpsp.placement import RankRange
from mmplan.solvers.mpsp.scaling_curves import Scaling

# Largest number of groups. Chosen by hand: with too few micro-batches many groups are idle.
_MAX_GROUPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSchedule:
    """A schedule whose segments run on given ranks.

    Attributes:
        groups: number of groups of devices, k.
        fixed_bytes: parameters, gradients and optimizer state on a rank of the group with most.
        starts: start of each segment's forward in seconds, per chain.
        rank_ranges: the ranks of each segment, per chain.
    """

    groups: int
    fixed_bytes: float
    schedule: ChainSchedule
    starts: list[list[float]]
    rank_ranges: list[list[RankRange]]


def staged_schedules(
    scalings: Sequence[Scaling], instance: Instance, fixed_bytes: Mapping[str, Sequence[float]]
) -> Iterator[StagedSchedule]:
    """Schedules for 2, 3, ... groups, wherever the devices can be divided so.

    Args:
        fixed_bytes: by module, the least parameters, gradients and optimizer state of each block
            on one rank.
    """
    largest_tp = lcm(*(a.tp for own in scalings for a in own.allocations))
    for groups in range(2, _MAX_GROUPS + 1):
        size, rest = divmod(instance.devices, groups)
        if rest or size % largest_tp or any(chain.counts[0] > size for chain in instance.chains):
            continue
        for weights in (_work(scalings, instance), fixed_bytes):
            stages = _stages(scalings, instance, weights, groups)
            group_bytes = [0.0] * groups
            for owner, own in stages.items():
                for stage, num_bytes in zip(own, fixed_bytes[owner], strict=True):
                    group_bytes[stage] += num_bytes
            yield _schedule(scalings, instance, stages, size, max(group_bytes))


def _schedule(
    scalings: Sequence[Scaling],
    instance: Instance,
    stages: Mapping[str, Sequence[int]],
    size: int,
    fixed_bytes: float,
) -> StagedSchedule:
    """The schedule for groups of ``size`` devices."""
    segments: list[list[ChainSegment]] = []
    starts: list[list[float]] = []
    rank_ranges: list[list[RankRange]] = []
    groups, ends = instance.devices // size, list[float]()
    free_at = [0.0] * groups
    for scaling, chain in zip(scalings, instance.chains, strict=True):
        k = max(i for i, count in enumerate(chain.counts) if count <= size)
        own = stages[scaling.op.owner]
        cuts = [0, *(b for b in range(1, chain.blocks) if own[b] != own[b - 1]), chain.blocks]
        now = max((ends[i] for i in chain.after), default=0.0)
        segments.append([])
        starts.append([])
        rank_ranges.append([])
        for first, end in pairwise(cuts):
            stage = own[first]
            now = max(now, free_at[stage])
            segments[-1].append(ChainSegment(k, first, end, now))
            starts[-1].append(now)
            rank_ranges[-1].append((stage * size, (stage + 1) * size))
            now += float(chain.forward_s[k, first:end].sum())
            free_at[stage] = now
        ends.append(now)
    return StagedSchedule(
        groups=groups,
        fixed_bytes=fixed_bytes,
        schedule=ChainSchedule(segments),
        starts=starts,
        rank_ranges=rank_ranges,
    )


def _work(scalings: Sequence[Scaling], instance: Instance) -> dict[str, list[float]]:
    """By module, the least device-seconds of each block in all tasks together."""
    work: dict[str, Floats] = {}
    for own, chain in zip(scalings, instance.chains, strict=True):
        counts = np.array(chain.counts, dtype=np.float64)[:, None]
        least = (counts * chain.both_s).min(axis=0)
        work[own.op.owner] = work.get(own.op.owner, 0.0) + least
    return {owner: own.tolist() for owner, own in work.items()}


def _stages(
    scalings: Sequence[Scaling],
    instance: Instance,
    weights: Mapping[str, Sequence[float]],
    groups: int,
) -> dict[str, list[int]]:
    """By module, the stage of each block: ranges of equal weight, by the modules' levels."""
    level: dict[str, int] = {}
    for own, chain in zip(scalings, instance.chains, strict=True):
        level[own.op.owner] = max(level.get(own.op.owner, 0), chain.level)
    order = sorted(level, key=lambda owner: level[owner])
    weight = np.concatenate([weights[owner] for owner in order])
    middle = (np.cumsum(weight) - weight / 2) / max(float(weight.sum()), 1e-300)
    stage = np.minimum((middle * groups).astype(int), groups - 1)
    edges = np.cumsum([0, *(len(weights[owner]) for owner in order)])
    return {
        owner: stage[a:b].tolist() for owner, a, b in zip(order, edges[:-1], edges[1:], strict=True)
    }
