"""Models of transformers and diffusers from a config.json, and what training them takes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import nn

from mmplan.errors import InvalidInputError, UnfitEnvironmentError
from mmplan.zoo.automatic.denoisers import denoiser_fields
from mmplan.zoo.automatic.experts import allow_any_type
from mmplan.zoo.parts.hugging_face import checked, transformers_class

# Tokens of a synthetic text, where the model takes that many. Short, so that a trial is quick.
_LENGTH = 64
# Of models of images of any size, and samples of a wave of any length: a second at 16 kHz.
_IMAGE = 224
_WAVE = 16_000
_TEXT = "token_cross_entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedRecipe:
    """How a model is called and trained.

    Attributes:
        inputs: argument of its forward to the synthetic field of it.
        output: attribute of what forward returns.
        options: other arguments of forward.
        loss: of mmplan.zoo.losses; ``loss_args`` for it.
        target: the field that the loss compares with; None: noise of the output's shape.
    """

    inputs: dict[str, dict[str, Any]]
    output: str
    loss: str
    target: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=lambda: {})
    loss_args: dict[str, Any] = field(default_factory=lambda: {})


def read_config(source: Path) -> dict[str, Any]:
    """The content of a config.json.

    Raises:
        InvalidInputError: no such file, or it names no model.
    """
    file = source / "config.json" if source.is_dir() else source
    try:
        config: Any = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"{file}: {getattr(error, 'strerror', None) or error}",
            hint="SOURCE is a folder with config.json, such a file, or module:callable",
        ) from error
    if not isinstance(config, dict) or not {"model_type", "_class_name"}.intersection(
        cast("dict[str, Any]", config)
    ):
        raise InvalidInputError(
            f"{file} has no model_type (transformers) and no _class_name (diffusers)",
            hint="give the config.json of a model, not of a tokenizer or a pipeline",
        )
    return cast("dict[str, Any]", config)


def build_pretrained(config: Mapping[str, Any] | Path) -> nn.Module:
    """The model of a config.json with random weights; nothing is downloaded.

    Raises:
        InvalidInputError: the library refuses the configuration.
        UnfitEnvironmentError: the library is missing or broken.
    """
    config = read_config(config) if isinstance(config, Path) else config
    if "_class_name" in config:
        return _diffusers(config)
    kind = str(config["model_type"])
    sizes = checked(
        f"{kind} configuration",
        lambda: transformers_class("AutoConfig").for_model(
            kind, **{key: value for key, value in config.items() if key != "model_type"}
        ),
    )
    made = transformers_class(architecture(config))
    allow_any_type()
    sizes._attn_implementation = "sdpa" if getattr(made, "_supports_sdpa", False) else "eager"
    return checked(f"{kind} model", lambda: made(sizes))


def architecture(config: Mapping[str, Any]) -> str:
    """The class that a configuration is of; the headless model's where it does not say."""
    if "_class_name" in config:
        return str(config["_class_name"])
    named = config.get("architectures")
    if named:
        return str(named[0])
    auto = transformers_class("AutoConfig").for_model(config["model_type"])
    for head in ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION", ""):
        names = "MODEL_FOR_" + head + "_MAPPING" if head else "MODEL_MAPPING"
        mapping = transformers_class(names)
        if type(auto) in mapping:
            return str(mapping[type(auto)].__name__)
    raise InvalidInputError(
        f"the configuration of a {config['model_type']} names no architectures",
        hint='add "architectures": ["ClassOfTheModel"] to config.json',
    )


def recipe(config: Mapping[str, Any], model: nn.Module, length: int | None) -> PretrainedRecipe:
    """How to call and train a model, by its class.

    Args:
        config: of the model.
        model: built of it.
        length: tokens of a text; None: 64, or what the model takes.

    Raises:
        InvalidInputError: its kind is none that is known.
    """
    if "_class_name" in config:
        # From noisy samples and their time to what was added.
        fields = denoiser_fields(architecture(config), cast(Any, model).config, length)
        return PretrainedRecipe(inputs=fields, output="sample", loss="mse")
    name, sizes = architecture(config), cast(Any, model.config)
    inputs = _inputs(name, model, length)
    arguments = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in arguments else {}

    def of(output: str, loss: str, target: Any = None, **loss_args: Any) -> PretrainedRecipe:
        return PretrainedRecipe(
            inputs=inputs,
            output=output,
            options=options,
            loss=loss,
            loss_args=loss_args,
            target=target,
        )

    text = inputs.get("decoder_input_ids") or inputs.get("input_ids")
    if name.endswith(("ImageClassification", "AudioClassification", "SequenceClassification")):
        return of("logits", "cross_entropy", {"shape": [], "vocab": sizes.num_labels})
    if text is None or not name.endswith(_WITH_LOGITS):
        return of("last_hidden_state", "mse")
    if "TokenClassification" in name:
        text = {**text, "vocab": sizes.num_labels}
    shift = name.endswith(("ForCausalLM", "LMHeadModel")) or "rows" in text
    # Placeholders of audio are no words to learn.
    ignored = {"ignored": sum(text["rows"].values())} if "rows" in text else {}
    target = {"shape": text["shape"], "vocab": text["vocab"]} | ignored
    return of("logits", _TEXT, target, **({} if shift else {"shift": False}))


