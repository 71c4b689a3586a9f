"""Where a micro-batch's activations begin and end: leaves that collect gradients, sums of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmlaunch.comm.messages import float_leaves, float_rows


def leaf_of(tensor: Tensor) -> Tensor:
    """A tensor that collects its gradient, where it can have one."""
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def gradient_of(tensor: Tensor) -> Tensor:
    """Its gradient, zeros where none reached it; other tensors as they are."""
    if not tensor.is_floating_point():
        return tensor
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


class GradientSums:
    """Gradients of an output's floating leaves, summed over all that took them."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, tree: Any, first: int, part: Any, given: Sequence[Tensor]) -> None:
        """Add what one of those that took samples gives back.

        Args:
            tree: the output.
            first: its first sample that was taken.
            part: the samples that were.
            given: a gradient for each floating leaf of the part.
        """
        leaves = zip(float_leaves(tree), float_leaves(part), float_rows(tree, first), strict=True)
        for (whole, cut, first_row), given_grad in zip(leaves, given, strict=True):
            if not whole.requires_grad:
                continue
            grad = given_grad.to(whole.dtype)
            if id(whole) not in self._sums and len(cut) == len(whole):
                self._sums[id(whole)] = whole, grad
                continue
            if id(whole) not in self._sums:
                self._sums[id(whole)] = whole, torch.zeros_like(whole)
            total = self._sums[id(whole)][1]
            total[first_row : first_row + len(cut)] += grad

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Leaves that need a gradient, each with its own."""
        return list(self._sums.values())
