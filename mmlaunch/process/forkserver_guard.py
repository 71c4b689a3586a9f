"""Imported by the fork server only, and first: binds it to the launcher.

Importing has the effect; the fork server offers no other hook. It leaves the
terminal's process group, so that a Ctrl-C during start does not reach workers that
have not set up their own handling yet, and lives on after a SIGTERM, which a batch system
sends to every process: with it the kernel would end the workers that want to save.
"""

from __future__ import annotations

import os
import signal

from mmlaunch.process.process_tree import die_with_parent

os.setpgrp()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
die_with_parent()
