"""Messages that a tensor-parallel group receives in shares, and brings together.

Between nodes each rank of the group receives one share of every tensor, cut as a flat row of
numbers; before the compute that uses them the group gathers them inside its node. So the bytes
of a tensor go through a node's network once instead of once for each rank.

Source: Narayanan et al. 2021, arXiv:2104.04473, section 4.1 (scatter/gather).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from mmlaunch.comm.transport import Transport
from mmplan.program.model import Edge, Program
from mmplan.program.shards import Ranks
from mmplan.ragged import Ragged


@dataclass(frozen=True, slots=True)
class Share:
    """Which of ``count`` equal parts of a flat tensor; the last ones may be shorter, or empty."""

    index: int
    count: int

    def of(self, tensor: Tensor) -> Tensor:
        """The share of a tensor, flat."""
        whole = self.padded(tensor.numel())
        return tensor.reshape(-1)[self.index * whole : (self.index + 1) * whole]

    def padded(self, numbers: int) -> int:
        """Numbers of the longest share."""
        return -(-numbers // self.count)

    def numbers(self, numbers: int) -> int:
        """Numbers of this share."""
        whole = self.padded(numbers)
        return min(whole, max(0, numbers - self.index * whole))


@dataclass(frozen=True, slots=True)
class PaddedShare:
    """A received share, padded to the longest one, and the shape of the whole tensor."""

    received: Tensor
    shape: tuple[int, ...]


def share_of(program: Program, edge: Edge, rank: int, *, backward: bool) -> Share | None:
    """The share of an edge's messages that a rank receives; None where it receives all."""
    count = program.shares(edge, backward=backward)
    if count == 1:
        return None
    place = program.stages[edge.producer if backward else edge.consumer].find_place(rank)
    return Share(0 if place is None else place[1], count)


def bring_together(trees: Sequence[Any], transport: Transport, group: Ranks) -> list[Any]:
    """The trees with whole tensors in place of parts, by one gather of the group.

    Args:
        trees: trees of messages; every rank of the group has parts of the same tensors in the
            same places.
        transport: this rank's.
        group: the tensor-parallel group, in the order of its shares.
    """
    parts = list(_parts(trees))
    if not parts:
        return list(trees)
    whole = iter(_gather(parts, transport, group))
    return [_filled(tree, whole) for tree in trees]


def _gather(parts: Sequence[PaddedShare], transport: Transport, group: Ranks) -> Iterator[Tensor]:
    mine = [part.received.view(torch.uint8) for part in parts]
    row = mine[0] if len(mine) == 1 else torch.cat(mine)
    full = torch.empty(len(group) * len(row), dtype=torch.uint8, device=row.device)
    ranks = tuple(sorted(group))
    if len(row):
        transport.gather_flat(full, row, ranks)
    rows = full.view(len(group), len(row))
    if ranks != group:
        rows = rows[[ranks.index(rank) for rank in group]]
    start = 0
    for part, own in zip(parts, mine, strict=True):
        # A copy, but where the part is all there is: numbers lie where their type may begin.
        flat = rows[:, start : start + len(own)].reshape(-1).view(part.received.dtype)
        yield flat[: prod(part.shape)].view(part.shape)
        start += len(own)


def _parts(tree: Any) -> Iterator[PaddedShare]:
    if isinstance(tree, PaddedShare):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in cast("Sequence[Any]", tree):
            yield from _parts(item)


def _filled(tree: Any, whole: Iterator[Tensor]) -> Any:
    if isinstance(tree, PaddedShare):
        return next(whole)
    if isinstance(tree, Ragged):
        return Ragged(*(_filled(item, whole) for item in tree))
    if isinstance(tree, list | tuple):
        kind = list if isinstance(tree, list) else tuple
        return kind(_filled(item, whole) for item in cast("Sequence[Any]", tree))
    return tree
