"""The proof at size: every rank of a plan against one of each class, and a hundred thousand ranks.

    python benchmarks/bench_proof.py [--model 72b] [--devices 1296] [--batch 1920] [--copies 77]
        [--write-docs]

An MLLM of examples/papers on nodes of 8 A800 from an analytic profile, planned by `convex`. The
plan is proven twice: all rows are compiled and checked, and then those of one rank of each class.
Its certificate is made and given to the independent checker. Then the same plan with so many copies
of each replica beside it is proven, folded.

Times are CPU seconds of this process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bench_quality import profiled, workload_path
from page import conditions, table, write_section

from mmplan.planning import planner
from mmplan.processes import rare_collections
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.proof.certificate import make_certificate
from mmplan.proof.checker import check_certificate
from mmplan.proof.prove import prove
from mmplan.schema.cluster import load_cluster
from mmplan.schema.plan import Plan, PlanLoss, Unit
from mmplan.schema.profile import Profile, load_profile
from mmplan.schema.workload import Workload, load_workload

Result = TypeVar("Result")


@rare_collections()
def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="72b")
    parser.add_argument("--devices", type=int, default=1296)
    parser.add_argument("--batch", type=int, default=1920)
    parser.add_argument("--copies", type=int, default=77)
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mmplan-bench-") as folder:
        plan, workload, profile = _planned(options, Path(folder))
    proof, prove_s = _timed(lambda: prove(plan, workload, profile))
    held_gb = _most_gb()
    document = json.loads(plan.model_dump_json(exclude_none=True))
    stated = json.loads(workload.model_dump_json(exclude_unset=True))
    certificate, make_s = _timed(
        lambda: json.loads(json.dumps(make_certificate(plan, document, stated, proof.compiled)))
    )
    unheld, check_s = _timed(lambda: check_certificate(stated, document, certificate))
    certificate_gb = _most_gb()
    many = _copied(plan, options.copies)
    asked = workload.model_copy(update={"batch": options.batch * options.copies})
    large, large_s = _timed(lambda: prove(many, asked, profile))
    large_gb = _most_gb()
    program, compile_s = _timed(lambda: compile_plan(plan))
    faults, whole_s = _timed(lambda: check_program(program))
    count = sum(map(len, program.instructions))
    whole_s += compile_s

    def row(what: str, *numbers: float, ratio: str = "", most: float | None = None) -> list[str]:
        ranks, shown, instructions, seconds = numbers
        memory = "" if most is None else f"{most:.2f}"
        counts = [f"{number:,}" for number in (ranks, shown, instructions)]
        return [what, *counts, f"{seconds:.1f}", ratio, memory]

    ratio = f"{whole_s / prove_s:.1f}"
    rows = [
        row("all rows", plan.devices, plan.devices, count, whole_s, ratio="1.0"),
        row(
            "one rank of each class",
            *(plan.devices, proof.rows, proof.instructions, prove_s),
            ratio=ratio,
            most=held_gb,
        ),
        row(
            f"{options.copies} copies, folded",
            *(many.devices, large.rows, large.instructions, large_s),
            most=large_gb,
        ),
    ]
    names = ["proof of", "ranks", "rows", "instructions", "compiled and proven, s"]
    text = table([*names, "all rows / these", "most memory, GB"], rows)
    text += (
        f"\n\nThe certificate takes {make_s:.1f} s to make, and the independent checker "
        f"{check_s:.1f} s; with it at most {certificate_gb:.2f} GB were held."
    )
    where = conditions(load_before)
    print(f"\n{text}\n\n{where}")
    if options.write_docs:
        command = f"`python benchmarks/bench_proof.py --model {options.model}`"
        write_section("proof", f"{command}. {where}\n\n{text}")
    return int(bool(faults or proof.faults or large.faults or unheld))


def _planned(options: argparse.Namespace, folder: Path) -> tuple[Plan, Workload, Profile]:
    print(f"MLLM-{options.model}: profile and plan", file=sys.stderr)
    profile_path = profiled(options.model, folder)
    profile = load_profile(profile_path)
    path = workload_path(options.model)
    workload = load_workload(path).model_copy(update={"batch": options.batch})
    plan = planner.solve(
        workload,
        workload_path=path,
        profile=profile,
        profile_path=profile_path,
        plan_path=folder / "plan.json",
        cluster=load_cluster(f"a800-{-(-options.devices // 8)}"),
        devices=options.devices,
        solver="convex",
        top=1,
    )
    return plan, workload, profile


def _copied(plan: Plan, copies: int) -> Plan:
    """The plan with copies of each replica beside it, and as many times the batch."""
    units: list[Unit] = []
    start = 0
    for unit in plan.units:
        dp = unit.dp * copies
        ranks = unit.grid.consecutive(start, dp, unit.pp, unit.tp).ranks
        start += dp * unit.pp * unit.tp
        repeated = {
            "samples": tuple(n for n in unit.samples for _ in range(copies)),
            "microbatches": tuple(row for row in unit.microbatches for _ in range(copies)),
        }
        units.append(unit.model_copy(update={"dp": dp, "ranks": ranks, **repeated}))
    tasks = {
        name: task.model_copy(update={"batch": task.batch * copies})
        for name, task in plan.tasks.items()
    }
    nodes = -(-start // plan.cluster.devices_per_node)
    changes = {
        "units": tuple(units),
        "losses": tuple(_placed(loss, plan, units) for loss in plan.losses),
        "tasks": tasks,
        "devices": start,
        "cluster": plan.cluster.model_copy(update={"nodes": nodes}),
    }
    return plan.model_copy(update=changes)


def _placed(loss: PlanLoss, plan: Plan, units: list[Unit]) -> PlanLoss:
    """A loss on the last stages of the units that it is on in the plan."""
    ranks = {
        rank
        for unit, before in zip(units, plan.units, strict=True)
        if not set(loss.ranks).isdisjoint(r for g in before.grid.stage(-1) for r in g)
        for group in unit.grid.stage(-1)
        for rank in group
    }
    return loss.model_copy(update={"ranks": tuple(sorted(ranks))})


def _timed(call: Callable[[], Result]) -> tuple[Result, float]:
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def _most_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


if __name__ == "__main__":
    raise SystemExit(main())
