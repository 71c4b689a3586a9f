"""Denoisers of diffusers: how each class is called, and the shapes of what it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmplan.errors import InvalidInputError

# Steps of noise: a thousand are usual.
_STEPS = 1000
# Tokens of a caption, where the model takes any number. Short, so that a trial is quick.
_LENGTH = 64


def _sample(config: Mapping[str, Any], _: int | None) -> dict[str, Any]:
    size = config["sample_size"]
    height, width = (size, size) if isinstance(size, int) else size
    return {"shape": [config["in_channels"], height, width]}


def _timestep(_: Mapping[str, Any], __: int | None) -> dict[str, Any]:
    return {"shape": [], "vocab": _STEPS}


def _classes(config: Mapping[str, Any], _: int | None) -> dict[str, Any]:
    return {"shape": [], "vocab": config.get("num_embeds_ada_norm") or _STEPS}


def _caption(config: Mapping[str, Any], length: int | None) -> dict[str, Any]:
    # Where a caption is projected first, its own width differs from the attention's.
    keys = ("caption_channels", "joint_attention_dim", "cross_attention_dim")
    width = next(config[key] for key in keys if config.get(key))
    return {"shape": [length or _LENGTH, width]}


def _pooled(config: Mapping[str, Any], _: int | None) -> dict[str, Any]:
    return {"shape": [config["pooled_projection_dim"]]}


_CAPTIONED = {
    "hidden_states": _sample,
    "timestep": _timestep,
    "encoder_hidden_states": _caption,
}
# Class to the arguments of its forward.
_ARGUMENTS: dict[str, dict[str, Callable[[Mapping[str, Any], int | None], dict[str, Any]]]] = {
    "UNet2DModel": {"sample": _sample, "timestep": _timestep},
    "UNet2DConditionModel": {
        "sample": _sample,
        "timestep": _timestep,
        "encoder_hidden_states": _caption,
    },
    "DiTTransformer2DModel": {
        "hidden_states": _sample,
        "timestep": _timestep,
        "class_labels": _classes,
    },
    "PixArtTransformer2DModel": _CAPTIONED,
    "SanaTransformer2DModel": _CAPTIONED,
    "SD3Transformer2DModel": {**_CAPTIONED, "pooled_projections": _pooled},
}


def denoiser_fields(
    name: str, config: Mapping[str, Any], length: int | None
) -> dict[str, dict[str, Any]]:
    """Argument of a denoiser's forward to the synthetic field of it.

    Args:
        name: its class.
        config: of the model, complete.
        length: tokens of a caption; None: 64.

    Raises:
        InvalidInputError: how it is called is not known.
    """
    if name not in _ARGUMENTS:
        raise InvalidInputError(
            f"how {name} is called is not known; init knows {', '.join(_ARGUMENTS)}",
            hint="give module:callable that returns the model, and --sample with its inputs",
        )
    # Of SDXL and others: tensors in a dict, or one more argument.
    more = [k for k in ("addition_embed_type", "num_class_embeds") if config.get(k)]
    if more:
        raise InvalidInputError(
            f"{name} with {more[0]} {config[more[0]]!r} takes more than its noisy sample and text",
            hint="wrap it in a module whose forward takes tensors, and give module:callable",
        )
    return {argument: make(config, length) for argument, make in _ARGUMENTS[name].items()}
