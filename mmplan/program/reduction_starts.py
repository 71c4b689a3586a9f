"""Reductions that begin inside the last backward of their blocks instead of after it.

``REDUCE_START`` stands directly before the compute that completes the blocks' gradients on its
rank: the last ``B`` of their stages, or the last ``W`` of a split backward. Inside that compute the
collectives of the reduction begin, last blocks first, so that they run beside what is left to
compute. Where this would put them between other collectives in an order that ranks contradict, a
reduction has no start and is summed in ``REDUCE``.

Source: Li et al., PyTorch Distributed, arXiv:2006.15704, section 3.2.3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from mmplan.program.instructions import Collective, Compute, Instruction, Op, Sync
from mmplan.program.model import BlockReduction, Graph, Program, Reduction, Stage

_InstructionRow = Sequence[Instruction]
# Position in a rank's row to the reductions that start there, in order.
_StartsOfRow = Mapping[int, Sequence[int]]
# Of a sum that is cut, the stage and the micro-batch after which each round is made.
_Rounds = Sequence[tuple[Stage, int]]
# A reduction that starts, or the fields of another collective: tuples have quick hashes.
_Meeting = int | tuple[Op, int, int | None] | tuple[Op, int, int, int, str]


def starting_stages(graph: Graph | Program, reduction: Reduction) -> list[Stage]:
    """The stages that run a reduction's blocks, where it can begin inside their last backwards.

    Chunks of one unit may have the blocks, and several tasks may run them. On each rank the last
    backward of them all completes the gradients. None where a stage adds nothing, where several
    ranks of a replica bring gradients, or where a rank is in other tensor-parallel groups in one
    stage than in another: the ranks of a group begin a reduction inside the same computes.
    """
    if not isinstance(reduction, BlockReduction) or reduction.parameters != "all":
        return []
    first, end = reduction.blocks
    holders = [
        stage
        for stage in graph.stages
        if stage.owner == reduction.owner and stage.blocks[0] < end and first < stage.blocks[1]
    ]
    ranks = set(reduction.ranks)
    for stage in holders:
        is_one_each = all(len(ranks.intersection(group)) == 1 for group in stage.holders)
        trains = any(a < end and first < b for a, b in stage.trainable)
        if not (stage.has_backward and is_one_each and trains):
            return []
    is_held = ranks.issubset(chain.from_iterable(stage.members for stage in holders))
    return holders if is_held and _are_grouped_alike(holders) else []


def _are_grouped_alike(stages: Sequence[Stage]) -> bool:
    """Whether each rank is in the same tensor-parallel group in all stages that it runs."""
    ways = {stage.ranks for stage in stages}
    groups: dict[int, tuple[int, ...]] = {}
    places = ((rank, group) for ranks in ways for group in ranks for rank in group)
    return len(ways) == 1 or all(groups.setdefault(rank, group) == group for rank, group in places)


def rounds_of(graph: Graph | Program, reduction: Reduction) -> Iterator[tuple[Stage, int]]:
    """Of a sum that is cut, the stage and the micro-batch of each of its rounds, in order.

    The rounds are numbered stage by stage; what order they have is the rows' own.
    """
    for stage in starting_stages(graph, reduction) if is_cut(reduction) else ():
        for mb in range(len(stage.microbatches[0])):
            yield stage, mb


def completing_op(stage: Stage) -> Op:
    """The operation whose last one completes the gradients of a stage's blocks."""
    return Op.WEIGHT if stage.split else Op.BACKWARD


def with_starts(
    graph: Graph | Program, rows: Sequence[_InstructionRow]
) -> list[tuple[Instruction, ...]]:
    """The rows with a start of every reduction that can begin inside a backward."""
    # By rank and number of a sum that is cut.
    rounds: defaultdict[int, dict[int, _Rounds]] = defaultdict(dict)
    for reduction in filter(is_cut, graph.reductions):
        own = list(rounds_of(graph, reduction))
        for rank in reduction.ranks:
            rounds[rank][reduction.index] = own
    if rounds:
        rows = [_with_rounds(row, rounds[rank]) if row else () for rank, row in enumerate(rows)]
    starts = _places(graph, rows)
    left_out = _contradicted(graph, rows, starts)
    result: list[tuple[Instruction, ...]] = []
    for row, own in zip(rows, starts, strict=True):
        changed = list(row)
        for position in sorted(own, reverse=True):
            kept = [index for index in own[position] if index not in left_out]
            changed[position:position] = [Collective(Op.REDUCE_START, index) for index in kept]
        result.append(tuple(changed))
    return result


