"""Write safetensors files tensor by tensor, hashed on the way and synced to the disk.

The safetensors package writes a dict that it wants whole in memory, and reports a full
disk as text. Reading stays with that package; writing is a header and raw bytes.
Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mmplan.errors import InvalidInputError, UnfitEnvironmentError
from mmplan.wording import size

_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor in a file: its key, type and full shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Size and hash of a file, checked when it is read again."""

    size_bytes: int
    sha256: str


def dtype_code(dtype: torch.dtype) -> str:
    """The format's name of a type (``F32``).

    Raises:
        InvalidInputError: the format has no such type.
    """
    if dtype not in _CODES:
        raise InvalidInputError(
            f"safetensors files hold no {dtype}", hint="keep parameters in a real or integer type"
        )
    return _CODES[dtype]


def dtype_of(code: str) -> torch.dtype:
    """The type that a format's name stands for; KeyError for a name that we never write."""
    return _DTYPES[code]


def file_order(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The order in which a file's tensors are read and written.

    Wider types first, so that each is aligned to its type in a reader's memory map: the
    format allows no padding between tensors.
    """
    return sorted(specs, key=lambda spec: -spec.dtype.itemsize)


def write_tensors(
    path: Path,
    specs: Sequence[TensorSpec],
    read: Callable[[str], Tensor],
) -> FileDigest:
    """Write one safetensors file and sync it; one tensor is held at a time.

    Args:
        path: the file; an existing one is overwritten, so give a temporary name.
        specs: the tensors; ``read`` is called with each name once, in ``file_order``.
        read: gives the tensor, on any device, of the spec's type and shape.

    Raises:
        OSError: the disk is full, or any other failure of the file system.
        ValueError: ``read`` gave another type or shape than the spec says.
    """
    return write_synced(path, _contents(file_order(specs), read))


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
    """Write a file chunk by chunk and sync it."""
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size_bytes += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(size_bytes=size_bytes, sha256=digest.hexdigest())


def sync_folder(path: Path) -> None:
    """Make the names in a folder (new files, renames) survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_error(
    exc: OSError, *, what: str, folder: Path, needed_bytes: int, mend: str
) -> UnfitEnvironmentError:
    """The user's error for a write that failed; a full disk gets its numbers.

    Args:
        exc: the failure.
        what: the thing that was being written ("the checkpoint of step 40").
        folder: where; the nearest existing parent is asked for its free space.
        needed_bytes: bytes of all that was to be written.
        mend: the hint.
    """
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
        free_bytes = shutil.disk_usage(existing).free
        return UnfitEnvironmentError(
            f"disk full: {what} needs {size(needed_bytes)} in {folder}, "
            f"{size(free_bytes)} are free",
            hint=mend,
        )
    return UnfitEnvironmentError(
        f"cannot write {what} ({size(needed_bytes)}) in {folder}: {exc.strerror or exc}",
        hint=mend,
    )


def _contents(
    specs: Sequence[TensorSpec], read: Callable[[str], Tensor]
) -> Iterator[bytes | memoryview]:
    """Bytes of the file: length of the header, header, every tensor."""
    header = _header(specs)
    yield len(header).to_bytes(8, "little")
    yield header
    for spec in specs:
        tensor = read(spec.name)
        if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
            raise ValueError(
                f"{spec.name}: got {tensor.dtype} {tuple(tensor.shape)}, "
                f"announced {spec.dtype} {spec.shape}"
            )
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for spec in specs:
        stop = start + spec.size_bytes
        entries[spec.name] = {
            "dtype": dtype_code(spec.dtype),
            "shape": list(spec.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries).encode()
    return text + b" " * (-len(text) % 8)
