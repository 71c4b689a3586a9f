"""Shard layouts: the boxes of full tensors that a rank's local tensors hold."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mmlaunch.checkpoint.boxes import Box, ShardStyle, flat_to_boxes, intersect, shard_boxes, whole


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """The boxes of a full tensor that a local tensor holds.

    Attributes:
        boxes: concatenated along ``dim`` they are the local tensor.
        style: how tensor parallelism cuts the full tensor, None where it does not.
        parts: equal parts of dim 0 that are cut apart (fused qkv: 3).
        index: of the shard, of ``count``.
    """

    full_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    dim: int = 0
    style: ShardStyle | None = None
    parts: int = 1
    index: int = 0
    count: int = 1

    @cached_property
    def local_boxes(self) -> tuple[Box, ...]:
        """Places of the boxes in the local tensor, in their order."""
        found: list[Box] = []
        start = 0
        for box in self.boxes:
            offsets = tuple(start if d == self.dim else 0 for d in range(len(box.sizes)))
            found.append(Box(offsets=offsets, sizes=box.sizes))
            start += box.sizes[self.dim] if box.sizes else 0
        return tuple(found)

    def span(self, shards: tuple[int, int], tp: int) -> tuple[Box, ...] | None:
        """Local boxes of a half-open range of ``tp`` shards; None where that is all of it."""
        first, end = shards
        if self.style is None or (end - first) * self.count == tp:
            return None
        wanted = shard_boxes(self.full_shape, self.style, first, tp, self.parts, end - first)
        return tuple(self.to_local(box) for box in wanted)

    def to_local(self, box: Box) -> Box:
        """The place in the local tensor of a part of one of the boxes."""
        for outer, local in zip(self.boxes, self.local_boxes, strict=True):
            if intersect(outer, box) == box:
                return _moved(box, outer, local)
        raise ValueError(f"{box} is in none of {[str(outer) for outer in self.boxes]}")

    def to_full(self, box: Box) -> list[tuple[Box, Box]]:
        """(part in the full tensor, the same part in the local one) of a local box."""
        found: list[tuple[Box, Box]] = []
        for outer, local in zip(self.boxes, self.local_boxes, strict=True):
            common = intersect(box, local)
            if common is not None:
                found.append((_moved(common, local, outer), common))
        return found

    def views(self, local: Tensor) -> list[tuple[Box, Tensor]]:
        """Each box with its elements of a local tensor."""
        pairs = zip(self.boxes, self.local_boxes, strict=True)
        return [(box, local[there.slices]) for box, there in pairs]

    def take(self, full: Tensor) -> Tensor:
        """The local tensor, cut out of the full one."""
        return torch.cat([full[b.slices] for b in self.boxes], self.dim) if full.dim() else full


def replicated_layout(shape: tuple[int, ...]) -> ShardLayout:
    """The layout of a tensor that is not cut."""
    return ShardLayout(full_shape=shape, boxes=(whole(shape),))


def shard_layout(
    full_shape: tuple[int, ...], style: ShardStyle, index: int, count: int, parts: int
) -> ShardLayout:
    """The layout of one shard of a parameter that tensor parallelism cuts.

    Raises:
        InvalidInputError: the dim is not divisible.
    """
    return ShardLayout(
        full_shape=full_shape,
        boxes=tuple(shard_boxes(full_shape, style, index, count, parts)),
        dim=1 if style == "rowwise" else 0,
        style=style,
        parts=parts,
        index=index,
        count=count,
    )


def flat_parts(boxes: tuple[Box, ...], low: int, high: int) -> list[Box]:
    """Elements [low, high) of boxes that lie flat one after the other, as boxes in flat order."""
    found: list[Box] = []
    start = 0
    for box in boxes:
        size = box.num_elements
        first, end = max(low - start, 0), min(high - start, size)
        if first < end:
            inner = Box(offsets=(0,) * len(box.sizes), sizes=box.sizes)
            found += [_moved(b, inner, box) for b in flat_to_boxes(box.sizes, first, end)]
        start += size
    return found


def _moved(box: Box, source: Box, target: Box) -> Box:
    """The box that lies in ``target`` as a given one lies in ``source``."""
    steps = zip(target.offsets, box.offsets, source.offsets, strict=True)
    return Box(offsets=tuple(t + b - s for t, b, s in steps), sizes=box.sizes)
