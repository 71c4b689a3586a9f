"""Who hangs, as the board tells it, where hosts wait for their devices and where they run ahead."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmlaunch.launch.failures import Blame, blame_silence
from mmlaunch.process import process_group
from mmlaunch.process.device import RankDevice
from mmlaunch.process.heartbeat import Board, Heartbeat, Snapshot, WorkerState
from mmlaunch.process.process_tree import ProcessId
from mmplan.errors import UnfitEnvironmentError
from tests.birds import copy_workload, two_rank_plan
from tests.commands import environment

STEP = 7


class FakeDevice:
    """A device whose work is a count of marks; it completes as many as a test says."""

    def __init__(self) -> None:
        self.given = 0
        self.completed = 0
        self.failed = False

    def mark(self) -> FakeMark:
        self.given += 1
        return FakeMark(self, self.given)


@dataclass(frozen=True)
class FakeMark:
    device: FakeDevice
    number: int

    def query(self) -> bool:
        if self.device.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.number <= self.device.completed


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank's instructions with the ranks that each waits for first, and where it stays.

    Attributes:
        row: texts and peers.
        stuck: the last instruction that it comes to.
        in_wait: whether it stays in that one's wait, and not behind it.
    """

    row: Sequence[tuple[str, tuple[int, ...]]]
    stuck: int
    in_wait: bool


def waits(row: Sequence[tuple[str, tuple[int, ...]]], stuck: int) -> Rank:
    return Rank(row=row, stuck=stuck, in_wait=True)


def computes(row: Sequence[tuple[str, tuple[int, ...]]], stuck: int) -> Rank:
    return Rank(row=row, stuck=stuck, in_wait=False)


def play_waiting_host(heartbeat: Heartbeat, rank: Rank) -> None:
    """Beats of a host that stays where its work does."""
    for index, (text, peers) in enumerate(rank.row):
        heartbeat.beat(STEP, index, text)
        if index == rank.stuck and rank.in_wait:
            heartbeat.waiting(peers).__enter__()
        elif peers:
            with heartbeat.waiting(peers):
                pass
        if index == rank.stuck:
            return


def play_running_host(heartbeat: Heartbeat, rank: Rank, device: FakeDevice) -> None:
    """Beats of a host that queues its whole step and then waits for its device."""
    heartbeat.follow(device.mark)
    for index, (text, peers) in enumerate(rank.row):
        heartbeat.beat(STEP, index, text)
        if index == rank.stuck and not peers:
            device.completed = device.given
        if peers:
            with heartbeat.waiting(peers):
                if index == rank.stuck and rank.in_wait:
                    device.completed = device.given
            if index == rank.stuck and not rank.in_wait:
                device.completed = device.given


def board_of(folder: Path, ranks: Sequence[Rank], *, ahead: bool) -> list[Snapshot]:
    """What the launcher reads after all ranks have come to where they stay."""
    board = Board(folder / "board", num_slots=len(ranks), create=True)
    hearts = [board.heartbeat(number) for number in range(len(ranks))]
    for heartbeat, rank in zip(hearts, ranks, strict=True):
        heartbeat.register()
        if ahead:
            play_running_host(heartbeat, rank, FakeDevice())
        else:
            play_waiting_host(heartbeat, rank)
    wanted = [(rank.row[rank.stuck][0], rank.in_wait) for rank in ranks]
    await_true(lambda: _places(board) == wanted)
    shots = board.snapshots()
    for heartbeat in hearts:
        heartbeat.done()
    return shots


def _places(board: Board) -> list[tuple[str, bool]]:
    shots = board.snapshots()
    return [(shot.where.instruction, shot.state is WorkerState.WAITING) for shot in shots]


