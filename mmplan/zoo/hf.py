"""Models of transformers as modules of a workload: CLIP, SigLIP, and decoders like Llama.

Built from a configuration, never downloaded. ``source_names`` of what the
factories return gives the names in the safetensors of a ``CLIPModel``, a ``SiglipModel``
or a ``...ForCausalLM``, so ``init: model.safetensors`` of a saved one works.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmplan.errors import InvalidInputError
from mmplan.ragged import Ragged, known_lengths
from mmplan.zoo.decoder import (
    Text,
    as_text,
    check_placeholders,
    positions,
    rows_of,
    splice,
)
from mmplan.zoo.parts.hugging_face import (
    ENCODER_RULES,
    checked,
    checked_config,
    each_image,
    owned,
    pooling_heads,
    transformers_class,
)
from mmplan.zoo.parts.ragged_attention import attend_samples
from mmplan.zoo.sequential import TP_RULES, LayerSequential, Part, from_layers

# transformers' mark of a norm of single heads, say, of whose gradient each rank has a part.
_SUMMED = "replicated_with_grad_allreduce"


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
    sizes, whole = _config(config, "vision_config")
    cut = from_layers(
        transformers_class("CLIPVisionModelWithProjection")(sizes),
        "vision_model.encoder.layers",
        before=lambda part, image: part.vision_model.pre_layrnorm(
            part.vision_model.embeddings(image)
        ),
        each=lambda layer, hidden: layer(hidden, None),
        after=lambda part, hidden: part.visual_projection(
            part.vision_model.post_layernorm(hidden[:, 0])
        ),
        first=["vision_model.embeddings", "vision_model.pre_layrnorm"],
        last=["vision_model.post_layernorm", "visual_projection"],
        tp_plan=ENCODER_RULES,
    )
    cut.configuration = whole
    return cut


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
    sizes, whole = _config(config, "text_config")
    end_id = sizes.eos_token_id
    if not isinstance(end_id, int):
        raise InvalidInputError(
            f"clip_text needs one end-of-text id, got eos_token_id {end_id}",
            hint="set text_config.eos_token_id to the id that ends every caption",
        )

    def embed(part: Part, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return part.text_model.embeddings(input_ids=tokens), _end_of_text(tokens, end_id)

    def pool(part: Part, hidden: Tensor, end: Tensor) -> Tensor:
        at_end = hidden[torch.arange(len(hidden), device=hidden.device), end]
        return part.text_projection(part.text_model.final_layer_norm(at_end))

    cut = from_layers(
        transformers_class("CLIPTextModelWithProjection")(sizes),
        "text_model.encoder.layers",
        before=embed,
        each=lambda layer, hidden, end: (layer(hidden, None, is_causal=True), end),
        after=pool,
        first=["text_model.embeddings"],
        last=["text_model.final_layer_norm", "text_projection"],
        tp_plan=ENCODER_RULES,
    )
    cut.configuration = whole
    return cut


def siglip_vision(
    config: Mapping[str, Any] | None = None, *, pooled: bool = False
) -> LayerSequential:
    """SiglipModel's image tower, random weights, one layer per block.

    Args:
        config: a ``SiglipConfig`` as a dict, ``vision_config`` is used; None is
            base-patch16-224.
        pooled: whether one vector of an image comes out, by the model's attention pooling,
            as contrastive losses take it beside :func:`siglip_text`; else one of each
            patch, for a language model.

    Returns:
        Takes images [N, channels, height, width], gives features [N, patches, width], or
        [N, width]; images may be ragged (several or none per sample), features then are.

    Raises:
        InvalidInputError: a configuration that transformers refuses, or one whose images
            have sizes of their own (``model_type: siglip2``).
        UnfitEnvironmentError: transformers is missing or broken.
    """
    if (config or {}).get("model_type") == "siglip2":
        raise InvalidInputError(
            "siglip_vision takes images of one size, those of model_type siglip2 have their own",
            hint="take mmplan.zoo.siglip2:siglip2_vision, or a SigLIP 2 of one size, whose "
            "model_type is siglip",
        )
    # The whole configuration would warn of a text tower that nobody asked for.
    given = (config or {}).get("vision_config") or {}
    sizes = checked_config("SiglipVisionConfig", given)
    sizes.vision_use_head = pooled
    sizes._attn_implementation = "sdpa"

    def readout(part: Part, images: Tensor | Ragged) -> Any:
        def run(hidden: Tensor) -> Tensor:
            hidden = part.post_layernorm(hidden)
            return _pool(part.head, hidden) if pooled else hidden

        return each_image(run, images)

    cut = from_layers(
        transformers_class("SiglipVisionModel")(sizes),
        "encoder.layers",
        before=lambda part, images: each_image(part.embeddings, images),
        each=lambda layer, images: each_image(lambda hidden: layer(hidden, None), images),
        after=readout,
        first=["embeddings"],
        last=["post_layernorm", *(["head"] if pooled else [])],
        tp_plan=ENCODER_RULES,
    )
    cut.source_names = {k: f"vision_model.{name}" for k, name in cut.source_names.items()}
    if pooled and (config is None or "text_config" in config):
        cut.configuration = _siglip_config(config)[1]
    return cut


def siglip_text(config: Mapping[str, Any] | None = None) -> LayerSequential:
    """SiglipModel's text tower with its pooled head, SigLIP 2's too, one layer per block.

    Every token attends to every other one, padding too: texts are padded to one length, as
    the model was trained.

    Args:
        config: a ``SiglipConfig`` as a dict, ``text_config`` is used; None is
            base-patch16-224.

    Returns:
        Takes token ids [B, T] (int64), gives features [B, projection_size], not normalised
        (as ``get_text_features``).

    Raises:
        InvalidInputError: a configuration that transformers refuses.
        UnfitEnvironmentError: transformers is missing or broken.
    """
    sizes, whole = _siglip_config(config)
    cut = from_layers(
        transformers_class(whole["architectures"][0].replace("Model", "TextModel"))(sizes),
        "encoder.layers",
        before=lambda part, tokens: part.embeddings(tokens),
        each=lambda layer, hidden: layer(hidden, None),
        after=lambda part, hidden: part.head(part.final_layer_norm(hidden[:, -1])),
        first=["embeddings"],
        last=["final_layer_norm", "head"],
        tp_plan=ENCODER_RULES,
    )
    cut.source_names = {k: f"text_model.{name}" for k, name in cut.source_names.items()}
    cut.configuration = whole
    return cut


def _siglip_config(config: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """The text tower's own configuration; the whole's file."""
    kind = "Siglip2" if (config or {}).get("model_type") == "siglip2" else "Siglip"
    whole = checked_config(f"{kind}Config", config)
    written = {**json.loads(whole.to_json_string()), "architectures": [f"{kind}Model"]}
    sizes = whole.text_config
    sizes._attn_implementation = "sdpa"
    return sizes, written


def causal_lm(
    config: Mapping[str, Any],
    *,
    placeholders: Sequence[int] = (),
    hidden: bool = False,
    packed: bool = False,
) -> LayerSequential:
    """A decoder of Llama's kind (llama, qwen2, qwen3, mistral, ...) or OPT, one layer per block.

    Rules for tensor parallelism are read from its configuration's ``base_model_tp_plan``.
    Embedding and logits are cut along the vocabulary, tied ones alike.

    Args:
        config: its config.json as a dict; ``model_type`` says which model.
        placeholders: token ids whose places the features of inputs 1, 2, ... take; see
            :class:`mmplan.zoo.decoder.Splice`.
        hidden: whether the output is (logits, normalised activations), not logits alone.
        packed: whether a sample is several texts, whose lengths (ragged int64) are input 1;
            placeholders are for the inputs after it.

    Returns:
        Takes token ids [B, T] (padded at their end), or ragged (each sample a text of its own
        length, see :mod:`mmplan.zoo.decoder`), and features, gives logits [B, T, vocab], or
        ragged with values [tokens, vocab].

    Raises:
        InvalidInputError: a configuration that transformers refuses, a model of another
            kind, or one with sliding windows.
        UnfitEnvironmentError: transformers is missing or broken.
    """
    sizes = _decoder_config(config)
    auto = transformers_class("AutoModelForCausalLM")
    model = checked(f"{sizes.model_type} as a decoder", lambda: auto.from_config(sizes))
    return cut_decoder(
        model, "model", "lm_head", placeholders=placeholders, hidden=hidden, packed=packed
    )


def cut_decoder(
    model: Any,
    name: str,
    head: str,
    *,
    placeholders: Sequence[int] = (),
    hidden: bool = False,
    packed: bool = False,
    places: Callable[[Text, Any], Text] | None = None,
    ignore: Sequence[str] = (),
) -> LayerSequential:
    """Cut the decoder that a model of transformers has, as :func:`causal_lm` does.

    Args:
        model: has it.
        name: where the model has the decoder, without the layer that gives logits.
        head: where it has that layer.
        placeholders: see :func:`causal_lm`; ``hidden`` and ``packed`` too.
        places: from tokens and the module's last input to positions of tokens, [B, T, axes] or
            ragged, for rotary modules of several axes; None: the place of a token in its text.
        ignore: names of the model's other parts.

    Raises:
        InvalidInputError: a decoder that is not built as Llama's or OPT's.
    """
    name, inner = _decoder_in(model, name)
    sizes = inner.config
    _check_windows(sizes)
    check_placeholders(placeholders, sizes.vocab_size)
    no_ragged = _why_no_ragged(inner)
    turns = hasattr(inner, "rotary_emb")
    kind = register_rotary(sizes, type(inner.rotary_emb)) if turns else ""
    for part in inner.layers if turns else ():
        # Here all rows are together; around it a rank may have some of them alone.
        part.self_attn.register_forward_pre_hook(partial(_with_angles, kind), with_kwargs=True)

    def embed(part: Part, tokens: Text, *others: Any) -> tuple[Any, ...]:
        if isinstance(tokens, Ragged) and no_ragged is not None:
            raise InvalidInputError(
                f"ragged text does not go through this {sizes.model_type}: {no_ragged}",
                hint="pad the text to one length",
            )
        own, texts = owned(part, name), others[:packed]
        features = others[packed:] if places is None else others[packed:-1]
        at = () if places is None else (places(tokens, others[-1]),)
        x = splice(own.embed_tokens, tokens, features, placeholders)
        return x if turns else _with_positions(own, x, *texts), *texts, *at

    def layer(module: nn.Module, x: Text, *others: Any) -> tuple[Any, ...]:
        texts, at = others[:packed], others[packed:]
        rows, lengths = rows_of(x, *texts)
        # All of them, [axes, B, T], though a rank may have some of the rows.
        place = rows_of(at[0])[0].movedim(-1, 0) if at else None
        # A rank of a tensor-parallel group may have none of the rows that there are.
        count = rows.shape[1] or sum(known_lengths(x.lengths) or ()) if isinstance(x, Ragged) else 1
        if not count and lengths is not None:
            # Layers reshape to sizes that they infer, which an empty tensor does not allow.
            rows, lengths = functional.pad(rows, (0, 0, 0, 1)), lengths.new_ones(1)
            place = None if place is None else functional.pad(place, (0, 1))
        if not turns:
            rows = _opt_layer(module, rows, lengths)
        elif place is None:
            rows = module(rows, attention_mask=lengths)
        else:
            angles = rotary_angles(rows, place, kind)
            rows = module(rows, attention_mask=lengths, position_embeddings=angles)
        return as_text(x, rows if count else rows[:, :0]), *others

    def readout(part: Part, x: Text, *_: Any) -> Any:
        own, rows = owned(part, name), rows_of(x)[0]
        for step in behind:
            rows = getattr(own, step)(rows)
        logits = as_text(x, owned(part, head)(rows))
        return (logits, as_text(x, rows)) if hidden else logits

    ahead, behind = (
        [step for step in steps if getattr(inner, step, None) is not None]
        for steps in (("embed_tokens", "project_in", "embed_positions"), _NORMS)
    )
    return from_layers(
        model,
        f"{name}.layers",
        before=embed,
        each=layer,
        after=readout,
        first=[f"{name}.{step}" for step in ahead],
        last=[*(f"{name}.{step}" for step in behind), head],
        tp_plan=_layer_rules(sizes) if turns else _OPT_RULES,
        vocab=_vocabulary(model, f"{name}.embed_tokens", head),
        ignore=ignore,
    )


def _vocabulary(model: Any, *names: str) -> list[str]:
    """The layers among these that run torch's own forward, which may be cut."""
    plain = nn.Embedding.forward, nn.Linear.forward
    return [name for name in names if type(owned(model, name)).forward in plain]


