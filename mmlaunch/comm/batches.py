"""Trees of tensors, which blocks take and return and messages carry: cut, joined, walked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from mmplan.errors import RunFailedError
from mmplan.ragged import Ragged, as_known, host_lengths, with_host_lengths

# Every tensor is batch first. None stands for an input that a task does not have.
Tree: TypeAlias = "Tensor | Ragged | tuple[Tree, ...] | None"
T = TypeVar("T")
# What to do about a block that raises for an input without rows.
NO_ROWS = (
    "let the block take 0 rows: give reshape and view their sizes in place of -1, and take no "
    "maximum of nothing"
)


def num_samples(tree: Tree) -> int | None:
    """Samples in a batch; None when there is no tensor in it."""
    if isinstance(tree, Ragged):
        return len(tree.lengths)
    if isinstance(tree, Tensor):
        return tree.shape[0] if tree.dim() else None
    if isinstance(tree, tuple):
        return next((n for n in map(num_samples, tree) if n is not None), None)
    return None


def lacks_rows(tree: Tree) -> bool:
    """Whether a ``Ragged`` in a batch has no row at all: no sample has the modality."""
    if isinstance(tree, Ragged):
        return not len(tree.values)
    return isinstance(tree, tuple) and any(map(lacks_rows, tree))


def slice_samples(tree: Tree, start: int, stop: int) -> Tree:
    """Samples [start, stop) of a batch, as views of it; a tensor of no others as it is."""
    if isinstance(tree, Ragged):
        known = host_lengths(tree.lengths)
        first, last = sum(known[:start]), sum(known[:stop])
        lengths = with_host_lengths(tree.lengths[start:stop], known[start:stop])
        return Ragged(tree.values[first:last], lengths)
    if isinstance(tree, Tensor):
        return tree if start == 0 and tree.shape[0] == stop else tree[start:stop]
    if isinstance(tree, tuple):
        return tuple(slice_samples(item, start, stop) for item in tree)
    if tree is None:
        return None
    raise RunFailedError(
        f"a batch holds a {type(tree).__name__}",
        hint="blocks take and return tensors, mmplan.Ragged, tuples of these or None",
    )


def to_device(lengths: Tensor, device: torch.device) -> Tensor:
    """Lengths that lie on the host, on a device; the host still knows them there."""
    known = host_lengths(lengths)
    return with_host_lengths(lengths.to(device, non_blocking=True), known)


def cat_samples(trees: Sequence[Tree]) -> Tree:
    """One batch of several, in order; a single one is returned as it is.

    Raises:
        RunFailedError: the batches are built differently.
    """
    first = trees[0]
    if len(trees) == 1:
        return first
    if any(type(tree) is not type(first) for tree in trees):
        raise RunFailedError(f"batches to join differ: {[type(tree).__name__ for tree in trees]}")
    same = cast("Sequence[Any]", trees)
    if isinstance(first, Ragged):
        # Rows that are not there may be of another shape.
        values = [tree.values for tree in same if len(tree.values)] or [first.values]
        known = tuple(chain.from_iterable(host_lengths(tree.lengths) for tree in same))
        lengths = torch.cat([tree.lengths for tree in same])
        return Ragged(torch.cat(values), with_host_lengths(lengths, known))
    if isinstance(first, Tensor):
        return torch.cat(list(same))
    if isinstance(first, tuple):
        if len({len(tree) for tree in same}) > 1:
            raise RunFailedError(f"batches to join differ: tuples of {[len(t) for t in same]}")
        return tuple(cat_samples(column) for column in zip(*same, strict=True))
    return slice_samples(first, 0, 0)  # None, or the error for anything else


def element_of(tree: T, element: int | None, what: str) -> T:
    """An element of a module's output (or of its spec), or all of it.

    Raises:
        RunFailedError: the output is no tuple, or too short.
    """
    if element is None:
        return tree
    if not isinstance(tree, tuple) or isinstance(tree, Ragged) or element >= len(tree):
        size = f"a tuple of {len(tree)}" if isinstance(tree, tuple) else "no tuple"
        raise RunFailedError(
            f"{what}.{element} is asked for, but {what} returns {size}",
            hint="correct the element's number in inputs",
        )
    return cast(T, tree[element])


def map_tensors(tree: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    """The tree with every tensor changed; the change leaves the numbers of lengths as they are."""
    if isinstance(tree, Ragged):
        return Ragged(change(tree.values), as_known(change(tree.lengths), tree.lengths))
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        return tuple(map_tensors(item, change) for item in tree)
    return tree


def leaf_of(tensor: Tensor) -> Tensor:
    """The values of a tensor, cut from its history; a floating one collects its gradient."""
    leaf = tensor.detach()
    return leaf.requires_grad_() if leaf.is_floating_point() else leaf


def tensors_of(tree: Tree) -> Iterator[Tensor]:
    """All tensors of a tree, in order; of ``Ragged`` the values and the lengths."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple):
        for item in tree:
            yield from tensors_of(item)


def float_leaves(tree: Tree) -> Iterator[Tensor]:
    """The tensors for which gradients travel back, in order."""
    return (tensor for tensor in tensors_of(tree) if tensor.is_floating_point())


def float_rows(tree: Tree, start: int) -> Iterator[int]:
    """The row at which sample ``start`` begins in each of :func:`float_leaves`."""
    if isinstance(tree, Ragged):
        if tree.values.is_floating_point():
            yield sum(host_lengths(tree.lengths)[:start])
    elif isinstance(tree, Tensor):
        if tree.is_floating_point():
            yield start
    elif isinstance(tree, tuple):
        for item in tree:
            yield from float_rows(item, start)
