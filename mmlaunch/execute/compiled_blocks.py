"""Blocks as ``torch.compile`` makes them, each kind once (``train.compile``).

What a compiled block computes is what it computes without: sums over tensor-parallel groups and
what ``W`` needs are operators of its graph, random numbers are torch's own, drawn from the
generators that are seeded before each block.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
from torch import nn

from mmlaunch.comm.batches import Tree, lacks_rows
from mmlaunch.execute.weight_gradients import KEEPING
from mmplan.errors import UnfitEnvironmentError
from mmplan.ragged import Ragged

BACKEND: Any = "inductor"
_OPTIONS = {"fallback_random": True}
# Ways in which a rank runs a kind of block: sizes, groups, frozen parameters.
_MOST_VARIANTS = 64
Call = Callable[..., Any]


class CompiledBlocks:
    """Compiles blocks when they first run; blocks alike share what was compiled.

    Args:
        device: that they run on.

    Raises:
        UnfitEnvironmentError: what compiles for the device is missing.
    """

    def __init__(self, device: torch.device) -> None:
        missing = _missing(device) if BACKEND == "inductor" else None
        if missing is not None:
            raise UnfitEnvironmentError(
                f"train.compile: torch cannot compile blocks for {device.type} here: {missing}",
                hint="install it, or run with --set train.compile=false",
            )
        # A batch with one row is no case of its own: it would be compiled when it comes.
        _shapes().backed_size_oblivious = True
        self._calls: dict[object, Call] = {}

    def of(self, block: nn.Module, arguments: tuple[Tree, ...], *, split: bool) -> Call:
        """The function to call with a block and its arguments.

        Args:
            block: stays as it is.
            arguments: that it will be called with.
            split: whether its backward is split.
        """
        if any(map(lacks_rows, arguments)):
            # There is little to compute, and libraries treat empty tensors apart.
            return _call
        shapes = tuple((name, p.shape) for name, p in block.named_parameters())
        kind = type(block), shapes, split
        if kind not in self._calls:
            # Code of its own: a size that differs between kinds would count as one that varies.
            code = _call.__code__.replace(co_name=f"block_{len(self._calls)}")
            self._calls[kind] = cast(Any, torch.compile)(
                FunctionType(code, globals()),
                backend=BACKEND,
                # Rows of ragged batches vary in every micro-batch.
                dynamic=True if any(map(_is_ragged, arguments)) else None,
                options={**_OPTIONS, **(KEEPING if split else {})},
                recompile_limit=_MOST_VARIANTS,
            )
        return self._calls[kind]


def _call(block: nn.Module, *arguments: Any) -> Any:
    return block(*arguments)


def _is_ragged(tree: Tree) -> bool:
    if isinstance(tree, Ragged):
        return True
    return isinstance(tree, tuple) and any(map(_is_ragged, tree))


def _missing(device: torch.device) -> str | None:
    """What torch's compiler needs for a device and does not find; None when all is there."""
    if device.type == "cuda":
        from torch.utils import _triton

        return None if _triton.has_triton() else "triton is missing"
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "there is no C++ compiler"
    return None


def _shapes() -> Any:
    """How torch's compilers treat sizes."""
    from torch.fx.experimental import _config

    return _config
