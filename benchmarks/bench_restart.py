"""How soon a run goes on after a rank has died, against a start from the command line.

    python benchmarks/bench_restart.py [--deaths 10] [--write-docs]

Two ranks train examples/clip-digits. A rank is killed in a step after the last checkpoint, again
and again; the run's heartbeats and its metrics tell when each phase was over, in seconds since the
kill.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from page import conditions, table, write_section
from planning import planned

from mmlaunch.process.heartbeat import Board, Snapshot
from mmplan.profiling.analytic import analytic_profile
from mmplan.schema.base import save_document
from mmplan.schema.cluster import load_cluster
from mmplan.schema.workload import load_workload

WORKLOAD = Path(__file__).parent.parent / "examples" / "clip-digits" / "workload.yaml"
RANKS = 2
SAVE_EVERY = 10
# Between two looks at the run.
LOOK_S = 0.005
# Nothing here takes so long, on a busy machine neither.
LIMIT_S = 120.0
PHASES = (
    "death noticed, the other rank ended",
    "new processes",
    "joined",
    "model built",
    "checkpoint loaded",
    "first step",
)


class Ends(NamedTuple):
    """When a phase was over: seconds since the kill, and CPU seconds of the slower new rank."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that goes on by itself, seen from outside."""

    folder: Path

    def shots(self) -> list[Snapshot]:
        """The heartbeats; none before the run has some."""
        path = self.folder / "launch-node0" / "board"
        return Board(path, num_slots=RANKS).snapshots() if path.exists() else []

    def steps(self) -> int:
        """Steps whose metrics are written."""
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def saved(self) -> int:
        """Step of the newest checkpoint; 0 without one."""
        found = (self.folder / "checkpoints").glob("step-*[0-9]")
        return max((int(path.name.removeprefix("step-")) for path in found), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--deaths", type=int, default=10)
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mmplan-bench-") as folder:
        start_s, rows = _measured(
            plan_of_the_demo(Path(folder)), Path(folder) / "run", options.deaths
        )
    over = [Ends(*map(median, zip(*column, strict=True))) for column in zip(*rows, strict=True)]
    restart_s, slowest_s = over[-1].seconds, max(row[-1].seconds for row in rows)
    shown = table(
        ["phase", "over after s", "CPU s of a rank"],
        [
            [name, f"{ends.seconds:.2f}", f"{ends.cpu_s:.2f}"]
            for name, ends in zip(PHASES, over, strict=True)
        ],
    )
    text = (
        f"`python benchmarks/bench_restart.py --deaths {options.deaths}`. "
        f"{conditions(load_before)} Medians over the deaths:\n\n{shown}\n\n"
        f"From the command line to the first step: {start_s:.2f} s. "
        f"From a death to the next step: {restart_s:.2f} s, "
        f"{restart_s / start_s:.2f} of it (slowest {slowest_s:.2f} s).\n"
    )
    print(text)
    if options.write_docs:
        write_section("restart", text)
    return 0


def plan_of_the_demo(folder: Path) -> Path:
    """The plan of `mmplan solve --solver distmm --devices 2`, with an analytic profile."""
    profile = folder / "profile.json"
    workload, cluster = load_workload(WORKLOAD), load_cluster("cpu-2")
    save_document(analytic_profile(workload, WORKLOAD.parent, cluster), profile)
    return planned(WORKLOAD, profile, devices=RANKS, solver="distmm")[0]


def _measured(plan: Path, run_dir: Path, deaths: int) -> tuple[float, list[list[Ends]]]:
    """Seconds to the first step, and for each death when each phase was over."""
    options = {"run-dir": run_dir, "steps": 10**6, "save-every": SAVE_EVERY, "max-restarts": deaths}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    began = time.monotonic()
    process = subprocess.Popen(
        [Path(sys.executable).with_name("mmlaunch"), "run", plan, *arguments],
        stdout=subprocess.DEVNULL,
    )
    run = Run(folder=run_dir)
    try:
        wait_for(process, lambda: run.steps() > 0)
        start_s = time.monotonic() - began
        rows = [_death(process, run, number % RANKS) for number in range(deaths)]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    return start_s, rows


def _death(process: subprocess.Popen[bytes], run: Run, victim: int) -> list[Ends]:
    """Kill a rank in the middle of a step; when each phase was over."""
    # Far enough from the checkpoint that the next one does not come first.
    wait_for(process, lambda: run.saved() > 0 and run.steps() % SAVE_EVERY == SAVE_EVERY // 2)
    shots = run.shots()
    before = {shot.process for shot in shots}
    target = shots[victim].process
    assert target is not None
    saved = run.saved()
    os.kill(target.pid, signal.SIGKILL)
    killed_s = time.monotonic()
    over: list[Ends] = []

    def wait(condition: Callable[[], bool]) -> None:
        wait_for(process, condition)
        new = {shot.process for shot in run.shots()} - before
        cpu_s = max((_cpu_s(process.pid) for process in new if process is not None), default=0.0)
        over.append(Ends(time.monotonic() - killed_s, cpu_s))

    def all_ranks(condition: Callable[[Snapshot], bool]) -> Callable[[], bool]:
        return lambda: all(
            shot.process is not None and shot.process not in before and condition(shot)
            for shot in run.shots()
        )

    wait(lambda: all(shot.process is None or shot.process not in before for shot in run.shots()))
    wait(all_ranks(lambda shot: True))
    wait(all_ranks(lambda shot: shot.where.instruction not in ("importing", "joining")))
    loading = f"loading step-{saved}"
    wait(all_ranks(lambda shot: shot.where.instruction == loading or shot.where.step >= 0))
    wait(all_ranks(lambda shot: shot.where.step >= 0))
    wait(all_ranks(lambda shot: shot.where.step > saved))
    return over


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_for(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit("the run does not go on")
        time.sleep(LOOK_S)


if __name__ == "__main__":
    sys.exit(main())