_OPT_RULES = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.out_proj": "rowwise",
    "fc1": "colwise",
    "fc2": "rowwise",
}


def _opt_layer(layer: Any, x_BTW: Tensor, lengths: Tensor | None) -> Tensor:
    """OPT's layer, with as many heads as its Linears have."""
    is_before, attention = layer.do_layer_norm_before, layer.self_attn
    drop = partial(functional.dropout, p=layer.dropout, training=layer.training)
    rows = layer.self_attn_layer_norm(x_BTW) if is_before else x_BTW
    query, key, value = (
        project(rows).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    dropout = attention.dropout if layer.training else 0.0
    mixed, _ = _attention(
        *(attention, query, key, value, lengths), dropout=dropout, scaling=attention.scaling
    )
    x_BTW = x_BTW + drop(attention.out_proj(mixed.flatten(2)))
    x_BTW = x_BTW if is_before else layer.self_attn_layer_norm(x_BTW)
    rows = layer.final_layer_norm(x_BTW) if is_before else x_BTW
    x_BTW = x_BTW + drop(layer.fc2(layer.activation_fn(layer.fc1(rows))))
    return x_BTW if is_before else layer.final_layer_norm(x_BTW)


# Behind the layers: Llama's norm, OPT's norm and its projection to the width of embeddings.
_NORMS = ("norm", "final_layer_norm", "project_out")


def _with_positions(own: Any, x: Text, *texts: Ragged) -> Text:
    """OPT's activations of the embedded tokens, with learned positions."""
    rows, lengths = rows_of(x, *texts)
    places = positions(rows, lengths)[None]
    project = getattr(own, "project_in", None)
    rows = rows if project is None else project(rows)
    return as_text(x, rows + own.embed_positions(places, position_ids=places))


def _with_angles(
    kind: str, _: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give an attention the rotary angles of its rows; its mask is the lengths of texts."""
    if given.get("position_embeddings") is not None:
        # The model itself runs its layers, or positions are not places in a text.
        return None
    rows = args[0] if args else given["hidden_states"]
    place = positions(rows, given["attention_mask"])
    return args, {**given, "position_embeddings": rotary_angles(rows, place[None], kind)}


def register_rotary(sizes: Any, made: Callable[[Any], nn.Module]) -> str:
    """A key for :func:`rotary_angles`, of a configuration and its rotary module's class."""
    # By content, so that alike layers share what was compiled.
    kind = f"{sizes.model_type} {sizes.to_json_string()}"
    _ROTARIES[kind] = partial(made, sizes)
    return kind


def rotary_angles(x: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions, as a model's rotary module gives them for activations."""
    return torch.ops.mmplan.rotary(x.detach(), positions, kind)


_ROTARIES: dict[str, Callable[[], nn.Module]] = {}


def _rotary(x: Tensor, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines for activations; shapes are the registered module's."""
    # Made anew: a buffer outside the blocks would not move or be filled with them.
    with torch.device(x.device):
        return _ROTARIES[kind]()(x, positions)


# One operator for compilers, which cannot look into it: it makes a module.
torch.library.define("mmplan::rotary", "(Tensor x, Tensor positions, str kind) -> (Tensor, Tensor)")
torch.library.impl("mmplan::rotary", "CompositeExplicitAutograd", _rotary)
torch.library.register_fake("mmplan::rotary", _rotary)

# The name in transformers' registry of attention functions.
_ATTENTION = "mmplan_samples"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; a mask of one dim is the lengths of texts.

    They come in the mask's place because every layer hands that on.
    """
    scale, causal = options.get("scaling"), getattr(module, "is_causal", True)
    if attention_mask is None:
        mixed = functional.scaled_dot_product_attention(
            *(query, key, value),
            dropout_p=options.get("dropout", 0.0),
            is_causal=causal,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    else:
        mixed = attend_samples(query, key, value, attention_mask, scale=scale, causal=causal)
    return mixed.transpose(1, 2), None


def _why_no_ragged(model: Any) -> str | None:
    """Why a decoder cannot take texts of several lengths; None if it can.

    One that can uses :func:`_attention` from now on.
    """
    sizes = model.config
    rope: Mapping[str, Any] = getattr(sizes, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return "its rotary angles depend on the longest text of a micro-batch"
    if getattr(sizes, "attention_dropout", 0.0):
        return f"it has attention_dropout {sizes.attention_dropout}"
    causal = all(getattr(module, "is_causal", True) for module in model.modules())
    softcap = getattr(sizes, "attn_logit_softcapping", None)
    if softcap or not causal or not model._supports_attention_backend:
        return "its attention is of a kind of its own"
    attend_by_lengths(sizes)
    return None


def attend_by_lengths(sizes: Any) -> None:
    """Let the layers of a configuration use :func:`_attention` from now on."""
    transformers_class("AttentionInterface").register(_ATTENTION, _attention)
    sizes._attn_implementation = _ATTENTION


def _layer_rules(config: Any) -> dict[str, str]:
    """Rules inside a layer, of those parts of it whose rules are all ours."""
    prefix = "layers.*."
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    rules = {k.removeprefix(prefix): rule for k, rule in plan.items() if k.startswith(prefix)}
    # Such a parameter needs no rule: that its gradient must be summed is found by itself.
    rules = {name: rule for name, rule in rules.items() if rule != _SUMMED}
    unknown = {name.partition(".")[0] for name, rule in rules.items() if rule not in TP_RULES}
    return {name: rule for name, rule in rules.items() if name.partition(".")[0] not in unknown}


def _decoder_config(config: Mapping[str, Any]) -> Any:
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise InvalidInputError(
            "causal_lm's config has no model_type", hint="give the content of a config.json"
        )
    given = {key: value for key, value in config.items() if key != "model_type"}
    auto = transformers_class("AutoConfig").for_model
    sizes = checked(f"{kind} configuration", lambda: auto(kind, **given))
    sizes._attn_implementation = "sdpa"
    return sizes


def _check_windows(sizes: Any) -> None:
    kind = sizes.model_type
    windows = {t for t in getattr(sizes, "layer_types", None) or () if t != "full_attention"}
    if windows or (kind == "mistral" and sizes.sliding_window is not None):
        raise InvalidInputError(
            f"this {kind} attends in windows ({', '.join(sorted(windows)) or 'sliding_window'}), "
            "which causal_lm does not",
            hint="set sliding_window: null (and use_sliding_window: false)",
        )


def _decoder_in(model: Any, name: str) -> tuple[str, Any]:
    """Where a model has embedding and layers, which are OPT's or as Llama's, and these."""
    inner = dict(model.named_modules()).get(name, model)
    if hasattr(inner, "decoder"):
        name, inner = f"{name}.decoder", inner.decoder
    of_opt = hasattr(inner, "embed_positions") and inner.config.model_type == "opt"
    rest = ("embed_positions",) if of_opt else ("norm", "rotary_emb")
    missing = [item for item in ("embed_tokens", "layers", *rest) if not hasattr(inner, item)]
    if missing:
        raise InvalidInputError(
            f"{type(inner).__name__} is not built as Llama is: it has no {', '.join(missing)}",
            hint="cut it with mmplan.zoo.sequential:from_layers in a factory of your own",
        )
    return name, inner


def _pool(head: Any, hidden: Tensor) -> Tensor:
    """SigLIP's attention pooling, [N, patches, width] to [N, width]."""
    query, key, value = pooling_heads(head, hidden)
    # One query for all images: over its [heads, width / heads] a sum is enough.
    weights = ((query * key).sum(-1) / query.shape[-1] ** 0.5).softmax(1)
    pooled = head.attention.out_proj((weights.unsqueeze(-1) * value).sum(1).flatten(1))
    return pooled + head.mlp(head.layernorm(pooled))


def _end_of_text(tokens: Tensor, end_id: int) -> Tensor:
    """Position of the token that stands for the whole text, [B] int64."""
    # Id 2 in a configuration means the original checkpoints, whose end has the largest id.
    return (tokens if end_id == 2 else (tokens == end_id).int()).argmax(dim=-1)


def _config(config: Mapping[str, Any] | None, tower: str) -> tuple[Any, dict[str, Any]]:
    """The tower's own configuration, with the projection width of the whole; the whole's file."""
    whole = checked_config("CLIPConfig", config)
    sizes = getattr(whole, tower)
    written = {**json.loads(whole.to_json_string()), "architectures": ["CLIPModel"]}
    sizes.projection_dim = whole.projection_dim
    # The eager attention works in float32 inside and needs a mask of its own.
    sizes._attn_implementation = "sdpa"
    return sizes, written
