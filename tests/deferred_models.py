"""Factories that do what is hard to build without memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Usual(nn.Module):
    """What constructors do: buffers from formulas, initialisers of all kinds, parts copied."""

    table: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)  # copies of one layer
        place = torch.arange(10).unsqueeze(1)
        speed = torch.exp(torch.arange(0, width, 2) * (-4.0 / width))
        table = torch.zeros(10, width)
        table[:, 0::2], table[:, 1::2] = torch.sin(place * speed), torch.cos(place * speed)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("ids", torch.arange(7).expand(1, -1), persistent=False)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        self.drop_rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.powers = torch.arange(3).mul(2).tolist()
        self.plain = torch.ones(3) / 3  # an attribute, no buffer
        self.scale = nn.Parameter(torch.tensor(2.65))
        self.log_scale = nn.Parameter(torch.ones([]) * torch.log(torch.tensor(1 / 0.07)))
        self.square = nn.Linear(8, 8)
        nn.init.orthogonal_(self.square.weight)
        nn.init.trunc_normal_(self.square.bias, std=0.02)
        self.convolution = nn.Conv1d(3, 3, 3)
        nn.init.dirac_(self.convolution.weight)
        self.words = nn.Embedding(9, 4, padding_idx=0)
        drawn = torch.randn(4, generator=torch.Generator().manual_seed(5))
        self.register_buffer("drawn", drawn, persistent=False)
        self.register_buffer("random", torch.rand(4), persistent=False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.counted = nn.Buffer(torch.from_numpy(np.arange(4.0)).float() * 2)
        with torch.no_grad():
            self.square.weight.div_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] to the same."""
        return self.encoder(x) + self.table[0] + self.plain.sum()


class Deep(nn.Module):
    """A Linear that keeps shapes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.tp_plan = {"up": "colwise"}

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] to the same."""
        return self.up(x)


def usual(blocks: int = 3, width: int = 8) -> nn.Sequential:
    """Blocks of :class:`Usual`."""
    return nn.Sequential(*(Usual(width) for _ in range(blocks)))


def big(blocks: int = 8, width: int = 2048) -> nn.Sequential:
    """16 MiB a block, at the standard width."""
    return nn.Sequential(*(Deep(width) for _ in range(blocks)))


def seeds() -> nn.Sequential:
    """Draws a part under a seed of its own."""
    first = Deep(4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        second = Deep(4)
    return nn.Sequential(first, second, Deep(4))


def looks(width: int = 4) -> nn.Sequential:
    """Python code depends on what was drawn."""
    cut: Any = nn.Sequential(Deep(width), Deep(width))
    return cut.append(Deep(1 if float(cut[0].up.weight.detach().sum()) > 1000 else width))


def undefined() -> nn.Sequential:
    """A parameter that is filled in two halves."""
    cut: Any = nn.Sequential(Deep(4), Deep(4), Deep(4))
    halves = torch.empty(4, 4)
    halves[:2], halves[2:] = 0.5, -0.5
    cut[0].up.weight = nn.Parameter(halves)
    return cut


def hides() -> nn.Sequential:
    """Keeps a tensor in a list."""
    cut: Any = nn.Sequential(Deep(4), Deep(4), Deep(4))
    cut[0].tables = [torch.arange(4).float()]
    return cut
