"""Check a program on its data alone, before any process starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from mmplan.program.coverage import coverage_faults
from mmplan.program.instructions import Collective, Compute, Op, Sync
from mmplan.program.model import Program
from mmplan.program.replay import no_durations, replay
from mmplan.program.structure import reference_faults, structure_faults, where
from mmplan.program.wiring import GANG, SEND, Wiring, wire


def check_program(
    program: Program, *, in_flight_limit: Mapping[tuple[int, int], int] | None = None
) -> list[str]:
    """Every fault of a program, each on one line that names the place; empty when sound.

    Checked are the single instructions (:mod:`mmplan.program.structure`), that no rank
    waits for ever, the micro-batches held, and that every sample enters every stage once
    and reaches every gradient once (:mod:`mmplan.program.coverage`).

    Args:
        program: compiled, or changed by hand.
        in_flight_limit: most micro-batches that (rank, stage) may hold; pairs that are not
            in it are not limited.
    """
    faults = list(reference_faults(program))
    if faults:
        return faults
    wiring = wire(program)
    clocks = replay(wiring, no_durations(wiring))
    return [
        *structure_faults(program),
        *_deadlock_faults(program, wiring, clocks.stuck),
        *_memory_faults(program, in_flight_limit or {}),
        *coverage_faults(program, wiring, clocks.order),
    ]


def in_flight(program: Program) -> dict[tuple[int, int], int]:
    """Most micro-batches that each (rank, stage) holds at once.

    A micro-batch is held from its forward to its backward, a split one to its ``W``; a
    stage without a backward holds the one that it computes.
    """
    most: Counter[tuple[int, int]] = Counter()
    for rank, row in enumerate(program.instructions):
        held: Counter[int] = Counter()
        for item in row:
            if not isinstance(item, Compute):
                continue
            if item.op is Op.FORWARD:
                held[item.stage] += 1
                most[rank, item.stage] = max(most[rank, item.stage], held[item.stage])
            ends = item.op in (Op.BACKWARD, Op.WEIGHT)
            if ends or not program.stages[item.stage].has_backward:
                held[item.stage] -= 1
    return dict(most)


def _memory_faults(program: Program, limits: Mapping[tuple[int, int], int]) -> Iterator[str]:
    for (rank, stage), most in sorted(in_flight(program).items()):
        limit = limits.get((rank, stage), most)
        if most > limit:
            yield (
                f"rank {rank}: stage {stage} holds {most} micro-batches at once, the memory "
                f"model allows {limit}"
            )


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
        place = stage.place(rank)
        return stage.ranks[place[0]] if place else ()
    if isinstance(item, Collective):
        owners = program.losses if item.op is Op.COUNT else program.reductions
        return owners[item.index].ranks
    return program.losses[item.loss].ranks if isinstance(item, Sync) else ()
