"""Samples that go over from devices with much to do to devices with less."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.costs.cost_model import CostModel
from mmplan.planning.uneven_shares import shares_notes, with_uneven_shares
from mmplan.schema.faults import plan_faults
from mmplan.schema.plan import Plan
from mmplan.simulation.symmetry import predict
from tests.programs import loss, make_plan, unit
from tests.solving import module_profile, profile, workload
from tests.test_order import shared_plans
from tests.verification import make_workload, verify_in_process

LOSSES = [loss("regression1", "v", "target"), loss("regression2", "t", "target")]
JOB = workload({"v": {}, "t": {}}, batch=24)


def simulated(plan: Plan, costs: CostModel) -> Plan:
    return plan.model_copy(update={"predicted": predict(plan, costs)})


def towers() -> Plan:
    """Rank 1 is in both units, and has twice as much to do as ranks 0 and 2."""
    return make_plan(
        unit("v", "a", dp=2, k=1, kind="gpipe", ranks=[[[0]], [[1]]]),
        unit("t", "b", dp=2, k=1, kind="gpipe", ranks=[[[1]], [[2]]]),
        losses=LOSSES,
        batch=24,
    )


def test_a_device_of_two_units_gets_fewer_samples_of_both() -> None:
    modules = {m: module_profile(1.0, 2.0, blocks=1) for m in "vt"}
    costs = CostModel(profile(modules, 3))
    even = simulated(towers(), costs)
    assert even.predicted.iteration_s == pytest.approx(3 * 24)

    def better(own: Plan, other: Plan) -> Plan | None:
        found = simulated(other, costs)
        return found if found.predicted.iteration_s < own.predicted.iteration_s else None

    plan = with_uneven_shares(even, costs, JOB, better)
    assert [unit.samples for unit in plan.units] == [(16, 8), (8, 16)]
    assert plan.predicted.iteration_s == pytest.approx(3 * 16)
    assert shares_notes(plan, even) == [
        "devices that other units use too have fewer samples (v 8 to 16; t 8 to 16): the step "
        "takes 33.3% less"
    ]
    assert not shares_notes(even, even)
    # Shares whose micro-batches the workload pins stay as they are.
    pins = {m: {"plan": {"microbatch": 12}} for m in "vt"}
    assert with_uneven_shares(even, costs, workload(pins, batch=24), better) is even


def test_gradients_of_uneven_shares_are_those_of_one_process() -> None:
    modules = {m: module_profile(1.0, 2.0, blocks=1) for m in "vt"}
    costs = CostModel(profile(modules, 3))
    plan = with_uneven_shares(simulated(towers(), costs), costs, JOB, lambda own, other: None)
    changed: list[Plan] = []
    with_uneven_shares(plan, costs, JOB, lambda own, other: changed.append(other))
    units = [unit("v", "a", dp=2, ranks=[[[0]], [[1]]]), unit("t", "b", dp=2, ranks=[[[1]], [[2]]])]
    job = make_workload(units, LOSSES, batch=24)
    assert changed[0].units[0].samples != plan.units[0].samples
    verdict = verify_in_process(changed[0], job)
    assert not verdict.differences, verdict.differences[:5]


@settings(max_examples=25, deadline=None)
@given(shared_plans(), st.integers(1, 5))
def test_all_samples_are_in_some_share(plan: Plan, seconds: int) -> None:
    modules = {
        u.module: module_profile(float(seconds + i), 2.0, blocks=len(u.blocks))
        for i, u in enumerate(plan.units)
    }
    costs = CostModel(profile(modules, plan.devices))
    seen: list[Plan] = []
    job = workload({u.module: {} for u in plan.units}, batch=12)
    with_uneven_shares(plan, costs, job, lambda own, other: seen.append(other))
    for other in seen:
        assert not plan_faults(other)
        for before, after in zip(plan.units, other.units, strict=True):
            assert sum(after.samples) == sum(before.samples)
            assert [len(row) for row in after.microbatches] == [
                len(row) for row in before.microbatches
            ]
