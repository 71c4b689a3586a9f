"""Images of several sizes, as patches that lie one after another, and the grid of each image.

A sample's patches are a row of a tensor [B, patches, ...], or of ``Ragged`` with values
[patches, ...]. Its images have grids [..., rows, columns] of patches, int64: [B, 2],
[B, images, 2], or ragged with values [images, 2]; what stands in front of rows and columns means
nothing here.

A *unit* is ``merge`` by ``merge`` neighbouring patches, which follow one another. Where units are
follows from grids on the device, so that the host need not wait for them.

Shape suffixes used in this file: U = units of all images.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mmplan.ragged import Ragged, known_lengths, samples_of, with_host_lengths
from mmplan.zoo.decoder import check_values
from mmplan.zoo.parts.ragged_attention import has_values

Rows = Tensor | Ragged


@dataclass(frozen=True, slots=True)
class Units:
    """Where units are in their images.

    Behind the images is one more, of one unit: there is what has no image of its own.

    Attributes:
        image: of each unit, [U].
        row: in the image, [U]; ``column`` too.
        order: where each unit lies in the data, [U]: they lie window after window here.
        sides: rows and columns of units of each image, and of the one more, [images + 1, 2].
        merge: patches along a side of a unit.
        side: of a window, in units; 0: there are none.
    """

    image: Tensor
    row: Tensor
    column: Tensor
    order: Tensor
    sides: Tensor
    merge: int
    side: int

    def places(self) -> Tensor:
        """Row and column of each patch in its image, [patches, 2]."""
        inside = torch.arange(self.merge**2, device=self.row.device)
        row = self.row[:, None] * self.merge + inside // self.merge
        column = self.column[:, None] * self.merge + inside % self.merge
        return torch.stack([row, column], -1).flatten(0, 1)

    def images(self, x: Rows) -> Tensor:
        """Patches of each image and of the one more, [images + 1]; ``x`` has a row of each unit."""
        lengths = self._patches(self.image, len(self.sides))
        if isinstance(x, Ragged):
            known, samples, units = known_lengths(x.lengths), len(x.lengths), len(x.values)
        else:
            samples, units = x.shape[:2]
            known, units = (units,) * samples, samples * units
        if known is not None and samples == len(self.sides) - 1:
            # An image is a sample, and what the host knows of these need not be read.
            rest = len(self.image) - units
            with_host_lengths(lengths, [count * self.merge**2 for count in (*known, rest)])
        return lengths

    def windows(self) -> tuple[Tensor, int]:
        """Patches of each window, with zeros behind them, and a bound on them."""
        where = torch.stack([self.image, self.row // self.side, self.column // self.side])
        begins = (where[:, 1:] != where[:, :-1]).any(0)
        window = functional.pad(begins.cumsum(0), (1, 0))
        most = (self.side * self.merge) ** 2
        lengths = self._patches(window, len(window))
        if not has_values(lengths):
            # Windows at an image's edge are smaller.
            with_host_lengths(lengths, [min(most, len(window) * self.merge**2)])
        return lengths, most

    def _patches(self, owner: Tensor, owners: int) -> Tensor:
        ones = torch.full_like(owner, self.merge**2)
        return owner.new_zeros(owners).index_add(0, owner, ones)


def units_of(grid: Rows, count: int, merge: int = 1, side: int = 0) -> Units:
    """``count`` units of images; those of a window, ``side`` by ``side``, follow one another."""
    sides = sides_of(grid, merge)
    end = sides.prod(1).cumsum(0)
    order = torch.arange(count, device=end.device)
    image = torch.searchsorted(end, order, right=True).clamp(max=len(sides) - 1)
    height, width = sides[image].unbind(1)
    place = order - (end[image] - height * width)
    row, column = place // width, place % width
    if side:
        most = count + 1
        order = ((image * most + row // side) * most + column // side).argsort(stable=True)
        image, row, column = image[order], row[order], column[order]
    return Units(image, row, column, order, sides, merge, side)


def sides_of(grid: Rows, merge: int) -> Tensor:
    """Rows and columns of units of each image, and of one more, of one unit, [images + 1, 2]."""
    return functional.pad(_patches_of(grid) // merge, (0, 0, 0, 1), value=1)


def grids_of(grid: Rows) -> Tensor:
    """Grids of all images, [images, ...]."""
    return grid.values if isinstance(grid, Ragged) else grid.flatten(0, -2)


def _patches_of(grid: Rows) -> Tensor:
    """Rows and columns of patches of each image, [images, 2]."""
    grids = grids_of(grid)
    # One by one: a compiler then knows that there are two, whatever it knows of the grids.
    return torch.stack([grids[:, -2], grids[:, -1]], 1)


def check_grids(grid: Rows, patches: Rows, merge: int = 1) -> None:
    """Refuse grids that do not fit their sample's patches, or are no whole units.

    Raises:
        InvalidInputError: where the host has the values; elsewhere the device stops.
    """
    sides = _patches_of(grid)
    if isinstance(patches, Ragged):
        lengths = patches.lengths
    else:
        lengths = sides.new_full((len(patches),), patches.shape[1])
    each = torch.arange(len(sides), device=sides.device)
    owner = samples_of(grid) if isinstance(grid, Ragged) else each // (len(sides) // len(lengths))
    expected = sides.new_zeros(len(lengths)).index_add(0, owner, sides.prod(1))
    check_values(
        (expected == lengths).all() & (sides % merge == 0).all(),
        lambda: (
            f"samples have {lengths[:8].tolist()} patches, and grids {sides[:8].tolist()} of "
            f"{expected[:8].tolist()}"
        ),
        hint="give each image its rows and columns of patches"
        + (f", multiples of {merge}" if merge > 1 else ""),
    )


def filled(x: Rows) -> Tensor:
    """Rows of all samples; where there are none, one of zeros, whose results :func:`like` drops."""
    rows = x.values if isinstance(x, Ragged) else x.flatten(0, 1)
    # Joined to the empty one, so that gradients (of zero) reach whatever made it.
    return rows if len(rows) else torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])


def like(x: Rows, rows: Tensor) -> Rows:
    """Rows made of those of ``x``, one of each."""
    if isinstance(x, Ragged):
        return Ragged(rows[: len(x.values)], x.lengths)
    return rows[: x.shape[0] * x.shape[1]].unflatten(0, x.shape[:2])
