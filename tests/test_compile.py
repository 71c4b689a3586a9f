"""Orders, messages and reductions of compiled plans."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.errors import InvalidInputError
from mmplan.program.checks.check import check_program
from mmplan.program.compile import RECEIVES_AHEAD, compile_plan, hoist_receives
from mmplan.program.instructions import Compute, Message, Op, Step, format_row
from mmplan.program.model import BlockReduction, LossReduction, Program
from mmplan.program.samples import RangeIndex, number_samples
from mmplan.program.text import format_program
from mmplan.schema.plan import Plan, Unit
from tests.programs import in_flight, loss, make_plan, unit


def computes(program: Program, rank: int) -> str:
    """A rank's forwards and backwards, as F0 F1 B0 ..."""
    return " ".join(f"{i.op}{i.mb}" for i in program.instructions[rank] if isinstance(i, Compute))


def tower(pp: int, k: int, rounds: int = 1, **options: Any) -> Program:
    plan = make_plan(
        unit("a", pp=pp, k=k, **options),
        losses=[loss("match", "a", sync_batch=4 * k)],
        batch=4 * k * rounds,
    )
    return compile_plan(plan)


def test_the_optimal_order_runs_k_plus_distance_forwards_then_alternates() -> None:
    program = tower(pp=3, k=2, rounds=3)
    assert computes(program, 2) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5"
    assert computes(program, 1) == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5"
    assert computes(program, 0) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"


