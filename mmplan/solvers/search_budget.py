"""The budget of a search: counted work, not time on the clock.

With a clock, a busy machine would find worse plans, and solvers that run beside others would be at
a disadvantage. So a search pays for its steps at the prices of a quiet core. The clock ends only
searches that take many times as long.
"""

from __future__ import annotations

import time

# Seconds on the clock at most, over those of the budget: five processes may share a core before
# plans change. Chosen by hand.
CLOCK_FACTOR = 5


class SearchBudget:
    """The rest of a search's budget.

    Args:
        seconds: of a quiet core.
    """

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._until = time.monotonic() + CLOCK_FACTOR * seconds

    def spend(self, seconds: float) -> None:
        """Pay for a step that takes so many seconds on a quiet core."""
        self._left_s -= seconds

    @property
    def left_s(self) -> float:
        """Seconds of a quiet core; 0 or less at the end."""
        return self._left_s if time.monotonic() <= self._until else 0.0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self.left_s <= 0
