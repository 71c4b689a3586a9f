"""What a rank does, as values: small, immutable, printed on one line and parsed back.

``0F3`` runs the forward of stage 0 on its micro-batch 3, as torch.distributed.pipelining
prints it. A message adds the edge, the other rank and the global samples that it carries:
``0SEND_F3:e1>5[16,24)``. ``SYNC_START:0.2`` is sync batch 2 of loss 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from mmplan.errors import InvalidInputError


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
    REDUCE = "REDUCE"
    STEP = "STEP"


# Looked up once: programs have hundreds of thousands of instructions.
_BACKWARDS = (Op.BACKWARD, Op.INPUT)
_SENDS = (Op.SEND_F, Op.SEND_B)


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


@dataclass(frozen=True, slots=True)
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
    """``COUNT`` of a loss's targets over the batch, or ``REDUCE`` of one reduction."""

    op: Op
    index: int

    def __str__(self) -> str:
        return f"{self.op}:{self.index}"


@dataclass(frozen=True, slots=True)
class Step:
    """The optimizer's update of all parameters on this rank."""

    op: Op = Op.STEP

    def __str__(self) -> str:
        return str(self.op)


# (operation, stage, replica, micro-batch): a compute before it is a rank's instruction.
ReplicaCompute = tuple[Op, int, int, int]
Instruction = Compute | Message | Sync | Collective | Step

_COMPUTE = re.compile(r"(\d+)([FBIW])(\d+)")
_MESSAGE = re.compile(r"(\d+)((?:SEND|RECV)_[FB])(\d+):e(\d+)([<>])(\d+)\[(\d+),(\d+)\)")
_SYNC = re.compile(r"(SYNC_START|SYNC_WAIT):(\d+)\.(\d+)")
_COLLECTIVE = re.compile(r"(COUNT|REDUCE):(\d+)")


def parse_instruction(text: str) -> Instruction:
    """The instruction that prints as ``text``.

    Raises:
        InvalidInputError: none does.
    """
    if text == Op.STEP:
        return Step()
    if m := _COMPUTE.fullmatch(text):
        return Compute(Op(m[2]), int(m[1]), int(m[3]))
    if m := _MESSAGE.fullmatch(text):
        message = Message(
            Op(m[2]), int(m[1]), int(m[3]), int(m[4]), int(m[6]), int(m[7]), int(m[8])
        )
        if str(message) == text:
            return message
    if m := _SYNC.fullmatch(text):
        return Sync(Op(m[1]), int(m[2]), int(m[3]))
    if m := _COLLECTIVE.fullmatch(text):
        return Collective(Op(m[1]), int(m[2]))
    raise InvalidInputError(f"{text!r} is not an instruction", hint="0F3, 1SEND_B0:e2>4[0,8) are")


def format_row(instructions: tuple[Instruction, ...]) -> str:
    """One rank's program on one line."""
    return " ".join(map(str, instructions))


def parse_row(text: str) -> tuple[Instruction, ...]:
    """The program that prints as ``text``; see :func:`parse_instruction`."""
    return tuple(map(parse_instruction, text.split()))
