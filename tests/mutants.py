"""Mutants of programs: small functions, each of which changes one thing, or cannot.

A mutator takes a program and a source of random numbers and gives another program, or None
where there is nothing that it could change. Here are the registry, what `check` says of a
program, and the mutants of rows; ``mutants_of_groups``, ``mutants_of_graphs``,
``mutants_of_plans`` and ``legal_variants`` hold the others.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import nn

from mmplan.program.checks.check import check_program
from mmplan.program.instructions import Collective, Compute, Instruction, Message, Op, Step, Sync
from mmplan.program.model import CrossSampleLoss, Program, Stage
from mmplan.proof.prove import prove
from mmplan.proof.specification import specification_faults, specify
from mmplan.schema.agreement import plan_differences
from mmplan.schema.factories import import_factory, tied_blocks
from mmplan.schema.faults import plan_faults
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload
from tests.plants import Row, drop, not_started, put, with_rows, without
from tests.solving import module_profile, profile

T = TypeVar("T")
Level = Literal["rows", "groups", "graph", "plan", "variants"]
# A program for all levels but "plan", where it is a plan.
Mutator = Callable[[Any, random.Random], Any]


@dataclass(frozen=True)
class Kind:
    """A mutator by the name under which the campaign counts it."""

    level: Level
    name: str
    mutate: Mutator


KINDS: dict[str, Kind] = {}


def mutator(
    level: Level, name: str | None = None, *, starts: bool | None = None
) -> Callable[[Mutator], Mutator]:
    """Enter a function as a kind of mutant, under its own name if not another one.

    Variants and mutants of groups change what a start must agree with: unless ``starts``, they are
    of programs without.
    """
    keeps = level not in ("groups", "variants") if starts is None else starts

    def enter(function: Mutator) -> Mutator:
        called = name or function.__name__.replace("_", " ").strip()
        assert called not in KINDS, called

        def mutate(source: Any, rng: random.Random) -> Any:
            return function(source if keeps else not_started(source), rng)

        KINDS[called] = Kind(level, called, mutate)
        return function

    return enter


def check_faults(program: Program, workload: Workload) -> list[str]:
    """What `check` says of a program that is to train a workload."""
    model = profile_of(workload)
    blocks = {name: module.blocks for name, module in model.modules.items()}
    asked = specify(workload, blocks, ties=model.ties)
    return [*check_program(program), *specification_faults(program, asked)]


def check_plan(plan: Plan, workload: Workload) -> list[str]:
    """What `check` says of a plan file: its own faults, its workload's, or the proof's."""
    said = [*plan_faults(plan), *plan_differences(plan, workload)]
    return said or list(prove(plan, workload, profile_of(workload)).faults)


def profile_of(workload: Workload, devices: int = 1) -> Profile:
    """A profile of the models as they are; each module is slower than the next one."""
    modules: dict[str, dict[str, Any]] = {}
    for place, name in enumerate(workload.modules, start=1):
        built = _built(workload, name)
        modules[name] = module_profile(
            2e-3 / place,
            4e-3 / place,
            fixed_s=1e-3,
            blocks=len(built),
            tp={1: 1.0, 2: 1.9},
            tied_blocks=tied_blocks(built),
        )
    return profile(modules, devices)


def _built(workload: Workload, name: str) -> nn.Sequential:
    spec = workload.modules[name]
    return _module(spec.factory, json.dumps(spec.model_dump(mode="json")["args"]))


@cache
def _module(factory: str, args: str) -> nn.Sequential:
    return import_factory(factory, Path(__file__).parent)(**json.loads(args))


# --- helpers -----------------------------------------------------------------------------


def one_of(rng: random.Random, items: Sequence[T]) -> T | None:
    """A random one, None where there are none."""
    return rng.choice(items) if items else None


Spot = tuple[int, int, Any]


def spots(program: Program, *ops: Op) -> list[Spot]:
    """(rank, position, instruction) of all instructions with some operations, or of all.

    Without COUNT of a loss that counts nothing, where it does nothing.
    """
    return [
        (rank, position, item)
        for rank, row in enumerate(program.instructions)
        for position, item in enumerate(row)
        if (not ops or item.op in ops) and _does_something(program, item)
    ]


def _does_something(program: Program, item: Instruction) -> bool:
    if item.op is not Op.COUNT:
        return True
    assert isinstance(item, Collective)
    return program.losses[item.index].name.startswith("counted")


def moved(program: Program, rank: int, position: int, to: int) -> Program | None:
    """One instruction of a rank taken out and put back elsewhere; None where nothing changes."""
    row = list(program.instructions[rank])
    row.insert(to, row.pop(position))
    return with_rows(program, {rank: tuple(row)})


def inserted(program: Program, rank: int, position: int, item: Instruction) -> Program:
    """One instruction more."""
    row = program.instructions[rank]
    return with_rows(program, {rank: (*row[:position], item, *row[position:])})


def swapped(program: Program, rank: int, first: int, second: int) -> Program:
    """Two instructions of a rank in each other's place."""
    row = list(program.instructions[rank])
    row[first], row[second] = row[second], row[first]
    return with_rows(program, {rank: tuple(row)})


