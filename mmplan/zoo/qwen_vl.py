"""Qwen2-VL and Qwen2.5-VL of transformers as two modules: an image tower and a decoder.

The layers are transformers' own, with their names. What stands around them follows from tokens and
grids on the device: the host neither waits for it nor has to know it.

An image is patches, each a row of numbers, in the order of the model's processor: neighbours that
become one row of the decoder, 2 by 2 of them, follow one another. They are a *unit*
(:mod:`mmplan.zoo.parts.image_grids`). An image's grid is [1, rows, columns] of patches.

Source: arXiv:2409.12191 (Qwen2-VL, section 2.1: images of any size, positions of three axes),
arXiv:2502.13923 (Qwen2.5-VL, section 2.1.1: attention in windows).

Shape suffixes used in this file: P = patches of all images, U = units of all images, M = patches
of a unit, W = width, N = tokens of all texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmplan.errors import InvalidInputError
from mmplan.ragged import Ragged, known_lengths, positions_of, with_host_lengths
from mmplan.zoo.automatic.pretrained import architecture, build_pretrained
from mmplan.zoo.decoder import Text, check_values, rotate
from mmplan.zoo.hf import cut_decoder, register_rotary, rotary_angles
from mmplan.zoo.parts.image_grids import (
    Rows,
    check_grids,
    filled,
    grids_of,
    like,
    sides_of,
    units_of,
)
from mmplan.zoo.parts.ragged_attention import attend_samples
from mmplan.zoo.sequential import LayerSequential, Part, from_layers

_CLASSES = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
_TOWER = "model.visual"
_DECODER = "model.language_model"
_HEAD = "lm_head"
_RULES = {
    "attn.qkv": "packed_colwise",
    "attn.proj": "rowwise",
    **{f"mlp.{name}": "colwise" for name in ("fc1", "gate_proj", "up_proj")},
    **{f"mlp.{name}": "rowwise" for name in ("fc2", "down_proj")},
}


def qwen_vl_tower(config: Mapping[str, Any]) -> LayerSequential:
    """The image tower with its merger, random weights, one layer per block.

    Args:
        config: the whole model's config.json as a dict.

    Returns:
        Takes patches [B, patches, numbers] and grids of the images, [B, 3] or [B, images, 3]
        (int64), gives rows for the decoder, [B, patches / M, width]. Patches of images of several
        sizes are ragged, with values [P, numbers], and so are the rows; grids are ragged where
        samples have several images, or none.

    Raises:
        InvalidInputError: a configuration that transformers refuses, or of another model; in
            forward, grids that do not fit the patches.
        UnfitEnvironmentError: transformers is missing or broken.
    """
    model = _whole(config)
    visual: Any = model.model.visual
    sizes = visual.config
    merge: int = sizes.spatial_merge_size
    kind = register_rotary(sizes, type(visual.rotary_pos_emb))
    # Of a window, in units. Qwen2-VL has none.
    side = sizes.window_size // merge // sizes.patch_size if hasattr(visual, "window_size") else 0
    full = set(visual.fullatt_block_indexes if side else range(len(visual.blocks)))
    for index, layer in enumerate(visual.blocks):
        layer.sees_image = index in full

    def embed(part: Part, patches: Rows, grid: Rows) -> tuple[Rows, Rows]:
        _check_frames(grid)
        check_grids(grid, patches, merge)
        values = patches.values if isinstance(patches, Ragged) else patches.flatten(0, 1)
        count = len(values) // merge**2
        # One unit of zeros where there is no image.
        missing = 0 if count else merge**2 - len(values)
        values = functional.pad(values[: count * merge**2 or None], (0, 0, 0, missing))
        rows_UMW = part.model.visual.patch_embed(values).unflatten(0, (-1, merge**2))
        rows_UMW = rows_UMW[units_of(grid, len(rows_UMW), merge, side).order][:count]
        if not isinstance(patches, Ragged):
            return rows_UMW.unflatten(0, (len(patches), -1)), grid
        lengths = patches.lengths // merge**2
        known = known_lengths(patches.lengths)
        if known is not None:
            with_host_lengths(lengths, [length // merge**2 for length in known])
        return Ragged(rows_UMW, lengths), grid

    def run(module: Any, x: Rows, grid: Rows) -> tuple[Rows, Rows]:
        rows_UMW = filled(x)
        units = units_of(grid, len(rows_UMW), merge, side)
        lengths, longest = (units.images(x), None) if module.sees_image else units.windows()
        x_PW, attention = rows_UMW.flatten(0, 1), module.attn
        cos, sin = rotary_angles(x_PW, units.places(), kind)
        qkv = attention.qkv(module.norm1(x_PW)).unflatten(-1, (3, -1, attention.head_dim))
        q, k, v = qkv.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
        # In float32, as the model's own attention does it.
        q, k = (rotate(t.float(), cos, sin).to(v.dtype) for t in (q, k))
        mixed = attend_samples(q, k, v, lengths, causal=False, longest=longest)
        x_PW = x_PW + attention.proj(mixed[0].transpose(0, 1).flatten(1))
        x_PW = x_PW + module.mlp(module.norm2(x_PW))
        return like(x, x_PW.view_as(rows_UMW)), grid

    def merger(part: Part, x: Rows, grid: Rows) -> Rows:
        rows_UMW = filled(x)
        merged_UW = part.model.visual.merger(rows_UMW.flatten(0, 1))
        if side:
            merged_UW = merged_UW[units_of(grid, len(rows_UMW), merge, side).order.argsort()]
        return like(x, merged_UW)

    return from_layers(
        model,
        f"{_TOWER}.blocks",
        before=embed,
        each=run,
        after=merger,
        first=[f"{_TOWER}.patch_embed"],
        last=[f"{_TOWER}.merger"],
        tp_plan=_rules,
        ignore=[_DECODER, _HEAD],
    )


def qwen_vl_lm(config: Mapping[str, Any]) -> LayerSequential:
    """The language model, random weights, one layer per block.

    Args:
        config: the whole model's config.json as a dict.

    Returns:
        Takes token ids [B, T] (padded at their end) or ragged, the rows of
        :func:`qwen_vl_tower` for the places of the image token, and the grids as it takes them;
        gives logits [B, T, vocab] or ragged.

    Raises:
        InvalidInputError: a configuration that transformers refuses, or of another model; in
            forward, images that do not fit the tokens.
        UnfitEnvironmentError: transformers is missing or broken.
    """
    model = _whole(config)
    sizes = model.config
    merge: int = sizes.vision_config.spatial_merge_size
    return cut_decoder(
        model,
        _DECODER,
        _HEAD,
        placeholders=[sizes.image_token_id],
        places=lambda tokens, grid: text_places(tokens, grid, sizes.image_token_id, merge),
        ignore=[_TOWER],
    )


def text_places(tokens: Text, grid: Rows, image_token: int, merge: int) -> Text:
    """Positions of tokens along time, height and width, [B, T, 3] or ragged with values [N, 3].

    A token of text is one further along all axes than what is before it. An image is at one
    time, and text goes on behind its longer side.

    Args:
        tokens: int64, [B, T] or ragged.
        grid: of the images, in order; see :func:`qwen_vl_tower`.
        image_token: the id whose places the rows of images take; between two images another is.
        merge: neighbours along an axis that become one row.

    Raises:
        InvalidInputError: another number of images in the tokens.
    """
    ids_N = tokens.values if isinstance(tokens, Ragged) else tokens.flatten()
    index_N = torch.arange(len(ids_N), device=ids_N.device)
    place_N = positions_of(tokens) if isinstance(tokens, Ragged) else index_N % tokens.shape[1]
    is_image = ids_N == image_token
    goes_on = is_image & functional.pad(is_image, (1, 0))[:-1] & (place_N > 0)
    begins = is_image & ~goes_on
    sides = sides_of(grid, merge)
    images = len(sides) - 1
    check_values(
        begins.sum() == images,
        lambda: (
            f"the tokens have {int(begins.sum())} images (placeholder {image_token}), and "
            f"there are {images} grids"
        ),
        hint="give each image a grid [1, rows, columns], and tokens of text between two images",
    )
    # Text counts as an image of one row and one column.
    which = torch.where(is_image, begins.cumsum(0) - 1, images).clamp(max=images)
    height, width = sides[which].unbind(1)
    span = torch.maximum(height, width)
    first = torch.where(goes_on, 0, span).cumsum(0) - span
    first = first - first[index_N - place_N]
    inside = index_N - torch.where(goes_on, 0, index_N).cummax(0).values
    zero = torch.zeros_like(inside)
    places = torch.stack([zero, inside // width % height, inside % width], 1) + first[:, None]
    return like(tokens, places)


def _check_frames(grid: Rows) -> None:
    frames = grids_of(grid)[:, 0]
    check_values(
        (frames == 1).all(),
        lambda: f"an image has {int(frames.max())} frames: videos are not taken",
        hint="give each image a grid [1, rows, columns]",
    )


def _rules(layer: nn.Module) -> Mapping[str, str]:
    return {name: rule for name, rule in _RULES.items() if name in dict(layer.named_modules())}


def _whole(config: Mapping[str, Any]) -> Any:
    name = architecture(config)
    if name not in _CLASSES:
        raise InvalidInputError(
            f"{name} is no Qwen2-VL and no Qwen2.5-VL",
            hint=f"give the config.json of one of {', '.join(_CLASSES)}",
        )
    return build_pretrained(config)


class QwenVLWithLoss(nn.Module):
    """A whole model whose forward takes the data fields by name and gives its loss."""

    def __init__(self, model: Any, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._options = dict(options)

    def forward(
        self, pixel_values: Rows, image_grid_thw: Rows, input_ids: Tensor, labels: Tensor
    ) -> Tensor:
        """The loss of a batch, a scalar."""
        ragged = isinstance(pixel_values, Ragged)
        patches = pixel_values.values if ragged else pixel_values.flatten(0, 1)
        return self.model(
            pixel_values=patches,
            image_grid_thw=grids_of(image_grid_thw),
            input_ids=input_ids,
            mm_token_type_ids=(input_ids == self.model.config.image_token_id).int(),
            labels=labels,
            **self._options,
        ).loss
