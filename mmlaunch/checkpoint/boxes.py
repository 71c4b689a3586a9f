"""Boxes: axis-aligned chunks of a full tensor, which ranks hold, store and ask for.

Checkpoints and weights are kept by full parameter name and box, so that any later
layout (other TP degrees, pipeline cuts, flat optimizer shards) reads the boxes that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from mmplan.errors import InvalidInputError

ShardStyle = Literal["colwise", "rowwise", "packed_colwise", "vocab"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """The elements ``offsets[d] <= i_d < offsets[d] + sizes[d]`` of a full tensor.

    Attributes:
        offsets: first index along every dim; ``()`` for a scalar.
        sizes: number of indices along every dim, same length as ``offsets``.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements inside; 1 for a scalar's box."""
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that cuts this box out of the full tensor."""
        return self.slices_in(Box(offsets=(0,) * len(self.sizes), sizes=self.sizes))

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Index that cuts this box out of a tensor that holds ``outer``."""
        starts = [mine - base for mine, base in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(lo, lo + n) for lo, n in zip(starts, self.sizes, strict=True))

    def __str__(self) -> str:
        spans = zip(self.offsets, _ends(self), strict=True)
        return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in spans) + "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cover:
    """A wanted box, filled from stored ones.

    Attributes:
        pieces: (index of the stored box, part of the wanted box); the parts are disjoint.
        holes: the parts of the wanted box that nothing stored holds.
    """

    pieces: tuple[tuple[int, Box], ...]
    holes: tuple[Box, ...]