def other_end(program: Program, rank: int, item: Message) -> tuple[int, int] | None:
    """Where the other end of a message stands."""
    wanted = {
        Op.SEND_F: Op.RECV_F,
        Op.RECV_F: Op.SEND_F,
        Op.SEND_B: Op.RECV_B,
        Op.RECV_B: Op.SEND_B,
    }[item.op]
    for position, end in enumerate(program.instructions[item.peer]):
        if (
            isinstance(end, Message)
            and (end.op, end.peer, end.edge) == (wanted, rank, item.edge)
            and (end.start, end.stop) == (item.start, item.stop)
        ):
            return item.peer, position
    return None


def group_of(program: Program, rank: int, stage: int) -> tuple[int, ...]:
    """The ranks that run a stage's replica together with a rank."""
    return next(group for group in program.stages[stage].ranks if rank in group)


def rows_of(program: Program, change: Callable[[int, Row], Row]) -> Program:
    """Every row changed."""
    rows = tuple(change(rank, row) for rank, row in enumerate(program.instructions))
    return replace(program, instructions=rows)


# --- one instruction less, more, elsewhere -----------------------------------------------


def _for_each_op() -> None:
    """A kind of its own for each operation: what is seen of one may be missed of another."""
    for op in Op:

        def one_less(program: Program, rng: random.Random, op: Op = op) -> Program | None:
            spot = one_of(rng, spots(program, op))
            return drop(program, spot[0], spot[1]) if spot else None

        def once_more(program: Program, rng: random.Random, op: Op = op) -> Program | None:
            spot = one_of(rng, spots(program, op))
            if spot is None:
                return None
            rank, position, item = spot
            to = rng.randint(position + 1, len(program.instructions[rank]))
            return inserted(program, rank, to, item)

        def elsewhere(program: Program, rng: random.Random, op: Op = op) -> Program | None:
            spot = one_of(rng, spots(program, op))
            if spot is None:
                return None
            rank, position, _ = spot
            places = [p for p in range(len(program.instructions[rank])) if p != position]
            to = one_of(rng, places)
            return None if to is None else moved(program, rank, position, to)

        mutator("rows", f"{op} dropped")(one_less)
        mutator("rows", f"{op} twice")(once_more)
        mutator("rows", f"{op} moved")(elsewhere)


_for_each_op()


@mutator("rows")
def neighbours_swapped(program: Program, rng: random.Random) -> Program | None:
    """Any two that follow one another and are not alike."""
    found = [
        (rank, position)
        for rank, row in enumerate(program.instructions)
        for position in range(len(row) - 1)
        if row[position].op != row[position + 1].op
    ]
    spot = one_of(rng, found)
    return swapped(program, spot[0], spot[1], spot[1] + 1) if spot else None


@mutator("rows")
def neighbouring_computes_swapped(program: Program, rng: random.Random) -> Program | None:
    """The next two computes of a rank, with what stands between them left in place."""
    rank = rng.randrange(program.num_ranks)
    computes = [p for r, p, x in spots(program) if r == rank and isinstance(x, Compute)]
    if len(computes) < 2:
        return None
    at = rng.randrange(len(computes) - 1)
    return swapped(program, rank, computes[at], computes[at + 1])


@mutator("rows")
def any_two_swapped(program: Program, rng: random.Random) -> Program | None:
    rank = rng.randrange(program.num_ranks)
    row = program.instructions[rank]
    if len(row) < 2:
        return None
    first, second = rng.sample(range(len(row)), 2)
    return swapped(program, rank, first, second) if row[first] != row[second] else None


