"""SigLIP 2's image tower for images of any size (NaFlex), without padding.

Patches of images lie one after another, each image with its rows and columns
(:mod:`mmplan.zoo.parts.image_grids`). Source: arXiv:2502.14786, section 2.4.2.

Shape suffixes used in this file: P = patches of all images, W = width, H = heads, I = images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmplan.errors import InvalidInputError
from mmplan.ragged import Ragged
from mmplan.zoo.automatic.pretrained import architecture, build_pretrained
from mmplan.zoo.hf import attend_by_lengths
from mmplan.zoo.parts.hugging_face import ENCODER_RULES, pooling_heads
from mmplan.zoo.parts.image_grids import Rows, Units, check_grids, filled, like, units_of
from mmplan.zoo.sequential import LayerSequential, Part, from_layers

_CLASS = "Siglip2Model"
_TOWER = "vision_model"


def siglip2_vision(config: Mapping[str, Any], *, pooled: bool = False) -> LayerSequential:
    """A ``Siglip2Model``'s image tower, random weights, one layer per block.

    Args:
        config: the whole model's config.json as a dict.
        pooled: whether one vector of an image comes out, by the model's attention pooling,
            as contrastive losses take it beside :func:`mmplan.zoo.hf.siglip_text`; else one of
            each patch.

    Returns:
        Takes patches [B, patches, numbers], or ragged with values [P, numbers], and rows and
        columns of the images, [B, 2], [B, images, 2], or ragged (int64). Gives features of the
        patches with ``width`` for ``numbers``; or pooled [B, width], [B, images, width], or ragged.

    Raises:
        InvalidInputError: a configuration that transformers refuses, or of another model, or with
            attention dropout; in forward, rows and columns that do not fit the patches.
        UnfitEnvironmentError: transformers is missing or broken.
    """
    if architecture(config) != _CLASS:
        raise InvalidInputError(
            f"{architecture(config)} is no SigLIP 2 for images of any size",
            hint=f"give the config.json of a {_CLASS}",
        )
    vision = {**config.get("vision_config", {}), "vision_use_head": pooled}
    model: Any = build_pretrained({**config, "vision_config": vision})
    tower = model.vision_model
    if tower.config.attention_dropout:
        raise InvalidInputError(
            f"siglip2_vision has no attention dropout, got {tower.config.attention_dropout}",
            hint="set vision_config.attention_dropout: 0",
        )
    attend_by_lengths(tower.config)

    def embed(part: Part, patches: Rows, grid: Rows) -> tuple[Rows, Rows]:
        check_grids(grid, patches)
        values = filled(patches)
        own = part.vision_model.embeddings
        table = own.position_embedding.weight
        position_PW = resized(table, own.position_embedding_size, units_of(grid, len(values)))
        return like(patches, own.patch_embedding(values) + position_PW), grid

    def run(layer: nn.Module, x: Rows, grid: Rows) -> tuple[Rows, Rows]:
        x_PW = filled(x)
        lengths = units_of(grid, len(x_PW)).images(x)
        return like(x, layer(x_PW[None], lengths)[0]), grid

    def readout(part: Part, x: Rows, grid: Rows) -> Rows:
        x_PW = part.vision_model.post_layernorm(filled(x))
        if not pooled:
            return like(x, x_PW)
        units = units_of(grid, len(x_PW))
        pooled_IW = pool(part.vision_model.head, x_PW, units.image, len(units.sides))[:-1]
        if isinstance(grid, Ragged):
            return Ragged(pooled_IW, grid.lengths)
        return pooled_IW.unflatten(0, grid.shape[:-1])

    return from_layers(
        model,
        f"{_TOWER}.encoder.layers",
        before=embed,
        each=run,
        after=readout,
        first=[f"{_TOWER}.embeddings"],
        last=[f"{_TOWER}.post_layernorm", *([f"{_TOWER}.head"] if pooled else [])],
        tp_plan=ENCODER_RULES,
        ignore=["text_model", "logit_scale", "logit_bias"],
    )


def resized(table_W: Tensor, side: int, units: Units) -> Tensor:
    """A square table of positions resized to each image, [P, W].

    As ``functional.interpolate`` does it, bilinear and with antialiasing: a patch's position is
    a weighted sum of the table's.

    Args:
        table_W: [side**2, W].
        side: rows and columns of the table.
        units: where the patches are.
    """
    source = torch.arange(side, device=table_W.device, dtype=torch.float32)
    weights = [
        _taps(source, index, sizes)
        for index, sizes in zip(
            (units.row, units.column), units.sides[units.image].unbind(1), strict=True
        )
    ]
    both = (weights[0][:, :, None] * weights[1][:, None, :]).flatten(1)
    return (both @ table_W.float()).to(table_W.dtype)


def _taps(source: Tensor, index_P: Tensor, size_P: Tensor) -> Tensor:
    """Weights of a table's rows (or columns) for a row of an image of so many, [P, side]."""
    scale_P = len(source) / size_P.float()
    center_P = (index_P + 0.5) * scale_P - 0.5
    away = (source - center_P[:, None]).abs() / scale_P.clamp(min=1)[:, None]
    weights = (1 - away).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)


def pool(head: Any, x_PW: Tensor, image_P: Tensor, images: int) -> Tensor:
    """SigLIP's attention pooling of each image's patches, [I, W]: one query, the model's own."""
    query, key, value = pooling_heads(head, x_PW)
    score_PH = (query * key).sum(-1) / query.shape[-1] ** 0.5
    # A softmax in each image.
    most_IH = score_PH.detach().new_full((images, score_PH.shape[1]), -torch.inf)
    index_PH = image_P[:, None].expand_as(score_PH)
    most_IH = most_IH.scatter_reduce(0, index_PH, score_PH.detach(), "amax")
    weight_PH = (score_PH - most_IH[image_P]).exp()
    total_IH = weight_PH.new_zeros(most_IH.shape).index_add(0, image_P, weight_PH)
    weight_PH = weight_PH / total_IH[image_P]
    mixed = value.new_zeros((images, *value.shape[1:]))
    mixed_IW = mixed.index_add(0, image_P, weight_PH[..., None] * value).flatten(1)
    pooled_IW = head.attention.out_proj(mixed_IW)
    return pooled_IW + head.mlp(head.layernorm(pooled_IW))


class Siglip2WithLoss(nn.Module):
    """A whole model whose forward takes the data fields by name and gives its loss.

    The model itself takes images padded to one number of patches.
    """

    def __init__(self, model: Any, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._options = dict(options)

    def forward(self, pixel_values: Rows, spatial_shapes: Tensor, input_ids: Tensor) -> Tensor:
        """The loss of a batch with one image in a sample, a scalar."""
        if isinstance(pixel_values, Ragged):
            each = pixel_values.values.split(pixel_values.lengths.tolist())
        else:
            each = pixel_values.unbind()
        padded = nn.utils.rnn.pad_sequence(list(each), batch_first=True)
        mask = nn.utils.rnn.pad_sequence([x.new_ones(len(x)) for x in each], batch_first=True)
        return self.model(
            pixel_values=padded,
            pixel_attention_mask=mask.long(),
            spatial_shapes=spatial_shapes,
            input_ids=input_ids,
            **self._options,
        ).loss
