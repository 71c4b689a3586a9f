"""Models of transformers and diffusers from a config.json, and what training them takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import nn

from mmplan.errors import InvalidInputError, UnfitEnvironmentError
from mmplan.zoo.hf_parts import checked, transformers_class

# Tokens of a synthetic text, where the model takes that many. Short, so that a trial is quick.
_LENGTH = 64
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
        return _of_diffusers(config)
    name, sizes = architecture(config), cast(Any, model.config)
    if hasattr(sizes, "image_size") and getattr(model, "main_input_name", "") == "pixel_values":
        size = sizes.image_size
        height, width = (size, size) if isinstance(size, int) else size
        image = {"shape": [getattr(sizes, "num_channels", 3), height, width]}
        if name.endswith("ImageClassification"):
            labels = {"shape": [], "vocab": sizes.num_labels}
            return PretrainedRecipe(
                inputs={"pixel_values": image}, output="logits", loss="cross_entropy", target=labels
            )
        return PretrainedRecipe(
            inputs={"pixel_values": image}, output="last_hidden_state", loss="mse"
        )
    vocabulary = getattr(sizes, "vocab_size", None)
    if not isinstance(vocabulary, int) or getattr(model, "main_input_name", "") != "input_ids":
        raise InvalidInputError(
            f"{name} takes neither text nor images alone, which mmplan init knows",
            hint="write a workload with the factories of mmplan.zoo, or of your own; see "
            "docs/your-own-model.md",
        )
    most = next(
        (
            value
            for key in ("max_position_embeddings", "n_positions")
            if isinstance(value := getattr(sizes, key, None), int)
        ),
        _LENGTH,
    )
    # RoBERTa's positions begin behind the padding's.
    begin = (sizes.pad_token_id or 0) + 1 if "oberta" in name else 0
    text = {"shape": [length or min(most - begin, _LENGTH)], "vocab": vocabulary}
    if sizes.is_encoder_decoder:
        return PretrainedRecipe(
            inputs={"input_ids": text, "decoder_input_ids": text},
            output="logits",
            options={"use_cache": False},
            loss=_TEXT,
            loss_args={"shift": False},
            target=text,
        )
    if name.endswith("SequenceClassification"):
        labels = {"shape": [], "vocab": sizes.num_labels}
        return PretrainedRecipe(
            inputs={"input_ids": text}, output="logits", loss="cross_entropy", target=labels
        )
    if name.endswith(("ForMaskedLM", "TokenClassification")):
        labels = {**text, "vocab": vocabulary if "Masked" in name else sizes.num_labels}
        return PretrainedRecipe(
            inputs={"input_ids": text},
            output="logits",
            loss=_TEXT,
            loss_args={"shift": False},
            target=labels,
        )
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return PretrainedRecipe(
            inputs={"input_ids": text},
            output="logits",
            options={"use_cache": False},
            loss=_TEXT,
            target=text,
        )
    return PretrainedRecipe(inputs={"input_ids": text}, output="last_hidden_state", loss="mse")


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


def _of_diffusers(config: Mapping[str, Any]) -> PretrainedRecipe:
    """Of denoisers: noisy samples and their time to what was added."""
    size = config["sample_size"]
    height, width = (size, size) if isinstance(size, int) else size
    sample = {"shape": [config["in_channels"], height, width]}
    # A thousand steps of noise are usual.
    times = {"shape": [], "vocab": 1000}
    name = str(config["_class_name"])
    if name == "UNet2DModel":
        return PretrainedRecipe(
            inputs={"sample": sample, "timestep": times}, output="sample", loss="mse"
        )
    if name == "DiTTransformer2DModel":
        labels = {"shape": [], "vocab": config.get("num_embeds_ada_norm") or 1000}
        return PretrainedRecipe(
            inputs={"hidden_states": sample, "timestep": times, "class_labels": labels},
            output="sample",
            loss="mse",
        )
    raise InvalidInputError(
        f"how {name} is called is not known", hint="give module:callable and --sample"
    )
