"""The order of units that share ranks: any is sound, and the planner finds a good one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlaunch.session.verify import compare
from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.errors import InvalidInputError
from mmplan.planning.order_search import OrderSearch, order_notes, sums_notes
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Compute
from mmplan.schema.base import document_text
from mmplan.schema.faults import plan_faults
from mmplan.schema.plan import ChunkTimes, Order, OrderRule, Plan
from mmplan.simulation.step import simulate
from mmplan.simulation.symmetry import predict
from tests.gloo_entries import gradients
from tests.launching import launched
from tests.programs import UnitSpec, loss, make_plan, split_evenly, unit
from tests.solving import module_profile, profile, run_solve, workload
from tests.verification import HERE, make_workload, verify_in_process

RULES = get_args(OrderRule)


def chain(*, stages: int = 11, devices: int | None = None) -> tuple[Plan, CostModel]:
    """An encoder and a generator around a pipeline of an LLM; alone, or both on device 0."""
    alone = devices == stages + 2
    plan = make_plan(
        unit("encoder", k=16, kind="1f1b", ranks=[[[0]]]),
        unit("llm", "encoder", k=16, pp=stages, kind="1f1b"),
        unit("generator", "llm", k=16, kind="1f1b", ranks=[[[stages + 1 if alone else 0]]]),
        losses=[loss("regression", "generator")],
        batch=16,
    )
    given = profile(
        {
            "encoder": module_profile(0.5, 1.0, blocks=1),
            "llm": module_profile(20.0, 40.0, blocks=stages),
            "generator": module_profile(0.7, 1.4, blocks=1),
        },
        plan.devices,
    )
    return plan, CostModel(given)


def predicted(plan: Plan, costs: CostModel) -> Plan:
    return plan.model_copy(update={"predicted": predict(plan, costs)})


def test_an_encoder_and_a_generator_on_one_device_are_as_fast_as_on_two() -> None:
    plan, costs = chain()
    usual = predicted(plan, costs)
    best = OrderSearch(
        costs, simulated=lambda p: predicted(p, costs), fits=lambda p: True
    ).best_order(usual)
    apart_s = predict(*chain(devices=13)).iteration_s
    assert best.predicted.iteration_s <= 1.001 * apart_s
    assert usual.predicted.iteration_s > 1.2 * apart_s
    (note,) = order_notes(best, usual)
    gain = 1 - best.predicted.iteration_s / usual.predicted.iteration_s
    assert f"{gain:.1%} less" in note
    # The file says it in a few lines.
    assert best.order is not None
    assert len(document_text(best)) - len(document_text(usual)) < 4_000
    assert Plan.model_validate_json(document_text(best)) == best


def test_a_plan_stays_as_it_is_where_no_other_order_gains_or_fits() -> None:
    plan, costs = chain(devices=13)
    apart = predicted(plan, costs)

    def never(plan: Plan) -> Plan:
        raise AssertionError("nothing to try: no rank is shared")

    assert OrderSearch(costs, simulated=never, fits=lambda p: True).best_order(apart) is apart
    plan, costs = chain()
    usual = predicted(plan, costs)
    same = OrderSearch(
        costs, simulated=lambda p: predicted(p, costs), fits=lambda p: False
    ).best_order(usual)
    assert same is usual


def test_other_rules_are_simulated_where_sums_take_long() -> None:
    """No rank idles between its computes: an estimate sees no gain in hiding sums behind others."""
    ranks = [[[0]], [[1]]]
    plan = make_plan(
        *(unit(m, *inputs, dp=2, k=2, kind="1f1b", ranks=ranks) for m, *inputs in ("a", "ba")),
        losses=[loss("regression", "b")],
        batch=4,
    )
    each = {m: module_profile(2.0, 4.0, blocks=1, parameters=40.0) for m in "ab"}
    link = {"latency_s": 0.1, "bandwidth_bytes_per_s": 16.0}
    costs = CostModel(profile(each, 2, intra=link))
    usual, tried = predicted(plan, costs), list[Plan]()

    def simulated(plan: Plan) -> Plan:
        tried.append(predicted(plan, costs))
        return tried[-1]

    best = OrderSearch(costs, simulated=simulated, fits=lambda p: True).best_order(usual)
    assert {(p.order or Order()).rule for p in tried} == set(RULES) - {"backward-first"}
    assert best.predicted.iteration_s < 0.95 * usual.predicted.iteration_s
    assert best.predicted.iteration_s == min(p.predicted.iteration_s for p in tried)
    # Over fast links there is nothing to hide.
    costs, tried = CostModel(profile(each, 2)), []
    usual = predicted(plan, costs)
    assert OrderSearch(costs, simulated=simulated, fits=lambda p: True).best_order(usual) is usual
    assert not tried


def test_the_longest_sums_come_first_where_others_would_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sum of y shares a rank with each of the two others, and stands between them.

    Sums begin behind all work where ranks would start them in several orders: here all do.
    """
    monkeypatch.setattr("mmplan.program.compile.with_starts", lambda _, rows: rows)
    ranks = {"x": (0, 1), "y": (1, 2), "z": (2, 3)}
    plan = make_plan(
        *(
            unit(m, task=t, kind="gpipe", ranks=[[[own[i]]]])
            for m, own in ranks.items()
            for i, t in enumerate("st")
        ),
        losses=[loss(f"{t}.{m}", m, task=t) for m in ranks for t in "st"],
        batch=2,
    )
    parameters = {"x": 40.0, "y": 80.0, "z": 40.0}
    modules = {m: module_profile(2.0, 4.0, blocks=1, parameters=n) for m, n in parameters.items()}
    link = {"latency_s": 0.1, "bandwidth_bytes_per_s": 16.0}
    costs = CostModel(profile(modules, 4, intra=link))
    usual = predicted(plan, costs)
    rows = compile_plan(plan).instructions
    assert not any("REDUCE_START" in str(item) for row in rows for item in row)
    best = OrderSearch(
        costs, simulated=lambda p: predicted(p, costs), fits=lambda p: True
    ).best_sums(usual)
    assert best.order is not None
    assert best.order.sums.keys() == ranks.keys()
    # Computes take 24 s on ranks 1 and 2; x, y and z come one after the other, or x and z at once.
    x_s, y_s = 0.2 + 160 / 16, 0.2 + 320 / 16
    assert usual.predicted.iteration_s == pytest.approx(24 + x_s + y_s + x_s)
    assert best.predicted.iteration_s == pytest.approx(24 + y_s + x_s)
    assert sums_notes(best, usual) != []
    same = OrderSearch(
        costs, simulated=lambda p: predicted(p, costs), fits=lambda p: False
    ).best_sums(usual)
    assert same is usual


