"""Samples in tar files, as webdataset has them, read in any order.

    data:
      factory: mmplan.sources.tar_shards:tar_shards
      args: {shards: "digits-{000..003}.tar", decode: "captions:decode", window: 4096}

Members that follow one another and have the same name up to the first dot are one sample; what
comes after the dot is the field: ``000012.image.npy`` and ``000012.tokens.npy``. An index beside
the shards says where each sample lies, so that the order of samples follows from seed and step
alone and no shard belongs to a rank or a loading process.

    python -m mmplan.sources.tar_shards "digits-{000..003}.tar"

makes the index beforehand; otherwise the first process that opens the shards makes it.
"""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import os
import re
import sys
import tarfile
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmplan.arrays import Indices
from mmplan.errors import InvalidInputError
from mmplan.schema.factories import import_factory, workload_folder
from mmplan.sources.orders import shuffled, shuffled_nearby

Decode = Callable[[dict[str, Any]], Mapping[str, Any]]

_VERSION = 1
_HEADER_BYTES = 8
# One entry a sample: its shard, and where its members begin and end in it.
_ENTRY = np.dtype([("shard", "<u4"), ("bytes", "<u4"), ("offset", "<u8")])
_MOST_BYTES = 2**32 - 1
# Shards that a process keeps open.
_MOST_OPEN = 64
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


def tar_shards(
    shards: str, decode: str | None = None, index: str | None = None, window: int | None = None
) -> TarShards:
    """The samples of tar files.

    Args:
        shards: their path, ``{000..015}`` for numbers; from the workload file's folder on.
        decode: ``module:function`` that makes a dict of tensors of a sample's fields, bytes by
            name, and ``__key__``, its name. By default fields are ``.npy`` (an array) and ``.cls``
            (a whole number).
        index: the index file; by default beside the first shard.
        window: samples that may lie between two that follow one another in a shard; shards are
            then read one after another, in random order. By default all samples of all shards are
            in random order, which is right for a local disk.

    Raises:
        InvalidInputError: a shard is missing, no tar file, or compressed; the index cannot be
            written, or does not belong to the shards.
    """
    folder = workload_folder()
    paths = [folder / name for name in _expanded(shards)]
    if window is not None and window < 1:
        raise InvalidInputError(f"window is {window}", hint="give a number of samples")
    place = folder / index if index else paths[0].with_suffix(".index")
    make = None if decode is None else import_factory(decode, folder, field="decode")
    return TarShards(paths, place, make or _decoded, window)


