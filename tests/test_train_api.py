"""Training, verifying, watching and exporting as calls of ``mmlaunch``, in one process's script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import mmlaunch
import mmplan
from mmplan.errors import InvalidInputError
from tests.birds import copy_workload, two_rank_plan


def test_a_plan_is_verified_trained_watched_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "plans").mkdir()
    plan = two_rank_plan(copy_workload(tmp_path), folder / "plan.json")
    events: list[dict[str, Any]] = []
    assert mmlaunch.verify(plan, workers="threads", steps=1).faults == []
    done = mmlaunch.train(plan, steps=2, run_dir=tmp_path / "run", on_event=events.append)
    assert (done.steps, done.stopped) == (2, False)
    assert set(done.memory_bytes) == {0, 1}
    assert [event["step"] for event in events if event["kind"] == "step"] == [0, 1]
    state, run = mmlaunch.status(done.run_dir), mmplan.load_run(done.run_dir)
    assert (state.state, len(run.steps), run.faults) == ("done", 2, ())
    models = mmlaunch.export(done.run_dir, tmp_path / "trained")
    assert sum(model.tensors for model in models) == len(
        load_file(done.run_dir / "final.safetensors")
    )
    assert capsys.readouterr().out == ""


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"run\.json is missing"):
        mmlaunch.status(tmp_path)
    with pytest.raises(InvalidInputError, match="onnx: unknown"):
        mmlaunch.export(tmp_path, tmp_path / "trained", kind="onnx")
    with pytest.raises(InvalidInputError, match=r"plan\.json"):
        mmlaunch.train(tmp_path / "plan.json")
    with pytest.raises(AttributeError, match="no attribute 'walk'"):
        mmlaunch.walk  # noqa: B018
