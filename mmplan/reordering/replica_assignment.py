"""Samples assigned to groups, so that the heaviest group is as light as possible.

Shape suffix used in this file: B = samples.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mmplan.arrays import Floats, Indices
from mmplan.errors import InvalidInputError

# Swaps after the greedy assignment; few swaps after the first ten gain anything.
_SWAPS = 48
# Lightest groups that the heaviest one may swap with. Chosen by hand: more cost time.
_PARTNERS = 8
# Swaps end when the heaviest group is within this factor of the mean load.
_BALANCED = 1.001


def assign_groups(work: Floats, counts: int | Sequence[int]) -> Indices:
    """Give each sample a group, so that the heaviest group is as light as possible.

    Samples in descending order of work go to the lightest group that is not full. A few swaps
    between the heaviest group and light ones follow. Deterministic: equal samples go by position.

    Args:
        work: per sample, not negative, in any unit.
        counts: samples of each group; or the number of groups, whose sizes then differ by at
            most one, larger ones first.

    Returns:
        Group of each sample.

    Raises:
        InvalidInputError: work is negative or not finite, or the counts do not add up.

    Source:
        MMScale's Algorithm 2, with equal counts and the descending order that its
        4/3 bound is for.
    """
    sizes = _sizes(work, counts)
    group_B = _largest_first(work, sizes)
    _swap(work, group_B, len(sizes))
    return group_B


def check_work(work: Floats) -> None:
    """Refuse numbers that are no amount of work.

    Raises:
        InvalidInputError: a number is negative or not finite.
    """
    wrong = np.flatnonzero(~(np.isfinite(work) & (work >= 0)))
    if len(wrong):
        raise InvalidInputError(
            f"the work of sample {wrong[0]} is {work[wrong[0]]}, not a finite number from 0 on",
            hint="mend the dataset's work(index)",
        )


def _sizes(work: Floats, counts: int | Sequence[int]) -> list[int]:
    check_work(work)
    if isinstance(counts, int):
        share, left = divmod(len(work), counts)
        return [share + (group < left) for group in range(counts)]
    if sum(counts) != len(work) or min(counts, default=0) < 0:
        raise InvalidInputError(f"groups of {list(counts)} samples cannot hold {len(work)}")
    return list(counts)


def _largest_first(work: Floats, sizes: list[int]) -> Indices:
    # Stable, so that every process finds the same order of equal samples.
    order = np.argsort(-work, kind="stable").tolist()
    values = work[order].tolist()
    heap = [(0.0, group) for group, count in enumerate(sizes) if count]
    left = list(sizes)
    groups: list[int] = []
    for value in values:
        load, group = heap[0]
        groups.append(group)
        left[group] -= 1
        if left[group]:
            heapq.heapreplace(heap, (load + value, group))
        else:
            heapq.heappop(heap)
    result = np.empty(len(work), np.intp)
    result[order] = groups
    return result


def _swap(work: Floats, group_B: Indices, num_groups: int) -> None:
    """Swap samples of the heaviest group and of light ones while the heaviest gets lighter."""
    load = np.bincount(group_B, weights=work, minlength=num_groups)
    # A running sum has the same rounding on every processor, and so the same swaps.
    target = float(np.cumsum(load)[-1]) / num_groups
    by_group = np.argsort(group_B, kind="stable")
    ends = np.searchsorted(group_B[by_group], np.arange(num_groups + 1))
    members = [by_group[a:b] for a, b in pairwise(ends.tolist())]
    for _ in range(_SWAPS):
        heavy = int(load.argmax())
        if load[heavy] <= target * _BALANCED:
            return
        lights = np.argsort(load, kind="stable")[:_PARTNERS]
        others = np.concatenate([members[group] for group in lights])
        if not len(others):
            return
        gain = work[members[heavy]][:, None] - work[others][None, :]
        after = np.maximum(load[heavy] - gain, load[group_B[others]] + gain)
        i, j = np.unravel_index(int(after.argmin()), after.shape)
        if after[i, j] >= load[heavy] * (1 - 1e-12):
            return
        mine, theirs = int(members[heavy][i]), int(others[j])
        light = int(group_B[theirs])
        moved = work[mine] - work[theirs]
        load[heavy] -= moved
        load[light] += moved
        members[heavy][i] = theirs
        members[light][members[light] == theirs] = mine
        group_B[mine], group_B[theirs] = light, heavy
