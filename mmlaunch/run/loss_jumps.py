"""Losses that jump, as those of a run that explodes do."""

from __future__ import annotations

from collections import deque
from statistics import median

from mmplan.schema.train import LossJumpSpec

# Fewer losses have no spread to speak of.
_LEAST = 10
# Of the median: losses that hardly differ would jump at every noise.
_LEAST_SPREAD = 0.05


class LossJumps:
    """The last losses of a run, and whether the next one fits them.

    Args:
        rule: the workload's.
    """

    def __init__(self, rule: LossJumpSpec) -> None:
        self._rule = rule
        self._last: deque[float] = deque(maxlen=rule.window)

    def add(self, loss: float) -> float | None:
        """The median that a finite loss has jumped from; None where it fits.

        A loss that stays high is the usual one after half a window.
        """
        jumped_from = None
        if len(self._last) >= _LEAST:
            middle = median(self._last)
            spread = median(abs(one - middle) for one in self._last)
            far = self._rule.times * max(spread, _LEAST_SPREAD * abs(middle))
            jumped_from = middle if loss - middle > far else None
        self._last.append(loss)
        return jumped_from
