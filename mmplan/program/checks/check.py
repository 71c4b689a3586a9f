"""Check a program on its data alone, before any process starts."""

from __future__ import annotations

from collections.abc import Iterator

from mmplan.program.checks.instruction_faults import (
    reference_faults,
    stage_faults,
    structure_faults,
    where,
)
from mmplan.program.checks.sum_faults import sum_faults
from mmplan.program.checks.update_faults import update_faults
from mmplan.program.clocks import no_durations, replay
from mmplan.program.communicators import channel_faults, queue_faults
from mmplan.program.dependencies import GROUP, SEND, Dependencies, find_dependencies
from mmplan.program.instructions import Collective, Compute, Op, Sync
from mmplan.program.model import Program


def check_program(program: Program) -> list[str]:
    """Every fault of a program, each on one line that names the place; empty when sound.

    A program without faults computes the gradients of the loss that its graph says. Whether that
    is the workload's loss is the question of :mod:`mmplan.proof.specification`.
    """
    return [*graph_faults(program), *row_faults(program)]


def graph_faults(program: Program) -> list[str]:
    """Faults that do not depend on instructions: of samples, sums of gradients, and updates."""
    return [*stage_faults(program), *sum_faults(program), *update_faults(program)]


def row_faults(program: Program) -> list[str]:
    """Faults of the instructions: of single ones, of their order, and ranks that wait for ever.

    The rows may be those of some ranks only, if these exchange messages with each other alone.
    """
    faults = list(reference_faults(program))
    if faults:
        return faults
    dependencies = find_dependencies(program)
    clocks = replay(dependencies, no_durations(dependencies))
    faults = [
        *structure_faults(program, dependencies),
        *_deadlock_faults(program, dependencies, clocks.stuck),
        *queue_faults(program),
    ]
    # Messages without another end are faults of their own.
    return faults or list(channel_faults(program, dependencies))


def _deadlock_faults(
    program: Program, dependencies: Dependencies, stuck: dict[int, int]
) -> Iterator[str]:
    """The instruction at which each stuck rank waits, and the reason."""
    for rank, position in sorted(stuck.items()):
        yield (
            f"{where(program, rank, position)}: waits for ever: "
            f"{_reason(program, dependencies, stuck, rank, position)}"
        )


def _reason(
    program: Program, dependencies: Dependencies, stuck: dict[int, int], rank: int, position: int
) -> str:
    for message in dependencies.input_messages[rank].get(position, ()):
        edge, _, source, _, start, stop = dependencies.messages[message]
        end = stuck.get(source, len(dependencies.kind[source]))
        done = zip(dependencies.kind[source][:end], dependencies.arg[source][:end], strict=True)
        if (SEND, message) not in done:
            return f"rank {source} has not sent samples [{start},{stop}) of edge {edge}"
    if dependencies.kind[rank][position] == GROUP:
        group = dependencies.arg[rank][position]
        present = {
            r
            for r, i in stuck.items()
            if (dependencies.kind[r][i], dependencies.arg[r][i]) == (GROUP, group)
        }
        missing = [r for r in _members(program, rank, position) if r not in present]
        if missing:
            return f"ranks {missing} do not come"
    return "the sync is not started on all its ranks"


def _members(program: Program, rank: int, position: int) -> tuple[int, ...]:
    """Ranks of the group that runs an instruction together."""
    item = program.instructions[rank][position]
    if isinstance(item, Compute):
        stage = program.stages[item.stage]
        return stage.ranks[stage.place(rank)[0]]
    if isinstance(item, Collective):
        owners = program.losses if item.op is Op.COUNT else program.reductions
        return owners[item.index].ranks
    return program.losses[item.loss].ranks if isinstance(item, Sync) else ()
