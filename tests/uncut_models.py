"""Models before they are cut, their cuts by ``from_layers``, right and wrong, and whole models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmplan.zoo.sequential import Part, from_layers
from tests.matrix_models import Contrastive, Regression

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


class Encoder(nn.Module):
    """Layers between an embedding, and a norm with a head behind it."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _cut(after: Any, blocks: int) -> nn.Sequential:
    return from_layers(
        Encoder(blocks),
        "layers",
        before=lambda part, x: part.embed(x),
        after=after,
        first=["embed"],
        last=["norm", "head"],
    )


def encoder(blocks: int) -> nn.Sequential:
    return _cut(lambda part, x: part.head(part.norm(x)), blocks)


def without_norm(blocks: int) -> nn.Sequential:
    """Its parameters are all there, one is not used: every check of names passes."""
    return _cut(lambda part, x: part.head(x), blocks)


def norm_behind(blocks: int) -> nn.Sequential:
    def after(part: Part, x: Tensor) -> Tensor:
        return part.norm(part.head(x))

    return _cut(after, blocks)


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Model(nn.Module):
    """Both towers and the losses of the workload, as one would write them in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.t = Encoder(), Encoder()
        self.contrastive, self.regression = Contrastive(), Regression()

    def forward(self, a: Tensor, b: Tensor, target: Tensor) -> dict[str, Tensor]:
        v, t = self.v(a), self.t(b)
        return {"contrastive": self.contrastive(v, t), "regression": self.regression(v, target)}


class Total(Model):
    """Gives the weighted sum."""

    def forward(self, a: Tensor, b: Tensor, target: Tensor) -> Any:
        losses = super().forward(a, b, target)
        return losses["contrastive"] + 0.5 * losses["regression"]


class Random(Encoder):
    """Draws in evaluation mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, training=True))
