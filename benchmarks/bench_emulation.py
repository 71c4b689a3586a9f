"""Predicted against emulated and measured iteration time, for the plans of all systems.

    python benchmarks/bench_emulation.py [--measured 2] [--devices 4,8] [--workloads a,b,c]
        [--solvers A,B] [--write-docs]

Emulated: each workload gets an analytic profile of slow devices (so that processes have time to
spare on few cores), is planned by every system, and every plan is run with ``mmlaunch run
--emulate``: real processes, messages and reductions over loopback, waits for computes. What this
tests is the order of things, not the times of computes. Measured: a profile of this machine's
processes, and real steps. Beside the errors stand the rank correlation of predicted and found
times over a workload's plans, and the regret: the time of the plan that prediction chooses over
the least of all. Systems that make the same plan share a line.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from page import conditions, table, write_section
from planning import profiled_file
from scipy.stats import spearmanr

from mmlaunch.trial import step_seconds
from mmplan import planner
from mmplan.errors import MMPlanError
from mmplan.predict import compute_timings, plan_costs
from mmplan.profiling.analytic import analytic_profile
from mmplan.schema.base import save_document
from mmplan.schema.cluster import Cluster
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile, load_profile
from mmplan.schema.workload import load_workload

EXAMPLES = Path(__file__).parent.parent / "examples"
WORKLOADS = ("clip-digits", "mllm-digits", "multitask-digits")
# Steps that are timed closer than this are equal: a machine's noise is no ranking.
SAME = 0.02


@dataclass(slots=True, kw_only=True)
class Entry:
    """One plan, predicted and run.

    Attributes:
        solvers: that made it.
        found_s: emulated or measured.
    """

    workload: str
    devices: int
    measured: bool
    solvers: list[str] = field(default_factory=list)
    plan: Plan
    found_s: float

    @property
    def predicted_s(self) -> float:
        """Of the plan."""
        return self.plan.predicted.iteration_s

    @property
    def ratio(self) -> float:
        """Predicted over found."""
        return self.predicted_s / self.found_s

    @property
    def how(self) -> str:
        """Ranks and how it was run."""
        return f"{self.devices} {'measured' if self.measured else 'emulated'}"


def slow_cluster(flops: float) -> Cluster:
    """Devices of so many FLOP/s, joined by links as loopback is."""
    link = {"latency_s": 5e-4, "bandwidth_bytes_per_s": 5e8}
    device = {"name": "cpu", "memory_bytes": 4e9, "peak_flops": flops, "type": "cpu"}
    document = {"version": 1, "name": "slow", "nodes": 1, "devices_per_node": 1}
    return Cluster.model_validate(document | {"device": device, "links": {"intra_node": link}})


def entries(options: argparse.Namespace, folder: Path) -> Iterator[Entry]:
    """All plans of all workloads."""
    for name in options.workloads.split(","):
        runs = [(n, True) for n in _numbers(options.measured)]
        runs += [(n, False) for n in _numbers(options.devices)]
        for devices, measured in runs:
            path = folder / f"{name}-{devices}-{measured}.profile.json"
            if measured:
                profiled_file(EXAMPLES / name / "workload.yaml", path, num_processes=devices)
            else:
                workload = load_workload(EXAMPLES / name / "workload.yaml")
                cluster = slow_cluster(options.flops)
                save_document(analytic_profile(workload, EXAMPLES / name, cluster), path)
            yield from _plans(name, devices, measured, path, options.solvers.split(","))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _plans(
    name: str, devices: int, measured: bool, profile_path: Path, solvers: Sequence[str]
) -> list[Entry]:
    """Every plan of a workload on so many ranks, each run once."""
    path = EXAMPLES / name / "workload.yaml"
    profile = load_profile(profile_path)
    found: list[Entry] = []
    for solver in solvers:
        plan_path = profile_path.with_suffix(f".{solver}.json")
        try:
            plan = _solved(path, profile, profile_path, plan_path, devices, solver)
        except MMPlanError as error:
            print(f"{name}, {devices}: {solver}: {error.message}", file=sys.stderr)
            continue
        same = next((entry for entry in found if _does_the_same(plan, entry.plan)), None)
        if same is not None:
            same.solvers.append(solver)
            continue
        save_document(plan, plan_path)
        timings = None if measured else compute_timings(plan_costs(plan, plan_path))
        seconds = step_seconds(plan, plan_path, workload=path, emulation=timings)
        found.append(
            Entry(
                workload=name,
                devices=devices,
                measured=measured,
                solvers=[solver],
                plan=plan,
                found_s=seconds,
            )
        )
        print(_line(found[-1]), file=sys.stderr)
    return found


def _solved(
    path: Path, profile: Profile, profile_path: Path, plan_path: Path, devices: int, solver: str
) -> Plan:
    return planner.solve(
        load_workload(path),
        workload_path=path,
        profile=profile,
        profile_path=profile_path,
        plan_path=plan_path,
        devices=devices,
        solver=solver,
    )


def _does_the_same(plan: Plan, other: Plan) -> bool:
    """Whether two plans differ in nothing that is executed."""
    named = {"name", "solver", "predicted"}
    return plan.model_dump(exclude=named) == other.model_dump(exclude=named)


def _line(entry: Entry) -> str:
    return (
        f"{entry.workload}, {entry.how}, {entry.solvers[0]}: predicted "
        f"{entry.predicted_s:.3f} s, found {entry.found_s:.3f} s, {entry.ratio:.3f}"
    )


def report(found: Sequence[Entry]) -> str:
    """The tables."""
    plans = table(
        ["workload, ranks", "systems", "predicted", "found", "ratio"],
        [
            [
                f"{entry.workload}, {entry.how}",
                ", ".join(entry.solvers),
                f"{entry.predicted_s:.3f} s",
                f"{entry.found_s:.3f} s",
                f"{entry.ratio:.3f}",
            ]
            for entry in found
        ],
    )
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in found:
        groups.setdefault((entry.workload, entry.how), []).append(entry)
    ranking = table(
        ["workload, ranks", "systems", "plans", "rank correlation", "regret"],
        [
            [
                f"{name}, {how}",
                str(sum(len(entry.solvers) for entry in group)),
                str(len(group)),
                _correlation(group),
                _regret(group),
            ]
            for (name, how), group in groups.items()
        ],
    )
    lines = [
        _errors(how, [e for e in found if e.measured == measured])
        for measured, how in ((False, "Emulated"), (True, "Measured"))
    ]
    together = (
        f"Plans whose found times are within {SAME:.0%} of each other count as equal in the rank "
        "correlation."
    )
    return "\n\n".join([plans, ranking, *filter(None, lines), together])


def _errors(how: str, found: Sequence[Entry]) -> str:
    if not found:
        return ""
    errors = [abs(1 / entry.ratio - 1) for entry in found]
    return (
        f"{how} differs from predicted by {statistics.median(errors):.1%} in the median, "
        f"{max(errors):.1%} at worst ({len(found)} plans)."
    )


def _correlation(group: Sequence[Entry]) -> str:
    """Spearman's, over plans whose times differ by more than noise."""
    if len(group) < 2:
        return "-"
    predicted = _tied([entry.predicted_s for entry in group])
    found = _tied([entry.found_s for entry in group])
    if len(set(predicted)) == 1 or len(set(found)) == 1:
        return "all equal" if len(set(predicted)) == len(set(found)) else "-"
    result: Any = spearmanr(predicted, found)
    return f"{result.statistic:.2f}"


