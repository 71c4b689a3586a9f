"""Datasets of Hugging Face's ``datasets`` on disk, read in any order.

    data:
      factory: mmplan.sources.hf_datasets:on_disk
      args: {path: chats, split: train, columns: {input_ids: tokens, score: score}}

The folder is what ``save_to_disk`` wrote. Its Arrow files are mapped into memory, so that all
processes of a machine share them. What a column becomes follows from its type alone:

- numbers: a tensor [];
- lists of a fixed length, and arrays: a tensor of that shape;
- lists of any length, and arrays whose first size is open: :class:`mmplan.Ragged`, a row for each
  element; no list (null) is no row.

Anything else (text, images, lists of lists of any length) needs ``decode``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmplan.arrays import Ints
from mmplan.errors import InvalidInputError, UnfitEnvironmentError
from mmplan.ragged import Ragged
from mmplan.schema.factories import import_factory, workload_folder
from mmplan.sources.tar_shards import Decode

# The size of an axis that differs from sample to sample.
_ANY = -1


def on_disk(
    path: str,
    split: str | None = None,
    columns: Mapping[str, str] | Sequence[str] | None = None,
    decode: str | None = None,
) -> OnDisk:
    """The samples of a folder that ``save_to_disk`` wrote.

    Args:
        path: of the folder; from the workload file's folder on.
        split: of a folder with several.
        columns: those that are read, as a list or with the name of each one's field; by default
            all of them.
        decode: ``module:function`` that makes a dict of tensors of a sample: values by field, as
            ``datasets`` gives them. By default see :mod:`mmplan.sources.hf_datasets`.

    Raises:
        InvalidInputError: no such folder, split or column, or a column that needs ``decode``.
        UnfitEnvironmentError: ``datasets`` is missing.
    """
    folder = workload_folder()
    rows = _chosen(_loaded(str(folder / path)), path, split)
    names = columns if isinstance(columns, Mapping) else {c: c for c in columns or rows.features}
    unknown = [column for column in names if column not in rows.features]
    if unknown:
        raise InvalidInputError(
            f"{path}: no column {unknown[0]!r}", hint=f"it has {', '.join(rows.features)}"
        )
    rows = rows.select_columns(list(names)).rename_columns(dict(names))
    make = None if decode is None else import_factory(decode, folder, field="decode")
    return OnDisk(rows, make)


class OnDisk:
    """A map-style dataset of the rows of a ``datasets.Dataset``.

    Args:
        rows: the dataset; its columns are the fields.
        decode: makes a dict of tensors of a row.

    Raises:
        InvalidInputError: without ``decode``, a column that is no tensor.
    """

    def __init__(self, rows: Any, decode: Decode | None = None) -> None:
        self._decode = decode
        self._rows = rows.with_format(None if decode else "arrow")
        self._shapes: dict[str, tuple[int, ...]] = {}
        for column in [] if decode else rows.features.arrow_schema:
            shape = _shape(column.type)
            if shape is None or _ANY in shape[1:]:
                raise InvalidInputError(
                    f"column {column.name!r} is {rows.features[column.name]}, which is no tensor "
                    "and no Ragged",
                    hint="give decode: module:function, or columns: without it, in the data's args",
                )
            self._shapes[column.name] = shape

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """A sample.

        Raises:
            InvalidInputError: a number is missing (null).
        """
        row = self._rows[index]
        if self._decode:
            return self._decode(row)
        return {name: self._field(name, row[name].chunk(0), index) for name in self._shapes}

    def lengths(self, field: str) -> Ints:
        """Rows of a ragged field of every sample, [samples].

        Raises:
            InvalidInputError: the field is not ragged, or made by ``decode``.
        """
        if self._shapes.get(field, ())[:1] != (_ANY,):
            raise InvalidInputError(
                f"the rows of {field!r} are not known before it is read",
                hint="name a column of lists, or give lengths: a file",
            )
        compute = importlib.import_module("pyarrow.compute")
        column = self._rows.select_columns([field])[:][field]
        counts = [
            compute.list_value_length(_storage(chunk)).fill_null(0) for chunk in column.chunks
        ]
        return np.concatenate([np.empty(0, np.int64), *counts]).astype(np.int64)

    def _field(self, name: str, values: Any, index: int) -> Tensor | Ragged:
        """The value of a row, an Arrow array of one element."""
        shape = self._shapes[name]
        # Of a list that is missing as a whole there are no rows.
        missing = 0 if shape[:1] == (_ANY,) else values.null_count
        values = _storage(values)
        for _ in shape:
            values = values.flatten()
            missing += values.null_count
        if missing:
            raise InvalidInputError(
                f"sample {index}: a number of column {name!r} is missing",
                hint="fill it in, or give decode: module:function in the data's args",
            )
        tensor = torch.tensor(values.to_numpy(zero_copy_only=False)).reshape(shape)
        return Ragged(tensor, torch.tensor([len(tensor)])) if shape[:1] == (_ANY,) else tensor


def _loaded(path: str) -> Any:
    try:
        datasets = importlib.import_module("datasets")
    except ModuleNotFoundError as error:
        raise UnfitEnvironmentError(
            f"mmplan.sources.hf_datasets needs {error.name}, which is not installed",
            hint='pip install -e ".[datasets]" has it, or pip install "datasets>=4"',
        ) from error
    try:
        return datasets.load_from_disk(path, keep_in_memory=False)
    except FileNotFoundError as error:
        raise InvalidInputError(
            f"{path}: no dataset that save_to_disk wrote: a stream, or files of another kind, "
            "cannot be read at an index",
            hint=f'datasets.load_dataset(...).save_to_disk("{path}") makes one, without streaming',
        ) from error


def _chosen(loaded: Any, path: str, split: str | None) -> Any:
    """The dataset itself, or one of several splits."""
    if not isinstance(loaded, Mapping):
        if split is not None and str(loaded.split) != split:
            raise InvalidInputError(f"{path}: it has no splits", hint="leave out split")
        return loaded
    if split not in loaded:
        has = ", ".join(loaded)
        said = "it has several splits" if split is None else f"no split {split!r}"
        raise InvalidInputError(f"{path}: {said}", hint=f"give split: one of {has}")
    return loaded[split]


def _shape(kind: Any) -> tuple[int, ...] | None:
    """Sizes of an Arrow type's values, -1 where they differ; None where they are no numbers."""
    types = importlib.import_module("pyarrow.types")
    if hasattr(kind, "storage_type"):
        inner = _shape(kind.storage_type)
        sizes = getattr(kind, "shape", ())
        return None if inner is None else tuple(_ANY if n is None else n for n in sizes)
    if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
        inner = _shape(kind.value_type)
        size = kind.list_size if types.is_fixed_size_list(kind) else _ANY
        return None if inner is None else (size, *inner)
    number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return () if number else None


def _storage(values: Any) -> Any:
    """What an array of an extension type is made of."""
    return getattr(values, "storage", values)
