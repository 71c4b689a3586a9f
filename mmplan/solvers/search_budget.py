"""How long searches go on: by what they did, not by the clock.

A clock would let a busy machine find worse plans, and make comparisons unfair to whichever
solver ran beside another one. So searches pay for what they do at prices of a quiet core,
and the clock only ends what takes many times as long.
"""

from __future__ import annotations

import time

# As many times as long on the clock.
LAST_RESORT = 5


class SearchBudget:
    """What a search may still do.

    Args:
        seconds: of a quiet core.
    """

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._until = time.monotonic() + LAST_RESORT * seconds

    def spend(self, seconds: float) -> None:
        """Pay for something that takes so long on a quiet core."""
        self._left_s -= seconds

    @property
    def left_s(self) -> float:
        """Seconds of a quiet core; 0 or less where it is over."""
        return self._left_s if time.monotonic() <= self._until else 0.0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self.left_s <= 0
