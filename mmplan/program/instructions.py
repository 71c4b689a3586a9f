"""What a rank does, as values: small, immutable, printed on one line.

``0F3`` runs the forward of stage 0 on its micro-batch 3, as torch.distributed.pipelining
prints it. A message adds the edge, the other rank and the global samples that it carries:
``0SEND_F3:e1>5[16,24)``. ``SYNC_START:0.2`` is sync batch 2 of loss 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Op(StrEnum):
    """Operations, named as torch.distributed.pipelining names them where it has them."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    SYNC_START = "SYNC_START"
    SYNC_WAIT = "SYNC_WAIT"
    COUNT = "COUNT"
    REDUCE_START = "REDUCE_START"
    REDUCE = "REDUCE"
    STEP = "STEP"

    # An enum's own one is written in Python; programs ask millions of times.
    __hash__ = str.__hash__


# What a rank does in an instruction, as people say it.
KIND_OF = {
    Op.FORWARD: "forward",
    **dict.fromkeys((Op.BACKWARD, Op.INPUT, Op.WEIGHT), "backward"),
    **dict.fromkeys((Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B), "message"),
    **dict.fromkeys((Op.SYNC_START, Op.SYNC_WAIT), "loss"),
    **dict.fromkeys((Op.COUNT, Op.REDUCE_START, Op.REDUCE, Op.STEP), "reduction"),
}

# Looked up once: programs have hundreds of thousands of instructions.
_BACKWARDS = (Op.BACKWARD, Op.INPUT)
_SENDS = (Op.SEND_F, Op.SEND_B)
_OF_GRADIENTS = (Op.SEND_B, Op.RECV_B)

# (edge, is backward, source rank, target rank, first sample, end of samples)
MessageKey = tuple[int, bool, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Compute:
    """``F``, ``B``, ``I`` or ``W`` of one stage on one of this replica's micro-batches.

    ``I`` and ``W`` are a ``B`` in two parts: ``I`` takes the output's gradient and gives
    the input's, which is sent at once; ``W`` gives that of the weights, any time later.
    """

    op: Op
    stage: int
    mb: int

    @property
    def is_backward(self) -> bool:
        """Whether it takes the output's gradient: ``B``, or ``I`` in its place."""
        return self.op in _BACKWARDS

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.mb}"


# Nobody changes one: frozen ones take three times as long to make, and most instructions are these.
@dataclass(slots=True, unsafe_hash=True)
class Message:
    """A transfer of samples ``[start, stop)`` of the task's batch along one edge.

    ``SEND_F``/``RECV_F`` carry the producer's output, ``SEND_B``/``RECV_B`` its gradient.
    A send returns at once. A receive is posted and waited for by the compute that uses
    it. ``stage`` and ``mb`` are the local stage and its micro-batch; ``peer`` may be the
    rank itself.
    """

    op: Op
    stage: int
    mb: int
    edge: int
    peer: int
    start: int
    stop: int

    @property
    def is_send(self) -> bool:
        """Whether this end sends."""
        return self.op in _SENDS

    def key(self, rank: int) -> MessageKey:
        """The transfer of which this is the end on ``rank``."""
        op, peer = self.op, self.peer
        source, target = (rank, peer) if op in _SENDS else (peer, rank)
        return self.edge, op in _OF_GRADIENTS, source, target, self.start, self.stop

    def __str__(self) -> str:
        arrow = ">" if self.is_send else "<"
        return (
            f"{self.stage}{self.op}{self.mb}:e{self.edge}{arrow}{self.peer}"
            f"[{self.start},{self.stop})"
        )


@dataclass(frozen=True, slots=True)
class Sync:
    """Start or wait of batch-sync: sync batch ``batch`` of a cross-sample loss."""

    op: Op
    loss: int
    batch: int

    def __str__(self) -> str:
        return f"{self.op}:{self.loss}.{self.batch}"


@dataclass(frozen=True, slots=True)
class Collective:
    """``COUNT`` of a loss's targets over the batch, or one reduction.

    ``REDUCE_START`` lets a reduction begin inside the compute that comes next, as gradients are
    complete, and returns at once; ``REDUCE`` ends when the gradients are summed. A sum that is cut
    is made after each micro-batch ``mb`` of its stage.
    """

    op: Op
    index: int
    mb: int | None = None

    def __str__(self) -> str:
        return f"{self.op}:{self.index}" + ("" if self.mb is None else f".{self.mb}")


@dataclass(frozen=True, slots=True)
class Step:
    """The optimizer's update of all parameters on this rank."""

    op: Op = Op.STEP

    def __str__(self) -> str:
        return str(self.op)


# (operation, stage, replica, micro-batch): a compute before it is a rank's instruction.
ReplicaCompute = tuple[Op, int, int, int]
Instruction = Compute | Message | Sync | Collective | Step


def format_row(instructions: tuple[Instruction, ...]) -> str:
    """One rank's program on one line."""
    return " ".join(map(str, instructions))
