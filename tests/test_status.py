"""``mmlaunch status``: a run's state from its folder, while it goes on and after any end."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mmlaunch.launch.note import read_launches
from mmlaunch.process.heartbeat import Board
from mmlaunch.process.process_tree import ProcessId
from tests.birds import copy_workload, edited, two_rank_plan
from tests.commands import call, kill_all, start
from tests.test_report import make_run

ME = ProcessId.of(os.getpid())
NO_WORD = {"at": None, "cause": None, "from_step": None}
GONE = ProcessId(pid=ME.pid, start_ticks=ME.start_ticks + 1)


def write_launch(
    run: Path, *, launcher: ProcessId, host: str | None = None, node: int = 0, ranks: int = 1
) -> Board:
    """What a launcher and its workers write while they live; the workers are not there yet."""
    folder = run / f"launch-node{node}"
    folder.mkdir()
    note = {
        "host": host or socket.gethostname(),
        "launcher": asdict(launcher),
        "base_rank": node * ranks,
        "num_local": ranks,
    }
    (folder / "launcher.json").write_text(json.dumps(note))
    return Board(folder / "board", num_slots=ranks, create=True)


def edit_record(run: Path, **fields: object) -> None:
    path = run / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def status_of(run: Path) -> dict[str, Any]:
    done = call("mmlaunch", "status", run, "--json")
    assert done.code == 0, done.err
    return done.document


def shown(run: Path) -> list[str]:
    """Lines of the tables, each with one space between its words."""
    return [" ".join(line.split()) for line in call("mmlaunch", "status", run).out.splitlines()]


def test_each_rank_says_what_it_does_and_for_whom_it_waits(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=10)
    edit_record(run, steps=50)
    board = write_launch(run, launcher=ME, ranks=4)
    for rank in range(3):
        board.heartbeat(rank).register()
    board.heartbeat(0).beat(10, 3, "0F1", "vision")
    waits = board.heartbeat(1)
    waits.beat(10, 4, "1RECV_F1:e0<0", "text")
    waits.waiting((0, 2)).__enter__()
    board.heartbeat(2).done()
    status = status_of(run)
    assert status["state"] == "running"
    assert (status["step"], status["steps"]) == (10, 50)
    ranks = status["ranks"]
    assert [rank["state"] for rank in ranks] == ["running", "waiting", "done", "starting"]
    assert [rank["waits_for"] for rank in ranks] == [[], [0, 2], [], []]
    assert [rank["place"] for rank in ranks[:2]] == ["0F1 vision", "1RECV_F1:e0<0 text"]
    assert [rank["step"] for rank in ranks] == [10, 10, None, None]
    assert ranks[3]["silent_s"] is None
    assert 0 <= ranks[0]["silent_s"] < 60
    assert any("waiting for 0, 2 10 1RECV_F1:e0<0 text" in line for line in shown(run))


def test_what_a_killed_launcher_has_left_is_its_last_state(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=10)
    board = write_launch(run, launcher=GONE)
    board.heartbeat(0).register()
    board.heartbeat(0).beat(7, 3, "0F1", "vision")
    status = status_of(run)
    assert status["state"] == "killed"
    (rank,) = status["ranks"]
    assert (rank["state"], rank["step"], rank["silent_s"]) == ("dead", 7, None)
    assert "state killed, its launcher has ended without a word" in shown(run)


def test_ranks_of_another_machine_are_asked_for_there(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=10)
    write_launch(run, launcher=ME, host="host-b", node=1)
    status = status_of(run)
    assert (status["state"], status["hosts"], status["ranks"]) == ("elsewhere", ["host-b"], [])
    assert "state elsewhere; ask on host-b for the ranks there" in shown(run)
    write_launch(run, launcher=ME)
    assert status_of(run)["state"] == "running"


def test_goodput_is_the_steps_that_count_at_their_plans_median(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=0)
    edit_record(
        run,
        steps=40,
        started_at="2026-01-01T00:00:00+0000",
        started_step=10,
        ended={"at": "2026-01-01T00:01:40+0000", "how": "failed", "cause": "rank 1 was killed"},
        restarts=[{"at": "2026-01-01T00:00:30+0000", "cause": "rank 0", "from_step": 12}],
        slow_ranks=[{"step": 9, "rank": 3, "instruction": "F", "times": 1.5}],
        segments=[
            {"from_step": 0, "tasks": ["a"], "devices": 2, "predicted_iteration_s": 1.0},
            {"from_step": 20, "tasks": ["b"], "devices": 1, "predicted_iteration_s": 3.5},
        ],
    )
    rows = [
        {
            "step": step,
            "iteration_s": 9.0 if step == 12 else 1.5 if step < 20 else 6.5,
            "update_s": 0.25,
            "data_s": 0.25,
            "samples_per_s": 4.0,
            "data_s_by_rank": {"3": 0.35, "1": 0.25},
        }
        for step in range(28)
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    status = status_of(run)
    assert (status["state"], status["wall_s"]) == ("failed", 100.0)
    # Ten of two seconds and eight of seven.
    assert status["goodput"] == pytest.approx(0.76)
    assert (status["iteration_s"], status["predicted_iteration_s"]) == (6.5, 3.5)
    assert (status["data_wait"], status["data_wait_rank"]) == (pytest.approx(0.05), 3)
    lines = shown(run)
    assert "state failed: rank 1 was killed" in lines
    assert "iteration 6.5 s (predicted 3.5 s: 1.86 ×)" in lines
    assert "2026-01-01T00:00:30+0000 rank 0; went on from step 12" in lines
    assert sum(line.startswith("slow rank") and "rank 3" in line for line in lines) == 1


def test_the_last_good_checkpoint_has_a_manifest(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=10)
    assert status_of(run)["checkpoint_step"] is None
    for name in ("step-4", "step-8", ".step-9.tmp"):
        (run / "checkpoints" / name).mkdir(parents=True)
    manifest = run / "checkpoints" / "step-4" / "manifest.json"
    manifest.touch()
    os.utime(manifest, (0, time.time() - 600))
    status = status_of(run)
    assert status["checkpoint_step"] == 4
    assert status["checkpoint_s"] == pytest.approx(600, abs=30)
    assert "last checkpoint step 4, 10 min old" in shown(run)
    newer = run / "checkpoints" / "step-8" / "manifest.json"
    newer.touch()
    for marked, step in ((4, 4), (8, 8), (6, 8), ("4", 8)):
        edit_record(run, last_good=marked)
        assert status_of(run)["checkpoint_step"] == step


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=3)
    for folder, why in ((tmp_path / "none", "is missing"), (tmp_path, "is missing")):
        done = call("mmlaunch", "status", folder)
        assert (done.code, done.message) == (2, f"{folder}: no run's folder: run.json {why}")
    (run / "run.json").write_text('{"steps": ')
    done = call("mmlaunch", "status", run, "--json")
    assert done.code == 2
    assert "run.json cannot be read" in done.document["error"]["message"]


def test_odd_files_are_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=3)
    write_launch(run, launcher=ME, ranks=2)
    (run / "launch-node0" / "board").write_bytes(bytes(7))
    write_launch(run, launcher=ME, node=1)
    (run / "launch-node1" / "launcher.json").write_text("[]")
    edit_record(run, steps="x", started_step={}, started_at=3, restarts=["x", {"cause": "y"}])
    text = (run / "run.json").read_text().removesuffix("}")
    (run / "run.json").write_text(
        f'{text}, "ended": {{"at": 1e400, "how": 1e400, "cause": 1e400}}}}'
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    status = status_of(run)
    assert (status["state"], status["ranks"], status["step"]) == ("unknown", [], 3)
    assert (status["steps"], status["goodput"]) == (None, None)
    assert status["restarts"] == [NO_WORD, NO_WORD | {"cause": "y"}]


@pytest.mark.slow
def test_a_checkpoint_that_a_restart_has_passed_over_is_not_the_last_good_one(
    tmp_path: Path,
) -> None:
    """A rank damages the newest one and raises, in the first start and in the second."""
    workload = copy_workload(tmp_path)
    run, data = tmp_path / "run", workload.parent / "birds" / "data.py"
    weights = run / "checkpoints" / "step-6" / "rank-0.safetensors"
    edited(
        data,
        "    def __getitem__(self, index: int) -> dict[str, Tensor]:\n",
        "    def __getitem__(self, index: int) -> dict[str, Tensor]:\n"
        "        import pathlib\n"
        f"        weights = pathlib.Path({str(weights)!r})\n"
        "        if weights.exists():\n"
        "            weights.write_bytes(b'?')\n"
        "            raise ValueError('a bad sample')\n",
    )
    (tmp_path / "plans").mkdir()
    plan = two_rank_plan(workload, tmp_path / "plans" / "plan.json")
    arguments = ["run", plan, "--run-dir", run, "--save-every", 2, "--max-restarts", 1]
    process = start("mmlaunch", *arguments, "--num-workers", 0, cwd=tmp_path)
    try:
        assert process.wait(timeout=90) == 2  # the second start tries the data out
    finally:
        kill_all(process)
    status = status_of(run)
    assert "a bad sample" in status["cause"]
    assert len(status["restarts"]) == 1
    assert status["checkpoint_step"] == 4
    assert weights.with_name("manifest.json").exists()


@pytest.mark.slow
def test_a_run_is_told_while_it_runs_after_a_restart_and_after_its_end(tmp_path: Path) -> None:
    workload = edited(copy_workload(tmp_path), "steps: 8", "steps: 100000")
    (tmp_path / "plans").mkdir()
    plan = two_rank_plan(workload, tmp_path / "plans" / "plan.json")
    run = tmp_path / "run"
    arguments = ["run", plan, "--run-dir", run, "--save-every", 5]
    process = start("mmlaunch", *arguments, "--max-restarts", 1, cwd=tmp_path)

    def wait_for(condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        deadline_s = time.monotonic() + 90
        while True:
            assert time.monotonic() < deadline_s
            if (run / "run.json").exists() and condition(status := status_of(run)):
                return status
            time.sleep(0.05)

    def kill_rank_1() -> None:
        (_, shots), *_ = read_launches(run)
        assert shots[1].process is not None
        os.kill(shots[1].process.pid, signal.SIGKILL)

    try:
        status = wait_for(lambda status: status["step"] >= 12)
        assert (status["state"], status["steps"], status["restarts"]) == ("running", 100000, [])
        assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
        assert {rank["state"] for rank in status["ranks"]} <= {"running", "waiting"}
        assert all(rank["step"] >= 11 for rank in status["ranks"])
        assert 5 <= status["checkpoint_step"] <= status["step"]
        assert 0 < status["goodput"] < 1
        kill_rank_1()
        status = wait_for(
            lambda status: any(r["from_step"] is not None for r in status["restarts"])
        )
        (restart,) = status["restarts"]
        assert "was killed by SIGKILL" in restart["cause"]
        assert restart["from_step"] % 5 == 0
        assert status["state"] == "running"
        restarted = restart["from_step"]
        status = wait_for(lambda status: status["step"] > restarted)
        kill_rank_1()
        process.communicate(timeout=60)
        status = status_of(run)
        assert (status["state"], status["ranks"]) == ("failed", [])
        assert "was killed by SIGKILL" in status["cause"]
        assert status["restarts"] == [restart]
    finally:
        kill_all(process)
    process = start("mmlaunch", *arguments, "--resume", cwd=tmp_path)
    try:
        steps = status["checkpoint_step"]
        wait_for(lambda status: status["state"] == "running" and status["step"] > steps)
    finally:
        kill_all(process)
    status = status_of(run)
    assert status["state"] == "killed"
    assert [rank["state"] for rank in status["ranks"]] == ["dead", "dead"]
    assert status["cause"] is None
    done = call(
        "mmlaunch", *arguments, "--resume", "--steps", status["checkpoint_step"] + 2, "--json"
    )
    assert done.code == 0, done.err
    status = status_of(run)
    assert (status["state"], status["step"]) == ("done", status["steps"])
    assert status["checkpoint_step"] == status["steps"]
