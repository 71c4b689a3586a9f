"""Ranks for slices by memory alone: a depth-first search with backtracking.

Time does not matter here: a slice can wait for any ranks. No rank may have more than its memory of
parameters (each block once, however many slices run it) and activations. Slices get ranks largest
first, one tensor-parallel group after another; groups that need least new memory are tried first.
Where a slice no longer fits anywhere, the last choice is taken back. Of ranks with equal contents
one is tried; a state that failed is not tried again, in whatever order its ranks are. So the search
ends, and where it finds nothing there is no placement, unless its time was over.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from math import lcm

from mmplan.solvers.mpsp.slices import RankGroups, UnplacedSlice, block_shards

_Contents = tuple[int, float]
"""Bit mask of the block shards on a rank, and the bytes of its activations."""

# Sums of bytes in another order are equal up to this share of the memory.
_ROUNDING = 1e-9


def pack(
    slices: Sequence[UnplacedSlice], devices: int, memory_bytes: float, *, deadline: float
) -> list[RankGroups] | None:
    """Groups of ranks for every slice so that the slices of each rank fit its memory together.

    None where there is no such placement, or none was found before ``deadline``, a time of the
    monotonic clock.
    """
    return _Packing(slices, devices, memory_bytes, deadline).run()


class _Packing:
    def __init__(
        self, slices: Sequence[UnplacedSlice], devices: int, memory_bytes: float, deadline: float
    ) -> None:
        self._slices = slices
        self._memory_bytes = memory_bytes * (1 + _ROUNDING)
        self._deadline = deadline
        self._contents: list[_Contents] = [(0, 0.0)] * devices
        self._chosen: list[list[int]] = [[] for _ in slices]
        alone_bytes = [float(own.fixed_bytes.sum()) + own.activation_bytes for own in slices]
        self._order = sorted(range(len(slices)), key=lambda i: (-alone_bytes[i], i))
        # Sets of so many neighbouring ranks could change places: they hold whole groups of every
        # slice. Only sets on the same side of every range's ends are alike.
        self._set_size = lcm(*(slice_.tp for slice_ in slices))
        self._range_ends = sorted({edge for slice_ in slices for edge in slice_.rank_range})
        self._masks, self._conflicts, self._shard_bytes = _shard_masks(slices)
        self._bytes_of_mask: dict[int, float] = {}
        self._failed: set[object] = set()

    def run(self) -> list[RankGroups] | None:
        """Depth first, with a stack of the options left at each step."""
        steps = [i for i in self._order for _ in range(self._slices[i].dp)]
        stack = [self._options(steps[0])]
        keys: list[object] = [None]
        undo: list[list[_Contents]] = []
        while stack:
            if time.monotonic() > self._deadline:
                return None
            i = steps[len(stack) - 1]
            group = next(stack[-1], None)
            if group is None:
                self._failed.add(keys.pop())
                stack.pop()
                if undo:
                    self._take_back(steps[len(stack) - 1], undo.pop())
                continue
            undo.append(self._give(i, group))
            if len(stack) == len(steps):
                return [
                    tuple(slice_.group(index) for index in sorted(own))
                    for slice_, own in zip(self._slices, self._chosen, strict=True)
                ]
            following = steps[len(stack)]
            key = self._key(len(stack), following)
            if key in self._failed or not self._all_fit(following):
                self._take_back(i, undo.pop())
                continue
            stack.append(self._options(following))
            keys.append(key)
        return None

    def _give(self, i: int, index: int) -> list[_Contents]:
        """Give a group to a slice; returns what its ranks held before."""
        slice_, shards = self._slices[i], self._masks[i]
        ranks = slice_.group(index)
        before = [self._contents[rank] for rank in ranks]
        for rank, (mask, activations) in zip(ranks, before, strict=True):
            self._contents[rank] = mask | shards, activations + slice_.activation_bytes
        self._chosen[i].append(index)
        return before

    def _take_back(self, i: int, before: Sequence[_Contents]) -> None:
        index = self._chosen[i].pop()
        for rank, contents in zip(self._slices[i].group(index), before, strict=True):
            self._contents[rank] = contents

    def _options(self, i: int) -> Iterator[int]:
        """Groups in which a slice fits, one of each kind, by the new memory that they need."""
        slice_, shards = self._slices[i], self._masks[i]
        kinds: dict[object, tuple[float, float, int]] = {}
        for index in range(slice_.num_groups):
            if index not in self._chosen[i] and self._fits(i, index):
                ranks = slice_.group(index)
                contents = [self._contents[rank] for rank in ranks]
                new_bytes = max(
                    self._fixed_bytes(mask | shards) - self._fixed_bytes(mask)
                    for mask, _ in contents
                )
                used_bytes = max(self._fixed_bytes(mask) + more for mask, more in contents)
                kinds.setdefault(self._kind(i, ranks), (new_bytes, used_bytes, index))
        return iter([index for _, _, index in sorted(kinds.values())])

    def _kind(self, i: int, ranks: Sequence[int]) -> object:
        """Groups of one kind have the same position in sets of ranks that hold the same."""
        first = ranks[0] - ranks[0] % self._set_size
        return ranks[0] - first, self._rank_set(i, first)

    def _rank_set(self, i: int, first: int) -> tuple[int, tuple[_Contents, ...], tuple[int, ...]]:
        """Number of range ends before a set, its contents, and which of its groups a slice has."""
        slice_, until = self._slices[i], first + self._set_size
        starts = (slice_.rank_range[0] + index * slice_.tp for index in self._chosen[i])
        own = tuple(sorted(start - first for start in starts if first <= start < until))
        ends_before = sum(edge <= first for edge in self._range_ends)
        return ends_before, tuple(self._contents[first:until]), own

    def _key(self, depth: int, i: int) -> object:
        """The state before a step for a slice; equal sets of ranks may change places."""
        firsts = range(0, len(self._contents), self._set_size)
        return depth, tuple(sorted(self._rank_set(i, first) for first in firsts))

    def _all_fit(self, i: int) -> bool:
        """Whether each slice from this one on fits in as many groups as it still needs."""
        for j in self._order[self._order.index(i) :]:
            slice_, needed = self._slices[j], self._slices[j].dp - len(self._chosen[j])
            others = (g for g in range(slice_.num_groups) if g not in self._chosen[j])
            if len(list(islice((g for g in others if self._fits(j, g)), needed))) < needed:
                return False
        return True

    def _fits(self, i: int, index: int) -> bool:
        """Whether a slice fits the ranks of a group beside what they hold."""
        slice_ = self._slices[i]
        for rank in slice_.group(index):
            mask, activations = self._contents[rank]
            if mask & self._conflicts[i]:
                return False
            fixed_bytes = self._fixed_bytes(mask | self._masks[i])
            if fixed_bytes + activations + slice_.activation_bytes > self._memory_bytes:
                return False
        return True

    def _fixed_bytes(self, mask: int) -> float:
        """Bytes of the block shards in a mask."""
        if mask not in self._bytes_of_mask:
            own = (size for bit, size in enumerate(self._shard_bytes) if mask >> bit & 1)
            self._bytes_of_mask[mask] = sum(own)
        return self._bytes_of_mask[mask]


def _shard_masks(slices: Sequence[UnplacedSlice]) -> tuple[list[int], list[int], list[float]]:
    """Block shards as bits.

    Returns:
        Per slice the bits of its shards, and the bits of its blocks' shards of other degrees; and
        the bytes of every shard.
    """
    shards = list(block_shards(slices))
    masks, conflicts = [0] * len(slices), [0] * len(slices)
    for i, slice_ in enumerate(slices):
        first, end = slice_.blocks
        for bit, shard in enumerate(shards):
            overlaps = shard.blocks[0] < end and first < shard.blocks[1]
            if shard.owner == slice_.owner and overlaps:
                (masks if shard.tp == slice_.tp else conflicts)[i] |= 1 << bit
    return masks, conflicts, [shard.fixed_bytes for shard in shards]
