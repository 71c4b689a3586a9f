"""Keeps workers from outliving their launcher, whatever ends it.

Two guards, because each has a gap. The kernel ends the fork server with the launcher
and the workers with the fork server (``PR_SET_PDEATHSIG``); that reaches stopped and
wedged workers too, but only where the fork server could import
``mmlaunch.process.forkserver_guard``. A thread in each worker looks for the launcher every
half second; it needs a worker that still runs Python.

This module imports nothing heavy: the fork server loads it before torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Linux's prctl.h.
_PR_SET_PDEATHSIG = 1
# The environment's word to a fork server: where the sockets of its parent are.
SOCKETS = "MMLAUNCH_SOCKETS"
# How late a worker may notice the launcher's death; chosen by hand.
_POLL_S = 0.5
# For a released worker to exit by itself; chosen by hand.
_EXIT_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A process for certain: numbers are reused, number and start time are not."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The process that has this number now."""
        stat = _read_stat(pid)
        return cls(pid=pid, start_ticks=stat[1] if stat else 0)

    def state(self) -> str | None:
        """Kernel's letter (R, S, D, T, ...); None when it is gone; "S" where there is no /proc."""
        stat = _read_stat(self.pid)
        if stat is not None:
            return stat[0] if stat[1] == self.start_ticks and stat[0] not in "ZX" else None
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return None
        return "S"

    def alive(self) -> bool:
        """Whether it still runs (or is stopped, but not dead)."""
        return self.state() is not None

    def stopped(self) -> bool:
        """Whether a signal or a debugger holds it."""
        return self.state() in ("T", "t")


def _read_stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time in clock ticks; the name before them may hold anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel signal this process when its parent dies; no-op where it cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def guard_loader(*_: object) -> None:
    """A ``worker_init_fn``: the loading process ends with its rank, and not before.

    On its own it notices a dead parent only after five seconds. SIGTERM goes to every process
    when a batch system stops a run; the rank still has a step to finish and to save.
    """
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def isolate_worker(launcher: ProcessId, *, on_terminate: Callable[[], None]) -> None:
    """Tie this worker to its launcher and away from the terminal's signals.

    The worker leads a process group, so that a Ctrl-C meant for the launcher does not
    reach it and its own children can be killed with it. SIGTERM (a batch system sends
    it to every process) asks for an orderly stop.
    """
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    die_with_parent()
    if not launcher.alive():  # it died before the line above took effect
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = os.getpid()

    def terminate(signum: int, _frame: object) -> None:
        if os.getpid() == owner:
            on_terminate()
            return
        # A child forked from this worker (data loading) keeps the usual meaning.
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    signal.signal(signal.SIGTERM, terminate)


def watch_launcher(launcher: ProcessId, *, released: Callable[[], bool]) -> None:
    """Start the thread that ends this worker when the launcher is gone.

    Args:
        launcher: the process to look for.
        released: true once the launcher has every result; a worker that does not exit
            by itself soon after (a thread of the user's that never ends) is ended.
    """

    def watch() -> None:
        released_s: float | None = None
        while True:
            time.sleep(_POLL_S)
            if not launcher.alive():
                kill_group(os.getpid())
            if released_s is None and released():
                released_s = time.monotonic()
            if released_s is not None and time.monotonic() - released_s > _EXIT_GRACE_S:
                os._exit(0)

    threading.Thread(target=watch, name="mmlaunch-guard", daemon=True).start()


def kill_group(pid: int) -> None:
    """SIGKILL a worker and its children; it may not have become a group's leader yet."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
