"""Programs that the compiler would not write and that train the same, or should.

Each takes a compiled program. Whether what comes out trains the same is the judge's to say.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from mmplan.program.instructions import Collective, Compute, Instruction, Message, Op, Sync
from mmplan.program.model import BlockReduction, Loss, LossReduction, PerSampleLoss, Program
from tests.mutants import group_of, mutator, one_of, other_end, rows_of, spots
from tests.mutants_of_groups import added, with_reduction
from tests.plants import Row, with_rows, without
from tests.splitting import split_by_hand

_SENDS = (Op.SEND_F, Op.SEND_B)
_RECEIVES = (Op.RECV_F, Op.RECV_B)


# --- messages ----------------------------------------------------------------------------


@mutator("variants")
def all_receives_posted_first(program: Program, rng: random.Random) -> Program:
    """On one rank."""
    chosen = rng.randrange(program.num_ranks)

    def first(rank: int, row: Row) -> Row:
        if rank != chosen:
            return row
        receives = [x for x in row if x.op in _RECEIVES]
        return (*receives, *(x for x in row if x.op not in _RECEIVES))

    return rows_of(program, first)


@mutator("variants")
def receives_posted_as_late_as_they_may(program: Program, rng: random.Random) -> Program:
    """On all ranks, each route's in the order that it had."""
    del rng
    return rows_of(program, lambda _, row: _late_receives(row))


def _late_receives(row: Row) -> Row:
    """Each receive just before the compute that takes it, or the next of its route."""
    deadline: dict[int, int] = {}
    latest: dict[Any, int] = {}
    for position in range(len(row) - 1, -1, -1):
        item = row[position]
        if isinstance(item, Message) and not item.is_send:
            ops = (Op.FORWARD,) if item.op is Op.RECV_F else (Op.BACKWARD, Op.INPUT)
            uses = [
                p
                for p in range(position, len(row))
                if isinstance(x := row[p], Compute)
                and x.op in ops
                and (x.stage, x.mb) == (item.stage, item.mb)
            ]
            route = item.op, item.peer
            end = min(uses[0] if uses else position, latest.get(route, len(row)))
            deadline[position] = latest[route] = end
    items: list[Instruction] = []
    for position, item in enumerate(row):
        items += [row[p] for p, end in sorted(deadline.items()) if end == position]
        if position not in deadline:
            items.append(item)
    return tuple(items)


@mutator("variants")
def send_later(program: Program, rng: random.Random) -> Program | None:
    """Past one compute; other sends of its route stay behind it."""
    spot = one_of(rng, spots(program, *_SENDS))
    if spot is None:
        return None
    rank, position, item = spot
    row = program.instructions[rank]
    computes = [p for p in range(position + 1, len(row)) if isinstance(row[p], Compute)]
    if not computes:
        return None
    route = [
        p
        for p in range(position, computes[0])
        if isinstance(x := row[p], Message) and (x.op, x.peer) == (item.op, item.peer)
    ]
    rest = [x for p, x in enumerate(row) if p not in route]
    at = rest.index(row[computes[0]]) + 1
    rest[at:at] = [row[p] for p in route]
    return with_rows(program, {rank: tuple(rest)})


@mutator("variants")
def messages_split_at_both_ends(program: Program, rng: random.Random) -> Program | None:
    """All messages of one edge, direction and range, for every rank of both groups."""
    long = [s for s in spots(program, *_SENDS) if s[2].stop - s[2].start > 1]
    spot = one_of(rng, long)
    if spot is None:
        return None
    item = spot[2]
    cut = rng.randrange(item.start + 1, item.stop)
    ops = (Op.SEND_F, Op.RECV_F) if item.op is Op.SEND_F else (Op.SEND_B, Op.RECV_B)

    def split(x: Instruction) -> tuple[Instruction, ...]:
        if not isinstance(x, Message) or x.op not in ops:
            return (x,)
        if (x.edge, x.start, x.stop) != (item.edge, item.start, item.stop):
            return (x,)
        return replace(x, stop=cut), replace(x, start=cut)

    return rows_of(program, lambda _, row: tuple(y for x in row for y in split(x)))


