"""The checks pass every compiled program and catch every planted fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmplan.program.checks.check import check_program
from mmplan.program.communicators import Channels, communicators, most_communicators
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Collective, Compute, Instruction, Message, Op, Step, Sync
from mmplan.program.model import Program
from mmplan.reporting.numbers import held_multiprocessors, held_too_many
from mmplan.schema.cluster import load_cluster
from mmplan.schema.plan import Plan
from tests.naive import NaiveRun, WrongStepError
from tests.plants import PLANTS, SILENT, Row, drop, put, with_rows
from tests.programs import loss, make_plan, plans, unit

CLIP = loss("clip", "vision", "text", sync_batch=8)


def _plans() -> dict[str, Plan]:
    return {
        "one tower, four stages": make_plan(
            unit("v", pp=4, k=4), losses=[loss("c", "v", sync_batch=4)], batch=8
        ),
        "two towers, tp and dp": make_plan(
            unit("vision", pp=2, k=4), unit("text", dp=2, k=2, tp=2), losses=[CLIP], batch=16
        ),
        "uneven shares, three modalities": make_plan(
            unit("vision", pp=2, dp=3, k=2),
            unit("text", dp=2, k=(1, 3)),
            unit("audio", k=4),
            losses=[loss("c", "vision", "text", "audio", sync_batch=16)],
            batch=32,
        ),
        "chain 3 to 1, interleaved": make_plan(
            unit("enc", dp=3, shares=(2, 3, 3), k=2),
            unit("llm", "enc", "tokens", pp=2, vpp=2, k=4, kind="1f1b"),
            losses=[loss("lm", "llm", "labels")],
            batch=8,
        ),
        "fan-out of a tuple, fan-in, three losses": make_plan(
            unit("e", dp=2, k=2, tp=2),
            unit("a", "e.0", k=4),
            unit("b", "e.1", "a", tp=2, pp=2, k=2),
            losses=[loss("x", "b", "a", "lab"), loss("y", "a", sync_batch=4), loss("z", "e", "b")],
            batch=8,
        ),
        "frozen encoder, gpipe": make_plan(
            unit("e", dp=2, k=2, frozen=True, kind="gpipe"),
            unit("llm", "e", pp=2, k=2, kind="gpipe", frozen=((0, 1),)),
            losses=[loss("lm", "llm", "lab")],
            batch=8,
        ),
        "two tasks share a module on common ranks": make_plan(
            unit("v", task="A", dp=2, ranks=[[[0]], [[1]]], k=2),
            unit("v", task="B", dp=3, ranks=[[[1]], [[2]], [[3]]], k=1),
            unit("t", task="B", ranks=[[[0]]], k=3),
            losses=[loss("lm", "v", task="A"), loss("c", "v", "t", task="B", sync_batch=6)],
            batch={"A": 8, "B": 12},
        ),
        "two syncs of different size, colocated": make_plan(
            unit("v", dp=2, ranks=[[[0]], [[1]]], k=2),
            unit("t", dp=2, ranks=[[[0]], [[1]]], k=4),
            losses=[loss("c", "v", "t", sync_batch=8), loss("d", "t", sync_batch=4)],
            batch=16,
        ),
    }


PLANS = _plans()


@cache
def program_of(name: str) -> Program:
    return compile_plan(PLANS[name])


@pytest.mark.parametrize("name", PLANS)
def test_compiled_programs_have_no_fault(name: str) -> None:
    assert check_program(program_of(name)) == []
    NaiveRun(program_of(name)).run()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_any_compiled_program_has_no_fault(plan: Plan) -> None:
    program = compile_plan(plan)
    assert check_program(program) == []


def test_producers_send_to_every_replica_that_meets_again_later() -> None:
    """The gradient of b's one replica waits for a's samples on the other."""
    meet_in_c = make_plan(
        unit("a", k=4, kind="1f1b", lead=0),
        unit("b", "a", dp=2, kind="1f1b", lead=0),
        unit("c", "b", kind="1f1b", lead=0),
        losses=[loss("l", "c")],
        batch=12,
    )
    meet_in_part = make_plan(
        unit("a", dp=2, sizes=[[3, 3], [6]], kind="1f1b", lead=0),
        unit("b", "a", dp=2, kind="1f1b", lead=0),
        unit("c", "b", k=3, kind="1f1b", lead=0),
        losses=[loss("l", "c")],
        batch=12,
    )
    meet_in_a_sync = make_plan(
        unit("a", k=2, lead=0),
        unit("b", "a", dp=2, lead=0, sync_lead=1),
        losses=[loss("l", "a", "b", sync_batch=6)],
        batch=12,
    )
    for plan in (meet_in_c, meet_in_part, meet_in_a_sync):
        assert check_program(compile_plan(plan)) == []


def test_a_rank_without_samples_of_a_sync_batch_starts_it_in_turn() -> None:
    """All ranks start a loss's syncs in one order, each after the forwards it takes."""
    uneven = make_plan(
        unit("a", sizes=[[2, 2], [4], [2, 1, 1]], dp=3, kind="gpipe"),
        losses=[loss("l", "a", sync_batch=2)],
        batch=24,
    )
    colocated = make_plan(
        unit("a", dp=2, sizes=[[2, 2, 2], [3, 3]], ranks=[[[2]], [[0]]]),
        unit(
            "b",
            "a",
            dp=3,
            pp=2,
            sizes=[[4], [4], [2, 1, 1]],
            ranks=[[[0], [4]], [[3], [1]], [[5], [2]]],
            kind="1f1b",
        ),
        losses=[loss("l", "b", "a", sync_batch=6)],
        batch=24,
    )
    for plan in (uneven, colocated):
        program = compile_plan(plan)
        assert check_program(program) == []
        NaiveRun(program).run()
        for row in program.instructions:
            starts = [x.batch for x in row if isinstance(x, Sync) and x.op is Op.SYNC_START]
            assert starts == sorted(starts)