@mutator("rows")
def rows_of_two_ranks_swapped(program: Program, rng: random.Random) -> Program | None:
    rows = program.instructions
    pairs = [
        (a, b)
        for a in range(len(rows))
        for b in range(a)
        if rows[a] != rows[b] and rows[a] and rows[b]
    ]
    pair = one_of(rng, pairs)
    return with_rows(program, {pair[0]: rows[pair[1]], pair[1]: rows[pair[0]]}) if pair else None


@mutator("rows")
def half_a_row_lost(program: Program, rng: random.Random) -> Program | None:
    rank = rng.randrange(program.num_ranks)
    row = program.instructions[rank]
    if len(row) < 4:
        return None
    first = rng.randrange(len(row) - 2)
    return with_rows(program, {rank: (*row[:first], *row[first + len(row) // 2 :])})


# --- messages ----------------------------------------------------------------------------

_SENDS = (Op.SEND_F, Op.SEND_B)
_RECEIVES = (Op.RECV_F, Op.RECV_B)


def _messages(program: Program, rng: random.Random, *ops: Op) -> Spot | None:
    return one_of(rng, spots(program, *(ops or (*_SENDS, *_RECEIVES))))


def _both_ends(
    program: Program, rng: random.Random, op: Op, change: Callable[[Message], Message | None]
) -> Program | None:
    """A send and its receive changed alike, or both gone where the change gives None."""
    spot = one_of(rng, spots(program, op))
    end = other_end(program, spot[0], spot[2]) if spot else None
    if spot is None or end is None:
        return None
    rows = {rank: list(program.instructions[rank]) for rank in {spot[0], end[0]}}
    for rank, position in sorted([spot[:2], end], key=lambda place: -place[1]):
        new = change(rows[rank][position])  # pyright: ignore[reportArgumentType]
        rows[rank][position : position + 1] = [] if new is None else [new]
    return with_rows(program, {rank: tuple(row) for rank, row in rows.items()})


@mutator("rows")
def forward_message_dropped_at_both_ends(program: Program, rng: random.Random) -> Program | None:
    return _both_ends(program, rng, Op.SEND_F, lambda _: None)


@mutator("rows")
def gradient_dropped_at_both_ends(program: Program, rng: random.Random) -> Program | None:
    return _both_ends(program, rng, Op.SEND_B, lambda _: None)


@mutator("rows")
def gradient_dropped_at_both_ends_for_a_whole_group(
    program: Program, rng: random.Random
) -> Program | None:
    """The same samples of one edge, whoever sends them."""
    spot = one_of(rng, spots(program, Op.SEND_B))
    if spot is None:
        return None
    key = spot[2].edge, spot[2].start, spot[2].stop

    def gone(_: int, item: Instruction) -> bool:
        backward = item.op in (Op.SEND_B, Op.RECV_B)
        return isinstance(item, Message) and backward and (item.edge, item.start, item.stop) == key

    return without(program, gone)


def _cut_short(item: Message) -> Message | None:
    return replace(item, stop=item.stop - 1) if item.stop - item.start > 1 else None


@mutator("rows")
def forward_message_one_sample_short_at_both_ends(
    program: Program, rng: random.Random
) -> Program | None:
    return _both_ends(program, rng, Op.SEND_F, _cut_short)


@mutator("rows")
def gradient_one_sample_short_at_both_ends(program: Program, rng: random.Random) -> Program | None:
    return _both_ends(program, rng, Op.SEND_B, _cut_short)


@mutator("rows")
def forward_message_twice_at_both_ends(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, Op.SEND_F))
    return _doubled(program, spot)


@mutator("rows")
def gradient_twice_at_both_ends(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, Op.SEND_B))
    return _doubled(program, spot)


def _doubled(program: Program, spot: Spot | None) -> Program | None:
    end = other_end(program, spot[0], spot[2]) if spot else None
    if spot is None or end is None:
        return None
    for rank, position in sorted([spot[:2], end], key=lambda place: -place[1]):
        program = inserted(program, rank, position, program.instructions[rank][position])
    return program


@mutator("rows")
def range_of_a_message_shifted(program: Program, rng: random.Random) -> Program | None:
    spot = _messages(program, rng)
    if spot is None:
        return None
    by = rng.choice([-1, 1])
    item = replace(spot[2], start=spot[2].start + by, stop=spot[2].stop + by)
    return put(program, spot[0], spot[1], item) if item.start >= 0 else None


@mutator("rows")
def range_of_a_message_shifted_at_both_ends(program: Program, rng: random.Random) -> Program | None:
    by = rng.choice([-1, 1])

    def shift(item: Message) -> Message:
        return replace(item, start=max(0, item.start + by), stop=item.stop + by)

    return _both_ends(program, rng, rng.choice(_SENDS), shift)


@mutator("rows")
def end_of_a_message_shifted(program: Program, rng: random.Random) -> Program | None:
    spot = _messages(program, rng)
    if spot is None:
        return None
    stop = spot[2].stop + rng.choice([-1, 1])
    item = replace(spot[2], stop=stop)
    return put(program, spot[0], spot[1], item) if item.start < stop else None


@mutator("rows")
def message_of_another_peer(program: Program, rng: random.Random) -> Program | None:
    spot = _messages(program, rng)
    if spot is None:
        return None
    peer = one_of(rng, [r for r in range(program.num_ranks) if r != spot[2].peer])
    return None if peer is None else put(program, spot[0], spot[1], replace(spot[2], peer=peer))


@mutator("rows")
def message_of_another_edge(program: Program, rng: random.Random) -> Program | None:
    spot = _messages(program, rng)
    if spot is None:
        return None
    edge = one_of(rng, [e.index for e in program.edges if e.index != spot[2].edge])
    return None if edge is None else put(program, spot[0], spot[1], replace(spot[2], edge=edge))


@mutator("rows")
def message_of_another_micro_batch(program: Program, rng: random.Random) -> Program | None:
    spot = _messages(program, rng)
    if spot is None:
        return None
    mb = one_of(rng, [m for m in _micro_batches(program, spot) if m != spot[2].mb])
    return None if mb is None else put(program, spot[0], spot[1], replace(spot[2], mb=mb))


def _micro_batches(program: Program, spot: Spot) -> range:
    stage = program.stages[spot[2].stage]
    place = stage.find_place(spot[0])
    return range(len(stage.microbatches[place[0]]) if place else 0)


@mutator("rows")
def message_of_another_stage(program: Program, rng: random.Random) -> Program | None:
    spot = _messages(program, rng)
    if spot is None:
        return None
    stage = one_of(rng, [s.index for s in program.stages if s.index != spot[2].stage])
    return None if stage is None else put(program, spot[0], spot[1], replace(spot[2], stage=stage))


@mutator("rows")
def message_of_a_rank_to_itself(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, [s for s in spots(program, *_SENDS, *_RECEIVES) if s[2].peer != s[0]])
    return put(program, spot[0], spot[1], replace(spot[2], peer=spot[0])) if spot else None


def _pairs_of_messages(program: Program, ops: Sequence[Op]) -> Iterator[tuple[int, int, int]]:
    """(rank, position, position) of two of one operation, edge and peer, for two micro-batches."""
    seen: dict[Any, tuple[int, int]] = {}
    for rank, position, item in spots(program, *ops):
        key = rank, item.op, item.edge, item.peer
        if key in seen and seen[key][1] != item.mb:
            yield rank, seen[key][0], position
        seen[key] = position, item.mb


def _message_at(program: Program, rank: int, position: int) -> Message:
    item = program.instructions[rank][position]
    assert isinstance(item, Message)
    return item


def _serving_each_other(program: Program, pair: tuple[int, int, int] | None) -> Program | None:
    if pair is None:
        return None
    rank, a, b = pair
    one, two = _message_at(program, rank, a), _message_at(program, rank, b)
    changed = put(program, rank, a, replace(one, mb=two.mb))
    return put(changed, rank, b, replace(two, mb=one.mb))


@mutator("rows")
def two_receives_serve_each_others_micro_batch(
    program: Program, rng: random.Random
) -> Program | None:
    """What comes for one micro-batch is used for the other."""
    return _serving_each_other(program, one_of(rng, list(_pairs_of_messages(program, _RECEIVES))))


@mutator("rows")
def two_sends_serve_each_others_micro_batch(program: Program, rng: random.Random) -> Program | None:
    return _serving_each_other(program, one_of(rng, list(_pairs_of_messages(program, _SENDS))))


@mutator("rows")
def two_receives_of_a_route_swapped(program: Program, rng: random.Random) -> Program | None:
    """Threads tell messages by their names, NCCL by their order."""
    pair = one_of(rng, list(_pairs_of_messages(program, _RECEIVES)))
    return swapped(program, *pair) if pair else None


@mutator("rows")
def two_sends_of_a_route_swapped(program: Program, rng: random.Random) -> Program | None:
    pair = one_of(rng, list(_pairs_of_messages(program, _SENDS)))
    return swapped(program, *pair) if pair else None


@mutator("rows")
def message_split_at_one_end(program: Program, rng: random.Random) -> Program | None:
    long = [s for s in spots(program, *_SENDS, *_RECEIVES) if s[2].stop - s[2].start > 1]
    spot = one_of(rng, long)
    if spot is None:
        return None
    rank, position, item = spot
    cut = rng.randrange(item.start + 1, item.stop)
    changed = put(program, rank, position, replace(item, start=cut))
    return inserted(changed, rank, position, replace(item, stop=cut))


@mutator("rows")
def messages_merged_at_one_end(program: Program, rng: random.Random) -> Program | None:
    found = [
        (rank, a, b)
        for rank, row in enumerate(program.instructions)
        for a, one in enumerate(row)
        for b, two in enumerate(row)
        if isinstance(one, Message)
        and isinstance(two, Message)
        and (one.op, one.edge, one.peer, one.stop) == (two.op, two.edge, two.peer, two.start)
    ]
    spot = one_of(rng, found)
    if spot is None:
        return None
    rank, a, b = spot
    one, two = _message_at(program, rank, a), _message_at(program, rank, b)
    return drop(put(program, rank, a, replace(one, stop=two.stop)), rank, b)


def _of(item: Compute | Message) -> tuple[int, int]:
    return item.stage, item.mb


@mutator("rows")
def receive_after_its_compute(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, *_RECEIVES))
    if spot is None:
        return None
    rank, position, item = spot
    ops = (Op.FORWARD,) if item.op is Op.RECV_F else (Op.BACKWARD, Op.INPUT)
    for later, other in enumerate(program.instructions[rank]):
        served = isinstance(other, Compute) and other.op in ops and _of(other) == _of(item)
        if served and later > position:
            return moved(program, rank, position, later)
    return None


@mutator("rows")
def send_before_its_compute(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, *_SENDS))
    if spot is None:
        return None
    rank, position, item = spot
    ops = (Op.FORWARD,) if item.op is Op.SEND_F else (Op.BACKWARD, Op.INPUT)
    for earlier, other in enumerate(program.instructions[rank]):
        made = isinstance(other, Compute) and other.op in ops and _of(other) == _of(item)
        if made and earlier < position:
            return moved(program, rank, position, earlier)
    return None


