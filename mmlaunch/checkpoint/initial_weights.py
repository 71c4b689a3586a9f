"""Weights to start from: ``init:`` of a module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from mmlaunch.checkpoint.boxes import Box
from mmlaunch.checkpoint.exported_weights import WeightSource
from mmplan.errors import InvalidInputError


class InitialWeights:
    """The stored weight of each of a module's parameters and persistent buffers.

    A weight is looked for under the name that a run saves (``vision.0.weight``), then the
    module's own (``0.weight``), then the original one of a converted model
    (``source_names``).

    Args:
        path: a safetensors file, an index, or a folder with either.
        module: the whole module; its tensors need no values.
        owner: the module's name.

    Raises:
        InvalidInputError: a weight is missing, or has another shape.
    """

    def __init__(self, path: Path, module: nn.Sequential, owner: str) -> None:
        self._source = WeightSource(path)
        known = set(self._source.names())
        original: dict[str, str] = getattr(module, "source_names", {})
        self._stored: dict[Tensor, str] = {}
        for name, target in targets(module):
            names = (f"{owner}.{name}", name, original.get(name, name))
            stored = next((n for n in names if n in known), names[0])
            shape = self._source.shape(stored)
            if shape != tuple(target.shape):
                raise InvalidInputError(
                    f"modules.{owner}.init: {stored} in {path} has shape {list(shape)}, "
                    f"the module's {name} has {list(target.shape)}",
                    hint="start from weights of the same sizes, or correct the factory's args",
                )
            self._stored[target] = stored

    def has(self, target: Tensor) -> bool:
        """Whether a tensor of the module is stored: all but buffers that are not persistent."""
        return target in self._stored

    def read(self, target: Tensor, boxes: Sequence[Box] | None = None) -> list[Tensor]:
        """Parts of one tensor of the module in its type, read without the rest; None is all."""
        return self._source.get(self._stored[target], boxes, target.dtype)


def load_initial(module: nn.Sequential, path: Path, owner: str) -> None:
    """Fill a whole module's parameters and buffers, one at a time.

    Raises:
        InvalidInputError: a weight is missing, or has another shape; nothing is filled then.
    """
    weights = InitialWeights(path, module, owner)
    with torch.no_grad():
        for _, target in targets(module):
            target.copy_(weights.read(target)[0])


def targets(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, each once, by the first of its names."""
    kept = module.state_dict(keep_vars=True)
    seen: set[Tensor] = set()
    for name, value in kept.items():
        if value not in seen:
            seen.add(value)
            yield name, value
