"""ZeRO-1: the optimizer's state of a parameter is cut over the ranks that hold copies of it.

The parameters that a set of ranks sums together lie one after another in one flat buffer.
REDUCE leaves each rank the summed gradient of its equal slice of the buffer, the optimizer
updates that slice alone, and a gather brings the slices back together. Elementwise
optimizers give what they would give with whole parameters.

Source: Rajbhandari et al., arXiv:1910.02054, section 5.1 (P_os).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from mmlaunch.comm.transport import Transport
from mmlaunch.execute.gradient_buckets import Piece, UpdatedSlice
from mmlaunch.model.shard_layout import flat_parts
from mmplan.program.rank_metadata import BUCKET_BYTES
from mmplan.program.shards import Ranks


class FlatGroups:
    """Pieces whose gradients are summed over ranks, each of which updates a slice.

    Args:
        pieces: the same on all ranks, but for where they lie in the local parameters.
        ranks: who sums, at least two.
        rank: this rank, one of them.
        counted: names of those whose slices on these ranks count (see :class:`UpdatedSlice`).

    Attributes:
        names: of all pieces.
        parts: what this rank updates.
    """

    def __init__(
        self, pieces: Sequence[Piece], ranks: Ranks, rank: int, *, counted: frozenset[str]
    ) -> None:
        types = sorted({piece.parameter.dtype for piece in pieces}, key=str)
        self._groups = [
            FlatGroup(
                [p for p in pieces if p.parameter.dtype == dtype], ranks, rank, counted=counted
            )
            for dtype in types
        ]
        self.names = [piece.name for piece in pieces]
        self.parts = [part for group in self._groups for part in group.parts]

    def reduce(self, transport: Transport, made: set[int]) -> None:
        """Sum the gradients; ``made`` is for sums in place (:class:`GradientSum`)."""
        for group in self._groups:
            group.reduce(transport)

    def drop_absent(self) -> None:
        """Slices of parameters that got no gradient on any rank have none."""
        for group in self._groups:
            group.drop_absent()

    def gather(self, transport: Transport) -> None:
        """Bring the updated slices together on all ranks."""
        for group in self._groups:
            group.gather(transport)


class FlatGroup:
    """Pieces of one type on a set of ranks, updated in equal slices.

    Whole parameters become views of one buffer. Parts of larger shards stay where they are;
    what is updated of them are views on boxes.

    Args:
        pieces: see :class:`FlatGroups`.
        ranks: who holds them, at least two.
        rank: this rank, one of them.
        counted: names of those whose slices on these ranks count (see :class:`UpdatedSlice`).

    Attributes:
        parts: what this rank updates; empty where its slice is all padding.
    """

    def __init__(
        self, pieces: Sequence[Piece], ranks: Ranks, rank: int, *, counted: frozenset[str]
    ) -> None:
        self._ranks, self._pieces = ranks, pieces
        total = sum(piece.num_elements for piece in pieces)
        self._length = -(-total // len(ranks))
        self._low = ranks.index(rank) * self._length
        self._chunks = self._in_chunks()
        in_boxes = any(piece.boxes is not None for piece in pieces)
        self._flat = None if in_boxes else self._new(self._length * len(ranks)).zero_()
        self.parts: list[UpdatedSlice] = []
        self._offsets: list[int] = []
        # Which piece each part is of, and on how many ranks these got a gradient.
        self._piece_of: list[int] = []
        self._there = self._new(0)
        for index, (piece, start, stop) in enumerate(self._laid_out()):
            low, high = max(start, self._low), min(stop, self._low + self._length)
            if self._flat is not None:
                _adopt(piece.parameter, self._flat[start:stop])
            if low < high:
                self._cut(piece, start, low, high, counts=piece.name in counted)
            self._piece_of += [index] * (len(self.parts) - len(self._piece_of))

    def _laid_out(self) -> Iterator[tuple[Piece, int, int]]:
        """Each piece with its first and end element among all."""
        start = 0
        for piece in self._pieces:
            yield piece, start, start + piece.num_elements
            start += piece.num_elements

    def _in_chunks(self) -> list[tuple[tuple[int, int], list[tuple[Piece, slice, int, slice]]]]:
        """The slices of all ranks, so much of each at a time as together fills a bucket.

        Returns:
            Ranges of every slice, and what is in them: elements of a piece, and which of which
            slice's in that range they are.
        """
        like = self._pieces[0].parameter
        width = max(1, BUCKET_BYTES // (like.element_size() * len(self._ranks)))
        found: list[tuple[tuple[int, int], list[tuple[Piece, slice, int, slice]]]] = []
        for low in range(0, max(self._length, 1), width):
            high = min(low + width, self._length)
            found.append(((low, high), []))
            for piece, start, stop in self._laid_out():
                for k in range(len(self._ranks)):
                    first = k * self._length + low
                    a, b = max(start, first), min(stop, first + high - low)
                    if a < b:
                        own = slice(a - start, b - start)
                        found[-1][1].append((piece, own, k, slice(a - first, b - first)))
        return found

    def _new(self, length: int) -> Tensor:
        like = self._pieces[0].parameter
        return torch.empty(length, dtype=like.dtype, device=like.device)

    def _cut(self, piece: Piece, start: int, low: int, high: int, *, counts: bool) -> None:
        """Add what this rank updates of a piece: elements [low, high) among all."""
        name, parameter = piece.name, piece.parameter
        if self._flat is not None:
            tensor = self._flat[low:high].view((high - low,) if parameter.dim() else ())
            span = low - start, high - start
            self._add(
                UpdatedSlice(name=name, tensor=nn.Parameter(tensor), counts=counts, span=span), low
            )
            return
        for local in flat_parts(piece.boxes or (), low - start, high - start):
            tensor = nn.Parameter(parameter.data[local.slices])
            ((full, _),) = piece.place.to_full(local)
            self._add(UpdatedSlice(name=name, tensor=tensor, counts=counts, box=full), low)
            low += tensor.numel()

    def _add(self, part: UpdatedSlice, position: int) -> None:
        self.parts.append(part)
        self._offsets.append(position - self._low)

    def reduce(self, transport: Transport) -> None:
        """Sum the gradients over the ranks; each keeps those of its own slice."""
        there = [p.brings and p.parameter.grad is not None for p in self._pieces]
        # This rank's slice, and behind it for every piece on how many ranks it has a gradient.
        mine = self._new(self._length + len(there))
        flags = mine.new_tensor(there).expand(len(self._ranks), -1)
        for (low, high), segments in self._chunks:
            full = mine.new_zeros(len(self._ranks), high - low)
            for piece, own, k, where in segments:
                if piece.brings and piece.parameter.grad is not None:
                    full[k, where] = piece.flat(piece.parameter.grad)[own]
            if high == self._length:
                full, high = torch.cat([full, flags], dim=1), len(mine)
            transport.reduce_scatter(mine[low:high], full.view(-1), self._ranks)
        for piece in self._pieces:
            # Other parts of a larger shard are still to be summed.
            if piece.boxes is None:
                piece.parameter.grad = None
        self._there = mine[self._length :]
        for part, offset in zip(self.parts, self._offsets, strict=True):
            grad = mine[offset : offset + part.tensor.numel()]
            part.tensor.grad = grad.view(part.tensor.shape)

    def drop_absent(self) -> None:
        """Slices of parameters that got no gradient on any rank have none."""
        counts = self._there.tolist()
        for part, piece in zip(self.parts, self._piece_of, strict=True):
            if counts and counts[piece] == 0:
                part.tensor.grad = None
        for piece in self._pieces:
            piece.parameter.grad = None
        self._there = self._new(0)

    def gather(self, transport: Transport) -> None:
        """Bring the updated slices together on all ranks."""
        if self._flat is not None:
            mine = self._flat[self._low : self._low + self._length].clone()
            transport.gather_flat(self._flat, mine, self._ranks)
            return
        mine = self._new(self._length).zero_()
        for part, offset in zip(self.parts, self._offsets, strict=True):
            mine[offset : offset + part.tensor.numel()] = part.tensor.detach().reshape(-1)
        full = self._new(self._length * len(self._ranks))
        transport.gather_flat(full, mine, self._ranks)
        for piece, start, stop in self._laid_out():
            piece.fill(piece.parameter.data, full[start:stop])


def _adopt(parameter: nn.Parameter, buffer: Tensor) -> None:
    """Make a parameter a view of a flat buffer."""
    view = buffer.view(parameter.shape)
    view.copy_(parameter.detach())
    parameter.data = view
