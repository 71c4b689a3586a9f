"""The messages of one rank: what has come for a compute, and what is sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from mmlaunch.comm.batches import slice_samples
from mmlaunch.comm.messages import (
    MOST_TENSORS,
    Incoming,
    IncomingGradient,
    Outbox,
    element_of,
    float_leaves,
    map_tensors,
    message_tensors,
)
from mmlaunch.comm.scatter_gather import Share, share_of
from mmlaunch.comm.transport import Transport
from mmlaunch.execute.activation_gradients import gradient_of
from mmplan.errors import RunFailedError
from mmplan.program.instructions import Message, Op
from mmplan.program.model import MicroBatch, Program, Stage


class Mail:
    """Posts what a program's messages say, and keeps what comes for the compute that takes it.

    Args:
        program: the whole program.
        transport: moves tensors between ranks.
        specs: output spec of every stage (:func:`mmlaunch.model.shape_inference.infer_shapes`).
    """

    def __init__(self, program: Program, transport: Transport, specs: Sequence[Any]) -> None:
        self._program, self._transport, self._specs = program, transport, specs
        self._most_samples = max(program.batches.values())

    def begin(self) -> None:
        """A step begins."""
        self._inputs: defaultdict[MicroBatch, list[tuple[Message, Incoming]]] = defaultdict(list)
        self._gradients: defaultdict[MicroBatch, list[tuple[Message, IncomingGradient]]] = (
            defaultdict(list)
        )
        self._outbox = Outbox(self._transport)

    def inputs(self, stage: Stage, mb: int) -> list[tuple[Message, Incoming]]:
        """What a forward takes; given once, in the same order on all ranks of a group."""
        return sorted(self._inputs.pop((stage.index, mb), ()), key=_by_samples)

    def gradients(self, stage: Stage, mb: int) -> list[tuple[Message, IncomingGradient]]:
        """What a backward takes; given once, in the same order on all ranks of a group."""
        return sorted(self._gradients.pop((stage.index, mb), ()), key=_by_samples)

    def receive(self, message: Message) -> None:
        """Post a receive; the compute that needs it waits."""
        key = message.stage, message.mb
        edge = self._program.edges[message.edge]
        producer = self._program.stages[edge.producer]
        spec = element_of(self._specs[edge.producer], edge.element, producer.module)
        share = self._share(message, self._transport.rank)
        source = spec, message.stop - message.start, message.peer, self._tag(message)
        if message.op == Op.RECV_F:
            self._inputs[key].append((message, Incoming(self._transport, *source, share)))
        else:
            gradient = IncomingGradient(self._transport, *source, share)
            self._gradients[key].append((message, gradient))

    def send(self, message: Message, tree: Any) -> None:
        """Send the message's samples.

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
            gradients = map_tensors(tree, gradient_of)
            whole = float_leaves(slice_samples(gradients, low, high))
            tensors = [tensor if share is None else share.of(tensor) for tensor in whole]
        if len(tensors) > MOST_TENSORS:
            raise RunFailedError(f"{stage.module} sends {len(tensors)} tensors in one message")
        backward = message.op == Op.SEND_B
        # A forward message is known to be there when its gradient is back.
        name = None if backward or not edge.carries_gradient else _route(message)
        self._outbox.send(tensors, message.peer, self._tag(message), backward=backward, name=name)

    def returned(self, gradients: Iterable[Message]) -> None:
        """Gradients have come: whoever sent them had received what they are of."""
        for message in gradients:
            self._outbox.arrived(_route(message))

    def finish(self) -> None:
        """Wait until all is sent."""
        self._outbox.finish()

    def _share(self, message: Message, receiver: int) -> Share | None:
        """What a rank receives of a message, None for all of it."""
        backward = message.op in (Op.SEND_B, Op.RECV_B)
        edge = self._program.edges[message.edge]
        return share_of(self._program, edge, receiver, backward=backward)

    def _tag(self, message: Message) -> int:
        backward = message.op in (Op.SEND_B, Op.RECV_B)
        place = (message.edge * 2 + backward) * self._most_samples + message.start
        return place * MOST_TENSORS


def _route(message: Message) -> tuple[int, int, int]:
    """The same for a forward message and its gradient, on the forward's sender."""
    return message.edge, message.start, message.peer


def _by_samples(item: tuple[Message, Any]) -> tuple[int, int]:
    """The order in which a group gathers its messages: the same on all ranks."""
    return item[0].edge, item[0].start