def await_true(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def blamed(shots: Sequence[Snapshot]) -> Blame:
    verdict = blame_silence(shots, base_rank=0, stalled_s=5.0)
    assert verdict is not None
    return verdict


PIPELINE = (
    (("0F0", ()), ("0B0", (1,)), ("STEP", (0, 1, 2))),
    (("1F0", (0,)), ("1B0", (2,)), ("STEP", (0, 1, 2))),
    (("2F0", (1,)), ("2B0", ()), ("STEP", (0, 1, 2))),
)
either = pytest.mark.parametrize("ahead", [False, True], ids=["host waits", "host runs ahead"])


@either
def test_the_rank_in_its_own_compute_is_blamed(tmp_path: Path, ahead: bool) -> None:
    first, middle, last = PIPELINE
    ranks = [waits(first, 1), computes(middle, 0), waits(last, 0)]
    verdict = blamed(board_of(tmp_path, ranks, ahead=ahead))
    assert verdict.line == (
        "rank 1 (step 7, instruction 1F0) hangs: no progress for 5.0 s while ranks 0, 2 waited"
    )


@either
def test_of_two_in_computes_the_awaited_one_is_blamed(tmp_path: Path, ahead: bool) -> None:
    """Rank 0 is silent for longer, and nobody waits for it; rank 1 waits for 3 through 2."""
    alone = (("0F0", ()),)
    ranks = [
        computes(alone, 0),
        waits((("1F0", (2,)),), 0),
        waits((("2F0", ()), ("2F1", (3,))), 1),
        computes((("3F0", ()), ("3F1", ())), 1),
    ]
    verdict = blamed(board_of(tmp_path, ranks, ahead=ahead))
    assert (verdict.rank, verdict.is_hang, verdict.lost_peer) == (3, True, False)
    assert "instruction 3F1" in verdict.line


@either
def test_a_stopped_peer_is_blamed(tmp_path: Path, ahead: bool) -> None:
    """Also where it was stopped in a wait, in which it looks like the others."""
    first, middle, last = PIPELINE
    shots = board_of(tmp_path, [waits(first, 1), waits(middle, 1), waits(last, 0)], ahead=ahead)
    with subprocess.Popen(["sleep", "60"]) as child:
        child.send_signal(19)
        process = ProcessId.of(child.pid)
        await_true(process.stopped)
        verdict = blamed([*shots[:2], replace(shots[2], process=process)])
        child.kill()
    assert (verdict.rank, verdict.line.partition(") ")[2]) == (
        2,
        "is stopped: no progress for 5.0 s",
    )


@either
def test_who_waits_for_another_machine_leaves_the_verdict_to_it(
    tmp_path: Path, ahead: bool
) -> None:
    ranks = [waits((("0B0", (1,)),), 0), waits((("1F0", ()), ("1B0", (5,))), 1)]
    verdict = blamed(board_of(tmp_path, ranks, ahead=ahead))
    assert verdict.lost_peer
    assert verdict.line.startswith(
        "rank 1 (step 7, instruction 1B0) waited for rank 5, which runs on another machine"
    )


def test_a_host_that_waits_shows_when_its_device_is_idle(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", num_slots=1, create=True)
    heartbeat, device = board.heartbeat(0), FakeDevice()
    heartbeat.register()
    heartbeat.follow(device.mark)
    heartbeat.beat(STEP, 0, "0F0", "vision")
    heartbeat.beat(STEP, 1, "0B0")
    await_true(lambda: board.snapshots()[0].where.step == -1)  # not even begun
    with heartbeat.waiting((3,)):
        device.completed = device.given
        await_true(lambda: board.snapshots()[0].peers == (3,))
        assert str(board.snapshots()[0].where) == "module vision, step 7, instruction 0B0"
    heartbeat.done()
    assert board.snapshots()[0].state is WorkerState.DONE


def test_an_error_of_the_device_is_placed_after_what_it_completed() -> None:
    heartbeat, device = Heartbeat.detached(), FakeDevice()
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    heartbeat.beat(STEP, 0, "0F0")
    assert heartbeat.lateness(error) == ""  # the host waits for each instruction
    heartbeat.follow(device.mark)
    assert heartbeat.lateness(error) == "the device had completed no instruction"
    for index, text in enumerate(["0F0", "0F1", "0B0"]):
        heartbeat.beat(STEP, index, text)
    device.completed = 2  # what was before, and 0F0
    await_true(lambda: "0F0 of step 7" in heartbeat.lateness(error))
    device.failed = True
    assert heartbeat.lateness(ValueError("the sample is bad")) == ""
    assert heartbeat.place_of(ValueError("the sample is bad")) is heartbeat.where
    assert heartbeat.place_of(error).instruction == (
        "0B0 or before; the device had completed 0F0 of step 7"
    )
    heartbeat.done()


def test_ranks_write_their_messages_down_when_asked(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", num_slots=1, create=True)
    heartbeat = board.heartbeat(0)
    heartbeat.follow(
        FakeDevice().mark, dump=lambda: process_group.dump_flights(tmp_path / "failures", 3)
    )
    assert not (tmp_path / "failures").exists()
    board.request_dump()
    await_true((tmp_path / "failures" / "nccl_trace_rank_3").exists)
    heartbeat.done()


GPU = RankDevice(device=torch.device("cuda", 0), backend="nccl", num_threads=1, reason="")
CPU = RankDevice(
    device=torch.device("cpu"), backend="gloo", num_threads=1, reason="CUDA is not available"
)


def test_a_rank_without_a_gpu_is_refused_by_all() -> None:
    store: Any = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    said: list[str] = []

    def join(rank: int, device: RankDevice) -> None:
        timeout = timedelta(seconds=10)
        with pytest.raises(UnfitEnvironmentError) as caught:
            process_group.join(device, store=store, rank=rank, world_size=3, timeout=timeout)
        said.append(str(caught.value))

    threads = [threading.Thread(target=join, args=ranked) for ranked in enumerate([GPU, GPU, CPU])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 3
    assert len(set(said)) == 1
    assert said[0].startswith("rank 2 on ")
    assert "has no GPU (CUDA is not available), and rank 0 on " in said[0]


def test_a_plan_for_gpus_is_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMLAUNCH_DEVICE", raising=False)
    process_group.check_planned(GPU, "A100")
    with pytest.raises(UnfitEnvironmentError, match=r"no GPU \(CUDA is not .*plan is for A100"):
        process_group.check_planned(CPU, "A100")
    monkeypatch.setenv("MMLAUNCH_DEVICE", "cpu")
    process_group.check_planned(CPU, "A100")


_SCRIPT = """
import sys, time
import torch, torch.distributed as dist
import mmlaunch

with mmlaunch.Session.from_plan(sys.argv[1], workload=sys.argv[2], timeout_s=60) as session:
    session.step()
    if session.rank == 1:
        print("hangs", flush=True)
        time.sleep(60)
    kept = [dist.irecv(torch.zeros(4), src=1) for _ in range(3)]
    kept.append(dist.all_reduce(torch.zeros(4), async_op=True))
    raise ValueError("the sample is bad")
"""


@pytest.mark.slow
def test_a_script_that_fails_leaves_without_its_peers(tmp_path: Path) -> None:
    """As torchrun starts it: nobody kills it while receives and a collective are under way."""
    workload = copy_workload(tmp_path)
    (tmp_path / "plans").mkdir()
    plan = two_rank_plan(workload, tmp_path / "plans" / "plan.json")
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start(rank: int) -> subprocess.Popen[str]:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        return subprocess.Popen(
            [sys.executable, str(script), str(plan), str(workload)],
            env=environment(**where, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    failing, hanging = start(0), start(1)
    try:
        assert hanging.stdout is not None
        assert hanging.stdout.readline() == "hangs\n", failing.communicate()[1]
        _, err = failing.communicate(timeout=20)
    finally:
        failing.kill()
        hanging.kill()
    assert failing.returncode == 1
    assert err.endswith("ValueError: the sample is bad\n")
