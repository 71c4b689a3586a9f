"""A diffusion transformer that draws images as a language model tells it to, and its loss.

``generator`` returns an ``nn.Sequential`` whose first block adds noise to the images and
gathers, for each, the language model's activations at the tokens before it; whose blocks
attend to both; and whose last block predicts the noise. Time and noise are drawn inside
block 0, whose generator the runtime seeds: the same in every schedule and cut.

Shape suffixes used in this file: B = samples, T = their tokens, N = images, P = patches,
C = conditioning tokens, W = width, L = local width (W/tp), Q = numbers in a patch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmplan.errors import InvalidInputError
from mmplan.ragged import Ragged, samples_of
from mmplan.zoo.patches import cut
from mmplan.zoo.sizes import check_divides, check_sizes
from mmplan.zoo.towers import MLP, Attention, attend, parts_tp_plan, split_heads, stack

# Sinusoids that tell the time; their periods go from 1 to 10,000 thousandths of the way.
_TIME_CHANNELS = 256
DiffusionState = tuple[Ragged, Ragged, Ragged, Ragged]


class CrossAttention(nn.Module):
    """Every patch looks at its image's conditioning tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.tp_plan = {"query": "colwise", "key": "colwise", "value": "colwise", "out": "rowwise"}

    def forward(
        self, x_NPW: Tensor, condition_NCW: Tensor, mask_NC: Tensor | None = None
    ) -> Tensor:
        """Mix the conditioning into the patches: [N, P, W] to [N, P, W].

        ``mask_NC`` is True at the tokens that may be attended to; None for all.
        """
        q = split_heads(self.query(x_NPW), self.head_dim)
        k = split_heads(self.key(condition_NCW), self.head_dim)
        v = split_heads(self.value(condition_NCW), self.head_dim)
        return self.out(attend(q, k, v, mask_NC))


