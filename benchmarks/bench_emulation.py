"""Predicted against emulated iteration time, for the plans of all systems.

    python benchmarks/bench_emulation.py [--devices 4,8,16] [--workloads a,b,c] [--solvers A,B]
        [--flops N] [--write-docs]

Each workload gets an analytic profile of slow devices (so that processes have time to spare on
few cores), is planned by every system, and every plan is run with ``mmlaunch run --emulate``:
real processes, messages and reductions over loopback, waits for computes. What this tests is
the order of things, not the times of computes, which bench_prediction.py measures.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from agreement import EXPLAINED, Entry, does_the_same, errors, plans_table, ranking_table
from page import conditions, write_section
from planning import planned

from mmlaunch.run.trial import step_seconds
from mmplan.errors import MMPlanError
from mmplan.planning import planner
from mmplan.profiling.analytic import analytic_profile
from mmplan.schema.base import save_document
from mmplan.schema.cluster import Cluster
from mmplan.schema.workload import load_workload
from mmplan.simulation.predict import compute_timings, plan_costs

EXAMPLES = Path(__file__).parent.parent / "examples"
WORKLOADS = ("clip-digits", "mllm-digits", "multitask-digits")


def slow_cluster(flops: float) -> Cluster:
    """Devices of so many FLOP/s, joined by links as loopback is."""
    link = {"latency_s": 5e-4, "bandwidth_bytes_per_s": 5e8}
    device = {"name": "cpu", "memory_bytes": 4e9, "peak_flops": flops, "type": "cpu"}
    device["compute_slowdown"] = 1.0  # an emulated rank waits, and nothing slows it
    document = {"version": 1, "name": "slow", "nodes": 1, "devices_per_node": 1}
    return Cluster.model_validate(document | {"device": device, "links": {"intra_node": link}})


def entries(options: argparse.Namespace, folder: Path) -> Iterator[Entry]:
    """All plans of all workloads."""
    for name in options.workloads.split(","):
        path = EXAMPLES / name / "workload.yaml"
        for devices in map(int, options.devices.split(",")):
            profile = folder / f"{name}-{devices}.profile.json"
            # Steps take as long on any number of ranks, and what processes do besides as little.
            cluster = slow_cluster(options.flops / devices)
            save_document(analytic_profile(load_workload(path), path.parent, cluster), profile)
            yield from _plans(path, profile, devices, options.solvers.split(","))


def _plans(path: Path, profile: Path, devices: int, solvers: Sequence[str]) -> list[Entry]:
    """Every plan of a workload on so many ranks, each run once."""
    found: list[Entry] = []
    for solver in solvers:
        try:
            plan_path, plan = planned(path, profile, devices=devices, solver=solver)
        except MMPlanError as error:
            print(f"{path.parent.name}, {devices}: {solver}: {error.message}", file=sys.stderr)
            continue
        same = next((entry for entry in found if does_the_same(plan, entry.plan)), None)
        if same is not None:
            same.solvers.append(solver)
            continue
        timings = compute_timings(plan_costs(plan, plan_path))
        seconds = step_seconds(plan, plan_path, workload=path, emulation=timings)
        found.append(
            Entry(
                workload=path.parent.name,
                how=f"{devices} emulated",
                solvers=[solver],
                plan=plan,
                predicted_s=[plan.predicted.iteration_s],
                found_s=[seconds],
            )
        )
        print(found[-1], file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", default="4,8,16", help="ranks to emulate")
    systems = ",".join(planner.SOLVERS | planner.BASELINES)
    parser.add_argument("--solvers", default=systems)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--flops", type=float, default=2e9, help="of all devices, a second")
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mmplan-bench-") as folder:
        found = list(entries(options, Path(folder)))
    tables = [plans_table(found), ranking_table(found), errors("Emulated", found), EXPLAINED]
    text, where = "\n\n".join(tables), conditions(load_before)
    print(f"{text}\n\n{where}")
    if options.write_docs:
        command = (
            f"`python benchmarks/bench_emulation.py --devices {options.devices} --workloads "
            f"{options.workloads} --flops {options.flops:g}`"
        )
        heading = "## Predicted against emulated"
        write_section("emulation", f"{heading}\n\n{command}. {where}\n\n{text}")


if __name__ == "__main__":
    main()
