"""Mutants of reductions and of the groups of losses: who sums what."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mmplan.program.instructions import Collective, Instruction, Op
from mmplan.program.model import (
    BlockReduction,
    BlockUpdate,
    LossReduction,
    LossUpdate,
    ParameterUpdate,
    Program,
    Reduction,
    TieReduction,
    TieUpdate,
)
from tests.mutants import mutator, one_of, rows_of
from tests.plants import Row, without


def with_reduction(program: Program, reduction: Reduction, **changes: Any) -> Program:
    """One reduction changed."""
    reductions = list(program.reductions)
    reductions[reduction.index] = replace(reduction, **changes)
    return replace(program, reductions=tuple(reductions))


def _blocks(program: Program, rng: random.Random) -> BlockReduction | None:
    return one_of(rng, program.block_reductions)


def _losses(program: Program, rng: random.Random) -> LossReduction | None:
    return one_of(rng, [r for r in program.reductions if isinstance(r, LossReduction)])


def _ties(program: Program, rng: random.Random) -> TieReduction | None:
    return one_of(rng, [r for r in program.reductions if isinstance(r, TieReduction)])


def _without_rank(program: Program, reduction: Reduction, rank: int, *, runs: bool) -> Program:
    """A rank leaves a reduction; ``runs`` keeps the instruction in its row."""
    ranks = tuple(r for r in reduction.ranks if r != rank)
    changes: dict[str, Any] = {"ranks": ranks}
    if not isinstance(reduction, LossReduction):
        changes["contributors"] = tuple(r for r in reduction.contributors if r != rank)
    changed = with_reduction(program, reduction, **changes)
    gone = Collective(Op.REDUCE, reduction.index)
    return changed if runs else without(changed, lambda r, x: r == rank and x == gone)


@mutator("groups")
def block_reduction_without_one_rank(program: Program, rng: random.Random) -> Program | None:
    found = _blocks(program, rng)
    if found is None or len(found.ranks) < 2:
        return None
    return _without_rank(program, found, rng.choice(found.ranks), runs=False)


@mutator("groups")
def block_reduction_without_a_rank_that_still_runs_it(
    program: Program, rng: random.Random
) -> Program | None:
    found = _blocks(program, rng)
    if found is None or len(found.ranks) < 2:
        return None
    return _without_rank(program, found, rng.choice(found.ranks), runs=True)


@mutator("groups")
def loss_reduction_without_one_rank(program: Program, rng: random.Random) -> Program | None:
    """The loss's parameters drift apart."""
    found = _losses(program, rng)
    return _without_rank(program, found, rng.choice(found.ranks), runs=False) if found else None


@mutator("groups")
def loss_reduction_without_a_rank_that_still_runs_it(
    program: Program, rng: random.Random
) -> Program | None:
    found = _losses(program, rng)
    return _without_rank(program, found, rng.choice(found.ranks), runs=True) if found else None


@mutator("groups")
def tie_reduction_without_one_rank(program: Program, rng: random.Random) -> Program | None:
    found = _ties(program, rng)
    return _without_rank(program, found, rng.choice(found.ranks), runs=False) if found else None


@mutator("groups")
def tie_reduction_without_a_contributor(program: Program, rng: random.Random) -> Program | None:
    found = _ties(program, rng)
    if found is None:
        return None
    lost = rng.choice(found.contributors)
    kept = tuple(r for r in found.contributors if r != lost)
    return with_reduction(program, found, contributors=kept)


@mutator("groups")
def tie_reduction_of_other_blocks(program: Program, rng: random.Random) -> Program | None:
    found = _ties(program, rng)
    if found is None:
        return None
    return with_reduction(program, found, blocks=(*found.blocks[:-1], found.blocks[-1] - 1))


@mutator("groups")
def tie_reduction_forgotten(program: Program, rng: random.Random) -> Program | None:
    """Embedding and head drift apart."""
    found = _ties(program, rng)
    if found is None:
        return None
    gone = Collective(Op.REDUCE, found.index)
    return without(program, lambda _, x: x == gone)


