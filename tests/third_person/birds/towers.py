"""Two encoders, as Sequentials of the blocks at which they may be cut."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Frames(nn.Module):
    """Spectrogram [B, 6, 10] to one vector per frame [B, 6, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lift = nn.Linear(10, width)

    def forward(self, spectrogram: Tensor) -> Tensor:
        return torch.tanh(self.lift(spectrogram))


class Mixer(nn.Module):
    """A residual layer over the last axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.inner(self.norm(x)))


class MeanOverTime(nn.Module):
    """[B, time, width] to [B, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.mean(1))


def sound(layers: int, width: int) -> nn.Sequential:
    return nn.Sequential(Frames(width), *(Mixer(width) for _ in range(layers)), MeanOverTime(width))


def words(layers: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(20, width), *(Mixer(width) for _ in range(layers)), MeanOverTime(width)
    )
