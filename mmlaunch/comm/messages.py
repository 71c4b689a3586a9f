"""Messages: trees cut to samples, sent leaf by leaf, received into buffers, kept in a mailbox.

The *spec* of a tree is the same tree with a :class:`LeafSpec` for each leaf.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from typing_extensions import TypeAliasType

from mmlaunch.comm.batches import (
    Tree,
    element_of,
    float_leaves,
    host_lengths,
    map_tensors,
    slice_samples,
)
from mmlaunch.comm.scatter_gather import PaddedShare, TensorShare, TreeOfShares, share_of
from mmlaunch.comm.transport import Done, MessageLink, Send, Transport, Work
from mmlaunch.comm.wire import DType
from mmplan.errors import RunFailedError
from mmplan.program.instructions import Message, Op
from mmplan.program.model import MicroBatch, Program, Stage
from mmplan.ragged import Ragged

# Tags have room for this many tensors in one message.
MOST_TENSORS = 64


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """Shape of a leaf without its first dimension, and its type.

    Attributes:
        differentiable: whether something that is trained went into it.
    """

    tail: tuple[int, ...]
    dtype: DType
    ragged: bool = False
    differentiable: bool = False


Spec = TypeAliasType("Spec", LeafSpec | tuple["Spec", ...] | None)


def spec_leaves(spec: Spec) -> Iterator[LeafSpec]:
    """All leaves of a spec, in order."""
    if isinstance(spec, LeafSpec):
        yield spec
    elif isinstance(spec, tuple):
        for item in spec:
            yield from spec_leaves(item)


def tree_of(spec: Spec, make: Callable[[LeafSpec], Tree]) -> Tree:
    """The tree of a spec, each leaf made of its own."""
    if isinstance(spec, LeafSpec):
        return make(spec)
    return None if spec is None else tuple(tree_of(item, make) for item in spec)


def spec_of(tree: Tree) -> Spec:
    """The spec of a tree.

    Raises:
        RunFailedError: there is something in it that cannot travel.
    """
    if isinstance(tree, Ragged):
        rows = tree.values
        return LeafSpec(tuple(rows.shape[1:]), rows.dtype, True, rows.requires_grad)
    if isinstance(tree, Tensor):
        if tree.dim() == 0:
            raise RunFailedError(
                "a block returned a tensor without a batch dimension",
                hint="blocks return tensors whose first dimension is the samples",
            )
        return LeafSpec(tuple(tree.shape[1:]), tree.dtype, False, tree.requires_grad)
    if isinstance(tree, tuple):
        return tuple(map(spec_of, tree))
    if tree is None:
        return None
    raise RunFailedError(
        f"a block returned a {type(tree).__name__}",
        hint="blocks take and return tensors, mmplan.Ragged, tuples of these or None",
    )


def fits(tree: Tree, spec: Spec) -> bool:
    """Whether a tree is built as a spec says; rows that are not there may have any shape."""
    if spec is None or tree is None:
        return spec is tree
    if isinstance(spec, tuple):
        plain = isinstance(tree, tuple) and not isinstance(tree, Ragged)
        return plain and len(tree) == len(spec) and all(map(fits, tree, spec))
    if isinstance(tree, Ragged) and spec.ragged and not len(tree.values):
        return True
    found = spec_of(tree)
    if not isinstance(found, LeafSpec):
        return False
    # A gradient that is not asked for now may have been when the spec was made.
    return replace(found, differentiable=spec.differentiable) == spec


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


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSource:
    """Where the tensors of one message come from.

    Attributes:
        tag: of the first tensor.
        share: what this rank receives of each tensor; None for all of it.
    """

    transport: Transport
    peer: int
    tag: int
    backward: bool
    share: TensorShare | None

    def receive(
        self, index: int, shape: tuple[int, ...], dtype: torch.dtype, *, whole: bool = False
    ) -> tuple[Work, Tensor | PaddedShare]:
        """Post the receive of one tensor, or of the share of it."""
        share = None if whole else self.share
        size = (share.padded(prod(shape)),) if share else shape
        buffer = torch.empty(size, dtype=dtype, device=self.transport.device)
        own = buffer[: share.numbers(prod(shape))] if share else buffer
        work = Done()
        if own.numel():
            work = self.transport.irecv(own, self.peer, self.tag + index, backward=self.backward)
        return work, PaddedShare(buffer, shape) if share else buffer


class ForwardReceive:
    """A posted receive of a forward message; ``wait`` gives the tree.

    The values of ``Ragged`` are only received when their lengths are known. With a share the
    tree has a :class:`PaddedShare` in place of each tensor, lengths excepted.
    """

    def __init__(self, source: MessageSource, spec: Spec, samples: int) -> None:
        self._source, self._samples = source, samples
        self._num_tensors = 0
        self._posted = self._post(spec)

    def wait(self) -> TreeOfShares:
        """The tree that was sent."""
        return self._collect(self._posted)

    def _post(self, spec: Spec) -> Any:
        if isinstance(spec, tuple):
            return [self._post(item) for item in spec]
        if spec is None:
            return None
        index = self._num_tensors
        if spec.ragged:
            self._num_tensors += 2
            lengths = self._source.receive(index, (self._samples,), torch.int64, whole=True)
            return spec, lengths, index + 1
        self._num_tensors += 1
        return spec, self._source.receive(index, (self._samples, *spec.tail), spec.dtype), None

    def _collect(self, posted: Any) -> TreeOfShares:
        if isinstance(posted, list):
            return tuple(map(self._collect, posted))
        if posted is None:
            return None
        spec, (work, buffer), values_index = posted
        work.wait()
        if not spec.ragged:
            return buffer
        shape = (sum(host_lengths(buffer)), *spec.tail)
        values_work, values = self._source.receive(values_index, shape, spec.dtype)
        values_work.wait()
        return Ragged(cast(Tensor, values), buffer)


class BackwardReceive:
    """A posted receive of a backward message: one gradient for each floating leaf.

    The shape of a ragged leaf is that of the forward output, which may not exist yet when the
    receive is posted: only dense leaves are posted early. In place of the gradient of an empty
    leaf comes one number: whether there is one. A consumer that leaves a modality without rows
    out gives none, and its parameters then have none, as in one process.
    """

    def __init__(self, source: MessageSource, spec: Spec, samples: int) -> None:
        self._source = source
        leaves = [leaf for leaf in spec_leaves(spec) if leaf.dtype.is_floating_point]
        self._posted: list[tuple[Work, Tensor | PaddedShare]] | None = None
        if not any(leaf.ragged for leaf in leaves):
            self._posted = [
                self._post(i, (samples, *leaf.tail), leaf.dtype) for i, leaf in enumerate(leaves)
            ]

    def _post(
        self, index: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Work, Tensor | PaddedShare]:
        if prod(shape):
            return self._source.receive(index, shape, dtype)
        return self._source.receive(index, (1,), torch.bool, whole=True)

    def wait(self, output: Tree) -> tuple[Tensor | PaddedShare | None, ...]:
        """Gradients of the floating leaves of ``output``, the samples that were sent.

        None for an empty leaf that the consumer did not use.
        """
        leaves = list(float_leaves(output))
        posted = self._posted
        if posted is None:
            posted = [self._post(i, tuple(x.shape), x.dtype) for i, x in enumerate(leaves)]
        for work, _ in posted:
            work.wait()
        received = zip(leaves, (buffer for _, buffer in posted), strict=True)
        return tuple(
            buffer if leaf.numel() else torch.zeros_like(leaf) if cast(Tensor, buffer) else None
            for leaf, buffer in received
        )


T = TypeVar("T")


class Mailbox:
    """Posts the sends and receives of a program.

    A receive is kept for the compute that takes its message.

    Args:
        program: the whole program.
        transport: moves tensors between ranks.
        specs: output spec of every stage (:func:`mmlaunch.model.shape_inference.infer_shapes`).
    """

    def __init__(self, program: Program, transport: Transport, specs: Sequence[Spec]) -> None:
        self._program, self._transport, self._specs = program, transport, specs
        self._most_samples = max(program.batches.values())

    def begin(self) -> None:
        """A step begins."""
        self._forward: defaultdict[MicroBatch, list[tuple[Message, ForwardReceive]]]
        self._forward = defaultdict(list)
        self._backward: defaultdict[MicroBatch, list[tuple[Message, BackwardReceive]]]
        self._backward = defaultdict(list)
        self._outbox = Outbox(self._transport)

    def take_forward(self, stage: Stage, mb: int) -> list[tuple[Message, ForwardReceive]]:
        """Posted receives of a forward's inputs, once."""
        return _in_group_order(self._forward.pop((stage.index, mb), []))

    def take_backward(self, stage: Stage, mb: int) -> list[tuple[Message, BackwardReceive]]:
        """Posted receives of the gradients of a micro-batch's output, once."""
        return _in_group_order(self._backward.pop((stage.index, mb), []))

    def post_receive(self, message: Message) -> None:
        """Post a receive; the compute that needs it waits."""
        key = message.stage, message.mb
        edge = self._program.edges[message.edge]
        producer = self._program.stages[edge.producer]
        spec = element_of(self._specs[edge.producer], edge.element, producer.module)
        source = MessageSource(
            transport=self._transport,
            peer=message.peer,
            tag=self._tag(message),
            backward=message.op == Op.RECV_B,
            share=self._share(message, self._transport.rank),
        )
        samples = message.stop - message.start
        if source.backward:
            self._backward[key].append((message, BackwardReceive(source, spec, samples)))
        else:
            self._forward[key].append((message, ForwardReceive(source, spec, samples)))

    def post_send(self, message: Message, tree: Tree) -> None:
        """Post the send of a message's samples.

        Args:
            message: a send.
            tree: the stage's output for the micro-batch; after a backward its assembled input,
                whose leaves have gradients.

        Raises:
            RunFailedError: more tensors than a message may have, or other ones than the receiver
                waits for.
        """
        stage = self._program.stages[message.stage]
        edge = self._program.edges[message.edge]
        d, _ = stage.place(self._transport.rank)
        first = stage.microbatches[d][message.mb][0]
        low, high = message.start - first, message.stop - first
        share = self._share(message, message.peer)
        if message.op == Op.SEND_F:
            output = element_of(tree, edge.element, stage.module)
            spec = element_of(self._specs[edge.producer], edge.element, stage.module)
            if not fits(output, spec):
                raise RunFailedError(
                    f"modules.{stage.module} returns {_shown(spec_of(output))} for a micro-batch, "
                    f"others wait for {_shown(spec)}",
                    hint="return the same for every micro-batch; where no sample has a row, "
                    "mmplan.Ragged with 0 rows",
                )
            tensors = message_tensors(slice_samples(output, low, high), share)
        else:
            cuts = float_leaves(slice_samples(map_tensors(tree, _gradient_of), low, high))
            tensors = [
                (cut if share is None else share.of(cut))
                if cut.numel()
                else torch.tensor([leaf.grad is not None], device=leaf.device)
                for leaf, cut in zip(float_leaves(tree), cuts, strict=True)
            ]
        if len(tensors) > MOST_TENSORS:
            raise RunFailedError(f"{stage.module} sends {len(tensors)} tensors in one message")
        backward = message.op == Op.SEND_B
        # A forward message is known to be received when its gradient has come.
        name = None if backward or not edge.carries_gradient else _route(message)
        self._outbox.send(tensors, message.peer, self._tag(message), backward=backward, name=name)

    def gradients_received(self, messages: Iterable[Message]) -> None:
        """Let go of the forward sends that received gradients answer."""
        for message in messages:
            self._outbox.received(_route(message))

    def finish(self) -> None:
        """Wait until every send is over."""
        self._outbox.finish()

    def _share(self, message: Message, receiver: int) -> TensorShare | None:
        """The share of a message that a rank receives; None where it receives all of it."""
        backward = message.op in (Op.SEND_B, Op.RECV_B)
        edge = self._program.edges[message.edge]
        return share_of(self._program, edge, receiver, backward=backward)

    def _tag(self, message: Message) -> int:
        backward = message.op in (Op.SEND_B, Op.RECV_B)
        number = (message.edge * 2 + backward) * self._most_samples + message.start
        return number * MOST_TENSORS


def _route(message: Message) -> tuple[int, int, int]:
    """The same for a forward message and its gradient, on the forward's sender."""
    return message.edge, message.start, message.peer


def _in_group_order(receives: list[tuple[Message, T]]) -> list[tuple[Message, T]]:
    """Receives in the order in which a group gathers shares: the same on all its ranks."""
    return sorted(receives, key=lambda item: (item[0].edge, item[0].start))


def _shown(spec: Spec) -> str:
    """A spec in words; the first dimension, whose size varies, is a star."""
    if isinstance(spec, LeafSpec):
        sizes = ", ".join(map(str, ("*", *spec.tail)))
        kind = str(spec.dtype).removeprefix("torch.")
        return f"{'Ragged ' if spec.ragged else ''}[{sizes}] {kind}"
    return "None" if spec is None else f"({', '.join(map(_shown, spec))})"


def _gradient_of(tensor: Tensor) -> Tensor:
    """A floating tensor's gradient, zeros where none reached it; other tensors as they are."""
    if not tensor.is_floating_point():
        return tensor
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
