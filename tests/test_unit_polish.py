"""The last changes of a chosen plan: no other micro-batches are better, and pins hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.costs.program_costs import CostModel
from mmplan.planning.measured_trials import SimulatedPlan
from mmplan.planning.refinement import RefinedPlan, Refinement
from mmplan.planning.unit_polish import polish_notes, polished
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.schema.faults import plan_faults
from mmplan.schema.plan import Plan, Prediction
from mmplan.schema.workload import Pins, Workload
from mmplan.simulation.symmetry import predict
from mmplan.solvers.sample_split import cut, microbatch_sizes
from tests.programs import loss, make_plan, unit
from tests.solving import module_profile, profile, run_solve, workload
from tests.test_neighbours import small_job

SHARED = [[[0], [1]]]
NAMES = ("a", "b", "c")


@st.composite
def chains(draw: st.DrawFn) -> tuple[Plan, CostModel]:
    """Modules one after another as pipelines of two stages on the same two ranks."""
    batch, names = 8, NAMES[: draw(st.integers(1, 3))]
    inputs = {name: names[i - 1 : i] for i, name in enumerate(names)}
    plan = make_plan(
        *(
            unit(m, *inputs[m], pp=2, k=draw(st.sampled_from([1, 2, 4])), kind="1f1b", ranks=SHARED)
            for m in names
        ),
        losses=[loss("regression", names[-1])],
        batch=batch,
    )
    seconds = st.integers(1, 8).map(float)
    modules = {
        m: module_profile(draw(seconds), 2 * draw(seconds), fixed_s=0.5, blocks=2) for m in names
    }
    costs = CostModel(profile(modules, 2))
    return plan.model_copy(update={"predicted": predict(plan, costs)}), costs


def job_of(plan: Plan, **pins: object) -> Workload:
    """A workload with the plan's modules."""
    specs = {u.module: {"plan": pins} for u in plan.units}
    return workload(specs, batch=8)


def sizes(plan: Plan) -> list[int]:
    return [max(map(max, u.microbatches)) for u in plan.units]


@given(chains())
@settings(max_examples=20, deadline=None)
def test_no_other_micro_batches_of_one_unit_are_better_after_the_last_changes(
    given: tuple[Plan, CostModel],
) -> None:
    plan, costs = given

    def better(own: Plan, other: Plan) -> Plan | None:
        other = other.model_copy(update={"predicted": predict(other, costs)})
        return other if other.predicted.iteration_s < own.predicted.iteration_s else None

    best = polished(plan, job_of(plan), better)
    assert best.predicted.iteration_s <= plan.predicted.iteration_s
    assert best.predicted == predict(best, costs)
    assert not plan_faults(best)
    assert not check_program(compile_plan(best))
    kept = [(u.ranks, u.blocks, u.samples) for u in plan.units]
    assert [(u.ranks, u.blocks, u.samples) for u in best.units] == kept
    own_s = best.predicted.iteration_s
    assert all(predict(other, costs).iteration_s >= own_s for other in of_other_sizes(best))
    # Pinned sizes stay; what is left is the kind of schedule.
    pinned = polished(plan, job_of(plan, microbatch=sizes(plan)), better)
    assert set(sizes(pinned)) <= set(sizes(plan))


def of_other_sizes(plan: Plan) -> Iterator[Plan]:
    """Every unit with every other size that the search knows."""
    for index, own in enumerate(plan.units):
        (row,) = own.microbatches
        for size in microbatch_sizes(sum(row), Pins()):
            changed = own.model_copy(update={"microbatches": (cut(sum(row), size, pinned=False),)})
            units = (*plan.units[:index], changed, *plan.units[index + 1 :])
            yield plan.model_copy(update={"units": units})


def test_one_unit_alone_may_have_split_backwards() -> None:
    """Its weight gradients are computed beside the long sum of the unit before it."""
    ranks = [[[0]], [[1]]]
    plan = make_plan(
        unit("a", dp=2, kind="1f1b", ranks=ranks),
        unit("b", "a", dp=2, kind="1f1b", ranks=ranks),
        losses=[loss("regression", "b")],
        batch=2,
    )
    modules = {n: module_profile(1.0, 2.0, parameters=2e9 * (n == "a")) for n in "ab"}
    fast = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e9}
    costs = CostModel(profile(modules, 2, intra=fast))

    def better(own: Plan, other: Plan) -> Plan | None:
        other = other.model_copy(update={"predicted": predict(other, costs)})
        return other if other.predicted.iteration_s < own.predicted.iteration_s else None

    plan = plan.model_copy(update={"predicted": predict(plan, costs)})
    best = polished(plan, job_of(plan), better)
    assert [unit.schedule.split_backward for unit in best.units] == [False, True]
    assert polish_notes(best, plan)[0].startswith("b has split backwards: ")
    # The workload may forbid it.
    assert polished(plan, job_of(plan, split_backward=False), better) is plan


def test_the_chosen_plan_is_polished(tmp_path: Path) -> None:
    """Of job 13 the search's best layout has other micro-batches than its best order wants."""
    job, costs = small_job(13)
    plan = run_solve(tmp_path, job, costs)
    note = (
        "a has micro-batches of 1 in place of 2, b has micro-batches of 2 in place of 1: "
        "in this order the step takes 10.3% less"
    )
    assert note in plan.solver.notes
    sizes = [max(map(max, plan.unit(name).microbatches)) for name in "ab"]
    assert sizes == [1, 2]
    assert predict(plan, CostModel(costs, None, plan.training)) == plan.predicted


def test_what_gains_before_the_order_of_sums_must_gain_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changed shares may leave less to gain by it: then the plan stays as it was."""
    job, costs = small_job(7)
    expected = run_solve(tmp_path, job, costs)
    summed, tried = Refinement._summed, list[Plan]()

    def changed(self: Refinement, best: SimulatedPlan) -> SimulatedPlan:
        tried.append(best.plan.model_copy(update={"name": "changed"}))
        return replace(best, plan=tried[-1])

    def lost(self: Refinement, x: RefinedPlan) -> RefinedPlan:
        if x.computed.plan.name != "changed":
            return summed(self, x)
        longer = Prediction(iteration_s=1e6, samples_per_s=1)
        plan = x.computed.plan.model_copy(update={"predicted": longer})
        return replace(x, summed=replace(x.computed, plan=plan))

    monkeypatch.setattr(Refinement, "_shared_out", changed)
    monkeypatch.setattr(Refinement, "_summed", lost)
    found = run_solve(tmp_path, job, costs)
    assert tried
    assert found.predicted.iteration_s == expected.predicted.iteration_s
