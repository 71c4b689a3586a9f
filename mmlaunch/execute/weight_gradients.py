"""Split backward: ``I`` computes input gradients, ``W`` the weight gradients that it put off.

While a split stage runs forward, its Linears and convolutions go through functions whose
backward gives the input's gradient at once and keeps the tensors that the weight's needs. ``W``
then computes it and hands it to autograd, which adds it up as in a fused backward. Everything else
in a block (norms, embeddings, matrices of its own) gets its gradients in ``I``: exact as
well, only not delayed.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mmlaunch.model.tensor_parallel import CutLinear

_CONVOLUTIONS: dict[Any, Callable[..., Tensor]] = {
    nn.Conv1d.forward: functional.conv1d,
    nn.Conv2d.forward: functional.conv2d,
    nn.Conv3d.forward: functional.conv3d,
}
# Past the checker, which takes the decorator's ctx for position-only.
once = cast("Callable[[Any], Any]", once_differentiable)
# Gradients of a layer's weight and bias, None where there is none.
_GradientPair = tuple[Tensor | None, Tensor | None]


class WeightGradients:
    """The weight gradients of one micro-batch of a stage that wait for its ``W``.

    Args:
        narrow: a step's parameters in autocast's type; shared by its micro-batches.
    """

    def __init__(self, narrow: dict[Tensor, Tensor]) -> None:
        self._narrow = narrow
        self._collecting = False
        self._waiting: list[tuple[Tensor, Tensor | None, Callable[[], _GradientPair]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def collect(self) -> Generator[None]:
        """Around ``I``. A backward outside of it gives every gradient at once, as always."""
        self._collecting = True
        try:
            yield
        finally:
            self._collecting = False

    def parameters(self) -> set[Tensor]:
        """Those that have a gradient waiting."""
        return {p for weight, bias, _ in self._waiting for p in (weight, bias) if p is not None}

    def compute(self) -> None:
        """``W``: add the waiting gradients to the parameters' ``.grad``, as a backward does."""
        sums: dict[Tensor, Tensor] = {}
        # I left those of the last blocks first. The tensors of a layer are freed as soon as its
        # gradient is there.
        waiting, self._waiting = deque(self._waiting), []
        uses = Counter(p for weight, bias, _ in waiting for p in (weight, bias) if p is not None)
        while waiting:
            weight, bias, make = waiting.popleft()
            for parameter, grad in zip((weight, bias), make(), strict=True):
                if parameter is None:
                    continue
                if grad is not None:
                    wide = grad.to(parameter.dtype)
                    known = sums.get(parameter)
                    sums[parameter] = wide if known is None else known.add_(wide)
                uses[parameter] -= 1
                if not uses[parameter] and parameter in sums:
                    # Through autograd: .grad adds up as it always does.
                    torch.autograd.backward(parameter, sums.pop(parameter))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """:func:`torch.nn.functional.linear`, its weight's gradient delayed where it can be."""
        if not _can_wait(x, weight, bias):
            return functional.linear(x, weight, bias)
        arguments = self._arguments(x, weight, bias)
        return cast(Tensor, _Layer.apply(*arguments, functional.linear, _linear_gradients))

    def convolution(self, layer: Any, input: Tensor) -> Tensor:
        """Forward of an ``nn.Conv1d``, ``2d`` or ``3d``, likewise."""
        plain, x = type(layer).forward, input
        padding = (0,) * len(layer.stride) if layer.padding == "valid" else layer.padding
        batched = x.dim() == layer.weight.dim()
        simple = layer.padding_mode == "zeros" and not isinstance(padding, str) and batched
        if not simple or not _can_wait(x, layer.weight, layer.bias):
            return cast(Tensor, plain(layer, x))
        settings = {
            "stride": layer.stride,
            "padding": padding,
            "dilation": layer.dilation,
            "groups": layer.groups,
        }
        arguments = self._arguments(x, layer.weight, layer.bias)
        convolve = partial(_CONVOLUTIONS[plain], **settings)
        gradients = partial(_convolution_gradients, **settings)
        return cast(Tensor, _Layer.apply(*arguments, convolve, gradients))

    def _arguments(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
        """The functions' arguments; input and parameters in autocast's type where it is enabled."""
        kind = x.device.type
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if narrow is not None and x.dtype == torch.float64:
            narrow = None
        x = x if narrow is None else x.to(narrow)
        used_bias = None if bias is None else self._as(bias, narrow)
        return x, weight, bias, self._as(weight, narrow), used_bias, self

    def _as(self, parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The parameter's values in a type, made once for all of its uses."""
        if dtype is None or parameter.dtype == dtype:
            return parameter.detach()
        # Not autocast's own copy: made without a graph, it would lead others nowhere.
        if parameter not in self._narrow:
            self._narrow[parameter] = parameter.detach().to(dtype)
        return self._narrow[parameter]

    def gradients(
        self, weight: Tensor, bias: Tensor | None, make: Callable[[], _GradientPair]
    ) -> _GradientPair:
        """``make()``, or nothing inside :meth:`collect`: then it waits."""
        if not self._collecting:
            return make()
        self._waiting.append((weight, bias, make))
        return None, None


def _can_wait(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a weight collects a gradient of its own that nothing else hangs on.

    One with a hook does not wait: I would call the hook without a gradient.
    """
    tensors = [weight] if bias is None else [weight, bias]
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and type(x) is Tensor
        and all(t.is_leaf and type(t) in (Tensor, nn.Parameter) for t in tensors)
        and not any(t._backward_hooks or cast(Any, t)._post_accumulate_grad_hooks for t in tensors)
    )


class _Layer(torch.autograd.Function):
    """A layer whose backward gives the input's gradient, and the weight's now or later.

    ``function`` computes the output of input, weight and bias. ``gradients`` takes the output's
    gradient, input, weight and which gradients of input, weight and bias are wanted.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        used_weight: Tensor,
        used_bias: Tensor | None,
        later: WeightGradients,
        function: Callable[..., Tensor],
        gradients: Callable[..., tuple[Tensor | None, ...]],
    ) -> Tensor:
        # Saved, not kept on ctx: recomputation must be able to let the input go.
        ctx.save_for_backward(x, used_weight)
        ctx.parameters, ctx.later, ctx.gradients = (weight, bias), later, gradients
        return function(x, used_weight, used_bias)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), needed = grads, ctx.needs_input_grad
        gradients = partial(ctx.gradients, grad, *ctx.saved_tensors)
        grad_x = gradients((True, False, False))[0] if needed[0] else None

        def make() -> _GradientPair:
            return gradients((False, True, needed[2]))[1:]

        return grad_x, *ctx.later.gradients(*ctx.parameters, make), *(None,) * 5


def _linear_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    rows = grad.reshape(-1, grad.shape[-1])
    return (
        grad.matmul(weight) if wanted[0] else None,
        rows.t().mm(x.reshape(-1, x.shape[-1])) if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )


def _convolution_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool], **settings: Any
) -> tuple[Tensor | None, ...]:
    return torch.ops.aten.convolution_backward(
        grad,
        x,
        weight,
        bias_sizes=[weight.shape[0]],
        transposed=False,
        output_padding=[0] * len(settings["stride"]),
        output_mask=wanted,
        **settings,
    )


