"""The process that workers are forked from: it imports once, and is tied to who started it."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import signal
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

# The guard first: it ties the fork server to its parent before anything that takes time loads.
_PRELOAD = ["mmlaunch.process.forkserver_guard", "torch"]
# Tensors without storage import torch._dynamo at their first use, in every rank and every attempt.
RANK_MODULES = ("mmlaunch.launch.launch", "mmlaunch.run.training_worker", "torch._dynamo")


def start(modules: Sequence[str] = ()) -> None:
    """Start this process's fork server, where it has none yet; returns while it still imports.

    Args:
        modules: that its processes need, beside torch.
    """
    with _sheltered():
        multiprocessing.forkserver.set_forkserver_preload([*_PRELOAD, *modules])
        multiprocessing.forkserver.ensure_running()


@contextmanager
def _sheltered() -> Generator[None]:
    """Processes begin with SIGTERM ignored, and without the current folder among their modules.

    A batch system sends SIGTERM to every process: before the guard is loaded it would end the
    fork server, and the workers with it. What lies in the current folder may have the name of
    a module of the standard library.
    """
    before, safe = None, os.environ.get("PYTHONSAFEPATH")
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if safe is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = safe
        if before is not None:
            signal.signal(signal.SIGTERM, before)
