"""Ranks for slices by memory alone: a search that goes back where a slice finds no room.

Time does not matter here: a slice can wait for any ranks. What must hold is that no rank has
more than its memory of parameters (each block once, however many slices run it) and activations.
Slots are given ranks largest first, one tensor-parallel group after another, first the groups
that gain least by it; where some slot no longer finds room, the last choice is taken back. Ranks
that hold the same are tried once, and what was seen to fail, with ranks in whatever order, is not
tried again. So the search ends, and with None there is no placement, unless the time was over.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from math import lcm

from mmplan.solvers.mpsp.slices import Slot, stretches

Groups = tuple[tuple[int, ...], ...]
"""Ranks of each replica of a slot, the tensor-parallel ones together."""

_Holding = tuple[int, float]
"""Bits of the blocks that a rank holds, and the bytes of its activations."""

# Sums of bytes in another order are equal up to this share of the memory.
_SAME = 1e-9


def pack(
    slots: Sequence[Slot], devices: int, memory_bytes: float, *, deadline: float
) -> list[Groups] | None:
    """Groups of ranks for every slot so that each rank's slots fit its memory together.

    Args:
        deadline: of the monotonic clock, when the search gives up.
    """
    return _Packing(slots, devices, memory_bytes, deadline).run()


class _Packing:
    def __init__(
        self, slots: Sequence[Slot], devices: int, memory_bytes: float, deadline: float
    ) -> None:
        self._slots = slots
        self._memory = memory_bytes * (1 + _SAME)
        self._deadline = deadline
        self._held: list[_Holding] = [(0, 0.0)] * devices
        self._chosen: list[list[int]] = [[] for _ in slots]
        self._order = sorted(range(len(slots)), key=lambda i: (-_least_bytes(slots[i]), i))
        # Whole sets of ranks that could change places: the largest groups, in the same reach.
        self._size = lcm(*(slot.tp for slot in slots))
        self._edges = sorted({edge for slot in slots for edge in slot.within})
        self._bits, self._others, self._bytes = _numbered(slots)
        self._known: dict[int, float] = {}
        self._failed: set[object] = set()

    def run(self) -> list[Groups] | None:
        """Depth first, with a stack of what is left to try at each step."""
        steps = [i for i in self._order for _ in range(self._slots[i].dp)]
        stack = [self._options(steps[0])]
        keys: list[object] = [None]
        undo: list[list[_Holding]] = []
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
                    tuple(slot.group(index) for index in sorted(own))
                    for slot, own in zip(self._slots, self._chosen, strict=True)
                ]
            following = steps[len(stack)]
            key = self._key(len(stack), following)
            if key in self._failed or not self._all_find_room(following):
                self._take_back(i, undo.pop())
                continue
            stack.append(self._options(following))
            keys.append(key)
        return None

    def _give(self, i: int, index: int) -> list[_Holding]:
        """A group to a slot; returns what its ranks held."""
        slot, bits = self._slots[i], self._bits[i]
        ranks = slot.group(index)
        before = [self._held[rank] for rank in ranks]
        for rank, (mask, activations) in zip(ranks, before, strict=True):
            self._held[rank] = mask | bits, activations + slot.held_bytes
        self._chosen[i].append(index)
        return before

    def _take_back(self, i: int, before: Sequence[_Holding]) -> None:
        index = self._chosen[i].pop()
        for rank, held in zip(self._slots[i].group(index), before, strict=True):
            self._held[rank] = held

    def _options(self, i: int) -> Iterator[int]:
        """Groups that have room for a slot, one of each kind, those that gain least first."""
        slot, bits = self._slots[i], self._bits[i]
        kinds: dict[object, tuple[float, float, int]] = {}
        for index in range(slot.num_groups):
            if index not in self._chosen[i] and self._has_room(i, index):
                ranks = slot.group(index)
                held = [self._held[rank] for rank in ranks]
                gain = max(
                    self._parameters(mask | bits) - self._parameters(mask) for mask, _ in held
                )
                total = max(self._parameters(mask) + activations for mask, activations in held)
                kinds.setdefault(self._kind(i, ranks), (gain, total, index))
        return iter([index for _, _, index in sorted(kinds.values())])

    def _kind(self, i: int, ranks: Sequence[int]) -> object:
        """Groups of one kind stand in the same place of sets of ranks that hold the same."""
        first = ranks[0] - ranks[0] % self._size
        return ranks[0] - first, self._set(i, first)

    def _set(self, i: int, first: int) -> tuple[int, tuple[_Holding, ...], tuple[int, ...]]:
        """Where a set of ranks lies, what it holds, and which of its groups the slot has."""
        slot, until = self._slots[i], first + self._size
        starts = (slot.within[0] + index * slot.tp for index in self._chosen[i])
        mine = tuple(sorted(start - first for start in starts if first <= start < until))
        reach = sum(edge <= first for edge in self._edges)
        return reach, tuple(self._held[first:until]), mine

    def _key(self, depth: int, i: int) -> object:
        """The state before a step for a slot, whichever of equal sets of ranks is which."""
        firsts = range(0, len(self._held), self._size)
        return depth, tuple(sorted(self._set(i, first) for first in firsts))

    def _all_find_room(self, i: int) -> bool:
        """Whether each slot from this one on has as many groups with room as it still needs."""
        for j in self._order[self._order.index(i) :]:
            slot, need = self._slots[j], self._slots[j].dp - len(self._chosen[j])
            free = (g for g in range(slot.num_groups) if g not in self._chosen[j])
            if len(list(islice((g for g in free if self._has_room(j, g)), need))) < need:
                return False
        return True

    def _has_room(self, i: int, index: int) -> bool:
        slot = self._slots[i]
        for rank in slot.group(index):
            mask, activations = self._held[rank]
            if mask & self._others[i]:
                return False
            if (
                self._parameters(mask | self._bits[i]) + activations + slot.held_bytes
                > self._memory
            ):
                return False
        return True

    def _parameters(self, mask: int) -> float:
        """Bytes of the stretches of a mask."""
        if mask not in self._known:
            own = (size for bit, size in enumerate(self._bytes) if mask >> bit & 1)
            self._known[mask] = sum(own)
        return self._known[mask]


def _numbered(slots: Sequence[Slot]) -> tuple[list[int], list[int], list[float]]:
    """Stretches of blocks as bits.

    Returns:
        Per slot the bits of its stretches, and of those at other degrees of blocks that it
        runs; and the bytes of every stretch.
    """
    found = list(stretches(slots))
    own, other = [0] * len(slots), [0] * len(slots)
    for i, slot in enumerate(slots):
        for bit, stretch in enumerate(found):
            overlap = min(stretch.blocks[1], slot.blocks[1]) > max(
                stretch.blocks[0], slot.blocks[0]
            )
            if stretch.owner == slot.owner and overlap:
                (own if stretch.tp == slot.tp else other)[i] |= 1 << bit
    return own, other, [stretch.rank_bytes for stretch in found]


def _least_bytes(slot: Slot) -> float:
    """On each of its ranks, where none of them holds its parameters."""
    return float(slot.block_bytes.sum()) + slot.held_bytes
