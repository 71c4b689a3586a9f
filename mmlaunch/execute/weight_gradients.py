"""Split backward: ``I`` computes input gradients, ``W`` the weight gradients that it put off.

While a split stage runs forward, its Linears and convolutions go through functions whose
backward gives the input's gradient at once and keeps the tensors that the weight's needs. ``W``
then computes it and hands it to autograd, which adds it up as in a fused backward. Everything else
in a block (norms, embeddings, matrices of its own) gets its gradients in ``I``: exact as
well, only not delayed. What keeps the tensors is an operator of torch, so that a compiled block's
backward has it in its graph; ``W`` is not compiled.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mmlaunch.model.tensor_parallel import CutLinear
from mmplan.proof.row_cuts import SharedRows, all_rows_again, linear_of_rows

_CONVOLUTIONS: dict[Any, Callable[..., Tensor]] = {
    nn.Conv1d.forward: functional.conv1d,
    nn.Conv2d.forward: functional.conv2d,
    nn.Conv3d.forward: functional.conv3d,
}
# Past the checker, which takes the decorator's ctx for position-only.
once = cast("Callable[[Any], Any]", once_differentiable)
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _PutOff:
    """What a layer's weight gradient is computed of.

    Attributes:
        weight, bias: the parameters; no bias where there is none or it is frozen.
        grad: of the output.
        x, used: input and weight as the layer computed with them.
        settings: of a convolution (:func:`_named`); none of a Linear.
        group: that shares out the input's rows, of which ``x`` are the rank's own; "" where it
            does not.
        shared: those rows, for several Linears.
    """

    weight: Tensor
    bias: Tensor | None
    grad: Tensor
    x: Tensor
    used: Tensor
    settings: Sequence[int]
    group: str
    shared: SharedRows | None

    def gradients(self) -> list[Tensor | None]:
        """Of weight and bias."""
        wanted = (False, True, self.bias is not None)
        x = all_rows_again(self.shared, self.x, self.grad, self.group) if self.group else self.x
        _, *found = _gradients(self.grad, x, self.used, self.settings, wanted)
        return found


class WeightGradients:
    """The weight gradients of one micro-batch of a stage that wait for its ``W``.

    Args:
        split: the rank's.
    """

    def __init__(self, split: SplitBackward) -> None:
        self._split = split
        self._waiting: list[_PutOff] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def collect(self) -> Generator[None]:
        """Around ``I``. A backward outside of it gives every gradient at once, as always."""
        self._split.collecting = self
        try:
            yield
        finally:
            self._split.collecting = None

    def put_off(self, waiting: _PutOff) -> None:
        """Leave a layer's gradients to :meth:`compute`."""
        self._waiting.append(waiting)

    def parameters(self) -> set[Tensor]:
        """Those that have a gradient waiting."""
        return set(_parameters_of(self._waiting))

    def compute(self) -> None:
        """``W``: add the waiting gradients to the parameters' ``.grad``, as a backward does."""
        sums: dict[Tensor, Tensor] = {}
        # I left those of the last blocks first. The tensors of a layer are freed as soon as its
        # gradient is there.
        waiting, self._waiting = deque(self._waiting), []
        uses = Counter(_parameters_of(waiting))
        while waiting:
            layer = waiting.popleft()
            for parameter, grad in zip((layer.weight, layer.bias), layer.gradients(), strict=True):
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


def _parameters_of(waiting: Iterable[_PutOff]) -> Iterator[Tensor]:
    """The parameter of each gradient that waits."""
    for layer in waiting:
        yield layer.weight
        if layer.bias is not None:
            yield layer.bias


