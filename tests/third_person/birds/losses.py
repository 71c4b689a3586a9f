"""One loss that compares all samples with all others, one that looks at each alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class PairwiseSigmoid(nn.Module):
    """Each pair of a recording and a description is a match or not (SigLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.bias = nn.Parameter(torch.tensor(-1.0))

    def forward(self, sound: Tensor, words: Tensor) -> Tensor:
        similarity = functional.normalize(sound, dim=-1) @ functional.normalize(words, dim=-1).T
        logits = self.scale.exp() * similarity + self.bias
        signs = 2 * torch.eye(len(logits), dtype=logits.dtype, device=logits.device) - 1
        return -functional.logsigmoid(signs * logits).sum() / len(logits)


class Species(nn.Module):
    """Mean cross entropy of a linear probe."""

    def __init__(self, width: int, kinds: int) -> None:
        super().__init__()
        self.probe = nn.Linear(width, kinds)

    def forward(self, sound: Tensor, kind: Tensor) -> Tensor:
        return functional.cross_entropy(self.probe(sound), kind)
