"""Predicted against measured iteration time.

    python benchmarks/bench_prediction.py [--processes 2,4] [--runs 5] [--steps 8] [--write-docs]

Profiles each workload, solves it, runs the plan several times with ``mmlaunch run``, and
compares ``predicted.iteration_s`` with the runs' own ``metrics.jsonl``: the median step of
each run after the warm-up, then the median over the runs. Exits with 1 where processes
have a core each and the prediction is further off than ``--tolerance``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from page import conditions, table, write_section
from planning import described, profiled, solved

from mmplan.errors import InfeasibleError, MMPlanError, RunFailedError
from mmplan.schema.plan import Plan

WARM_UP = 2
WORKLOADS = ("balanced", "uneven", "frozen")
SOLVERS = ("auto", "distmm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One plan.

    Attributes:
        label: workload, processes and plan, in words.
        profiled_with: processes that measured the profile at the same time.
        crowded: whether the processes outnumber the cores.
        runs_s: median step of each run.
    """

    label: str
    profiled_with: int
    crowded: bool
    predicted_s: float
    runs_s: tuple[float, ...]

    @property
    def measured_s(self) -> float:
        """Median over the runs."""
        return statistics.median(self.runs_s)

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_s / self.measured_s


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mmplan-bench-") as folder:
        entries = [
            entry
            for processes in map(int, options.processes.split(","))
            for name in _names(processes, options)
            for entry in _entries(name, processes, options, Path(folder))
        ]
    text = f"{_table(entries)}\n\n{_verdict(entries, options.tolerance)}"
    where = conditions(load_before)
    print(f"\n{text}\n\n{where}")
    if options.write_docs:
        command = (
            f"`python benchmarks/bench_prediction.py --processes {options.processes} "
            f"--runs {options.runs} --steps {options.steps} --workloads {options.workloads}`"
        )
        write_section("prediction", f"{command}. {where}\n\n{text}")
    return int(any(_is_off(entry, options.tolerance) for entry in entries))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", default="2,4", help="numbers of processes")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help=f"a run's, {WARM_UP} of them warm up")
    parser.add_argument("--workloads", default="balanced,frozen", help=f"of {','.join(WORKLOADS)}")
    parser.add_argument("--tolerance", type=float, default=0.15, help="of predicted / measured")
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args(arguments)
    unknown = set(options.workloads.split(",")) - set(WORKLOADS)
    if unknown or options.runs < 1 or options.steps <= WARM_UP:
        parser.error(
            f"unknown: {unknown}" if unknown else f"one run and {WARM_UP + 1} steps at least"
        )
    return options


def _names(processes: int, options: argparse.Namespace) -> list[str]:
    """Crowded, one workload shows what there is to see."""
    names: list[str] = options.workloads.split(",")
    return names[:1] if processes > (os.cpu_count() or 1) else names


def _entries(name: str, processes: int, options: argparse.Namespace, folder: Path) -> list[Entry]:
    """Runs of each solver's plan; crowded, the first plan under two profiles.

    A profile measured with as many processes as will run knows what sharing a core costs.
    """
    cores = os.cpu_count() or 1
    crowded = processes > cores
    made: list[Entry] = []
    plans: list[Plan] = []
    for measurers in sorted({min(processes, cores), processes}):
        profile = _profile(name, measurers, folder)
        for solver in SOLVERS[:1] if crowded else SOLVERS:
            try:
                path, plan = solved(name, profile, devices=processes, solver=solver)
            except InfeasibleError as error:
                print(f"{name}: {solver} has no plan: {error.message}", file=sys.stderr)
                continue
            if not crowded and plan.units in [known.units for known in plans]:
                continue
            plans.append(plan)
            made.append(
                Entry(
                    label=f"{name}, {processes} processes: {described(plan)}",
                    profiled_with=measurers,
                    crowded=crowded,
                    predicted_s=plan.predicted.iteration_s,
                    runs_s=tuple(
                        _run(path, folder / f"{path.stem}-{measurers}-{run}", options.steps)
                        for run in range(options.runs)
                    ),
                )
            )
            print(_line(made[-1]), file=sys.stderr)
    return made


def _profile(name: str, measurers: int, folder: Path) -> Path:
    path = folder / f"{name}-{measurers}.profile.json"
    if not path.exists():
        print(f"{name}: profiling with {measurers} processes", file=sys.stderr)
        path = profiled(name, folder, num_processes=measurers, quick=False)
    return path


def _run(plan: Path, run_dir: Path, steps: int) -> float:
    """Median seconds of one run's steps after the warm-up."""
    code = "from cli import mmlaunch_main; mmlaunch_main()"
    arguments = ["run", str(plan), "--steps", str(steps), "--run-dir", str(run_dir), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RunFailedError(f"mmlaunch run ended with {done.returncode}: {done.stderr[-2000:]}")
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return statistics.median(json.loads(line)["iteration_s"] for line in lines[WARM_UP:])


def _table(entries: Sequence[Entry]) -> str:
    return table(
        ("plan", "profiled with", "predicted s", "measured s", "runs", "predicted / measured"),
        [
            (
                entry.label,
                f"{entry.profiled_with} processes",
                f"{entry.predicted_s:.3f}",
                f"{entry.measured_s:.3f}",
                f"{min(entry.runs_s):.3f} to {max(entry.runs_s):.3f}",
                f"{entry.ratio:.2f}",
            )
            for entry in entries
        ],
    )


def _line(entry: Entry) -> str:
    return (
        f"{entry.label}: predicted {entry.predicted_s:.3f} s, measured {entry.measured_s:.3f} s, "
        f"{entry.ratio:.2f}"
    )


def _is_off(entry: Entry, tolerance: float) -> bool:
    return not entry.crowded and not 1 - tolerance <= entry.ratio <= 1 + tolerance


def _verdict(entries: Sequence[Entry], tolerance: float) -> str:
    """What the numbers say, computed from them."""
    own = [entry for entry in entries if not entry.crowded]
    crowded = [entry for entry in entries if entry.crowded]
    lines: list[str] = []
    if own:
        off = sum(_is_off(entry, tolerance) for entry in own)
        lines.append(
            f"With a core for each process {len(own) - off} of {len(own)} predictions are within "
            f"{100 * tolerance:.0f}% of the measured time."
        )
    if crowded:
        fewest = min(entry.profiled_with for entry in crowded)
        alone = [e.ratio for e in crowded if e.profiled_with == fewest]
        same = [e.ratio for e in crowded if e.profiled_with > fewest]
        lines.append(
            "Where processes outnumber the cores they take turns, which no profile of one "
            f"process a core shows: predicted / measured is {_spread(alone)} with a profile of "
            f"{fewest} processes at a time, and {_spread(same)} when as many measured together "
            "as run (`mmplan profile --nproc`): then an instruction costs what it costs while "
            "all others compute, but ranks that wait in the real run leave their core to others."
        )
    return " ".join(lines)


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return "not measured"
    low, high = min(ratios), max(ratios)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MMPlanError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)
