"""Runs with evaluation, loggers and an early stop, as a workload alone asks for them."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from mmplan.schema.base import document_text, file_sha256
from mmplan.schema.plan import FileReference
from mmplan.schema.workload import load_workload
from tests.birds import copy_workload, two_rank_plan
from tests.commands import Done, run
from tests.programs import loss, make_plan, trained_as, unit
from tests.test_resume import kill_all, start, wait_until

CALLBACK = '''
import json


class Log:
    """Writes every call as a line."""

    def __init__(self, path, fails_at=None):
        self.path, self.fails_at = path, fails_at

    def on_begin(self, run):
        self.write("begin", run.step, run.name)

    def on_step(self, step, values):
        if step == self.fails_at:
            raise ValueError("the logger's server is away")
        self.write("step", step, values["loss"])

    def on_evaluation(self, step, values):
        self.write("evaluation", step, values)

    def on_checkpoint(self, step, path):
        self.write("checkpoint", step, path.name)

    def on_end(self, step, reason):
        self.write("end", step, reason)

    def write(self, *line):
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\\n")


class Deaf:
    pass
'''
# The learning rate is too large for an evaluation ever to get better.
TRAIN = """train:
  seed: 3
  optimizer: SGD
  optimizer_args: {lr: 0.3}
  steps: 40
  eval:
    data: {factory: "birds.data:Recordings", args: {count: 40}}
    every: 2
    metrics:
      found: {factory: "mmplan.zoo.metrics:retrieval", inputs: [sound, words], cross_sample: true}
  early_stop: {metric: found, mode: max, patience: 3}
  callbacks:
    - tensorboard
    - {factory: "callback:Log", args: {path: "LOG"}}
"""


class Birds:
    """A folder with the workload, a callback, and a plan for two ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log.jsonl"
        self.workload = copy_workload(folder)
        text = self.workload.read_text()
        (self.workload.parent / "callback.py").write_text(CALLBACK)
        train = TRAIN.replace("LOG", str(self.log))
        self.workload.write_text(text[: text.index("\ntrain:") + 1] + train)
        (folder / "plans").mkdir()
        self.plan = two_rank_plan(self.workload, folder / "plans" / "plan.json")

    def arguments(self, name: str, *more: object) -> list[object]:
        where = ["--run-dir", self.folder / name, "--save-every", 2, "--timeout", 60]
        return ["run", self.plan, *where, *more]

    def run(self, name: str, *more: object) -> Done:
        return run("mmlaunch", *self.arguments(name, *more), cwd=self.folder)

    def lines(self, name: str, file: str) -> list[dict[str, Any]]:
        return [json.loads(x) for x in (self.folder / name / file).read_text().splitlines()]

    def heard(self) -> list[list[Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture(scope="module")
def birds(tmp_path_factory: pytest.TempPathFactory) -> Birds:
    return Birds(tmp_path_factory.mktemp("open"))


@pytest.fixture(scope="module")
def ended(birds: Birds) -> int:
    """Steps of an unbroken run, which ends early."""
    pytest.importorskip("tensorboard")
    done = birds.run("unbroken")
    assert done.code == 0, done.err
    assert "training ends early, after step" in done.out
    return len(birds.lines("unbroken", "metrics.jsonl"))


@pytest.mark.slow
def test_evaluations_and_early_stop_come_from_the_workload_alone(birds: Birds, ended: int) -> None:
    evaluations = birds.lines("unbroken", "evaluations.jsonl")
    assert [each["step"] for each in evaluations] == list(range(2, ended + 1, 2))
    assert all(each.keys() == {"step", "loss", "match", "species", "found"} for each in evaluations)
    found = [each["found"] for each in evaluations]
    best = found.index(max(found))
    assert len(found) - 1 - best == 3
    assert 0 < ended < 40
    assert (birds.folder / "unbroken" / "final.safetensors").exists()
    assert (birds.folder / "unbroken" / "checkpoints" / f"step-{ended}").is_dir()
    heard = birds.heard()
    assert heard[0] == ["begin", 0, "birds"]
    assert [line[1] for line in heard if line[0] == "step"] == list(range(1, ended + 1))
    told = [{"step": step, **values} for kind, step, values in heard if kind == "evaluation"]
    assert told == evaluations
    assert [line[1] for line in heard if line[0] == "checkpoint"] == list(range(2, ended + 1, 2))
    assert heard[-1][0] == "end"
    assert "found has not got better" in heard[-1][2]


@pytest.mark.slow
def test_tensorboard_reads_what_was_logged(birds: Birds, ended: int) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(birds.folder / "unbroken" / "tensorboard"))
    events.Reload()
    losses = [line["loss"] for line in birds.lines("unbroken", "metrics.jsonl")]
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx(losses)
    assert [e.step for e in events.Scalars("train/lr")] == list(range(1, ended + 1))
    found = [each["found"] for each in birds.lines("unbroken", "evaluations.jsonl")]
    assert [e.value for e in events.Scalars("eval/found")] == pytest.approx(found)
    assert len(events.Scalars("train/losses/species")) == ended


@pytest.mark.slow
def test_a_killed_run_stops_early_at_the_same_step(birds: Birds, ended: int) -> None:
    process = start("mmlaunch", *birds.arguments("killed"), cwd=birds.folder)
    path = birds.folder / "killed" / "evaluations.jsonl"
    try:
        wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= 2, process)
    finally:
        kill_all(process)
    done = birds.run("killed", "--resume")
    assert done.code == 0, done.err
    assert birds.lines("killed", "evaluations.jsonl") == birds.lines(
        "unbroken", "evaluations.jsonl"
    )
    assert len(birds.lines("killed", "metrics.jsonl")) == ended
    one, other = (birds.folder / name / "final.safetensors" for name in ("killed", "unbroken"))
    assert one.read_bytes() == other.read_bytes()
    again = birds.run("killed", "--resume")
    assert again.code == 0, again.err
    assert len(birds.lines("killed", "metrics.jsonl")) == ended