@mutator("variants")
def all_messages_of_one_sample_each(program: Program, rng: random.Random) -> Program:
    del rng

    def split(x: Instruction) -> list[Instruction]:
        if not isinstance(x, Message):
            return [x]
        return [replace(x, start=n, stop=n + 1) for n in range(x.start, x.stop)]

    return rows_of(program, lambda _, row: tuple(y for x in row for y in split(x)))


@mutator("variants")
def other_peers_of_a_tp_group(program: Program, rng: random.Random) -> Program | None:
    """A rank takes what it needs from another rank of the group that has it."""
    spot = one_of(rng, spots(program, Op.RECV_F))
    if spot is None:
        return None
    rank, position, item = spot
    edge = program.edges[item.edge]
    group = group_of(program, item.peer, edge.producer)
    other = one_of(rng, [r for r in group if r != item.peer])
    end = other_end(program, rank, item)
    if other is None or end is None:
        return None
    sent = program.instructions[end[0]][end[1]]
    assert isinstance(sent, Message)
    forward = Compute(Op.FORWARD, sent.stage, sent.mb)
    rows = {r: list(program.instructions[r]) for r in {rank, item.peer, other}}
    rows[rank][position] = replace(item, peer=other)
    rows[item.peer].remove(sent)
    at = rows[other].index(forward) + 1
    rows[other].insert(at, sent)
    return with_rows(program, {r: tuple(row) for r, row in rows.items()})


# --- orders ------------------------------------------------------------------------------


def _in_groups(program: Program, rank: int, change: Callable[[Row], Row]) -> Program:
    """The change on a rank and on all that share a tensor-parallel group with it."""
    ranks, more = {rank}, {rank}
    while more:
        found = {
            r
            for stage in program.stages
            if stage.tp > 1
            for group in stage.ranks
            if more & set(group)
            for r in group
        }
        more = found - ranks
        ranks |= found
    return rows_of(program, lambda r, row: change(row) if r in ranks else row)


def _forwards_first(row: Row) -> Row:
    """GPipe's order: all forwards, with what belongs to them, then all backwards."""
    late = (Op.BACKWARD, Op.INPUT, Op.WEIGHT, Op.SEND_B, Op.RECV_B, Op.REDUCE, Op.STEP)
    waits = [x for x in row if x.op is Op.SYNC_WAIT]
    first = [x for x in row if x.op not in late and x.op is not Op.SYNC_WAIT]
    return (*first, *waits, *(x for x in row if x.op in late))


@mutator("variants")
def all_forwards_first_on_all_ranks(program: Program, rng: random.Random) -> Program:
    """GPipe from 1F1B."""
    del rng
    return rows_of(program, lambda _, row: _forwards_first(row))


@mutator("variants")
def all_forwards_first_on_one_rank(program: Program, rng: random.Random) -> Program:
    return _in_groups(program, rng.randrange(program.num_ranks), _forwards_first)


def _adjacent(row: Row, first: Callable[[Instruction, Instruction], bool]) -> list[int]:
    return [p for p in range(len(row) - 1) if first(row[p], row[p + 1])]


def _free(a: Instruction, b: Instruction) -> bool:
    """Whether two neighbours may change places, as far as a rank can tell."""
    if a.op is b.op or Op.STEP in (a.op, b.op):
        return False
    if isinstance(a, Message) and isinstance(b, Compute | Message):
        return isinstance(b, Message) or (a.stage, a.mb) != (b.stage, b.mb)
    if isinstance(a, Compute) and isinstance(b, Message):
        return (a.stage, a.mb) != (b.stage, b.mb)
    if isinstance(a, Compute) and isinstance(b, Compute):
        return (a.stage, a.mb) != (b.stage, b.mb)
    return isinstance(a, Message) or isinstance(b, Message)


@mutator("variants")
def independent_neighbours_swapped(program: Program, rng: random.Random) -> Program | None:
    """One after the other, a dozen times, on one rank."""
    rank = rng.randrange(program.num_ranks)
    row = list(program.instructions[rank])
    for _ in range(12):
        spot = one_of(rng, _adjacent(tuple(row), _free))
        if spot is not None:
            row[spot], row[spot + 1] = row[spot + 1], row[spot]
    return with_rows(program, {rank: tuple(row)})


