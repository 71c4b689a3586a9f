"""Weights to start from: ``init:`` of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from mmlaunch.weights import WeightSource
from mmplan.errors import InvalidInputError


def load_initial(module: nn.Sequential, path: Path, owner: str) -> None:
    """Fill a module's parameters and buffers from a safetensors file or folder.

    A weight is looked for under the name that a run saves (``vision.0.weight``), then the
    module's own (``0.weight``), then the original one of a converted model
    (``source_names``).

    Raises:
        InvalidInputError: a weight is missing, or has another shape; nothing is filled then.
    """
    source = WeightSource(path)
    known = set(source.names())
    original: dict[str, str] = getattr(module, "source_names", {})
    found: list[tuple[Tensor, Tensor]] = []
    for name, target in _targets(module):
        names = (f"{owner}.{name}", name, original.get(name, name))
        stored = next((n for n in names if n in known), names[0])
        value = source.get(stored, dtype=target.dtype)[0]
        if value.shape != target.shape:
            raise InvalidInputError(
                f"modules.{owner}.init: {stored} in {path} has shape {list(value.shape)}, "
                f"the module's {name} has {list(target.shape)}",
                hint="start from weights of the same sizes, or correct the factory's args",
            )
        found.append((target, value))
    with torch.no_grad():
        for target, value in found:
            target.copy_(value)


def _targets(module: nn.Sequential) -> Iterator[tuple[str, Tensor]]:
    kept = module.state_dict(keep_vars=True)
    seen: set[int] = set()
    for name, value in kept.items():
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value