@mutator("groups")
def tie_forgotten(program: Program, rng: random.Random) -> Program | None:
    """The program does not know of it: no sum and no update."""
    owner = one_of(rng, [owner for owner, ties in program.ties.items() if ties])
    if owner is None:
        return None
    sums = [r for r in program.reductions if isinstance(r, TieReduction) and r.owner == owner]
    gone = {Collective(Op.REDUCE, r.index) for r in sums}
    updates = tuple(
        u for u in program.updates if not (isinstance(u, TieUpdate) and u.owner == owner)
    )
    changed = replace(program, ties={**program.ties, owner: ()}, updates=updates)
    return without(changed, lambda _, x: x in gone)


@mutator("groups")
def reduction_with_a_rank_more(program: Program, rng: random.Random) -> Program | None:
    found = one_of(rng, program.reductions)
    if found is None:
        return None
    rank = one_of(rng, [r for r in range(program.num_ranks) if r not in found.ranks])
    if rank is None:
        return None
    changed = with_reduction(program, found, ranks=tuple(sorted((*found.ranks, rank))))
    return _with_reduce(changed, rank, found.index)


def _with_reduce(program: Program, rank: int, index: int) -> Program:
    """The rank runs a reduction before its update."""

    def more(r: int, row: Row) -> Row:
        return (*row[:-1], Collective(Op.REDUCE, index), *row[-1:]) if r == rank else row

    return rows_of(program, more)


@mutator("groups")
def contributor_missing(program: Program, rng: random.Random) -> Program | None:
    found = _blocks(program, rng)
    if found is None or not found.contributors:
        return None
    lost = rng.choice(found.contributors)
    kept = tuple(r for r in found.contributors if r != lost)
    return with_reduction(program, found, contributors=kept)


@mutator("groups")
def contributor_of_a_group_twice(program: Program, rng: random.Random) -> Program | None:
    """A rank that has the same gradient as one that brings it already."""
    found = _blocks(program, rng)
    silent = sorted(set(found.ranks) - set(found.contributors)) if found else []
    rank = one_of(rng, silent)
    if found is None or rank is None:
        return None
    return with_reduction(program, found, contributors=tuple(sorted((*found.contributors, rank))))


@mutator("groups")
def reduction_of_fewer_blocks(program: Program, rng: random.Random) -> Program | None:
    wide = [r for r in program.block_reductions if r.blocks[1] - r.blocks[0] > 1]
    found = one_of(rng, wide)
    if found is None:
        return None
    low, high = found.blocks
    return with_reduction(program, found, blocks=rng.choice([(low + 1, high), (low, high - 1)]))


@mutator("groups")
def reduction_of_other_blocks(program: Program, rng: random.Random) -> Program | None:
    found = _blocks(program, rng)
    if found is None:
        return None
    low, high = found.blocks
    by = rng.choice([-1, 1])
    return with_reduction(program, found, blocks=(low + by, high + by)) if low + by >= 0 else None


@mutator("groups")
def reduction_of_more_blocks(program: Program, rng: random.Random) -> Program | None:
    found = _blocks(program, rng)
    if found is None:
        return None
    low, high = found.blocks
    return with_reduction(program, found, blocks=(max(0, low - 1), high + 1))


@mutator("groups")
def reduction_of_no_blocks(program: Program, rng: random.Random) -> Program | None:
    found = _blocks(program, rng)
    return with_reduction(program, found, blocks=(found.blocks[0],) * 2) if found else None


@mutator("groups")
def reduction_of_another_module(program: Program, rng: random.Random) -> Program | None:
    found = _blocks(program, rng)
    if found is None:
        return None
    owners = sorted({s.owner for s in program.stages} - {found.owner})
    owner = one_of(rng, owners)
    return None if owner is None else with_reduction(program, found, owner=owner)


@mutator("groups")
def reduction_of_other_kinds_of_parameters(program: Program, rng: random.Random) -> Program | None:
    found = one_of(rng, [r for r in program.block_reductions if r.tp > 1])
    if found is None:
        return None
    kind = rng.choice(sorted({"all", "cut", "whole"} - {found.parameters}))
    return with_reduction(program, found, parameters=kind)