@mutator("variants")
def messages_and_computes_in_another_order(program: Program, rng: random.Random) -> Program:
    """Neighbours swapped on all ranks, where one of them is a message."""

    def free(a: Instruction, b: Instruction) -> bool:
        return _free(a, b) and (isinstance(a, Message) or isinstance(b, Message))

    def shuffled(_: int, row: Row) -> Row:
        items = list(row)
        for _ in range(8):
            spot = one_of(rng, _adjacent(tuple(items), free))
            if spot is not None:
                items[spot], items[spot + 1] = items[spot + 1], items[spot]
        return tuple(items)

    return rows_of(program, shuffled)


@mutator("variants")
def two_backwards_of_a_stage_swapped(program: Program, rng: random.Random) -> Program | None:
    """In a whole tensor-parallel group; messages stay where they were."""
    pairs = [
        (rank, a, b)
        for rank, row in enumerate(program.instructions)
        for a, b in _next_computes(row)
        if a.op is b.op is not Op.FORWARD and a.stage == b.stage
    ]
    pair = one_of(rng, pairs)
    return _exchange(program, *pair) if pair else None


@mutator("variants")
def two_forwards_swapped(program: Program, rng: random.Random) -> Program | None:
    pairs = [
        (rank, a, b)
        for rank, row in enumerate(program.instructions)
        for a, b in _next_computes(row)
        if a.op is b.op is Op.FORWARD
    ]
    pair = one_of(rng, pairs)
    return _exchange(program, *pair) if pair else None


def _next_computes(row: Row) -> list[tuple[Compute, Compute]]:
    computes = [x for x in row if isinstance(x, Compute)]
    return list(pairwise(computes))


def _exchange(program: Program, rank: int, a: Compute, b: Compute) -> Program:
    """Two computes change places, with their messages, on all ranks of their group."""
    turned = {a: b, b: a}
    group = {*group_of(program, rank, a.stage), *group_of(program, rank, b.stage)}

    def change(r: int, row: Row) -> Row:
        if r not in group or a not in row or b not in row:
            return row
        # The sends of a follow it to its new place, behind b's.
        after = (Op.SEND_F,) if a.op is Op.FORWARD else (Op.SEND_B,)
        sends = {
            x: [
                m
                for m in row
                if isinstance(m, Message) and m.op in after and (m.stage, m.mb) == (x.stage, x.mb)
            ]
            for x in (a, b)
        }
        rest = [x for x in row if x not in sends[a] and x not in sends[b]]
        items: list[Instruction] = []
        for x in rest:
            new = turned.get(x, x) if isinstance(x, Compute) else x
            items.append(new)
            if isinstance(x, Compute) and x in turned:
                items += sends[turned[x]]
        return tuple(items)

    return rows_of(program, change)


@mutator("variants")
def backwards_split_by_hand(program: Program, rng: random.Random) -> Program | None:
    """Weight gradients anywhere behind their input gradients."""
    if any(stage.split for stage in program.stages):
        return None
    changed = split_by_hand(program, rng.randrange(1000))
    return changed if changed.instructions != program.instructions else None


@mutator("variants")
def weight_gradients_as_late_as_they_may(program: Program, rng: random.Random) -> Program | None:
    """On one rank, all of them before the first reduction."""
    rank = rng.randrange(program.num_ranks)

    def late(row: Row) -> Row:
        weights = [x for x in row if x.op is Op.WEIGHT]
        rest = [x for x in row if x.op is not Op.WEIGHT]
        ends = [p for p, x in enumerate(rest) if x.op in (Op.REDUCE, Op.STEP)]
        at = ends[0] if ends else len(rest)
        return (*rest[:at], *weights, *rest[at:])

    changed = _in_groups(program, rank, late)
    return changed if changed.instructions != program.instructions else None


# --- batch-sync and collectives ------------------------------------------------------------


