"""Training types: bf16 and fp16 are autocast around blocks and hosted losses, weights stay float32.

Features leave a stage in the type in which its blocks return them, so messages and gathers
carry the narrow type where they do. Losses across samples compute in float32, without autocast,
from features made wide; the value of every loss is float32. Gradients of parameters add up in
float32, since each micro-batch's reach the float32 weight apart.

Numbers of fp16 end at 65,504 and 6e-8. So a backward in fp16 begins with the gradient of the
loss times a scale, the same for all modules and ranks, and the summed gradients are divided by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mmplan.schema.factories import compute_dtype
from mmplan.schema.train import LARGEST_SCALE, LossScaleSpec, TrainSpec


class LossScale:
    """The scale of a run's gradients, which follows from what its steps were like.

    Args:
        spec: ``train.loss_scale``.

    Attributes:
        value: of the next backward.
    """

    def __init__(self, spec: LossScaleSpec) -> None:
        self._spec = spec
        self.value = spec.initial
        # Steps without an overflow since the scale changed.
        self._steps = 0

    def shrink(self) -> bool:
        """After an overflow; whether there is a smaller scale to try, which is 1 at least."""
        before, self._steps = self.value, 0
        self.value = max(1.0, before / self._spec.factor)
        return self.value < before

    def stepped(self) -> None:
        """After an update; the scale grows where so many had no overflow."""
        self._steps += 1
        if self._steps >= self._spec.growth_interval:
            self.value = min(LARGEST_SCALE, self.value * self._spec.factor)
            self._steps = 0

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"value": self.value, "steps": self._steps}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint's; None where it has none."""
        if state is not None:
            self.value, self._steps = float(state["value"]), int(state["steps"])


class TrainingPrecision:
    """Contexts of a training type, and its scale.

    Args:
        train: the workload's.
        device: where blocks run.

    Attributes:
        is_narrow: whether blocks compute in a type of 16 bits.
        loss_scale: of fp16; None for other types.
    """

    def __init__(self, train: TrainSpec, device: torch.device) -> None:
        self._dtype, self._device = compute_dtype(train.precision), device
        self.is_narrow = self._dtype.itemsize < 4
        self.loss_scale = LossScale(train.loss_scale) if train.precision == "fp16" else None

    @property
    def gradient_scale(self) -> float:
        """The gradient of the loss, with which a backward begins."""
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def step(self) -> AbstractContextManager[Any]:
        """Around a step: a weight is made narrow once in it, not for every micro-batch.

        Only the cast copies are kept; nothing else changes outside of :meth:`compute`.
        """
        if not self.is_narrow:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype, enabled=False)

    def compute(self, *, keep_casts: bool) -> AbstractContextManager[Any]:
        """Around blocks and hosted losses.

        Args:
            keep_casts: whether narrow weights are kept until :meth:`step` ends. Without
                gradients they must not be: such a copy would never lead to its weight.
        """
        if not self.is_narrow:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype, cache_enabled=keep_casts)


def widened(tensor: Tensor) -> Tensor:
    """Floats narrower than 32 bits as float32; other tensors as they are."""
    narrow = tensor.is_floating_point() and tensor.element_size() < 4
    return tensor.float() if narrow else tensor
