"""Models of several parts, each a module of the workload by a factory of mmplan.zoo.hf."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from mmplan.zoo import hf
from mmplan.zoo.automatic.pretrained import text_field
from mmplan.zoo.sequential import LayerSequential


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyPart:
    """A module.

    Attributes:
        factory: of mmplan.zoo.hf; takes the whole model's configuration.
        options: of the factory.
        takes: argument of the whole model's forward.
    """

    factory: str
    takes: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def build(self, config: Mapping[str, Any]) -> LayerSequential:
        """The blocks, with random weights.

        Raises:
            InvalidInputError: transformers or the factory refuses the configuration.
        """
        return getattr(hf, self.factory)(config, **self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a class of models is taken apart and trained.

    Attributes:
        parts: by the module's name in the workload, in the order of the loss's inputs.
        loss: of mmplan.zoo.losses; across samples.
        options: other arguments of the whole model's forward, with which it gives its loss.
        scales: arguments of the loss to the model's scalars that they begin as.
    """

    parts: Mapping[str, FamilyPart]
    loss: str
    options: Mapping[str, Any]
    scales: Mapping[str, str]


_RETURN_LOSS = {"return_loss": True}
FAMILIES: dict[str, Family] = {
    "CLIPModel": Family(
        parts={
            "vision": FamilyPart(factory="clip_vision", takes="pixel_values"),
            "text": FamilyPart(factory="clip_text", takes="input_ids"),
        },
        loss="clip",
        options=_RETURN_LOSS,
        scales={"init_scale": "logit_scale"},
    ),
    "SiglipModel": Family(
        parts={
            "vision": FamilyPart(
                factory="siglip_vision", takes="pixel_values", options={"pooled": True}
            ),
            "text": FamilyPart(factory="siglip_text", takes="input_ids"),
        },
        loss="sigmoid",
        options=_RETURN_LOSS,
        scales={"init_scale": "logit_scale", "init_bias": "logit_bias"},
    ),
}


def family_fields(model: nn.Module, length: int | None) -> dict[str, dict[str, Any]]:
    """Synthetic fields of a model of an image tower and a text tower, by the forward's names."""
    sizes = cast(Any, model).config
    image, text = sizes.vision_config, sizes.text_config
    return {
        "pixel_values": {"shape": [image.num_channels, image.image_size, image.image_size]},
        "input_ids": text_field(type(model).__name__, text, length),
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
