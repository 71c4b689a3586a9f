"""Slices before they have ranks, and what ranks hold once they have some.

Shape suffixes: N = ranks, L = blocks of a module, B = blocks of a slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slot:
    """A slice to be placed.

    Attributes:
        within: the first rank that it may use, and the one after the last.
        start_s: when the draft starts it.
        after: slots that end before it starts, with the bytes a sample that flow from each.
        samples: of a round.
        messages: micro-batches of a replica; all but the last travel while others compute.
        owner: whose parameters; ranks with another tensor-parallel degree hold other shards.
        blocks: the first, and the one after the last.
        block_bytes: ``[B]`` parameters, gradient and state on one rank.
        gradient_bytes: ``[B]`` on one rank, what is summed at the end of the step.
        held_bytes: activations that each rank holds for it.
    """

    tp: int
    dp: int
    within: tuple[int, int]
    start_s: float
    forward_s: float
    backward_s: float
    after: tuple[tuple[int, float], ...]
    samples: int
    messages: int
    owner: str
    blocks: tuple[int, int]
    block_bytes: Floats
    gradient_bytes: Floats
    held_bytes: float

    @property
    def num_groups(self) -> int:
        """Tensor-parallel groups that it may choose among."""
        return (self.within[1] - self.within[0]) // self.tp

    @property
    def reach(self) -> slice:
        """Ranks of these groups."""
        return slice(self.within[0], self.within[0] + self.num_groups * self.tp)

    def by_group(self, value_N: Floats) -> Floats:
        """The largest value in each group that it may choose."""
        own = value_N[self.reach]
        return own if self.tp == 1 else own.reshape(-1, self.tp).max(axis=1)

    def group(self, index: int) -> tuple[int, ...]:
        """Ranks of a group."""
        first = self.within[0] + index * self.tp
        return tuple(range(first, first + self.tp))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Blocks that the same slots run at one tensor-parallel degree.

    Attributes:
        blocks: the first, and the one after the last.
        slots: indices of the slots.
        rank_bytes: parameters, gradient and state on one rank.
        gradient_bytes: on one rank.
    """

    owner: str
    tp: int
    blocks: tuple[int, int]
    slots: tuple[int, ...]
    rank_bytes: float
    gradient_bytes: float


def stretches(slots: Sequence[Slot]) -> Iterator[Stretch]:
    """All slots' blocks, cut wherever a slot of that degree begins or ends."""
    members: dict[tuple[str, int], list[int]] = {}
    for i, slot in enumerate(slots):
        members.setdefault((slot.owner, slot.tp), []).append(i)
    for (owner, tp), own in members.items():
        for a, b in pairwise(sorted({edge for i in own for edge in slots[i].blocks})):
            users = [i for i in own if slots[i].blocks[0] <= a < slots[i].blocks[1]]
            if users:
                cuts = [(slots[i], a - slots[i].blocks[0], b - slots[i].blocks[0]) for i in users]
                yield Stretch(
                    owner=owner,
                    tp=tp,
                    blocks=(a, b),
                    slots=tuple(users),
                    rank_bytes=max(float(x.block_bytes[c:d].sum()) for x, c, d in cuts),
                    gradient_bytes=max(float(x.gradient_bytes[c:d].sum()) for x, c, d in cuts),
                )


class Holdings:
    """What every rank holds.

    Attributes:
        held_bytes: ``[N]``.
    """

    def __init__(self, slots: Sequence[Slot], devices: int) -> None:
        blocks: dict[str, int] = {}
        for slot in slots:
            blocks[slot.owner] = max(blocks.get(slot.owner, 0), slot.blocks[1])
        self.held_bytes: Floats = np.zeros(devices)
        # The tensor-parallel degree of the shard that a rank holds, 0 where it holds none.
        self._degree: dict[str, NDArray[np.int64]] = {
            owner: np.zeros((devices, count), dtype=np.int64) for owner, count in blocks.items()
        }

    def clashes(self, slot: Slot) -> Floats:
        """``[N]``: 1 where a rank holds some of the slot's blocks as another shard, else 0."""
        own = self._degree[slot.owner][:, slot.blocks[0] : slot.blocks[1]]
        return ((own != 0) & (own != slot.tp)).any(axis=1).astype(np.float64)

    def new_bytes(self, slot: Slot) -> Floats:
        """``[N]``: parameters, gradient and state of the slot that a rank does not hold yet."""
        own = self._degree[slot.owner][:, slot.blocks[0] : slot.blocks[1]]
        return (own != slot.tp) @ slot.block_bytes

    def add(self, slot: Slot, ranks: NDArray[np.intp], new_bytes: Floats) -> None:
        """Give a slot to ranks.

        Args:
            new_bytes: ``[N]`` what :meth:`new_bytes` says of it.
        """
        self.held_bytes[ranks] += new_bytes[ranks] + slot.held_bytes
        self._degree[slot.owner][ranks, slot.blocks[0] : slot.blocks[1]] = slot.tp
