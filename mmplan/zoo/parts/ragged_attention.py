"""Attention inside each of several samples whose rows lie one after another.

No row of scores is computed between samples. :func:`attend_samples` chooses how: a kernel for
samples of any lengths where the device has one, else attention of each sample.

Shape suffixes used in this file: H = query heads, G = key and value heads (a divisor of H),
N = rows of all samples, D = width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from mmplan.ragged import host_lengths, known_lengths

# Types of the varlen kernel, which is FlashAttention's.
_HALF = (torch.float16, torch.bfloat16)


def attend_samples(
    q_HND: Tensor,
    k_GND: Tensor,
    v_GND: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    longest: int | None = None,
) -> Tensor:
    """Let each row look at its own sample: at the rows before it, or at all of them.

    Args:
        q_HND: queries [1, H, N, D].
        k_GND: keys [1, G, N, D].
        v_GND: values [1, G, N, D].
        lengths: [samples] int64, rows of each; their sum is N.
        scale: of the scores; D ** -0.5 by default.
        causal: whether a row looks at itself and those before it only.
        longest: a bound on the lengths, where one is known without them.

    Returns:
        [1, H, N, D].
    """
    scale = float(q_HND.shape[-1] ** -0.5 if scale is None else scale)
    compiling = torch.compiler.is_compiling()
    if not compiling and not has_values(q_HND):
        return _as_operator(q_HND, k_GND, v_GND, lengths, scale, causal)
    if q_HND.device.type == "cuda" and q_HND.dtype in _HALF:
        known = None if compiling else known_lengths(lengths)
        # An upper bound costs blocks of the kernel that find nothing to do, and no wait.
        most = q_HND.shape[2] if longest is None else longest
        most = most if known is None else max(known, default=0)
        return _varlen(q_HND, k_GND, v_GND, lengths, most, scale, causal)
    if compiling:
        return _as_operator(q_HND, k_GND, v_GND, lengths, scale, causal)
    return _each_sample(q_HND, k_GND, v_GND, host_lengths(lengths), scale, causal)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers, not only a shape."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _as_operator(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, causal: bool
) -> Tensor:
    """One operator, for compilers and for tensors without values."""
    operator: Any = torch.ops.mmplan.ragged_attention
    return operator(q, k, v, lengths, scale, causal)


def _varlen(
    q_HND: Tensor,
    k_GND: Tensor,
    v_GND: Tensor,
    lengths: Tensor,
    longest: int,
    scale: float,
    causal: bool,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (q_HND, k_GND, v_GND))
    ends = functional.pad(lengths.cumsum(0), (1, 0)).int()
    grouped = q_HND.shape[1] != k_GND.shape[1]
    mixed: Any = varlen_attn(
        *(q, k, v, ends, ends, longest, longest),
        scale=scale,
        window_size=(-1, 0 if causal else -1),
        enable_gqa=grouped,
    )
    return mixed.transpose(0, 1)[None]


def _each_sample(
    q_HND: Tensor,
    k_GND: Tensor,
    v_GND: Tensor,
    lengths: Sequence[int],
    scale: float,
    causal: bool,
) -> Tensor:
    """Attention of samples of one length that follow one another, at once."""
    parts: list[Tensor] = []
    begin = 0
    for length, run in groupby(lengths):
        count = len(list(run))
        if not length and parts:
            continue
        end = begin + count * length
        q, k, v = (
            x[0, :, begin:end].unflatten(1, (count, length)).transpose(0, 1)
            for x in (q_HND, k_GND, v_GND)
        )
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        parts.append(mixed.transpose(0, 1).flatten(1, 2))
        begin = end
    return torch.cat(parts, dim=1)[None]


# --- the operator ----------------------------------------------------------------------


def _forward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, causal: bool = True
) -> Tensor:
    return _each_sample(q, k, v, host_lengths(lengths), scale, causal).contiguous()


def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    scale: float,
    causal: bool = True,
) -> tuple[Tensor, ...]:
    # The forward once more: its scores are not kept.
    with torch.enable_grad():
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        out = _each_sample(given[0], given[1], given[2], host_lengths(lengths), scale, causal)
        # Laid out as compilers are told below.
        return tuple(x.contiguous() for x in torch.autograd.grad(out, given, gradient))


def _like_query(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _like_inputs(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    back: Any = torch.ops.mmplan.ragged_attention_backward
    return (*back(gradient, *ctx.saved_tensors, ctx.scale, ctx.causal), None, None, None)


_GIVEN = "Tensor query, Tensor key, Tensor value, Tensor lengths, float scale, bool causal=True"
torch.library.define("mmplan::ragged_attention", f"({_GIVEN}) -> Tensor")
torch.library.define(
    "mmplan::ragged_attention_backward",
    f"(Tensor gradient, {_GIVEN}) -> (Tensor, Tensor, Tensor)",
)
torch.library.impl("mmplan::ragged_attention", "CompositeExplicitAutograd", _forward)
torch.library.impl("mmplan::ragged_attention_backward", "CompositeExplicitAutograd", _backward)
torch.library.register_fake("mmplan::ragged_attention", _like_query)
torch.library.register_fake("mmplan::ragged_attention_backward", _like_inputs)
torch.library.register_autograd("mmplan::ragged_attention", _gradients, setup_context=_save)


def _pairs(num_rows: int, lengths: Tensor, causal: bool) -> float:
    """Pairs of rows that look at each other: the squares of the lengths, half of them if causal.

    Lengths that the host knows may be of samples that stand for these. Samples count as equally
    long where it knows none.
    """
    known = host_lengths(lengths) if has_values(lengths) else known_lengths(lengths)
    share = 0.5 if causal else 1.0
    if not known or not any(known):
        return share * num_rows * num_rows / max(1, len(lengths))
    return share * num_rows * sum(length * length for length in known) / sum(known)


@register_flop_formula(torch.ops.mmplan.ragged_attention, get_raw=True)
def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, _: float, causal: bool = True, **__: Any
) -> float:
    return 2 * q.shape[1] * (q.shape[-1] + v.shape[-1]) * _pairs(q.shape[2], lengths, causal)


@register_flop_formula(torch.ops.mmplan.ragged_attention_backward, get_raw=True)
def _backward_flops(_gradient: Tensor, *given: Any, **_: Any) -> float:
    # Five matrix products (one of them repeats the forward's) against the forward's two.
    return 2.5 * _forward_flops(*given)
