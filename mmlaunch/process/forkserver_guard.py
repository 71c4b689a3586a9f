"""Imported by the fork server only, and first: binds it to the launcher.

Importing has the effect; the fork server offers no other hook. It leaves the
terminal's process group, so that a Ctrl-C during start does not reach workers that
have not set up their own handling yet, and lives on after a SIGTERM, which a batch system
sends to every process: with it the kernel would end the workers that want to save.
"""

from __future__ import annotations

import os
import shutil
import signal

from mmlaunch.process.process_tree import SOCKETS, die_with_parent

os.setpgrp()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
_sockets = os.environ.pop(SOCKETS, None)
_parent = os.getppid()


def _end(*_: object) -> None:
    """A parent that was killed leaves its sockets behind; it cannot be reached by them now.

    The kernel also speaks of the death of the parent's thread that started this process.
    """
    if os.getppid() == _parent:
        return
    if _sockets is not None:
        shutil.rmtree(_sockets, ignore_errors=True)
    os._exit(1)


if hasattr(signal, "SIGRTMAX"):  # where it lacks, the kernel says nothing of a parent's death
    # Batch systems send their users SIGTERM, SIGUSR1 and their kin; nothing sends this one.
    signal.signal(signal.SIGRTMAX, _end)
    die_with_parent(signal.SIGRTMAX)
