"""Check a program on its data alone, before any process starts."""

from __future__ import annotations

from collections.abc import Iterator

from mmplan.program.checks.instruction_faults import reference_faults, structure_faults, where
from mmplan.program.checks.sample_coverage import coverage_faults
from mmplan.program.clocks import no_durations, replay
from mmplan.program.dependencies import GANG, SEND, Wiring, wire
from mmplan.program.instructions import Collective, Compute, Op, Sync
from mmplan.program.model import Program


def check_program(program: Program) -> list[str]:
    """Every fault of a program, each on one line that names the place; empty when sound.

    Checked are the single instructions (:mod:`mmplan.program.checks.instruction_faults`), that no
    rank waits for ever, and that every sample enters every stage once and reaches every gradient
    once (:mod:`mmplan.program.checks.sample_coverage`).
    """
    faults = list(reference_faults(program))
    if faults:
        return faults
    wiring = wire(program)
    clocks = replay(wiring, no_durations(wiring))
    return [
        *structure_faults(program),
        *_deadlock_faults(program, wiring, clocks.stuck),
        *coverage_faults(program, wiring, clocks.order),
    ]


def _deadlock_faults(program: Program, wiring: Wiring, stuck: dict[int, int]) -> Iterator[str]:
    """Where each rank that never ends waits, and for whom."""
    for rank, position in sorted(stuck.items()):
        yield (
            f"{where(program, rank, position)}: waits for ever: "
            f"{_reason(program, wiring, stuck, rank, position)}"
        )


def _reason(
    program: Program, wiring: Wiring, stuck: dict[int, int], rank: int, position: int
) -> str:
    for message in wiring.needs[rank].get(position, ()):
        edge, _, source, _, start, stop = wiring.messages[message]
        if not _is_sent(wiring, stuck, source, message):
            return f"rank {source} has not sent samples [{start},{stop}) of edge {edge}"
    if wiring.kind[rank][position] == GANG:
        gang = wiring.arg[rank][position]
        missing = [r for r in _members(program, rank, position) if not _at(wiring, stuck, r, gang)]
        if missing:
            return f"ranks {missing} do not come"
    return "the sync is not started on all its ranks"


def _is_sent(wiring: Wiring, stuck: dict[int, int], source: int, message: int) -> bool:
    end = stuck.get(source, len(wiring.kind[source]))
    return any(
        wiring.kind[source][i] == SEND and wiring.arg[source][i] == message for i in range(end)
    )


def _at(wiring: Wiring, stuck: dict[int, int], rank: int, gang: int) -> bool:
    position = stuck.get(rank)
    return (
        position is not None
        and wiring.kind[rank][position] == GANG
        and wiring.arg[rank][position] == gang
    )


def _members(program: Program, rank: int, position: int) -> tuple[int, ...]:
    """Ranks of the gang that an instruction belongs to."""
    item = program.instructions[rank][position]
    if isinstance(item, Compute):
        stage = program.stages[item.stage]
        return stage.ranks[stage.place(rank)[0]]
    if isinstance(item, Collective):
        owners = program.losses if item.op is Op.COUNT else program.reductions
        return owners[item.index].ranks
    return program.losses[item.loss].ranks if isinstance(item, Sync) else ()