class Noising(nn.Module):
    """Images [N, *shape], and where they stand in their sequences, to the first block's state.

    The other arguments are those of :func:`generator`.
    """

    def __init__(
        self, *, width: int, hidden: int, condition: int, patch: int, shape: tuple[int, int, int]
    ) -> None:
        super().__init__()
        self.patch, self.shape, self.condition = patch, shape, condition
        self.project = nn.Linear(shape[0] * patch**2, width)
        self.position = nn.Parameter(0.02 * torch.randn((shape[1] // patch) ** 2, width))
        self.condition_norm = nn.LayerNorm(hidden)
        self.condition_project = nn.Linear(hidden, width)
        # Stands for the tokens that an image at the very beginning does not have.
        self.before = nn.Parameter(0.02 * torch.randn(width))
        self.time = nn.Sequential(
            nn.Linear(_TIME_CHANNELS, width), nn.SiLU(), nn.Linear(width, 6 * width)
        )

    def forward(self, hidden: Tensor | Ragged, images: Ragged, starts: Ragged) -> DiffusionState:
        """Noisy patches [N, P, W], conditioning [N, C, W], time [N, 6, W], noise [N, P, Q].

        Raises:
            InvalidInputError: images of another shape, or as many starts as images not given.
        """
        _check_images(images, starts, self.shape)
        clean_NPQ = cut(images.values, (self.patch,) * 2, (self.patch,) * 2)
        time_N = torch.rand(len(clean_NPQ), device=clean_NPQ.device)
        noise_NPQ = torch.randn_like(clean_NPQ)
        angle = (time_N * (math.pi / 2)).to(clean_NPQ.dtype)[:, None, None]
        noisy_NPQ = angle.cos() * clean_NPQ + angle.sin() * noise_NPQ
        x_NPW = self.project(noisy_NPQ) + self.position
        time_N6W = self.time(sinusoids(time_N).to(noisy_NPQ.dtype)).unflatten(1, (6, -1))
        condition_NCW = self._conditioning(hidden, starts)
        lengths = images.lengths
        return (
            Ragged(x_NPW, lengths),
            Ragged(condition_NCW, lengths),
            Ragged(time_N6W, lengths),
            Ragged(noise_NPQ, lengths),
        )

    def _conditioning(self, hidden: Tensor | Ragged, starts: Ragged) -> Tensor:
        """Activations of the tokens right before each image, projected: [N, C, W]."""
        if isinstance(hidden, Ragged):
            all_rows = hidden.values
            begin_B = hidden.lengths.cumsum(0) - hidden.lengths
        else:
            all_rows = hidden.flatten(0, 1)
            begin_B = torch.arange(len(hidden), device=hidden.device) * hidden.shape[1]
        offset_C = torch.arange(-self.condition, 0, device=all_rows.device)
        place_NC = starts.values[:, None] + offset_C
        row_NC = begin_B[samples_of(starts)][:, None] + place_NC.clamp(min=0)
        rows = all_rows.index_select(0, row_NC.clamp(max=len(all_rows) - 1).flatten())
        told = self.condition_project(self.condition_norm(rows)).unflatten(0, (-1, self.condition))
        return torch.where((place_NC >= 0)[..., None], told, self.before)


class Denoised(nn.Module):
    """Activations to the predicted noise."""

    def __init__(self, *, width: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, outputs)

    def forward(self, x_NPW: Tensor) -> Tensor:
        """[N, P, W] to [N, P, Q]."""
        return self.out(self.norm(x_NPW))


class DiffusionBlock(nn.Module):
    """Self-attention, cross-attention and an MLP, scaled and shifted by the time.

    Each block adds a table of its own to the time's six vectors instead of computing
    them by a matrix of its own.

    Source: PixArt-alpha, arXiv:2310.00426, section 2.3 (adaLN-single).
    """

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        mlp_ratio: float,
        embed: Noising | None,
        head: Denoised | None,
    ) -> None:
        super().__init__()
        self.embed = embed
        self.modulation = nn.Parameter(torch.randn(6, width) / width**0.5)
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = Attention(width, heads)
        self.cross = CrossAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = MLP(width, round(width * mlp_ratio))
        self.head = head
        self.tp_plan = parts_tp_plan(self)

    def forward(self, *inputs: Any) -> DiffusionState | tuple[Ragged, Ragged]:
        """Run the block.

        Args:
            inputs: for the first block the language model's activations [B, T, W'] (or
                ragged), the images (ragged, [N, channels, side, side]) and the position of
                each image's first token (ragged, [N] int64); else the state that a block
                returns.

        Returns:
            (patches, conditioning, time, noise), all ragged over images; from the last
            block (predicted noise, noise), ragged with values [N, P, Q].
        """
        given: Any = inputs[0] if self.embed is None else self.embed(*inputs)
        x, condition, time, noise = given
        x_NPW = self._layer(x.values, condition.values, time.values)
        if self.head is None:
            return Ragged(x_NPW, x.lengths), condition, time, noise
        return Ragged(self.head(x_NPW), x.lengths), noise

    def _layer(self, x_NPW: Tensor, condition_NCW: Tensor, time_N6W: Tensor) -> Tensor:
        steps = (time_N6W + self.modulation)[:, :, None].unbind(1)
        shift1, scale1, gate1, shift2, scale2, gate2 = steps
        mixed = self.attention(self.norm1(x_NPW) * (1 + scale1) + shift1, None)
        x_NPW = x_NPW + (1 + gate1) * mixed
        x_NPW = x_NPW + self.cross(x_NPW, condition_NCW)
        return x_NPW + (1 + gate2) * self.mlp(self.norm2(x_NPW) * (1 + scale2) + shift2)


class DenoisingLoss(nn.Module):
    """The squared error of the predicted noise, SUMMED over images, averaged inside one.

    The caller divides by the number of images: a mean per micro-batch would weigh an image
    by how many others happen to share its micro-batch.
    """

    def __init__(self, *, field: str | None) -> None:
        super().__init__()
        self.field = field

    def forward(self, prediction: Ragged, noise: Ragged, images: Ragged) -> Tensor:
        """Sum of the errors.

        Args:
            prediction: values [N, P, Q].
            noise: values [N, P, Q].
            images: the field that says how many images each sample has.
        """
        error_NPQ = (prediction.values - noise.values.detach()).square()
        return error_NPQ.sum() / math.prod(error_NPQ.shape[1:])

    def count(self, fields: Mapping[str, Tensor | Ragged]) -> Tensor:
        """Images of each sample, [B] int64.

        Args:
            fields: the data fields among the loss's inputs.

        Raises:
            InvalidInputError: it is not clear which field holds the images.
        """
        only = next(iter(fields)) if len(fields) == 1 else None
        images = fields.get(self.field or only or "")
        if not isinstance(images, Ragged):
            raise InvalidInputError(
                f"denoising has no images: field {self.field or only!r}, its data {sorted(fields)}",
                hint="give it the generator's ragged images as third input",
            )
        return images.lengths


def generator(
    blocks: int,
    width: int,
    *,
    heads: int,
    hidden: int,
    image: int,
    patch: int = 16,
    channels: int = 3,
    condition: int = 64,
    mlp_ratio: float = 4.0,
) -> nn.Sequential:
    """Build the generator; about 1e9 parameters with ``generator(26, 1536, heads=24, ...)``.

    Args:
        blocks, width, heads, mlp_ratio: as in :func:`mmplan.zoo.towers.vision`.
        hidden: width of the language model's activations.
        image: side of the (square) images in pixels (or in latents).
        patch: side of a patch, divides ``image``.
        channels: of the images.
        condition: tokens before an image that the language model draws it from.

    Returns:
        Takes activations [B, T, hidden], or ragged (not of packs), images (ragged) and their
        first tokens' positions (ragged), gives (predicted noise, noise), both ragged: see
        :class:`DiffusionBlock`.

    Raises:
        InvalidInputError: sizes that do not fit one another.
    """
    check_sizes(
        blocks=blocks, width=width, heads=heads, hidden=hidden, image=image, patch=patch,
        channels=channels, condition=condition,
    )  # fmt: skip
    check_divides("patch", patch, "image", image)
    layers = stack(
        DiffusionBlock,
        blocks,
        width=width,
        heads=heads,
        mlp_ratio=mlp_ratio,
        embed=lambda: Noising(
            width=width,
            hidden=hidden,
            condition=condition,
            patch=patch,
            shape=(channels, image, image),
        ),
        head=lambda: Denoised(width=width, outputs=channels * patch**2),
    )
    return nn.Sequential(*layers)


def denoising(*, field: str | None = None) -> DenoisingLoss:
    """Loss of :func:`generator`: inputs are its two outputs and the field of the images.

    Args:
        field: data field of the images; needed when the loss has several data fields.
    """
    return DenoisingLoss(field=field)


def sinusoids(time_N: Tensor) -> Tensor:
    """Sines and cosines [N, 256] of times in [0, 1]."""
    half = _TIME_CHANNELS // 2
    rate = torch.arange(half, device=time_N.device, dtype=torch.float32) / half
    angle = 1000 * time_N[:, None] * torch.exp(-math.log(10_000.0) * rate)
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def _check_images(images: Ragged, starts: Ragged, shape: tuple[int, int, int]) -> None:
    found = tuple(images.values.shape[1:])
    if found != shape:
        raise InvalidInputError(
            f"the generator draws images {list(shape)}, got {list(found)}",
            hint="set the factory's args image and channels to those of the data",
        )
    if len(images.values) != len(starts.values):
        raise InvalidInputError(
            f"{len(images.values)} images to draw have {len(starts.values)} positions",
            hint="give the data one position for each image",
        )
