"""Parameters, or parts of them, whose gradients one set of ranks sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from mmlaunch.checkpoint.boxes import Box
from mmlaunch.comm.transport import Transport
from mmlaunch.model.shard_layout import ShardLayout
from mmplan.program.rank_metadata import BUCKET_BYTES
from mmplan.program.shards import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedSlice:
    """What the optimizer of one rank updates: a parameter, or some elements of one.

    Attributes:
        name: the parameter's full name.
        tensor: what the optimizer is given; a slice is flat, of a scalar it is the scalar.
        counts: whether this rank is the one of several with equal parts that saves its
            state, and that adds it to the gradients' norm.
        span: of a flat slice, the first and end element in the local, flattened parameter.
        box: of a box, where it lies in the full parameter.
    """

    name: str
    tensor: nn.Parameter
    counts: bool
    span: tuple[int, int] | None = None
    box: Box | None = None

    @property
    def label(self) -> str:
        """The name, with what tells boxes of one parameter apart."""
        return self.name if self.box is None else f"{self.name}{self.box}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements of a local parameter.

    Attributes:
        name: the parameter's full name.
        place: where the parameter lies in the full one.
        boxes: of the local tensor, flat one after the other; None for all of it.
        brings: whether this rank's gradient is summed. Where it is not, another rank brings
            the same one, and this one takes the sum only.
    """

    name: str
    parameter: nn.Parameter
    place: ShardLayout
    boxes: tuple[Box, ...] | None = None
    brings: bool = True

    @property
    def num_elements(self) -> int:
        """Elements of the piece."""
        if self.boxes is None:
            return self.parameter.numel()
        return sum(box.num_elements for box in self.boxes)

    def flat(self, tensor: Tensor) -> Tensor:
        """The piece's elements of a tensor like the parameter, in flat order."""
        if self.boxes is None:
            return tensor.reshape(-1)
        return torch.cat([tensor[box.slices].reshape(-1) for box in self.boxes])

    def fill(self, tensor: Tensor, flat: Tensor) -> None:
        """Put the piece's elements into a tensor like the parameter."""
        parts = flat.split([box.num_elements for box in self.boxes or ()])
        for box, part in zip(self.boxes or (), parts, strict=True):
            tensor[box.slices] = part.view(box.sizes)


class GradientSum:
    """Pieces whose gradients are summed over ranks, in place.

    Args:
        pieces: the same on all ranks, but for where they lie in the local parameters.
        ranks: who sums.

    Attributes:
        names: of parameters that are updated otherwise than whole: none.
        parts: what is updated of them: nothing.
        pieces: what is summed.
    """

    names: Sequence[str] = ()
    parts: Sequence[UpdatedSlice] = ()

    def __init__(self, pieces: Sequence[Piece], ranks: Ranks) -> None:
        self.pieces = tuple(pieces)
        self._ranks = ranks
        types = sorted({piece.parameter.dtype for piece in pieces}, key=str)
        self._by_type = [[p for p in pieces if p.parameter.dtype == dtype] for dtype in types]
        self._buckets = [_buckets(pieces) for pieces in self._by_type]
        # For each type, on how many ranks each piece got a gradient.
        self._there: list[Tensor] = []

    def reduce(self, transport: Transport, made: set[int]) -> None:
        """Replace the gradients by their sums.

        Args:
            transport: sums.
            made: ids of parameters that had no gradient and got one here, for an earlier piece.
        """
        self._there = [self._sum(buckets, transport, made) for buckets in self._buckets]

    def _sum(
        self, buckets: Sequence[Sequence[Piece]], transport: Transport, made: set[int]
    ) -> Tensor:
        pieces = [piece for bucket in buckets for piece in bucket]
        brought = [_gradient(piece, made) is not None for piece in pieces]
        flags = pieces[0].parameter.new_tensor(brought)
        for bucket in buckets[:-1]:
            self._sum_bucket(bucket, (), transport, made)
        # The flags travel with the last bucket, which spares a collective.
        return self._sum_bucket(buckets[-1], (flags,), transport, made)[-1]

    def _sum_bucket(
        self,
        bucket: Sequence[Piece],
        others: Sequence[Tensor],
        transport: Transport,
        made: set[int],
    ) -> Sequence[Tensor]:
        """Sum the gradients of a bucket and other flat tensors; returns all sums."""
        flats = [*(_flat_gradient(piece, made) for piece in bucket), *others]
        sizes = [len(flat) for flat in flats]
        total = flats[0] if len(flats) == 1 else torch.cat(flats)
        del flats
        transport.all_reduce(total, self._ranks)
        sums = total.split(sizes)
        for piece, part in zip(bucket, sums, strict=False):
            _set_gradient(piece, part, made)
        return sums

    def drop_absent(self) -> None:
        """No gradient on any rank is none, not zero: an optimizer leaves such a parameter."""
        # At the step's end, because reading the counts waits for the device.
        for pieces, there in zip(self._by_type, self._there, strict=False):
            for piece, count in zip(pieces, there.tolist(), strict=True):
                if count == 0:
                    piece.parameter.grad = None
        self._there = []

    def gather(self, transport: Transport) -> None:
        """Nothing: every rank updates all of its parameters."""


def _buckets(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Neighbours together while they fit a bucket; what is larger is alone in one."""
    found: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        size = piece.num_elements * piece.parameter.element_size()
        if not found or size > room:
            found.append([])
            room = BUCKET_BYTES
        found[-1].append(piece)
        room -= size
    return found


def _flat_gradient(piece: Piece, made: set[int]) -> Tensor:
    """What this rank adds to the sum of a piece."""
    grad = _gradient(piece, made)
    return piece.parameter.new_zeros(piece.num_elements) if grad is None else piece.flat(grad)


def _gradient(piece: Piece, made: set[int]) -> Tensor | None:
    """What this rank brings; None where it has nothing of its own."""
    parameter = piece.parameter
    return parameter.grad if piece.brings and id(parameter) not in made else None


def _set_gradient(piece: Piece, flat: Tensor, made: set[int]) -> None:
    parameter = piece.parameter
    if piece.boxes is None:
        parameter.grad = cast(Tensor, flat.view_as(parameter))
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
        made.add(id(parameter))
    piece.fill(parameter.grad, flat)
