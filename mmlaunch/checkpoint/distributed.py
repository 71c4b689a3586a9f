"""Folders of ``torch.distributed.checkpoint``, written tensor by tensor and read as data alone.

``.metadata`` is a pickle of torch's own records: which tensors there are, and at which bytes of
which ``.distcp`` file each chunk of them stands, as ``torch.save`` writes one. torch writes it, and
would run whatever a pickle names when it reads one. Read here it makes no object of any class but a
record of ours: whatever else it names is refused.
"""

from __future__ import annotations

import difflib
import io
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from mmlaunch.checkpoint.boxes import Box, check_no_hole, cover, whole
from mmplan.errors import InvalidInputError

METADATA_NAME = ".metadata"
# Keys of the saved dict, outermost first.
KeyPath = tuple[str | int, ...]


def write_distributed(
    folder: Path, content: Mapping[str, Any], read: Callable[[KeyPath], Tensor]
) -> None:
    """Write a folder; one full tensor is held at a time.

    Args:
        folder: exists, and holds no such files.
        content: the dict to save; its tensors have no values.
        read: gives those of one, by its place in the dict.

    Raises:
        OSError: disk full, or another failure of the file system.
    """
    # Two seconds, for those alone who ask for this format.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class ReadAsWritten(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            found = super().lookup_object(index)
            return read(self.mappings[index.fqn]) if isinstance(found, Tensor) else found

    try:
        writer = FileSystemWriter(folder)
        save(dict(content), storage_writer=writer, planner=ReadAsWritten(), no_dist=True)
    except CheckpointException as failed:
        error = failed.failures[0][0]
        # torch.save puts its own error over that of the file.
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkPlace:
    """The bytes of a file that hold a chunk."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A tensor and its chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[tuple[Box, _ChunkPlace]]


class DistributedWeights:
    """Weights in such a folder, as :class:`mmlaunch.checkpoint.exported_weights.WeightSource`.

    A tensor's name is the last key on its way through the saved dict, or the whole way joined by
    dots. Where several tensors have one name, it is that of the one under ``model``.

    Args:
        folder: with ``.metadata``.

    Raises:
        InvalidInputError: the metadata is no such file, or names what is not read.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self._stored: dict[str, _Stored] = {}
        path = folder / METADATA_NAME
        try:
            metadata = _read_metadata(path)
            places = {
                (at.fqn, tuple(at.offset)): _place(info)
                for at, info in metadata.storage_data.items()
                if getattr(at, "offset", None) is not None
            }
            for key, record in metadata.state_dict_metadata.items():
                if hasattr(record, "chunks"):
                    self._stored[key] = _described(key, record, places)
            ways = metadata.planner_data or {}
            keys = _short_names({key: ways.get(key, (key,)) for key in self._stored})
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidInputError(
                f"{path} is no metadata of torch.distributed.checkpoint that is read here: {error}",
                hint="restore the folder, or convert it to safetensors",
            ) from error
        self._keys: dict[str, str] = keys

    def names(self) -> list[str]:
        """Names of all tensors, in order."""
        return sorted(self._keys)

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a tensor; InvalidInputError when there is none of that name."""
        return self._find(name)[1].shape

    def get(
        self, name: str, boxes: Sequence[Box] | None = None, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Boxes of a tensor, from the chunks that hold some of them.

        Args:
            name: of the tensor.
            boxes: the wanted ones; None is one, all of it.
            dtype: of the results; None keeps the stored one.

        Raises:
            InvalidInputError: no such tensor, a file is missing or damaged, or nothing holds
                some of a box.
        """
        key, stored = self._find(name)
        wanted = [whole(stored.shape)] if boxes is None else boxes
        return [self._read(key, stored, box, dtype or stored.dtype) for box in wanted]

    def _find(self, name: str) -> tuple[str, _Stored]:
        if name not in self._keys:
            raise no_such_weight(self.path, name, self.names())
        key = self._keys[name]
        return key, self._stored[key]

    def _read(self, key: str, stored: _Stored, wanted: Box, dtype: torch.dtype) -> Tensor:
        filled = cover(wanted, [box for box, _ in stored.chunks])
        check_no_hole(f"{key} in {self.path}", filled)
        out = torch.empty(wanted.sizes, dtype=dtype)
        for number, part in filled.pieces:
            box, place = stored.chunks[number]
            out[part.slices_in(wanted)] = self._chunk(key, box, place)[part.slices_in(box)]
        return out

    def _chunk(self, key: str, box: Box, place: _ChunkPlace) -> Tensor:
        file = self.path / place.file
        try:
            with file.open("rb") as opened:
                opened.seek(place.offset)
                content = io.BytesIO(opened.read(place.length))
            # torch's own restricted reader: tensors and plain values, no other class.
            value: Any = torch.load(content, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise InvalidInputError(
                f"{file}: {key} {box} cannot be read: {said[0]}", hint="restore the folder"
            ) from error
        if not isinstance(value, Tensor) or tuple(value.shape) != box.sizes:
            raise InvalidInputError(
                f"{file}: {key} {box} is not what {METADATA_NAME} says", hint="restore the folder"
            )
        return value


def no_such_weight(path: Path, name: str, names: Sequence[str]) -> InvalidInputError:
    """The user's error for a weight that is not stored."""
    near = difflib.get_close_matches(name, names, n=1)
    return InvalidInputError(
        f"{path} has no weight {name}" + (f", but {near[0]}" if near else ""),
        hint="init: takes weights whose names are those of the module's parameters",
    )


def _place(info: Any) -> _ChunkPlace:
    if getattr(info, "transform_descriptors", None):
        raise ValueError("its tensors are written through an extension")
    if Path(info.relative_path).name != info.relative_path:
        raise ValueError(f"{info.relative_path!r:.60} is not the name of a file beside it")
    return _ChunkPlace(
        file=info.relative_path, offset=index(info.offset), length=index(info.length)
    )


def _described(key: str, record: Any, places: Mapping[Any, _ChunkPlace]) -> _Stored:
    chunks = [
        (
            Box(offsets=tuple(map(index, chunk.offsets)), sizes=tuple(map(index, chunk.sizes))),
            places[key, tuple(chunk.offsets)],
        )
        for chunk in record.chunks
    ]
    shape, dtype = tuple(map(index, record.size)), record.properties.dtype
    if not isinstance(dtype, torch.dtype) or any(len(b.sizes) != len(shape) for b, _ in chunks):
        raise ValueError(f"{key} has no type, or a chunk of another rank")
    return _Stored(dtype=dtype, shape=shape, chunks=chunks)


def _short_names(ways: Mapping[str, KeyPath]) -> dict[str, str]:
    """Every name of a tensor to its key."""
    found: dict[str, set[str]] = {}
    for key, way in ways.items():
        found.setdefault(str(way[-1]), set()).add(key)
    names = {key: key for key in ways}
    for name, keys in found.items():
        chosen = keys if len(keys) == 1 else {key for key in keys if "model" in ways[key]}
        if len(chosen) == 1:
            names[name] = next(iter(chosen))
    return names


class _Record:
    """Stands for an object of torch's: its fields, and nothing that could run."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(cast("dict[str, Any]", state))
        elif isinstance(state, tuple):  # of a tensor's properties, whose first is the type
            self.dtype = cast("tuple[Any, ...]", state)[0]


_TORCH = "torch.distributed.checkpoint."
_RECORDS = {
    *((_TORCH + "metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    (_TORCH + "metadata", "TensorStorageMetadata"),
    (_TORCH + "metadata", "BytesStorageMetadata"),
    (_TORCH + "metadata", "ChunkStorageMetadata"),
    (_TORCH + "metadata", "TensorProperties"),
    (_TORCH + "metadata", "_MEM_FORMAT_ENCODING"),
    (_TORCH + "filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}
# Where a checkpoint was saved.
_PATH = re.compile(r"pathlib(\._local)?\.(Pure)?(Posix|Windows)?Path")


class _Reader(pickle.Unpickler):
    """Makes records, sizes and types; any other class or function is refused by its name."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        path = f"{module_name}.{global_name}"
        if (module_name, global_name) in _RECORDS or _PATH.fullmatch(path):
            return _Record
        if (module_name, global_name) == ("torch", "Size"):
            return tuple
        found = getattr(torch, global_name, None) if module_name == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise ValueError(f"it names {path}, which is not read")


def _read_metadata(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _Reader(file).load()
    except (OSError, EOFError, IndexError, pickle.UnpicklingError) as error:
        raise ValueError(str(error)) from error
