"""Neighbouring replicas that are compiled as one do what each of them should."""

from __future__ import annotations

from math import lcm

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmplan.program import folding
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_graph, compile_plan, unfolded_program
from mmplan.program.lower import lower
from mmplan.program.model import Program
from mmplan.program.schedules.plan_order import order_stages
from mmplan.proof.prove import prove
from mmplan.schema.plan import Plan
from tests.naive import NaiveRun
from tests.programs import Kind, loss, make_plan, unit


def folded_program(plan: Plan, neighbours: int) -> tuple[Program, Program]:
    """The program of the folded plan, and the unfolded one of the plan."""
    graph = lower(plan)
    folded = folding.fold(plan, graph, neighbours)
    assert folded is not None
    program = compile_graph(*folded, order_stages(*folded))
    return program, unfolded_program(plan, graph, program)


@st.composite
def plans_of_many_replicas(draw: st.DrawFn) -> Plan:
    """Chains and pairs of modules whose replicas have micro-batches of few sizes."""
    dps = [draw(st.integers(1, 6)) for _ in range(3)]
    batch = lcm(*dps) * draw(st.integers(1, 2)) * 2

    def sizes(dp: int) -> list[list[int]]:
        share = batch // dp
        rows = [[share - share // 2, share // 2] if share > 1 else [share] for _ in range(dp)]
        if dp > 1 and share > 1 and draw(st.booleans()):
            rows[0] = [share]
        return rows

    kinds: list[Kind] = ["1f1b", "gpipe"]
    kind = draw(st.sampled_from(kinds))
    a, b, c = (sizes(dp) for dp in dps)
    split = draw(st.booleans())
    units = [
        unit("a", dp=dps[0], sizes=a, kind=kind, tp=draw(st.sampled_from([1, 2]))),
        unit("b", "a", dp=dps[1], sizes=b, kind=kind, pp=2, split=split),
        unit("c", "b", "x", dp=dps[2], sizes=c, kind=kind, tp=draw(st.sampled_from([1, 3]))),
    ]
    losses = [loss("l", "c"), loss("s", "c", "a", sync_batch=batch)][: draw(st.integers(1, 2))]
    return make_plan(*units, losses=losses, batch=batch)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans_of_many_replicas(), neighbours=st.integers(2, 4))
def test_unfolded_programs_have_no_fault(plan: Plan, neighbours: int) -> None:
    folded, whole = folded_program(plan, neighbours)
    assert sum(map(bool, folded.instructions)) <= sum(map(bool, whole.instructions))
    assert check_program(whole) == []
    if whole.num_ranks < 16:
        NaiveRun(whole).run()


def test_a_plan_of_very_many_ranks_is_compiled_and_proven_folded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = make_plan(
        unit("a", dp=12, k=2, kind="1f1b"),
        unit("b", "a", dp=6, pp=2, k=2, kind="1f1b"),
        losses=[loss("l", "b")],
        batch=48,
    )
    usual = prove(plan, None)
    monkeypatch.setattr(folding, "FOLDED_FROM", 16)
    monkeypatch.setattr(folding, "FOLDED_TO", 8)
    folded = prove(plan, None)
    assert not usual.faults
    assert not folded.faults
    assert folded.rows < 24
    assert check_program(compile_plan(plan)) == []


def test_units_that_share_ranks_are_not_folded() -> None:
    ranks = [[[0]], [[1]]]
    plan = make_plan(
        unit("a", dp=2, ranks=ranks), unit("b", dp=2, ranks=ranks), losses=[loss("l", "a", "b")]
    )
    assert folding.fold(plan, lower(plan), 2) is None