@mutator("groups")
def reduction_of_other_shards(program: Program, rng: random.Random) -> Program | None:
    found = one_of(rng, [r for r in program.block_reductions if r.tp > 1])
    if found is None:
        return None
    low, high = found.shards
    spans = [(a, b) for a in range(found.tp) for b in range(a + 1, found.tp + 1)]
    return with_reduction(
        program, found, shards=rng.choice([span for span in spans if span != (low, high)])
    )


@mutator("groups")
def reduction_of_another_tp_degree(program: Program, rng: random.Random) -> Program | None:
    found = one_of(rng, [r for r in program.block_reductions if r.tp > 1])
    return with_reduction(program, found, tp=found.tp * 2) if found else None


@mutator("groups")
def reduction_forgotten(program: Program, rng: random.Random) -> Program | None:
    """Everywhere: no instruction names it."""
    found = one_of(rng, program.reductions)
    if found is None:
        return None
    gone = Collective(Op.REDUCE, found.index)
    return without(program, lambda _, x: x == gone)


@mutator("groups")
def reduction_forgotten_and_the_others_renumbered(
    program: Program, rng: random.Random
) -> Program | None:
    found = one_of(rng, program.reductions)
    if found is None:
        return None
    kept = [r for r in program.reductions if r is not found]
    numbers = {r.index: n for n, r in enumerate(kept)}

    def renumbered(_: int, row: Row) -> Row:
        items: list[Instruction] = []
        for item in row:
            if isinstance(item, Collective) and item.op is Op.REDUCE:
                if item.index in numbers:
                    items.append(replace(item, index=numbers[item.index]))
            else:
                items.append(item)
        return tuple(items)

    reductions = tuple(replace(r, index=n) for n, r in enumerate(kept))
    return replace(rows_of(program, renumbered), reductions=reductions)


def added(program: Program, new: Reduction, after: Collective) -> Program:
    """One reduction more, which its ranks run behind another one."""
    item = Collective(Op.REDUCE, new.index)

    def more(rank: int, row: Row) -> Row:
        if rank not in new.ranks:
            return row
        return tuple(y for x in row for y in ((x, item) if x == after else (x,)))

    changed = replace(program, reductions=(*program.reductions, new))
    return rows_of(changed, more)


@mutator("groups")
def reduction_written_twice(program: Program, rng: random.Random) -> Program | None:
    """Under two numbers: the sum is summed again."""
    found = one_of(rng, program.reductions)
    if found is None:
        return None
    new = replace(found, index=len(program.reductions))
    return added(program, new, Collective(Op.REDUCE, found.index))


@mutator("groups")
def reduction_in_two_halves_of_its_ranks(program: Program, rng: random.Random) -> Program | None:
    """Each half sums alone."""
    found = one_of(rng, [r for r in program.reductions if len(r.ranks) > 3])
    if found is None:
        return None
    middle = len(found.ranks) // 2
    halves = found.ranks[:middle], found.ranks[middle:]
    changes: list[dict[str, Any]] = [{"ranks": half} for half in halves]
    if not isinstance(found, LossReduction):
        for change in changes:
            kept = tuple(r for r in found.contributors if r in change["ranks"])
            change["contributors"] = kept
    new = replace(found, index=len(program.reductions), **changes[1])
    old = Collective(Op.REDUCE, found.index)
    changed = added(with_reduction(program, found, **changes[0]), new, old)
    return without(changed, lambda rank, x: rank in halves[1] and x == old)


@mutator("groups")
def two_reductions_exchange_their_ranks(program: Program, rng: random.Random) -> Program | None:
    pairs = [
        (a, b)
        for a in program.block_reductions
        for b in program.block_reductions
        if a.index < b.index and a.ranks != b.ranks
    ]
    pair = one_of(rng, pairs)
    if pair is None:
        return None
    a, b = pair
    changed = with_reduction(program, a, ranks=b.ranks, contributors=b.contributors)
    changed = with_reduction(changed, b, ranks=a.ranks, contributors=a.contributors)
    one, two = (Collective(Op.REDUCE, r.index) for r in pair)
    exchanged = {one: two, two: one}

    def renamed(_: int, row: Row) -> Row:
        return tuple(exchanged.get(x, x) if isinstance(x, Collective) else x for x in row)

    return rows_of(changed, renamed)


