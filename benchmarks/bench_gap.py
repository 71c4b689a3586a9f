"""The gap of plans to the lower bound, by workload, and where it comes from.

    python benchmarks/bench_gap.py [--names clip-digits,mllm-9b,...] [--write-docs]

Workloads of examples/ on an analytic profile of CPUs, those of examples/papers on GPUs. Each is
planned by `auto`; the bound is below the simulated step of every plan that there is.
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
from statistics import median

from page import conditions, table, write_section

from mmplan.costs.cost_model import CostModel
from mmplan.planning import planner
from mmplan.planning.lower_bound import LowerBound, above_work, lower_bound
from mmplan.profiling.analytic import analytic_profile
from mmplan.schema.base import save_document
from mmplan.schema.cluster import load_cluster
from mmplan.schema.plan import Plan, Unit
from mmplan.schema.profile import load_profile
from mmplan.schema.workload import load_workload
from mmplan.simulation.symmetry import simulated

EXAMPLES = Path(__file__).parent.parent / "examples"
# Gaps above it get a line on where they come from.
EXPLAINED = 0.1
# Smaller shares of the time are not in that line.
LISTED = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload and its clusters' first devices.

    Attributes:
        batch: samples of a step for each device, in place of the workload's batch.
    """

    path: str
    cluster: str
    devices: tuple[int, ...]
    batch: int | None = None


CASES = {
    **{
        name: Case(path=f"{name}/workload.yaml", cluster="cpu", devices=(2, 4, 8))
        for name in (
            "clip-digits",
            "mllm-digits",
            "multitask-digits",
            "val-digits",
            "packed-digits",
        )
    },
    **{
        name: Case(path=f"papers/{name}.yaml", cluster="p3-8", devices=(8, 16))
        for name in ("clip-760m", "lit-350m", "coca-760m")
    },
    **{
        name: Case(path=f"papers/{name}.yaml", cluster="a800-8x8", devices=(8, 16), batch=8)
        for name in ("mllm-9b", "mllm-15b")
    },
    **{
        name: Case(path=f"papers/{name}.yaml", cluster="a800-8x8", devices=(8, 16))
        for name in ("multitask-clip", "ofasys")
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan of `auto`, and the bound.

    Attributes:
        shares: :func:`above_work`.
        slowest: the unit whose degree and sizes lose most device time beside the best ones, in
            words; empty where that is little.
    """

    name: str
    plan: Plan
    bound: LowerBound
    shares: dict[str, float]
    slowest: str
    seconds: float

    @property
    def gap(self) -> float:
        return self.plan.predicted.iteration_s / self.bound.seconds - 1


def found(name: str, folder: Path) -> Iterator[Found]:
    """A workload's plans, one for each number of devices."""
    case = CASES[name]
    path = EXAMPLES / case.path
    profile_path = folder / f"{name}.json"
    workload = load_workload(path)
    profile = analytic_profile(workload, path.parent, load_cluster(case.cluster))
    save_document(profile, profile_path)
    for devices in case.devices:
        began = time.perf_counter()
        if case.batch is not None:
            workload = workload.model_copy(update={"batch": case.batch * devices})
        plan = planner.solve(
            workload,
            workload_path=path,
            profile=load_profile(profile_path),
            profile_path=profile_path,
            plan_path=folder / f"{name}.plan.json",
            devices=devices,
        )
        costs = CostModel(profile, plan.cluster, plan.training)
        bound = lower_bound(plan, costs)
        yield Found(
            name=name,
            plan=plan,
            bound=bound,
            shares=above_work(simulated(plan, costs)[0], bound),
            slowest=slowest(plan, costs),
            seconds=time.perf_counter() - began,
        )


def slowest(plan: Plan, costs: CostModel) -> str:
    """The unit that loses most device time by its degree and size, beside the best ones."""

    def lost_s(unit: Unit) -> float:
        size = max(map(max, unit.microbatches))
        own_s, best_s = device_s(costs, unit, unit.tp, size), least_s(costs, unit)
        return (own_s - best_s) * sum(unit.samples)

    unit = max(plan.units, key=lost_s)
    size = max(map(max, unit.microbatches))
    more = device_s(costs, unit, unit.tp, size) / least_s(costs, unit) - 1
    if more < LISTED:
        return ""
    return f" ({unit.name} with tp {unit.tp} and micro-batches of {size} takes {more:.0%} more)"


def device_s(costs: CostModel, unit: Unit, tp: int, size: int) -> float:
    """Seconds of a group's devices for one sample, forward and backward."""
    task, module = unit.task, unit.module
    forward_s = costs.forward_s(task=task, module=module, tp=tp, samples=size)
    return tp * (forward_s + costs.backward_s(task=task, module=module, tp=tp, samples=size)) / size


def least_s(costs: CostModel, unit: Unit) -> float:
    """The same with the best degree and size."""
    sizes = [2**power for power in range(sum(unit.samples).bit_length())]
    options = costs.tp_options(task=unit.task, module=unit.module)
    return min(device_s(costs, unit, tp, size) for tp in options for size in sizes)


def row(item: Found) -> list[str]:
    """A line of the table."""
    predicted = item.plan.predicted
    return [
        f"{item.name}, {item.plan.devices}",
        item.plan.solver.name,
        f"{predicted.iteration_s:.4g}",
        f"{item.bound.seconds:.4g}",
        f"{item.gap:.1%}",
        *(f"{share:.1%}" for share in item.shares.values()),
        f"{item.seconds:.0f}",
    ]


def reason(item: Found) -> str:
    """Where a gap comes from, in a line."""
    parts = [
        f"{what} {share:.1%}" + (item.slowest if what.startswith("slower") else "")
        for what, share in sorted(item.shares.items(), key=lambda pair: -pair[1])
        if share >= LISTED
    ]
    return f"- {item.name}, {item.plan.devices} devices, {item.gap:.1%}: {'; '.join(parts)}."


def section(results: Sequence[Found]) -> str:
    """The table and its reasons."""
    header = ["workload, devices", "solver", "step s", "bound s", "gap"]
    header += [*results[0].shares, "solve s"]
    gaps = [item.gap for item in results]
    wide = [reason(item) for item in results if item.gap > EXPLAINED]
    return "\n\n".join(
        [
            table(header, [row(item) for item in results]),
            f"Gap: median {median(gaps):.1%}, at most {max(gaps):.1%}.",
            *(["Above 10%, where the devices' time goes:", "\n".join(wide)] if wide else []),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", default=",".join(CASES), help="some of the workloads")
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    results: list[Found] = []
    with tempfile.TemporaryDirectory(prefix="mmplan-bench-") as folder:
        for name in options.names.split(","):
            for item in found(name, Path(folder)):
                results.append(item)
                print(" ".join(row(item)), file=sys.stderr, flush=True)
    text = section(results)
    shown = "" if options.names == ",".join(CASES) else f" --names {options.names}"
    command = f"`python benchmarks/bench_gap.py{shown}`. {conditions(load_before)}"
    print(text)
    if options.write_docs:
        write_section("gap", f"{text}\n\n{command}")


if __name__ == "__main__":
    main()
