"""A run's processes seen from outside: who reaches them, who ends them, what they leave."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.birds import copy_workload, edited, two_rank_plan
from tests.commands import environment
from tests.processes import listening, named, tree
from tests.test_store import pester

STEPS = 100_000  # more than any test waits for


def _plant_modules(folder: Path) -> None:
    """Files that a downloaded folder may hold; whoever imports one leaves a trace and ends."""
    for name in ("random", "json", "torch", "tempfile", "socket", "mymodel"):
        (folder / f"{name}.py").write_text(
            "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"
            f"raise SystemExit('{name} of the current folder')\n"
        )


class Endless:
    """A run that goes on until a test ends it; its processes are known by a variable.

    It starts in a folder whose files no process may import.
    """

    def __init__(self, folder: Path, plan: Path, *more: object) -> None:
        self.mark = f"MMLAUNCH_TEST_MARK={uuid.uuid4().hex}"
        self.run_dir = folder / self.mark.partition("=")[2]
        arguments = ["run", plan, "--run-dir", self.run_dir, "--steps", STEPS, *more]
        name, _, value = self.mark.partition("=")
        _plant_modules(folder)
        self.folder = folder
        self.process = subprocess.Popen(
            [Path(sys.executable).with_name("mmlaunch"), *map(str, arguments)],
            cwd=folder,
            env=environment(**{name: value}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_steps(self, count: int = 3) -> None:
        metrics = self.run_dir / "metrics.jsonl"
        deadline_s = time.monotonic() + 60
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline_s
            time.sleep(0.02)

    def assert_nothing_left(self, within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        while left := named(self.mark):
            assert time.monotonic() < deadline_s, [
                Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left
            ]
            time.sleep(0.05)

    def end(self) -> None:
        for pid in named(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=20)
        assert list(self.folder.glob("*.ran")) == []


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    workload = edited(copy_workload(folder), "steps: 8", f"steps: {STEPS}")
    (folder / "plans").mkdir()
    return two_rank_plan(workload, folder / "plans" / "plan.json")


@contextlib.contextmanager
def endless(folder: Path, plan: Path, *more: object) -> Generator[Endless]:
    run = Endless(folder, plan, *more)
    try:
        yield run
    finally:
        run.end()


@pytest.mark.slow
def test_strangers_reach_nothing_and_run_nothing(tmp_path: Path, plan: Path) -> None:
    """No socket is bound to more than loopback; the one that is ours takes nothing from them."""
    with endless(tmp_path, plan, "--num-workers", 1) as run:
        _pestered(run, messages=50)
        run.process.send_signal(signal.SIGTERM)
        _, err = run.process.communicate(timeout=60)
        assert run.process.returncode == 75, err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_messages_change_no_loss(tmp_path: Path, plan: Path) -> None:
    losses: list[list[float]] = []
    for messages in (0, 10_000):
        folder = tmp_path / str(messages)
        folder.mkdir()
        with endless(folder, plan) as run:
            _pestered(run, messages)
            run.wait_for_steps(50)
            run.process.send_signal(signal.SIGTERM)
            run.process.communicate(timeout=60)
            assert run.process.returncode == 75
        lines = (run.run_dir / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines[:50]])
    assert losses[0] == losses[1]


def _pestered(run: Endless, messages: int) -> None:
    run.wait_for_steps()
    sockets = listening(tree(run.process.pid))
    assert all(address.is_loopback for address, _ in sockets), sockets
    own = listening([run.process.pid])
    assert len(own) == 1  # the store
    for address, port in own:
        pester((str(address), port), messages)
    assert run.process.poll() is None


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_sigterm_to_every_process_saves(tmp_path: Path, plan: Path, workers: int) -> None:
    """As ``scancel`` sends it."""
    _stop_all(tmp_path, plan, workers)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sigterm_to_every_process_saves_every_time(tmp_path: Path, plan: Path) -> None:
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        _stop_all(folder, plan, workers=attempt % 3)


def _stop_all(folder: Path, plan: Path, workers: int) -> None:
    with endless(folder, plan, "--num-workers", workers) as run:
        run.wait_for_steps()
        for pid in named(run.mark):
            os.kill(pid, signal.SIGTERM)
        _, err = run.process.communicate(timeout=60)
        assert run.process.returncode == 75, err
        run.assert_nothing_left(within_s=3)
    assert len(list((run.run_dir / "checkpoints").glob("step-*"))) == 1
    from mmlaunch.checkpoint.restore import open_checkpoint

    (saved,) = (run.run_dir / "checkpoints").glob("step-*")
    open_checkpoint(saved).verify()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_launcher_takes_loading_processes_with_it(tmp_path: Path, plan: Path) -> None:
    for attempt in range(20):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        with endless(folder, plan, "--num-workers", 2) as run:
            run.wait_for_steps()
            assert len(named(run.mark)) >= 1 + 2 + 2 * 2  # launcher, ranks, their loaders
            run.process.kill()
            run.process.wait()
            run.assert_nothing_left(within_s=3)


@pytest.mark.slow
def test_a_killed_fork_server_is_called_that(tmp_path: Path, plan: Path) -> None:
    """And what loading processes leave behind is not told below the error."""
    with endless(tmp_path, plan, "--num-workers", 1) as run:
        run.wait_for_steps()
        servers = named("multiprocessing.forkserver")
        # Workers are its copies, and come after it.
        os.kill(next(pid for pid in tree(run.process.pid) if pid in servers), signal.SIGKILL)
        _, err = run.process.communicate(timeout=30)
    assert run.process.returncode == 1
    assert err.splitlines()[-2:] == [
        "error: the process that starts the workers was killed by SIGKILL",
        "hint: if nobody killed it, memory ran out: use smaller micro-batches or fewer ranks",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_launcher_that_waits_for_others_hears_sigterm(
    tmp_path: Path, plan: Path, node_rank: int
) -> None:
    document = json.loads(plan.read_text())
    document["cluster"] |= {"nodes": 2, "devices_per_node": 1}
    plan = plan.with_name("two.json")
    plan.write_text(json.dumps(document))
    where = ["--nnodes", 2, "--node-rank", node_rank, "--rdzv-endpoint", _free_endpoint()]
    with endless(tmp_path, plan, *where) as run:
        deadline_s = time.monotonic() + 60
        while not _waits(run.process):
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        run.process.send_signal(signal.SIGTERM)
        _, err = run.process.communicate(timeout=5)
    assert run.process.returncode == 130, err
    assert "Traceback" not in err


def _waits(process: subprocess.Popen[str]) -> bool:
    """Whether a launcher has taken SIGTERM over, as it does before it waits."""
    fields = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(fields.partition("SigCgt:\t")[2].partition("\n")[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def _free_endpoint() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.slow
def test_doctor_runs_nothing_of_the_current_folder(tmp_path: Path) -> None:
    _plant_modules(tmp_path)
    done = subprocess.run(
        [Path(sys.executable).with_name("mmplan"), "doctor"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert list(tmp_path.glob("*.ran")) == [], done.stderr
    assert done.returncode == 0, done.stderr


def test_addresses_are_read_as_the_kernel_prints_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listening([os.getpid()]).count(
            (ipaddress.ip_address("127.0.0.1"), server.getsockname()[1])
        )