@mutator("rows")
def forward_sent_as_a_gradient(program: Program, rng: random.Random) -> Program | None:
    turned = {
        Op.SEND_F: Op.SEND_B,
        Op.SEND_B: Op.SEND_F,
        Op.RECV_F: Op.RECV_B,
        Op.RECV_B: Op.RECV_F,
    }
    spot = _messages(program, rng)
    return put(program, spot[0], spot[1], replace(spot[2], op=turned[spot[2].op])) if spot else None


@mutator("rows")
def replicas_take_each_others_samples(program: Program, rng: random.Random) -> Program | None:
    """The messages of two peers of one rank carry each other's samples, at both ends."""
    spot = one_of(rng, spots(program, Op.SEND_F))
    if spot is None:
        return None
    rank, position, item = spot
    others = [
        (p, x)
        for p, x in enumerate(program.instructions[rank])
        if isinstance(x, Message)
        and (x.op, x.edge, x.mb) == (item.op, item.edge, item.mb)
        and x.peer != item.peer
    ]
    other = one_of(rng, others)
    if other is None:
        return None
    changed = put(program, rank, position, replace(item, peer=other[1].peer))
    return put(changed, rank, other[0], replace(other[1], peer=item.peer))


# --- computes ----------------------------------------------------------------------------

_COMPUTES = (Op.FORWARD, Op.BACKWARD, Op.INPUT, Op.WEIGHT)


