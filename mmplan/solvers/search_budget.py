"""The budget of a search: counted work, never time on the clock.

With a clock, a busy machine would find worse plans, and solvers that run beside others would be at
a disadvantage. So a search pays for its steps at the prices of a quiet core.
"""

from __future__ import annotations

# Changes of the solvers' plans are simulated for this many search budgets, and for what simulating
# the solvers' plans leaves of its patience.
NEIGHBOUR_BUDGETS = 2.5


class SearchBudget:
    """The rest of a search's budget.

    Args:
        seconds: of a quiet core.
        whole: the budget of which this is a part; what this one spends, that one spends too.

    Attributes:
        left_s: seconds of a quiet core; 0 or less at the end.
    """

    def __init__(self, seconds: float, whole: SearchBudget | None = None) -> None:
        self.left_s = seconds
        self._whole = whole

    def part(self, seconds: float) -> SearchBudget:
        """A budget for one part of the search; what it leaves stays in this one."""
        return SearchBudget(max(0.0, min(seconds, self.left_s)), self)

    def spend(self, seconds: float) -> None:
        """Pay for a step that takes so many seconds on a quiet core."""
        self.left_s -= seconds
        if self._whole is not None:
            self._whole.spend(seconds)

    def earn(self, seconds: float, *, most_s: float) -> None:
        """Get more, up to ``most_s`` in all."""
        self.left_s = max(self.left_s, min(self.left_s + seconds, most_s))

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self.left_s <= 0
