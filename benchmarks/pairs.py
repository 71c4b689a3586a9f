"""Data for the benchmarks' workloads: random image-text pairs of any size.

Timing does not depend on what the pixels show, and random data needs no download.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmplan.errors import InvalidInputError


class Pairs:
    """Images [3, image, image] in [0, 1) with token ids [length], none of them padding."""

    def __init__(self, *, samples: int, image: int, length: int, vocab: int) -> None:
        self.images = torch.rand(samples, 3, image, image)
        self.tokens = torch.randint(1, vocab, (samples, length))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": self.images[index], "tokens": self.tokens[index]}


def pairs(*, samples: int = 256, image: int = 32, length: int = 64, vocab: int = 1000) -> Pairs:
    """Random pairs, the same in every process that builds them for one workload.

    Raises:
        InvalidInputError: a size below 1, or a vocabulary of padding only.
    """
    sizes = {"samples": samples, "image": image, "length": length, "vocab": vocab - 1}
    for name, size in sizes.items():
        if size < 1:
            raise InvalidInputError(f"{name} is too small", hint=f"raise data.args.{name}")
    return Pairs(samples=samples, image=image, length=length, vocab=vocab)
