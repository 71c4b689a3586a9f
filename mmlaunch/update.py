"""The end of a step: parameters updated from their summed gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from mmlaunch.optimizer import build_optimizer
from mmlaunch.reductions import Reductions
from mmlaunch.state import LocalState
from mmplan.schema.workload import TrainSpec


class Update:
    """One rank's optimizer and what it updates.

    Args:
        train: the workload's.
        state: says which replica counts.
        reductions: has the slices of ZeRO-1, and gathers them.
        tensor_parallel: whether any parameter of the run is cut over ranks.

    Attributes:
        parts: what this rank updates.
        optimizer: None where that is nothing.
    """

    def __init__(
        self,
        train: TrainSpec,
        state: LocalState,
        reductions: Reductions,
        *,
        tensor_parallel: bool,
    ) -> None:
        self._reductions = reductions
        self.parts = reductions.parts(state.writes)
        self.optimizer: torch.optim.Optimizer | None = build_optimizer(
            train,
            [(part.name, part.tensor) for part in self.parts],
            sharded=tensor_parallel or train.zero > 0,
        )

    def apply(self) -> None:
        """Update the parameters on all ranks; gradients are gone afterwards."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self._reductions.gather()

    def gradients(self) -> dict[str, Tensor]:
        """Summed gradients by full name: of whole parameters, or of this rank's flat slices."""
        return {p.name: p.tensor.grad for p in self.parts if p.tensor.grad is not None}
