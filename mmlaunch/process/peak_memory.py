"""Peak memory of a rank's steps, to be compared with the plan's prediction."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from mmlaunch.process.malloc import give_back

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# What a process writes there to let its peak begin anew (proc(5)).
_FORGET_PEAK = "5"


class PeakMemory:
    """Most bytes that a rank's tensors held during its steps.

    On CUDA the most that torch's allocator gave out since the model was built.

    On a CPU Linux keeps the peak of the process's resident memory. How far that is above what
    stays when the steps are over, and the tensors that are held then, make the peak of the
    tensors: memory that libraries take in the first steps (code, buffers, threads: some 20 MB,
    a part of it no anonymous memory) stays, and so is in neither. Freed memory that malloc keeps
    is in the peak, as it is in the machine's;
    ``MALLOC_MMAP_THRESHOLD_=131072`` in the environment makes malloc keep nothing, and steps
    slower.

    Args:
        device: the rank's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._other = 0
        self._most: int | None = None
        self._knows = device.type == "cuda" or (_STATUS.exists() and os.access(_CLEAR, os.W_OK))

    @property
    def most_bytes(self) -> int | None:
        """The peak; None where no step was noted or the system does not tell."""
        return None if self._most is None else self._most - self._other

    def begin(self, held: Iterable[Tensor]) -> None:
        """The model is built: other memory that is in use now does not count.

        Args:
            held: its tensors.
        """
        if self._knows:
            # Building a model leaves circles behind that hold tensors.
            self._set_other(held)

    def forget(self) -> None:
        """Begin a new peak: memory that was in use until now (for a checkpoint) does not count."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._knows:
            _CLEAR.write_text(_FORGET_PEAK, encoding="ascii")

    def note(self) -> None:
        """A step is over."""
        if self._knows:
            self._most = max(self._most or 0, self._peak())

    def end(self, held: Iterable[Tensor]) -> None:
        """The steps are over: memory that stays does not count, tensors excepted.

        Args:
            held: tensors that are alive now, all of them the steps' own.
        """
        # On CUDA all that is allocated is the steps' own: libraries' workspaces too.
        if self._knows and self._device.type == "cpu":
            self._set_other(held)

    def _set_other(self, held: Iterable[Tensor]) -> None:
        gc.collect()
        give_back()
        self._other = self._now() - sum(_storages(held).values())

    def _now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return _status("VmRSS")

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _status("VmHWM")


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes by address: tensors may share their memory."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def _status(field: str) -> int:
    """A field of this process's status, in bytes."""
    lines = _STATUS.read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])
