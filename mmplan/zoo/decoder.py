"""A Llama-style decoder whose blocks may be cut and split over tensor-parallel ranks.

``llama`` returns an ``nn.Sequential`` of ``blocks`` children, one layer each: RMSNorm,
rotary positions, grouped queries and SwiGLU. Child 0 also embeds the tokens and puts
features of other modules (images, sounds) into the places that placeholder ids keep for
them; the last child also gives the logits. Between blocks one tensor travels; positions
and the causal mask follow from its shape, so sequences are padded at their end.

Texts of any lengths come as ``Ragged`` tokens (values [tokens], no padding): a token sees its
own text alone, and positions begin at 0 in each. Packs of several texts (``packed``,
:mod:`mmplan.sources.packing`) have their texts' lengths as second input. All that comes out
between blocks and at the end is ragged then, with values [tokens, ...].

Shape suffixes used in this file: B = batch, T = tokens, W = width, H = local heads,
D = width of a head, N = rows of features, V = vocabulary. Of ragged text B is 1 inside a block,
and T all its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmplan.errors import InvalidInputError
from mmplan.ragged import Ragged, positions_of
from mmplan.zoo.parts.ragged_attention import attend_samples, has_values
from mmplan.zoo.sizes import check_divides, check_sizes
from mmplan.zoo.towers import attend, parts_tp_plan, split_heads

Features = Tensor | Ragged | None
Text = Tensor | Ragged


class _Rotary(torch.autograd.Function):
    """Queries and keys turned by the angles of their positions.

    Lengths of ragged texts alone are kept and backward works the rest out again: each block would
    keep what is of all tokens on every rank, also where other rows are cut along the sequence.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BHTD: Tensor, k_BHTD: Tensor, lengths: Tensor | None, theta: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(lengths)
        ctx.theta = theta
        cos_TD, sin_TD = rotary(positions(q_BHTD, lengths, dim=2), theta, like=q_BHTD)
        return rotate(q_BHTD, cos_TD, sin_TD), rotate(k_BHTD, cos_TD, sin_TD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (lengths,), like = ctx.saved_tensors, gradients[0]
        cos_TD, sin_TD = rotary(positions(like, lengths, dim=2), ctx.theta, like=like)
        turned = (rotate(each, cos_TD, sin_TD, back=True) for each in gradients)
        return *turned, None, None


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

    def forward(self, x_BTW: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Mix every token with those before it: [B, T, W] to [B, T, W].

        Args:
            x_BTW: normalised activations.
            lengths: of the texts that lie one after another in T; None where each is a row of B.
        """
        parts = (self.query, self.key, self.value)
        q, k, v = (split_heads(part(x_BTW), self.head_dim) for part in parts)
        q, k = cast(Any, _Rotary).apply(q, k, lengths, self.theta)
        if lengths is not None:
            return self.out(attend_samples(q, k, v, lengths).transpose(1, 2).flatten(2))
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
        self.tp_plan = {"token": "vocab"}

    def forward(self, tokens: Text, *features: Features) -> Text:
        """Embed ids [B, T] as [B, T, W], ragged ones as ragged activations.

        Args:
            tokens: int64, [B, T] or ragged with values [T].
            features: one for each placeholder; [B, ..., W], or ragged with values
                [items, ..., W]. Their rows, in order, take the places of the id, in
                order. None leaves the id's own embedding.

        Raises:
            InvalidInputError: another number of features than of placeholders, or of
                rows than of places.
        """
        return splice(self.token, tokens, features, self.placeholders)


class LogitsHead(nn.Module):
    """Activations to logits, and to the normalised activations if others want them."""

    def __init__(self, *, width: int, vocab: int, eps: float, hidden: bool) -> None:
        super().__init__()
        self.hidden = hidden
        self.norm = nn.RMSNorm(width, eps=eps)
        self.vocabulary = nn.Linear(width, vocab, bias=False)
        self.tp_plan = {"vocabulary": "vocab"}

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
        packed: bool = False,
    ) -> None:
        super().__init__()
        width = attention.query.in_features
        self.embed = embed
        self.packed = packed
        self.norm1 = nn.RMSNorm(width, eps=eps)
        self.attention = attention
        self.norm2 = nn.RMSNorm(width, eps=eps)
        self.mlp = mlp
        self.head = head
        self.tp_plan = parts_tp_plan(self)

    def forward(self, *inputs: Any) -> Any:
        """Run the block.

        Args:
            inputs: token ids [B, T], if packed the texts' lengths, and features (see
                :class:`Splice`) for the first block; else activations [B, T, W], with the
                texts' lengths if packed. As arguments, or one tuple.

        Returns:
            What the next block takes; from the last block logits [B, T, V], or
            (logits, [B, T, W]). Ragged where the tokens are.
        """
        state = inputs[0] if type(inputs[0]) is tuple else inputs
        x, texts = state[0], state[1 : 1 + self.packed]
        if self.embed is not None:
            x = self.embed(x, *state[1 + self.packed :])
        x_BTW, lengths = rows_of(x, *texts)
        x_BTW = x_BTW + self.attention(self.norm1(x_BTW), lengths)
        x_BTW = x_BTW + self.mlp(self.norm2(x_BTW))
        if self.head is not None:
            out = self.head(x_BTW)
            return tuple(as_text(x, rows) for rows in out) if self.head.hidden else as_text(x, out)
        return (as_text(x, x_BTW), *texts) if texts else as_text(x, x_BTW)


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
    packed: bool = False,
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
        packed: whether a sample is several texts, whose lengths (ragged int64) are input 1;
            placeholders are for the inputs after it.

    Returns:
        Takes token ids [B, T], or ragged, and features (see :class:`Splice`), gives logits
        [B, T, vocab], or ragged with values [tokens, vocab].

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
            packed=packed,
        )

    return nn.Sequential(*map(block, range(blocks)))


def rows_of(x: Text, texts: Ragged | None = None) -> tuple[Tensor, Tensor | None]:
    """Text as a block's layers take it, [B, T, W], and the lengths of the texts in T.

    Args:
        x: [B, T, W], whose lengths are None; or ragged.
        texts: of packs, the texts' lengths (ragged int64).
    """
    if not isinstance(x, Ragged):
        return x, None
    return x.values[None], x.lengths if texts is None else texts.values


def as_text(like: Text, x_BTW: Tensor) -> Text:
    """What layers made of :func:`rows_of` text, ragged where the text is."""
    return Ragged(x_BTW[0], like.lengths) if isinstance(like, Ragged) else x_BTW


def positions(like: Tensor, lengths: Tensor | None, *, dim: int = 1) -> Tensor:
    """The place of each token in its text, [T] int64; arguments as :func:`rows_of` gives them.

    Args:
        like: that has the tokens.
        lengths: of the texts, one after another; None where there is one.
        dim: of the tokens.
    """
    row_T = torch.arange(like.shape[dim], device=like.device)
    return row_T if lengths is None else positions_of(Ragged(row_T, lengths))


def rotary(position_T: Tensor, theta: float, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D] of positions, in the type of ``like``.

    Worked out in float32, as in Llama: bf16 cannot tell neighbouring positions apart.

    Source: RoFormer, arXiv:2104.09864, in Llama's layout (halves, not pairs).
    """
    head_dim = like.shape[-1]
    step = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32)
    angle = (position_T[:, None] * theta ** (step * (-1 / head_dim))).repeat(1, 2)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, back: bool = False) -> Tensor:
    """Turn channel i with channel i + D/2 by the position's angle; or back, as gradients go."""
    low, high = x_BHTD.chunk(2, dim=-1)
    turned = torch.cat([high, -low] if back else [-high, low], dim=-1)
    return x_BHTD * cos_TD + turned * sin_TD


