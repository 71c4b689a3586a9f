"""Training types: bf16 and fp16 are autocast around blocks and hosted losses.

Features leave a stage in the type in which its blocks return them, so messages and gathers
carry the narrow type where they do. Losses across samples compute in float32, without autocast,
from features made wide; the value of every loss is float32. Gradients of parameters add up in
float32.

Weights stay float32, and autocast makes narrow copies of them that last a step. Where ZeRO cuts the
update the narrow weights are all that a rank holds whole: of the matrices with which autocast
computes in its own type alone (:func:`matrix_names`), float32 values lie cut beside the
optimizer's state. A step's numbers are the same either way, but for rows of an embedding, which
are rounded then.

Numbers of fp16 end at 65,504 and 6e-8. So a backward in fp16 begins with the gradient of the
loss times a scale, the same for all modules and ranks, and the summed gradients are divided by it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mmlaunch.model.tensor_parallel import CutEmbedding
from mmplan.schema.factories import compute_dtype
from mmplan.schema.train import LARGEST_SCALE, LossScaleSpec, TrainSpec

once = cast("Callable[[Any], Any]", once_differentiable)


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
        narrow: the type of 16 bits in which blocks compute; None for a wider one.
        loss_scale: of fp16; None for other types.
    """

    def __init__(self, train: TrainSpec, device: torch.device) -> None:
        self._dtype, self._device = compute_dtype(train.precision), device
        self.narrow = self._dtype if self._dtype.itemsize < 4 else None
        self.loss_scale = LossScale(train.loss_scale) if train.precision == "fp16" else None

    @property
    def is_narrow(self) -> bool:
        """Whether blocks compute in a type of 16 bits."""
        return self.narrow is not None

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


# Forwards that use their weights in nothing but what autocast computes in its own type.
_PRODUCTS = frozenset(
    f"torch.nn.modules.{kind}.forward"
    for kind in (
        "linear.Linear",
        "conv.Conv1d",
        "conv.Conv2d",
        "conv.Conv3d",
        "activation.MultiheadAttention",
    )
) | {"transformers.pytorch_utils.Conv1D.forward"}


def matrix_names(module: nn.Module) -> set[str]:
    """Names of the weights that may be narrow: of products, convolutions and embeddings.

    Their layers run their own library's forward. A parameter of three or more dimensions that a
    layer has beside such ones is taken for a stack of matrices (experts), unless it is broadcast
    along its first dimension. A parameter that another layer uses too is left out.
    """
    uses: defaultdict[nn.Parameter, set[bool]] = defaultdict(set)
    for layer in module.modules():
        forward = type(layer).forward
        multiplies = f"{forward.__module__}.{forward.__qualname__}" in _PRODUCTS
        known = multiplies or _reads_rows(layer)
        norm = isinstance(layer, nn.LayerNorm | nn.RMSNorm)
        for name, parameter in layer.named_parameters(recurse=False):
            stack = parameter.dim() > 2 and len(parameter) > 1 and not norm
            weight = parameter.dim() > 1 and known and name.endswith("weight")
            uses[parameter].add(weight or stack)
    return {name for name, parameter in module.named_parameters() if uses[parameter] == {True}}


def _reads_rows(layer: nn.Module) -> bool:
    """Whether a layer is an embedding as :func:`widen_rows` can run it."""
    if type(layer).forward is not nn.Embedding.forward:
        return False
    table = cast(nn.Embedding, layer)
    return table.max_norm is None and not table.sparse


def widen_rows(blocks: Iterable[nn.Module], narrow: Collection[nn.Parameter]) -> None:
    """Let embeddings with narrow weights return float32, and add up their gradient in it."""
    for layer in (layer for block in blocks for layer in block.modules()):
        cut = isinstance(layer, CutEmbedding)
        if (cut or _reads_rows(layer)) and cast(nn.Embedding, layer).weight in narrow:
            run = partial(_rows, cast(nn.Embedding, layer))
            setattr(layer, "lookup" if cut else "forward", run)


def _rows(layer: nn.Embedding, input: Tensor) -> Tensor:
    padding = -1 if layer.padding_idx is None else layer.padding_idx
    return _Rows.apply(layer.weight, input, padding, layer.scale_grad_by_freq)


class _Rows(torch.autograd.Function):
    """Rows of a narrow table as float32."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, index: Tensor, padding: int, scale_grad_by_freq: bool
    ) -> Tensor:
        ctx.save_for_backward(index)
        ctx.settings = len(weight), padding, scale_grad_by_freq
        return functional.embedding(index, weight).float()

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        grad = torch.ops.aten.embedding_dense_backward(grads[0], index, *ctx.settings)
        return grad, None, None, None
