"""Wrong task sets: one clear line, the right exit code, and nothing left behind."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmplan.schema.workload import Workload, load_workload
from tests.commands import Done, call, run
from tests.task_sets import job, write_files

Change = Callable[[dict[str, Any]], object]


class Files:
    """A workload with a schedule of task sets, its profile and a plan for one device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workload, self.profile = write_files(folder, job())
        assert self.solve("plan.json").code == 0

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def change(self, change: Change) -> None:
        data = json.loads(self.workload.read_text())
        change(data)
        self.workload.write_text(json.dumps(data))

    def solve(self, name: str = "new.json", *more: object) -> Done:
        how = ["--profile", self.profile, "--devices", 1, "--budget", 0.01]
        return call("mmplan", "solve", self.workload, *how, "-o", self.folder / name, *more)

    def start(self, *more: object, plan: str = "plan.json") -> Done:
        return call("mmlaunch", "run", self.folder / plan, "--run-dir", self.run_dir, *more)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def refused(done: Done, *parts: str, code: int = 2) -> None:
    assert done.code == code, done.err
    for part in parts:
        assert part in done.message, done.message
    assert done.hint
    assert "pydantic" not in done.err
    assert "Value error" not in done.err


PLACE = "train.tasks_from_step"


@pytest.mark.parametrize(
    ("sets", "parts"),
    [
        ({"0": ["VT", "XY"]}, (f"{PLACE}.0", "'XY'", "VT, UT, TR, WR")),
        ({"0": ["VT"], "4": []}, (f"{PLACE}.4", "at least 1")),
        ({"4": ["VT"]}, ("train: tasks_from_step", "step 0")),
        ({"0": ["VT"], "8": ["UT"], "4": ["TR"]}, ("train: tasks_from_step", "4", "8", "sort")),
        ({"0": ["VT"], "-4": ["UT"]}, (f"{PLACE}.-4", "at least 0")),
        ({"0": ["VT"], "16": ["UT"]}, ("step 16 never comes", "train.steps is 16")),
        ({"0": ["VT"], "soon": ["UT"]}, (f"{PLACE}.soon", "whole number")),
        ({"0": ["VT"], "4": "UT"}, (f"{PLACE}.4", "must be a list", "'UT'")),
        ({"0": ["VT"], "00": ["UT"]}, (PLACE, "step 0 stands twice")),
        ({"0": ["VT", "UT", "VT"]}, ("tasks_from_step.0 names VT twice",)),
        ([["VT"]], (PLACE, "must be a mapping")),
        ({"0": [3]}, (f"{PLACE}.0.0", "must be a text")),
    ],
)
def test_schedules(files: Files, sets: object, parts: tuple[str, ...]) -> None:
    files.change(lambda w: w["train"].update(tasks_from_step=sets))
    refused(files.solve(), files.workload.name, *parts)
    assert not (files.folder / "new.json").exists()


def test_steps_are_numbers_in_yaml_and_texts_in_json(tmp_path: Path) -> None:
    as_json, _ = write_files(tmp_path, job(tasks_from_step={}))
    text = as_json.read_text()
    assert '"tasks_from_step": {}' in text

    def read(name: str, sets: str) -> Workload:
        path = tmp_path / name
        path.write_text(text.replace('"tasks_from_step": {}', f'"tasks_from_step": {sets}'))
        return load_workload(path)

    numbered = read("w.json", '{"0": ["UT", "VT"], "5": ["TR"]}')
    assert numbered.train.tasks_from_step == {0: ("UT", "VT"), 5: ("TR",)}
    assert [item.tasks for item in numbered.task_sets] == [("VT", "UT"), ("TR",)]
    # A text that begins with a brace is JSON; YAML begins with anything else.
    yaml = tmp_path / "w.yaml"
    yaml.write_text(
        "# YAML\n" + text.replace('"tasks_from_step": {}', "tasks_from_step: {0: [VT]}")
    )
    assert load_workload(yaml).train.tasks_from_step == {0: ("VT",)}
    everything = read("all.json", "{}").task_sets
    assert [(s.from_step, s.tasks) for s in everything] == [(0, ("VT", "UT", "TR", "WR"))]


def test_show_says_who_trains_when(files: Files) -> None:
    shown = call("mmplan", "show", files.workload).out
    assert "tasks over time" in shown
    assert any(line.split() == ["12", "VT,", "WR"] for line in shown.splitlines())
    files.change(lambda w: w["train"].pop("tasks_from_step"))
    assert "tasks over time" not in call("mmplan", "show", files.workload).out