@mutator("groups")
def loss_reduction_of_another_loss(program: Program, rng: random.Random) -> Program | None:
    found = _losses(program, rng)
    if found is None:
        return None
    name = one_of(rng, sorted({x.name for x in program.losses} - {found.owner}))
    return None if name is None else with_reduction(program, found, owner=name)


@mutator("groups")
def ranks_of_a_reduction_in_another_order(program: Program, rng: random.Random) -> Program | None:
    found = one_of(rng, [r for r in program.reductions if len(r.ranks) > 1])
    return with_reduction(program, found, ranks=found.ranks[::-1]) if found else None


def _with_loss(program: Program, index: int, **changes: Any) -> Program:
    losses = list(program.losses)
    losses[index] = replace(losses[index], **changes)
    return replace(program, losses=tuple(losses))


@mutator("groups")
def loss_without_one_rank(program: Program, rng: random.Random) -> Program | None:
    """The rank leaves the loss's group, and its row has none of the loss's instructions."""
    found = one_of(rng, [x for x in program.losses if len(x.ranks) > 1])
    if found is None:
        return None
    lost = rng.choice(found.ranks)
    changed = _with_loss(program, found.index, ranks=tuple(r for r in found.ranks if r != lost))

    def gone(rank: int, item: Instruction) -> bool:
        return rank == lost and (
            getattr(item, "loss", None) == found.index or item == Collective(Op.COUNT, found.index)
        )

    return without(changed, gone)


@mutator("groups")
def loss_with_a_rank_less_that_still_runs_it(
    program: Program, rng: random.Random
) -> Program | None:
    found = one_of(rng, [x for x in program.losses if len(x.ranks) > 1])
    if found is None:
        return None
    lost = rng.choice(found.ranks)
    return _with_loss(program, found.index, ranks=tuple(r for r in found.ranks if r != lost))


@mutator("groups")
def loss_with_a_rank_more(program: Program, rng: random.Random) -> Program | None:
    found = one_of(rng, program.losses)
    if found is None:
        return None
    rank = one_of(rng, [r for r in range(program.num_ranks) if r not in found.ranks])
    if rank is None:
        return None
    return _with_loss(program, found.index, ranks=tuple(sorted((*found.ranks, rank))))


@mutator("groups")
def ranks_of_a_loss_in_another_order(program: Program, rng: random.Random) -> Program | None:
    found = one_of(rng, [x for x in program.losses if len(x.ranks) > 1])
    return _with_loss(program, found.index, ranks=found.ranks[::-1]) if found else None


# --- updates -----------------------------------------------------------------------------


def _with_update(program: Program, place: int, **changes: Any) -> Program:
    updates = list(program.updates)
    updates[place] = replace(updates[place], **changes)
    return replace(program, updates=tuple(updates))


def _update(
    program: Program,
    rng: random.Random,
    test: Callable[[ParameterUpdate], bool] = lambda _: True,
) -> int | None:
    """The place of an update of something that has parameters."""
    found = [n for n, u in enumerate(program.updates) if _has_parameters(u) and test(u)]
    return one_of(rng, found)


def _has_parameters(update: ParameterUpdate) -> bool:
    """Whether it is not of a loss without parameters."""
    return not (isinstance(update, LossUpdate) and update.owner.startswith(("counted", "mse")))


@mutator("groups")
def update_forgotten(program: Program, rng: random.Random) -> Program | None:
    place = _update(program, rng)
    if place is None:
        return None
    updates = program.updates
    return replace(program, updates=updates[:place] + updates[place + 1 :])


@mutator("groups")
def update_of_a_loss_forgotten(program: Program, rng: random.Random) -> Program | None:
    place = _update(program, rng, lambda u: isinstance(u, LossUpdate))
    if place is None:
        return None
    updates = program.updates
    return replace(program, updates=updates[:place] + updates[place + 1 :])


@mutator("groups")
def update_of_a_tie_forgotten(program: Program, rng: random.Random) -> Program | None:
    place = _update(program, rng, lambda u: isinstance(u, TieUpdate))
    if place is None:
        return None
    updates = program.updates
    return replace(program, updates=updates[:place] + updates[place + 1 :])


