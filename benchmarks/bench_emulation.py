"""Predicted against emulated iteration time, with more ranks than there are cores.

    python benchmarks/bench_emulation.py [--devices 4,8] [--steps 6] [--workloads a,b,c]
        [--write-docs]

Each workload gets an analytic profile of slow devices (so that processes have time to spare on
few cores), is planned by several solvers, and every plan is run with ``mmlaunch run --emulate``:
real processes, messages and reductions over loopback, waits for computes. What this tests is the
order of things, not the times of computes. Beside the errors stand the rank correlation of
predicted and emulated times over a workload's plans, and the regret: the emulated time of the
plan that prediction chooses over the least of all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from page import conditions, table, write_section
from scipy.stats import spearmanr

from mmlaunch.trial import step_seconds
from mmplan import planner
from mmplan.errors import MMPlanError
from mmplan.predict import compute_timings, plan_costs
from mmplan.profiling.analytic import analytic_profile
from mmplan.schema.base import save_document
from mmplan.schema.cluster import Cluster
from mmplan.schema.plan import Plan
from mmplan.schema.workload import load_workload

EXAMPLES = Path(__file__).parent.parent / "examples"
WORKLOADS = ("clip-digits", "mllm-digits", "multitask-digits")
SOLVERS = ("auto", "distmm", "convex", "mpsp", "colocated", "megatron", "ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One plan, predicted and emulated."""

    workload: str
    devices: int
    solver: str
    predicted_s: float
    emulated_s: float

    @property
    def ratio(self) -> float:
        """Predicted over emulated."""
        return self.predicted_s / self.emulated_s


def slow_cluster(flops: float) -> Cluster:
    """Devices of so many FLOP/s, joined by links as loopback is."""
    link = {"latency_s": 5e-4, "bandwidth_bytes_per_s": 5e8}
    device = {"name": "cpu", "memory_bytes": 4e9, "peak_flops": flops, "type": "cpu"}
    document = {"version": 1, "name": "slow", "nodes": 1, "devices_per_node": 1}
    return Cluster.model_validate(document | {"device": device, "links": {"intra_node": link}})


def entries(options: argparse.Namespace, folder: Path) -> Iterator[Entry]:
    """All plans of all workloads."""
    for name in options.workloads.split(","):
        path = EXAMPLES / name / "workload.yaml"
        workload = load_workload(path)
        profile = analytic_profile(workload, path.parent, slow_cluster(options.flops))
        profile_path = folder / f"{name}.profile.json"
        save_document(profile, profile_path)
        for devices in map(int, options.devices.split(",")):
            known: list[Plan] = []
            for solver in SOLVERS:
                plan_path = folder / f"{name}-{devices}-{solver}.json"
                try:
                    plan = planner.solve(
                        workload,
                        workload_path=path,
                        profile=profile,
                        profile_path=profile_path,
                        plan_path=plan_path,
                        devices=devices,
                        solver=solver,
                    )
                except MMPlanError as error:
                    print(f"{name}, {devices}: {solver}: {error.message}", file=sys.stderr)
                    continue
                if plan.units in [other.units for other in known]:
                    continue
                known.append(plan)
                save_document(plan, plan_path)
                timings = compute_timings(plan_costs(plan, plan_path))
                found = Entry(
                    workload=name,
                    devices=devices,
                    solver=plan.solver.name,
                    predicted_s=plan.predicted.iteration_s,
                    emulated_s=step_seconds(plan, plan_path, workload=path, emulation=timings),
                )
                print(_line(found), file=sys.stderr)
                yield found


def _line(entry: Entry) -> str:
    return (
        f"{entry.workload}, {entry.devices} ranks, {entry.solver}: predicted "
        f"{entry.predicted_s:.3f} s, emulated {entry.emulated_s:.3f} s, {entry.ratio:.3f}"
    )


def report(found: Sequence[Entry]) -> str:
    """The tables."""
    plans = table(
        ["workload", "ranks", "solver", "predicted", "emulated", "ratio"],
        [
            [
                entry.workload,
                str(entry.devices),
                entry.solver,
                f"{entry.predicted_s:.3f} s",
                f"{entry.emulated_s:.3f} s",
                f"{entry.ratio:.3f}",
            ]
            for entry in found
        ],
    )
    groups: dict[tuple[str, int], list[Entry]] = {}
    for entry in found:
        groups.setdefault((entry.workload, entry.devices), []).append(entry)
    ranking = table(
        ["workload, ranks", "plans", "rank correlation", "regret"],
        [
            [f"{name}, {devices}", str(len(group)), _correlation(group), _regret(group)]
            for (name, devices), group in groups.items()
        ],
    )
    errors = [abs(1 / entry.ratio - 1) for entry in found]
    verdict = (
        f"Emulated differs from predicted by {statistics.median(errors):.1%} in the median, "
        f"{max(errors):.1%} at worst."
    )
    return f"{plans}\n\n{ranking}\n\n{verdict}"


def _correlation(group: Sequence[Entry]) -> str:
    if len(group) < 3:
        return "-"
    found: Any = spearmanr([e.predicted_s for e in group], [e.emulated_s for e in group])
    return f"{found.statistic:.2f}"


def _regret(group: Sequence[Entry]) -> str:
    chosen = min(group, key=lambda entry: entry.predicted_s)
    return f"{chosen.emulated_s / min(entry.emulated_s for entry in group) - 1:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", default="4,8")
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
            f"`python benchmarks/bench_emulation.py --devices {options.devices} "
            f"--workloads {options.workloads} --flops {options.flops:g}`"
        )
        heading = "## Predicted against emulated"
        write_section("emulation", f"{heading}\n\n{command}. {where}\n\n{text}")


if __name__ == "__main__":
    main()
