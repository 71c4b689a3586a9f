"""1F1B, and batch-sync, which is 1F1B with a whole sync batch in place of one micro-batch.

1F1B: Narayanan et al., "PipeDream", 2019, section 3.2. Batch-sync: DistMM, section 4.3.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mmplan.program.samples import SampleRange
from mmplan.program.schedules.policy import SchedulePolicy


@dataclass(frozen=True)
class Alternating(SchedulePolicy):
    """One forward, one backward after the warm-up.

    Attributes:
        whole_round: the warm-up of the last stage is a round, since a sync must end before the
            first backward, and not one micro-batch.
    """

    whole_round: bool
    runs_ahead: ClassVar[bool] = True

    def forwards_before(
        self,
        spans: Sequence[SampleRange],
        per_round: int,
        sync_batches: Sequence[int],
        sync_lead: int,
    ) -> list[int]:
        """``m + 1``; where the stage feeds syncs, ``m`` and the sync batch's K micro-batches."""
        before = [m + 1 for m in range(len(spans))]
        starts = [start for start, _ in spans]
        for size in sync_batches:
            # Last micro-batch that reaches into the sync batch where micro-batch m ends.
            needed = [bisect_left(starts, -(-stop // size) * size) for _, stop in spans]
            warm_up = max(n - m for m, n in enumerate(needed)) + sync_lead
            before = [min(len(spans), max(b, m + warm_up)) for m, b in enumerate(before)]
        return before

    def in_flight(self, per_round: Any, ahead: Any) -> Any:
        """``1 + ahead``; batch-sync ``K + ahead``."""
        return (per_round if self.whole_round else 1) + ahead

    def round_s(self, per_round: Any, interval_s: Any, fill_and_drain_s: Any) -> Any:
        """Syncs hide behind the steady state: K intervals."""
        return per_round * interval_s
