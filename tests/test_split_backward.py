"""Split backwards: the times and memory of their schedules, and what the checks see of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.execute.executor import ComputePart, Executor
from mmlaunch.session.session import Session
from mmlaunch.session.verify import Verdict
from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Collective, Compute, Op, format_row
from mmplan.program.model import Program
from mmplan.program.text import format_program
from mmplan.schema.plan import Plan
from mmplan.simulation.step import simulate
from tests.clocks import FixedCosts, TinySimulator, tower
from tests.matrix_cases import Case
from tests.naive import NaiveRun, WrongStepError
from tests.plants import drop, places, put, with_rows
from tests.programs import Kind, in_flight, loss, make_plan, plans, trained_as, unit
from tests.selection import some
from tests.solving import module_profile, profile
from tests.splitting import split_by_hand
from tests.verification import HERE, verify_in_process

KINDS: list[Kind] = ["1f1b", "gpipe", "batch-sync"]


def split(plan: Plan, *, even: bool = False) -> Plan:
    """The plan with every backward split that can be."""
    changes = {"split_backward": True, "even_in_flight": even}
    units = (
        u.model_copy(update={"schedule": u.schedule.model_copy(update=changes)}) for u in plan.units
    )
    return plan.model_copy(update={"units": tuple(units)})


def computes(program: Program, rank: int) -> str:
    return format_row(tuple(x for x in program.instructions[rank] if isinstance(x, Compute)))


# --- the schedules --------------------------------------------------------------------------


def test_the_parts_are_printed() -> None:
    assert format_row((Compute(Op.INPUT, 0, 3), Compute(Op.WEIGHT, 12, 0))) == "0I3 12W0"
    assert ", split backward" in format_program(tower(2, 3, 1, kind="1f1b", split=True))


def test_only_stages_with_both_gradients_are_split() -> None:
    """The first stage sends no gradient on, a frozen one computes none of its weights."""
    program = compile_plan(
        make_plan(
            unit("a", pp=2, blocks=4, k=2, kind="1f1b", split=True),
            unit("b", "a", pp=3, k=2, frozen=((1, 2),), kind="1f1b", split=True),
            unit("c", "b", k=2, kind="1f1b"),
            losses=[loss("l", "c")],
            batch=2,
        )
    )
    assert [stage.split for stage in program.stages] == [False, True, True, False, True, False]
    assert computes(program, 0) == "0F0 0F1 0B0 0B1"
    assert computes(program, 3) == "3F0 3F1 3B0 3B1"
    assert computes(program, 5) == "5F0 5B0 5F1 5B1"


def test_zb_h1_of_four_stages_by_hand() -> None:
    own = tower(4, 5, 1, kind="1f1b", split=True)
    assert computes(own, 2) == "2F0 2F1 2I0 2W0 2F2 2I1 2W1 2F3 2I2 2W2 2F4 2I3 2W3 2I4 2W4"
    even = tower(4, 5, 1, kind="1f1b", split=True, even=True)
    assert computes(even, 3) == "3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3W2 3W3 3W4"


@pytest.mark.parametrize("stages", [1, 3, 8])
@pytest.mark.parametrize("n", [8, 13])
@pytest.mark.parametrize("kind", KINDS)
def test_idle_time_of_equal_stages(kind: Kind, stages: int, n: int) -> None:
    """By hand: for 8 stages and K = 8, 21 idle units, then 14, then 7."""
    whole, own = (tower(stages, n, 1, kind=kind, split=s) for s in (False, True))
    even = tower(stages, n, 1, kind=kind, split=True, even=True)
    costs = FixedCosts(forward=1.0, backward=2.0)
    assert simulate(whole, costs).iteration_s == 3 * n + 3 * (stages - 1)
    assert simulate(own, costs).iteration_s == 3 * n + 2 * (stages - 1)
    if kind == "1f1b":
        assert simulate(even, costs).iteration_s == 3 * n + (stages - 1)
    held = in_flight(whole)
    assert in_flight(own) == held
    assert simulate(own, costs).peak_bytes == simulate(whole, costs).peak_bytes
    assert max(in_flight(even).values()) == max(held.values())


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 3),
    st.tuples(st.integers(1, 4), st.integers(1, 6), st.sampled_from([0.25, 0.5, 0.75])),
    st.booleans(),
    st.sampled_from([0.0, 0.5]),
)
def test_simulated_times_equal_an_independent_simulation(
    kind: Kind,
    stages: int,
    k: int,
    rounds: int,
    times: tuple[int, int, float],
    even: bool,
    message: float,
) -> None:
    program = tower(stages, k, rounds, kind=kind, split=True, even=even)
    f, b, share = times
    costs = FixedCosts(forward=f, backward=b, input_share=share, message=message)
    got = simulate(program, costs)
    assert got.iteration_s == pytest.approx(TinySimulator(program, costs).run(), rel=1e-12)
    busy = stages * k * rounds * (f + b)
    assert sum(got.busy_s) == pytest.approx(busy)


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("n", [8, 12])
def test_interleaved_chunks_gain_too_and_hold_no_more(pp: int, n: int) -> None:
    def plan(**options: Any) -> Program:
        units = [unit("v", pp=pp, vpp=2, k=n, kind="interleaved", **options)]
        return compile_plan(make_plan(*units, losses=[loss("l", "v")], batch=n))

    whole, own, even = plan(), plan(split=True), plan(split=True, even=True)
    costs = FixedCosts(forward=1.0, backward=2.0)
    assert check_program(own) == check_program(even) == []
    before, after = simulate(whole, costs), simulate(own, costs)
    assert after.iteration_s < before.iteration_s
    assert simulate(even, costs).iteration_s <= after.iteration_s
    held = in_flight(whole)
    assert all(n <= held[key] for key, n in in_flight(own).items())
    assert all(a <= b for a, b in zip(after.peak_bytes, before.peak_bytes, strict=True))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans(), st.booleans(), st.data())
def test_any_plan_is_sound_with_split_backwards(
    plan: Plan, even: bool, data: st.DataObject
) -> None:
    chosen = [data.draw(st.booleans()) for _ in plan.units]
    units = tuple(
        new if take else old
        for old, new, take in zip(plan.units, split(plan, even=even).units, chosen, strict=True)
    )
    whole, program = compile_plan(plan), compile_plan(plan.model_copy(update={"units": units}))
    assert check_program(program) == []
    NaiveRun(program).run()
    held = in_flight(whole)
    for key, number in in_flight(program).items():
        assert even or number <= held[key]
    # The same computes, but for the parts. Sums begin where the order of all collectives allows.
    for old, new in zip(whole.instructions, program.instructions, strict=True):
        joined = [
            replace(x, op=Op.BACKWARD) if _is(Op.INPUT)(x) else x
            for x in new
            if not _is(Op.WEIGHT)(x)
        ]
        rows = [sorted(str(x) for x in row if x.op is not Op.REDUCE_START) for row in (joined, old)]
        assert rows[0] == rows[1]


# --- what the checks see --------------------------------------------------------------------

UNITS = [
    unit("v", "a", pp=2, dp=2, tp=2, blocks=4, k=2, split=True),
    unit("t", "b", pp=3, k=2, split=True),
]
LOSSES = [loss("contrastive", "v", "t", sync_batch=8)]


def program() -> Program:
    return compile_plan(make_plan(*UNITS, losses=LOSSES, batch=16))


def _is(op: Op) -> Callable[[Any], bool]:
    return lambda item: isinstance(item, Compute) and item.op is op


def _first(program: Program, op: Op) -> tuple[int, int, Compute]:
    rank, position, item = next(places(program, _is(op)))
    assert isinstance(item, Compute)
    return rank, position, item


def _dropped(program: Program) -> Program:
    return drop(program, *_first(program, Op.WEIGHT)[:2])


def _twice(program: Program) -> Program:
    rank, position, item = _first(program, Op.WEIGHT)
    row = program.instructions[rank]
    return with_rows(program, {rank: (*row[:position], item, *row[position:])})


def _before_its_i(program: Program) -> Program:
    rank, position, item = _first(program, Op.WEIGHT)
    row = [*program.instructions[rank]]
    i = row.index(Compute(Op.INPUT, item.stage, item.mb))
    row.insert(i, row.pop(position))
    return with_rows(program, {rank: tuple(row)})


def _other_micro_batch(program: Program) -> Program:
    rank, position, item = _first(program, Op.WEIGHT)
    return put(program, rank, position, replace(item, mb=item.mb + 1))


def _after_the_reduction(program: Program) -> Program:
    blocks = {r.index for r in program.block_reductions}
    for rank, row in enumerate(program.instructions):
        weights = [i for i, x in enumerate(row) if _is(Op.WEIGHT)(x)]
        sums = [i for i, x in enumerate(row) if isinstance(x, Collective) and x.index in blocks]
        if weights and sums:
            items = [*row]
            items.insert(sums[-1], items.pop(weights[0]))
            return with_rows(program, {rank: tuple(items)})
    raise AssertionError("no rank reduces what it splits")


def _whole_in_its_place(program: Program) -> Program:
    rank, position, item = _first(program, Op.INPUT)
    return put(program, rank, position, replace(item, op=Op.BACKWARD))


def _parts_of_a_whole(program: Program) -> Program:
    rank, position, item = _first(program, Op.BACKWARD)
    return put(program, rank, position, replace(item, op=Op.INPUT))


PLANTS: dict[str, tuple[Callable[[Program], Program], str]] = {
    "dropped": (_dropped, "W0 is missing"),
    "twice": (_twice, "stands 2 times"),
    "before its I": (_before_its_i, "comes before its I"),
    "of another micro-batch": (_other_micro_batch, "W0 is missing"),
    "after the reduction": (_after_the_reduction, "adds to gradients already reduced"),
    "a whole one in its place": (_whole_in_its_place, "does not belong here"),
    "a part of a whole one": (_parts_of_a_whole, "does not belong here"),
}


@pytest.mark.parametrize("fault", PLANTS)
def test_planted_faults_are_found(fault: str) -> None:
    assert check_program(program()) == []
    change, message = PLANTS[fault]
    changed = change(program())
    assert any(message in text for text in check_program(changed)), check_program(changed)
    with pytest.raises(WrongStepError):
        NaiveRun(changed).run()


# --- costs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_parts_cost_the_whole(recompute: str) -> None:
    """Recomputation, and losses computed with the stage, are paid in I."""
    plan = make_plan(
        unit("v", pp=2, blocks=4, k=2, frozen=((2, 3),), kind="1f1b", split=True),
        losses=[loss("l", "v")],
        batch=4,
    )
    task = plan.tasks["default"]
    module = task.modules["v"].model_copy(update={"recompute": recompute})
    plan = plan.model_copy(
        update={"tasks": {"default": task.model_copy(update={"modules": {"v": module}})}}
    )
    known = profile({"v": module_profile(1.0, 2.5)}, 2)
    compiled = compile_plan(plan)
    costs = ProgramCosts(compiled, CostModel(known, plan.cluster), plan)
    last = compiled.stages[1]
    whole, inputs, weights = (
        costs.compute_s(last, op, 2) for op in (Op.BACKWARD, Op.INPUT, Op.WEIGHT)
    )
    assert inputs + weights == pytest.approx(whole)
    # Half of the blocks, of which half train.
    scale = costs.compute_s(last, Op.FORWARD, 2) / 0.5
    assert weights == pytest.approx(1.25 / 4 * scale)
    assert inputs == pytest.approx((1.25 + (recompute == "full")) / 2 * scale)


# --- the step -------------------------------------------------------------------------------


def check(verdict: Verdict) -> None:
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= 1e-12


CHAIN = Case(pp=3, k=4, samples=12, feature="chain", kind="1f1b", backward="even")
TIED = Case(pp=3, dp=2, k=4, samples=12, feature="tied", kind="gpipe", backward="split")
SHARED = Case(pp=2, dp=3, k=2, syncs=2, samples=12, feature="shared", backward="even")
CHUNKS = Case(pp=2, k=4, vpp=2, samples=12, kind="interleaved", backward="even")


@pytest.mark.parametrize(
    ("recompute", "zero", "case"),
    some(
        [
            ("full", 0, CHAIN),
            ("full", 1, replace(CHAIN, dp=2, tp=2, pp=2, feature="dropout")),
            ("none", 1, TIED),
            ("full", 1, SHARED),
            ("full", 0, CHUNKS),
        ],
        1,
        2,
    ),
)
def test_gradients_equal_one_process(recompute: str, zero: int, case: Case) -> None:
    workload = case.workload()
    modules = {
        name: spec.model_copy(update={"recompute": recompute})
        for name, spec in workload.modules.items()
    }
    train = workload.train.model_copy(update={"zero": zero})
    workload = workload.model_copy(update={"modules": modules, "train": train})
    assert any(stage.split for stage in compile_plan(case.plan()).stages)
    check(verify_in_process(case.plan(), workload))


@pytest.mark.parametrize("feature", some(["chain", "shared", "two-consumers"], 2))
@pytest.mark.parametrize("seed", [0, None])
def test_weight_gradients_may_come_at_any_time(feature: str, seed: int | None) -> None:
    case = Case(feature=feature, pp=3, dp=2, tp=2, k=2, samples=12)

    def change(program: Program) -> Program:
        changed = split_by_hand(program, seed)
        assert check_program(changed) == []
        return changed

    check(verify_in_process(case.plan(), case.workload(), change=change))


@pytest.mark.parametrize("feature", some(["plain", "chain"], 1))
def test_bf16_is_as_near_as_rounding_allows(feature: str) -> None:
    case = Case(feature=feature, pp=2, dp=2, tp=2, k=2, samples=12, backward="even")
    workload = case.workload()
    train = workload.train.model_copy(update={"precision": "bf16"})
    verdict = verify_in_process(case.plan(), workload.model_copy(update={"train": train}))
    assert not verdict.differences, (verdict.share, verdict.differences[:5])


def test_a_forgotten_w_is_a_wrong_gradient() -> None:
    """The weights' gradients do come from W, all of those that tensor parallelism cuts."""
    case = Case(pp=2, k=2, samples=12, others="single", backward="split")

    def forget(program: Program) -> Program:
        return _dropped(program)

    verdict = verify_in_process(case.plan(), case.workload(), change=forget)
    wrong = {difference.name.partition(".")[2] for difference in verdict.differences}
    assert wrong == {"1.up.weight", "1.up.bias", "1.down.weight", "1.down.bias"}


@pytest.mark.parametrize("backward", ["split", "even"])
def test_the_executor_holds_what_the_program_says(
    backward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(
        pp=3, dp=2, k=4, syncs=2, samples=12, kind="1f1b", feature="chain", backward=backward
    )
    most: dict[tuple[int, int], int] = {}
    forward = Executor._forward

    def counted(self: Executor, part: ComputePart) -> None:
        forward(self, part)
        stage = part.stage
        live = {k[1] for k, v in self._live.items() if k[0] == stage.index and v.output is not None}
        held = live | {k[1] for k, v in self._later.items() if k[0] == stage.index and len(v)}
        key = self._transport.rank, stage.index
        most[key] = max(most.get(key, 0), len(held))

    def entry(transport: Any) -> Program:
        workload = case.workload()
        session = Session(
            plan=trained_as(case.plan(), workload),
            workload=workload,
            folder=HERE,
            transport=transport,
        )
        session.forward_backward()
        assert session.executor._later == {}
        assert session.executor._live == {}
        return session.program

    monkeypatch.setattr(Executor, "_forward", counted)
    done = InProcessWorld(case.plan().devices).run(entry)[0]
    assert most == in_flight(done)
