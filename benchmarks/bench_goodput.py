"""How much of its time a run trains that something happens to every minute.

    python benchmarks/bench_goodput.py [--minutes 20] [--write-docs]

Two ranks train examples/clip-digits with `--async-save --save-every 20 --max-restarts`. In every
minute, at a second drawn by a seed, one of the faults below happens. Only where the launcher dies
does this script start it again, with `--resume`, as a supervisor does. Goodput is the steps that
count x the median step of a run without faults, over the seconds from the first command to the
end. A fault's recovery ends with the first step that the run had not done before; its CPU seconds
are the machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench_restart import LOOK_S, Run, plan_of_the_demo, wait_for
from page import conditions, table, write_section

SAVE_EVERY = 20
PERIOD_S = 60.0
# A fault comes so late in its minute at most: the recovery is over before the next one.
LATEST_S = 40.0
UNDISTURBED_S = 60.0
STOPPED_S = 2.0


@dataclass
class Job:
    """A run, its launcher as a process, and the faults that can happen to it."""

    plan: Path
    run: Run
    draw: random.Random
    process: subprocess.Popen[bytes]

    def rank_killed(self) -> None:
        os.kill(self._a_rank(), signal.SIGKILL)

    def rank_stopped(self) -> None:
        victim = self._a_rank()
        os.kill(victim, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(victim, signal.SIGCONT)

    def checkpoint_flipped(self) -> None:
        """One bit of the newest one; then a rank dies."""
        folder = self.run.folder / "checkpoints" / f"step-{self.run.saved()}"
        with min(folder.glob("*.safetensors")).open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            byte = file.read(1)
            file.seek(-100, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
        self.rank_killed()

    def launcher_killed(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process = started(self.plan, self.run.folder, "--resume")

    def _a_rank(self) -> int:
        # One that is there: after a fault some are new.
        while True:
            found = [shot.process.pid for shot in self.run.shots() if shot.process is not None]
            if found:
                return self.draw.choice(found)
            time.sleep(LOOK_S)


FAULTS: dict[str, Callable[[Job], None]] = {
    "a rank is killed": Job.rank_killed,
    f"a rank is stopped for {STOPPED_S:g} s": Job.rank_stopped,
    "a bit of the newest checkpoint is flipped, a rank is killed": Job.checkpoint_flipped,
    "the launcher is killed": Job.launcher_killed,
}


def started(plan: Path, run_dir: Path, *more: str) -> subprocess.Popen[bytes]:
    """The command of a user."""
    options = {"run-dir": run_dir, "steps": 10**6, "save-every": SAVE_EVERY}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    return subprocess.Popen(
        [
            Path(sys.executable).with_name("mmlaunch"),
            *("run", plan, "--async-save", "--max-restarts=1000", *arguments, *more),
        ],
        stdout=subprocess.DEVNULL,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=int, default=20)
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mmplan-bench-") as name:
        folder = Path(name)
        plan = plan_of_the_demo(folder)
        step_s = _undisturbed(plan, folder / "undisturbed")
        steps, wall_s, rows = _disturbed(plan, folder / "disturbed", options.minutes)
    shown = table(
        ["fault", "times", "recovery s", "slowest s", "CPU s"],
        [
            [
                kind,
                str(len(own)),
                f"{median(row[0] for row in own):.2f}",
                f"{max(row[0] for row in own):.2f}",
                f"{median(row[1] for row in own):.2f}",
            ]
            for kind, own in rows.items()
        ],
    )
    text = (
        f"`python benchmarks/bench_goodput.py --minutes {options.minutes}`. "
        f"{conditions(load_before)} Medians over the faults of a kind:\n\n"
        f"{shown}\n\n"
        f"{steps} steps in {wall_s:.0f} s; without faults a step takes {1e3 * step_s:.1f} ms "
        f"(median): goodput {steps * step_s / wall_s:.3f}.\n"
    )
    print(text)
    if options.write_docs:
        write_section("goodput", text)
    return 0


def _undisturbed(plan: Path, run_dir: Path) -> float:
    """Median seconds of a step."""
    process, run = started(plan, run_dir), Run(folder=run_dir)
    try:
        wait_for(process, lambda: run.steps() > 0)
        time.sleep(UNDISTURBED_S)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return median(
        sum(step[part] for part in ("data_s", "iteration_s", "update_s"))
        for step in map(json.loads, lines)
    )


def _disturbed(
    plan: Path, run_dir: Path, minutes: int
) -> tuple[int, float, dict[str, list[tuple[float, float]]]]:
    """Steps that count, wall seconds, and each kind's recoveries in seconds and CPU seconds."""
    draw = random.Random(0)
    rows: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    began_s = time.monotonic()
    job = Job(plan, Run(folder=run_dir), draw, started(plan, run_dir))
    run = job.run
    try:
        for minute in range(minutes):
            at_s = began_s + minute * PERIOD_S + draw.uniform(PERIOD_S - LATEST_S, LATEST_S)
            time.sleep(max(0.0, at_s - time.monotonic()))
            wait_for(job.process, lambda: run.saved() > 0)
            kind = list(FAULTS)[minute % len(FAULTS)]
            cpu_s, happened_s = _cpu_s(), time.monotonic()
            FAULTS[kind](job)
            # A step may have ended while it happened.
            before = run.steps()
            wait_for(job.process, lambda before=before: run.steps() > before)
            rows[kind].append((time.monotonic() - happened_s, _cpu_s() - cpu_s))
            print(f"minute {minute}: {kind}, {rows[kind][-1][0]:.2f} s", file=sys.stderr)
        time.sleep(max(0.0, began_s + minutes * PERIOD_S - time.monotonic()))
        return run.steps(), time.monotonic() - began_s, dict(rows)
    finally:
        job.process.send_signal(signal.SIGTERM)
        job.process.wait()


def _cpu_s() -> float:
    """Seconds that the machine's cores have worked."""
    fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()
    user, nice, system = map(int, fields[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