class SplitBackward:
    """Lets a rank's blocks run so that weight gradients can wait, and leaves them as they were.

    Attributes:
        collecting: the micro-batch whose ``I`` runs now.
    """

    def __init__(self) -> None:
        self.collecting: WeightGradients | None = None
        # The name by which the backwards of compiled blocks know it.
        self.name = f"split backward {next(_numbers)}"
        _SPLITS[self.name] = self
        self._forwards: WeakKeyDictionary[nn.Module, dict[nn.Module, Forward]] = WeakKeyDictionary()
        # By the place of their values in memory: parameters, and copies in autocast's type.
        self._parameters: dict[int, nn.Parameter] = {}
        self._narrow: dict[int, Tensor] = {}

    def forget(self) -> None:
        """A step begins or ends: parameters may move, their narrow copies are of no more use."""
        self._parameters, self._narrow = {}, {}

    def microbatch(self) -> WeightGradients:
        """For one micro-batch of a stage in this step."""
        return WeightGradients(self)

    @contextmanager
    def during(self, block: nn.Module) -> Generator[None]:
        """Around a block's forward, whose backward is then split."""
        if block not in self._forwards:
            # Made once: a compiled block is compiled for the functions that it was run with.
            self._forwards[block] = {
                layer: self._forward(layer) for layer in block.modules() if _is_known(layer)
            }
        waits: list[nn.Module] = []
        for layer, forward in self._forwards[block].items():
            parameters = _parameters(layer)
            if parameters is not None:
                waits.append(layer)
                self._parameters |= {p.data_ptr(): p for p in parameters}
                # Past nn.Module's __setattr__; a forward of an instance hides its class's.
                layer.__dict__["forward"] = forward
        try:
            yield
        finally:
            for layer in waits:
                del layer.__dict__["forward"]

    def _forward(self, layer: Any) -> Forward:
        if isinstance(layer, CutLinear):
            return partial(layer.compute, self.linear)
        if isinstance(layer, nn.Linear):
            return partial(_linear, layer, self)
        return partial(self.convolution, layer)

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        rows: SharedRows | None = None,
    ) -> Tensor:
        """:func:`mmplan.proof.row_cuts.linear_of_rows`, its weight's gradient delayed."""
        return self._apply(functional.linear, (), x, weight, bias, rows)

    def convolution(self, layer: Any, input: Tensor) -> Tensor:
        """Forward of an ``nn.Conv1d``, ``2d`` or ``3d``, likewise."""
        padding = (0,) * len(layer.stride) if layer.padding == "valid" else layer.padding
        if isinstance(padding, str) or input.dim() != layer.weight.dim():
            return type(layer).forward(layer, input)
        settings = (*layer.stride, *padding, *layer.dilation, layer.groups)
        function = partial(_CONVOLUTIONS[type(layer).forward], **_named(settings))
        return self._apply(function, settings, input, layer.weight, layer.bias)

    def _apply(
        self,
        function: Callable[..., Tensor],
        settings: Sequence[int],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: SharedRows | None = None,
    ) -> Tensor:
        compiling = torch.compiler.is_compiling()
        # In a compiled backward the operator stands between the input's gradient and its user.
        if type(x) is not Tensor or (compiling and not x.requires_grad):
            return (
                function(x, weight, bias) if rows is None else linear_of_rows(x, weight, bias, rows)
            )
        kind = x.device.type
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if narrow is not None and x.dtype != torch.float64:
            # A compiled block makes its narrow copies itself, fused with what is around them.
            make = Tensor.to if compiling else self._as
            used, used_bias = (p if p is None else make(p.detach(), narrow) for p in (weight, bias))
            x = x.to(narrow)
        else:
            used, used_bias = weight.detach(), None if bias is None else bias.detach()
        kept = None if rows is None else rows.kept(x.dtype)
        shared = None if rows is None else rows.use(weight)
        group = "" if rows is None else rows.group
        arguments = x, kept, weight, bias, used, used_bias, function, settings, self.name
        return cast(Tensor, _Layer.apply(*arguments, group, shared))

    def _as(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """The parameter's values in a type, made once a step for all of its uses."""
        # Not autocast's own copy: made without a graph, it would lead others nowhere.
        place = parameter.data_ptr()
        if place not in self._narrow:
            self._narrow[place] = parameter.to(dtype)
        return self._narrow[place]

    def parameter(self, values: Tensor) -> Tensor:
        """The parameter that has these values; autograd may give back another tensor of them."""
        return self._parameters[values.data_ptr()]


_numbers = itertools.count()
_SPLITS: WeakValueDictionary[str, SplitBackward] = WeakValueDictionary()

# For compilers it changes the input's gradient, which is why they keep it where it stands. It
# changes nothing, but tensors that it keeps must not be written to: a compiled block with a split
# backward reuses no memory (:data:`KEEPING`).
torch.library.define(
    "mmlaunch::put_off",
    "(Tensor(a!) grad_x, Tensor grad, Tensor x, Tensor used, Tensor weight, Tensor? bias, "
    "int[] settings, str split, str group) -> ()",
)
KEEPING = {"allow_buffer_reuse": False, "inplace_buffers": False}


def _put_off(
    grad_x: Tensor | None,
    grad: Tensor,
    x: Tensor,
    used: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: Sequence[int],
    split: str,
    group: str,
    shared: SharedRows | None = None,
) -> None:
    rank = _SPLITS[split]
    known = rank.parameter(weight), None if bias is None else rank.parameter(bias)
    later = WeightGradients(rank) if rank.collecting is None else rank.collecting
    later.put_off(_PutOff(*known, grad, x, used, settings, group, shared))
    if rank.collecting is None:
        later.compute()


torch.library.impl("mmlaunch::put_off", "CompositeExplicitAutograd", _put_off)
# Without values there is nothing to keep.
torch.library.register_fake("mmlaunch::put_off", lambda *_: None)


class _Layer(torch.autograd.Function):
    """A layer whose backward gives the input's gradient, and the weight's now or later.

    ``kept`` are the rank's own rows of the input, of which ``group`` can gather all for the
    weight's gradient; None where the whole input is kept.
    ``function`` computes the output of input, weight and bias, with these ``settings``; ``split``
    names the rank's :class:`SplitBackward`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        kept: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        used: Tensor,
        used_bias: Tensor | None,
        function: Callable[..., Tensor],
        settings: Sequence[int],
        split: str,
        group: str,
        shared: SharedRows | None,
    ) -> Tensor:
        # Saved, not kept on ctx: recomputation must be able to let the input go.
        ctx.save_for_backward(x if kept is None else kept, used, weight, bias)
        ctx.settings, ctx.split = settings, split
        ctx.group, ctx.shared = group, shared
        return function(x, used, used_bias)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (needs_x, _, _, needs_bias, *_) = grads, ctx.needs_input_grad
        x, used, weight, bias = ctx.saved_tensors
        later = torch.compiler.is_compiling() or _SPLITS[ctx.split].collecting is not None
        if not later and ctx.shared is not None:
            ctx.shared.start(x, grad)
        grad_x = _gradients(grad, x, used, ctx.settings, (needs_x, False, False))[0]
        if later:
            kept = grad, x, used, weight, bias if needs_bias else None
            given = grad_x, *kept, ctx.settings, ctx.split, ctx.group
            if torch.compiler.is_compiling():
                torch.ops.mmlaunch.put_off(*given)
            else:
                _put_off(*given, ctx.shared)
            return grad_x, *(None,) * 10
        if ctx.group:
            x = all_rows_again(ctx.shared, x, grad, ctx.group)
        now = _gradients(grad, x, used, ctx.settings, (False, True, needs_bias))[1:]
        return grad_x, None, *now, *(None,) * 7


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, settings: Sequence[int], wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of input, weight and bias that are wanted; of a convolution if it has settings."""
    if settings:
        named = _named(settings)
        return torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            bias_sizes=[weight.shape[0]],
            transposed=False,
            output_padding=[0] * len(named["stride"]),
            output_mask=wanted,
            **named,
        )
    rows = grad.reshape(-1, grad.shape[-1])
    return (
        grad.matmul(weight) if wanted[0] else None,
        rows.t().mm(x.reshape(-1, x.shape[-1])) if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )


