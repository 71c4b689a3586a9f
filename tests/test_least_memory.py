"""What a plan holds and takes at least, against its simulation; and patience with simulating."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmplan.costs.cost_model import CostModel
from mmplan.planning import candidate_plans, measured_trials, planner
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.simulation.least_step import least_step_s
from mmplan.simulation.peak_memory import memory_lower_bound
from mmplan.simulation.symmetry import compiled
from tests.solving import FACTORY, module_profile, profile, run_solve, workload

LOSS = {"l": {"factory": FACTORY, "inputs": ["llm"]}}
CHAIN = {"vision": {"inputs": ["x"]}, "llm": {"inputs": ["vision"]}}
PAIR = {"a": {}, "b": {}}


def given(names: tuple[str, ...], devices: int, **cluster: Any) -> Profile:
    modules = {
        name: module_profile(s, 2 * s, blocks=4, parameters=100.0, activation_bytes=1000.0 * s)
        for name, s in zip(names, (1.0, 3.0), strict=True)
    }
    return profile(modules, devices, **cluster)


def least(plan: Plan, costs: Profile) -> float:
    return memory_lower_bound(plan, CostModel(costs, plan.cluster, plan.training))


@pytest.mark.parametrize("solver", ["distmm", "convex", "megatron-rigid", "ratio"])
def test_exact_where_a_device_runs_one_stage(solver: str, tmp_path: Path) -> None:
    task = workload(CHAIN, batch=16, losses=LOSS)
    costs = given(("vision", "llm"), 4)
    # With one candidate backwards stay whole.
    plan = run_solve(tmp_path, task, costs, solver=solver, top=1)
    ranks = [rank for unit in plan.units for rank in set(unit.all_ranks)]
    assert len(ranks) == len(set(ranks))
    assert least(plan, costs) == pytest.approx(max(plan.predicted.memory_bytes))


@pytest.mark.parametrize("solver", ["colocated", "megatron", "mpsp"])
def test_no_more_than_is_held_where_devices_run_several(solver: str, tmp_path: Path) -> None:
    task = workload(PAIR, batch=16, sync_batch=8)
    costs = given(("a", "b"), 4)
    plan = run_solve(tmp_path, task, costs, solver=solver)
    held = max(plan.predicted.memory_bytes)
    # The parameters of both modules, and the micro-batches of one.
    assert 0.5 * held < least(plan, costs) <= held


@pytest.mark.parametrize("solver", ["distmm", "colocated", "mpsp"])
def test_bytes_are_known_before_the_simulation(solver: str, tmp_path: Path) -> None:
    costs = given(("a", "b"), 4)
    plan = run_solve(tmp_path, workload(PAIR, batch=16, sync_batch=8), costs, solver=solver)
    own = compiled(plan, CostModel(costs, plan.cluster, plan.training))
    assert own.peak_bytes == pytest.approx(max(plan.predicted.memory_bytes))


def least_s(plan: Plan, costs: Profile, *, as_planned: bool = False) -> float:
    own = CostModel(costs, plan.cluster, plan.training)
    return least_step_s(plan, own, as_planned=as_planned)


@pytest.mark.parametrize("solver", ["distmm", "convex", "colocated", "megatron-rigid", "mpsp"])
def test_no_step_takes_less_than_its_computes(solver: str, tmp_path: Path) -> None:
    costs = given(("vision", "llm"), 4)
    task = workload(CHAIN, batch=16, losses=LOSS)
    plan = run_solve(tmp_path, task, costs, solver=solver)
    step_s = plan.predicted.iteration_s
    planned_s = least_s(plan, costs, as_planned=True)
    assert 0.5 * step_s < least_s(plan, costs) <= planned_s <= step_s * (1 + 1e-9)


def test_exact_on_one_device(tmp_path: Path) -> None:
    costs, task = given(("vision", "llm"), 1), workload(CHAIN, batch=16, losses=LOSS)
    plan = run_solve(tmp_path, task, costs, solver="colocated")
    assert least_s(plan, costs) == pytest.approx(plan.predicted.iteration_s)


def test_a_last_stage_waits_for_its_first_micro_batch(tmp_path: Path) -> None:
    costs, task = given(("vision", "llm"), 2), workload(CHAIN, batch=2, losses=LOSS)
    # With one candidate backwards stay whole.
    plan = run_solve(tmp_path, task, costs, solver="convex", top=1)
    vision, llm = plan.units
    assert set(vision.all_ranks).isdisjoint(llm.all_ranks)
    # Forwards and backwards of two samples, after the first one's forward in the other module.
    first = vision.microbatches[0][0]
    least = first * 1.0 + 2 * (3.0 + 6.0)
    assert least_s(plan, costs) == pytest.approx(least)
    # Whole ones: the gradient of the last goes on to the other module.
    last = min(vision.microbatches[0])
    assert least_s(plan, costs, as_planned=True) == pytest.approx(least + last * 2.0)


def test_a_plan_that_two_solvers_find_is_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def counted(plan: Plan, *others: Any) -> Any:
        seen.append((plan.training.zero, plan.units, plan.losses, plan.waves, str(plan.order)))
        return compiled(plan, *others)

    monkeypatch.setattr(candidate_plans, "compiled", counted)
    costs, task = given(("vision", "llm"), 4), workload(CHAIN, batch=16, losses=LOSS)
    run_solve(tmp_path, task, costs, solver="auto")
    assert len(seen) == len(set(seen)) > 1


def test_impatience_leaves_the_first_of_each_kind(tmp_path: Path) -> None:
    task, costs = workload(CHAIN, batch=16, losses=LOSS), given(("vision", "llm"), 4)
    patient = run_solve(tmp_path, task, costs, solver="convex")
    hasty = run_solve(tmp_path, task, costs, solver="convex", patience_s=0.0)
    assert len(hasty.solver.runners_up) < len(patient.solver.runners_up)
    assert any("not simulated for lack of time" in note for note in hasty.solver.notes)


def test_a_busy_machine_looks_at_the_same_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, costs = workload(CHAIN, batch=16, losses=LOSS), given(("vision", "llm"), 4)

    # No plan is passed over for its computes.
    monkeypatch.setattr(measured_trials, "AS_FAST", math.inf)

    def seen(patience_s: float) -> tuple[str, ...]:
        plan = run_solve(tmp_path, task, costs, solver="convex", patience_s=patience_s)
        return tuple(item.label for item in plan.solver.runners_up)

    some = 0.04
    quiet = seen(some)
    assert len(seen(0.0)) < len(quiet) < len(seen(1.0))
    # Every look at the clock finds half of the patience gone.
    clock = itertools.count(step=some / 2)
    monkeypatch.setattr(planner, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert seen(some) == quiet
