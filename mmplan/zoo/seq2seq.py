"""An encoder-decoder language model that also reads features of other modules.

``encoder`` joins token ids and any features (images, speech, motion; ``null`` where a task has
none) into one sequence; ``decoder`` writes the answer, each token attending to those before it
and to what the encoder made. Every child of both is one pre-LN layer. Padding (id 0) is
attended to nowhere, and a mask travels with the activations.

Shape suffixes used in this file: B = batch, T = tokens, S = rows of the joined sequence,
W = width, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmplan.errors import InvalidInputError
from mmplan.zoo.diffusion import CrossAttention
from mmplan.zoo.sizes import check_sizes
from mmplan.zoo.towers import (
    Block,
    Readout,
    TextBlock,
    TokenEmbedding,
    parts_tp_plan,
    stack,
    unpacked,
)


class Joining(nn.Module):
    """Token ids and features to one sequence, and the mask of what is no padding."""

    def __init__(self, *, width: int, vocab: int, length: int) -> None:
        super().__init__()
        self.tokens = TokenEmbedding(width=width, vocab=vocab, length=length)

    def forward(self, tokens_BT: Tensor | None, *features: Tensor | None) -> tuple[Tensor, Tensor]:
        """Activations [B, S, W] and mask [B, S] (bool).

        Args:
            tokens_BT: int64, 0 is padding; None for a task without text.
            features: [B, rows, W] each, None where the task has none.

        Raises:
            InvalidInputError: nothing to read at all.
        """
        parts = [] if tokens_BT is None else [self.tokens(tokens_BT)]
        parts += [
            (rows, rows.new_ones(rows.shape[:2], dtype=torch.bool))
            for rows in features
            if rows is not None
        ]
        if not parts:
            raise InvalidInputError(
                "the encoder is given neither tokens nor features",
                hint="in the task's inputs, leave at least one that is not null",
            )
        x, mask = zip(*parts, strict=True)
        return torch.cat(x, dim=1), torch.cat(mask, dim=1)


class MaskedNorm(nn.LayerNorm):
    """A norm of activations that travel with their mask."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_BSW: Tensor, mask_BS: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same pair, normalised."""
        return super().forward(x_BSW), mask_BS


class CrossDecoderBlock(Block):
    """A causal layer that also attends to the encoder's rows."""

    def __init__(self, *, width: int, heads: int, **options: Any) -> None:
        super().__init__(width=width, heads=heads, causal=True, **options)
        self.norm3 = nn.LayerNorm(width)
        self.cross = CrossAttention(width, heads)
        self.tp_plan = parts_tp_plan(self)

    def forward(self, *inputs: Any) -> Tensor | tuple[Tensor, ...]:
        """Run the block.

        Args:
            inputs: token ids [B, T] for a first block that embeds, else activations [B, T, W];
                then the encoder's rows [B, S, W] and, where they have padding, their mask
                [B, S]. As arguments, or one tuple.

        Returns:
            The same with activations, or logits [B, T, V] from the last block.
        """
        x, rows_BSW, *masks = unpacked(inputs)
        # Padding stands at the end, where no token before it looks.
        x_BTW: Tensor = x if self.embed is None else self.embed(x)[0]
        x_BTW = x_BTW + self.attention(self.norm1(x_BTW), None)
        x_BTW = x_BTW + self.cross(self.norm3(x_BTW), rows_BSW, *masks)
        x_BTW = x_BTW + self.mlp(self.norm2(x_BTW))
        return (x_BTW, rows_BSW, *masks) if self.head is None else self.head(x_BTW)


def encoder(
    blocks: int, width: int, *, heads: int, vocab: int, length: int, mlp_ratio: float = 4.0
) -> nn.Sequential:
    """Build the encoder; OFA-large's is ``encoder(12, 1024, heads=16, ...)``.

    Args:
        blocks, heads, vocab, length, mlp_ratio: as in :func:`mmplan.zoo.towers.text`.
        width: channels of the activations and of the features, a multiple of ``heads``.

    Returns:
        Takes token ids [B, T] (or None) and features [B, rows, width] (or None) of any number
        of modules, gives (rows [B, S, width], mask [B, S]).

    Raises:
        InvalidInputError: sizes that do not fit one another.
    """
    check_sizes(blocks=blocks, width=width, heads=heads, vocab=vocab, length=length)
    layers = stack(
        TextBlock,
        blocks,
        width=width,
        heads=heads,
        mlp_ratio=mlp_ratio,
        embed=lambda: Joining(width=width, vocab=vocab, length=length),
        head=lambda: MaskedNorm(width),
    )
    return nn.Sequential(*layers)


def decoder(
    blocks: int, width: int, *, heads: int, vocab: int, length: int, mlp_ratio: float = 4.0
) -> nn.Sequential:
    """Build the decoder; its inputs are tokens, ``encoder.0`` and ``encoder.1``.

    Args:
        blocks, heads, vocab, length, mlp_ratio: as in :func:`mmplan.zoo.towers.text`.
        width: channels of the activations, those of the encoder, a multiple of ``heads``.

    Returns:
        Takes token ids [B, T], the encoder's rows [B, S, width] and mask [B, S], gives logits
        [B, T, vocab].

    Raises:
        InvalidInputError: sizes that do not fit one another.
    """
    check_sizes(blocks=blocks, width=width, heads=heads, vocab=vocab, length=length)
    layers = stack(
        CrossDecoderBlock,
        blocks,
        width=width,
        heads=heads,
        mlp_ratio=mlp_ratio,
        embed=lambda: TokenEmbedding(width=width, vocab=vocab, length=length),
        head=lambda: Readout(width, vocab),
    )
    return nn.Sequential(*layers)
