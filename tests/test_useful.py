"""More devices than any plan can use: what is searched, what is said, how long it is silent."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mmplan.costs.program_costs import CostModel
from mmplan.errors import InvalidInputError
from mmplan.planning import planner
from mmplan.planning.planner import ALWAYS_SEARCHED, MOST_DEVICES, useful_devices
from mmplan.reporting.terminal.console import Output
from mmplan.schema.plan import PlannedTraining
from mmplan.schema.workload import check_tasks
from tests.solving import module_profile, profile, run_solve, workload


def useful(batch: int, devices: int, per_node: int) -> int:
    job = workload({"a": {}, "b": {}}, batch=batch)
    towers = {"a": module_profile(blocks=4, tp={1: 1.0, 2: 1.5}), "b": module_profile(blocks=2)}
    costs = profile(towers, devices, per_node=per_node)
    model = CostModel(costs, costs.cluster, PlannedTraining())
    return useful_devices(check_tasks(job, ["default"]).values(), model, costs.cluster, devices)


def test_devices_that_some_plan_could_use_by_hand() -> None:
    # 4 blocks x 1024 samples x tp 2, and 2 x 1024 x 1.
    assert useful(1024, 100_000, 100_000) == 8192 + 2048
    assert useful(1024, 9_000, 9_000) == 9_000
    # On nodes, groups may leave places empty: twice as many, in whole nodes of 24.
    assert useful(1024, 240_000, 24) == 20_496
    assert useful(1, 100_000, 100_000) == ALWAYS_SEARCHED


@pytest.mark.slow
def test_a_plan_for_more_devices_is_the_same_plan_with_more_idle(tmp_path: Path) -> None:
    job = workload({"a": {}, "b": {}}, batch=8)
    towers = {"a": module_profile(2, 4), "b": module_profile(1, 3)}
    few, many = (run_solve(tmp_path, job, profile(towers, n)) for n in (ALWAYS_SEARCHED, 30_000))
    assert (many.units, many.predicted.iteration_s) == (few.units, few.predicted.iteration_s)
    assert (many.devices, len(many.predicted.memory_bytes)) == (30_000, 30_000)
    assert many.solver.idle_ranks[-1] == 29_999
    assert any("of 30,000 devices stay idle" in note for note in many.solver.notes)
    assert many.predicted.mfu == pytest.approx(few.predicted.mfu * ALWAYS_SEARCHED / 30_000)


def test_more_devices_than_a_file_can_list_are_refused(tmp_path: Path) -> None:
    costs = profile({"a": module_profile()}, MOST_DEVICES + 1)
    with pytest.raises(InvalidInputError, match=r"--devices 1000001: .* at most 1,000,000 devices"):
        run_solve(tmp_path, workload({"a": {}}, batch=8), costs)


def test_searches_and_simulations_are_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[int, int, str]] = []
    solve = planner.solve
    monkeypatch.setattr(
        "tests.solving.solve",
        lambda *a, **k: solve(*a, **k, progress=lambda *said: heard.append(said)),
    )
    run_solve(tmp_path, workload({"a": {}}, batch=8), profile({"a": module_profile()}, 4))
    assert all(0 <= done <= total for done, total, _ in heard)
    done, total, note = heard[-1]
    assert (done, note) == (total, "simulated")
    assert heard[0][2] == "searched, now distmm"
    assert any(note.startswith("simulated") for *_, note in heard)


def test_a_log_has_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal, beside one for each tenth."""
    with Output().progress("training") as bar:
        bar.update(1, 100)
        bar.update(2, 100)
        monkeypatch.setattr("mmplan.reporting.terminal.console._LINE_S", -1.0)
        bar.update(3, 100)
    assert capsys.readouterr().err == "training: 1/100\ntraining: 3/100\n"


def test_what_ends_soon_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with Output().progress("planning", after_s=60) as bar:
        bar.update(1, 3, "searched")
    with Output().progress("planning", after_s=0.01) as bar:
        bar.update(1, 3, "searched")
        time.sleep(0.2)
        bar.update(1, 3, "searched")
        bar.update(2, 3, "searched")
    assert capsys.readouterr().err == "planning: 1/3 searched\nplanning: 2/3 searched\n"
