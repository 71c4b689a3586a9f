"""Predicted against measured iteration time and memory, for the plans of all systems.

    python benchmarks/bench_prediction.py [--devices 2] [--rounds 3] [--steps 8] [--seconds 8]
        [--workloads a,b] [--solvers A,B] [--write-docs]

Plans come from a profile of this machine's processes. Machines get faster and slower while
others use them too, so a round profiles anew, predicts every plan under that profile and runs
it right after; what is told is the median over the rounds of predicted over measured. Memory
is measured in a run of its own, with a malloc that keeps nothing for later; with --rounds 0 it
alone is.

A profile counts the processor's time. On a virtual machine a run also waits while the host gives a
core to others ("steal"): the share of the core that lost most is told, and the error without it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from agreement import (
    EXPLAINED,
    Entry,
    does_the_same,
    errors,
    memory_table,
    plans_table,
    ranking_table,
)
from page import conditions, write_section
from planning import planned, profiled_file, workload_path

from mmplan.errors import MMPlanError, RunFailedError
from mmplan.planning import planner
from mmplan.simulation.peak_memory import MAX_BATCHES, ExpectedMemory
from mmplan.simulation.predict import plan_costs, simulate_plan

WARM_UP = 4
WORKLOADS = ("large", "frozen", "chain", "tasks")
# Place of a core's column in /proc/stat.
STEAL = 7
# malloc maps what is larger and gives it back at once (mallopt(3)). What is smaller leaves holes:
# with the usual 128 KiB up to a tenth of what a rank holds of small micro-batches.
EAGER_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "16384"}


def entries(name: str, options: argparse.Namespace, folder: Path) -> list[Entry]:
    """Every plan of a workload, run once in each round."""
    path, first = workload_path(name), folder / f"{name}-0.json"
    found = _plans(name, first, options)
    for number in range(options.rounds):
        profile = folder / f"{name}-{number}.json"
        if number:
            profiled_file(path, profile, num_processes=options.devices)
        # Another plan begins each round, so that none is always next to its profile.
        for at in range(len(found)):
            entry, plan_path = found[(at + number) % len(found)]
            entry.predicted_s.append(simulate_plan(entry.plan, plan_path, profile).iteration_s)
            run_dir = plan_path.with_suffix(f".{number}")
            steps = max(options.steps, math.ceil(options.seconds / entry.predicted_s[-1]))
            entry.taken.append(_run(plan_path, run_dir, WARM_UP + steps))
            entry.found_s.append(_step_seconds(run_dir))
            print(entry, file=sys.stderr)
    for entry, plan_path in found:
        run_dir = plan_path.with_suffix(".memory")
        _run(plan_path, run_dir, MAX_BATCHES, EAGER_MALLOC)
        record = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
        held = {int(rank): value for rank, value in record["memory_bytes"].items() if value}
        peaks = ExpectedMemory(plan_costs(entry.plan, plan_path, first)).peaks()
        planned = entry.plan.predicted.memory_bytes
        entry.held = [peaks[rank].total / value for rank, value in held.items()]
        entry.planned = [planned[rank] / value for rank, value in held.items()]
    return [entry for entry, _ in found]


def _plans(name: str, profile: Path, options: argparse.Namespace) -> list[tuple[Entry, Path]]:
    """The different plans of all systems, with their files."""
    path = workload_path(name)
    profiled_file(path, profile, num_processes=options.devices)
    found: list[tuple[Entry, Path]] = []
    for solver in options.solvers.split(","):
        try:
            plan_path, plan = planned(path, profile, devices=options.devices, solver=solver)
        except MMPlanError as error:
            print(f"{name}: {solver}: {error.message}", file=sys.stderr)
            continue
        same = next((entry for entry, _ in found if does_the_same(plan, entry.plan)), None)
        if same is not None:
            same.solvers.append(solver)
            continue
        how = f"{options.devices} measured"
        found.append((Entry(workload=name, how=how, solvers=[solver], plan=plan), plan_path))
    return found


def _run(plan: Path, run_dir: Path, steps: int, extra: dict[str, str] | None = None) -> float:
    """Run a plan; returns the largest share of a core that the host took in the timed steps."""
    code = "from cli import mmlaunch_main; mmlaunch_main()"
    arguments = ["run", str(plan), "--steps", str(steps), "--run-dir", str(run_dir), "--json"]
    taken = {0: _taken()}
    with tempfile.TemporaryFile("w+") as said:
        run = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=said,
            env=os.environ | (extra or {}),
        )
        while run.poll() is None:
            taken.setdefault(len(_lines(run_dir)), _taken())
            time.sleep(0.1)
        if run.returncode:
            said.seek(0)
            end = said.read()[-2000:]
            raise RunFailedError(f"mmlaunch run ended with {run.returncode}: {end}")
    (began_s, before), *_, (ended_s, after) = [t for n, t in taken.items() if n >= WARM_UP]
    return max((b - a for a, b in zip(before, after, strict=True)), default=0) / (ended_s - began_s)


def _taken() -> tuple[float, list[float]]:
    """The time, and the seconds of each core that the host has had; none where no one says."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return time.monotonic(), []
    cores = re.findall(r"^cpu\d+ (.*)$", stat.read_text(encoding="ascii"), re.MULTILINE)
    ticks = os.sysconf("SC_CLK_TCK")
    return time.monotonic(), [int(core.split()[STEAL]) / ticks for core in cores]


def _lines(run_dir: Path) -> list[str]:
    """Of a run's steps."""
    path = run_dir / "metrics.jsonl"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _step_seconds(run_dir: Path) -> float:
    """Median seconds of a run's steps after the warm-up, without the update."""
    return statistics.median(json.loads(line)["iteration_s"] for line in _lines(run_dir)[WARM_UP:])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of a run at least, after its warm-up")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a run's steps, about")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    systems = ",".join(planner.SOLVERS | planner.BASELINES)
    parser.add_argument("--solvers", default=systems)
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args(arguments)
    if options.rounds < 0 or options.steps < 1:
        parser.error("no round or more, and one step at least")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mmplan-bench-") as folder:
        names = options.workloads.split(",")
        found = [entry for name in names for entry in entries(name, options, Path(folder))]
    where = conditions(load_before)
    command = f"`python benchmarks/bench_prediction.py --devices {options.devices} --rounds "
    sections = {"memory": (f"{command}0 --workloads {options.workloads}`", memory_table(found))}
    if options.rounds:
        tables = [plans_table(found), ranking_table(found), errors("Measured", found), EXPLAINED]
        command += (
            f"{options.rounds} --seconds {options.seconds:g} --workloads {options.workloads}`"
        )
        sections = {"prediction": (command, "\n\n".join(tables)), **sections}
    for name, (how, text) in sections.items():
        print(f"{text}\n\n{where}\n")
        if options.write_docs:
            write_section(name, f"{how}. {where}\n\n{text}")


if __name__ == "__main__":
    try:
        main()
    except MMPlanError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)
