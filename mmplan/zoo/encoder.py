"""An image encoder for multimodal LLMs: ViT layers, then a projector as a block of its own.

Takes a number of images per sample that may differ and may be zero (``mmplan.Ragged``).
``frozen: [[0, layers]]`` freezes the ViT and leaves the projector, the last block, to train.

Shape suffixes used in this file: N = images, P = patches, W = width, M = merged patches.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from mmplan.ragged import Ragged
from mmplan.zoo.decoder import check_divides, check_sizes
from mmplan.zoo.towers import Block, PatchEmbedding

Images = Tensor | Ragged


class EncoderBlock(Block):
    """A ViT layer on every image apart; the first one takes pixels."""

    def forward(self, images: Images) -> Images:
        """Run the block.

        Args:
            images: [N, channels, image, image] for the first block, else [N, P, W]; or
                ragged with such values, images of several samples in order.

        Returns:
            [N, P, W], ragged if the input is.
        """
        x = images.values if isinstance(images, Ragged) else images
        x_NPW = self._layer(x if self.embed is None else self.embed(x), None)
        return Ragged(x_NPW, images.lengths) if isinstance(images, Ragged) else x_NPW


class Projector(nn.Module):
    """Patches to rows of the language model's width: neighbours joined, then an MLP.

    Attributes:
        tp_plan: submodule name to "colwise" or "rowwise".
    """

    def __init__(self, *, width: int, merge: int, grid: int, outputs: int) -> None:
        super().__init__()
        self.merge, self.grid = merge, grid
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(merge**2 * width, outputs)
        self.down = nn.Linear(outputs, outputs)
        self.tp_plan = {"up": "colwise", "down": "rowwise"}

    def forward(self, images: Images) -> Images:
        """[N, P, W] to [N, M, outputs], M = P / merge**2; ragged if the input is."""
        x_NPW = self.norm(images.values if isinstance(images, Ragged) else images)
        if self.merge > 1:
            # A square of merge x merge neighbours becomes one row.
            split = x_NPW.unflatten(1, (self.grid // self.merge, self.merge, -1, self.merge))
            x_NPW = split.transpose(2, 3).flatten(3, 5).flatten(1, 2)
        rows = self.down(functional.gelu(self.up(x_NPW)))
        return Ragged(rows, images.lengths) if isinstance(images, Ragged) else rows


def vit(
    layers: int,
    width: int,
    *,
    heads: int,
    outputs: int,
    image: int,
    patch: int = 16,
    channels: int = 3,
    merge: int = 1,
    mlp_ratio: float = 4.0,
) -> nn.Sequential:
    """Build the encoder; ViT-Huge is ``vit(32, 1280, heads=16, ...)``.

    Args:
        layers: transformer layers, one a child; one more child is the projector.
        width: channels of the activations, a multiple of ``heads``.
        heads: attention heads; tp must divide it.
        outputs: width of the rows that come out: the language model's.
        image: side of the (square) images in pixels.
        patch: side of a patch in pixels, divides ``image``.
        channels: colour channels.
        merge: this many patches squared become one row; divides the patches of a side.
        mlp_ratio: hidden width of the MLP over ``width``.

    Returns:
        Takes images [N, channels, image, image], gives [N, M, outputs] with
        M = (image / patch / merge)**2; ragged where the images are.

    Raises:
        InvalidInputError: sizes that do not fit one another.
    """
    check_sizes(
        layers=layers, width=width, heads=heads, outputs=outputs, image=image, patch=patch,
        channels=channels, merge=merge,
    )  # fmt: skip
    check_divides("heads", heads, "width", width)
    check_divides("patch", patch, "image", image)
    grid = image // patch
    check_divides("merge", merge, "patches of a side", grid)

    def block(index: int) -> EncoderBlock:
        first = index == 0
        return EncoderBlock(
            width=width,
            heads=heads,
            mlp_ratio=mlp_ratio,
            dropout=0.0,
            embed=PatchEmbedding(width=width, patch=patch, image=image, channels=channels)
            if first
            else None,
            head=None,
        )

    projector = Projector(width=width, merge=merge, grid=grid, outputs=outputs)
    return nn.Sequential(*map(block, range(layers)), projector)
