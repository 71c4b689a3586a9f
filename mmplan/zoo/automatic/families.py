"""Models of several parts, each a module of the workload by a factory of mmplan.zoo."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmplan.zoo.automatic.pretrained import text_field
from mmplan.zoo.parts.hugging_face import checked
from mmplan.zoo.sequential import LayerSequential

# A list: of samples that differ.
NoiseFields = dict[str, dict[str, Any] | list[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyPart:
    """A module.

    Attributes:
        factory: ``module.name`` in mmplan.zoo; takes the whole model's configuration.
        options: of the factory.
        takes: arguments of the whole model's forward, and names of other parts.
        is_frozen: whether it is not trained.
    """

    factory: str
    takes: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_frozen: bool = False

    def build(self, config: Mapping[str, Any]) -> LayerSequential:
        """The blocks, with random weights.

        Raises:
            InvalidInputError: transformers or the factory refuses the configuration.
        """
        module, _, name = self.factory.partition(".")
        factory = getattr(importlib.import_module(f"mmplan.zoo.{module}"), name)
        return factory(config, **self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a class of models is taken apart and trained.

    Attributes:
        parts: by the module's name in the workload.
        loss: of mmplan.zoo.losses.
        loss_inputs: names of modules and data fields.
        is_cross_sample: whether the loss looks at samples together.
        fields: synthetic fields of the whole model, its parts and the tokens of a text, by the
            forward's names.
        options: other arguments of the whole model's forward, with which it gives its loss.
        scales: arguments of the loss to the model's scalars that they begin as.
        original: makes, of the whole model and the options, one that gives its loss: the class
            here, or ``module.name`` in mmplan.zoo.
    """

    parts: Mapping[str, FamilyPart]
    loss: str
    loss_inputs: tuple[str, ...]
    is_cross_sample: bool
    fields: Callable[[nn.Module, Mapping[str, LayerSequential], int | None], NoiseFields]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    scales: Mapping[str, str] = field(default_factory=dict[str, str])
    original: str = "WithLoss"


def _pair_fields(
    model: nn.Module, parts: Mapping[str, LayerSequential], length: int | None
) -> NoiseFields:
    """Of an image tower and a text tower."""
    sizes = cast(Any, model).config
    return {
        "pixel_values": {"shape": _image(sizes.vision_config)},
        "input_ids": text_field(type(model).__name__, sizes.text_config, length),
    }


def _image(sizes: Any) -> list[int]:
    side = sizes.image_size
    height, width = (side, side) if isinstance(side, int) else side
    return [getattr(sizes, "num_channels", 3), height, width]


def _placed_fields(
    model: nn.Module, parts: Mapping[str, LayerSequential], length: int | None
) -> NoiseFields:
    """Of one image, whose rows stand at the beginning of the text."""
    sizes, name = cast(Any, model).config, type(model).__name__
    # These take several images of a sample.
    several = name.startswith(("Idefics3", "SmolVLM"))
    image = [*([1] if several else []), *_image(sizes.vision_config)]
    # Published configurations give parts narrow types.
    ahead = nn.Sequential(*list(parts.values())[:-1]).float()
    features = checked(f"{name}'s image of {image}", lambda: ahead(torch.zeros([1, *image])))
    rows = features[0, ..., 0].numel()
    text = text_field(name, sizes.text_config, None)
    tokens = rows + text["shape"][0]
    text["shape"] = [length or min(tokens, sizes.text_config.max_position_embeddings)]
    return {
        "pixel_values": {"shape": image},
        "input_ids": {**text, "rows": {str(sizes.image_token_id): rows}},
        "labels": {**text, "ignored": rows},
    }


def _placed(**between: FamilyPart) -> Family:
    """An image tower whose features, or what is made of them, take places in a text."""
    is_frozen = bool(between)
    tower = FamilyPart(
        factory="hf_vision_language.image_tower", takes=("pixel_values",), is_frozen=is_frozen
    )
    lm = FamilyPart(
        factory="hf_vision_language.image_lm",
        takes=("input_ids", *(list(between)[-1:] or ["vision"])),
        is_frozen=is_frozen,
    )
    return Family(
        parts={"vision": tower, **between, "lm": lm},
        loss="token_cross_entropy",
        loss_inputs=("lm", "labels"),
        is_cross_sample=False,
        fields=_placed_fields,
    )


# Rows and columns of the images of samples, in patches or, of Qwen, 2 by 2 of these.
_GRIDS = ((4, 6), (5, 3))