@mutator("variants")
def sync_starts_next_to_their_waits(program: Program, rng: random.Random) -> Program | None:
    """As late as they may, on all ranks."""
    del rng

    def late(_: int, row: Row) -> Row:
        items: list[Instruction] = []
        for x in row:
            if x.op is Op.SYNC_WAIT:
                assert isinstance(x, Sync)
                items.append(replace(x, op=Op.SYNC_START))
            if x.op is not Op.SYNC_START:
                items.append(x)
        return tuple(items)

    changed = rows_of(program, late)
    return changed if changed.instructions != program.instructions else None


@mutator("variants")
def sync_batches_started_in_another_order_on_all_ranks(
    program: Program, rng: random.Random
) -> Program | None:
    """Two batches of one loss start where the later of them did, in turned order, everywhere."""
    found = {(x.loss, x.batch) for _, _, x in spots(program, Op.SYNC_START)}
    pairs = [(a, b) for a in sorted(found) for b in sorted(found) if a[0] == b[0] and a[1] < b[1]]
    pair = one_of(rng, pairs)
    if pair is None:
        return None
    a, b = (Sync(Op.SYNC_START, *key) for key in pair)
    wait = Sync(Op.SYNC_WAIT, *pair[0])

    def turned(_: int, row: Row) -> Row:
        if a not in row or b not in row or row.index(b) > row.index(wait):
            return row
        return tuple(y for x in row if x != a for y in ((x, a) if x == b else (x,)))

    changed = rows_of(program, turned)
    return changed if changed.instructions != program.instructions else None


@mutator("variants")
def counts_just_before_the_first_forward(program: Program, rng: random.Random) -> Program | None:
    """Of the stage that hosts the loss, on all its ranks."""
    spot = one_of(rng, spots(program, Op.COUNT))
    if spot is None:
        return None
    host = getattr(program.losses[spot[2].index], "host", -1)

    def late(_: int, row: Row) -> Row:
        if spot[2] not in row:
            return row
        rest = [x for x in row if x != spot[2]]
        first = next(p for p, x in enumerate(rest) if isinstance(x, Compute) and x.stage == host)
        return (*rest[:first], spot[2], *rest[first:])

    changed = rows_of(program, late)
    return changed if changed.instructions != program.instructions else None


@mutator("variants")
def reductions_as_early_as_they_may(program: Program, rng: random.Random) -> Program | None:
    """On each rank behind the last backward of the blocks that are summed, others go on."""
    del rng

    def early(rank: int, row: Row) -> Row:
        items = list(row)
        for reduction in program.block_reductions:
            item = Collective(Op.REDUCE, reduction.index)
            if item not in items:
                continue
            stages = {
                stage.index
                for stage in program.stages_of(rank)
                if stage.owner == reduction.owner
                and stage.blocks[0] < reduction.blocks[1]
                and reduction.blocks[0] < stage.blocks[1]
            }
            items.remove(item)
            ends = [
                position
                for position, x in enumerate(items)
                if isinstance(x, Compute) and x.op is not Op.FORWARD and x.stage in stages
            ]
            items.insert(ends[-1] + 1 if ends else len(items) - 1, item)
        return tuple(items)

    changed = rows_of(program, early)
    return changed if changed.instructions != program.instructions else None


@mutator("variants")
def reductions_in_turned_order_on_all_ranks(program: Program, rng: random.Random) -> Program | None:
    """All of them at the end, the last first."""
    del rng
    if len(program.reductions) < 2:
        return None

    def turned(_: int, row: Row) -> Row:
        reduces = sorted(
            (x for x in row if isinstance(x, Collective) and x.op is Op.REDUCE),
            key=lambda x: -x.index,
        )
        rest = [x for x in row if x.op is not Op.REDUCE]
        return (*rest[:-1], *reduces, *rest[-1:])

    return rows_of(program, turned)


@mutator("variants", starts=True)
def one_reduction_without_its_starts(program: Program, rng: random.Random) -> Program | None:
    """Summed where it is waited for, on all ranks."""
    spot = one_of(rng, spots(program, Op.REDUCE_START))
    return without(program, lambda _, x: x == spot[2]) if spot else None


# --- reductions --------------------------------------------------------------------------