@mutator("rows")
def compute_of_another_micro_batch(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, *_COMPUTES))
    if spot is None:
        return None
    mb = one_of(rng, [m for m in _micro_batches(program, spot) if m != spot[2].mb])
    return None if mb is None else put(program, spot[0], spot[1], replace(spot[2], mb=mb))


@mutator("rows")
def compute_of_another_stage(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, *_COMPUTES))
    if spot is None:
        return None
    here = [s.index for s in program.stages_of(spot[0]) if s.index != spot[2].stage]
    stage = one_of(rng, here or [s.index for s in program.stages if s.index != spot[2].stage])
    return None if stage is None else put(program, spot[0], spot[1], replace(spot[2], stage=stage))


@mutator("rows")
def forward_skipped_and_another_run_twice(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, Op.FORWARD))
    if spot is None:
        return None
    same = [
        p
        for p, x in enumerate(program.instructions[spot[0]])
        if isinstance(x, Compute)
        and (x.op, x.stage) == (Op.FORWARD, spot[2].stage)
        and x.mb != spot[2].mb
    ]
    to = one_of(rng, same)
    return None if to is None else put(program, spot[0], to, spot[2])


@mutator("rows")
def backward_before_its_forward(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, Op.BACKWARD, Op.INPUT))
    if spot is None:
        return None
    forward = Compute(Op.FORWARD, spot[2].stage, spot[2].mb)
    to = program.instructions[spot[0]].index(forward)
    return moved(program, spot[0], spot[1], to)


