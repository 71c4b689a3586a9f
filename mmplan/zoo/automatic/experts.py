"""Mixtures of experts of transformers, computed in any type and without values."""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula


def allow_any_type() -> None:
    """Let the experts' products be computed where torch's own kernel is not.

    ``torch.nn.functional.grouped_mm`` takes no float64, and without values (on the meta device)
    bfloat16 only. transformers has an operator that takes all, for devices without that
    kernel; here it is used wherever the tensors are not on CUDA. Its FLOPs are made known.
    """
    products: Any = importlib.import_module("transformers.integrations.moe")
    operators: Any = getattr(torch.ops, "transformers", None)
    if not hasattr(operators, "grouped_mm_fallback"):
        return  # an older transformers: experts in a loop over those that are hit
    if operators.grouped_mm_fallback in flop_registry:
        return
    library_can = products._can_use_grouped_mm

    def can(x: Tensor, weight: Tensor, offs: Tensor) -> bool:
        is_known = weight.is_cuda and weight.dtype != torch.float64
        return is_known and library_can(x, weight, offs)

    products._can_use_grouped_mm = can
    register = cast(Any, register_flop_formula)
    register(operators.grouped_mm_fallback)(_forward_flops)
    register(operators.grouped_mm_fallback_backward)(_backward_flops)


def _forward_flops(rows: Any, weight: Any, *_: Any, **__: Any) -> int:
    """Of rows [S, K], each with one of the weights [E, K, N]."""
    return 2 * rows[0] * rows[1] * weight[2]


def _backward_flops(rows: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * _forward_flops(rows, weight)