def whole(shape: Sequence[int]) -> Box:
    """The box of a full tensor."""
    return Box(offsets=(0,) * len(shape), sizes=tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of one tensor; None when it has no element."""
    lows = tuple(max(x, y) for x, y in zip(a.offsets, b.offsets, strict=True))
    highs = (min(x, y) for x, y in zip(_ends(a), _ends(b), strict=True))
    sizes = tuple(hi - lo for lo, hi in zip(lows, highs, strict=True))
    return Box(offsets=lows, sizes=sizes) if all(n > 0 for n in sizes) else None


def cover(wanted: Box, stored: Sequence[Box]) -> Cover:
    """Fill a wanted box from stored ones; where they overlap the first one serves."""
    pieces: list[tuple[int, Box]] = []
    missing = [wanted] if wanted.num_elements else []
    for index, box in enumerate(stored):
        rest: list[Box] = []
        for part in missing:
            common = intersect(part, box)
            if common is None:
                rest.append(part)
                continue
            pieces.append((index, common))
            rest.extend(_subtract(part, common))
        missing = rest
    return Cover(pieces=tuple(pieces), holes=tuple(missing))


def check_no_hole(name: str, filled: Cover) -> None:
    """Refuse a cover with holes, naming the parameter.

    Raises:
        InvalidInputError: something of the wanted box is stored nowhere.
    """
    if filled.holes:
        missing = sum(hole.num_elements for hole in filled.holes)
        raise InvalidInputError(
            f"{name}: {missing} of the wanted elements are stored nowhere, first {filled.holes[0]}",
            hint="use a checkpoint or weights of the same model, saved by a complete run",
        )


def flat_to_boxes(shape: Sequence[int], lo: int, hi: int) -> list[Box]:
    """Elements [lo, hi) of a row-major tensor as disjoint boxes, in flat order.

    Concatenating the flattened boxes gives the flat slice back. At most
    ``2 * len(shape) - 1`` boxes (three for a matrix, one for a vector).

    Raises:
        InvalidInputError: the range is not inside the tensor.
    """
    if not 0 <= lo <= hi <= prod(shape):
        raise InvalidInputError(
            f"flat slice [{lo}, {hi}) of a tensor of {prod(shape)} elements {tuple(shape)}"
        )
    return _flat_boxes(tuple(shape), lo, hi)


def shard_boxes(
    full_shape: Sequence[int],
    style: ShardStyle | None,
    index: int,
    count: int,
    parts: int = 1,
    span: int = 1,
) -> list[Box]:
    """Boxes of a Linear's or an embedding's weight [out, in] or bias [out] that one TP rank holds.

    Args:
        full_shape: shape of the unsharded parameter.
        style: ``colwise`` cuts dim 0; ``rowwise`` cuts dim 1 and leaves a bias (one dim)
            whole, since it is added after the sum; ``packed_colwise`` cuts each of
            ``parts`` equal parts of dim 0 (fused qkv: 3, gate/up: 2); ``vocab`` cuts dim 0, of
            n rows shard i of c has those from n*i//c on, so any n can be cut; None: whole.
        index: position in the TP group.
        count: size of the TP group.
        parts: for ``packed_colwise`` only.
        span: this many shards from ``index`` on.

    Returns:
        The boxes in order; the local tensor is their concatenation along the cut dim.

    Raises:
        InvalidInputError: the dim is not divisible.
    """
    shape = tuple(full_shape)
    if style is None or count == 1 or (style == "rowwise" and len(shape) < 2):
        return [whole(shape)]
    if style == "vocab":
        first, end = (shape[0] * i // count for i in (index, index + span))
        return [_span(shape, 0, first, end - first)]
    dim, num_parts = (1, 1) if style == "rowwise" else (0, 1)
    if style == "packed_colwise":
        num_parts = parts
    if len(shape) <= dim or shape[dim] % (num_parts * count):
        packed = f"{num_parts} parts of " if num_parts > 1 else ""
        raise InvalidInputError(
            f"a parameter of shape {list(shape)} cannot be cut {style} in {packed}{count}",
            hint=f"choose a tp that divides its dim {dim}, or leave it out of tp_plan",
        )
    part = shape[dim] // num_parts
    size = part // count
    return [_span(shape, dim, p * part + index * size, span * size) for p in range(num_parts)]


def _span(shape: tuple[int, ...], dim: int, start: int, size: int) -> Box:
    """The full tensor cut to [start, start + size) along one dim."""
    offsets = tuple(start if d == dim else 0 for d in range(len(shape)))
    sizes = tuple(size if d == dim else n for d, n in enumerate(shape))
    return Box(offsets=offsets, sizes=sizes)


def _ends(box: Box) -> list[int]:
    return [lo + n for lo, n in zip(box.offsets, box.sizes, strict=True)]


def _subtract(box: Box, inner: Box) -> list[Box]:
    """The rest of a box without an inner one, as at most two boxes per dim."""
    left: list[Box] = []
    lows, sizes = list(box.offsets), list(box.sizes)
    for dim, (lo, size) in enumerate(zip(inner.offsets, inner.sizes, strict=True)):
        for start, stop in ((lows[dim], lo), (lo + size, lows[dim] + sizes[dim])):
            if stop > start:
                offsets = (*lows[:dim], start, *lows[dim + 1 :])
                left.append(
                    Box(offsets=offsets, sizes=(*sizes[:dim], stop - start, *sizes[dim + 1 :]))
                )
        lows[dim], sizes[dim] = lo, size
    return left


def _flat_boxes(shape: tuple[int, ...], lo: int, hi: int) -> list[Box]:
    if lo >= hi:
        return []
    if not shape:
        return [Box(offsets=(), sizes=())]
    row = prod(shape[1:])
    # Whole rows [first, last); the elements before and after them lie in one row each.
    first, last = -(-lo // row), hi // row
    if first > last:
        return _in_row(shape, last, lo, hi)
    boxes = _in_row(shape, first - 1, lo, first * row)
    if first < last:
        boxes.append(_span(shape, 0, first, last - first))
    return boxes + _in_row(shape, last, last * row, hi)


def _in_row(shape: tuple[int, ...], row_index: int, lo: int, hi: int) -> list[Box]:
    """Flat elements [lo, hi), all in one row of dim 0."""
    start = row_index * prod(shape[1:])
    return [
        Box(offsets=(row_index, *box.offsets), sizes=(1, *box.sizes))
        for box in _flat_boxes(shape[1:], lo - start, hi - start)
    ]