# Endings of the classes whose output has scores for each token.
_WITH_LOGITS = (
    "ForCausalLM",
    "LMHeadModel",
    "ForMaskedLM",
    "ForTokenClassification",
    "ForConditionalGeneration",
)


def _inputs(name: str, model: nn.Module, length: int | None) -> dict[str, dict[str, Any]]:
    """Arguments of forward to synthetic fields, by what the model takes first."""
    sizes, first = cast(Any, model.config), str(getattr(model, "main_input_name", ""))
    text = (
        {"decoder_input_ids": text_field(name, sizes, length)} if sizes.is_encoder_decoder else {}
    )
    if first == "input_ids" and isinstance(getattr(sizes, "vocab_size", None), int):
        return {first: text_field(name, sizes, length), **text}
    if first == "pixel_values":
        size = getattr(sizes, "image_size", _IMAGE)
        height, width = (size, size) if isinstance(size, int) else size
        return {first: {"shape": [getattr(sizes, "num_channels", 3), height, width]}}
    if first == "input_features" and hasattr(sizes, "max_source_positions"):
        return {first: _spectrum(sizes), **text}
    if first == "input_values" and hasattr(sizes, "max_length"):
        return {first: {"shape": [sizes.max_length, sizes.num_mel_bins]}}
    if first == "input_values" and hasattr(sizes, "conv_stride"):
        return {first: {"shape": [length or _WAVE]}}
    audio = getattr(sizes, "audio_config", None)
    arguments = inspect.signature(model.forward).parameters
    if first == "input_ids" and "feature_attention_mask" in arguments:
        raise InvalidInputError(
            f"{name} takes audio of several lengths, and selects its frames by their values, which "
            "no trace can follow",
            hint="cut it with mmplan.zoo.sequential:from_layers, see docs/your-own-model.md; "
            "Voxtral's and Whisper's kinds, of one length, are cut by themselves",
        )
    if first == "input_ids" and hasattr(audio, "max_source_positions"):
        return _speech_and_text(name, sizes, length)
    if hasattr(sizes, "vision_config"):
        raise InvalidInputError(
            f"mmplan init does not know what {name} takes beside images",
            hint="it takes CLIP, SigLIP, LLaVA, Idefics 3, SmolVLM and BLIP-2; write a workload "
            "for others, see docs/your-own-model.md",
        )
    raise InvalidInputError(
        f"mmplan init does not know what {name} takes",
        hint="write a workload with the factories of mmplan.zoo, or of your own, or give "
        "module:callable of a module that takes tensors; see docs/your-own-model.md",
    )


def text_field(name: str, sizes: Any, length: int | None) -> dict[str, Any]:
    """Synthetic field of a text of ``length`` tokens; None: 64, or what the model takes."""
    keys = ("max_position_embeddings", "n_positions", "max_target_positions")
    known = [value for key in keys if isinstance(value := getattr(sizes, key, None), int)]
    # RoBERTa's positions begin behind the padding's.
    begin = (sizes.pad_token_id or 0) + 1 if "oberta" in name else 0
    most = min([*known[:1], _LENGTH + begin]) - begin
    return {"shape": [length or most], "vocab": sizes.vocab_size}


def _spectrum(sizes: Any) -> dict[str, Any]:
    # Whisper's second convolution has stride 2.
    return {"shape": [sizes.num_mel_bins, 2 * sizes.max_source_positions]}


def _speech_and_text(name: str, sizes: Any, length: int | None) -> dict[str, dict[str, Any]]:
    """Placeholders at the beginning of the text, as many as Voxtral's projector gives rows."""
    audio = sizes.audio_config
    rows = audio.max_source_positions * audio.hidden_size // audio.intermediate_size
    text = text_field(name, sizes.text_config, length)
    shape = [length or rows + text["shape"][0]]
    return {
        "input_ids": {**text, "shape": shape, "rows": {str(sizes.audio_token_id): rows}},
        "input_features": _spectrum(audio),
    }


def without_effect(model: nn.Module) -> list[str]:
    """What a model does in training only, beside dropout, which its blocks do not do."""
    sizes, notes = cast(Any, model).config, list[str]()
    drops = [
        (k, v)
        for k, v in dict(sizes.to_dict() if hasattr(sizes, "to_dict") else {}).items()
        if "layerdrop" in k and v
    ]
    notes += [f"{key} {value} has no effect: no layer is left out" for key, value in drops]
    masked = getattr(sizes, "mask_time_prob", 0) or getattr(sizes, "mask_feature_prob", 0)
    if masked and getattr(sizes, "apply_spec_augment", False):
        notes.append("SpecAugment has no effect: mask the features in the data set")
    return notes


def _diffusers(config: Mapping[str, Any]) -> nn.Module:
    try:
        import diffusers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UnfitEnvironmentError(
            f"{config['_class_name']} is a model of diffusers, which cannot be imported: {error}",
            hint="pip install diffusers",
        ) from error
    made = getattr(diffusers, str(config["_class_name"]), None)
    if made is None:
        raise InvalidInputError(
            f"diffusers has no {config['_class_name']}", hint="correct _class_name in config.json"
        )
    return checked("configuration of diffusers", lambda: made.from_config(dict(config)))