@pytest.mark.parametrize(
    ("change", "args", "parts"),
    [
        (lambda w: None, ("--tasks", "VT,XY"), ("--tasks XY", "VT, UT, TR, WR")),
        (lambda w: w["tasks"]["TR"].update(losses=[]), (), ("tasks.TR.losses", "at least 1")),
        (lambda w: w["tasks"]["TR"].pop("losses"), (), ("tasks.TR.losses", "missing")),
        (
            lambda w: w["modules"]["u"].update(share="v"),
            ("--tasks", "UT"),
            ("modules.u.share", "other args", "parameters differ"),
        ),
        (
            lambda w: w["tasks"]["UT"].update(modules=["u"]),
            ("--tasks", "UT"),
            ("task UT", "ut takes the output of t"),
        ),
    ],
)
def test_solve_for_tasks(
    files: Files, change: Change, args: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    files.change(change)
    refused(files.solve("new.json", *args), *parts)
    assert not (files.folder / "new.json").exists()


def test_a_plan_for_tasks_that_never_train_together(files: Files) -> None:
    assert files.solve("other.json", "--tasks", "VT").code == 0
    done = files.start(plan="other.json")
    refused(done, "the plan is for VT", "VT, UT; UT, TR; VT, WR")
    assert "--tasks VT" in done.hint
    assert not files.run_dir.exists()


def test_a_folder_that_a_run_uses_now_is_left_alone(files: Files) -> None:
    """A second start would write other plans over those that the first one goes on with."""
    (files.run_dir / "launch-node0").mkdir(parents=True)
    (files.run_dir / "run.json").write_text("{}")
    with (files.run_dir / "launch-node0" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(files.start("--resume"), "in use by another launch")
    assert (files.run_dir / "run.json").read_text() == "{}"
    assert not (files.run_dir / "plans").exists()


def test_run_for_an_unknown_task(files: Files) -> None:
    refused(files.start("--tasks", "VT,XY"), "--tasks XY", "VT, UT, TR, WR")
    assert not files.run_dir.exists()


@pytest.mark.parametrize("args", [(), ("--tasks", "WR")])
def test_planning_needs_the_profile(files: Files, args: tuple[str, ...]) -> None:
    files.profile.write_text(files.profile.read_text() + " ")
    done = files.start(*args)
    refused(done, "planning for the tasks", "profile.json", "has changed")
    assert "mmplan solve" in done.hint
    files.profile.unlink()
    refused(files.start(*args), "planning for the tasks", "profile.json is not there")
    assert not (files.run_dir / "run.json").exists()


def test_a_later_set_that_fits_no_device_ends_the_run_before_it_starts(files: Files) -> None:
    profile = json.loads(files.profile.read_text())
    profile["modules"]["w"]["parameters"] = 1e15
    files.profile.write_text(json.dumps(profile))
    assert files.solve().code == 0
    done = files.start(plan="new.json")
    refused(done, "planning for the tasks VT, WR", "a device lacks", code=3)
    assert not (files.run_dir / "run.json").exists()


def test_a_module_that_two_tasks_use_with_other_shapes(files: Files) -> None:
    """Widths are the factories' affair: the line names task, module and both sizes."""
    (files.folder / "wide.py").write_text(
        "import torch\n"
        "from tests.matrix_models import Samples\n"
        "class Wide(Samples):\n"
        "    def __getitem__(self, index):\n"
        "        return {**super().__getitem__(index), 'wide': torch.zeros(5)}\n"
    )

    def wide(w: dict[str, Any]) -> None:
        w["train"].update(tasks_from_step={})
        w["tasks"]["TR"].update(inputs={"t": ["wide"]})
        w["data"] = {"factory": "wide:Wide", "args": {"length": 40}}

    files.change(wide)
    assert files.solve("new.json", "--tasks", "VT,TR").code == 0
    done = call("mmlaunch", "verify", "--in-process", files.folder / "new.json")
    refused(done, "task TR: modules.t: block 0", "2x5 and 8x8", "wide [2, 5] float64")


@pytest.mark.slow
def test_a_checkpoint_that_lacks_a_module(tmp_path: Path) -> None:
    def without_w(w: dict[str, Any]) -> None:
        del w["modules"]["w"], w["losses"]["wr"], w["tasks"]["WR"]
        w["train"].update(tasks_from_step={"0": ["TR"]}, steps=1)

    files = Files(tmp_path)
    whole = files.workload.read_text()
    files.change(without_w)
    assert files.solve("one.json").code == 0
    where = ["--run-dir", files.run_dir, "--save-every", 1]
    assert run("mmlaunch", "run", tmp_path / "one.json", *where, cwd=tmp_path).code == 0
    files.workload.write_text(whole)
    # Missing is missing, whether the module's task is active or not.
    for tasks in ("WR", "TR"):
        assert files.solve("new.json", "--tasks", tasks).code == 0
        more = ["--resume", "--tasks", tasks]
        done = run("mmlaunch", "run", tmp_path / "new.json", *where, *more, cwd=tmp_path)
        refused(done, "step-1", "module w")
        assert "init:" in done.hint
