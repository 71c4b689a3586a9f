"""GPipe's order: all forwards of a round, then all of its backwards.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
2019, section 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from mmplan.program.samples import SampleRange
from mmplan.program.schedules.policy import SchedulePolicy


class Rounds(SchedulePolicy):
    """The pipeline drains after each round."""

    # Between its rounds there is nothing that a lead could hide.
    runs_ahead: ClassVar[bool] = False

    def forwards_before(
        self,
        spans: Sequence[SampleRange],
        per_round: int,
        sync_batches: Sequence[int],
        sync_lead: int,
    ) -> list[int]:
        """All of the round that a backward belongs to."""
        return [(m // per_round + 1) * per_round for m in range(len(spans))]

    def in_flight(self, per_round: Any, ahead: Any) -> Any:
        """K."""
        return per_round

    def round_s(self, per_round: Any, interval_s: Any, fill_and_drain_s: Any) -> Any:
        """The round by itself."""
        return fill_and_drain_s
