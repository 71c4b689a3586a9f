"""An encoder for multimodal LLMs: ViT layers, then a projector as a block of its own.

Takes a number of images per sample that may differ and may be zero (``mmplan.Ragged``).
``frozen: [[0, layers]]`` freezes the ViT and leaves the projector, the last block, to train.

Shape suffixes used in this file: N = images, P = patches, W = width, M = merged patches.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from mmplan.ragged import Ragged
from mmplan.zoo.patches import Extent, PatchEmbedding, image_extent, join_neighbours, patch_grid
from mmplan.zoo.sizes import check_divides, check_sizes
from mmplan.zoo.towers import VisionBlock, stack

Images = Tensor | Ragged


class EncoderBlock(VisionBlock):
    """A ViT layer on every image apart; the first one takes pixels."""

    def forward(self, x: Images) -> Images:
        """[N, channels, *image] (first block) or [N, P, W] to [N, P, W]; ragged if the input is."""
        return _each_image(super().forward, x)


class Projector(nn.Module):
    """Patches to rows of the language model's width: neighbours joined, then an MLP.

    ``merge`` neighbours along every axis of the ``grid`` of patches become one row.
    """

    def __init__(self, *, width: int, merge: int, grid: Extent, outputs: int) -> None:
        super().__init__()
        self.merge, self.grid = merge, image_extent(grid)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(merge ** len(self.grid) * width, outputs)
        self.down = nn.Linear(outputs, outputs)
        self.tp_plan = {"up": "colwise", "down": "rowwise"}

    def forward(self, images: Images) -> Images:
        """[N, P, W] to [N, M, outputs], M = P / merge**axes; ragged if the input is."""
        return _each_image(self._rows, images)

    def _rows(self, x_NPW: Tensor) -> Tensor:
        x_NPW = self.norm(x_NPW)
        if self.merge > 1:
            x_NPW = join_neighbours(x_NPW, self.grid, self.merge)
        return self.down(functional.gelu(self.up(x_NPW)))


def vit(
    layers: int,
    width: int,
    *,
    heads: int,
    outputs: int,
    image: Extent,
    patch: Extent = 16,
    stride: Extent | None = None,
    channels: int = 3,
    merge: int = 1,
    mlp_ratio: float = 4.0,
) -> nn.Sequential:
    """Build the encoder; ViT-Huge is ``vit(32, 1280, heads=16, ...)``.

    Args:
        width, heads, image, patch, stride, channels, mlp_ratio: as in
            :func:`mmplan.zoo.towers.vision`.
        layers: transformer layers, one a child; one more child is the projector.
        outputs: width of the rows that come out: the language model's.
        merge: this many neighbouring patches along each axis become one row; divides the
            patches of each axis.

    Returns:
        Takes images [N, channels, *image], gives [N, M, outputs] with
        M = (image / patch / merge)**axes; ragged where the images are.

    Raises:
        InvalidInputError: sizes that do not fit one another.
    """
    check_sizes(
        layers=layers, width=width, heads=heads, outputs=outputs, channels=channels, merge=merge
    )
    grid = patch_grid(image, patch, stride)
    for count in grid:
        check_divides("merge", merge, "patches of a side", count)

    projector = Projector(width=width, merge=merge, grid=grid, outputs=outputs)
    blocks = stack(
        EncoderBlock,
        layers,
        width=width,
        heads=heads,
        mlp_ratio=mlp_ratio,
        embed=lambda: PatchEmbedding(
            width=width, patch=patch, image=image, channels=channels, stride=stride
        ),
    )
    return nn.Sequential(*blocks, projector)


def _each_image(run: Callable[[Tensor], Tensor], images: Images) -> Images:
    return Ragged(run(images.values), images.lengths) if isinstance(images, Ragged) else run(images)
