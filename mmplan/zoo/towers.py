"""Two small transformer towers whose blocks may be cut and split over tensor-parallel ranks.

Both factories return an ``nn.Sequential`` of ``blocks`` children: child 0 also
embeds, the last child also pools and projects, and every child holds one
pre-LN transformer layer, so a block range ``[a, b]`` of a plan is layers a..b-1.

Tensor parallelism: each block carries ``tp_plan`` (submodule name to rule). Who
splits a block over tp ranks puts these in place of the weight [out, in]:

- ``colwise``: rows [out/tp, in] and the same slice of the bias;
- ``packed_colwise``: the weight is ``packed_parts`` (an int attribute of the
  Linear; 3 for a fused qkv) matrices one above the other, each is cut colwise;
- ``rowwise``: columns [out, in/tp]; partial outputs are summed over the ranks,
  the bias is added once, after the sum.

The blocks take their number of heads from the width of what they are given.

Shape suffixes used in this file: B = batch, T = tokens, W = width, L = local
width (W/tp), H = local heads, D = width of a head, E = embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmplan.errors import InvalidInputError
from mmplan.zoo.patches import Extent, PatchEmbedding, patch_grid
from mmplan.zoo.sizes import check_divides, check_sizes


class Attention(nn.Module):
    """Self-attention with a fused qkv; the number of heads follows the local width.

    If ``causal``, a token attends only to itself and those before it, and there is no mask.
    """

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.qkv.packed_parts = 3  # pyright: ignore[reportArgumentType]
        self.out = nn.Linear(width, width)
        self.tp_plan = {"qkv": "packed_colwise", "out": "rowwise"}

    def forward(self, x_BTW: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Mix tokens: [B, T, W] to [B, T, W].

        Args:
            x_BTW: normalised activations.
            mask_BT: bool, True at the tokens that may be attended to; None for all.

        Raises:
            InvalidInputError: the local width cuts a head in two.
        """
        parts = self.qkv(x_BTW).chunk(3, dim=-1)
        q, k, v = (split_heads(part, self.head_dim) for part in parts)
        return self.out(attend(q, k, v, mask_BT, is_causal=self.causal))


class MLP(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.tp_plan = {"up": "colwise", "down": "rowwise"}

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Map every token apart: [B, T, W] to [B, T, W]."""
        return self.down(functional.gelu(self.up(x_BTW)))


class Block(nn.Module):
    """One pre-LN transformer layer, with the embedding before it or the head after it.

    Dropout stands on the residual branches only, after the row-parallel sums:
    there every tensor-parallel rank holds the same values, so one seed gives the
    same masks whatever the degree.
    """

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        mlp_ratio: float,
        embed: nn.Module | None,
        head: nn.Module | None,
        dropout: float = 0.0,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.embed = embed
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width, round(width * mlp_ratio))
        self.dropout = nn.Dropout(dropout)
        self.head = head
        self.tp_plan = parts_tp_plan(self)

    def _layer(self, x_BTW: Tensor, mask_BT: Tensor | None) -> Tensor:
        x_BTW = x_BTW + self.dropout(self.attention(self.norm1(x_BTW), mask_BT))
        return x_BTW + self.dropout(self.mlp(self.norm2(x_BTW)))


class VisionBlock(Block):
    """A block over images, or over whatever else is cut into patches."""

    def forward(self, x: Any) -> Any:
        """Images [B, channels, *image] or [B, T, W] to [B, T, W], or what the head makes of it."""
        x_BTW = self._layer(x if self.embed is None else self.embed(x), None)
        return x_BTW if self.head is None else self.head(x_BTW)


class TextBlock(Block):
    """A block over tokens; activations travel with the mask of real tokens."""

    def forward(self, *inputs: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Run the block.

        Args:
            inputs: what ``embed`` takes (token ids [B, T], int64, 0 is padding) for the first
                block, else activations [B, T, W] and mask [B, T] (bool). As arguments, or one
                tuple.

        Returns:
            The same pair, or what the head makes of it from the last block.
        """
        state = unpacked(inputs)
        x_BTW, mask_BT = state if self.embed is None else self.embed(*state)
        # A causal block's padding stands at the end, where no token before it looks.
        x_BTW = self._layer(x_BTW, None if self.attention.causal else mask_BT)
        return (x_BTW, mask_BT) if self.head is None else self.head(x_BTW, mask_BT)


class Readout(nn.Sequential):
    """Activations to features or logits."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, outputs, bias=False))


class MeanReadout(Readout):
    """Features of the mean over all tokens, or over those that the mask names."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_BTW: Tensor, mask_BT: Tensor | None = None
    ) -> Tensor:
        """[B, T, W] to [B, E]."""
        if mask_BT is None:
            return super().forward(x_BTW.mean(dim=1))
        weight_BT = mask_BT.to(x_BTW.dtype)
        sum_BW = torch.einsum("btw,bt->bw", x_BTW, weight_BT)
        return super().forward(sum_BW / weight_BT.sum(dim=1, keepdim=True))


