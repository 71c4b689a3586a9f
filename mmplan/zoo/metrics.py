"""Metrics for ``train.eval``: each factory returns an ``nn.Module`` that gives a mean.

A metric is what a loss is, but nothing is trained on it. One with a ``count`` of its
targets (:class:`mmplan.schema.protocols.CountingLoss`) returns a sum, which is divided by their
number.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmplan.ragged import Ragged
from mmplan.zoo.losses import TokenCrossEntropy


class Accuracy(nn.Module):
    """The share of samples whose class has one of the ``top`` largest logits."""

    def __init__(self, top: int) -> None:
        super().__init__()
        self.top = top

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits [B, classes] and labels [B] (int64) to a mean."""
        largest = logits.topk(self.top, dim=-1).indices
        return (largest == labels[:, None]).any(-1).double().mean()


class Retrieval(nn.Module):
    """The share of samples whose own partner is nearest, of one modality among the other's.

    The mean of both directions; partners are those of the same sync batch.
    """

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """Features [B, width] of two modalities to a mean."""
        alike = functional.normalize(one, dim=-1) @ functional.normalize(other, dim=-1).T
        own = torch.arange(len(alike), device=alike.device)
        hits = [(alike.argmax(dim) == own).double().mean() for dim in (0, 1)]
        return (hits[0] + hits[1]) / 2


class TokenAccuracy(TokenCrossEntropy):
    """The share of target tokens that have the largest logit; inputs as of the token loss."""

    def forward(
        self, logits: Tensor | Ragged, labels: Tensor | Ragged, lengths: Ragged | None = None
    ) -> Tensor:
        """How many targets are hit; see :class:`mmplan.zoo.losses.TokenCrossEntropy`."""
        scores = logits.values if isinstance(logits, Ragged) else logits.flatten(0, 1)
        hits = scores.argmax(-1) == self.targets(labels, lengths).flatten()
        return hits.double().sum()


def accuracy(*, top: int = 1) -> Accuracy:
    """Metric: the share of samples whose class [B] has one of the ``top`` largest logits [B, C]."""
    return Accuracy(top)


def retrieval() -> Retrieval:
    """Metric of two modalities' features [B, D]: how often a sample's own partner is nearest.

    For ``cross_sample: true``: it compares the samples of a sync batch.
    """
    return Retrieval()


def token_accuracy(
    *, field: str | None = None, shift: bool = True, ignore_index: int = -100
) -> TokenAccuracy:
    """Metric: the share of target tokens that have the largest logit.

    Inputs and arguments are those of :func:`mmplan.zoo.losses.token_cross_entropy`.
    """
    return TokenAccuracy(field=field, shift=shift, ignore_index=ignore_index)
