"""The kinds of schedule. A new one is a file with its policy, and a line here and in plan.py."""

from __future__ import annotations

from mmplan.program.schedules.alternating import Alternating
from mmplan.program.schedules.interleaved_1f1b import Interleaved1F1B
from mmplan.program.schedules.policy import SchedulePolicy
from mmplan.program.schedules.rounds import Rounds
from mmplan.schema.plan import ScheduleKind

POLICIES: dict[ScheduleKind, SchedulePolicy] = {
    "batch-sync": Alternating(whole_round=True),
    "1f1b": Alternating(whole_round=False),
    "interleaved": Interleaved1F1B(whole_round=False),
    "gpipe": Rounds(),
    # Within a round as GPipe; mmplan.program.schedules.waves puts the units in order.
    "wave": Rounds(),
}