def test_1f1b_is_batch_sync_with_one_microbatch() -> None:
    plan = make_plan(
        unit("a", pp=3, k=4, kind="1f1b"), losses=[loss("each", "a", "target")], batch=8
    )
    program = compile_plan(plan)
    assert computes(program, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert computes(program, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"


def test_gpipe_runs_whole_rounds() -> None:
    program = tower(pp=2, k=2, rounds=2, kind="gpipe")
    assert computes(program, 0) == "F0 F1 B0 B1 F2 F3 B2 B3"


def test_lead_zero_holds_one_sync_batch_on_every_stage() -> None:
    program = tower(pp=3, k=2, rounds=3, lead=0)
    assert set(in_flight(program).values()) == {2}
    assert not check_program(program)


def test_sync_lead_puts_forwards_between_start_and_wait() -> None:
    row = [str(i) for i in tower(pp=1, k=2, rounds=2, sync_lead=1).instructions[0]]
    start, wait = row.index("SYNC_START:0.0"), row.index("SYNC_WAIT:0.0")
    assert row[start + 1 : wait] == ["0F2"]


def test_a_cap_below_a_sync_batch_is_refused_with_the_mend() -> None:
    with pytest.raises(InvalidInputError, match="can never start") as caught:
        tower(pp=2, k=4, in_flight=2)
    assert "in_flight" in str(caught.value.hint)


def test_three_replicas_feed_two_by_intersection_of_samples() -> None:
    plan = make_plan(
        unit("a", dp=3, k=1), unit("b", "a", dp=2, k=1), losses=[loss("each", "b")], batch=12
    )
    program = compile_plan(plan)
    sent = [
        (rank, i.peer, i.start, i.stop)
        for rank, row in enumerate(program.instructions)
        for i in row
        if isinstance(i, Message) and i.op == Op.SEND_F
    ]
    assert sorted(sent) == [(0, 3, 0, 4), (1, 3, 4, 6), (1, 4, 6, 8), (2, 4, 8, 12)]


def test_tensor_parallel_peers_each_get_the_whole_message_once() -> None:
    plan = make_plan(unit("a", tp=2), unit("b", "a", tp=4), losses=[loss("each", "b")], batch=4)
    program = compile_plan(plan)
    forward = {
        (rank, i.peer)
        for rank, row in enumerate(program.instructions)
        for i in row
        if isinstance(i, Message) and i.op == Op.SEND_F
    }
    assert forward == {(0, 2), (1, 3), (0, 4), (1, 5)}
    backward = {
        (i.peer, rank)
        for rank, row in enumerate(program.instructions)
        for i in row
        if isinstance(i, Message) and i.op == Op.RECV_B
    }
    assert backward == {(2, 0), (3, 1)}


def test_a_frozen_tower_has_no_backward_and_gets_no_gradients() -> None:
    plan = make_plan(
        unit("a", pp=2, frozen=True), unit("b"), losses=[loss("match", "a", "b", sync_batch=8)]
    )
    program = compile_plan(plan)
    assert "B" not in computes(program, 0) + computes(program, 1)
    assert not any(
        isinstance(i, Message) and i.op in (Op.SEND_B, Op.RECV_B)
        for row in program.instructions
        for i in row
    )


def test_gradients_stop_at_the_first_trainable_block() -> None:
    plan = make_plan(
        unit("a", pp=3, cuts=[(0, 2), (2, 4), (4, 6)], frozen=((0, 3),)),
        losses=[loss("each", "a", "target")],
    )
    stages = compile_plan(plan).stages
    assert [s.has_backward for s in stages] == [False, True, True]
    assert [s.input_gradient for s in stages] == [False, False, True]
    assert stages[1].trainable == ((3, 4),)


def test_shared_blocks_are_reduced_over_all_their_holders() -> None:
    plan = make_plan(
        unit("a", dp=2), unit("b", share="a"), losses=[loss("match", "a", "b", sync_batch=8)]
    )
    blocks, loss_reduction = compile_plan(plan).reductions
    assert isinstance(blocks, BlockReduction)
    assert isinstance(loss_reduction, LossReduction)
    assert (blocks.owner, blocks.ranks) == ("a", (0, 1, 2))
    assert (loss_reduction.owner, loss_reduction.ranks) == ("match", (0, 1, 2))


def test_a_module_under_two_tp_degrees_is_summed_in_parts() -> None:
    plan = make_plan(
        unit("a", tp=2), unit("b", share="a"), losses=[loss("match", "a", "b", sync_batch=8)]
    )
    text = format_program(compile_plan(plan))
    assert [line for line in text.splitlines() if line.startswith("# reduction")] == [
        "# reduction 0: blocks [0,1) of a shard 0/2 cut, ranks 0 2",
        "# reduction 1: blocks [0,1) of a shard 1/2 cut, ranks 1 2",
        "# reduction 2: blocks [0,1) of a uncut, from ranks 0 2, ranks 0 1 2",
        "# reduction 3: loss match, ranks 0 1 2",
    ]


def test_a_rank_that_runs_two_shards_of_a_block_is_summed_with_all_of_it() -> None:
    other = unit("b", share="a", ranks=[[[0]]])
    plan = make_plan(unit("a", tp=2), other, losses=[loss("match", "a", "b", sync_batch=8)])
    text = format_program(compile_plan(plan))
    assert [line for line in text.splitlines() if line.startswith("# reduction")] == [
        "# reduction 0: blocks [0,1) of a shard 0/2 cut, ranks 0",
        "# reduction 1: blocks [0,1) of a shard 1/2 cut, ranks 0 1",
        "# reduction 2: blocks [0,1) of a uncut, from ranks 0 1, ranks 0 1",
        "# reduction 3: loss match, ranks 0 1",
    ]


def test_a_loss_on_other_ranks_than_its_features_is_refused() -> None:
    plan = make_plan(unit("a", dp=2), losses=[loss("match", "a", sync_batch=8)])
    moved = plan.model_copy(update={"losses": (plan.losses[0].model_copy(update={"ranks": (0,)}),)})
    with pytest.raises(InvalidInputError, match=r"losses.match.ranks: \[0\]"):
        compile_plan(moved)


def test_receives_are_posted_early_and_keep_their_order() -> None:
    row = (
        Compute(Op.FORWARD, 0, 0),
        Message(Op.RECV_B, 0, 0, 0, 1, 0, 4),
        Compute(Op.BACKWARD, 0, 0),
        Compute(Op.FORWARD, 0, 1),
        Message(Op.RECV_B, 0, 1, 0, 1, 4, 8),
        Compute(Op.BACKWARD, 0, 1),
        Step(),
    )
    assert format_row(row) == "0F0 0RECV_B0:e0<1[0,4) 0B0 0F1 0RECV_B1:e0<1[4,8) 0B1 STEP"
    hoisted = hoist_receives(row, RECEIVES_AHEAD)
    assert format_row(hoisted) == ("0RECV_B0:e0<1[0,4) 0F0 0RECV_B1:e0<1[4,8) 0B0 0F1 0B1 STEP")


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_even_plan_compiles_without_faults_and_always_alike(data: st.DataObject) -> None:
    plan = data.draw(_plans())
    program = compile_plan(plan)
    assert program == compile_plan(plan)
    assert check_program(program) == []


@st.composite
def _plans(draw: st.DrawFn) -> Plan:
    """Two towers and a chain behind one of them, on ranks that may overlap."""
    sync_batch = draw(st.sampled_from([8, 12]))
    rounds = draw(st.integers(1, 3))
    degree = st.integers(1, 3)
    specs = [
        unit(name, *inputs, pp=draw(degree), dp=draw(degree), tp=draw(st.integers(1, 2)),
             k=draw(st.integers(1, 2)), frozen=draw(st.booleans()) and name == "a",
             lead=draw(st.integers(0, 2)))
        for name, inputs in (("a", ()), ("b", ("a", "words")), ("c", ()))
    ]  # fmt: skip
    plan = make_plan(
        *specs,
        losses=[loss("match", "b", "c", sync_batch=sync_batch), loss("each", "c", "target")],
        batch=sync_batch * rounds,
    )
    if not draw(st.booleans()):
        return plan
    # Fold the ranks: units share devices, each rank still once in a unit.
    size = max(len(u.all_ranks) for u in plan.units)
    folded = tuple(
        u.model_copy(
            update={
                "ranks": tuple(
                    tuple(tuple(i for i in range(n, n + u.tp)) for n in _starts(u, d))
                    for d in range(u.dp)
                )
            }
        )
        for u in plan.units
    )
    losses = tuple(
        loss_item.model_copy(update={"ranks": _last_ranks(folded, names)})
        for loss_item, names in zip(plan.losses, ({"b", "c"}, {"c"}), strict=True)
    )
    return plan.model_copy(update={"units": folded, "losses": losses, "devices": size})


def _starts(u: Unit, d: int) -> list[int]:
    pp, tp = u.pp, u.tp
    return [(d * pp + p) * tp for p in range(pp)]


def _last_ranks(units: tuple[Unit, ...], names: set[str]) -> tuple[int, ...]:
    return tuple(
        sorted(
            {
                rank
                for u in units
                if u.module in names
                for replica in u.ranks
                for rank in replica[-1]
            }
        )
    )


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_sample_numbers_tile_the_batch_microbatch_major(
    sizes: list[list[int]], rounds: int
) -> None:
    batch = rounds * sum(map(sum, sizes))
    numbered = number_samples(sizes, batch)
    spans = sorted(span for replica in numbered for span in replica)
    assert [s for s, _ in spans] == [0, *(e for _, e in spans[:-1])]
    assert spans[-1][1] == batch
    for replica, row in zip(numbered, sizes, strict=True):
        assert [b - a for a, b in replica] == row * rounds
    index = RangeIndex(numbered)
    assert [piece for piece, _, _ in index.overlapping((0, batch))] == spans


def test_programs_are_values() -> None:
    program = tower(pp=2, k=1)
    assert dataclasses.replace(program) == program