def _patched_fields(
    model: nn.Module, parts: Mapping[str, LayerSequential], length: int | None
) -> NoiseFields:
    """Of an image of any size, as patches, whose rows stand at the beginning of the text."""
    sizes, name = cast(Any, model).config, type(model).__name__
    vision = sizes.vision_config
    merge = vision.spatial_merge_size
    numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    text = text_field(name, sizes.text_config, None)
    counts = [rows * columns for rows, columns in _GRIDS]
    text["shape"] = [length or max(counts) + text["shape"][0]]
    return {
        "pixel_values": [{"shape": [n * merge**2, numbers], "ragged": True} for n in counts],
        "image_grid_thw": [{"value": [1, merge * h, merge * w]} for h, w in _GRIDS],
        "input_ids": [{**text, "rows": {str(sizes.image_token_id): n}} for n in counts],
        "labels": [{**text, "ignored": n} for n in counts],
    }


def _flexible_fields(
    model: nn.Module, parts: Mapping[str, LayerSequential], length: int | None
) -> NoiseFields:
    """Of an image of any size, as patches, and a text."""
    sizes, name = cast(Any, model).config, type(model).__name__
    vision = sizes.vision_config
    numbers = vision.num_channels * vision.patch_size**2
    return {
        "pixel_values": [{"shape": [h * w, numbers], "ragged": True} for h, w in _GRIDS],
        "spatial_shapes": [{"value": [h, w]} for h, w in _GRIDS],
        "input_ids": text_field(name, sizes.text_config, length),
    }


_QWEN_VL = Family(
    parts={
        "vision": FamilyPart(
            factory="qwen_vl.qwen_vl_tower", takes=("pixel_values", "image_grid_thw")
        ),
        "lm": FamilyPart(
            factory="qwen_vl.qwen_vl_lm", takes=("input_ids", "vision", "image_grid_thw")
        ),
    },
    loss="token_cross_entropy",
    loss_inputs=("lm", "labels"),
    is_cross_sample=False,
    fields=_patched_fields,
    options={"use_cache": False},
    original="qwen_vl.QwenVLWithLoss",
)


def _pair(vision: FamilyPart, text: FamilyPart, loss: str, **scales: str) -> Family:
    """An image tower and a text tower, whose features a loss compares over samples."""
    return Family(
        parts={"vision": vision, "text": text},
        loss=loss,
        loss_inputs=("vision", "text"),
        is_cross_sample=True,
        fields=_pair_fields,
        options={"return_loss": True},
        scales=scales,
    )


FAMILIES: dict[str, Family] = {
    "CLIPModel": _pair(
        FamilyPart(factory="hf.clip_vision", takes=("pixel_values",)),
        FamilyPart(factory="hf.clip_text", takes=("input_ids",)),
        "clip",
        init_scale="logit_scale",
    ),
    "SiglipModel": _pair(
        FamilyPart(factory="hf.siglip_vision", takes=("pixel_values",), options={"pooled": True}),
        FamilyPart(factory="hf.siglip_text", takes=("input_ids",)),
        "sigmoid",
        init_scale="logit_scale",
        init_bias="logit_bias",
    ),
    "Siglip2Model": replace(
        _pair(
            FamilyPart(
                factory="siglip2.siglip2_vision",
                takes=("pixel_values", "spatial_shapes"),
                options={"pooled": True},
            ),
            FamilyPart(factory="hf.siglip_text", takes=("input_ids",)),
            "sigmoid",
            init_scale="logit_scale",
            init_bias="logit_bias",
        ),
        fields=_flexible_fields,
        original="siglip2.Siglip2WithLoss",
    ),
    "LlavaForConditionalGeneration": _placed(),
    "Idefics3ForConditionalGeneration": _placed(),
    "SmolVLMForConditionalGeneration": _placed(),
    "Qwen2VLForConditionalGeneration": _QWEN_VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN_VL,
    # As BLIP-2 is trained: what is between two models that know enough.
    "Blip2ForConditionalGeneration": _placed(
        queries=FamilyPart(factory="hf_vision_language.query_former", takes=("vision",))
    ),
}


def stored_scales(family: Family, folder: Path) -> dict[str, float]:
    """What the loss begins with, of a folder of safetensors; the logarithm of a scale is stored."""
    from safetensors import safe_open

    found: dict[str, float] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for argument, name in family.scales.items():
                if name in tensors.keys():  # noqa: SIM118  it is no mapping
                    value = float(tensors.get_tensor(name))
                    found[argument] = math.exp(value) if argument == "init_scale" else value
    return found


class WithLoss(nn.Module):
    """A whole model whose forward takes the data fields by name and gives its loss."""

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._options = dict(options)

    def forward(self, **fields: Tensor) -> Tensor:
        """The loss of a batch, a scalar."""
        return self.model(**fields, **self._options).loss