def _with_rounds(row: _InstructionRow, cut: Mapping[int, _Rounds]) -> tuple[Instruction, ...]:
    """A row with sums that are cut around each backward of their stage, not at the step's end.

    The sums end directly behind the backward, before it sends anything: a run waits for them
    inside of it, one bucket after the other.
    """
    # Of a backward, the sums and the numbers of their rounds; those of later blocks first.
    of_backward: defaultdict[Instruction, list[tuple[int, int]]] = defaultdict(list)
    for index, rounds in cut.items():
        for number, (stage, mb) in enumerate(rounds):
            backward = Compute(Op.BACKWARD, stage.index, mb)
            of_backward[backward].insert(0, (index, number))
    found: list[Instruction] = []
    for item in row:
        if isinstance(item, Collective) and item.op is Op.REDUCE and item.index in cut:
            continue
        own = of_backward.get(item, [])
        found += [Collective(Op.REDUCE_START, *sum_round) for sum_round in own]
        found.append(item)
        found += [Collective(Op.REDUCE, *sum_round) for sum_round in own]
    return tuple(found)


def is_cut(reduction: Reduction) -> bool:
    """Whether a sum is made after each micro-batch."""
    return isinstance(reduction, BlockReduction) and reduction.rounds is not None


def _places(graph: Graph | Program, rows: Sequence[_InstructionRow]) -> list[_StartsOfRow]:
    """Where reductions would start on each rank: before the last such compute of their stages."""
    # Of each rank, the reductions that are to start, and those of each stage.
    to_start: list[set[int]] = [set() for _ in rows]
    own: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in rows]
    for reduction in graph.reductions:
        for stage in starting_stages(graph, reduction) if not is_cut(reduction) else ():
            for rank in set(reduction.ranks).intersection(stage.members):
                to_start[rank].add(reduction.index)
                own[rank][stage.index].append(reduction.index)
    found: list[_StartsOfRow] = []
    for row, stages, left in zip(rows, own, to_start, strict=True):
        starts: dict[int, list[int]] = {}
        for position in range(len(row) - 1, -1, -1):
            if not left:
                break
            item = row[position]
            if not isinstance(item, Compute) or item.stage not in stages:
                continue
            if item.op is completing_op(graph.stages[item.stage]):
                # Gradients of later blocks are there first.
                starts[position] = [i for i in stages.pop(item.stage)[::-1] if i in left]
                left.difference_update(starts[position])
        found.append(starts)
    return found


def _contradicted(
    graph: Graph | Program, rows: Sequence[_InstructionRow], starts: Sequence[_StartsOfRow]
) -> set[int]:
    """The reductions whose start is in no order of collectives that all ranks agree on.

    Rows are walked from their ends, and an operation is passed when it is the last one left on all
    of its ranks. Without starts all can be passed, since all rows are parts of one order. So where
    nothing is left to pass, some ranks have come to starts: the one of the fewest blocks is left
    out.
    """
    to_come = {index for own in starts for indices in own.values() for index in indices}
    num_blocks = {
        each.index: each.blocks[1] - each.blocks[0]
        for each in graph.reductions
        if isinstance(each, BlockReduction)
    }
    tails = [
        _from_the_end(graph, rank, row, own)
        for rank, (row, own) in enumerate(zip(rows, starts, strict=True))
    ]
    left_out: set[int] = set()
    arrived: defaultdict[_Meeting, list[int]] = defaultdict(list)
    ready = list(range(len(rows)))
    while to_come:
        while ready:
            rank = ready.pop()
            for operation, size in tails[rank]:
                if left_out and operation in left_out:
                    continue
                there = arrived[operation]
                there.append(rank)
                if len(there) == size:
                    ready += arrived.pop(operation)
                    if isinstance(operation, int):
                        to_come.discard(operation)
                break
        stuck = to_come.intersection(arrived)
        if not stuck:
            return left_out | to_come
        least = min(stuck, key=lambda index: (num_blocks[index], index))
        left_out.add(least)
        to_come.discard(least)
        ready = arrived.pop(least)
    return left_out


def _from_the_end(
    graph: Graph | Program, rank: int, row: _InstructionRow, starts: _StartsOfRow
) -> Iterator[tuple[_Meeting, int]]:
    """The collective operations of a row, last ones first, with the number of their ranks.

    A start is its reduction. It lies between the sums of a tensor-parallel compute, at the same
    block on all ranks of the group, so it comes after the compute's begin and before its end.
    """
    for position in range(len(row) - 1, -1, -1):
        item = row[position]
        if isinstance(item, Compute):
            stage = graph.stages[item.stage]
            own = starts.get(position, ())
            met = stage.meeting(item.op, stage.place(rank)[0])
            if met:
                yield (item.op, item.stage, item.mb, met[0], "end"), len(met)
            for index in reversed(own):
                yield index, len(graph.reductions[index].ranks)
            if met and own:
                yield (item.op, item.stage, item.mb, met[0], "begin"), len(met)
        elif isinstance(item, Sync):
            yield (item.op, item.loss, item.batch), len(graph.losses[item.loss].ranks)
        elif isinstance(item, Collective):
            owners = graph.losses if item.op is Op.COUNT else graph.reductions
            yield (item.op, item.index, item.mb), len(owners[item.index].ranks)