def test_plans_without_an_order_are_written_as_before() -> None:
    plan, _ = chain()
    assert '"order"' not in document_text(plan)
    default = plan.model_copy(update={"order": Order()})
    assert compile_plan(default) == compile_plan(plan)


@st.composite
def shared_plans(draw: st.DrawFn, copies: int = 1) -> Plan:
    """Chains and towers whose units share ranks in part or in whole, in any order.

    With several copies every unit has so many times the replicas, on ranks of their own.
    """
    devices = draw(st.integers(1, 4))
    chained = draw(st.booleans())
    sync = 0 if chained else draw(st.sampled_from([6, 12]))
    names = ["a", "b", "c"][: draw(st.integers(2, 3))]
    units: list[UnitSpec] = []
    for i, name in enumerate(names):
        pp = draw(st.integers(1, devices))
        dp = draw(st.integers(1, devices // pp))
        first = draw(st.integers(0, devices - 1))
        ranks = [
            [[copy * devices + (first + d * pp + p) % devices] for p in range(pp)]
            for copy in range(copies)
            for d in range(dp)
        ]
        counts = [draw(st.integers(1, share)) for share in split_evenly(sync or 12, dp)]
        units.append(
            unit(
                name,
                *(names[i - 1 : i] if chained else []),
                pp=pp,
                vpp=draw(st.integers(1, 2)),
                dp=copies * dp,
                k=copies * counts,
                shares=copies * split_evenly(sync or 12, dp),
                kind="batch-sync" if sync else draw(st.sampled_from(["1f1b", "gpipe"])),
                lead=draw(st.integers(1, 3)),
                frozen=draw(st.sampled_from([False, False, ((0, 1),)])),
                split=draw(st.booleans()),
                ranks=ranks,
            )
        )
    last = names[-1:] if chained else names
    losses = (
        [loss("sync", *names, sync_batch=copies * sync)]
        if sync
        else [loss(f"l{n}", n) for n in last]
    )
    plan = make_plan(*units, losses=losses, batch=copies * 12, devices=copies * devices)
    return plan.model_copy(update={"order": draw(orders(plan))})


def orders(plan: Plan) -> st.SearchStrategy[Order]:
    nominal = st.integers(1, 9)
    chunk = st.builds(ChunkTimes, forward=nominal, backward=nominal, input_backward=nominal)
    times = st.fixed_dictionaries({u.name: st.tuples(*[chunk] * len(u.blocks)) for u in plan.units})
    sums = st.dictionaries(st.sampled_from([u.module for u in plan.units]), nominal)
    return st.builds(Order, rule=st.sampled_from(RULES), times=times | st.just({}), sums=sums)


@given(shared_plans())
@settings(max_examples=15, deadline=None)
def test_every_order_is_complete_and_free_of_deadlocks(plan: Plan) -> None:
    assert plan_faults(plan) == []
    try:
        program = compile_plan(plan)
    except InvalidInputError:
        # Whether the units' own orders wait for each other does not depend on the rule.
        with pytest.raises(InvalidInputError, match="wait for each other"):
            compile_plan(plan.model_copy(update={"order": None}))
        return
    assert check_program(program) == []
    usual = compile_plan(plan.model_copy(update={"order": None}))
    for row, other in zip(program.instructions, usual.instructions, strict=True):
        # Which sums can begin inside a backward depends on the order.
        ours, theirs = ([str(x) for x in r if "REDUCE_START" not in str(x)] for r in (row, other))
        assert sorted(ours) == sorted(theirs)


@given(shared_plans(copies=2))
@settings(max_examples=10, deadline=None)
def test_equal_parts_of_a_plan_in_any_order_are_simulated_once(plan: Plan) -> None:
    modules = {u.module: module_profile(1.0, 2.0, blocks=len(u.blocks)) for u in plan.units}
    costs = CostModel(profile(modules, plan.devices))
    try:
        program = compile_plan(plan)
    except InvalidInputError:
        return
    whole = simulate(program, ProgramCosts(program, costs, plan))
    assert predict(plan, costs).iteration_s == pytest.approx(whole.iteration_s, rel=1e-12)


def test_an_order_that_contradicts_its_plan_is_named() -> None:
    plan, _ = chain(stages=2)
    one = ChunkTimes(forward=1, backward=2, input_backward=1)
    times = {"encoder": (one,), "llm": (one,), "decoder": (one,)}
    assert plan_faults(plan.model_copy(update={"order": Order(times=times, sums={"v": 1})})) == [
        "order.sums: no task has parameters of module 'v'",
        "order.times: there is no unit 'decoder'",
        "order.times.llm: times of 1 chunks, the unit has 2",
        "order.times.generator: times of 0 chunks, the unit has 1",
    ]


def one_grid(order: Order | None) -> tuple[list[UnitSpec], Plan]:
    """Three chained modules on the same two positions, as megatron puts them."""
    ranks = [[[0], [1]]]
    more: dict[str, Any] = {"pp": 2, "k": 4, "kind": "1f1b", "ranks": ranks, "lead": 2}
    units = [
        unit("v", "a", **more),
        unit("t", "v", "b", **more),
        unit("u", "t", "c", split=True, **more),
    ]
    plan = make_plan(*units, losses=[loss("regression", "u", "target")], batch=12)
    return units, plan.model_copy(update={"order": order})


def uneven_times(plan: Plan) -> dict[str, tuple[ChunkTimes, ...]]:
    return {
        u.name: tuple(
            ChunkTimes(forward=1 + 4 * i + c, backward=9 - 3 * i + c, input_backward=2)
            for c in range(len(u.blocks))
        )
        for i, u in enumerate(plan.units)
    }


def uneven(plan: Plan, rule: OrderRule) -> Order:
    """Every unit and every sum takes another time."""
    return Order(rule=rule, times=uneven_times(plan), sums={"u": 3, "v": 9})


ORDERS = [(rule, timed) for rule in RULES for timed in (False, True)]


def test_orders_differ_and_gradients_are_those_of_one_process() -> None:
    units, plan = one_grid(None)
    seen: set[str] = set()
    job = make_workload(units, [loss("regression", "u", "target")], batch=12)
    for rule, timed in ORDERS:
        ordered = plan.model_copy(
            update={"order": uneven(plan, rule) if timed else Order(rule=rule)}
        )
        rows = compile_plan(ordered).instructions
        seen.add(" ".join(str(item) for row in rows for item in row if isinstance(item, Compute)))
        if rule == "backward-first" or not timed:
            continue
        verdict = verify_in_process(ordered, job)
        assert not verdict.differences, (rule, timed, verdict.differences[:5])
    assert len(seen) >= 4


@pytest.mark.slow
def test_gradients_in_every_order_over_gloo(tmp_path: Path) -> None:
    units, plan = one_grid(None)
    job = make_workload(units, [loss("regression", "u", "target")], batch=12)
    cases = [
        plan.model_copy(update={"order": uneven(plan, rule) if timed else Order(rule=rule)})
        for rule, timed in ORDERS
    ]
    found = launched(
        gradients, ([(p, job) for p in cases],), num_ranks=2, run_dir=tmp_path, timeout_s=90.0
    )
    for index, ordered in enumerate(cases):
        verdict = compare(job, HERE, compile_plan(ordered), [rank[index] for rank in found])
        assert not verdict.differences, (ordered.order, verdict.differences[:5])
        assert verdict.compared > 2


def test_the_planner_stores_the_order_that_simulation_prefers(tmp_path: Path) -> None:
    job = workload(
        {
            "encoder": {},
            "llm": {"inputs": ["encoder"], "backbone": True},
            "generator": {"inputs": ["llm"]},
        },
        batch=16,
        losses={"pixels": {"factory": "mmplan.zoo.losses:mse", "inputs": ["generator", "y"]}},
    )
    each: dict[str, Any] = {"blocks": 4, "activation_bytes": 0.0, "parameters": 10.0}
    costs = profile(
        {
            "encoder": module_profile(1.0, 2.0, **each),
            "llm": module_profile(6.0, 12.0, **each),
            "generator": module_profile(2.0, 4.0, **each),
        },
        4,
        memory_bytes=200.0,
    )
    plan = run_solve(tmp_path, job, costs, solver="megatron")
    assert {unit.pp for unit in plan.units} == {4}
    assert plan.order is not None
    assert any("on shared devices the order is" in note for note in plan.solver.notes)
    assert predict(plan, CostModel(costs, None, plan.training)) == plan.predicted
    usual = predict(plan.model_copy(update={"order": None}), CostModel(costs, None, plan.training))
    assert plan.predicted.iteration_s < 0.95 * usual.iteration_s
    assert run_solve(tmp_path, job, costs, solver="megatron").order == plan.order