class SplitBackward:
    """Lets a rank's blocks run with :class:`WeightGradients`, and leaves them as they were."""

    def __init__(self) -> None:
        self._layers: WeakKeyDictionary[nn.Module, list[nn.Module]] = WeakKeyDictionary()
        self._narrow: dict[Tensor, Tensor] = {}

    def forget(self) -> None:
        """A step begins or ends: narrow copies of parameters are of no more use."""
        self._narrow = {}

    def microbatch(self) -> WeightGradients:
        """For one micro-batch of a stage in this step."""
        return WeightGradients(self._narrow)

    @contextmanager
    def during(self, block: nn.Module, later: WeightGradients) -> Generator[None]:
        """Around a block's forward: its layers compute through ``later``."""
        if block not in self._layers:
            self._layers[block] = [m for m in block.modules() if _is_known(m)]
        layers = self._layers[block]
        # Past nn.Module's __setattr__; a forward of an instance hides its class's.
        for layer in layers:
            layer.__dict__["forward"] = _through(layer, later)
        try:
            yield
        finally:
            for layer in layers:
                del layer.__dict__["forward"]


def _is_known(layer: nn.Module) -> bool:
    """Whether a layer's forward is one that :func:`_through` can stand in for."""
    forward = type(layer).forward
    known = isinstance(layer, CutLinear) or forward is nn.Linear.forward
    return (known or forward in _CONVOLUTIONS) and "forward" not in layer.__dict__


def _through(layer: Any, later: WeightGradients) -> Callable[[Tensor], Tensor]:
    if isinstance(layer, CutLinear):
        return partial(layer.compute, later.linear)
    if isinstance(layer, nn.Linear):
        return partial(_linear, layer, later)
    return partial(later.convolution, layer)


def _linear(layer: nn.Linear, later: WeightGradients, input: Tensor) -> Tensor:
    return later.linear(input, layer.weight, layer.bias)
