"""Faults planted in compiled programs; each takes a function that picks a number below n."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from mmplan.program.instructions import Collective, Compute, Instruction, Message, Op, Sync
from mmplan.program.model import Program

Row = tuple[Instruction, ...]


def with_rows(program: Program, rows: dict[int, Row]) -> Program:
    changed = tuple(rows.get(rank, row) for rank, row in enumerate(program.instructions))
    return replace(program, instructions=changed)


def places(
    program: Program, matches: Callable[[Instruction], bool]
) -> Iterator[tuple[int, int, Instruction]]:
    for rank, row in enumerate(program.instructions):
        for position, item in enumerate(row):
            if matches(item):
                yield rank, position, item


def drop(program: Program, rank: int, position: int) -> Program:
    row = program.instructions[rank]
    return with_rows(program, {rank: row[:position] + row[position + 1 :]})


def put(program: Program, rank: int, position: int, item: Instruction) -> Program:
    row = program.instructions[rank]
    return with_rows(program, {rank: (*row[:position], item, *row[position + 1 :])})


def without(program: Program, matches: Callable[[int, Instruction], bool]) -> Program:
    rows = {
        rank: tuple(item for item in row if not matches(rank, item))
        for rank, row in enumerate(program.instructions)
    }
    return with_rows(program, rows)


def not_started(program: Program) -> Program:
    """The program with all sums made in REDUCE."""
    return without(program, lambda _, x: x.op is Op.REDUCE_START)


def is_gradient(item: Instruction) -> bool:
    return isinstance(item, Message) and item.op in (Op.SEND_B, Op.RECV_B)


def _is_message(item: Instruction) -> bool:
    return isinstance(item, Message)


def _is_compute(item: Instruction) -> bool:
    return isinstance(item, Compute)


def _drop_gradient(program: Program, pick: Callable[[int], int]) -> Program | None:
    found = list(places(program, is_gradient))
    if not found:
        return None
    rank, position, _ = found[pick(len(found))]
    return drop(program, rank, position)


def _drop_gradient_at_both_ends(program: Program, pick: Callable[[int], int]) -> Program | None:
    found = [p for p in places(program, is_gradient) if p[2].op is Op.SEND_B]
    if not found:
        return None
    rank, _, sent = found[pick(len(found))]
    assert isinstance(sent, Message)
    ends = {(rank, Op.SEND_B, sent.peer), (sent.peer, Op.RECV_B, rank)}
    samples = sent.edge, sent.start, sent.stop
    return without(
        program,
        lambda r, x: (
            isinstance(x, Message)
            and (r, x.op, x.peer) in ends
            and (x.edge, x.start, x.stop) == samples
        ),
    )


def _alter_range(program: Program, pick: Callable[[int], int]) -> Program | None:
    found = list(places(program, _is_message))
    if not found:
        return None
    rank, position, item = found[pick(len(found))]
    assert isinstance(item, Message)
    shift = (-1, 1)[pick(2)]
    ends = ((shift, shift), (shift, 0), (0, shift))[pick(3)]
    start, stop = item.start + ends[0], item.stop + ends[1]
    if start < 0 or start == stop:
        return None
    return put(program, rank, position, replace(item, start=start, stop=stop))


def _swap_microbatches(program: Program, pick: Callable[[int], int]) -> Program | None:
    """Two messages of one kind on one rank carry each other's micro-batch."""
    found = list(places(program, _is_message))
    if not found:
        return None
    rank, position, item = found[pick(len(found))]
    assert isinstance(item, Message)
    others = [
        (p, x)
        for p, x in enumerate(program.instructions[rank])
        if isinstance(x, Message)
        and (x.op, x.edge, x.peer) == (item.op, item.edge, item.peer)
        and x.mb != item.mb
    ]
    if not others:
        return None
    other_position, other = others[pick(len(others))]
    program = put(program, rank, position, replace(other, mb=item.mb))
    return put(program, rank, other_position, replace(item, mb=other.mb))


def _run_twice(program: Program, pick: Callable[[int], int]) -> Program:
    found = list(places(program, _is_compute))
    rank, position, item = found[pick(len(found))]
    row = program.instructions[rank]
    later = position + pick(len(row) - position)
    return with_rows(program, {rank: (*row[:later], item, *row[later:])})


def _drop_reduce(program: Program, pick: Callable[[int], int]) -> Program | None:
    found = list(places(program, lambda item: item.op is Op.REDUCE))
    if not found:
        return None
    rank, position, _ = found[pick(len(found))]
    return drop(program, rank, position)


def _shrink_reduction(program: Program, pick: Callable[[int], int]) -> Program | None:
    """A reduction forgets one of its ranks, consistently: only coverage can see it."""
    found = program.block_reductions
    if not found:
        return None
    reduction = found[pick(len(found))]
    lost = reduction.ranks[pick(len(reduction.ranks))]
    ranks = tuple(rank for rank in reduction.ranks if rank != lost)
    reductions = list(program.reductions)
    reductions[reduction.index] = replace(reduction, ranks=ranks)
    program = replace(program, reductions=tuple(reductions))
    gone = [Collective(op, reduction.index) for op in (Op.REDUCE_START, Op.REDUCE)]
    return without(program, lambda rank, item: rank == lost and item in gone)


def _skip_sync(program: Program, pick: Callable[[int], int]) -> Program | None:
    """A sync is skipped on every rank: nobody waits, and only its gradient is missing."""
    found = list(places(program, lambda item: isinstance(item, Sync)))
    if not found:
        return None
    sync = found[pick(len(found))][2]
    assert isinstance(sync, Sync)
    key = sync.loss, sync.batch
    return without(program, lambda _, x: isinstance(x, Sync) and (x.loss, x.batch) == key)


def _skip_sync_on_one_rank(program: Program, pick: Callable[[int], int]) -> Program | None:
    found = list(places(program, lambda item: isinstance(item, Sync)))
    if not found:
        return None
    rank, position, _ = found[pick(len(found))]
    return drop(program, rank, position)


def _forget_compute(program: Program, pick: Callable[[int], int]) -> Program:
    found = list(places(program, _is_compute))
    rank, position, _ = found[pick(len(found))]
    return drop(program, rank, position)


PLANTS = {
    "gradient dropped at one end": _drop_gradient,
    "gradient dropped at both ends": _drop_gradient_at_both_ends,
    "range altered": _alter_range,
    "micro-batches swapped": _swap_microbatches,
    "stage run twice": _run_twice,
    "compute forgotten": _forget_compute,
    "REDUCE missing on one rank": _drop_reduce,
    "reduction without one rank": _shrink_reduction,
    "sync skipped": _skip_sync,
    "sync skipped on one rank": _skip_sync_on_one_rank,
}
# Faults that leave a program which runs to its end with every message paired: the
# interval proof has to see them without help.
SILENT = ["gradient dropped at both ends", "reduction without one rank", "sync skipped"]
