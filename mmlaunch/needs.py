"""Which samples and data fields a rank needs: those of its stages and losses, no others."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmplan.program.model import Program


@dataclass(slots=True)
class TaskNeeds:
    """What one rank loads of one task's batch.

    Attributes:
        ranges: batch positions.
        fields: data fields.
    """

    ranges: list[tuple[int, int]] = field(default_factory=list)
    fields: set[str] = field(default_factory=set)


def rank_needs(program: Program, rank: int) -> dict[str, TaskNeeds]:
    """Needs by task; a task of which the rank runs nothing is absent."""
    needs: dict[str, TaskNeeds] = {}
    for stage in program.stages_of(rank):
        place = stage.place(rank)
        if place is None:
            continue
        hosted = [source for i in stage.hosted for source in program.losses[i].host_inputs]
        fields = {s.field for s in (*stage.inputs, *hosted) if s.field is not None}
        need = needs.setdefault(stage.task, TaskNeeds())
        if fields:
            need.fields |= fields
            need.ranges += stage.microbatches[place[0]]
    for loss in program.losses:
        fields = {s.field for s in loss.sync_inputs if s.field is not None}
        if rank in loss.ranks and fields:
            # A cross-sample loss sees the data of its whole sync batches.
            needs[loss.task].fields |= fields
            needs[loss.task].ranges.append((0, program.batches[loss.task]))
    return needs