def _named(settings: Sequence[int]) -> dict[str, Any]:
    """Stride, padding and dilation along every axis, and groups, as functions take them."""
    axes = (len(settings) - 1) // 3
    names = ("stride", "padding", "dilation")
    parts = {name: list(settings[i * axes : (i + 1) * axes]) for i, name in enumerate(names)}
    return {**parts, "groups": settings[-1]}


def _is_known(layer: nn.Module) -> bool:
    """Whether :class:`SplitBackward` has a function that can stand in for a layer's forward."""
    forward = type(layer).forward
    known = isinstance(layer, CutLinear) or forward is nn.Linear.forward
    simple = forward in _CONVOLUTIONS and cast(Any, layer).padding_mode == "zeros"
    return (known or simple) and "forward" not in layer.__dict__


def _parameters(layer: nn.Module) -> list[nn.Parameter] | None:
    """A layer's parameters if its weight collects a gradient of its own that nothing else hangs on.

    One with a hook does not wait: I would call the hook without a gradient.
    """
    found = [layer._parameters.get(name) for name in ("weight", "bias")]
    tensors = [parameter for parameter in found if parameter is not None]
    waits = (
        torch.is_grad_enabled()
        and found[0] is not None
        and found[0].requires_grad
        and all(t.is_leaf and type(t) is nn.Parameter for t in tensors)
        and not any(t._backward_hooks or cast(Any, t)._post_accumulate_grad_hooks for t in tensors)
    )
    return tensors if waits else None


def _linear(layer: nn.Linear, split: SplitBackward, input: Tensor) -> Tensor:
    return split.linear(input, layer.weight, layer.bias)