class TarShards:
    """A map-style dataset of the samples of tar files.

    Args:
        shards: the files.
        index: of their samples; made where it is not there or belongs to other files.
        decode: makes a dict of tensors of a sample.
        window: see :func:`tar_shards`.

    Raises:
        InvalidInputError: as :func:`tar_shards`.
    """

    def __init__(
        self, shards: Sequence[Path], index: Path, decode: Decode, window: int | None = None
    ) -> None:
        self._shards, self._decode, self._window = list(shards), decode, window
        self._index = _Index.of(self._shards, index)
        self._entries = self._index.entries()
        self._open_none()

    def __len__(self) -> int:
        return self._index.samples

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """A sample, decoded.

        Raises:
            InvalidInputError: what lies there is no sample any more.
        """
        shard, size, offset = self._entries[index].tolist()
        content = os.pread(self._descriptor(shard), size, offset)
        members: dict[str, Any] = {}
        try:
            if len(content) < size:
                raise tarfile.ReadError("the file ends before it")
            with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
                for member in tar:
                    key, field = _split(member.name)
                    file = tar.extractfile(member)
                    if members.setdefault("__key__", key) != key or file is None:
                        raise tarfile.ReadError("another sample is there")
                    members[field] = file.read()
        except tarfile.TarError as error:
            raise InvalidInputError(
                f"{self._shards[shard]}: sample {index} is not at byte {offset}: {error}",
                hint=f"the file has changed: remove {self._index.path}",
            ) from error
        return self._decode(members)

    @property
    def epoch_length(self) -> int:
        """See :class:`mmplan.sources.orders.OwnOrder`."""
        return len(self)

    def epoch_order(self, seed: int, epoch: int) -> Indices:
        """See :class:`mmplan.sources.orders.OwnOrder`."""
        if self._window is None:
            return shuffled(len(self), seed, epoch)
        shards = self._entries["shard"]
        starts = np.searchsorted(shards, np.arange(len(self._shards) + 1)).tolist()
        return shuffled_nearby(starts, seed, epoch, window=self._window)

    def __getstate__(self) -> dict[str, Any]:
        # Every process maps the index itself: it is in memory once.
        return {k: v for k, v in self.__dict__.items() if k not in ("_open", "_entries")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._entries = self._index.entries()
        self._open_none()

    def _open_none(self) -> None:
        self._open: dict[int, int] = {}
        weakref.finalize(self, _close, self._open)

    def _descriptor(self, shard: int) -> int:
        if shard not in self._open:
            if len(self._open) == _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[shard] = os.open(self._shards[shard], os.O_RDONLY | os.O_CLOEXEC)
        return self._open[shard]


def _close(descriptors: Mapping[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Index:
    """Where the samples of shards lie.

    The file: the length of the header, the header (JSON), and an entry for each sample, mapped
    into memory: a million samples are open at once.

    Attributes:
        path: of the file.
        start: of the entries in it.
        samples: their number.
    """

    path: Path
    start: int
    samples: int

    def entries(self) -> NDArray[np.void]:
        """Shard, bytes and offset of every sample, in the order of the shards."""
        return np.memmap(self.path, _ENTRY, "r", offset=self.start, shape=(self.samples,))

    @classmethod
    def of(cls, shards: Sequence[Path], path: Path) -> _Index:
        """The index of shards; made where it is missing or of other files.

        Raises:
            InvalidInputError: see :func:`tar_shards`.
        """
        try:
            header = {"version": _VERSION, "shards": [_known(shard) for shard in shards]}
        except OSError as error:
            raise InvalidInputError(
                f"{error.filename}: {error.strerror}", hint="correct the path of the shards"
            ) from error
        found = cls._read(path, header)
        if found is None:
            with _locked(path):
                # Another process may have made it meanwhile.
                found = cls._read(path, header)
                if found is None:
                    _write(path, header, _entries(shards))
                    found = cls._read(path, header)
        if found is None:
            raise InvalidInputError(f"{path}: it changes while it is read", hint="start again")
        return found

    @classmethod
    def _read(cls, path: Path, header: Mapping[str, Any]) -> _Index | None:
        """The index in a file; None where it is not there, or of other shards."""
        try:
            with path.open("rb") as file:
                text = file.read(int.from_bytes(file.read(_HEADER_BYTES), "little"))
            written = json.loads(text)
            samples = written.pop("samples")
            if written != header:
                return None
            index = cls(path, _HEADER_BYTES + len(text), samples)
            index.entries()
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, AttributeError, TypeError, OverflowError) as error:
            raise InvalidInputError(
                f"{path}: not an index of tar files: {error}", hint="remove it, or name another one"
            ) from error
        return index


def _known(shard: Path) -> list[str | int]:
    """What of a shard changes with its content: tar pads files, so the size may stay."""
    found = shard.stat()
    return [shard.name, found.st_size, found.st_mtime_ns]


def _entries(shards: Sequence[Path]) -> NDArray[np.void]:
    """The place of every sample.

    Raises:
        InvalidInputError: no tar file, or a sample that lies in two places.
    """
    found: list[tuple[int, int, int]] = []
    for number, shard in enumerate(shards):
        try:
            with tarfile.open(shard, "r:") as tar:
                groups = itertools.groupby(_members(tar, shard), key=lambda m: _split(m.name)[0])
                for key, members in groups:
                    start, stop, fields = _span(members)
                    if len(fields) > len(set(fields)) or stop - start > _MOST_BYTES:
                        raise InvalidInputError(
                            f"{shard}: sample {key} has a field twice, or 4 GB",
                            hint="write each sample's members once, one after another",
                        )
                    found.append((number, stop - start, start))
        except (tarfile.TarError, OSError) as error:
            raise InvalidInputError(
                f"{shard}: not an uncompressed tar file: {error}",
                hint="unpack a compressed one: at a place in the middle it cannot be read",
            ) from error
    if not found:
        raise InvalidInputError(f"{shards[0]}: no samples", hint="correct the path of the shards")
    return np.array(found, _ENTRY)


def _members(tar: tarfile.TarFile, shard: Path) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        # A list of all members would hold a large file's in memory.
        tar.members = []  # pyright: ignore[reportAttributeAccessIssue]
        if member.isfile():
            yield member
        elif not member.isdir():
            raise InvalidInputError(
                f"{shard}: {member.name} is no file", hint="write files alone into the shards"
            )


def _span(members: Iterator[tarfile.TarInfo]) -> tuple[int, int, list[str]]:
    """Where members of one sample begin and end, and their fields."""
    start, stop, fields = -1, 0, list[str]()
    for member in members:
        start = member.offset if start < 0 else start
        blocks = -(-member.size // tarfile.BLOCKSIZE)
        stop = member.offset_data + blocks * tarfile.BLOCKSIZE
        fields.append(_split(member.name)[1])
    return start, stop, fields


def _split(name: str) -> tuple[str, str]:
    """A member's sample and field: the path up to the file's first dot, and the rest."""
    folder, _, file = name.rpartition("/")
    key, _, field = file.partition(".")
    return f"{folder}/{key}" if folder else key, field


def _write(path: Path, header: Mapping[str, Any], entries: NDArray[np.void]) -> None:
    text = json.dumps({**header, "samples": len(entries)}).encode()
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(len(text).to_bytes(_HEADER_BYTES, "little") + text)
        file.write(entries.tobytes())
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


@contextmanager
def _locked(path: Path) -> Generator[None]:
    """One process of all makes an index; the others wait for it."""
    try:
        file = path.with_name(f"{path.name}.lock").open("w")
    except OSError as error:
        raise InvalidInputError(
            f"{path}: {error.strerror}: the index of the shards cannot be written",
            hint="give index: a path that can, in the data's args",
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _expanded(shards: str) -> list[str]:
    """The names for which ``{first..last}`` stands."""
    match = _BRACES.search(shards)
    if match is None:
        return [shards]
    first, last = match.groups()
    if not len(first) <= len(last) or not int(first) <= int(last) <= int(first) + 1_000_000:
        raise InvalidInputError(
            f"{shards}: no shards from {first} to {last}", hint="write {000..015}"
        )
    before, after = shards[: match.start()], shards[match.end() :]
    numbers = range(int(first), int(last) + 1)
    return [x for n in numbers for x in _expanded(f"{before}{n:0{len(first)}}{after}")]


def _decoded(members: dict[str, Any]) -> dict[str, Tensor]:
    """The fields of a sample that need no code of the user's."""
    fields: dict[str, Tensor] = {}
    for name, content in members.items():
        field, _, kind = name.rpartition(".")
        if kind == "npy":
            array = np.load(io.BytesIO(content), allow_pickle=False)
            fields[field or kind] = torch.from_numpy(array)
        elif kind == "cls":
            fields[field or kind] = torch.tensor(int(content))
        elif name != "__key__":
            raise InvalidInputError(
                f"sample {members['__key__']}: nothing decodes {name!r}",
                hint="give decode: module:function in the data's args",
            )
    return fields


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        made = tar_shards(argument)
        sys.stdout.write(f"{argument}: {len(made)} samples\n")
