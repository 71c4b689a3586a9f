"""Real runs that are killed, stopped or lose a worker: nothing is lost, nothing differs."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.birds import copy_workload, edited, two_rank_plan
from tests.commands import Done, call, kill_all, run, start

STEPS = 24


class Bird:
    """One plan, and the losses and weights of its unbroken run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        workload = edited(copy_workload(folder), "steps: 8", f"steps: {STEPS}")
        self.workload = workload
        (folder / "plans").mkdir()
        self.plan = two_rank_plan(workload, folder / "plans" / "plan.json")
        began = time.monotonic()
        done = self.run("unbroken")
        self.seconds = time.monotonic() - began
        assert done.code == 0, done.err
        self.losses, self.weights = self.results("unbroken")

    def arguments(self, name: str) -> list[object]:
        where = ["--run-dir", self.folder / name, "--save-every", 2, "--timeout", 60]
        # The unbroken run waits for its saves; they must be worth the same.
        return ["run", self.plan, *where, *([] if name == "unbroken" else ["--async-save"])]

    def run(self, name: str, *more: object) -> Done:
        return run("mmlaunch", *self.arguments(name), *more, cwd=self.folder)

    def start(self, name: str) -> subprocess.Popen[str]:
        return start("mmlaunch", *self.arguments(name), cwd=self.folder)

    def steps_done(self, name: str) -> int:
        path = self.folder / name / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def results(self, name: str) -> tuple[list[float], bytes]:
        """Losses by step, each step once, and the bytes of the trained weights."""
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert [row["step"] for row in rows] == list(range(STEPS))
        return [row["loss"] for row in rows], (
            self.folder / name / "final.safetensors"
        ).read_bytes()

    def assert_resumes(self, name: str) -> None:
        done = self.run(name, "--resume")
        assert done.code == 0, done.err
        assert self.results(name) == (self.losses, self.weights)


@pytest.fixture(scope="module")
def bird(tmp_path_factory: pytest.TempPathFactory) -> Bird:
    return Bird(tmp_path_factory.mktemp("resume"))


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def kill_after(bird: Bird, name: str, *, steps: int, more_s: float) -> None:
    process = bird.start(name)
    try:
        wait_until(lambda: bird.steps_done(name) >= steps, process)
        time.sleep(more_s)
    finally:
        kill_all(process)


def test_training_lowers_the_loss(bird: Bird) -> None:
    assert sum(bird.losses[-4:]) < 0.8 * sum(bird.losses[:4])