@mutator("variants")
def reduction_split_by_blocks(program: Program, rng: random.Random) -> Program | None:
    found = one_of(rng, [r for r in program.block_reductions if r.blocks[1] - r.blocks[0] > 1])
    if found is None:
        return None
    low, high = found.blocks
    cut = rng.randrange(low + 1, high)
    new = replace(found, index=len(program.reductions), blocks=(cut, high))
    changed = with_reduction(program, found, blocks=(low, cut))
    return added(changed, new, Collective(Op.REDUCE, found.index))


@mutator("variants")
def two_reductions_merged(program: Program, rng: random.Random) -> Program | None:
    """Of consecutive blocks, or with frozen ones between, over the same ranks."""
    pairs = [
        (a, b)
        for a in program.block_reductions
        for b in program.block_reductions
        if a.blocks[1] <= b.blocks[0] and _alike(a, b) and _nothing_between(program, a, b)
    ]
    pair = one_of(rng, pairs)
    if pair is None:
        return None
    a, b = pair
    changed = with_reduction(program, b, blocks=(a.blocks[0], b.blocks[1]))
    return _without_reduction(changed, a.index)


def _alike(a: BlockReduction, b: BlockReduction) -> bool:
    parts = [(r.owner, r.tp, r.shards, r.parameters, r.ranks, r.contributors) for r in (a, b)]
    return parts[0] == parts[1]


def _nothing_between(program: Program, a: BlockReduction, b: BlockReduction) -> bool:
    between = a.blocks[1], b.blocks[0]
    others = [r for r in program.block_reductions if r.owner == a.owner and r not in (a, b)]
    return not any(r.blocks[0] < between[1] and between[0] < r.blocks[1] for r in others)


def _without_reduction(program: Program, index: int) -> Program:
    """A reduction goes, and those behind it move up."""
    gone = Collective(Op.REDUCE, index)
    numbers = {r.index: r.index - (r.index > index) for r in program.reductions}
    kept = tuple(replace(r, index=numbers[r.index]) for r in program.reductions if r.index != index)
    changed = without(program, lambda _, x: x == gone)
    return replace(_renumbered(changed, reductions=numbers), reductions=kept)


@mutator("variants")
def reduction_split_by_kinds_of_parameters(program: Program, rng: random.Random) -> Program | None:
    """The cut ones and the whole ones apart."""
    found = one_of(rng, [r for r in program.block_reductions if r.parameters == "all"])
    if found is None:
        return None
    new = replace(found, index=len(program.reductions), parameters="cut")
    changed = with_reduction(program, found, parameters="whole")
    return added(changed, new, Collective(Op.REDUCE, found.index))


@mutator("variants")
def other_contributors(program: Program, rng: random.Random) -> Program | None:
    """The last rank of each tensor-parallel group in place of the first."""
    found = [
        r for r in program.block_reductions if r.parameters == "whole" and r.contributors != r.ranks
    ]
    reduction = one_of(rng, found)
    if reduction is None:
        return None
    groups = {
        group
        for stage in program.stages
        if stage.owner == reduction.owner
        and stage.blocks[0] < reduction.blocks[1]
        and reduction.blocks[0] < stage.blocks[1]
        for group in stage.ranks
    }
    last = tuple(sorted({group[-1] for group in groups}))
    if last == reduction.contributors:
        return None
    return with_reduction(program, reduction, contributors=last)


# --- numbers -----------------------------------------------------------------------------


def _renumbered(
    program: Program,
    *,
    edges: Mapping[int, int] = {},
    losses: Mapping[int, int] = {},
    reductions: Mapping[int, int] = {},
    stages: Mapping[int, int] = {},
) -> Program:
    """Every row with other numbers of edges, losses, reductions and stages."""

    def new(x: Instruction) -> Instruction:
        match x:
            case Compute():
                return replace(x, stage=stages.get(x.stage, x.stage))
            case Message():
                return replace(
                    x, stage=stages.get(x.stage, x.stage), edge=edges.get(x.edge, x.edge)
                )
            case Sync():
                return replace(x, loss=losses.get(x.loss, x.loss))
            case Collective(Op.COUNT):
                return replace(x, index=losses.get(x.index, x.index))
            case Collective():
                return replace(x, index=reductions.get(x.index, x.index))
            case _:
                return x

    return rows_of(program, lambda _, row: tuple(map(new, row)))


