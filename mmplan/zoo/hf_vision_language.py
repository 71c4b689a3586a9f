"""Vision-language models of transformers in their parts: image tower, Q-Former, language model.

The features of a sample's images take the places of the image token in its text. Each factory takes
the whole model's configuration, starts from its whole file (``init:``) and is exported with the
others as that model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmplan.errors import InvalidInputError
from mmplan.zoo.automatic.pretrained import architecture, build_pretrained
from mmplan.zoo.encoder import Images
from mmplan.zoo.hf import cut_decoder
from mmplan.zoo.parts.hugging_face import ENCODER_RULES, each_image, owned
from mmplan.zoo.sequential import LayerSequential, Part, TPPlan, from_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartNames:
    """Where a class has its parts; dotted names.

    Attributes:
        tower: of images.
        between: what makes rows for the language model of the tower's.
        is_normed: whether the tower's last norm takes part.
        decoder: without the layer that gives logits.
        head: that layer.
    """

    tower: str
    between: tuple[str, ...]
    is_normed: bool
    decoder: str
    head: str = "lm_head"

    @property
    def language(self) -> tuple[str, ...]:
        """All of the language model."""
        return self.decoder, self.head


_IDEFICS3 = _PartNames(
    tower="model.vision_model",
    between=("model.connector",),
    is_normed=True,
    decoder="model.text_model",
)
_LAYOUTS = {
    "LlavaForConditionalGeneration": _PartNames(
        tower="model.vision_tower",
        between=("model.multi_modal_projector",),
        is_normed=False,
        decoder="model.language_model",
    ),
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
    "Blip2ForConditionalGeneration": _PartNames(
        tower="vision_model",
        between=("query_tokens", "qformer", "language_projection"),
        is_normed=True,
        decoder="language_model.model",
        head="language_model.lm_head",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tower:
    """An image tower of transformers.

    Attributes:
        first: what ``embed`` uses of it.
        embed: images [N, channels, height, width] to activations [N, patches, width].
        layer: runs a layer.
        rules: of a layer, for tensor parallelism.
    """

    embed: Callable[[Any, Tensor], Tensor]
    first: tuple[str, ...] = ("embeddings",)
    layer: Callable[[Any, Tensor], Tensor] = lambda layer, hidden: layer(hidden, None)
    rules: TPPlan


def _with_positions(tower: Any, images: Tensor) -> Tensor:
    """Idefics 3's embedding, of images without padding."""
    rows, columns = (side // tower.embeddings.patch_size for side in images.shape[-2:])
    mask = torch.ones((len(images), rows, columns), dtype=torch.bool, device=images.device)
    return tower.embeddings(images, mask)


def _fused_layer(layer: Any, hidden: Tensor) -> Tensor:
    """BLIP-2's layer, with as many heads as its Linears have."""
    attention = layer.self_attn
    fused = attention.qkv(layer.layer_norm1(hidden)).unflatten(-1, (3, -1, attention.head_dim))
    query, key, value = fused.permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(
        *(query, key, value),
        dropout_p=attention.attention_dropout if layer.training else 0.0,
        scale=attention.scale,
    )
    hidden = hidden + attention.projection(mixed.transpose(1, 2).flatten(2))
    return hidden + layer.mlp(layer.layer_norm2(hidden))


def _fused_rules(layer: nn.Module) -> Mapping[str, str]:
    qkv: Any = layer.get_submodule("self_attn.qkv")
    qkv.packed_parts = 3
    return {
        "self_attn.qkv": "packed_colwise",
        "self_attn.projection": "rowwise",
        "mlp.fc1": "colwise",
        "mlp.fc2": "rowwise",
    }


_PATCHES = _Tower(embed=_with_positions, rules=ENCODER_RULES)
_TOWERS = {
    "clip_vision_model": _Tower(
        first=("embeddings", "pre_layrnorm"),
        embed=lambda tower, images: tower.pre_layrnorm(tower.embeddings(images)),
        rules=ENCODER_RULES,
    ),
    "siglip_vision_model": _Tower(
        embed=lambda tower, images: tower.embeddings(images), rules=ENCODER_RULES
    ),
    "idefics3_vision": _PATCHES,
    "smolvlm_vision": _PATCHES,
    "blip_2_vision_model": _Tower(
        embed=lambda tower, images: tower.embeddings(images),
        layer=_fused_layer,
        rules=_fused_rules,
    ),
}


def image_tower(config: Mapping[str, Any]) -> LayerSequential:
    """A vision-language model's image tower, one layer per block.

    The model's projector is in the last block; BLIP-2's is in :func:`query_former`. Layers that
    give no features (LLaVA's ``vision_feature_layer``) stay in the last block, frozen.

    Args:
        config: the whole model's config.json as a dict: LLaVA, Idefics 3, SmolVLM, BLIP-2.

    Returns:
        Takes images [B, channels, height, width], [B, N, channels, height, width] or ragged, none
        of them padding, gives features [B, rows, width], [B, N, rows, width] or ragged.

    Raises:
        InvalidInputError: a configuration that transformers refuses, or another model.
        UnfitEnvironmentError: transformers is missing or broken.
    """
    model, layout = _whole(config)
    name, tower = layout.tower, model.get_submodule(layout.tower)
    how = _TOWERS.get(tower.config.model_type)
    if how is None:
        raise InvalidInputError(
            f"the image tower is a {tower.config.model_type}, which image_tower does not cut",
            hint=f"it cuts {', '.join(_TOWERS)}; cut others with mmplan.zoo.sequential:from_layers",
        )
    norm = ("post_layernorm",) if layout.is_normed else ()
    has_queries = "qformer" in layout.between
    projector = None if has_queries else layout.between[0]
    rest = [n for n, _ in tower.named_children() if n not in (*how.first, *norm, "encoder")]
    layers = range(_depth(model, len(tower.encoder.layers)), len(tower.encoder.layers))
    # LLaVA's features without the first row, CLIP's class token.
    begin = 1 if getattr(model.config, "vision_feature_select_strategy", "") == "default" else 0

    def features(part: Part, hidden: Images) -> Images:
        def run(rows: Tensor) -> Tensor:
            rows = owned(part, name).post_layernorm(rows) if norm else rows
            return rows if projector is None else owned(part, projector)(rows[:, begin:])

        return each_image(_stacked(run, 2), hidden)

    return from_layers(
        model,
        f"{name}.encoder.layers",
        before=lambda part, images: each_image(
            _stacked(lambda values: how.embed(owned(part, name), values), 3), images
        ),
        each=lambda layer, hidden: each_image(
            _stacked(lambda rows: how.layer(layer, rows), 2), hidden
        ),
        after=features,
        first=[f"{name}.{item}" for item in how.first],
        last=[*(f"{name}.{item}" for item in norm), *([projector] if projector else [])],
        tp_plan=how.rules,
        ignore=[*layout.language, *(layout.between if has_queries else ())],
        unused=[f"{name}.{item}" for item in [*rest, *(f"encoder.layers.{i}" for i in layers)]],
    )


def query_former(config: Mapping[str, Any]) -> LayerSequential:
    """BLIP-2's Q-Former with its queries and projection, one layer per block.

    Args:
        config: a ``Blip2ForConditionalGeneration``'s config.json as a dict.

    Returns:
        Takes features of images as :func:`image_tower` gives them, gives rows of the language
        model's width, as many of an image as the model has queries.

    Raises:
        InvalidInputError: a configuration that transformers refuses, or another model.
        UnfitEnvironmentError: transformers is missing or broken.
    """
    model, layout = _whole(config)
    if "qformer" not in layout.between:
        raise InvalidInputError(
            f"{type(model).__name__} has no Q-Former",
            hint="take image_tower's features as they are",
        )
    count = model.config.num_query_tokens

    def ask(part: Part, features: Images) -> tuple[Images, Images]:
        def run(rows: Tensor) -> Tensor:
            queries = part.query_tokens.expand(len(rows), -1, -1)
            return part.qformer.dropout(part.qformer.layernorm(queries))

        return each_image(_stacked(run, 2), features), features

    def layer(module: nn.Module, queries: Images, features: Images) -> tuple[Images, Images]:
        def run(own: Tensor, rows: Tensor) -> Tensor:
            return module(own, None, rows, None, query_length=count)

        return each_image(_stacked(run, 2), queries, features), features

    return from_layers(
        model,
        "qformer.encoder.layer",
        before=ask,
        each=layer,
        after=lambda part, queries, features: each_image(part.language_projection, queries),
        first=["query_tokens", "qformer.layernorm", "qformer.dropout"],
        last=["language_projection"],
        tp_plan=_query_rules,
        ignore=[layout.tower, *layout.language],
    )


def image_lm(config: Mapping[str, Any]) -> LayerSequential:
    """A vision-language model's language model, one layer per block.

    Args:
        config: the whole model's config.json as a dict; see :func:`image_tower`. The language model
            is one that :func:`mmplan.zoo.hf.causal_lm` takes.

    Returns:
        Takes token ids [B, T] (padded at their end) or ragged, and the features that take the
        places of the image token, gives logits [B, T, vocab] or ragged.

    Raises:
        InvalidInputError: a configuration that transformers refuses, or another model.
        UnfitEnvironmentError: transformers is missing or broken.
    """
    model, layout = _whole(config)
    return cut_decoder(
        model,
        layout.decoder,
        layout.head,
        placeholders=[model.config.image_token_id],
        ignore=[layout.tower, *layout.between],
    )


def _whole(config: Mapping[str, Any]) -> tuple[Any, _PartNames]:
    """The whole model, and where its parts are."""
    name = architecture(config)
    if name not in _LAYOUTS:
        raise InvalidInputError(
            f"{name} is no vision-language model that is cut into parts here",
            hint=f"these are: {', '.join(_LAYOUTS)}",
        )
    model: Any = build_pretrained(config)
    sizes = model.config
    if sizes.text_config.is_encoder_decoder:
        raise InvalidInputError(
            f"{name}: its language model is a {sizes.text_config.model_type}, an encoder and a "
            "decoder",
            hint="take one whose language model is a decoder alone (OPT)",
        )
    if sizes.image_token_id is None:
        raise InvalidInputError(
            f"{name}: config.json has no image_token_index",
            hint="add the id of the token whose places the features of an image take",
        )
    return model, _LAYOUTS[name]


def _depth(model: Any, layers: int) -> int:
    """How many layers give the features."""
    chosen = getattr(model.config, "vision_feature_layer", layers)
    depth = chosen if not isinstance(chosen, int) or chosen >= 0 else layers + 1 + chosen
    if not isinstance(depth, int) or not 1 <= depth <= layers:
        raise InvalidInputError(
            f"vision_feature_layer {chosen}: features come from one of {layers} layers here",
            hint="choose one layer, by its number from 1 or from the end (-1)",
        )
    return depth


def _stacked(run: Callable[..., Tensor], dims: int) -> Callable[..., Tensor]:
    """``run`` of tensors whose last ``dims`` dimensions are one image's, for any before them."""

    def each(*values: Tensor) -> Tensor:
        lead = values[0].shape[:-dims]
        return run(*(x.flatten(0, len(lead) - 1) for x in values)).unflatten(0, lead)

    return each


def _query_rules(layer: nn.Module) -> Mapping[str, str]:
    attentions = [n for n in ("attention", "crossattention") if hasattr(layer, n)]
    rules = {f"{n}.attention.{x}": "colwise" for n in attentions for x in ("query", "key", "value")}
    rules |= {f"{n}.output.dense": "rowwise" for n in attentions}
    return rules | {"intermediate_query.dense": "colwise", "output_query.dense": "rowwise"}
