"""Noise in the shapes of given data fields, for workloads whose data is not at hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mmplan.errors import InvalidInputError
from mmplan.ragged import Ragged
from mmplan.zoo.sizes import check_sizes

IGNORE = -100
# The noise is part of the data: it does not follow train.seed.
_DATA_SEED = 20240905
_KEYS = {"shape", "vocab", "rows", "ignored", "mask", "ragged", "value"}
NoiseSpec = Mapping[str, Any]


class Noise(Dataset[dict[str, Tensor | Ragged]]):
    """Every field drawn anew for every sample; see :func:`noise`."""

    def __init__(
        self, *, samples: int, fields: Mapping[str, NoiseSpec | Sequence[NoiseSpec]]
    ) -> None:
        self._samples, self._fields = samples, fields

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Tensor | Ragged]:
        generator = torch.Generator().manual_seed(_DATA_SEED + index)
        found: dict[str, Tensor | Ragged] = {}
        for name, given in self._fields.items():
            specs = _specs(given)
            spec = specs[index % len(specs)]
            drawn = _draw(spec, generator)
            is_ragged = spec.get("ragged", False)
            found[name] = Ragged(drawn, torch.tensor([len(drawn)])) if is_ragged else drawn
        return found


def noise(fields: Mapping[str, NoiseSpec | Sequence[NoiseSpec]], *, samples: int = 4096) -> Noise:
    """Samples of noise.

    Args:
        fields: name to what the field is made of: ``shape`` alone for numbers in [0, 1); with
            ``vocab`` for token ids from 1 to below it. Of token ids, ``rows`` maps
            placeholders (the highest ids) to how many of them stand at the beginning, in that
            order, and ``ignored`` is how many at the beginning are -100; with ``mask: true``
            for truth values, true up to a place that is drawn. ``value`` is the field itself, in
            whole numbers. ``ragged``: its first dimension differs between samples. A list of
            such: sample i is made of the i-th, and so on from the first again.
        samples: in the data set.

    Raises:
        InvalidInputError: a field without shape, with keys that mean nothing, or with more
            placeholders than places.
    """
    check_sizes(samples=samples)
    for name, given in fields.items():
        if not (specs := _specs(given)):
            raise InvalidInputError(f"noise: field {name} is made of nothing", hint="give a shape")
        for spec in specs:
            _check(name, spec)
    return Noise(samples=samples, fields=fields)


def _specs(given: NoiseSpec | Sequence[NoiseSpec]) -> Sequence[NoiseSpec]:
    return [cast(NoiseSpec, given)] if isinstance(given, Mapping) else given


def _draw(spec: NoiseSpec, generator: torch.Generator) -> Tensor:
    if "value" in spec:
        return torch.tensor(spec["value"])
    shape = tuple(spec["shape"])
    if spec.get("mask"):
        # Neither all nor nothing: what is true may be what is looked at, or what is not.
        places = max(shape[-1] - 1, 1) if shape else 1
        end = torch.randint(1, places + 1, (*shape[:-1], 1), generator=generator)
        return torch.arange(shape[-1] if shape else 1).expand(shape) < end.reshape(end.shape)
    if "vocab" not in spec:
        return torch.rand(shape, generator=generator)
    rows = {int(key): count for key, count in spec.get("rows", {}).items()}
    ids = torch.randint(1, min([spec["vocab"], *rows]), shape, generator=generator)
    begin = 0
    for placeholder, count in rows.items():
        ids[begin : begin + count] = placeholder
        begin += count
    if spec.get("ignored", 0):
        ids[: spec["ignored"]] = IGNORE
    return ids


def _check(name: str, spec: NoiseSpec) -> None:
    unknown = sorted(set(spec) - _KEYS)
    if not unknown and "value" in spec:
        return
    if unknown or "shape" not in spec:
        problem = f"does not know {unknown[0]!r}" if unknown else "has no shape"
        raise InvalidInputError(
            f"noise: field {name} {problem}", hint=f"its keys are {', '.join(sorted(_KEYS))}"
        )
    check_sizes(**{f"{name}.shape": size for size in spec["shape"]})
    placed = sum(spec.get("rows", {}).values())
    if max(placed, spec.get("ignored", 0)) > math.prod(spec["shape"]):
        raise InvalidInputError(
            f"noise: field {name} has {math.prod(spec['shape'])} places for {placed} placeholders",
            hint="choose a longer shape, or fewer rows",
        )
