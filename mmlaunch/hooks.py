"""Functions of the user that a session calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmlaunch.session import Session
    from mmlaunch.step_result import StepResult


@dataclass(slots=True)
class Hooks:
    """Functions called with the session and what happened; all ranks call them.

    Attributes:
        on_step: after each update, with its :class:`StepResult`.
        on_loss: after backward and before the update, with the loss; gradients are whole.
        on_checkpoint: after a checkpoint is complete, with its folder.
    """

    on_step: list[Callable[[Session, StepResult], None]] = field(default_factory=list)
    on_loss: list[Callable[[Session, float], None]] = field(default_factory=list)
    on_checkpoint: list[Callable[[Session, Path], None]] = field(default_factory=list)
