"""The process that workers are forked from: it imports once, and is tied to who started it."""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.util
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from mmlaunch.process.process_tree import SOCKETS

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


def exit_code() -> int | None:
    """How this process's fork server has ended, negative for a signal; None while it runs."""
    server: Any = multiprocessing.forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
    if server._forkserver_pid is None:
        return None
    # It is left to be reaped by whoever starts the next one.
    found = os.waitid(os.P_PID, server._forkserver_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


@contextmanager
def main_left_out() -> Generator[None]:
    """Processes that start meanwhile do not import the program that starts them."""
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _sheltered() -> Generator[None]:
    """Processes begin with signals ignored, and without the current folder among their modules.

    A batch system sends SIGTERM to every process, a terminal SIGINT: before the guard is loaded
    they would end the fork server, and the workers with it. What lies in the current folder may
    have the name of a module of the standard library. What killed workers leave behind is cleared
    away by a process that would speak of it below the error.
    """
    environment = dict(os.environ)
    in_main = threading.current_thread() is threading.main_thread()
    ignored = (signal.SIGTERM, signal.SIGINT) if in_main else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    silent = "ignore:resource_tracker"
    others = environment.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = f"{others},{silent}" if others else silent
    os.environ["PYTHONSAFEPATH"] = "1"
    # A process of multiprocessing's has its parent's folder, which the parent's own server clears.
    if multiprocessing.parent_process() is None:
        os.environ[SOCKETS] = multiprocessing.util.get_temp_dir()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        for name in ("PYTHONWARNINGS", "PYTHONSAFEPATH", SOCKETS):
            os.environ.pop(name, None)
            if name in environment:
                os.environ[name] = environment[name]
        for number, handler in before.items():
            signal.signal(number, handler)