# --- planted faults ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLANTS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_planted_faults_are_caught(kind: str, data: st.DataObject) -> None:
    program = program_of(data.draw(st.sampled_from(list(PLANS))))
    planted = PLANTS[kind](program, lambda n: data.draw(st.integers(0, n - 1)))
    if planted is not None and planted.instructions != program.instructions:
        faults = check_program(planted)
        assert faults
        assert all("\n" not in fault for fault in faults)


@pytest.mark.parametrize("kind", SILENT)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_silent_faults_are_seen(kind: str, data: st.DataObject) -> None:
    program = program_of(data.draw(st.sampled_from(list(PLANS))))
    planted = PLANTS[kind](program, lambda n: data.draw(st.integers(0, n - 1)))
    if planted is not None and _matters(program, planted):
        assert check_program(planted)


def _matters(program: Program, planted: Program) -> bool:
    """Whether the fault touches a gradient: a rank that never trains may leave a reduction."""
    for before, after in zip(program.reductions, planted.reductions, strict=True):
        for rank in set(before.ranks) - set(after.ranks):
            return any(
                s.trainable and s.has_backward and s.owner == before.owner
                for s in program.stages_of(rank)
            )
    return True


def test_every_kind_of_fault_can_be_planted() -> None:
    for kind, plant in PLANTS.items():
        planted = [plant(program_of(name), lambda n: n // 2) for name in PLANS]
        assert any(p is not None for p in planted), kind


# --- any edit at all --------------------------------------------------------------------


def _edited(row: Row, draw: Callable[[int], int]) -> Row:
    """A row after one random edit."""
    items = list(row)
    i, j = draw(len(items)), draw(len(items))
    match draw(5):
        case 0:
            del items[i]
        case 1:
            items.insert(j, items[i])
        case 2:
            items.insert(j, items.pop(i))
        case 3:
            items[i], items[j] = items[j], items[i]
        case _:
            items[i] = _altered(items[i], draw)
    return tuple(items)


def _altered(item: Instruction, draw: Callable[[int], int]) -> Instruction:
    """An instruction with one of its numbers changed by one."""
    names = [name for name in getattr(item, "__slots__", ()) if name != "op"]
    if not names:
        return item
    name = names[draw(len(names))]
    number = getattr(item, name)
    changed = 0 if number is None else max(0, number + (1, -1)[draw(2)])
    return replace(item, **{name: changed})


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_whatever_passes_the_check_computes_the_step(data: st.DataObject) -> None:
    """Edited at random; an interpreter that counts sample by sample is the judge."""
    program = program_of(data.draw(st.sampled_from(list(PLANS))))

    def draw(n: int) -> int:
        return data.draw(st.integers(0, n - 1))

    rank = draw(program.num_ranks)
    row = program.instructions[rank]
    for _ in range(1 + draw(3)):
        row = _edited(row, draw) if row else row
    edited = with_rows(program, {rank: row})
    if not check_program(edited):
        NaiveRun(edited).run()


@settings(max_examples=75, deadline=None)
@given(data=st.data())
def test_the_check_agrees_with_counting_samples(data: st.DataObject) -> None:
    """Silent faults of every kind: both interpreters give the same verdict."""
    program = program_of(data.draw(st.sampled_from(list(PLANS))))
    plant = PLANTS[data.draw(st.sampled_from(SILENT))]
    planted = plant(program, lambda n: data.draw(st.integers(0, n - 1)))
    if planted is None:
        return
    try:
        NaiveRun(planted).run()
    except WrongStepError:
        assert check_program(planted)


# --- what the faults say ----------------------------------------------------------------


def test_a_dropped_gradient_names_the_place_and_the_samples() -> None:
    program = program_of("one tower, four stages")
    position = next(
        i for i, x in enumerate(program.instructions[3]) if str(x) == "3SEND_B2:e2>2[2,3)"
    )
    faults = check_program(drop(program, 3, position))
    receive = next(
        i for i, x in enumerate(program.instructions[2]) if str(x) == "2RECV_B2:e2<3[2,3)"
    )
    expected = f"rank 2, instruction {receive} (2RECV_B2:e2<3[2,3)): rank 3 never sends it"
    assert expected in faults
    assert any(
        f.startswith("rank 2") and "rank 3 has not sent samples [2,3) of edge 2" in f
        for f in faults
    )


def test_references_out_of_range_are_faults_and_nothing_else_is_said() -> None:
    program = program_of("one tower, four stages")
    for item, text in [
        (Compute(Op.FORWARD, 2, 0), "this rank does not run stage 2"),
        (Compute(Op.FORWARD, 0, 8), "stage 0 has 8 micro-batches here"),
        (Message(Op.SEND_F, 0, 0, 9, 1, 0, 1), "there is no edge 9"),
        (Message(Op.SEND_F, 0, 0, 0, 9, 0, 1), "there is no rank 9"),
        (Message(Op.SEND_F, 0, 0, 0, 3, 0, 1), "rank 3 does not run stage 1"),
        (Message(Op.SEND_F, 0, 0, 1, 1, 0, 1), "edge 1 goes from stage 1 to 2"),
        (Sync(Op.SYNC_WAIT, 0, 2), "loss c has no sync batch 2"),
        (Collective(Op.REDUCE, 0), "there is no REDUCE 0"),
    ]:
        faults = check_program(put(program, 0, 0, item))
        assert faults == [f"rank 0, instruction 0 ({item}): {text}"]


def test_waiting_for_each_other_is_reported_for_both_ranks() -> None:
    program = program_of("one tower, four stages")
    # Rank 3 asks for the sync of the second batch before it has run the second batch.
    row = list(program.instructions[3])
    wait = row.index(Sync(Op.SYNC_WAIT, 0, 0))
    row[wait] = Sync(Op.SYNC_WAIT, 0, 1)
    faults = check_program(with_rows(program, {3: tuple(row)}))
    stuck = [f for f in faults if "waits for ever" in f]
    assert f"rank 3, instruction {wait} (SYNC_WAIT:0.1): waits for ever: " in stuck[-1]
    assert [f.split(",")[0] for f in stuck] == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_receives_in_another_order_than_the_sends_are_a_fault() -> None:
    program = program_of("one tower, four stages")
    row = list(program.instructions[1])
    first, second = [i for i, x in enumerate(row) if x.op is Op.RECV_F][:2]
    row[first], row[second] = row[second], row[first]
    swapped = with_rows(program, {1: tuple(row)})
    assert check_program(swapped) == [
        "ranks 0 > 1: message 0 is sent as edge 0 [0,1) and received as edge 0 [1,2)"
    ]


def test_micro_batches_of_a_stage_tile_the_batch_in_order() -> None:
    program = program_of("one tower, four stages")
    stage = program.stages[0]
    spans = stage.microbatches[0]

    def faults(*changed: tuple[int, int]) -> list[str]:
        stages = (replace(stage, microbatches=(changed,)), *program.stages[1:])
        return check_program(replace(program, stages=stages))

    assert faults(*spans) == []
    assert "stage 0 (v): its micro-batches leave out samples [7,8)" in faults(*spans[:7], (7, 7))
    assert "stage 0 (v): its micro-batches hold samples [0,1) twice" in faults(
        spans[0], (0, 2), *spans[2:]
    )
    assert (
        "stage 0 (v): the micro-batches of replica 0 are not in the order of their samples"
        in faults(spans[1], spans[0], *spans[2:])
    )


def test_step_comes_last_and_once() -> None:
    program = program_of("one tower, four stages")
    row = program.instructions[0]
    assert check_program(with_rows(program, {0: row[:-1]})) == ["rank 0: STEP is missing"]
    early = (Step(), *row[:-1])
    assert check_program(with_rows(program, {0: early})) == [
        "rank 0, instruction 0 (STEP): is not the last instruction"
    ]


def test_gathers_of_one_loss_start_in_one_order_on_all_ranks() -> None:
    """The other order is complete and in time, and one batch's features meet another's."""
    program = program_of("two syncs of different size, colocated")
    row = list(program.instructions[0])
    first, second = (Sync(Op.SYNC_START, 1, batch) for batch in (0, 1))
    row.remove(first)
    row.insert(row.index(second) + 1, first)
    faults = check_program(with_rows(program, {0: tuple(row)}))
    assert faults == [
        "ranks [0, 1]: operation 0 of their communicator is SYNC_START:1.0 on rank 1 and "
        "SYNC_START:1.1 on rank 0"
    ]
    # Where all ranks do it there is nothing wrong.
    assert check_program(with_rows(program, {0: tuple(row), 1: tuple(row)})) == []


def test_the_communicators_of_a_rank_are_those_that_a_session_makes() -> None:
    for plan in PLANS.values():
        program = compile_plan(plan)
        channels = Channels(program)
        made = {
            rank: {
                (tuple(range(program.num_ranks)), 0),
                *(group for group in communicators(program) if rank in group[0]),
                *(group for group in channels.groups if rank in group[0]),
            }
            for rank, row in enumerate(program.instructions)
            if row
        }
        most = most_communicators(program)
        assert most.total == max(map(len, made.values()))
        assert len(made[most.rank]) == most.total
        assert most.channels == sum(number < 0 for _, number in made[most.rank])


def test_communication_that_may_hold_every_multiprocessor_is_a_warning() -> None:
    device = load_cluster("a800").device
    assert "80 of 108 multiprocessors" in held_multiprocessors(80, device)
    assert not held_too_many(107, device)
    assert "NCCL_MAX_CTAS" in held_too_many(108, device)
