"""The order that waves ask for on every rank: slice after slice, backwards in mirror image."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mmplan.program.instructions import Op, ReplicaCompute
from mmplan.program.model import Stage
from mmplan.schema.plan import Plan

StageReplica = tuple[Stage, int]


def wave_precedences(
    plan: Plan, stages: Sequence[Stage]
) -> list[tuple[ReplicaCompute, ReplicaCompute]]:
    """Pairs of computes, the first of which ends before the second starts.

    On each rank and in each round, forwards follow each other as their slices start and
    backwards as they end, last first; the forwards of a round come before its backwards, and
    these before the next round. Units that are in no wave, or whose rounds are other in
    number than those of the units beside them, are left to the order of their messages.
    """
    pairs: dict[tuple[ReplicaCompute, ReplicaCompute], None] = {}
    for row in _rows(plan, stages).values():
        if len({_rounds(place) for place in row}) == 1:
            pairs.update(dict.fromkeys(pairwise(_computes(row))))
    return list(pairs)


def turns(
    plan: Plan, stages: Sequence[Stage]
) -> dict[int, list[tuple[ReplicaCompute, ReplicaCompute | None]]]:
    """Per rank of the waves and per round, its last forward and its first backward if any.

    Syncs stand between the two. A sync blocks all of its ranks: one that came before a forward
    would hold up what the waves have there in the meantime, one after a backward would hold up
    whatever waits for its gradient elsewhere.
    """
    found: dict[int, list[tuple[ReplicaCompute, ReplicaCompute | None]]] = {}
    for rank, row in _rows(plan, stages).items():
        if len({_rounds(place) for place in row}) == 1:
            computes = list(_computes(row))
            found[rank] = [_turn(row, computes, r) for r in range(_rounds(row[0]))]
    return found


def _turn(
    row: Sequence[StageReplica], computes: Sequence[ReplicaCompute], r: int
) -> tuple[ReplicaCompute, ReplicaCompute | None]:
    stage, d = row[-1]
    last = Op.FORWARD, stage.index, d, _of_round(stage, d, r)[-1]
    following = computes.index(last) + 1
    first = computes[following] if following < len(computes) else None
    return last, first if first is not None and first[0] is Op.BACKWARD else None


def _rows(plan: Plan, stages: Sequence[Stage]) -> dict[int, list[StageReplica]]:
    """Per rank its slices, in the order in which the waves start them."""
    spans = {item.unit: item.start_s for wave in plan.waves for item in wave.slices}
    rows: defaultdict[int, list[StageReplica]] = defaultdict(list)
    for stage in stages:
        if stage.unit in spans:
            for d, group in enumerate(stage.ranks):
                for rank in group:
                    rows[rank].append((stage, d))
    for row in rows.values():
        row.sort(key=lambda place: (spans[place[0].unit], place[0].index))
    return rows


def _rounds(place: StageReplica) -> int:
    stage, d = place
    return len(stage.microbatches[d]) // stage.rounds[d]


def _computes(row: Sequence[StageReplica]) -> Iterator[ReplicaCompute]:
    """All computes of a rank's slices, in order."""
    for r in range(_rounds(row[0])):
        for stage, d in row:
            for mb in _of_round(stage, d, r):
                yield Op.FORWARD, stage.index, d, mb
        for stage, d in reversed(row):
            if stage.has_backward:
                for mb in _of_round(stage, d, r):
                    yield Op.BACKWARD, stage.index, d, mb


def _of_round(stage: Stage, d: int, r: int) -> range:
    return range(r * stage.rounds[d], (r + 1) * stage.rounds[d])
