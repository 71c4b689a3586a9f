"""Imported by the fork server only, and first: binds it to the launcher.

Importing has the effect; the fork server offers no other hook. It leaves the
terminal's process group, so that a Ctrl-C during start does not reach workers that
have not set up their own handling yet.
"""

from __future__ import annotations

import os

from mmlaunch.guard import die_with_parent

os.setpgrp()
die_with_parent()
