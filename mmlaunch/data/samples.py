"""Checks of samples, and their collation into batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mmlaunch.comm.batches import num_samples
from mmplan.errors import InvalidInputError
from mmplan.ragged import Ragged

Field = Tensor | Ragged
DataSample = Mapping[str, Field]


def check_sample(sample: Any, index: int) -> None:
    """Refuse a sample that is not a dict of tensors.

    Raises:
        InvalidInputError: names the dataset index and the field.
    """
    if not isinstance(sample, Mapping):
        raise InvalidInputError(
            f"dataset[{index}] is a {type(sample).__name__}, not a dict of tensors",
            hint="return a dict from field name to tensor",
        )
    for field, value in sample.items():
        if not isinstance(value, Tensor | Ragged):
            raise InvalidInputError(
                f"dataset[{index}][{field!r}] is a {type(value).__name__}, not a tensor",
                hint="wrap it in torch.as_tensor",
            )
        if isinstance(value, Ragged) and value.lengths.tolist() != [len(value.values)]:
            raise InvalidInputError(
                f"dataset[{index}][{field!r}] is Ragged with {len(value.values)} rows and lengths "
                f"{value.lengths.tolist()}: a sample's Ragged has one length, its number of rows",
                hint="Ragged(values, torch.tensor([len(values)]))",
            )


def collate_samples(
    samples: Sequence[DataSample], indices: Sequence[int], fields: Collection[str]
) -> dict[str, Field]:
    """Stack the wanted fields of samples; ``Ragged`` fields are joined row by row.

    Raises:
        InvalidInputError: a missing field, or one whose shape or type changes.
    """
    batched: dict[str, Field] = {}
    for field in fields:
        values = [
            field_of(sample, field, index) for sample, index in zip(samples, indices, strict=True)
        ]
        kinds = [_kind(value) for value in values]
        other = next((k for k, kind in enumerate(kinds) if kind != kinds[0]), None)
        if other is not None:
            raise InvalidInputError(
                f"field {field!r} differs within a batch: dataset[{indices[0]}] has {kinds[0]}, "
                f"dataset[{indices[other]}] has {kinds[other]}",
                hint="give all samples one shape, define collate, or use mmplan.Ragged",
            )
        batched[field] = _join(values)
    return batched


def check_batched(batched: Any, expected: int) -> None:
    """Check the result of a dataset's own collate.

    Raises:
        InvalidInputError: no dict of tensors, or not the expected number of samples.
    """
    if not isinstance(batched, Mapping):
        raise InvalidInputError(
            f"the dataset's collate returned a {type(batched).__name__}, not a dict of tensors"
        )
    for field, value in batched.items():
        found = num_samples(value) if isinstance(value, Tensor | Ragged) else None
        if found != expected:
            raise InvalidInputError(
                f"the dataset's collate gave field {field!r} {found} samples of {expected}",
                hint="return tensors with the samples along dim 0, or mmplan.Ragged",
            )


def field_of(sample: DataSample, field: str, index: int) -> Field:
    """A field of a sample or batch; ``index`` is the dataset index, for the message.

    Raises:
        InvalidInputError: there is none; names those that exist.
    """
    if field not in sample:
        raise InvalidInputError(
            f"dataset[{index}] has no field {field!r}; it has {', '.join(sorted(sample))}",
            hint="name one of these, or a module, in the workload's inputs, or add it to the data",
        )
    return sample[field]


def _kind(value: Field) -> str:
    """Shape and type, which all samples of a batch share; of Ragged rows those of one row."""
    if isinstance(value, Ragged):
        return f"Ragged rows {list(value.values.shape[1:])} of {value.values.dtype}"
    return f"{list(value.shape)} of {value.dtype}"


def _join(values: Sequence[Field]) -> Field:
    ragged = [value for value in values if isinstance(value, Ragged)]
    if ragged:
        return Ragged(
            torch.cat([value.values for value in ragged]),
            torch.cat([value.lengths for value in ragged]),
        )
    return torch.stack(cast(list[Tensor], list(values)))
