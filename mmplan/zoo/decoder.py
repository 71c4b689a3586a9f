"""A Llama-style decoder whose blocks may be cut and split over tensor-parallel ranks.

``llama`` returns an ``nn.Sequential`` of ``blocks`` children, one layer each: RMSNorm,
rotary positions, grouped queries and SwiGLU. Child 0 also embeds the tokens and puts
features of other modules (images, sounds) into the places that placeholder ids keep for
them; the last child also gives the logits. Between blocks one tensor travels; positions
and the causal mask follow from its shape, so sequences are padded at their end.

Shape suffixes used in this file: B = batch, T = tokens, W = width, H = local heads,
D = width of a head, N = rows of features, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmplan.errors import InvalidInputError
from mmplan.ragged import Ragged
from mmplan.zoo.sizes import check_divides, check_sizes
from mmplan.zoo.towers import attend, parts_tp_plan, split_heads

Features = Tensor | Ragged | None


class GroupedAttention(nn.Module):
    """Causal self-attention with rotary positions, several query heads to a key head.

    The numbers of heads follow the local widths.
    """

    def __init__(
        self, *, width: int, heads: int, kv_heads: int, head_dim: int, theta: float
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.query = nn.Linear(width, heads * head_dim, bias=False)
        self.key = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.value = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, width, bias=False)
        self.tp_plan = {"query": "colwise", "key": "colwise", "value": "colwise", "out": "rowwise"}

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Mix every token with those before it: [B, T, W] to [B, T, W]."""
        parts = (self.query, self.key, self.value)
        q, k, v = (split_heads(part(x_BTW), self.head_dim) for part in parts)
        cos_TD, sin_TD = rotary(x_BTW.shape[1], self.head_dim, self.theta, like=q)
        q, k = rotate(q, cos_TD, sin_TD), rotate(k, cos_TD, sin_TD)
        return self.out(attend(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up may be one matrix, gate's rows first."""

    def __init__(self, width: int, hidden: int, *, fused: bool) -> None:
        super().__init__()
        self.gate_up: nn.Linear | None = None
        if fused:
            self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
            self.gate_up.packed_parts = 2  # pyright: ignore[reportArgumentType]
            self.tp_plan = {"gate_up": "packed_colwise", "down": "rowwise"}
        else:
            self.gate = nn.Linear(width, hidden, bias=False)
            self.up = nn.Linear(width, hidden, bias=False)
            self.tp_plan = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Map every token apart: [B, T, W] to [B, T, W]."""
        if self.gate_up is None:
            gate, up = self.gate(x_BTW), self.up(x_BTW)
        else:
            gate, up = self.gate_up(x_BTW).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Splice(nn.Module):
    """Token ids to activations, with features in the places of their placeholders.

    ``placeholders`` has the id that stands for a row of the first, second, ... features.
    """

    def __init__(self, *, vocab: int, width: int, placeholders: Sequence[int]) -> None:
        super().__init__()
        self.placeholders = tuple(placeholders)
        self.token = nn.Embedding(vocab, width)

    def forward(self, tokens_BT: Tensor, *features: Features) -> Tensor:
        """Embed ids [B, T] as [B, T, W].

        Args:
            tokens_BT: int64.
            features: one for each placeholder; [B, ..., W], or ragged with values
                [items, ..., W]. Their rows, in order, take the places of the id, in
                order. None leaves the id's own embedding.

        Raises:
            InvalidInputError: another number of features than of placeholders, or of
                rows than of places.
        """
        return splice(self.token(tokens_BT), tokens_BT, features, self.placeholders)


class LogitsHead(nn.Module):
    """Activations to logits, and to the normalised activations if others want them."""

    def __init__(self, *, width: int, vocab: int, eps: float, hidden: bool) -> None:
        super().__init__()
        self.hidden = hidden
        self.norm = nn.RMSNorm(width, eps=eps)
        self.vocabulary = nn.Linear(width, vocab, bias=False)

    def forward(self, x_BTW: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """[B, T, W] to logits [B, T, V], or to (logits, [B, T, W])."""
        x_BTW = self.norm(x_BTW)
        logits_BTV = self.vocabulary(x_BTW)
        return (logits_BTV, x_BTW) if self.hidden else logits_BTV


class DecoderBlock(nn.Module):
    """One layer, with the embedding before it or the readout after it."""

    def __init__(
        self,
        *,
        attention: GroupedAttention,
        mlp: SwiGLU,
        eps: float,
        embed: Splice | None,
        head: LogitsHead | None,
    ) -> None:
        super().__init__()
        width = attention.query.in_features
        self.embed = embed
        self.norm1 = nn.RMSNorm(width, eps=eps)
        self.attention = attention
        self.norm2 = nn.RMSNorm(width, eps=eps)
        self.mlp = mlp
        self.head = head
        self.tp_plan = parts_tp_plan(self)

    def forward(self, *inputs: Any) -> Any:
        """Run the block.

        Args:
            inputs: token ids [B, T] and features (see :class:`Splice`) for the first
                block, else activations [B, T, W].

        Returns:
            [B, T, W]; from the last block logits [B, T, V], or (logits, [B, T, W]).
        """
        x_BTW: Tensor = inputs[0] if self.embed is None else self.embed(*inputs)
        x_BTW = x_BTW + self.attention(self.norm1(x_BTW))
        x_BTW = x_BTW + self.mlp(self.norm2(x_BTW))
        return x_BTW if self.head is None else self.head(x_BTW)


def llama(
    blocks: int,
    width: int,
    *,
    heads: int,
    vocab: int,
    kv_heads: int | None = None,
    ffn: int | None = None,
    placeholders: Sequence[int] = (),
    theta: float = 10_000.0,
    eps: float = 1e-5,
    fused_mlp: bool = False,
    hidden: bool = False,
) -> nn.Sequential:
    """Build a decoder of Llama's kind; 7B is ``llama(32, 4096, heads=32, vocab=32000)``.

    Args:
        blocks: children of the Sequential, each with one layer.
        width: channels of the activations, a multiple of ``heads``.
        heads: query heads.
        vocab: number of token ids, placeholders included.
        kv_heads: key and value heads, a divisor of ``heads``; tp must divide it. None is
            ``heads``.
        ffn: hidden width of the MLP; None is Llama's, 8/3 ``width`` up to a multiple of 256.
        placeholders: token ids whose places the features of inputs 1, 2, ... take.
        theta: base of the rotary frequencies.
        eps: of the norms.
        fused_mlp: whether gate and up are one matrix.
        hidden: whether the output is (logits, normalised activations), not logits alone.

    Returns:
        Takes token ids [B, T] and features (see :class:`Splice`), gives logits [B, T, vocab].

    Raises:
        InvalidInputError: sizes that do not fit one another.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    ffn = -(-8 * width // (3 * 256)) * 256 if ffn is None else ffn
    check_sizes(blocks=blocks, width=width, heads=heads, kv_heads=kv_heads, vocab=vocab, ffn=ffn)
    check_divides("heads", heads, "width", width)
    check_divides("kv_heads", kv_heads, "heads", heads)
    head_dim = width // heads
    check_divides("2 channels", 2, "width of a head", head_dim)
    check_placeholders(placeholders, vocab)

    def block(index: int) -> DecoderBlock:
        first, last = index == 0, index == blocks - 1
        return DecoderBlock(
            attention=GroupedAttention(
                width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim, theta=theta
            ),
            mlp=SwiGLU(width, ffn, fused=fused_mlp),
            eps=eps,
            embed=Splice(vocab=vocab, width=width, placeholders=placeholders) if first else None,
            head=LogitsHead(width=width, vocab=vocab, eps=eps, hidden=hidden) if last else None,
        )

    return nn.Sequential(*map(block, range(blocks)))


def rotary(num_tokens: int, head_dim: int, theta: float, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D] of the positions 0..T-1, in the type of ``like``.

    Worked out in float32, as in Llama: bf16 cannot tell neighbouring positions apart.

    Source: RoFormer, arXiv:2104.09864, in Llama's layout (halves, not pairs).
    """
    exponent = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    position = torch.arange(num_tokens, device=like.device, dtype=torch.float32)
    angle = torch.outer(position, theta**-exponent).repeat(1, 2)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn channel i with channel i + D/2 by the position's angle."""
    low, high = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos_TD + torch.cat([-high, low], dim=-1) * sin_TD


def splice(
    x_BTW: Tensor, tokens_BT: Tensor, features: Sequence[Features], placeholders: Sequence[int]
) -> Tensor:
    """Put features into the places of their placeholders; see :class:`Splice`."""
    if len(features) != len(placeholders):
        raise InvalidInputError(
            f"the decoder has {len(placeholders)} placeholders and gets {len(features)} features",
            hint="list one id in the factory's arg placeholders for each input after tokens",
        )
    for placeholder, feature in zip(placeholders, features, strict=True):
        if feature is not None:
            values = feature.values if isinstance(feature, Ragged) else feature
            rows_NW = values.flatten(0, -2)
            here_BT = tokens_BT == placeholder
            _check_places(here_BT, rows_NW, placeholder)
            x_BTW = _place(x_BTW, here_BT, rows_NW)
    return x_BTW


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers, not only a shape."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _place(x_BTW: Tensor, here_BT: Tensor, rows_NW: Tensor) -> Tensor:
    """Row n of the features in the n-th place, without looking at how many there are."""
    num_rows = rows_NW.shape[0]
    order = here_BT.flatten().cumsum(0) - 1
    # One more row of zeros: where a token is no placeholder, and for batches without rows.
    padded = torch.cat([rows_NW, rows_NW.new_zeros((1, rows_NW.shape[1]))]).to(x_BTW.dtype)
    index = torch.where(here_BT.flatten(), order, num_rows).clamp(max=num_rows)
    placed_BTW = padded.index_select(0, index).view_as(x_BTW)
    return torch.where(here_BT[..., None], placed_BTW, x_BTW)


def _check_places(here_BT: Tensor, rows_NW: Tensor, placeholder: int) -> None:
    """Refuse rows that do not fill the places: all after them would be another image's."""
    if not (has_values(here_BT) and has_values(rows_NW)):
        return
    if here_BT.device.type != "cpu" or torch.compiler.is_compiling():
        # Reading the number here would make the host wait for the device, or end the graph.
        torch._assert_async(here_BT.sum() == len(rows_NW))  # pyright: ignore[reportPrivateImportUsage]
        return
    places = int(here_BT.sum())
    if places != len(rows_NW):
        raise InvalidInputError(
            f"{places} tokens are placeholder {placeholder}, and there are {len(rows_NW)} rows "
            "of features for them",
            hint="give the data one placeholder for each row that the encoder makes of it",
        )


def check_placeholders(placeholders: Sequence[int], vocab: int) -> None:
    """Refuse placeholders that are no token ids, or not one for each input.

    Raises:
        InvalidInputError: names the first of them.
    """
    wrong = [item for item in placeholders if not 0 <= item < vocab]
    if wrong:
        raise InvalidInputError(
            f"placeholder {wrong[0]} is no token id of a vocabulary of {vocab}",
            hint=f"choose ids below {vocab}, or a larger vocab",
        )
    if len(set(placeholders)) < len(placeholders):
        raise InvalidInputError(
            f"placeholders {list(placeholders)} has an id twice", hint="give each input its own id"
        )
