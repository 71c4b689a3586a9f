"""What a user is told when something is wrong, and the exit code that goes with it."""

from __future__ import annotations

import sys


class MMPlanError(Exception):
    """A failure with a message for the user; only these are caught, in ``cli``.

    Args:
        message: one line: what is wrong, where, and the numbers.
        hint: an action that mends it.
        documented: the command has written its JSON document, which says so already.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None, documented: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.documented = documented


class RunFailedError(MMPlanError):
    """It ran and met a failure: a worker died, gradients differ, a plan has a fault."""

    exit_code = 1


class NotFiniteError(RunFailedError):
    """A loss, a gradient or a weight is infinite or no number."""


class InvalidInputError(MMPlanError):
    """A file or the command line is wrong."""

    exit_code = 2


class InfeasibleError(MMPlanError):
    """No plan fits the devices or their memory."""

    exit_code = 3


class UnfitEnvironmentError(MMPlanError):
    """This machine cannot do what was asked: a package, a device or the network is missing."""

    exit_code = 4


class StoppedError(MMPlanError):
    """Stopped on request after saving; run again to go on."""

    exit_code = 75


def require_linux(what: str) -> None:
    """Say at once what only Linux can do so far: workers are found and ended by its own means.

    Raises:
        UnfitEnvironmentError: this is another system.
    """
    if sys.platform != "linux":
        raise UnfitEnvironmentError(
            f"{what} needs Linux, this is {sys.platform}",
            hint="plan here (mmplan profile --analytic, solve, compare, report); the plan's file "
            "is the same everywhere",
        )
