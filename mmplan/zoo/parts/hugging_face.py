"""What the factories of transformers' models share: configurations, classes, shards, images."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmplan.errors import InvalidInputError, UnfitEnvironmentError
from mmplan.ragged import Ragged

# transformers has no tp plan of its own for encoders. Its attention takes the
# number of heads from the local width, so plain Megatron-style shards work.
ENCODER_RULES = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.out_proj": "rowwise",
    "mlp.fc1": "colwise",
    "mlp.fc2": "rowwise",
}


def each_image(run: Callable[..., Tensor], *images: Tensor | Ragged) -> Tensor | Ragged:
    """Run on every image; where a batch has none, on one of zeros that is thrown away.

    Several arguments are several tensors of the same images.
    """
    lengths = images[0].lengths if isinstance(images[0], Ragged) else None
    values = [x.values if isinstance(x, Ragged) else x for x in images]
    if lengths is None:
        return run(*values)
    if len(values[0]):
        return Ragged(run(*values), lengths)
    # transformers reshapes to sizes that it infers, which an empty tensor does not allow.
    # Joined to the empty one, so that gradients (of zero) reach whatever made it.
    ones = [torch.cat([x, x.new_zeros((1, *x.shape[1:]))]) for x in values]
    return Ragged(run(*ones)[:0], lengths)


def pooling_heads(head: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values of SigLIP's attention pooling, by head: [H, D], [..., H, D] twice.

    Its ``nn.MultiheadAttention`` would be compiled again for a single image, and takes images of
    one size. One query serves all images.
    """
    attention = head.attention
    query, key, value = (
        functional.linear(x, weight, bias).unflatten(-1, (attention.num_heads, -1))
        for x, weight, bias in zip(
            (head.probe[0, 0], rows, rows),
            attention.in_proj_weight.chunk(3),
            attention.in_proj_bias.chunk(3),
            strict=True,
        )
    )
    return query, key, value


def owned(part: Any, name: str) -> Any:
    """What a part has under a dotted name of the model."""
    for piece in name.split("."):
        part = getattr(part, piece)
    return part


def checked_config(name: str, config: Mapping[str, Any] | None) -> Any:
    """A configuration of one tower or of two."""
    kind = name.removesuffix("Config")
    build = transformers_class(name)
    return checked(f"{kind} configuration", lambda: build(**(config or {})))


def checked(what: str, build: Callable[[], Any]) -> Any:
    """What ``build`` makes; what transformers refuses is an InvalidInputError."""
    try:
        return build()
    except Exception as error:  # strict dataclasses raise types of their own
        raise InvalidInputError(
            f"transformers refuses this {what}: {shorten(str(error), 300, placeholder=' ...')}",
            hint="give the content of such a model's config.json",
        ) from error


def transformers_class(name: str) -> Any:
    """A class of transformers; loads the library on first use."""
    try:
        return getattr(importlib.import_module("transformers"), name)
    except ModuleNotFoundError as error:
        raise UnfitEnvironmentError(
            f"this factory needs {error.name}, which is not installed",
            hint='pip install "transformers>=5.0"',
        ) from error
    except (ImportError, RuntimeError) as error:
        raise UnfitEnvironmentError(
            f"transformers is broken here: {str(error).strip().splitlines()[0]}",
            hint="a torchvision of another build than torch does this; pip uninstall torchvision",
        ) from error
