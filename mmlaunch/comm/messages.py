"""Messages: trees cut to samples, sent leaf by leaf and received into posted buffers.

The *spec* of a tree is the same tree with a :class:`LeafSpec` for each leaf.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import TypeAliasType

from mmlaunch.comm.batches import Tree, float_leaves
from mmlaunch.comm.scatter_gather import PaddedShare, TensorShare, TreeOfShares
from mmlaunch.comm.transport import Done, MessageLink, Send, Transport, Work
from mmlaunch.comm.wire import DType
from mmplan.errors import RunFailedError
from mmplan.program.instructions import Message, Op
from mmplan.program.model import Program
from mmplan.ragged import Ragged

# Tags have room for this many tensors in one message.
MOST_TENSORS = 64


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """Shape of a leaf without its first dimension, and its type."""

    tail: tuple[int, ...]
    dtype: DType
    ragged: bool = False

    @property
    def has_gradient(self) -> bool:
        """Whether gradients travel back for it."""
        return self.dtype.is_floating_point


Spec = TypeAliasType("Spec", LeafSpec | tuple["Spec", ...] | None)


def spec_of(tree: Tree) -> Spec:
    """The spec of a tree.

    Raises:
        RunFailedError: there is something in it that cannot travel.
    """
    if isinstance(tree, Ragged):
        return LeafSpec(tuple(tree.values.shape[1:]), tree.values.dtype, ragged=True)
    if isinstance(tree, Tensor):
        if tree.dim() == 0:
            raise RunFailedError(
                "a block returned a tensor without a batch dimension",
                hint="blocks return tensors whose first dimension is the samples",
            )
        return LeafSpec(tuple(tree.shape[1:]), tree.dtype)
    if isinstance(tree, tuple):
        return tuple(map(spec_of, tree))
    if tree is None:
        return None
    raise RunFailedError(
        f"a block returned a {type(tree).__name__}",
        hint="blocks take and return tensors, mmplan.Ragged, tuples of these or None",
    )


class Outbox:
    """Posted sends; tensors are kept until their send is over."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._sent: deque[tuple[Send, Tensor]] = deque()
        self._by_name: defaultdict[Hashable, list[Send]] = defaultdict(list)

    def send(
        self, tensors: list[Tensor], peer: int, tag: int, *, backward: bool, name: Hashable = None
    ) -> None:
        """Start sending; returns at once. Nothing is sent of an empty tensor.

        Args:
            tensors: of one message.
            peer: the receiver.
            tag: of the first tensor.
            backward: whether the message is one of a backward.
            name: for :meth:`received`, where a later message shows that this one was received.
        """
        self._forget()
        for i, tensor in enumerate(tensors):
            if not tensor.numel():
                continue
            sent = tensor.detach().contiguous()
            work = self._transport.isend(sent, peer, tag + i, backward=backward)
            self._sent.append((work, sent))
            if name is not None:
                self._by_name[name].append(work)

    def received(self, name: Hashable) -> None:
        """Let go of the tensors of a message that is known to have been received."""
        for work in self._by_name.pop(name, ()):
            work.wait()
        self._forget()

    def finish(self) -> None:
        """Wait until everything is sent."""
        for work, _ in self._sent:
            # gloo's sends wait for ever when they are waited for twice.
            if not work.is_completed():
                work.wait()
        self._sent.clear()
        self._by_name.clear()

    def _forget(self) -> None:
        """Let go of finished sends, the oldest first: sends end about in their order."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()


def message_links(program: Program) -> list[MessageLink]:
    """Every link of a step's messages, in one order on all ranks."""
    return sorted(
        {
            (rank, item.peer, item.op == Op.SEND_B)
            for rank, row in enumerate(program.instructions)
            for item in row
            if isinstance(item, Message) and item.is_send
        }
    )


def message_tensors(tree: Tree, share: TensorShare | None) -> list[Tensor]:
    """Tensors of a forward message, in order: whole, or a share of each but of lengths."""
    if isinstance(tree, Ragged):
        return [tree.lengths, *message_tensors(tree.values, share)]
    if isinstance(tree, Tensor):
        return [tree if share is None else share.of(tree)]
    if isinstance(tree, tuple):
        return [tensor for item in tree for tensor in message_tensors(item, share)]
    return []