def test_the_run_folder_holds_what_the_contract_says(bird: Bird) -> None:
    folder = bird.folder / "unbroken"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all({"step", "loss", "iteration_s", "samples_per_s"} <= row.keys() for row in rows)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step-22", "step-24"}
    trace = json.loads((folder / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} >= {1}
    assert json.loads((folder / "run.json").read_text())["devices"] == 2
    assert (folder / "plan.json").read_bytes() == bird.plan.read_bytes()
    assert not list(folder.glob("launch-node*"))


@pytest.mark.slow
def test_killed_run_resumes_bit_for_bit(bird: Bird) -> None:
    kill_after(bird, "killed", steps=3, more_s=0.0)
    assert not (bird.folder / "killed" / "final.safetensors").exists()
    bird.assert_resumes("killed")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_at_any_moment(bird: Bird) -> None:
    moments = random.Random(0)
    for attempt in range(8):
        name = f"killed-{attempt}"
        kill_after(
            bird, name, steps=moments.randrange(1, STEPS - 4), more_s=moments.uniform(0, 0.2)
        )
        # A second kill, in the resumed run, must not make it worse.
        process = start("mmlaunch", *bird.arguments(name), "--resume", cwd=bird.folder)
        time.sleep(moments.uniform(0.0, bird.seconds))
        kill_all(process)
        bird.assert_resumes(name)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_saves_and_exits_75(bird: Bird, signum: signal.Signals) -> None:
    name = f"stopped-{signum.name}"
    process = bird.start(name)
    try:
        wait_until(lambda: bird.steps_done(name) >= 3, process)
        process.send_signal(signum)
        _, err = process.communicate(timeout=60)
    finally:
        kill_all(process) if process.poll() is None else None
    assert process.returncode == 75, err
    assert "Traceback" not in err
    assert "--resume" in err
    done = bird.steps_done(name)
    assert (bird.folder / name / "checkpoints" / f"step-{done}").is_dir()
    bird.assert_resumes(name)


@pytest.mark.slow
def test_a_worker_killed_once_is_started_again(tmp_path: Path, bird: Bird) -> None:
    workload = edited(copy_workload(tmp_path), "steps: 8", f"steps: {STEPS}")
    # Whichever rank is first to load its 60th sample dies, once.
    data = workload.parent / "birds" / "data.py"
    text = data.read_text().replace(
        "    def __getitem__(self, index: int) -> dict[str, Tensor]:\n",
        "    def __getitem__(self, index: int) -> dict[str, Tensor]:\n"
        "        self._loaded = getattr(self, '_loaded', 0) + 1\n"
        "        if self._loaded == 60:\n"
        "            import os, signal\n"
        "            try:\n"
        f"                os.close(os.open({str(tmp_path / 'died')!r}, os.O_CREAT | os.O_EXCL))\n"
        "                os.kill(os.getpid(), signal.SIGKILL)\n"
        "            except FileExistsError:\n"
        "                pass\n",
    )
    data.write_text(text)
    (tmp_path / "plans").mkdir()
    plan = two_rank_plan(workload, tmp_path / "plans" / "plan.json")
    where = ["--run-dir", tmp_path / "run", "--save-every", 2, "--timeout", 60]
    done = run("mmlaunch", "run", plan, *where, "--max-restarts", 1, cwd=tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "died").exists()
    assert "starting all workers again: rank" in done.out
    assert "attempt 2, from step" in done.out
    assert "was killed by SIGKILL" in done.out
    rows = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == bird.losses
    (restart,) = json.loads((tmp_path / "run" / "run.json").read_text())["restarts"]
    assert "was killed by SIGKILL" in restart["cause"]
    assert (tmp_path / "run/final.safetensors").read_bytes() == bird.weights


@pytest.mark.slow
def test_a_restart_passes_over_a_damaged_checkpoint(tmp_path: Path, bird: Bird) -> None:
    """A rank damages the newest checkpoint and raises, once."""
    workload = edited(copy_workload(tmp_path), "steps: 8", f"steps: {STEPS}")
    data = workload.parent / "birds" / "data.py"
    text = data.read_text().replace(
        "    def __getitem__(self, index: int) -> dict[str, Tensor]:\n",
        "    def __getitem__(self, index: int) -> dict[str, Tensor]:\n"
        "        import pathlib\n"
        f"        folder = pathlib.Path({str(tmp_path / 'run' / 'checkpoints')!r})\n"
        "        weights = folder / 'step-6' / 'rank-0.safetensors'\n"
        "        if weights.exists():\n"
        f"            if not pathlib.Path({str(tmp_path / 'died')!r}).exists():\n"
        f"                pathlib.Path({str(tmp_path / 'died')!r}).touch()\n"
        "                weights.write_bytes(weights.read_bytes()[:-1] + b'?')\n"
        "                raise ValueError('a bad sample')\n",
    )
    data.write_text(text)
    (tmp_path / "plans").mkdir()
    plan = two_rank_plan(workload, tmp_path / "plans" / "plan.json")
    where = ["--run-dir", tmp_path / "run", "--save-every", 2, "--timeout", 60]
    done = run("mmlaunch", "run", plan, *where, "--max-restarts", 1, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "rank-0.safetensors is damaged" in done.out
    assert "trying the one before" in done.out
    (restart,) = json.loads((tmp_path / "run" / "run.json").read_text())["restarts"]
    assert restart["from_step"] == 4
    assert "a bad sample" in restart["cause"]
    assert (tmp_path / "run/final.safetensors").read_bytes() == bird.weights


def test_a_corrupt_checkpoint_is_refused_and_left_as_it_is(bird: Bird) -> None:
    folder = shutil.copytree(bird.folder / "unbroken", bird.folder / "corrupt")
    weights = folder / "checkpoints" / "step-24" / "rank-0.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    done = bird.run("corrupt", "--resume")
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    assert str(weights) in done.message
    assert done.hint
    assert weights.read_bytes() == bytes(content)


def test_a_used_folder_is_not_overwritten(bird: Bird) -> None:
    before = (bird.folder / "unbroken" / "metrics.jsonl").read_bytes()
    done = call("mmlaunch", *bird.arguments("unbroken"))
    assert done.code == 2
    assert "already holds a run" in done.message
    assert "--resume" in done.hint
    assert (bird.folder / "unbroken" / "metrics.jsonl").read_bytes() == before