class TokenEmbedding(nn.Module):
    """Token ids to activations and mask; id 0 is padding."""

    def __init__(self, *, width: int, vocab: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Embed ids [B, T <= length] as activations [B, T, W] and mask [B, T].

        Raises:
            InvalidInputError: more tokens than positions.
        """
        length = tokens_BT.shape[1]
        if length > len(self.position):
            raise InvalidInputError(
                f"the text tower has {len(self.position)} positions, got {length} tokens",
                hint="set the factory's arg length to that of the data",
            )
        # The first token counts even as padding: attention over nothing would be NaN.
        first_T = torch.arange(length, device=tokens_BT.device) == 0
        return self.token(tokens_BT) + self.position[:length], (tokens_BT != 0) | first_T


def vision(
    blocks: int,
    width: int,
    *,
    heads: int = 4,
    patch: Extent = 4,
    image: Extent = 8,
    stride: Extent | None = None,
    channels: int = 1,
    embed: int = 64,
    mlp_ratio: float = 4.0,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Build a vision transformer with mean pooling.

    Args:
        blocks: children of the Sequential, each with one transformer layer.
        width: channels of the activations, a multiple of ``heads``.
        heads: attention heads; tp must divide it.
        patch: side of a patch in pixels, or its size along each axis; divides ``image``.
        image: side of the (square) image in pixels, or its size along each axis: ``[128, 204]``
            for a spectrogram, ``[2000]`` for a signal.
        stride: from patch to patch, for patches that overlap.
        channels: colour channels, or numbers of each instant of a signal.
        embed: width of the features that come out.
        mlp_ratio: hidden width of the MLP over ``width``.
        dropout: probability, on the residual branches.

    Returns:
        Takes images [B, channels, *image], gives features [B, embed].

    Raises:
        InvalidInputError: sizes that do not fit one another.
    """
    check_sizes(blocks=blocks, width=width, heads=heads, channels=channels, embed=embed)
    patch_grid(image, patch, stride)
    layers = stack(
        VisionBlock,
        blocks,
        width=width,
        heads=heads,
        mlp_ratio=mlp_ratio,
        dropout=dropout,
        embed=lambda: PatchEmbedding(
            width=width, patch=patch, image=image, channels=channels, stride=stride
        ),
        head=lambda: MeanReadout(width, embed),
    )
    return nn.Sequential(*layers)


def text(
    blocks: int,
    width: int,
    *,
    heads: int = 4,
    vocab: int = 64,
    length: int = 8,
    embed: int = 64,
    mlp_ratio: float = 4.0,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Build a text transformer with mean pooling over the tokens that are not padding.

    Args:
        blocks, width, heads, embed, mlp_ratio, dropout: as in :func:`vision`.
        vocab: number of token ids; 0 is padding. The default fits ``zoo.digits``.
        length: most tokens of a text. The default fits ``zoo.digits``.

    Returns:
        Takes token ids [B, T], gives features [B, embed].

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
        dropout=dropout,
        embed=lambda: TokenEmbedding(width=width, vocab=vocab, length=length),
        head=lambda: MeanReadout(width, embed),
    )
    return nn.Sequential(*layers)


def stack(
    block: Callable[..., nn.Module],
    blocks: int,
    *,
    width: int,
    heads: int,
    embed: Callable[[], nn.Module] | None = None,
    head: Callable[[], nn.Module] | None = None,
    **options: Any,
) -> list[nn.Module]:
    """Blocks of one class, the first with the embedding, the last with the head.

    Modules are made in a fixed order, a block's embedding and head before the block, so that a
    seed always gives the same weights.

    Raises:
        InvalidInputError: ``heads`` does not divide ``width``.
    """
    check_divides("heads", heads, "width", width)
    return [
        block(
            width=width,
            heads=heads,
            embed=embed() if embed and index == 0 else None,
            head=head() if head and index == blocks - 1 else None,
            **options,
        )
        for index in range(blocks)
    ]


def split_heads(x_BTL: Tensor, head_dim: int) -> Tensor:
    """Local channels as heads, [B, H, T, D].

    Raises:
        InvalidInputError: the local width cuts a head in two.
    """
    if x_BTL.shape[-1] % head_dim:
        raise InvalidInputError(
            f"a tensor-parallel rank would get {x_BTL.shape[-1]} channels of attention, "
            f"heads are {head_dim} wide",
            hint="choose a tp that divides the number of heads",
        )
    return x_BTL.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask_BS: Tensor | None = None, **options: Any
) -> Tensor:
    """Attention of heads [B, H, T, D] over S tokens, joined to [B, T, L]."""
    mask = None if mask_BS is None else mask_BS[:, None, None, :]
    mixed_BHTD = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    return mixed_BHTD.transpose(1, 2).flatten(2)


def parts_tp_plan(block: nn.Module) -> dict[str, str]:
    """The rules that a block's parts carry in ``tp_plan``, by names in the block."""
    return {
        f"{name}.{linear}": rule
        for child_name, child in block.named_children()
        for name, part in child.named_modules(prefix=child_name)
        for linear, rule in getattr(part, "tp_plan", {}).items()
    }


def unpacked(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A block's inputs, given as arguments or as one tuple."""
    return inputs[0] if isinstance(inputs[0], tuple) else inputs
