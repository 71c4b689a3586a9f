"""Two halves of a stack of layers, and noise for them: for runs on one device.

Samples are small, for it is not their copies that are looked at: the first half spreads each over
its tokens, the second takes their mean.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """A transformer's MLP with its norm; [B, T, W] to [B, T, W], or from and to [B, W] at the ends.

    Args:
        spread: tokens to spread a sample over.
        is_last: give the mean of the tokens.
    """

    def __init__(self, width: int, *, spread: int | None, is_last: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self._spread, self._is_last = spread, is_last

    def forward(self, x: Tensor) -> Tensor:
        x_BTW = x if self._spread is None else x[:, None].expand(-1, self._spread, -1)
        out_BTW = x_BTW + self.down(nn.functional.gelu(self.up(self.norm(x_BTW))))
        return out_BTW.mean(1) if self._is_last else out_BTW


def front(blocks: int, width: int, tokens: int) -> nn.Sequential:
    """Samples [B, W] to activations [B, T, W]."""
    return nn.Sequential(
        *(Layer(width, spread=None if k else tokens, is_last=False) for k in range(blocks))
    )


def back(blocks: int, width: int) -> nn.Sequential:
    """Activations [B, T, W] to [B, W]."""
    return nn.Sequential(
        *(Layer(width, spread=None, is_last=k == blocks - 1) for k in range(blocks))
    )


class Noise:
    """Samples [W] with targets of the same shape."""

    def __init__(self, samples: int, width: int) -> None:
        seeded = torch.Generator().manual_seed(0)
        self._x, self._y = torch.randn(2, samples, width, generator=seeded)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self._x[index], "y": self._y[index]}