@mutator("rows")
def backwards_dropped_in_a_whole_group(program: Program, rng: random.Random) -> Program | None:
    """One micro-batch's backward on all ranks of its tensor-parallel group."""
    spot = one_of(rng, spots(program, Op.BACKWARD, Op.INPUT, Op.WEIGHT))
    if spot is None:
        return None
    group = group_of(program, spot[0], spot[2].stage)
    return without(program, lambda rank, item: rank in group and item == spot[2])


@mutator("rows")
def weight_gradients_dropped_in_a_whole_group(
    program: Program, rng: random.Random
) -> Program | None:
    spot = one_of(rng, spots(program, Op.WEIGHT))
    if spot is None:
        return None
    group = group_of(program, spot[0], spot[2].stage)
    return without(program, lambda rank, item: rank in group and item == spot[2])


@mutator("rows")
def whole_backward_in_place_of_a_split_one(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, Op.INPUT))
    if spot is None:
        return None
    changed = put(program, spot[0], spot[1], replace(spot[2], op=Op.BACKWARD))
    late = Compute(Op.WEIGHT, spot[2].stage, spot[2].mb)
    return without(changed, lambda rank, item: rank == spot[0] and item == late)


@mutator("rows")
def split_backward_in_place_of_a_whole_one(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, Op.BACKWARD))
    if spot is None:
        return None
    rank, position, item = spot
    changed = put(program, rank, position, replace(item, op=Op.INPUT))
    return inserted(changed, rank, position + 1, replace(item, op=Op.WEIGHT))


@mutator("rows")
def weight_gradients_before_the_input_gradient(
    program: Program, rng: random.Random
) -> Program | None:
    spot = one_of(rng, spots(program, Op.WEIGHT))
    if spot is None:
        return None
    start = Compute(Op.INPUT, spot[2].stage, spot[2].mb)
    return moved(program, spot[0], spot[1], program.instructions[spot[0]].index(start))


@mutator("rows")
def computes_of_a_group_in_two_orders(program: Program, rng: random.Random) -> Program | None:
    """Two neighbouring forwards swapped on one rank of a tensor-parallel group."""
    found: list[tuple[int, int, int]] = []
    for rank, row in enumerate(program.instructions):
        computes = [
            (p, x)
            for p, x in enumerate(row)
            if isinstance(x, Compute) and program.stages[x.stage].tp > 1
        ]
        for (p, x), (q, y) in pairwise(computes):
            if x.op is y.op and x != y:
                found.append((rank, p, q))
    spot = one_of(rng, found)
    return swapped(program, *spot) if spot else None


# --- batch-sync --------------------------------------------------------------------------


def _starts(program: Program) -> list[Spot]:
    return spots(program, Op.SYNC_START)


@mutator("rows")
def two_sync_starts_swapped_on_one_rank(program: Program, rng: random.Random) -> Program | None:
    rank = rng.randrange(program.num_ranks)
    found = [p for r, p, _ in _starts(program) if r == rank]
    if len(found) < 2:
        return None
    first, second = rng.sample(found, 2)
    return swapped(program, rank, first, second)


@mutator("rows")
def sync_starts_of_one_loss_in_another_order_on_one_rank(
    program: Program, rng: random.Random
) -> Program | None:
    """Complete and in time, and one batch's features meet another's."""
    spot = one_of(rng, _starts(program))
    if spot is None:
        return None
    rank, position, item = spot
    later = [
        p for r, p, x in _starts(program) if r == rank and p > position and x.loss == item.loss
    ]
    return moved(program, rank, position, later[0]) if later else None


