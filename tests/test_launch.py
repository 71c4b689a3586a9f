"""Launches over real processes and gloo: results, deaths, silence, and nothing left behind."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmlaunch.launch import failures
from mmlaunch.launch.hosts import Meeting
from mmlaunch.launch.launch import launch
from mmlaunch.process import process_tree
from mmlaunch.process.device import pick
from mmlaunch.process.heartbeat import Board, Where, WorkerState
from mmplan.errors import InvalidInputError, UnfitEnvironmentError
from tests import launch_entries as entries
from tests.test_checkpoint import tiny_disk

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Every launch must take its workers with it; the fork server itself may stay."""
    yield
    import multiprocessing

    assert multiprocessing.active_children() == []


def run(entry: Any, tmp_path: Path, *args: int, ranks: int = 2, **more: Any) -> list[Any]:
    more.setdefault("timeout_s", 30.0)
    return launch(entry=entry, args=args, num_ranks=ranks, run_dir=tmp_path / "run", **more)


def start_launcher(entry: str, tmp_path: Path, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.launch_entries", entry, "2", str(tmp_path / "run")]
    return subprocess.Popen(
        [*command, *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def next_event(launcher: subprocess.Popen[str]) -> dict[str, Any]:
    assert launcher.stdout is not None
    line = launcher.stdout.readline()
    assert line, launcher.communicate()[1]
    return ast.literal_eval(line)


def assert_gone(pids: list[int], within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    while alive := [pid for pid in pids if process_tree.ProcessId.of(pid).alive()]:
        assert time.monotonic() < deadline_s, f"{alive} still alive after {within_s} s"
        time.sleep(0.02)


def test_results_come_back_in_rank_order(tmp_path: Path) -> None:
    got = run(entries.rank_and_sum, tmp_path, 2, ranks=3)
    assert got == [[rank, 6.0, 1] for rank in range(3)]
    assert list((tmp_path / "run").iterdir()) == []  # the launch's own files are gone


def test_entry_by_name_and_threads_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The fork server of this test process started before the variable was set.
    monkeypatch.setenv("MMLAUNCH_THREADS", "2")
    assert run("tests.launch_entries:rank_and_sum", tmp_path, 1) == [[0, 1.0, 2], [1, 1.0, 2]]


def test_raising_worker_is_named_with_its_traceback(tmp_path: Path) -> None:
    died_before_s = time.monotonic()
    with pytest.raises(failures.WorkerFailedError) as caught:
        run(entries.raise_at_step, tmp_path, 1, ranks=3)
    assert time.monotonic() - died_before_s < 8  # start included
    line = "rank 1 (module vision, step 3, instruction 0F3) died: ValueError: the sample is bad"
    assert caught.value.message == line
    assert caught.value.exit_code == 1
    assert 'raise ValueError("the sample is bad")' in caught.value.detail
    record = json.loads((tmp_path / "run/failures/attempt-0-rank-1.json").read_text())
    assert record["kind"] == "ValueError"
    assert record["is_network"] is False
    assert time.time() - record["wall_time_s"] < 3  # noticed, and everybody ended


def test_records_of_an_earlier_run_blame_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "failures"
    failures.write_record(folder, rank=1, attempt=0, where=Where(), error=ValueError("old"))
    assert run(entries.rank_and_sum, tmp_path, 1) == [[0, 1.0, 1], [1, 1.0, 1]]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_worker_is_named_and_not_its_peer(tmp_path: Path, signum: signal.Signals) -> None:
    with pytest.raises(failures.WorkerFailedError) as caught:
        run(entries.signal_self, tmp_path, 1, int(signum))
    assert caught.value.message == (
        f"rank 1 (module text, step 2, instruction 0B2) was killed by {signum.name}"
    )
    if signum is signal.SIGSEGV:
        assert "in signal_self" in caught.value.detail
        assert "forkserver.py" not in caught.value.detail


def test_stopped_worker_is_named_within_the_timeout(tmp_path: Path) -> None:
    started_s = time.monotonic()
    with pytest.raises(failures.WorkerFailedError, match=r"^rank 1 .*step 2.* is stopped"):
        run(entries.signal_self, tmp_path, 1, int(signal.SIGSTOP), timeout_s=3.0)
    assert time.monotonic() - started_s < 3 + 5


@pytest.mark.parametrize(
    ("entry", "place", "option"),
    [
        (entries.hang_in_compute, "module vision, step 2, instruction 0F2", "--timeout"),
        (entries.hang_in_save, "step 2, saving", "--start-timeout"),
    ],
)
def test_hanging_worker_is_named_and_not_those_who_wait(
    tmp_path: Path, entry: Any, place: str, option: str
) -> None:
    limits_s = {"--timeout": 2.0, "--start-timeout": 3.0}
    started_s = time.monotonic()
    with pytest.raises(failures.WorkerFailedError) as caught:
        run(entry, tmp_path, 1, ranks=3, timeout_s=2.0, start_timeout_s=3.0)
    assert limits_s[option] < time.monotonic() - started_s < limits_s[option] + 5
    assert caught.value.message.startswith(f"rank 1 ({place}) hangs")
    assert caught.value.hint is not None
    assert caught.value.hint.endswith(f" {option}")
    assert "in _never_returns" in caught.value.detail


def test_worker_that_finished_too_early_is_named(tmp_path: Path) -> None:
    with pytest.raises(failures.WorkerFailedError, match="rank 1 had finished when rank 0 still"):
        run(entries.leave_early, tmp_path, 1, timeout_s=3.0)


def test_deadlock_says_who_waits_for_whom(tmp_path: Path) -> None:
    with pytest.raises(failures.WorkerFailedError) as caught:
        run(entries.wait_for_each_other, tmp_path, timeout_s=2.0)
    said = re.match(r"rank (\d) \(step 0, .*\) waited for rank (\d) for 2", caught.value.message)
    assert said is not None
    assert {said[1], said[2]} == {"0", "1"}
    assert "in wait_for_each_other" in caught.value.detail


def test_restart_succeeds_and_says_why(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    got = run(entries.fail_first_attempt, tmp_path, max_restarts=1, on_event=events.append)
    assert got == [1, 1]
    assert events == [{"launcher": "restart", "cause": "rank 1 was killed by SIGKILL"}]


@pytest.mark.slow
def test_restarts_are_counted_within_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(failures.WorkerFailedError, match="attempt 1"):
        run(entries.fail_attempts, tmp_path / "a", 3, ranks=1, max_restarts=1)
    monkeypatch.setattr("mmlaunch.launch.launch._COUNTED_S", 0.0)
    assert run(entries.fail_attempts, tmp_path / "b", 3, ranks=1, max_restarts=1) == [3]


def test_no_restart_left_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(failures.WorkerFailedError, match=r"rank 1 .*ValueError"):
        run(entries.raise_at_step, tmp_path, 1, max_restarts=1)
    records = sorted(path.name for path in (tmp_path / "run/failures").glob("*rank-1.json"))
    assert records == ["attempt-0-rank-1.json", "attempt-1-rank-1.json"]


def test_events_arrive_in_order_and_soon(tmp_path: Path) -> None:
    delays_s: list[float] = []
    seen: list[int] = []

    def on_event(event: dict[str, Any]) -> None:
        seen.append(event["index"])
        delays_s.append(time.monotonic() - event["sent_s"])

    run(entries.report_times, tmp_path, ranks=1, on_event=on_event)
    assert seen == list(range(5))
    assert sorted(delays_s)[2] < 0.2


def test_a_full_disk_takes_no_event_away(tmp_path: Path) -> None:
    seen: list[int] = []
    filler = tmp_path / "disk" / "filler"

    def on_event(event: dict[str, Any]) -> None:
        seen.append(event["index"])
        if len(seen) == 1:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 12))
        if len(seen) == 5:
            filler.unlink()

    with tiny_disk(tmp_path / "disk", "256k"):
        run(entries.report_times, tmp_path / "disk", ranks=1, on_event=on_event)
    assert seen == list(range(5))


def test_a_failing_listener_ends_the_workers(tmp_path: Path) -> None:
    def on_event(event: dict[str, Any]) -> None:
        raise LookupError(str(event["index"]))

    with pytest.raises(LookupError):
        run(entries.report_times, tmp_path, ranks=1, on_event=on_event)


def test_killed_launcher_leaves_no_worker(tmp_path: Path) -> None:
    launcher = start_launcher("report_pid_with_child", tmp_path, 30)
    pids = [pid for _ in range(2) for pid in next_event(launcher)["pids"]]
    assert len(pids) == 4
    os.kill(pids[0], signal.SIGSTOP)  # cannot look after itself any more
    launcher.kill()
    launcher.wait()
    assert_gone(pids, within_s=3)
    launcher.communicate()
    # What it left in the run directory stops nobody.
    assert run(entries.rank_and_sum, tmp_path, 1) == [[0, 1.0, 1], [1, 1.0, 1]]


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_first_signal_asks_to_stop(tmp_path: Path, signum: signal.Signals) -> None:
    launcher = start_launcher("reduce_forever", tmp_path, 30)
    next_event(launcher)
    launcher.send_signal(signum)
    assert launcher.stdout is not None
    # Not communicate(): what readline() has read ahead would be lost, half a line perhaps.
    lines = [ast.literal_eval(line) for line in launcher.stdout]
    _, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 0, err
    assert {"launcher": "stop-requested"} in lines
    first, second = lines[-1]["results"]
    assert first == second  # they agreed on the step


def test_a_signal_before_the_first_step_ends_at_once(tmp_path: Path) -> None:
    started_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(entries.interrupt_in_start, tmp_path, os.getpid())
    assert time.monotonic() - started_s < 8  # start included


@pytest.mark.slow
def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    launcher = start_launcher("report_pid_with_child", tmp_path, 30)
    pids = [pid for _ in range(2) for pid in next_event(launcher)["pids"]]
    launcher.send_signal(signal.SIGINT)
    assert next_event(launcher) == {"launcher": "stop-requested"}
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=5)
    assert "KeyboardInterrupt" in err
    assert_gone(pids, within_s=3)


@pytest.mark.slow
def test_run_directory_in_use_is_refused(tmp_path: Path) -> None:
    launcher = start_launcher("report_pid_with_child", tmp_path, 30)
    next_event(launcher)
    with pytest.raises(InvalidInputError, match="in use by another launch"):
        run(entries.rank_and_sum, tmp_path, 1)
    launcher.kill()
    launcher.communicate()


def start_nodes(
    entry: str, folder: Path, number: int, *, ranks: int, timeout_s: float
) -> list[subprocess.Popen[str]]:
    """The launchers of two machines with their run folder, each with half of the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = (
        "import sys\nfrom pathlib import Path\nfrom mmlaunch.launch.launch import launch\n"
        "from mmlaunch.launch.hosts import Meeting\n"
        "node = int(sys.argv[1])\n"
        f"print(launch(entry='tests.launch_entries:{entry}', args=({number},), num_ranks={ranks},"
        f" run_dir=Path(sys.argv[2]), timeout_s={timeout_s}, meeting=Meeting(num_nodes=2,"
        f" node_rank=node, endpoint='127.0.0.1:{port}')))\n"
    )
    return [
        subprocess.Popen(
            [sys.executable, "-c", code, str(node), str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]


@pytest.mark.slow
def test_two_nodes_number_their_ranks_as_told(tmp_path: Path) -> None:
    nodes = start_nodes("rank_and_sum", tmp_path, 1, ranks=3, timeout_s=30)
    (out_0, err_0), (out_1, err_1) = (node.communicate(timeout=60) for node in nodes)
    assert out_0 == "[[0, 3.0, 1], [1, 3.0, 1], [2, 3.0, 1]]\n", err_0
    assert out_1 == "[[2, 3.0, 1]]\n", err_1


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_failure_is_heard_on_the_other_node(tmp_path: Path, culprit: int) -> None:
    """There the only rank computes, so neither the network nor the timeout could tell it."""
    nodes = start_nodes("raise_while_others_compute", tmp_path, culprit, ranks=2, timeout_s=300)
    _, own = nodes[culprit].communicate(timeout=60)
    ended_s = time.monotonic()
    _, other = nodes[1 - culprit].communicate(timeout=60)
    assert time.monotonic() - ended_s < 5
    line = f"rank {culprit} (module vision, step 0, instruction 0F0) died: ValueError"
    assert f"WorkerFailedError: {line}" in own
    assert f"RunFailedError: machine {culprit} ({socket.gethostname()}): {line}" in other


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_hang_is_blamed_by_the_node_on_which_it_is(tmp_path: Path, culprit: int) -> None:
    nodes = start_nodes("hang_in_compute", tmp_path, culprit, ranks=2, timeout_s=4)
    said = [node.communicate(timeout=60)[1] for node in nodes]
    line = f"rank {culprit} (module vision, step 2, instruction 0F2) hangs"
    assert f"WorkerFailedError: {line}" in said[culprit]
    assert (
        f"RunFailedError: machine {culprit} ({socket.gethostname()}): {line}" in said[1 - culprit]
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_launches_at_once_do_not_fight_over_ports(tmp_path: Path) -> None:
    launchers = [start_launcher("rank_and_sum", tmp_path / str(n), 120, 1) for n in range(20)]
    for launcher in launchers:
        out, err = launcher.communicate(timeout=240)
        assert launcher.returncode == 0, err
        assert ast.literal_eval(out) == {"results": [[0, 1.0, 1], [1, 1.0, 1]]}


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="entry is 'nowhere'"):
        run("nowhere", tmp_path)
    with pytest.raises(InvalidInputError, match="no rendezvous endpoint"):
        run(entries.rank_and_sum, tmp_path, 1, meeting=Meeting(num_nodes=2))
    third = Meeting(num_nodes=2, node_rank=2, endpoint="h:1")
    with pytest.raises(InvalidInputError, match="node rank 2 of 2"):
        run(entries.rank_and_sum, tmp_path, 1, meeting=third)
    with pytest.raises(InvalidInputError, match="do not fill 3 nodes"):
        run(entries.rank_and_sum, tmp_path, 1, meeting=replace(third, num_nodes=3))
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInputError, match="cannot write to run directory"):
        launch(
            entry=entries.rank_and_sum, num_ranks=1, run_dir=tmp_path / "file" / "x", timeout_s=5
        )


def test_entry_that_cannot_be_imported_is_a_named_failure(tmp_path: Path) -> None:
    with pytest.raises(failures.WorkerFailedError, match="ModuleNotFoundError: No module named"):
        run("tests.no_such_module:entry", tmp_path, ranks=1)


@pytest.mark.parametrize(
    ("error", "is_network"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1"), True),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ConnectionResetError("the data server is gone"), False),
        (ValueError("connection closed by peer"), False),
    ],
)
def test_network_errors_are_told_from_others(error: Exception, is_network: bool) -> None:
    assert failures.is_network_error(error) is is_network
    wrapped = RuntimeError("rank 1, instruction 4")
    wrapped.__cause__ = error
    assert failures.is_network_error(wrapped) is is_network


def test_blame_prefers_own_errors_then_the_vanished_then_the_earliest(tmp_path: Path) -> None:
    lost = RuntimeError("Connection closed by peer")
    for rank, error in [(0, lost), (3, ValueError("first")), (2, ValueError("second"))]:
        failures.write_record(tmp_path, rank=rank, attempt=0, where=Where(), error=error)
        time.sleep(0.01)
    records = failures.read_records(tmp_path, attempt=0)
    gone = [(1, -9, Where(module="text"))]

    def blamed(records: Any, gone: Any, include_network: bool = True) -> int | None:
        verdict = failures.blame_death(records, gone, include_network=include_network)
        return verdict and verdict.rank

    network_only = [record for record in records if record.is_network]
    assert blamed(records, gone) == 3
    assert blamed(network_only, gone) == 1
    assert blamed(network_only, [(0, -signal.SIGABRT, Where()), *gone]) == 1
    assert blamed(network_only, []) == 0
    assert blamed(network_only, [], include_network=False) is None


def test_a_torn_record_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "attempt-0-rank-0.json").write_text('{"rank": 0, "att')
    (tmp_path / "attempt-0-rank-1.json").write_text('{"other": 0}')
    assert failures.read_records(tmp_path, attempt=0) == []


def test_board_shows_what_workers_say(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", num_slots=3, create=True)
    other = Board(tmp_path / "board", num_slots=3)
    heartbeat = other.heartbeat(1)
    heartbeat.register()
    heartbeat.beat(17, 5, "0F3", "vision")
    with heartbeat.waiting((4, 2)):
        shot = board.snapshots()[1]
        assert (shot.state, shot.peers) == (WorkerState.WAITING, (4, 2))
    shot = board.snapshots()[1]
    assert str(shot.where) == "module vision, step 17, instruction 0F3"
    assert shot.where.instruction_index == 5
    assert shot.state is WorkerState.COMPUTING
    assert shot.process == process_tree.ProcessId.of(os.getpid())
    heartbeat.phase("loading data", 18, slow=False)
    where = board.snapshots()[1].where
    assert (str(where), where.is_slow) == ("step 18, loading data", False)
    heartbeat.phase("loading step-40")
    where = board.snapshots()[1].where
    assert (str(where), where.is_slow) == ("loading step-40", True)
    assert board.snapshots()[0].process is None
    board.request_stop()
    board.clear()  # a restart
    assert heartbeat.should_stop()
    assert board.snapshots()[1].process is None


def test_a_beat_is_never_read_by_half(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", num_slots=1, create=True)
    own = board.heartbeat(0)
    own.register()
    own.beat(0, 0, "0F0", "vision")
    child = os.fork()
    if child == 0:
        heartbeat = Board(tmp_path / "board", num_slots=1).heartbeat(0)
        while os.getppid() != 1:
            heartbeat.beat(0, 0, "0F0", "vision")
            with heartbeat.waiting((1,)):
                pass
    began_s = time.monotonic()
    try:
        while time.monotonic() < began_s + 0.3:
            (shot,) = board.snapshots()
            assert shot.progress_s > began_s - 1
            assert shot.state in (WorkerState.COMPUTING, WorkerState.WAITING)
            assert str(shot.where) == "module vision, step 0, instruction 0F0"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_device_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMLAUNCH_DEVICE", "cpu")
    assert (pick().device, pick().backend) == (torch.device("cpu"), "gloo")
    monkeypatch.delenv("MMLAUNCH_DEVICE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    chosen = pick(1, local_world_size=2)
    assert (chosen.device, chosen.backend) == (torch.device("cuda", 1), "nccl")
    assert pick(1, local_world_size=3).backend == "gloo"
    monkeypatch.setenv("MMLAUNCH_DEVICE", "cuda")
    with pytest.raises(UnfitEnvironmentError, match="3 local ranks share 2 GPUs"):
        pick(1, local_world_size=3)
    monkeypatch.setenv("MMLAUNCH_DEVICE", "tpu")
    with pytest.raises(InvalidInputError, match="MMLAUNCH_DEVICE is 'tpu'"):
        pick()


def test_threads_are_one_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MMLAUNCH_THREADS", raising=False)
    assert pick().num_threads == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert pick().num_threads == 4
    monkeypatch.setenv("MMLAUNCH_THREADS", "3")
    assert pick().num_threads == 3
    monkeypatch.setenv("MMLAUNCH_THREADS", "many")
    with pytest.raises(InvalidInputError, match="MMLAUNCH_THREADS is 'many'"):
        pick()
