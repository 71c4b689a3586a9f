"""A child process that dies of SIGKILL just before its n-th change of the disk."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import torch

FORK = multiprocessing.get_context("fork")


def killed_at(call: int, action: Callable[[], object]) -> bool:
    """Run the action in a child; whether it was killed before it came to its end."""
    child = FORK.Process(target=_run, args=(call, action), daemon=True)
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def _run(call: int, action: Callable[[], object]) -> None:
    torch.set_num_threads(1)  # the parent's thread pool is not in a forked child
    calls = itertools.count()

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapped

    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir", "open"):
        setattr(os, name, dying(getattr(os, name)))
    action()
    os._exit(0)