@mutator("rows")
def sync_start_across_a_tp_compute_on_one_rank(
    program: Program, rng: random.Random
) -> Program | None:
    """Two communicators' operations in two orders."""
    found: list[tuple[int, int, int]] = []
    for rank, position, item in _starts(program):
        row = program.instructions[rank]
        wait = row.index(Sync(Op.SYNC_WAIT, item.loss, item.batch))
        for p in range(position + 1, wait):
            other = row[p]
            if isinstance(other, Compute) and program.stages[other.stage].tp > 1:
                found.append((rank, position, p))
    spot = one_of(rng, found)
    return moved(program, *spot) if spot else None


@mutator("rows")
def sync_skipped_on_all_ranks(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, _starts(program))
    if spot is None:
        return None
    key = spot[2].loss, spot[2].batch
    return without(program, lambda _, x: isinstance(x, Sync) and (x.loss, x.batch) == key)


@mutator("rows")
def sync_skipped_on_one_rank(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, _starts(program))
    if spot is None:
        return None
    rank, _, item = spot
    key = item.loss, item.batch
    return without(
        program, lambda r, x: r == rank and isinstance(x, Sync) and (x.loss, x.batch) == key
    )


@mutator("rows")
def sync_batch_renamed_on_one_rank(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, Op.SYNC_START, Op.SYNC_WAIT))
    if spot is None:
        return None
    others = {x.batch for _, _, x in _starts(program) if x.loss == spot[2].loss} - {spot[2].batch}
    batch = one_of(rng, sorted(others))
    return None if batch is None else put(program, spot[0], spot[1], replace(spot[2], batch=batch))


@mutator("rows")
def sync_start_before_its_last_forward(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, _starts(program))
    if spot is None:
        return None
    row = program.instructions[spot[0]]
    forwards = [p for p, x in enumerate(row[: spot[1]]) if x.op is Op.FORWARD]
    return moved(program, spot[0], spot[1], forwards[-1]) if forwards else None


@mutator("rows")
def sync_wait_after_its_backward(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, Op.SYNC_WAIT))
    if spot is None:
        return None
    row = program.instructions[spot[0]]
    later = [p for p, x in enumerate(row) if p > spot[1] and x.op in (Op.BACKWARD, Op.INPUT)]
    return moved(program, spot[0], spot[1], later[0]) if later else None


@mutator("rows")
def sync_wait_before_its_start(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, _starts(program))
    if spot is None:
        return None
    row = program.instructions[spot[0]]
    wait = row.index(Sync(Op.SYNC_WAIT, spot[2].loss, spot[2].batch))
    return swapped(program, spot[0], spot[1], wait)


@mutator("rows")
def sync_of_another_loss(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, Op.SYNC_START, Op.SYNC_WAIT))
    if spot is None:
        return None
    losses = [x.index for x in program.losses if x.index != spot[2].loss]
    loss = one_of(rng, losses)
    return None if loss is None else put(program, spot[0], spot[1], replace(spot[2], loss=loss))


# --- counts, sums and the update ---------------------------------------------------------


@mutator("rows")
def count_after_its_first_forward_on_all_ranks(
    program: Program, rng: random.Random
) -> Program | None:
    spot = one_of(rng, spots(program, Op.COUNT))
    if spot is None:
        return None
    host = getattr(program.losses[spot[2].index], "host", None)

    def late(_: int, row: Row) -> Row:
        if spot[2] not in row:
            return row
        rest = [x for x in row if x != spot[2]]
        first = [
            p for p, x in enumerate(rest) if x.op is Op.FORWARD and getattr(x, "stage", -1) == host
        ]
        rest.insert(first[0] + 1 if first else len(rest) - 1, spot[2])
        return tuple(rest)

    return rows_of(program, late)


@mutator("rows")
def count_skipped_on_all_ranks(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, Op.COUNT))
    return without(program, lambda _, x: x == spot[2]) if spot else None


@mutator("rows")
def reduce_skipped_on_all_ranks(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, Op.REDUCE))
    return without(program, lambda _, x: x == spot[2]) if spot else None


