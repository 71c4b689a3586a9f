"""What a step leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

from mmlaunch.execute.executor import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step.

    Attributes:
        step: its number, from 0.
        loss: the whole step's loss, the same on all ranks.
        grad_norm: norm of all gradients before they were clipped; None without clipping.
        iteration_s: forward, backward, communication and losses.
        update_s: the optimizer's update.
        data_s: waiting for the batch's data before that.
        stop: whether any rank's ``should_stop`` said so; the same on all ranks.
        finite: whether the loss and all summed gradients are numbers.
        spans: when each instruction of this rank ran; empty unless asked for.
    """

    step: int
    loss: float
    grad_norm: float | None
    iteration_s: float
    update_s: float
    data_s: float
    stop: bool
    finite: bool
    spans: list[Span]