def _tied(seconds: Sequence[float]) -> list[int]:
    """The rank of each time; one within SAME of the first of its rank has that rank too."""
    ranks: dict[int, int] = {}
    first, rank = 0.0, 0
    for index in sorted(range(len(seconds)), key=lambda i: seconds[i]):
        if seconds[index] > first * (1 + SAME):
            first, rank = seconds[index], rank + 1
        ranks[index] = rank
    return [ranks[index] for index in range(len(seconds))]


def _regret(group: Sequence[Entry]) -> str:
    chosen = min(group, key=lambda entry: entry.predicted_s)
    return f"{chosen.found_s / min(entry.found_s for entry in group) - 1:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", default="4,8", help="ranks to emulate")
    parser.add_argument("--measured", default="2", help="ranks to run for real")
    systems = ",".join(planner.SOLVERS | planner.BASELINES)
    parser.add_argument("--solvers", default=systems)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--flops", type=float, default=5e8, help="of a device, a second")
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mmplan-bench-") as folder:
        found = list(entries(options, Path(folder)))
    text, where = report(found), conditions(load_before)
    print(f"{text}\n\n{where}")
    if options.write_docs:
        command = (
            f"`python benchmarks/bench_emulation.py --measured {options.measured} --devices "
            f"{options.devices} --workloads {options.workloads} --flops {options.flops:g}`"
        )
        heading = "## Predicted against emulated and measured"
        write_section("emulation", f"{heading}\n\n{command}. {where}\n\n{text}")


if __name__ == "__main__":
    main()
