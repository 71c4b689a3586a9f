"""The P2P mailbox of one rank: posted receives until a compute takes them, and posted sends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from mmlaunch.comm.batches import Tree, element_of, float_leaves, map_tensors, slice_samples
from mmlaunch.comm.messages import (
    MOST_TENSORS,
    BackwardReceive,
    ForwardReceive,
    Outbox,
    Spec,
    message_tensors,
)
from mmlaunch.comm.scatter_gather import TensorShare, share_of
from mmlaunch.comm.transport import Transport
from mmplan.errors import RunFailedError
from mmplan.program.instructions import Message, Op
from mmplan.program.model import MicroBatch, Program, Stage

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
        share = self._share(message, self._transport.rank)
        source = spec, message.stop - message.start, message.peer, self._tag(message)
        if message.op == Op.RECV_F:
            self._forward[key].append((message, ForwardReceive(self._transport, *source, share)))
        else:
            receive = BackwardReceive(self._transport, *source, share)
            self._backward[key].append((message, receive))

    def post_send(self, message: Message, tree: Tree) -> None:
        """Post the send of a message's samples.

        Args:
            message: a send.
            tree: the stage's output for the micro-batch; after a backward its assembled input,
                whose leaves have gradients.

        Raises:
            RunFailedError: more tensors than a message may have.
        """
        stage = self._program.stages[message.stage]
        edge = self._program.edges[message.edge]
        d, _ = stage.place(self._transport.rank)
        first = stage.microbatches[d][message.mb][0]
        low, high = message.start - first, message.stop - first
        share = self._share(message, message.peer)
        if message.op == Op.SEND_F:
            output = element_of(tree, edge.element, stage.module)
            tensors = message_tensors(slice_samples(output, low, high), share)
        else:
            gradients = map_tensors(tree, _gradient_of)
            leaves = float_leaves(slice_samples(gradients, low, high))
            tensors = [leaf if share is None else share.of(leaf) for leaf in leaves]
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


def _gradient_of(tensor: Tensor) -> Tensor:
    """A floating tensor's gradient, zeros where none reached it; other tensors as they are."""
    if not tensor.is_floating_point():
        return tensor
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
