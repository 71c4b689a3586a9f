"""Messages: trees cut to samples, sent leaf by leaf, received into buffers, kept in a mailbox.

The *spec* of a tree is the same tree with a :class:`LeafSpec` for each leaf. What a host must know
before it can post a receive, the lengths of ragged leaves, goes beside the message, between hosts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from typing_extensions import TypeAliasType

from mmlaunch.comm.batches import (
    Tree,
    element_of,
    float_leaves,
    map_tensors,
    slice_samples,
    to_device,
)
from mmlaunch.comm.scatter_gather import PaddedShare, TensorShare, TreeOfShares, share_of
from mmlaunch.comm.transport import Deferred, Done, TransferEnd, Transport, Work
from mmlaunch.comm.wire import DType
from mmplan.errors import RunFailedError
from mmplan.program.communicators import Channels, CommGroup
from mmplan.program.instructions import Message, Op
from mmplan.program.model import Edge, MicroBatch, Program
from mmplan.program.sent_messages import MessagesUnderWay
from mmplan.ragged import Ragged, host_lengths

# Tags have room for this many tensors in one message, and one beside it.
MOST_TENSORS = 64
# Where nothing goes beside a message, and where nothing is waited for.
_NOTHING = torch.empty(0)
_DONE = Done()


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
    ragged = isinstance(tree, Ragged)
    rows = tree.values if ragged else tree
    if not isinstance(rows, Tensor) or ragged != spec.ragged:
        return False
    if ragged and not len(rows):
        return True
    # A gradient that is not asked for now may have been when the spec was made.
    return rows.dim() > 0 and rows.shape[1:] == spec.tail and rows.dtype == spec.dtype


def message_tensors(tree: Tree, share: TensorShare | None) -> list[Tensor]:
    """Tensors of a forward message, in order: whole, or a share of each. Lengths go beside it."""
    if isinstance(tree, Ragged):
        return message_tensors(tree.values, share)
    if isinstance(tree, Tensor):
        return [tree if share is None else share.of(tree)]
    if isinstance(tree, tuple):
        return [tensor for item in tree for tensor in message_tensors(item, share)]
    return []


def _all_lengths(tree: Tree) -> list[Sequence[int]]:
    """The lengths of each ``Ragged`` in a tree, in order."""
    if isinstance(tree, Ragged):
        return [host_lengths(tree.lengths)]
    if isinstance(tree, tuple):
        return [lengths for item in tree for lengths in _all_lengths(item)]
    return []


class Carrier(Protocol):
    """The part of a transport that messages need."""

    def post(self, transfers: Sequence[TransferEnd], channel: CommGroup) -> Work:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        ...

    def send_on_host(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        ...

    def receive_on_host(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """See :class:`mmlaunch.comm.transport.Transport`."""
        ...


class _OwnMessages:
    """Carries what a rank sends to itself. In every program the send comes before the wait.

    Whole messages are handed over as they are: nothing is copied.
    """

    def __init__(self) -> None:
        self._sent: dict[int, Tensor] = {}
        self._handed: dict[int, Any] = {}

    def hand_over(self, tag: int, message: Any) -> None:
        """Keep a message for :meth:`take`."""
        self._handed[tag] = message

    def take(self, tag: int) -> Any:
        """A message, once."""
        return self._handed.pop(tag)

    def post(self, transfers: Sequence[TransferEnd], channel: CommGroup) -> Work:
        """See :class:`Carrier`."""
        received = [item for item in transfers if not item.is_send]
        self._sent.update((item.tag, item.tensor) for item in transfers if item.is_send)
        return Deferred(lambda: [r.tensor.copy_(self._sent.pop(r.tag)) for r in received])

    def send_on_host(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """See :class:`Carrier`."""
        self._sent[tag] = tensor
        return Done()

    def receive_on_host(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """See :class:`Carrier`."""
        return Deferred(lambda: tensor.copy_(self._sent.pop(tag)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Way:
    """How a message goes; the same in every step.

    Attributes:
        message: the instruction.
        edge: its.
        module: whose output goes along it, forward or as a gradient.
        has_backward: whether the message's own stage has one.
        tag: of what goes over the host; the tensors' follow it.
        share: what its receiver takes of each tensor; None for all of it.
        own: hands it over, where a rank sends itself whole tensors.
        spec: of what the edge takes of the producer's output.
        leaves: of the spec; of a gradient, the floating ones.
        ragged: how many of them are.
        samples: first and end, counted in this rank's micro-batch.
    """

    message: Message
    edge: Edge
    module: str
    has_backward: bool
    carrier: Carrier
    device: torch.device
    channel: CommGroup
    peer: int
    tag: int
    share: TensorShare | None
    spec: Spec
    leaves: tuple[LeafSpec, ...]
    ragged: int
    samples: tuple[int, int]
    own: _OwnMessages | None

    @property
    def num_samples(self) -> int:
        """Of the message."""
        return self.samples[1] - self.samples[0]


class _Receive:
    """A message on its way here, posted when its shapes are known.

    Args:
        way: of the message.
    """

    def __init__(self, way: Way) -> None:
        self.way = way
        self._buffers: list[Tensor | PaddedShare] = []
        self._work: Work = _DONE

    def can_post(self) -> bool:
        """Whether its shapes are known without a wait."""
        raise NotImplementedError

    def _shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of every tensor, in order; waits until they are known."""
        raise NotImplementedError

    def post(self) -> None:
        """Give the tensors' buffers to the transport."""
        way, share = self.way, self.way.share
        transfers: list[TransferEnd] = []
        for tag, (shape, dtype) in enumerate(self._shapes(), start=way.tag + 1):
            size = prod(shape)
            padded = (share.padded(size),) if share else shape
            buffer = torch.empty(padded, dtype=dtype, device=way.device)
            own = buffer[: share.numbers(size)] if share else buffer
            self._buffers.append(PaddedShare(buffer, shape) if share else buffer)
            if own.numel():
                transfers.append(TransferEnd(tensor=own, peer=way.peer, tag=tag, is_send=False))
        if transfers:
            self._work = way.carrier.post(transfers, way.channel)

    def _received(self) -> list[Tensor | PaddedShare]:
        """The tensors, when they are there."""
        self._work.wait()
        return self._buffers


