"""Cut and join what blocks take and return: tensors, ``Ragged``, tuples of these, None.

Every tensor is batch first. None stands for an input that a task does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmplan.errors import RunFailedError
from mmplan.ragged import Ragged


def num_samples(tree: Any) -> int | None:
    """Samples in a batch; None when there is no tensor in it."""
    if isinstance(tree, Ragged):
        return len(tree.lengths)
    if isinstance(tree, Tensor):
        return tree.shape[0] if tree.dim() else None
    if isinstance(tree, tuple):
        return next((n for n in map(num_samples, tree) if n is not None), None)
    return None


def slice_samples(tree: Any, start: int, stop: int) -> Any:
    """Samples [start, stop) of a batch, as views of it."""
    if isinstance(tree, Ragged):
        first = int(tree.lengths[:start].sum())
        last = first + int(tree.lengths[start:stop].sum())
        return Ragged(tree.values[first:last], tree.lengths[start:stop])
    if isinstance(tree, Tensor):
        return tree[start:stop]
    if isinstance(tree, tuple):
        return tuple(slice_samples(item, start, stop) for item in tree)
    if tree is None:
        return None
    raise RunFailedError(
        f"a batch holds a {type(tree).__name__}",
        hint="blocks take and return tensors, mmplan.Ragged, tuples of these or None",
    )


def cat_samples(trees: Sequence[Any]) -> Any:
    """One batch of several, in order; a single one is returned as it is.

    Raises:
        RunFailedError: the batches are built differently.
    """
    first = trees[0]
    if len(trees) == 1:
        return first
    if any(type(tree) is not type(first) for tree in trees):
        raise RunFailedError(f"batches to join differ: {[type(tree).__name__ for tree in trees]}")
    if isinstance(first, Ragged):
        return Ragged(*(torch.cat(column) for column in zip(*trees, strict=True)))
    if isinstance(first, Tensor):
        return torch.cat(list(trees))
    if isinstance(first, tuple):
        if len({len(tree) for tree in trees}) > 1:
            raise RunFailedError(f"batches to join differ: tuples of {[len(t) for t in trees]}")
        return tuple(cat_samples(column) for column in zip(*trees, strict=True))
    return slice_samples(first, 0, 0)  # None, or the error for anything else