def test_a_profile_of_steps_that_are_not_trained_is_refused(birds: Birds) -> None:
    done = birds.run("nothing", "--steps", 2, "--profile", "3:6")
    assert done.code == 2, done.err
    assert "--profile 3:6: the run has 2 steps" in done.err
    assert not (birds.folder / "nothing").exists()


@pytest.mark.slow
def test_steps_are_profiled_on_every_rank(birds: Birds) -> None:
    done = birds.run("profiled", "--steps", 4, "--profile", "1:3")
    assert done.code == 0, done.err
    for rank in (0, 1):
        trace = json.loads(
            (birds.folder / "profiled" / "profile" / f"rank-{rank}.json").read_text()
        )
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert any("addmm" in name or "mm" in name for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("callback", "said"),
    [
        ('{factory: "callback:Deaf"}', "returned a Deaf without on_begin"),
        (
            '{factory: "callback:Log", args: {path: "/dev/null", fails_at: 2}}',
            "on_step raised ValueError: the logger's server is away",
        ),
    ],
)
def test_a_callback_that_fails_is_one_line(birds: Birds, callback: str, said: str) -> None:
    done = birds.run("fails", "--steps", 3, "--set", f"train.callbacks=[{callback}]")
    assert done.code in (1, 2)
    assert said in done.message
    assert "Traceback" not in done.err


WIDE = """
import torch
from torch import nn

WIDTH = 5792


def wide(blocks):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks)))


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"x": torch.full((WIDTH,), float(index)), "target": torch.zeros(WIDTH)}
"""
# A process needs 0.7 GB of its own, and 1.1 for a quarter's weights and gradients. All weights
# are 1.1 GB, with their gradients 2.1.
LIMIT = int(2.5e9)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_that_one_rank_cannot_hold_is_evaluated(tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    data = '{factory: "wide:Noise"}'
    (tmp_path / "workload.yaml").write_text(
        f"""version: 1
name: wide
batch: 4
modules:
  m: {{factory: "wide:wide", args: {{blocks: 8}}, inputs: [x]}}
losses:
  error: {{factory: "mmplan.zoo.losses:mse", inputs: [m, target]}}
data: {data}
train:
  optimizer: SGD
  optimizer_args: {{lr: 1.0e-4}}
  steps: 2
  eval: {{data: {data}, every: 1}}
"""
    )

    def run_on(ranks: int) -> Done:
        plan = make_plan(
            unit("m", "x", pp=ranks, k=2, blocks=8),
            losses=[loss("error", "m", "target")],
            batch=4,
            name="wide",
        )
        workload = tmp_path / "workload.yaml"
        named = {
            "workload": FileReference(path=workload.name, sha256=file_sha256(workload)),
            "profile": FileReference(path="profile.json", sha256="0" * 64),
        }
        plan = trained_as(plan, load_workload(workload), folder=None)
        path = tmp_path / f"plan-{ranks}.json"
        path.write_text(document_text(plan.model_copy(update=named)))
        arguments = ["run", path, "--run-dir", tmp_path / f"run-{ranks}", "--timeout", 100]
        return run("mmlaunch", *arguments, cwd=tmp_path)

    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, before[1]))
    try:
        whole, parts = run_on(1), run_on(4)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert whole.code != 0
    assert "memory" in whole.message
    assert parts.code == 0, parts.err
    lines = (tmp_path / "run-4" / "evaluations.jsonl").read_text().splitlines()
    values = [json.loads(line)["loss"] for line in lines]
    assert len(values) == 2
    assert values[1] < values[0]
