"""Made-up recordings: every species has a melody and words of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Recordings(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(7)
        melodies = torch.randn(5, 6, 10, generator=generator)
        self._kinds = torch.randint(5, (count,), generator=generator)
        noise = torch.randn(count, 6, 10, generator=generator)
        self._spectrograms = melodies[self._kinds] + 0.3 * noise
        offsets = torch.randint(4, (count, 3), generator=generator)
        self._descriptions = 4 * self._kinds[:, None] + offsets

    def __len__(self) -> int:
        return len(self._kinds)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "spectrogram": self._spectrograms[index],
            "description": self._descriptions[index],
            "kind": self._kinds[index],
        }