class ForwardReceive(_Receive):
    """A forward message on its way; ``wait`` gives the tree.

    The lengths of its ``Ragged`` come over the host. With a share the tree has a
    :class:`PaddedShare` in place of each tensor, lengths excepted.
    """

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self._lengths = _NOTHING
        self._lengths_work: Work = _DONE
        if way.ragged and way.own is None:
            self._lengths = torch.empty((way.ragged, way.num_samples), dtype=torch.int64)
            self._lengths_work = way.carrier.receive_on_host(self._lengths, way.peer, way.tag)

    def can_post(self) -> bool:
        """See :class:`_Receive`."""
        return not len(self._lengths)

    def _shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        self._lengths_work.wait()
        rows = iter(self._lengths.sum(1).tolist() if len(self._lengths) else ())
        samples = self.way.num_samples
        return [
            ((next(rows) if leaf.ragged else samples, *leaf.tail), leaf.dtype)
            for leaf in self.way.leaves
        ]

    def wait(self) -> TreeOfShares:
        """The tree that was sent."""
        if self.way.own is not None:
            return self.way.own.take(self.way.tag)
        received, lengths = iter(self._received()), iter(self._lengths)

        def leaf(spec: LeafSpec) -> Any:
            values = next(received)
            if not spec.ragged:
                return values
            return Ragged(cast(Tensor, values), to_device(next(lengths), self.way.device))

        return tree_of(self.way.spec, leaf)


class BackwardReceive(_Receive):
    """A backward message on its way: one gradient for each floating leaf.

    The shape of a ragged leaf is that of the forward output, which may not exist yet. In place of
    the gradient of an empty leaf comes, over the host, whether there is one. A consumer that leaves
    a modality without rows out gives none, and its parameters then have none, as in one process.

    Args:
        way: of the message.
        output: the samples of the forward's output that were sent; None before the forward.
    """

    def __init__(self, way: Way, output: Callable[[Way], Tree]) -> None:
        super().__init__(way)
        self._output = output
        self._flags = _NOTHING
        self._flags_work: Work = _DONE

    def can_post(self) -> bool:
        """See :class:`_Receive`."""
        return not self.way.ragged or self._output(self.way) is not None

    def _shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        way = self.way
        if way.ragged:
            known = [(tuple(leaf.shape), leaf.dtype) for leaf in float_leaves(self._output(way))]
        else:
            known = [((way.num_samples, *leaf.tail), leaf.dtype) for leaf in way.leaves]
        num_empty = sum(not prod(shape) for shape, _ in known)
        if num_empty:
            self._flags = torch.empty(num_empty, dtype=torch.bool)
            self._flags_work = way.carrier.receive_on_host(self._flags, way.peer, way.tag)
        return known

    def wait(self, output: Tree) -> tuple[Tensor | PaddedShare | None, ...]:
        """Gradients of the floating leaves of ``output``, the samples that were sent.

        None for an empty leaf that the consumer did not use.
        """
        if self.way.own is not None:
            return self.way.own.take(self.way.tag)
        received = self._received()
        self._flags_work.wait()
        flags = iter(self._flags.tolist() if len(self._flags) else ())
        return tuple(
            buffer if leaf.numel() else torch.zeros_like(leaf) if next(flags) else None
            for leaf, buffer in zip(float_leaves(output), received, strict=True)
        )