@mutator("groups")
def update_without_one_rank(program: Program, rng: random.Random) -> Program | None:
    place = _update(program, rng, lambda u: len(u.ranks) > 1)
    if place is None:
        return None
    update = program.updates[place]
    lost = rng.choice(update.ranks)
    return _with_update(
        program,
        place,
        ranks=tuple(r for r in update.ranks if r != lost),
        counted=tuple(r for r in update.counted if r != lost),
    )


@mutator("groups")
def update_in_two_halves_of_its_ranks(program: Program, rng: random.Random) -> Program | None:
    """ZeRO's parts of one half never reach the other."""
    place = _update(program, rng, lambda u: u.sharded and len(u.ranks) > 1)
    if place is None:
        return None
    update = program.updates[place]
    middle = len(update.ranks) // 2
    one, two = update.ranks[:middle], update.ranks[middle:]
    changed = _with_update(program, place, ranks=one, counted=one)
    new = replace(update, ranks=two, counted=two)
    return replace(changed, updates=(*changed.updates, new))


@mutator("groups")
def update_of_fewer_blocks(program: Program, rng: random.Random) -> Program | None:
    place = _update(
        program, rng, lambda u: isinstance(u, BlockUpdate) and u.blocks[1] - u.blocks[0] > 1
    )
    if place is None:
        return None
    update = program.updates[place]
    assert isinstance(update, BlockUpdate)
    return _with_update(program, place, blocks=(update.blocks[0] + 1, update.blocks[1]))


@mutator("groups")
def update_of_other_shards(program: Program, rng: random.Random) -> Program | None:
    # Where a sum over the same shards needs it.
    summed = {(r.tp, r.shards) for r in program.block_reductions if r.parameters == "cut"}
    place = _update(
        program, rng, lambda u: isinstance(u, BlockUpdate) and (u.tp, u.shards) in summed
    )
    if place is None:
        return None
    update = program.updates[place]
    assert isinstance(update, BlockUpdate)
    spans = [(a, b) for a in range(update.tp) for b in range(a + 1, update.tp + 1)]
    return _with_update(
        program, place, shards=rng.choice([span for span in spans if span != update.shards])
    )


@mutator("groups")
def update_of_another_module(program: Program, rng: random.Random) -> Program | None:
    place = _update(program, rng, lambda u: isinstance(u, BlockUpdate))
    if place is None:
        return None
    owners = sorted({s.owner for s in program.stages} - {program.updates[place].owner})
    owner = one_of(rng, owners)
    return None if owner is None else _with_update(program, place, owner=owner)


@mutator("groups")
def update_that_nobody_counts(program: Program, rng: random.Random) -> Program | None:
    """The norm for clipping lacks it."""
    place = _update(program, rng, lambda u: bool(u.counted))
    return None if place is None else _with_update(program, place, counted=())


@mutator("groups")
def update_that_every_copy_counts(program: Program, rng: random.Random) -> Program | None:
    """The norm for clipping counts copies."""
    place = _update(program, rng, lambda u: not u.sharded and len(u.ranks) > len(u.counted))
    return (
        None
        if place is None
        else _with_update(program, place, counted=program.updates[place].ranks)
    )


@mutator("groups")
def update_that_one_part_counts(program: Program, rng: random.Random) -> Program | None:
    place = _update(
        program, rng, lambda u: isinstance(u, BlockUpdate) and u.sharded and len(u.counted) > 1
    )
    if place is None:
        return None
    return _with_update(program, place, counted=program.updates[place].counted[:1])


@mutator("variants")
def all_updates_of_a_module_sharded_or_not(program: Program, rng: random.Random) -> Program | None:
    """ZeRO for one module."""
    owner = one_of(rng, sorted({u.owner for u in program.updates if len(u.ranks) > 1}))
    if owner is None:
        return None
    updates = tuple(
        replace(u, sharded=not u.sharded, counted=u.ranks[:1] if u.sharded else u.ranks)
        if u.owner == owner and len(u.ranks) > 1
        else u
        for u in program.updates
    )
    return replace(program, updates=updates)
