"""Host memory that another process reads, under tensors of this one."""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

import torch
from torch import Tensor

# All pages at once: one by one, as they are met, they take longer than the copies into them.
_MAP = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


class HostMemory:
    """A file in memory, as large as the largest use of it so far.

    For a GPU it stays mapped and is page-locked: copies into it do not pass through other memory.
    On a CPU it is mapped only while a tensor of it is alive, so it does not count as a rank's.

    Args:
        device: of the tensors that are copied into it.

    Attributes:
        descriptor: of the file, for the other process.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.descriptor = _file_in_memory()
        self._size = 0
        self._locked: Tensor | None = None

    def tensor(self, num_bytes: int) -> Tensor:
        """The first bytes, [num_bytes] of uint8; what was there before stays in them."""
        if self._locked is not None and len(self._locked) >= num_bytes:
            return self._locked[:num_bytes]
        self._unlock()
        if num_bytes > self._size:
            os.ftruncate(self.descriptor, num_bytes)
            self._size = num_bytes
        mapping = mmap.mmap(self.descriptor, num_bytes, flags=_MAP)
        mapped = torch.frombuffer(mapping, dtype=torch.uint8)
        if self._on_gpu:
            _check(_cudart().cudaHostRegister(mapped.data_ptr(), num_bytes, 0))
            self._locked = mapped
        return mapped

    def close(self) -> None:
        """Give it back."""
        self._unlock()
        os.close(self.descriptor)

    def _unlock(self) -> None:
        if self._locked is not None:
            _check(_cudart().cudaHostUnregister(self._locked.data_ptr()))
            self._locked = None


def _file_in_memory() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("mmlaunch-state")
    # Elsewhere than on Linux the system's cache is the memory.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _cudart() -> Any:
    return torch.cuda.cudart()


def _check(code: Any) -> None:
    torch.cuda.check_error(int(code))