T = TypeVar("T")
R = TypeVar("R", bound=_Receive)


class Mailbox:
    """Posts the sends and receives of a program.

    A receive is kept for the compute that takes its message. What is sent is kept until the rank
    knows that it has come (:mod:`mmplan.program.sent_messages`).

    Args:
        program: the whole program.
        transport: moves tensors between ranks.
        specs: output spec of every stage (:func:`mmlaunch.model.shape_inference.infer_shapes`).
        channels: of the program.
        output_of: a stage's output for a micro-batch; None before its forward.
    """

    def __init__(
        self,
        program: Program,
        transport: Transport,
        specs: Sequence[Spec],
        channels: Channels,
        output_of: Callable[[int, int], Tree],
    ) -> None:
        self._program, self._transport, self._specs = program, transport, specs
        self._channels, self._output_of = channels, output_of
        self._most_samples = max(program.batches.values())
        self._own = _OwnMessages()
        self._over: defaultdict[int, list[int]] = defaultdict(list)
        for position, shown in MessagesUnderWay(program).last_positions(transport.rank).items():
            self._over[shown].append(position)

    def begin(self) -> None:
        """A step begins."""
        self._forward: defaultdict[MicroBatch, list[ForwardReceive]] = defaultdict(list)
        self._backward: defaultdict[MicroBatch, list[BackwardReceive]] = defaultdict(list)
        # By channel, receives that are not posted yet: theirs is the order of the channel.
        self._unposted: defaultdict[CommGroup, deque[_Receive]] = defaultdict(deque)
        # By position of the send.
        self._sent: dict[int, list[tuple[Work, Tensor]]] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors whose sends are not known to be over."""
        return sum(t.nbytes for sent in self._sent.values() for _, t in sent)

    def take_forward(self, key: MicroBatch) -> list[ForwardReceive]:
        """Posted receives of a forward's inputs, once."""
        return self._posted(_in_group_order(self._forward.pop(key, [])))

    def take_backward(self, key: MicroBatch) -> list[BackwardReceive]:
        """Posted receives of the gradients of a micro-batch's output, once."""
        return self._posted(_in_group_order(self._backward.pop(key, [])))

    def _posted(self, receives: list[R]) -> list[R]:
        for receive in receives:
            if receive.way.own is None:
                waiting = self._unposted[receive.way.channel]
                while receive in waiting:
                    waiting.popleft().post()
        return receives

    def post_receive(self, way: Way) -> None:
        """Post a receive; the compute that needs it waits."""
        key = way.message.stage, way.message.mb
        if way.message.op == Op.RECV_B:
            receive = BackwardReceive(way, self._sent_output)
            self._backward[key].append(receive)
        else:
            receive = ForwardReceive(way)
            self._forward[key].append(receive)
        if way.own is None:
            waiting = self._unposted[way.channel]
            waiting.append(receive)
            while waiting and waiting[0].can_post():
                waiting.popleft().post()

    def _sent_output(self, way: Way) -> Tree:
        """The part of this rank's output whose gradient a message brings."""
        output = self._output_of(way.message.stage, way.message.mb)
        if output is None:
            return None
        return slice_samples(element_of(output, way.edge.element, way.module), *way.samples)

    def post_send(self, way: Way, tree: Tree, position: int) -> None:
        """Post the send of a message's samples.

        Args:
            way: of the message.
            tree: the stage's output for the micro-batch; after a backward its assembled input,
                whose leaves have gradients.
            position: of the instruction in the row.

        Raises:
            RunFailedError: more tensors than a message may have, or other ones than the receiver
                waits for.
        """
        if way.message.op == Op.SEND_F:
            self._send_forward(way, tree, position)
        else:
            self._send_backward(way, tree, position)

    def _send_forward(self, way: Way, tree: Tree, position: int) -> None:
        output = element_of(tree, way.edge.element, way.module)
        if not fits(output, way.spec):
            raise RunFailedError(
                f"modules.{way.module} returns {_shown(spec_of(output))} for a micro-batch, "
                f"others wait for {_shown(way.spec)}",
                hint="return the same for every micro-batch; where no sample has a row, "
                "mmplan.Ragged with 0 rows",
            )
        cut = slice_samples(output, *way.samples)
        if way.own is not None:
            way.own.hand_over(way.tag, map_tensors(cut, _to_send))
            return
        lengths = _all_lengths(cut)
        beside = torch.tensor(lengths, dtype=torch.int64) if lengths else None
        self._send(way, position, message_tensors(cut, way.share), beside)

    def _send_backward(self, way: Way, tree: Tree, position: int) -> None:
        gradients = map_tensors(tree, _gradient_of)
        cuts = list(float_leaves(slice_samples(gradients, *way.samples)))
        pairs = zip(float_leaves(tree), cuts, strict=True)
        if way.own is not None:
            used = [cut if cut.numel() or leaf.grad is not None else None for leaf, cut in pairs]
            way.own.hand_over(way.tag, used)
            return
        tensors = [cut if way.share is None else way.share.of(cut) for cut in cuts]
        flags = [leaf.grad is not None for leaf, cut in pairs if not cut.numel()]
        self._send(way, position, tensors, torch.tensor(flags) if flags else None)

    def _send(
        self, way: Way, position: int, tensors: Sequence[Tensor], beside: Tensor | None
    ) -> None:
        """Post tensors in the order of their channel; nothing is sent of an empty one."""
        sent = self._sent.setdefault(position, [])
        if beside is not None:
            sent.append((way.carrier.send_on_host(beside, way.peer, way.tag), beside))
        waiting = self._unposted[way.channel]
        while waiting:
            waiting.popleft().post()
        transfers = [
            TransferEnd(tensor=_to_send(item), peer=way.peer, tag=k, is_send=True)
            for k, item in enumerate(tensors, start=way.tag + 1)
            if item.numel()
        ]
        if transfers:
            work = way.carrier.post(transfers, way.channel)
            sent += [(work, item.tensor) for item in transfers]

    def release(self, position: int) -> None:
        """Let go of the sends that the messages taken at a position show to be over."""
        for send in self._over.get(position, ()):
            for work, _ in self._sent.pop(send, ()):
                work.wait()

    def finish(self) -> None:
        """Wait until every send is over."""
        for sent in self._sent.values():
            for work, _ in sent:
                work.wait()
        self._sent.clear()

    def way(self, message: Message) -> Way:
        """How a message of this rank goes.

        Raises:
            RunFailedError: it has more tensors than a message may have.
        """
        rank, tag = self._transport.rank, self._tag(message)
        stage, edge = self._program.stages[message.stage], self._program.edges[message.edge]
        d, _ = stage.place(rank)
        first = stage.microbatches[d][message.mb][0]
        receiver = message.peer if message.is_send else rank
        backward = message.op in (Op.SEND_B, Op.RECV_B)
        producer = self._program.stages[edge.producer]
        channel = self._channels.of(rank, message)
        share = share_of(self._program, edge, receiver, backward=backward)
        spec = element_of(self._specs[edge.producer], edge.element, producer.module)
        leaves = [
            leaf for leaf in spec_leaves(spec) if not backward or leaf.dtype.is_floating_point
        ]
        if len(leaves) >= MOST_TENSORS:
            raise RunFailedError(f"{stage.module} sends {len(leaves)} tensors in one message")
        return Way(
            message=message,
            edge=edge,
            module=producer.module,
            has_backward=stage.has_backward,
            carrier=self._own if channel is None else self._transport,
            own=self._own if channel is None and share is None else None,
            device=self._transport.device,
            # No message of a rank to itself waits for another one.
            channel=((rank,), tag) if channel is None else channel,
            peer=message.peer,
            tag=tag,
            share=share,
            spec=spec,
            leaves=tuple(leaves),
            ragged=sum(leaf.ragged for leaf in leaves),
            samples=(message.start - first, message.stop - first),
        )

    def _tag(self, message: Message) -> int:
        backward = message.op in (Op.SEND_B, Op.RECV_B)
        number = (message.edge * 2 + backward) * self._most_samples + message.start
        return number * MOST_TENSORS


def _in_group_order(receives: list[R]) -> list[R]:
    """Receives in the order in which a group gathers shares: the same on all its ranks."""
    if len(receives) < 2:
        return receives
    return sorted(receives, key=lambda item: (item.way.message.edge, item.way.message.start))


def _to_send(tensor: Tensor) -> Tensor:
    """The values of a tensor, cut from its history."""
    return tensor.detach().contiguous()


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
