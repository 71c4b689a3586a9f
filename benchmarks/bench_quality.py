"""Plans of the three MLLMs at full size: ours beside megatron, megatron-rigid and ratio.

    python benchmarks/bench_quality.py [--models 9b,15b,72b] [--devices 96,324,648,1296]
        [--top 8] [--budget 1] [--write-docs]

Workloads of examples/papers on nodes of 8 A800, their analytic profiles made first. Every
solver gets the same workload, profile, devices and batch in one run; its best few plans are
compiled and simulated, and what is compared is the simulated time of a step. A time over ours
above 1 means that ours is faster.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from page import conditions, table, write_section
from planning import with_fused_backwards

from mmplan.errors import InfeasibleError
from mmplan.planning import planner
from mmplan.profiling.analytic import analytic_profile
from mmplan.schema.base import save_document
from mmplan.schema.cluster import load_cluster
from mmplan.schema.plan import Plan, Unit
from mmplan.schema.profile import load_profile
from mmplan.schema.workload import load_workload

PAPERS = Path(__file__).parent.parent / "examples" / "papers"
MODELS = ("9b", "15b", "72b")
# Devices to samples of a step.
BATCHES = {96: 240, 112: 240, 324: 480, 648: 960, 1296: 1920}
SIZES = (96, 324, 648, 1296)
OURS = "convex"
SOLVERS = (OURS, "megatron", "megatron-rigid", "ratio")
# Simulated times closer than this are equal.
SAME = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a solver made of a model; no plan where none fits, and why."""

    solver: str
    seconds: float
    plan: Plan | None
    why_not: str = ""


def profiled(model: str, folder: Path) -> Path:
    """The model's analytic profile on A800s, as ``mmplan profile --analytic`` makes it."""
    path = folder / f"{model}.json"
    made = analytic_profile(
        load_workload(workload_path(model)), PAPERS, load_cluster(f"a800-{nodes(max(BATCHES))}")
    )
    save_document(made, path)
    return path


def workload_path(model: str) -> Path:
    """A shipped workload's file."""
    return PAPERS / f"mllm-{model}.yaml"


def nodes(devices: int) -> int:
    """Nodes of 8 that have so many devices."""
    return -(-devices // 8)


def planned(
    model: str, profile: Path, devices: int, solver: str, options: argparse.Namespace
) -> Planned:
    """Plan a model, as ``mmplan solve --devices N --solver NAME``."""
    workload = with_fused_backwards(load_workload(workload_path(model)))
    workload = workload.model_copy(update={"batch": BATCHES[devices]})
    loaded, cluster = load_profile(profile), load_cluster(f"a800-{nodes(devices)}")
    began = time.perf_counter()
    plan, why_not = None, ""
    try:
        plan = planner.solve(
            workload,
            workload_path=workload_path(model),
            profile=loaded,
            profile_path=profile,
            plan_path=profile.with_name("plan.json"),
            cluster=cluster,
            devices=devices,
            solver=solver,
            top=options.top,
            budget_s=options.budget,
        )
    except InfeasibleError as error:
        why_not = error.message
    seconds = time.perf_counter() - began
    print(f"mllm-{model}, {devices} devices, {solver}: {seconds:.1f} s", file=sys.stderr)
    return Planned(solver=solver, seconds=seconds, plan=plan, why_not=why_not)


def degrees(units: Sequence[Unit]) -> str:
    """dp x pp x tp of every unit."""
    return ", ".join(
        f"{unit.name} {unit.dp}×{unit.pp}×{unit.tp}" + (f" vpp {unit.vpp}" if unit.vpp > 1 else "")
        for unit in units
    )


def rows(devices: int, results: Sequence[Planned]) -> Iterator[list[str]]:
    """A line for every solver."""
    ours = next(item.plan for item in results if item.solver == OURS)
    for item in results:
        first = f"{devices}, {BATCHES[devices]}, {item.solver}"
        if item.plan is None:
            yield [first, item.why_not, *["-"] * 6, f"{item.seconds:.1f}"]
            continue
        predicted, report = item.plan.predicted, item.plan.solver
        over = predicted.iteration_s / ours.predicted.iteration_s if ours else float("nan")
        yield [
            first,
            degrees(item.plan.units),
            str(len(report.idle_ranks)),
            f"{report.objective_s:.3f}",
            f"{report.formula_bound_s:.3f}",
            f"{predicted.iteration_s:.3f}",
            f"{over:.3f}",
            f"{predicted.mfu:.0%}",
            f"{item.seconds:.1f}",
        ]


def reason(results: Sequence[Planned]) -> str:
    """Which baseline is as fast as ours or faster, and by how much; nothing where none is."""
    times = {i.solver: i.plan.predicted.iteration_s for i in results if i.plan is not None}
    ours_s = times.pop(OURS, 0.0)
    best = min(times, key=times.__getitem__, default=None)
    if best is None or not ours_s or times[best] > ours_s * (1 + SAME):
        return ""
    return f"{best}'s plan takes {1 - times[best] / ours_s:.1%} less"


def model_section(model: str, folder: Path, options: argparse.Namespace) -> str:
    """Table and reasons of one model."""
    profile = profiled(model, folder)
    lines: list[list[str]] = []
    reasons: list[str] = []
    for devices in options.devices:
        results = [planned(model, profile, devices, solver, options) for solver in SOLVERS]
        if why := reason(results):
            auto = planned(model, profile, devices, "auto", options)
            results.insert(1, auto)
            taken = auto.plan.solver.name if auto.plan else "none"
            reasons.append(f"{devices} devices: {why}, and `--solver auto` takes {taken}'s.")
        lines += rows(devices, results)
    header = [
        "devices, batch, solver",
        "dp×pp×tp",
        "left over",
        "formula s",
        "bound s",
        "simulated s",
        "time / ours",
        "MFU",
        "solve s",
    ]
    text = f"### MLLM-{model.upper()}\n\n{table(header, lines)}"
    return f"{text}\n\nNot better: {' '.join(reasons)}" if reasons else text


def main() -> None:
    options = _parse()
    command = f"`python benchmarks/bench_quality.py{_shown(options)}`"
    for model in options.models:
        load_before, began = os.getloadavg()[0], time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mmplan-bench-") as folder:
            section = model_section(model, Path(folder), options)
        where = f"{conditions(load_before)} {time.monotonic() - began:.0f} s in all."
        print(f"{section}\n\n{where}\n", flush=True)
        # A section for each model: one can be renewed alone.
        if options.write_docs:
            write_section(f"quality-{model}", f"{section}\n\n{command}. {where}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=_words, default=list(MODELS), help="some of 9b,15b,72b")
    parser.add_argument("--devices", type=_numbers, default=list(SIZES), help="some of BATCHES")
    parser.add_argument("--top", type=int, default=8, help="plans of each kind to simulate")
    parser.add_argument("--budget", type=float, default=1.0, help="as of mmplan solve")
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    unknown = set(options.models) - set(MODELS) | set(options.devices) - set(BATCHES)
    if unknown:
        parser.error(f"unknown: {unknown}")
    return options


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _shown(options: argparse.Namespace) -> str:
    shown = ""
    if options.models != list(MODELS):
        shown += f" --models {','.join(options.models)}"
    if options.devices != list(SIZES):
        shown += f" --devices {','.join(map(str, options.devices))}"
    if options.top != 8:
        shown += f" --top {options.top}"
    return shown + (f" --budget {options.budget:g}" if options.budget != 1 else "")


if __name__ == "__main__":
    main()
