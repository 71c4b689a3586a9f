"""solve --measure: real steps decide between the plans that are best by simulation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mmplan.errors import RunFailedError
from mmplan.planning.measured_trials import Trials
from mmplan.schema.base import save_document
from mmplan.schema.load import load_plan
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from tests.birds import copy_workload, given_profile
from tests.commands import run
from tests.solving import module_profile, profile, run_solve, workload

TOWERS = {"vision": {}, "text": {}}


def towers(devices: int) -> Profile:
    return profile({name: module_profile() for name in TOWERS}, devices)


class Clock:
    """Measures by a rule, and remembers what was asked."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = list(seconds)
        self.asked: list[Plan] = []

    def __call__(self, plan: Plan) -> float:
        self.asked.append(plan)
        found = self._seconds[len(self.asked) - 1]
        if math.isnan(found):
            raise RunFailedError("out of memory")
        return found


def solved(folder: Path, clock: Clock | None, count: int = 3) -> Plan:
    trials = None if clock is None else Trials(count=count, measure=clock)
    return run_solve(folder, workload(TOWERS, batch=8), towers(4), trials=trials)


def test_the_measurement_decides_and_the_plan_says_so(tmp_path: Path) -> None:
    clock = Clock(3.0, 1.0, 2.0)
    plan = solved(tmp_path, clock)
    assert plan.units == clock.asked[1].units
    assert plan.solver.measured_s == 1.0
    assert [r.measured_s for r in plan.solver.runners_up[:3]] == [2.0, 3.0, None]
    (note,) = [note for note in plan.solver.notes if "chosen by measurement" in note]
    assert clock.asked[0].solver.name in note


def test_the_best_by_simulation_are_run_and_none_twice(tmp_path: Path) -> None:
    simulated = solved(tmp_path, None)
    assert simulated.solver.measured_s is None
    clock = Clock(1.0, 1.0, 1.0, 1.0)
    plan = solved(tmp_path, clock, count=4)
    assert len(clock.asked) == 4
    assert clock.asked[0].units == plan.units == simulated.units
    seconds = [plan.predicted.iteration_s for plan in clock.asked]
    assert seconds == sorted(seconds)
    for index, one in enumerate(clock.asked):
        others = [(other.units, other.waves) for other in clock.asked[:index]]
        assert (one.units, one.waves) not in others
    assert not any("chosen by measurement" in note for note in plan.solver.notes)


def test_a_plan_that_fails_drops_out(tmp_path: Path) -> None:
    clock = Clock(math.nan, 2.0, 1.0)
    plan = solved(tmp_path, clock)
    assert plan.units == clock.asked[2].units
    assert any("failed: out of memory" in note for note in plan.solver.notes)
    with pytest.raises(RunFailedError, match="out of memory"):
        solved(tmp_path, Clock(math.nan, math.nan), count=2)


@pytest.mark.slow
def test_the_command_runs_real_steps_and_leaves_nothing_else(tmp_path: Path) -> None:
    workload_file, here = copy_workload(tmp_path), tmp_path / "elsewhere"
    here.mkdir()
    given_profile(here / "p.json")
    done = run(
        *("mmplan", "solve", workload_file, "--profile", "p.json", "--devices", "2"),
        *("--measure", "2", "-o", "plan.json"),
        cwd=here,
        timeout_s=200,
    )
    assert done.code == 0, done.err
    assert done.out.count("measured") >= 3
    plan = load_plan(here / "plan.json")
    assert plan.solver.measured_s
    assert sum(r.measured_s is not None for r in plan.solver.runners_up) == 1
    assert {path.name for path in here.iterdir()} == {"p.json", "plan.json", "plan.proof.json"}


def test_a_plan_with_trials_is_read_back(tmp_path: Path) -> None:
    plan = solved(tmp_path, Clock(3.0, 1.0, 2.0))
    save_document(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
