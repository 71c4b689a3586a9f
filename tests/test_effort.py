"""Searches end by what they did: however late the clock is, the plan is the same."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from mmplan.errors import MMPlanError
from mmplan.schema.workload import Workload
from mmplan.solvers.registry import BASELINES, SOLVERS
from mmplan.solvers.search_budget import SearchBudget
from tests.solving import module_profile, profile, run_solve, workload


def test_what_a_part_spends_is_gone_from_the_whole() -> None:
    own = SearchBudget(1.0)
    own.spend(0.5)
    part = own.part(0.25)
    part.spend(0.125)
    assert (part.left_s, own.left_s) == (0.125, 0.375)
    part.spend(0.25)
    assert part.is_over
    assert not own.is_over
    assert own.part(9.0).left_s == own.left_s == 0.125
    own.spend(0.125)
    assert own.is_over
    assert own.part(1.0).is_over


TOWERS = {"a": module_profile(6), "b": module_profile(4, 1), "c": module_profile(3, 2)}
JOBS: dict[str, Workload] = {
    "chain": workload({"a": {}, "b": {"inputs": ["a"]}, "c": {"inputs": ["b"]}}, batch=16),
    "towers": workload({"a": {}, "b": {}, "c": {}}, batch=16),
}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(
    ("solver", "method"), [*((name, None) for name in (*SOLVERS, *BASELINES)), ("convex", "cvxpy")]
)
def test_no_solver_looks_at_the_clock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, solver: str, method: str | None, job: str
) -> None:
    """Every look at the clock finds it an hour later. The budget is too small for most searches."""
    costs = profile(TOWERS, 6)

    def found() -> str:
        try:
            plan = run_solve(
                tmp_path, JOBS[job], costs, solver=solver, method=method, budget_s=0.02
            )
        except MMPlanError as error:
            return str(error)
        report = plan.solver.model_copy(update={"seconds": 0.0})
        return plan.model_copy(update={"solver": report}).model_dump_json()

    quiet, ticks = found(), itertools.count(step=3600.0)
    for clock in ("monotonic", "perf_counter", "time", "process_time"):
        monkeypatch.setattr(time, clock, lambda: next(ticks))
    assert found() == quiet
