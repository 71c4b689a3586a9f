"""A contrastive captioner: one model that matches images with texts and writes the texts.

``image`` gives a feature for the contrastive loss and rows for the captioner to look at; ``words``
reads a text without the image and gives a feature and its activations; ``captioner`` goes on
from these, each token looking at the image's rows, and predicts the next token. A workload
couples them by a cross-sample loss on ``image.0`` and ``words.0`` and a language model's on
``captioner``; see ``examples/papers/coca-760m.yaml``.

Source: CoCa, arXiv:2205.01917. Its text feature is that of an appended token; here it is that of
the last real token, as in CLIP, which needs no mask.

Shape suffixes used in this file: B = batch, T = tokens, P = patches, Q = rows of the image that
the captioner sees, W = width, E = embedding, V = vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmplan.zoo.diffusion import CrossAttention
from mmplan.zoo.patches import Extent, PatchEmbedding, patch_grid
from mmplan.zoo.seq2seq import CrossDecoderBlock
from mmplan.zoo.sizes import check_sizes
from mmplan.zoo.towers import Readout, TextBlock, TokenEmbedding, VisionBlock, stack


class AttentionPooling(nn.Module):
    """Learned queries that look at all patches; one more looks at what these found.

    Source: CoCa, section 3.2: the contrastive pooler stands on top of the captioner's.
    """

    def __init__(self, *, width: int, heads: int, queries: int, embed: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.queries = nn.Parameter(0.02 * torch.randn(queries, width))
        self.rows = CrossAttention(width, heads)
        self.row_norm = nn.LayerNorm(width)
        self.query = nn.Parameter(0.02 * torch.randn(1, width))
        self.one = CrossAttention(width, heads)
        self.head = nn.Linear(width, embed, bias=False)

    def forward(self, x_BPW: Tensor) -> tuple[Tensor, Tensor]:
        """The feature [B, E] and the rows [B, Q, W] of patches [B, P, W]."""
        batch = len(x_BPW)
        rows_BQW = self.rows(self.queries.expand(batch, -1, -1), self.norm(x_BPW))
        one_B1W = self.one(self.query.expand(batch, -1, -1), self.row_norm(rows_BQW))
        return self.head(one_B1W[:, 0]), rows_BQW


class LastReadout(Readout):
    """The feature of the last real token, and all activations."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_BTW: Tensor, mask_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[B, T, W] to (feature [B, E], activations [B, T, W])."""
        last_B = mask_BT.long().sum(dim=1) - 1
        last_BW = x_BTW[torch.arange(len(x_BTW), device=x_BTW.device), last_B]
        return super().forward(last_BW), x_BTW


def image(
    blocks: int,
    width: int,
    *,
    heads: int,
    image: Extent,
    patch: Extent,
    channels: int = 3,
    queries: int = 256,
    embed: int = 512,
    mlp_ratio: float = 4.0,
) -> nn.Sequential:
    """Build the image encoder with its two poolers.

    Args:
        blocks, width, heads, image, patch, channels, mlp_ratio: as in
            :func:`mmplan.zoo.towers.vision`.
        queries: rows that the captioner sees.
        embed: width of the contrastive feature.

    Returns:
        Takes images [B, channels, *image], gives (feature [B, embed], rows [B, queries, width]).

    Raises:
        InvalidInputError: sizes that do not fit one another.
    """
    check_sizes(blocks=blocks, width=width, heads=heads, queries=queries, embed=embed)
    patch_grid(image, patch)
    layers = stack(
        VisionBlock,
        blocks,
        width=width,
        heads=heads,
        mlp_ratio=mlp_ratio,
        embed=lambda: PatchEmbedding(width=width, patch=patch, image=image, channels=channels),
        head=lambda: AttentionPooling(width=width, heads=heads, queries=queries, embed=embed),
    )
    return nn.Sequential(*layers)


def words(
    blocks: int,
    width: int,
    *,
    heads: int,
    vocab: int,
    length: int,
    embed: int = 512,
    mlp_ratio: float = 4.0,
) -> nn.Sequential:
    """Build the half of the text decoder that does not see the image.

    Args:
        blocks, width, heads, vocab, length, mlp_ratio: as in :func:`mmplan.zoo.towers.text`.
        embed: width of the contrastive feature.

    Returns:
        Takes token ids [B, T] padded at their end, gives (feature [B, embed], activations
        [B, T, width]).

    Raises:
        InvalidInputError: sizes that do not fit one another.
    """
    check_sizes(blocks=blocks, width=width, heads=heads, vocab=vocab, length=length, embed=embed)
    layers = stack(
        TextBlock,
        blocks,
        width=width,
        heads=heads,
        mlp_ratio=mlp_ratio,
        causal=True,
        embed=lambda: TokenEmbedding(width=width, vocab=vocab, length=length),
        head=lambda: LastReadout(width, embed),
    )
    return nn.Sequential(*layers)


def captioner(
    blocks: int, width: int, *, heads: int, vocab: int, mlp_ratio: float = 4.0
) -> nn.Sequential:
    """Build the half of the text decoder that looks at the image.

    Args:
        blocks, heads, mlp_ratio: as in :func:`mmplan.zoo.towers.vision`.
        width: channels of the activations, those of ``image`` and ``words``.
        vocab: number of token ids.

    Returns:
        Takes activations [B, T, width] (``words.1``) and rows [B, Q, width] (``image.1``), gives
        logits [B, T, vocab].

    Raises:
        InvalidInputError: sizes that do not fit one another.
    """
    check_sizes(blocks=blocks, width=width, heads=heads, vocab=vocab)
    layers = stack(
        CrossDecoderBlock,
        blocks,
        width=width,
        heads=heads,
        mlp_ratio=mlp_ratio,
        head=lambda: Readout(width, vocab),
    )
    return nn.Sequential(*layers)
