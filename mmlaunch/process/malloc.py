"""Settings of malloc for a rank that computes on a CPU.

glibc's malloc maps every large tensor anew and gives the top of its heap back to Linux as soon
as it is free. A step allocates and frees the same sizes again and again, so each time Linux
has to find and clear pages again: of a forward of 32 images through eight blocks that was a
tenth to a quarter. CUDA's caching allocator keeps freed memory for the same reason.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

# glibc's malloc.h: parameters of mallopt(3).
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
_NEVER = -1


def keep_freed() -> bool:
    """Let malloc keep freed memory for the next allocation.

    Leaves it to a user who chose otherwise, by ``MALLOC_*`` or ``GLIBC_TUNABLES`` in the
    environment, and to another malloc (jemalloc or tcmalloc by ``LD_PRELOAD``), which keeps
    it anyhow.

    Returns:
        Whether it will.
    """
    libc = _glibc()
    if libc is None or is_chosen():
        return False
    return bool(libc.mallopt(_TRIM_THRESHOLD, _NEVER)) and bool(libc.mallopt(_MMAP_MAX, 0))


def give_back() -> None:
    """Give freed memory back to Linux, before memory is counted."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> Any:
    """The C library of this process where it has glibc's calls, else None."""
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def is_chosen() -> bool:
    """Whether the environment has settings of malloc, or another malloc."""
    names = ("GLIBC_TUNABLES", "LD_PRELOAD")
    return any(os.environ.get(n) for n in names) or any(n.startswith("MALLOC_") for n in os.environ)