def splice(
    embed: nn.Module, tokens: Text, features: Sequence[Features], placeholders: Sequence[int]
) -> Text:
    """Embed tokens, with features in the places of their placeholders; see :class:`Splice`."""
    if len(features) != len(placeholders):
        raise InvalidInputError(
            f"the decoder has {len(placeholders)} placeholders and gets {len(features)} features",
            hint="list one id in the factory's arg placeholders for each input after tokens",
        )
    ids = tokens.values if isinstance(tokens, Ragged) else tokens
    x = embed(ids)
    for placeholder, feature in zip(placeholders, features, strict=True):
        if feature is not None:
            values = feature.values if isinstance(feature, Ragged) else feature
            rows_NW = values.flatten(0, -2)
            here = ids == placeholder
            _check_places(here, rows_NW, placeholder)
            x = _place(x, here, rows_NW)
    return Ragged(x, tokens.lengths) if isinstance(tokens, Ragged) else x


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
    if has_values(rows_NW):
        check_values(
            here_BT.sum() == len(rows_NW),
            lambda: (
                f"{int(here_BT.sum())} tokens are placeholder {placeholder}, and there are "
                f"{len(rows_NW)} rows of features for them"
            ),
            hint="give the data one placeholder for each row that the encoder makes of it",
        )


def check_values(right: Tensor, problem: Callable[[], str], *, hint: str) -> None:
    """Refuse data by its values, where the host has them; elsewhere the device stops by itself.

    Args:
        right: scalar, bool; one without a value is not looked at.
        problem: what is wrong, in words.
        hint: how to mend it.

    Raises:
        InvalidInputError: it is not right.
    """
    if not has_values(right):
        return
    if right.device.type != "cpu" or torch.compiler.is_compiling():
        # Reading the number here would make the host wait for the device, or end the graph.
        torch._assert_async(right)  # pyright: ignore[reportPrivateImportUsage]
    elif not right:
        raise InvalidInputError(problem(), hint=hint)


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
