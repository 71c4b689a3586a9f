"""Faults of runs, drawn by a seed: what breaks, at which step, and what the user then does.

A run that ends is started again with ``--resume``, as a user would. Between two launches nothing
of the one before may be left, and what it leaves must be worth going on from.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.namespaces import Host
from mmlaunch.process.heartbeat import Board
from mmplan.schema.load import load_plan
from tests import commands
from tests.fault_jobs import STEPS
from tests.processes import named, sockets
from tests.streams import LOG, PAUSE

PORT = 29533
# Longest silence of a rank; links are cut, and ranks stopped, for less or for more.
TIMEOUT_S = 12
# The same while a rank starts or saves, on a machine with other work to do.
START_TIMEOUT_S = 45
# For the other machine's launcher to come, as its user starts both again.
JOIN_S = 40
LIMIT_S = 240
FILLER = "filler"


@dataclass(kw_only=True)
class Broken:
    """A run that faults meet.

    Attributes:
        folder: of the logs.
        disk: a small one, for the run folder.
        plans: of the launches, in turn.
        hosts: where the launchers are; none for one launcher on this machine.
        logs: what blocks write down, a prefix for each launch.
        said: errors of launches that ended.
    """

    folder: Path
    disk: Path
    plans: Sequence[Path]
    draw: random.Random
    hosts: Sequence[Host] = ()
    launchers: list[subprocess.Popen[str]] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def _plan(self) -> Path:
        """Of the newest launch."""
        return self.plans[(len(self.logs) - 1) % len(self.plans)]

    @property
    def _ranks_of_a_host(self) -> int:
        return load_plan(self._plan).devices // (len(self.hosts) or 1)

    @property
    def run_dir(self) -> Path:
        return self.disk / "run"

    def launch(self) -> None:
        """Start the run, or go on with it."""
        options = ["--run-dir", self.run_dir, "--save-every", 2, "--max-restarts", 20]
        options += [
            "--timeout",
            TIMEOUT_S,
            "--start-timeout",
            START_TIMEOUT_S,
            "--async-save",
            *["--resume"] * bool(self.logs),
        ]
        self.logs.append(self.folder / f"log-{len(self.logs):02}")
        plan = self._plan
        env = {LOG: str(self.logs[-1]), PAUSE: "0.03"}
        if not self.hosts:
            self.launchers = [
                commands.start("mmlaunch", "run", plan, *options, cwd=self.folder, **env)
            ]
            return
        self.launchers = []
        for node, host in enumerate(self.hosts):
            where = ["--nnodes", len(self.hosts), "--node-rank", node, "--join-timeout", JOIN_S]
            meet = ["--rdzv-endpoint", f"{self.hosts[0].name}:{PORT}"]
            line = commands.command("mmlaunch", "run", plan, *options, *where, *meet)
            self.launchers.append(
                host.start(line, cwd=self.folder, env=commands.environment(**env))
            )

    def steps(self) -> int:
        """Steps whose metrics are written."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def is_on(self) -> bool:
        return all(one.poll() is None for one in self.launchers)

    def come_to(self, step: int) -> bool:
        """Wait for a step; False where the run ends before."""
        until_s = time.monotonic() + LIMIT_S
        while self.steps() < step and self.is_on():
            assert time.monotonic() < until_s, f"no step {step} within {LIMIT_S} s"
            time.sleep(0.01)
        return self.is_on()

    def ranks(self) -> list[int]:
        """Process ids of the workers on all hosts."""
        found: list[int] = []
        for board in sorted(self.run_dir.glob("launch-node*/board")):
            with contextlib.suppress(OSError, ValueError):
                shots = Board(board, num_slots=self._ranks_of_a_host).snapshots()
                found += [shot.process.pid for shot in shots if shot.process is not None]
        return found

    def newest(self) -> Path | None:
        """Folder of the newest checkpoint."""
        saved = (self.run_dir / "checkpoints").glob("step-*[0-9]")
        return max(saved, key=lambda path: int(path.name[5:]), default=None)

    def end(self) -> list[int]:
        """Wait for the launchers; their exit codes. Nothing of them may be left."""
        until_s = time.monotonic() + LIMIT_S
        try:
            for one in self.launchers:
                _, err = one.communicate(timeout=max(1.0, until_s - time.monotonic()))
                assert "Traceback" not in err, err
                errors = [line for line in err.splitlines() if line.startswith("error: ")]
                assert len(errors) == (one.returncode not in (0, 130, -signal.SIGKILL)), err
                self.said.append(err)
        finally:
            self.kill_all()
        return [one.returncode for one in self.launchers]

    def kill_all(self) -> None:
        """SIGKILL whatever has this run's log in its environment, after a moment to end itself."""
        until_s = time.monotonic() + 15
        while left := named(str(self.logs[-1])):
            if time.monotonic() > until_s:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"processes {left} of {self.logs[-1]} are left")
            time.sleep(0.05)