def _shuffled(rng: random.Random, count: int) -> dict[int, int]:
    return dict(enumerate(rng.sample(range(count), count)))


def _sorted(items: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(sorted(items, key=lambda item: item.index))


@mutator("variants")
def reductions_renumbered(program: Program, rng: random.Random) -> Program | None:
    numbers = _shuffled(rng, len(program.reductions))
    new = _sorted([replace(r, index=numbers[r.index]) for r in program.reductions])
    changed = replace(_renumbered(program, reductions=numbers), reductions=new)
    return changed if new != program.reductions else None


@mutator("variants")
def edges_renumbered(program: Program, rng: random.Random) -> Program | None:
    numbers = _shuffled(rng, len(program.edges))

    def source(x: Any) -> Any:
        return x if x.edge is None else replace(x, edge=numbers[x.edge])

    edges = _sorted([replace(e, index=numbers[e.index]) for e in program.edges])
    stages = tuple(replace(s, inputs=tuple(map(source, s.inputs))) for s in program.stages)
    losses = tuple(
        replace(x, inputs=tuple(map(source, x.inputs))) if hasattr(x, "host") else x
        for x in program.losses
    )
    changed = _renumbered(program, edges=numbers)
    changed = replace(changed, edges=edges, stages=stages, losses=losses)
    return changed if edges != program.edges else None


@mutator("variants")
def losses_renumbered(program: Program, rng: random.Random) -> Program | None:
    numbers = _shuffled(rng, len(program.losses))
    losses = _sorted([replace(x, index=numbers[x.index]) for x in program.losses])
    stages = tuple(
        replace(
            s,
            hosted=tuple(sorted(numbers[x] for x in s.hosted)),
            syncs=tuple(sorted(numbers[x] for x in s.syncs)),
        )
        for s in program.stages
    )
    changed = replace(_renumbered(program, losses=numbers), losses=losses, stages=stages)
    return changed if losses != program.losses else None


@mutator("variants")
def stages_renumbered(program: Program, rng: random.Random) -> Program | None:
    """Another order in which producers come before consumers."""
    before = {
        s.index: {e.producer for e in program.edges if e.consumer == s.index}
        for s in program.stages
    }
    numbers: dict[int, int] = {}
    while len(numbers) < len(program.stages):
        ready = [s for s in before if s not in numbers and before[s] <= set(numbers)]
        numbers[rng.choice(ready)] = len(numbers)
    stages = _sorted([replace(s, index=numbers[s.index]) for s in program.stages])
    edges = tuple(
        replace(e, producer=numbers[e.producer], consumer=numbers[e.consumer])
        for e in program.edges
    )
    losses: list[Loss] = []
    for x in program.losses:
        if isinstance(x, PerSampleLoss):
            losses.append(replace(x, host=numbers[x.host]))
        else:
            inputs = tuple(
                i if i.stage is None else replace(i, stage=numbers[i.stage]) for i in x.inputs
            )
            losses.append(replace(x, inputs=inputs))
    changed = _renumbered(program, stages=numbers)
    changed = replace(changed, stages=stages, edges=edges, losses=tuple(losses))
    return changed if stages != program.stages else None


@mutator("variants")
def loss_reductions_first(program: Program, rng: random.Random) -> Program | None:
    """On all ranks, before the blocks' and in the order that they had."""
    del rng
    losses = {r.index for r in program.reductions if isinstance(r, LossReduction)}

    def first(_: int, row: Row) -> Row:
        reduces = [x for x in row if isinstance(x, Collective) and x.op is Op.REDUCE]
        rest = [x for x in row if x.op is not Op.REDUCE]
        ordered = sorted(reduces, key=lambda x: x.index not in losses)
        return (*rest[:-1], *ordered, *rest[-1:])

    changed = rows_of(program, first)
    return changed if losses and changed.instructions != program.instructions else None
