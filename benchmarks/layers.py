"""Two halves of a stack of layers, and noise for them: for runs on one device."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """A transformer's MLP with its norm; [B, T, W] to [B, T, W]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTW: Tensor) -> Tensor:
        return x_BTW + self.down(nn.functional.gelu(self.up(self.norm(x_BTW))))


def stack(blocks: int, width: int) -> nn.Sequential:
    """So many layers."""
    return nn.Sequential(*(Layer(width) for _ in range(blocks)))


class Noise:
    """Samples [T, W] with targets of the same shape."""

    def __init__(self, samples: int, tokens: int, width: int) -> None:
        self._samples, self._shape = samples, (tokens, width)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        seeded = torch.Generator().manual_seed(index)
        x, y = torch.randn(2, *self._shape, generator=seeded)
        return {"x": x, "y": y}
