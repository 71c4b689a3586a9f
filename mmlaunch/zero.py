"""ZeRO-1: the optimizer's state of a parameter is cut over the ranks that hold copies of it.

The parameters that a set of ranks sums together lie one after another in one flat buffer.
REDUCE leaves each rank the summed gradient of its equal slice of the buffer, the optimizer
updates that slice alone, and a gather brings the slices back together. Elementwise
optimizers give what they would give with whole parameters.

Source: Rajbhandari et al., arXiv:1910.02054, section 5.1 (P_os).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmlaunch.transport import Ranks, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What the optimizer of one rank updates: a parameter, or a flat slice of one.

    Attributes:
        name: the parameter's full name.
        tensor: what the optimizer is given; a slice is flat, of a scalar it is the scalar.
        span: the slice's first and end element in the local, flattened parameter; None for
            a whole one.
        counts: whether this rank is the one of several with equal parts that saves its
            state, and that adds it to the gradients' norm.
    """

    name: str
    tensor: nn.Parameter
    span: tuple[int, int] | None
    counts: bool


class FlatGroup:
    """Parameters of one type on a set of ranks, updated in equal slices.

    Args:
        members: the parameters by full name, the same on all ranks; from now on they are
            views of one buffer.
        ranks: who holds them, at least two.
        rank: this rank, one of them.
        counted: names of those whose slices on these ranks count (see :class:`Part`).

    Attributes:
        parts: what this rank updates; empty where its slice is all padding.
        names: of all members.
    """

    def __init__(
        self,
        members: Sequence[tuple[str, nn.Parameter]],
        ranks: Ranks,
        rank: int,
        *,
        counted: frozenset[str],
    ) -> None:
        self._ranks = ranks
        self.names = [name for name, _ in members]
        self._parameters = [parameter for _, parameter in members]
        total = sum(parameter.numel() for parameter in self._parameters)
        self._length = -(-total // len(ranks))
        self._low = ranks.index(rank) * self._length
        self._flat = self._new(self._length * len(ranks)).zero_()
        self.parts: list[Part] = []
        self._offsets: list[int] = []
        # Which of the members each part is of, and on how many ranks these got a gradient.
        self._member_of: list[int] = []
        self._there = self._new(0)
        start = 0
        for index, (name, parameter) in enumerate(members):
            self._adopt(name, parameter, start, counts=name in counted)
            self._member_of += [index] * (len(self.parts) - len(self._member_of))
            start += parameter.numel()

    def _new(self, length: int) -> Tensor:
        like = self._parameters[0]
        return torch.empty(length, dtype=like.dtype, device=like.device)

    def _adopt(self, name: str, parameter: nn.Parameter, start: int, *, counts: bool) -> None:
        stop = start + parameter.numel()
        view = self._flat[start:stop].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
        low, high = max(start, self._low), min(stop, self._low + self._length)
        if low < high:
            piece = self._flat[low:high].view(_piece_shape(parameter, high - low))
            span = (low - start, high - start)
            self.parts.append(Part(name=name, tensor=nn.Parameter(piece), span=span, counts=counts))
            self._offsets.append(low - self._low)

    def reduce(self, transport: Transport) -> None:
        """Sum the gradients over the ranks; each keeps those of its own slice."""
        grads = self._new(len(self._flat)).zero_()
        there = [parameter.grad is not None for parameter in self._parameters]
        start = 0
        for parameter in self._parameters:
            stop = start + parameter.numel()
            if parameter.grad is not None:
                grads[start:stop] = parameter.grad.reshape(-1)
                parameter.grad = None
            start = stop
        # Each rank's slice, and behind it for every member whether it has a gradient at all.
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
        for part, member in zip(self.parts, self._member_of, strict=True):
            if counts and counts[member] == 0:
                part.tensor.grad = None
        self._there = self._new(0)

    def gather(self, transport: Transport) -> None:
        """Bring the updated slices together on all ranks."""
        mine = self._flat[self._low : self._low + self._length].clone()
        transport.gather_flat(self._flat, mine, self._ranks)


def flat_groups(
    members: Sequence[tuple[str, nn.Parameter]],
    ranks: Ranks,
    rank: int,
    *,
    counted: frozenset[str],
) -> list[FlatGroup]:
    """One group for each type of parameter."""
    types = sorted({parameter.dtype for _, parameter in members}, key=str)
    return [
        FlatGroup([m for m in members if m[1].dtype == dtype], ranks, rank, counted=counted)
        for dtype in types
    ]


def _piece_shape(parameter: Tensor, length: int) -> tuple[int, ...]:
    return (length,) if parameter.dim() else ()
