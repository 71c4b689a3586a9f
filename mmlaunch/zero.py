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

from mmlaunch.pieces import Part, Piece
from mmlaunch.places import flat_parts
from mmlaunch.transport import Ranks, Transport


class FlatGroups:
    """Pieces whose gradients are summed over ranks, each of which updates a slice.

    Args:
        pieces: the same on all ranks, but for where they lie in the local parameters.
        ranks: who sums, at least two.
        rank: this rank, one of them.
        counted: names of those whose slices on these ranks count (see :class:`Part`).

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
        counted: names of those whose slices on these ranks count (see :class:`Part`).

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
        in_boxes = any(piece.boxes is not None for piece in pieces)
        self._flat = None if in_boxes else self._new(self._length * len(ranks)).zero_()
        self.parts: list[Part] = []
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

    def _new(self, length: int) -> Tensor:
        like = self._pieces[0].parameter
        return torch.empty(length, dtype=like.dtype, device=like.device)

    def _cut(self, piece: Piece, start: int, low: int, high: int, *, counts: bool) -> None:
        """Add what this rank updates of a piece: elements [low, high) among all."""
        name, parameter = piece.name, piece.parameter
        if self._flat is not None:
            tensor = self._flat[low:high].view((high - low,) if parameter.dim() else ())
            span = low - start, high - start
            self._add(Part(name=name, tensor=nn.Parameter(tensor), counts=counts, span=span), low)
            return
        for local in flat_parts(piece.boxes or (), low - start, high - start):
            tensor = nn.Parameter(parameter.data[local.slices])
            ((full, _),) = piece.place.to_full(local)
            self._add(Part(name=name, tensor=tensor, counts=counts, box=full), low)
            low += tensor.numel()

    def _add(self, part: Part, position: int) -> None:
        self.parts.append(part)
        self._offsets.append(position - self._low)

    def reduce(self, transport: Transport) -> None:
        """Sum the gradients over the ranks; each keeps those of its own slice."""
        grads = self._new(self._length * len(self._ranks)).zero_()
        there: list[bool] = []
        for piece, start, stop in self._laid_out():
            grad = piece.parameter.grad if piece.brings else None
            if grad is not None:
                grads[start:stop] = piece.flat(grad)
            there.append(grad is not None)
            # Other parts of a larger shard are still to be summed.
            if piece.boxes is None:
                piece.parameter.grad = None
        # Each rank's slice, and behind it for every piece whether it has a gradient at all.
        slices = grads.view(len(self._ranks), self._length)
        flags = torch.tensor(there, dtype=grads.dtype).to(grads.device)
        full = torch.cat([slices, flags.expand(len(self._ranks), -1)], dim=1).view(-1)
        mine = self._new(self._length + len(there))
        transport.reduce_scatter(mine, full, self._ranks)
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