@mutator("rows")
def reduce_twice_on_all_ranks(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, Op.REDUCE))
    if spot is None:
        return None

    def twice(_: int, row: Row) -> Row:
        return tuple(y for x in row for y in ((x, x) if x == spot[2] else (x,)))

    return rows_of(program, twice)


def _early(program: Program, reduce: Collective, ranks: Sequence[int]) -> Program:
    """A reduction before its rank's last backward, on some ranks."""

    def early(rank: int, row: Row) -> Row:
        if rank not in ranks or reduce not in row:
            return row
        rest = [x for x in row if x != reduce]
        ends = [p for p, x in enumerate(rest) if x.op in (Op.BACKWARD, Op.WEIGHT)]
        rest.insert(ends[-1] if ends else 0, reduce)
        return tuple(rest)

    return rows_of(program, early)


@mutator("rows")
def reduce_before_the_last_backward_on_one_rank(
    program: Program, rng: random.Random
) -> Program | None:
    spot = one_of(rng, spots(program, Op.REDUCE))
    return _early(program, spot[2], [spot[0]]) if spot else None


@mutator("rows")
def reduce_before_the_last_backward_on_all_ranks(
    program: Program, rng: random.Random
) -> Program | None:
    spot = one_of(rng, spots(program, Op.REDUCE))
    return _early(program, spot[2], range(program.num_ranks)) if spot else None


@mutator("rows")
def two_reduces_swapped_on_one_rank(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, Op.REDUCE))
    if spot is None:
        return None
    others = [p for r, p, _ in spots(program, Op.REDUCE) if r == spot[0] and p != spot[1]]
    other = one_of(rng, others)
    return None if other is None else swapped(program, spot[0], spot[1], other)


@mutator("rows")
def reduce_of_another_index_on_one_rank(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, Op.REDUCE))
    if spot is None:
        return None
    index = one_of(rng, [r.index for r in program.reductions if r.index != spot[2].index])
    return None if index is None else put(program, spot[0], spot[1], Collective(Op.REDUCE, index))


@mutator("rows")
def reduce_start_before_an_earlier_backward_on_all_ranks(
    program: Program, rng: random.Random
) -> Program | None:
    """The gradients of the last micro-batch are left out."""
    spot = one_of(rng, spots(program, Op.REDUCE_START))
    if spot is None:
        return None

    def early(_: int, row: Row) -> Row:
        if spot[2] not in row:
            return row
        place = row.index(spot[2])
        inside = next(x for x in row[place:] if isinstance(x, Compute))
        rest = [x for x in row if x != spot[2]]
        same = [
            p
            for p, x in enumerate(rest)
            if isinstance(x, Compute) and (x.op, x.stage) == (inside.op, inside.stage)
        ]
        rest.insert(same[-2] if len(same) > 1 else place, spot[2])
        return tuple(rest)

    return rows_of(program, early)


@mutator("rows")
def two_reduce_starts_swapped_on_one_rank(program: Program, rng: random.Random) -> Program | None:
    found = spots(program, Op.REDUCE_START)
    pairs = [(r, p, q) for r, p, _ in found for s, q, _ in found if r == s and p < q]
    spot = one_of(rng, pairs)
    return swapped(program, *spot) if spot else None


@mutator("rows")
def reduce_start_of_another_index_on_one_rank(
    program: Program, rng: random.Random
) -> Program | None:
    spot = one_of(rng, spots(program, Op.REDUCE_START))
    if spot is None:
        return None
    index = one_of(rng, [r.index for r in program.reductions if r.index != spot[2].index])
    item = None if index is None else Collective(Op.REDUCE_START, index)
    return None if item is None else put(program, spot[0], spot[1], item)


@mutator("rows")
def update_in_the_middle_of_the_step(program: Program, rng: random.Random) -> Program | None:
    spot = one_of(rng, spots(program, Op.STEP))
    return moved(program, spot[0], spot[1], rng.randrange(spot[1])) if spot and spot[1] else None


@mutator("rows")
def no_update_on_all_ranks(program: Program, rng: random.Random) -> Program | None:
    del rng
    return without(program, lambda _, x: isinstance(x, Step))


def is_cross(program: Program, index: int) -> bool:
    """Whether a loss couples samples."""
    return isinstance(program.losses[index], CrossSampleLoss)


def with_stage(program: Program, stage: Stage, **changes: Any) -> Program:
    """One stage changed."""
    stages = list(program.stages)
    stages[stage.index] = replace(stage, **changes)
    return replace(program, stages=tuple(stages))
