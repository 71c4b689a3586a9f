"""Somebody else's model, data and loss, outside the checkout, by commands alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.birds import copy_workload
from tests.commands import Done, Program, run


def do(program: Program, *args: object, cwd: Path) -> Done:
    done = run(program, *args, cwd=cwd, timeout_s=400)
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    return done


def plan_and_train(root: Path, *profiling: object) -> dict[str, Any]:
    """From a profile to three trained steps, from a folder that is not the workload's."""
    workload, here = copy_workload(root), root / "elsewhere"
    here.mkdir()
    do("mmplan", "profile", workload, *profiling, "-o", "profile.json", cwd=here)
    solve = ("solve", workload, "--profile", "profile.json", "--devices", 2)
    do("mmplan", *solve, "--solver", "distmm", "-o", "plan.json", cwd=here)
    do("mmplan", "check", "plan.json", cwd=here)
    verdict = do("mmlaunch", "verify", "plan.json", "--json", cwd=here)
    assert verdict.document["differences"] == []
    assert verdict.document["worst"] <= 1e-5
    assert verdict.document["share"] < 1
    do("mmlaunch", "run", "plan.json", "--steps", 3, cwd=here)
    folder = here / "runs" / "birds"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
    assert (folder / "final.safetensors").exists()
    return json.loads((here / "plan.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_counted_profile_to_training(tmp_path: Path) -> None:
    plan = plan_and_train(tmp_path, "--analytic", "--cluster", "cpu-2")
    # Every tower has a device of its own.
    ranks = [rank for unit in plan["units"] for rank in sum(map(tuple, unit["ranks"][0]), ())]
    assert sorted(ranks) == [0, 1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_measured_profile_to_training(tmp_path: Path) -> None:
    plan = plan_and_train(tmp_path, "--device", "cpu")
    assert plan["predicted"]["iteration_s"] > 0
    assert not any("analytic" in note for note in plan["solver"].get("notes", []))
