"""Scatter-gather of messages to a tensor-parallel group.

Between nodes each rank of the group receives one share of every tensor, cut as a flat row of
numbers; before the compute that uses them the group gathers them inside its node. So the bytes
of a tensor go through a node's network once instead of once for each rank.

Source: Narayanan et al. 2021, arXiv:2104.04473, section 4.1 (scatter/gather).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from mmlaunch.comm.batches import Tree
from mmlaunch.comm.transport import Transport
from mmplan.program.model import Edge, Program
from mmplan.program.shards import Ranks
from mmplan.ragged import Ragged


@dataclass(frozen=True, slots=True)
class TensorShare:
    """One of ``count`` equal shares of a flat tensor; the last may be shorter, or empty."""

    index: int
    count: int

    def of(self, tensor: Tensor) -> Tensor:
        """The share of a tensor, flat."""
        size = self.padded(tensor.numel())
        return tensor.reshape(-1)[self.index * size : (self.index + 1) * size]

    def padded(self, numbers: int) -> int:
        """Numbers of the longest share."""
        return -(-numbers // self.count)

    def numbers(self, numbers: int) -> int:
        """Numbers of this share."""
        size = self.padded(numbers)
        return min(size, max(0, numbers - self.index * size))


@dataclass(frozen=True, slots=True)
class PaddedShare:
    """A received share, padded to the longest one, and the shape of the whole tensor."""

    received: Tensor
    shape: tuple[int, ...]


# A received tree. The values of its ``Ragged`` may be shares as well.
TreeOfShares: TypeAlias = "PaddedShare | Tree | tuple[TreeOfShares, ...]"


def share_of(program: Program, edge: Edge, rank: int, *, backward: bool) -> TensorShare | None:
    """The share of an edge's messages that a rank receives; None where it receives all."""
    count = program.shares(edge, backward=backward)
    if count == 1:
        return None
    place = program.stages[edge.producer if backward else edge.consumer].find_place(rank)
    return TensorShare(0 if place is None else place[1], count)


def gather_shares(
    trees: Sequence[TreeOfShares], transport: Transport, group: Ranks
) -> Sequence[Tree]:
    """The trees with full tensors in place of shares, by one gather of the group.

    Args:
        trees: every rank of the group has shares of the same tensors in the same places.
        transport: of this rank.
        group: the tensor-parallel group, in the order of its shares.
    """
    shares = [share for tree in trees for share in _shares(tree)]
    full = _gather(shares, transport, group)
    return [_with_full(tree, full) for tree in trees] if shares else cast("Sequence[Tree]", trees)


def _gather(shares: Sequence[PaddedShare], transport: Transport, group: Ranks) -> Iterator[Tensor]:
    mine = [share.received.view(torch.uint8) for share in shares]
    row = mine[0] if len(mine) == 1 else torch.cat(mine)
    full = torch.empty(len(group) * len(row), dtype=torch.uint8, device=row.device)
    ranks = tuple(sorted(group))
    if len(row):
        transport.gather_flat(full, row, ranks)
    rows = full.view(len(group), len(row))
    if ranks != group:
        rows = rows[[ranks.index(rank) for rank in group]]
    start = 0
    for share, own in zip(shares, mine, strict=True):
        # A copy unless there is one share only, so that numbers are aligned to their type.
        flat = rows[:, start : start + len(own)].reshape(-1).view(share.received.dtype)
        yield flat[: prod(share.shape)].view(share.shape)
        start += len(own)


def _shares(tree: TreeOfShares) -> Iterator[PaddedShare]:
    if isinstance(tree, PaddedShare):
        yield tree
    elif isinstance(tree, tuple):
        for item in tree:
            yield from _shares(item)


def _with_full(tree: Any, full: Iterator[Tensor]) -> Any:
    """The tree with the next full tensor in place of each share."""
    if isinstance(tree, PaddedShare):
        return next(full)
    if isinstance(tree, Ragged):
        return Ragged(*(_with_full(item, full) for item in tree))
    if isinstance(tree, tuple):
        return tuple(_with_full(item, full) for item in cast("tuple[Any, ...]", tree))
    return tree
