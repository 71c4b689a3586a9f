"""Blocks as ``torch.compile`` makes them, each kind once (``train.compile``)."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch import nn

from mmlaunch.comm.batches import Tree
from mmlaunch.execute.weight_gradients import KEEPING
from mmplan.ragged import Ragged

BACKEND: Any = "inductor"
# Random numbers are torch's own, drawn from the generators that are seeded before each block.
_OPTIONS = {"fallback_random": True}
# Ways in which a rank runs a kind of block: shapes, groups, frozen or not, split or whole.
_MOST_VARIANTS = 64


class CompiledBlocks:
    """Compiles blocks when they first run; blocks alike share what was compiled."""

    def __init__(self) -> None:
        self._calls: dict[object, Callable[..., Any]] = {}

    def of(self, block: nn.Module, arguments: tuple[Tree, ...], *, split: bool) -> Callable[..., Any]:
        """What computes a block's output, called with the block and its arguments.

        Args:
            block: stays as it is.
            arguments: that it will be called with.
            split: whether its backward is split.
        """
        shapes = tuple((name, p.shape) for name, p in block.named_parameters())
        kind = type(block), shapes, split
        if kind not in self._calls:
            # Code of its own: shapes that vary in one kind of block would count as varying in all.
            code = _call.__code__.replace(co_name=f"block_{len(self._calls)}")
            self._calls[kind] = torch.compile(
                FunctionType(code, globals()),
                backend=BACKEND,
                # Rows of ragged batches vary in every micro-batch.
                dynamic=True if any(map(_has_rows, arguments)) else None,
                options=cast("dict[str, Any]", {**_OPTIONS, **(KEEPING if split else {})}),
                recompile_limit=_MOST_VARIANTS,
            )
        return self._calls[kind]


def _call(block: nn.Module, *arguments: Any) -> Any:
    return block(*arguments)


def _has_rows(tree: Tree) -> bool:
    if isinstance(tree, tuple) and not isinstance(tree, Ragged):
        return any(map(_has_rows, tree))
    return isinstance(tree, Ragged)
