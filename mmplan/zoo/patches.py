"""Cutting images, spectrograms and signals into patches, and patches into tokens.

Anything on a grid: images have two axes, signals over time one. A size is a number (the side
of a square image; of a patch the same along all axes) or one number an axis.

Shape suffixes used in this file: N = images, P = patches, Q = numbers in a patch, W = width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmplan.errors import InvalidInputError
from mmplan.zoo.sizes import check_divides, check_sizes

Extent = int | Sequence[int]


class PatchEmbedding(nn.Module):
    """Images to tokens: each patch mapped linearly, plus a learned position.

    Without a ``stride`` from one patch to the next, none overlap.
    """

    def __init__(
        self,
        *,
        width: int,
        patch: Extent,
        image: Extent,
        channels: int,
        stride: Extent | None = None,
    ) -> None:
        super().__init__()
        extent = image_extent(image)
        self.patch = along_axes("patch", patch, len(extent))
        self.stride = along_axes("stride", patch if stride is None else stride, len(extent))
        self.shape = (channels, *extent)
        num_patches = math.prod(patch_grid(image, patch, stride))
        self.project = nn.Linear(channels * math.prod(self.patch), width)
        self.position = nn.Parameter(0.02 * torch.randn(num_patches, width))

    def forward(self, image: Tensor) -> Tensor:
        """Embed [N, channels, *image] as [N, P, W].

        Raises:
            InvalidInputError: images of another shape.
        """
        if tuple(image.shape[1:]) != self.shape:
            raise InvalidInputError(
                f"the image tower takes images {list(self.shape)}, got {list(image.shape[1:])}",
                hint="set the factory's args image and channels to those of the data",
            )
        return self.project(cut(image, self.patch, self.stride)) + self.position


def cut(images: Tensor, patch: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Images [N, channels, *image] as rows [N, P, Q], Q = channels * numbers of a patch."""
    axes = len(patch)
    for axis, (size, step) in enumerate(zip(patch, stride, strict=True)):
        images = images.unfold(2 + axis, size, step)
    grid, inside = range(2, 2 + axes), range(2 + axes, 2 + 2 * axes)
    rows = images.permute(0, *grid, 1, *inside)
    return rows.flatten(1 + axes).flatten(1, axes)


def join_neighbours(x_NPW: Tensor, grid: Sequence[int], merge: int) -> Tensor:
    """Cubes of ``merge`` neighbours along every axis as one row: [N, P / merge**axes, ...]."""
    split = [size for count in grid for size in (count // merge, merge)]
    x = x_NPW.unflatten(1, split)
    outer, inner = range(1, len(split), 2), range(2, len(split) + 1, 2)
    x = x.permute(0, *outer, *inner, len(split) + 1)
    return x.flatten(1 + len(grid)).flatten(1, len(grid))


def patch_grid(image: Extent, patch: Extent, stride: Extent | None = None) -> tuple[int, ...]:
    """Patches along every axis.

    Raises:
        InvalidInputError: sizes below 1, patches larger than the image, or, without a stride,
            patches that do not fill it.
    """
    extent = image_extent(image)
    sizes = along_axes("patch", patch, len(extent))
    for length, size in zip(extent, sizes, strict=True):
        check_sizes(image=length, patch=size)
        if stride is None:
            check_divides("patch", size, "image", length)
        elif size > length:
            raise InvalidInputError(
                f"patch {size} is larger than image {length}", hint="choose a smaller patch"
            )
    steps = along_axes("stride", patch if stride is None else stride, len(extent))
    check_sizes(stride=min(steps))
    return tuple(
        (length - size) // step + 1 for length, size, step in zip(extent, sizes, steps, strict=True)
    )


def image_extent(image: Extent) -> tuple[int, ...]:
    """Size along every axis; a number is the side of a square."""
    return (image, image) if isinstance(image, int) else tuple(image)


def along_axes(name: str, value: Extent, axes: int) -> tuple[int, ...]:
    """A size along every axis; a number is that of all.

    Raises:
        InvalidInputError: sizes for another number of axes.
    """
    sizes = (value,) * axes if isinstance(value, int) else tuple(value)
    if len(sizes) != axes:
        raise InvalidInputError(
            f"{name} {list(sizes)} has {len(sizes)} axes, image has {axes}",
            hint=f"give {name} one number, or one for each axis of the image",
        )
    return sizes
