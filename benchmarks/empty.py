"""A module, a loss and data that cost next to nothing: what is left is the runtime's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class EmptyBlock(nn.Module):
    """Adds one parameter: the least that has a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


class SquareLoss(nn.Module):
    """Mean square of the sum of all features: a whole sync batch, cheap."""

    def forward(self, *features: Tensor) -> Tensor:
        total = torch.stack(features).sum(0)
        return (total * total).mean()


class Numbers:
    """Samples of one number each."""

    def __init__(self, samples: int) -> None:
        self.x = torch.rand(samples, 1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index]}


def module() -> nn.Sequential:
    """One empty block."""
    return nn.Sequential(EmptyBlock())
