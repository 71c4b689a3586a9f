"""Write safetensors files tensor by tensor, hashed on the way and synced to the disk.

The safetensors package writes a dict that it wants whole in memory, and reports a full
disk as text. Reading stays with that package; writing is a header and raw bytes.
Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mmlaunch.checkpoint.folder import FileDigest, write_synced
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
# Of the header's length, and to which the header is filled up.
_LENGTH_BYTES = 8
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
    return write_synced(path, _contents(specs, read))


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


def layout(specs: Sequence[TensorSpec]) -> tuple[bytes, list[tuple[TensorSpec, int]], int]:
    """A file's first bytes, every tensor with the place of its own, and the file's size."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ordered, starts = file_order(specs), [0]
    for spec in ordered:
        starts.append(starts[-1] + spec.size_bytes)
        entries[spec.name] = {
            "dtype": dtype_code(spec.dtype),
            "shape": list(spec.shape),
            "data_offsets": starts[-2:],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    places = [len(head) + start for start in starts]
    return head, list(zip(ordered, places, strict=False)), places[-1]


def _contents(
    specs: Sequence[TensorSpec], read: Callable[[str], Tensor]
) -> Iterator[bytes | memoryview]:
    """Bytes of the file: its head, every tensor."""
    head, places, _ = layout(specs)
    yield head
    for spec, _ in places:
        tensor = read(spec.name)
        if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
            raise ValueError(
                f"{spec.name}: got {tensor.dtype} {tuple(tensor.shape)}, "
                f"announced {spec.dtype} {spec.shape}"
            )
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data