Fault = Callable[[Broken], None]
"""Breaks something of a run that is on; comes back when the harm is done, and undone if it is."""


def rank_is_killed(run: Broken) -> None:
    if ranks := run.ranks():
        _signal(run.draw.choice(ranks), signal.SIGKILL)


def rank_is_stopped_for_a_while(run: Broken) -> None:
    if ranks := run.ranks():
        victim = run.draw.choice(ranks)
        _signal(victim, signal.SIGSTOP)
        time.sleep(run.draw.uniform(0.5, TIMEOUT_S / 3))
        _signal(victim, signal.SIGCONT)


def rank_is_stopped_for_ever(run: Broken) -> None:
    """Its launcher has to end it."""
    if ranks := run.ranks():
        _signal(run.draw.choice(ranks), signal.SIGSTOP)
        time.sleep(TIMEOUT_S)


def rank_is_slow(run: Broken) -> None:
    """A tenth of its speed, for two seconds."""
    if ranks := run.ranks():
        victim = run.draw.choice(ranks)
        for _ in range(20):
            _signal(victim, signal.SIGSTOP)
            time.sleep(0.09)
            _signal(victim, signal.SIGCONT)
            time.sleep(0.01)


def launcher_is_killed(run: Broken) -> None:
    """Its ranks must end by themselves."""
    run.draw.choice(run.launchers).kill()


def all_is_killed(run: Broken) -> None:
    processes = named(str(run.logs[-1]))
    folders = sockets(processes)
    for pid in processes:
        _signal(pid, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def launcher_is_asked_to_stop(run: Broken) -> None:
    run.draw.choice(run.launchers).send_signal(signal.SIGTERM)


def checkpoint_is_flipped(run: Broken) -> None:
    """One bit of the newest one, then a rank dies: an older one must do."""
    if newest := run.newest():
        files = sorted(newest.glob("*.safetensors"))
        path = run.draw.choice(files)
        at = run.draw.randrange(path.stat().st_size // 2, path.stat().st_size)
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << run.draw.randrange(8)]))
    rank_is_killed(run)


def checkpoint_is_cut_off(run: Broken) -> None:
    """The newest one, in the middle of a file; then everything dies."""
    if newest := run.newest():
        path = run.draw.choice(sorted(newest.glob("*")))
        os.truncate(path, path.stat().st_size // 2)
    all_is_killed(run)


def loading_process_is_killed(run: Broken) -> None:
    """A child of a rank: whatever loads or writes for it."""
    ranks = set(run.ranks())
    children: list[int] = []
    for pid in named(str(run.logs[-1])):
        with contextlib.suppress(OSError, ValueError):
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) in ranks:
                children.append(pid)
    if children:
        _signal(run.draw.choice(children), signal.SIGKILL)


def disk_is_full(run: Broken) -> None:
    """For some seconds; the run folder is on a disk of its own."""
    filler = run.disk / FILLER
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    time.sleep(run.draw.uniform(0.5, 2.0))
    filler.unlink()


def link_is_cut_for_a_while(run: Broken) -> None:
    with _cut(run):
        time.sleep(run.draw.uniform(1.0, TIMEOUT_S / 3))


def link_is_cut_for_longer(run: Broken) -> None:
    with _cut(run):
        time.sleep(2 * TIMEOUT_S + 8)


@contextlib.contextmanager
def _cut(run: Broken) -> Generator[None]:
    host = run.draw.choice(list(run.hosts))
    host.cut()
    try:
        yield
    finally:
        host.mend()


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


ANYWHERE: tuple[Fault, ...] = (
    rank_is_killed,
    rank_is_stopped_for_a_while,
    rank_is_slow,
    launcher_is_killed,
    all_is_killed,
    launcher_is_asked_to_stop,
    checkpoint_is_flipped,
    checkpoint_is_cut_off,
    loading_process_is_killed,
    disk_is_full,
    rank_is_stopped_for_ever,
)
BETWEEN_HOSTS: tuple[Fault, ...] = (link_is_cut_for_a_while, link_is_cut_for_longer)


def meet(run: Broken, faults: Sequence[tuple[int, Fault]]) -> None:
    """Train to the end whatever happens.

    Args:
        faults: what happens, and after which step; steps ascend.
    """
    run.launch()
    for step, fault in faults:
        _until(run, step)
        fault(run)
    _until(run, STEPS)
    assert run.end() == [0] * len(run.launchers), run.said


def _until(run: Broken, step: int) -> None:
    """Train to a step, as a user would who starts again what has ended."""
    for _ in range(4):
        if run.come_to(step) or run.steps() >= STEPS:
            return
        codes = run.end()
        if codes == [0] * len(codes):
            return
        # A checkpoint that is not whole is named, and what to do with it.
        for bad in set(re.findall(r"^hint: move (\S+) away", "\n".join(run.said), re.MULTILINE)):
            shutil.rmtree(bad, ignore_errors=True)
        run.launch()
    raise AssertionError(f"no step {step} after four launches: {run.said[-4:]}")
