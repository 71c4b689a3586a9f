"""What the end of a simulated step waits for, against steps in which a module is faster."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from mmplan.costs.cost_model import CostModel
from mmplan.errors import InfeasibleError
from mmplan.planning.what_if import part_effects
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.simulation.critical_path import critical_modules, critical_path, seconds_on_path
from mmplan.simulation.step import Simulation
from mmplan.simulation.symmetry import simulated
from mmplan.solvers.problem import NotApplicableError
from tests.solving import module_profile, profile, run_solve, workload
from tests.test_neighbours import small_job


def step(plan: Plan, costs: Profile) -> Simulation:
    return simulated(plan, CostModel(costs, plan.cluster, plan.training))[0]


def test_a_module_that_waits_is_not_on_the_path(tmp_path: Path) -> None:
    # Two towers of 1 + 2 and 3 + 6 seconds a sample on a device each: a waits twice for b.
    costs = profile({"a": module_profile(1.0, 2.0), "b": module_profile(3.0, 6.0)}, 2)
    job = workload({"a": {}, "b": {}}, batch=2)
    plan = run_solve(tmp_path, job, costs, solver="distmm", top=1)
    found = step(plan, costs)
    assert {module for _, module in critical_modules(found)} == {"b"}
    assert seconds_on_path(found) == pytest.approx({"b": 18.0})


@pytest.mark.parametrize("solver", ["distmm", "convex", "colocated", "mpsp"])
def test_no_module_gains_more_than_it_has_on_the_path(tmp_path: Path, solver: str) -> None:
    """Each thing on the path ends when the next begins, or before, and halves gain half of it."""
    checked = 0
    for seed in range(14):
        job, costs = small_job(seed)
        try:
            plan = run_solve(tmp_path, job, costs, solver=solver, top=1)
        except (InfeasibleError, NotApplicableError):
            continue
        found = step(plan, costs)
        on_path = seconds_on_path(found)
        path = [(found.clocks.start[r][p], found.clocks.end[r][p]) for r, p in critical_path(found)]
        assert path[0][1] == found.iteration_s
        assert all(end <= start + 1e-9 for (start, _), (_, end) in pairwise(path))
        for effect in part_effects(plan, costs):
            if effect.is_module:
                most_s = on_path.get(effect.part, 0.0) / 2
                assert effect.gain * found.iteration_s <= most_s + 1e-9, (seed, effect)
                checked += 1
    assert checked > 5
