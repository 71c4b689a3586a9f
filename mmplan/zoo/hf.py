"""transformers' CLIP as two modules of a workload.

Built from a configuration, never downloaded. ``source_names`` of what the
factories return gives the names in a ``CLIPModel``'s safetensors, so
``init: model.safetensors`` of a saved CLIPModel works for both towers.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmplan.errors import InvalidInputError, UnfitEnvironmentError
from mmplan.zoo.sequential import LayerSequential, Part, from_layers

# transformers has no tp plan of its own for encoders. Its attention takes the
# number of heads from the local width, so plain Megatron-style shards work.
TP_PLAN = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.out_proj": "rowwise",
    "mlp.fc1": "colwise",
    "mlp.fc2": "rowwise",
}


def clip_vision(config: Mapping[str, Any] | None = None) -> LayerSequential:
    """CLIPModel's image tower with its projection, random weights, one layer per block.

    Args:
        config: a ``CLIPConfig`` as a dict, ``vision_config`` and ``projection_dim``
            are used; None is ViT-B/32.

    Returns:
        Takes images [B, channels, height, width], gives features [B, projection_dim],
        not normalised (as ``get_image_features``).

    Raises:
        InvalidInputError: a configuration that transformers refuses.
        UnfitEnvironmentError: transformers is missing or broken.
    """
    sizes = _config(config, "vision_config")
    return from_layers(
        _build("CLIPVisionModelWithProjection", sizes),
        "vision_model.encoder.layers",
        before=_embed_image,
        each=_bidirectional,
        after=_pool_image,
        first=["vision_model.embeddings", "vision_model.pre_layrnorm"],
        last=["vision_model.post_layernorm", "visual_projection"],
        tp_plan=TP_PLAN,
    )


def clip_text(config: Mapping[str, Any] | None = None) -> LayerSequential:
    """CLIPModel's text tower with its projection, random weights, one layer per block.

    Padding comes after the end-of-text token, so the causal mask is all the mask
    that is needed.

    Args:
        config: a ``CLIPConfig`` as a dict, ``text_config`` and ``projection_dim``
            are used; None is the text tower of ViT-B/32.

    Returns:
        Takes token ids [B, T] (int64), gives features [B, projection_dim], not
        normalised (as ``get_text_features``).

    Raises:
        InvalidInputError: a configuration that transformers refuses, or several
            end-of-text ids.
        UnfitEnvironmentError: transformers is missing or broken.
    """
    sizes = _config(config, "text_config")
    end_id = sizes.eos_token_id
    if not isinstance(end_id, int):
        raise InvalidInputError(
            f"clip_text needs one end-of-text id, got eos_token_id {end_id}",
            hint="set text_config.eos_token_id to the id that ends every caption",
        )

    def embed(part: Part, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return part.text_model.embeddings(input_ids=tokens), _end_of_text(tokens, end_id)

    return from_layers(
        _build("CLIPTextModelWithProjection", sizes),
        "text_model.encoder.layers",
        before=embed,
        each=_causal,
        after=_pool_text,
        first=["text_model.embeddings"],
        last=["text_model.final_layer_norm", "text_projection"],
        tp_plan=TP_PLAN,
    )


def _embed_image(part: Part, image: Tensor) -> Tensor:
    return part.vision_model.pre_layrnorm(part.vision_model.embeddings(image))


def _pool_image(part: Part, hidden: Tensor) -> Tensor:
    return part.visual_projection(part.vision_model.post_layernorm(hidden[:, 0]))


def _pool_text(part: Part, hidden: Tensor, end: Tensor) -> Tensor:
    at_end = hidden[torch.arange(len(hidden), device=hidden.device), end]
    return part.text_projection(part.text_model.final_layer_norm(at_end))


def _bidirectional(layer: nn.Module, hidden: Tensor) -> Tensor:
    return layer(hidden, None)


def _causal(layer: nn.Module, hidden: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    return layer(hidden, None, is_causal=True), end


def _end_of_text(tokens: Tensor, end_id: int) -> Tensor:
    """Position of the token that stands for the whole text, [B] int64."""
    # Id 2 in a configuration means the original checkpoints, whose end has the largest id.
    return (tokens if end_id == 2 else (tokens == end_id).int()).argmax(dim=-1)


def _config(config: Mapping[str, Any] | None, tower: str) -> Any:
    """The tower's own configuration, with the projection width of the whole."""
    clip_config = _transformers("CLIPConfig")
    try:
        whole = clip_config(**(config or {}))
    except Exception as error:  # strict dataclasses raise types of their own
        raise InvalidInputError(
            f"transformers refuses this CLIP configuration: {' '.join(str(error).split())}",
            hint="give the content of a CLIPModel's config.json",
        ) from error
    sizes = getattr(whole, tower)
    sizes.projection_dim = whole.projection_dim
    # The eager attention works in float32 inside and needs a mask of its own.
    sizes._attn_implementation = "sdpa"
    return sizes


def _build(name: str, config: Any) -> nn.Module:
    return _transformers(name)(config)


def _transformers(name: str) -> Any:
    """A class of transformers; loads the library on first use."""
    try:
        return getattr(importlib.import_module("transformers"), name)
    except ModuleNotFoundError as error:
        raise UnfitEnvironmentError(
            f"mmplan.zoo.hf needs {error.name}, which is not installed",
            hint='pip install "transformers>=5.0"',
        ) from error
    except (ImportError, RuntimeError) as error:
        raise UnfitEnvironmentError(
            f"transformers is broken here: {str(error).strip().splitlines()[0]}",
            hint="a torchvision of another build than torch does this; pip uninstall torchvision",
        ) from error
