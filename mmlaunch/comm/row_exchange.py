"""A tensor-parallel group as blocks see it, by a few collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from mmlaunch.comm.transport import Pieces, Work

# Up to it, gloo's all-reduce takes the time of its hops around the ring; an exchange has one hop.
_SMALL_BYTES = 2**20


class RowExchange:
    """Sums over a group, gathers in it, and sums of which each rank has a part.

    On CUDA these are NCCL's collectives. gloo's all-gather takes twice as long as an exchange, and
    its reduce-scatter longer than an all-reduce; here a rank sends to each other what that one
    needs, and never to itself.

    Args:
        index: this rank's place.
        count: ranks of the group.
    """

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over the group, the same on all ranks."""
        if tensor.is_cuda or tensor.nbytes * (self.count - 1) > _SMALL_BYTES:
            self.all_reduce_large(tensor)
        else:
            parts = cast("list[Tensor]", self.start_gather(tensor)())
            tensor.copy_(torch.stack(parts).sum(0))

    def all_reduce_large(self, tensor: Tensor) -> None:
        """Replace the tensor by its sum over the group, with the backend's all-reduce."""
        raise NotImplementedError

    def start_gather_flat(self, full: Tensor, mine: Tensor) -> Work:
        """Begin to fill the flat ``full`` with every rank's ``mine``; on CUDA."""
        raise NotImplementedError

    def reduce_scatter_flat(self, mine: Tensor, full: Tensor) -> None:
        """Fill the flat ``mine`` with this rank's part of the sum of ``full``; on CUDA."""
        raise NotImplementedError

    def start_exchange(self, received: Pieces, sent: Pieces) -> Work:
        """Begin to send a part to each rank and to receive one from each, in their order."""
        raise NotImplementedError

    def start_gather(self, mine: Tensor) -> Callable[[], Tensor | list[Tensor]]:
        """What waits for every rank's ``mine``, all of one shape.

        In a list this rank's is the tensor itself.
        """
        if mine.is_cuda:
            full, sent = mine.new_empty((self.count, *mine.shape)), mine.contiguous()
            work = self.start_gather_flat(full.view(-1), sent.view(-1))
        else:
            sent = mine.expand(self.count - 1, *mine.shape).contiguous()
            full, work = self._from_others(sent)

        def finish() -> Tensor | list[Tensor]:
            # What is sent lives until here.
            nonlocal sent
            work.wait()
            del sent
            if mine.is_cuda:
                return full
            parts = list(full)
            parts.insert(self.index, mine)
            return parts

        return finish

    def sum_own(self, parts: Tensor) -> Tensor:
        """The sum of what the ranks have for this one; ``parts`` are this rank's [count, ...]."""
        own = parts[self.index]
        if own.is_cuda:
            mine = own.new_empty(own.shape)
            self.reduce_scatter_flat(mine.view(-1), parts.contiguous().view(-1))
            return mine
        others = [part for place, part in enumerate(parts) if place != self.index]
        # Of two ranks nothing is copied twice.
        found, work = self._from_others(torch.stack(others))
        work.wait()
        return own + found[0] if self.count == 2 else found.sum(0).add_(own)

    def _from_others(self, sent: Tensor) -> tuple[Tensor, Work]:
        """[count - 1, ...] in the order of the others, of as much for them, after the wait."""
        found = torch.empty_like(sent)
        size = sent[0].numel()
        lengths = [0 if place == self.index else size for place in range(self.count)]
        return found, self.start_exchange((found.view(-1), lengths), (sent.view(-1), lengths))