def _receive(
    transport: Transport,
    peer: int,
    tag: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    backward: bool,
    share: TensorShare | None,
) -> tuple[Work, Tensor | PaddedShare]:
    """Post the receive of a tensor, or of a share of it."""
    size = (share.padded(prod(shape)),) if share else shape
    buffer = torch.empty(size, dtype=dtype, device=transport.device)
    own = buffer[: share.numbers(prod(shape))] if share else buffer
    work = transport.irecv(own, peer, tag, backward=backward) if own.numel() else Done()
    return work, PaddedShare(buffer, shape) if share else buffer


class ForwardReceive:
    """A posted receive of a forward message; ``wait`` gives the tree.

    The values of ``Ragged`` are only received when their lengths are known. With a share the
    tree has a :class:`PaddedShare` in place of each tensor, lengths excepted.
    """

    def __init__(
        self,
        transport: Transport,
        spec: Spec,
        samples: int,
        peer: int,
        tag: int,
        share: TensorShare | None = None,
    ) -> None:
        self._transport, self._peer, self._next_tag = transport, peer, tag
        self._share = share
        self._posted = self._post(spec, samples)

    def wait(self) -> TreeOfShares:
        """The tree that was sent."""
        return self._collect(self._posted)

    def _post(self, spec: Spec, samples: int) -> Any:
        if isinstance(spec, LeafSpec):
            if spec.ragged:
                lengths = self._receive((samples,), torch.int64, None)
                self._next_tag += 1
                return spec, lengths, self._next_tag - 1
            return spec, self._receive((samples, *spec.tail), spec.dtype, self._share), 0
        if isinstance(spec, tuple):
            return [self._post(item, samples) for item in spec]
        return None

    def _receive(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        share: TensorShare | None,
        tag: int | None = None,
    ) -> tuple[Work, Any]:
        if tag is None:
            tag, self._next_tag = self._next_tag, self._next_tag + 1
        source = self._transport, self._peer, tag
        return _receive(*source, shape, dtype, backward=False, share=share)

    def _collect(self, posted: Any) -> TreeOfShares:
        if isinstance(posted, list):
            return tuple(map(self._collect, posted))
        if posted is None:
            return None
        spec, (work, buffer), values_tag = posted
        work.wait()
        if not spec.ragged:
            return buffer
        shape = (int(buffer.sum()), *spec.tail)
        values_work, values = self._receive(shape, spec.dtype, self._share, values_tag)
        values_work.wait()
        return Ragged(cast(Tensor, values), buffer)


class BackwardReceive:
    """A posted receive of a backward message: one gradient for each floating leaf.

    The shape of a ragged leaf is that of the forward output, which may not exist yet when the
    receive is posted: only dense leaves are posted early.
    """

    def __init__(
        self,
        transport: Transport,
        spec: Spec,
        samples: int,
        peer: int,
        tag: int,
        share: TensorShare | None = None,
    ) -> None:
        self._transport, self._peer, self._tag, self._share = transport, peer, tag, share
        leaves = [leaf for leaf in _spec_leaves(spec) if leaf.has_gradient]
        self._posted: list[tuple[Work, Tensor | PaddedShare]] | None = None
        if not any(leaf.ragged for leaf in leaves):
            shapes = [((samples, *leaf.tail), leaf.dtype) for leaf in leaves]
            self._posted = [self._post(i, *item) for i, item in enumerate(shapes)]

    def wait(self, output: Tree) -> tuple[Tensor | PaddedShare, ...]:
        """Gradients of the floating leaves of ``output``, the samples that were sent."""
        posted = self._posted
        if posted is None:
            leaves = list(float_leaves(output))
            posted = [self._post(i, tuple(x.shape), x.dtype) for i, x in enumerate(leaves)]
        for work, _ in posted:
            work.wait()
        return tuple(buffer for _, buffer in posted)

    def _post(
        self, index: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Work, Tensor | PaddedShare]:
        source = self._transport, self._peer, self._tag + index
        return _receive(*source, shape, dtype, backward=True, share=self._share)


def _spec_leaves(spec: Spec) -> Iterator[LeafSpec]:
    if isinstance(spec, LeafSpec):
        yield spec
    elif isinstance(spec, tuple):
        for item in spec:
            yield from _spec_leaves(item)
