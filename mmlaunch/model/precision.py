"""Training types: bf16 is autocast around blocks and hosted losses, weights stay float32.

Features leave a stage in the type in which its blocks return them, so messages and gathers
carry bf16 where they do. Losses across samples compute in float32, without autocast, from
features made wide; the value of every loss is float32. Gradients of parameters add up in
float32, since each micro-batch's reach the float32 weight apart.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class TrainingPrecision:
    """Contexts of a training type.

    Args:
        name: ``train.precision``.
        device: where blocks run.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._is_bf16, self._device = name == "bf16", device

    def step(self) -> AbstractContextManager[Any]:
        """Around a step: a weight is made narrow once in it, not for every micro-batch.

        Only the cast copies are kept; nothing else changes outside of :meth:`compute`.
        """
        if not self._is_bf16:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=False)

    def compute(self, *, keep_casts: bool) -> AbstractContextManager[Any]:
        """Around blocks and hosted losses.

        Args:
            keep_casts: whether narrow weights are kept until :meth:`step` ends. Without
                gradients they must not be: such a copy would never lead to its weight.
        """
        if not self._is_bf16:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16, cache_enabled=keep_casts)


def widened(tensor: Tensor) -> Tensor:
    """Floats narrower than 32 bits as float32; other tensors as they are."""
    narrow = tensor.is_floating_point() and tensor.element_size() < 4
    return tensor.float() if narrow else tensor
