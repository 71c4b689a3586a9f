"""Training steps: planned batch-sync against DistributedDataParallel and FSDP2.

    python benchmarks/bench_training.py [--processes 2,4] [--pairs 5] [--steps 2] [--write-docs]

Each row is one launch: all systems live in the same processes, take the same samples from
the same initial weights, and are timed in turns, so that what else the machine does hits
all alike. Before timing, the losses of the first steps must agree. Ratios are medians of
pairs: a system's median step over the plan's, of the same turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from overhead import measure_overhead
from page import conditions, table, write_section
from peers import Race, RaceResult
from planning import described, profiled, solved, workload_path

from mmlaunch.launch.launch import launch
from mmplan.errors import InfeasibleError, MMPlanError
from mmplan.schema.plan import Plan
from mmplan.schema.workload import load_workload

WORKLOADS = {
    "balanced": "two towers of equal size",
    "uneven": "an image tower four times the text tower",
    "frozen": "a frozen image tower (forward only) beside half its blocks that train",
}
# Replicas of the colocated plan sum gradients, whatever the others choose.
SOLVERS = ("auto", "distmm", "colocated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One system on one workload with one number of processes."""

    system: str
    median_s: float
    cpu_s: float
    samples_per_s: float
    ratio: float
    ratio_min: float
    ratio_max: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    load_before = os.getloadavg()[0]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mmplan-bench-") as folder:
        sections = [
            text
            for name in options.workloads.split(",")
            for text in _workload(name, options, Path(folder))
        ]
        sections.append(measure_overhead(Path(folder)))
    where = conditions(load_before)
    print(f"\n{where}\n{time.monotonic() - began:.0f} s in all")
    if options.write_docs:
        command = f"`python benchmarks/bench_training.py{_shown(options)}`"
        write_section("training", "\n\n".join([f"{command}. {where}", *sections]))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", default="2,4", help="numbers of processes")
    parser.add_argument("--pairs", type=int, default=5, help="turns of every system")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a turn")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="some of these")
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args(arguments)
    unknown = set(options.workloads.split(",")) - set(WORKLOADS)
    if unknown or options.pairs < 1 or options.steps < 1:
        parser.error(f"unknown: {unknown}" if unknown else "at least one pair and one step")
    return options


def _shown(options: argparse.Namespace) -> str:
    return f" --processes {options.processes} --pairs {options.pairs} --steps {options.steps}" + (
        f" --workloads {options.workloads}" if options.workloads != ",".join(WORKLOADS) else ""
    )


def _workload(name: str, options: argparse.Namespace, folder: Path) -> list[str]:
    """Profile once, then race with each number of processes."""
    print(f"{name}: profiling", file=sys.stderr)
    profile = profiled(name, folder, rounds=1)
    return [
        _race(name, profile, int(text), options, folder) for text in options.processes.split(",")
    ]


def _race(
    name: str, profile: Path, processes: int, options: argparse.Namespace, folder: Path
) -> str:
    plans, notes = _plans(name, profile, processes)
    print(f"{name}: {processes} processes", file=sys.stderr)
    results = launch(
        entry="peers:race",
        args=(
            Race(
                workload=str(workload_path(name)),
                plans={label: str(path) for label, (path, _) in plans.items()},
                pairs=options.pairs,
                steps=options.steps,
            ),
        ),
        num_ranks=processes,
        run_dir=folder / f"run-{name}-{processes}",
        timeout_s=120.0,
    )
    result = RaceResult(**results[0])
    entries = summarise(result, batch=load_workload(workload_path(name)).batch)
    cores = os.cpu_count() or 1
    crowd = f", on {cores} cores" if processes > cores else ""
    text = "\n".join(
        [
            f"### {name}: {WORKLOADS[name]}; {processes} processes{crowd}",
            "",
            _entries_table(entries),
            "",
            *(f"- `{label}`: {described(plan)}." for label, (_, plan) in plans.items()),
            *(f"- {note}" for note in notes),
        ]
    )
    print(f"\n{text}", flush=True)
    return text


def _plans(
    name: str, profile: Path, processes: int
) -> tuple[dict[str, tuple[Path, Plan]], list[str]]:
    """The plan of each solver; a solver that chose another's plan is not timed twice."""
    plans: dict[str, tuple[Path, Plan]] = {}
    notes: list[str] = []
    for solver in SOLVERS:
        try:
            path, plan = solved(name, profile, devices=processes, solver=solver)
        except InfeasibleError as error:
            notes.append(f"`{solver}`: no plan: {error.message}.")
            continue
        same = next((label for label, (_, p) in plans.items() if p.units == plan.units), None)
        if same is None:
            plans[solver] = path, plan
        else:
            notes.append(f"`{solver}` chose the same plan as `{same}`.")
    return plans, notes


def summarise(result: RaceResult, *, batch: int) -> list[Entry]:
    """Medians, and ratios to the first system, turn by turn."""
    base = [statistics.median(turn) for turn in next(iter(result.seconds.values()))]
    entries: list[Entry] = []
    for system, turns in result.seconds.items():
        medians = [statistics.median(turn) for turn in turns]
        ratios = [mine / ours for mine, ours in zip(medians, base, strict=True)]
        median_s = statistics.median(second for turn in turns for second in turn)
        entries.append(
            Entry(
                system=system,
                median_s=median_s,
                cpu_s=statistics.median(c for turn in result.cpu_s[system] for c in turn),
                samples_per_s=batch / median_s,
                ratio=statistics.median(ratios),
                ratio_min=min(ratios),
                ratio_max=max(ratios),
            )
        )
    return entries


def _entries_table(entries: Sequence[Entry]) -> str:
    ours = entries[0].system
    return table(
        (
            "system",
            "median s/step",
            "samples/s",
            f"time / {ours}'s",
            "least to most of the pairs",
            "processor s/step",
        ),
        [
            (
                entry.system,
                f"{entry.median_s:.3f}",
                f"{entry.samples_per_s:.1f}",
                f"{entry.ratio:.2f}",
                f"{entry.ratio_min:.2f} to {entry.ratio_max:.2f}",
                f"{entry.cpu_s:.3f}",
            )
            for entry in entries
        ],
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MMPlanError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
