"""Seconds of a whole solve by devices, samples, modules and tasks.

    python benchmarks/bench_solve_time.py [--rows devices,samples,modules,tasks] [--write-docs]

Each row is planned twice, by `auto` and by one solver alone with `--top 1`, which is that solver's
formula without a search in simulation. Both are CPU seconds of one core; a second process would
not change them, and the plans least of all. Peak memory is that of a process which does nothing
else than the row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from page import conditions, table, write_section
from regret_cases import Case, Shipped, clip, mse, shipped, solved

from mmplan.errors import InfeasibleError
from mmplan.schema.cluster import Cluster
from mmplan.wording import counted
from tests.solving import module_profile, profile, workload

KINDS = ("devices", "samples", "modules", "tasks")
# Of the chains and the tasks.
DEVICES = 64
PER_NODE = 8
# The MLLMs of MMScale, and how many of the devices below each needs at least.
MLLMS = {"mllm-9b": 8, "mllm-15b": 64, "mllm-72b": 64}
MLLM_DEVICES = (8, 64, 512, 1_296, 16_384)
# Samples of a step: those of the paper, or fewer on few devices.
MLLM_BATCH, MLLM_SAMPLES_PER_DEVICE = 1_920, 4
CLIP_SAMPLES = (64, 1_024, 16_384, 65_536)
CHAINS = (2, 4, 8, 16, 32)
TASKS = (1, 3, 10, 30, 100)
# Encoders that tasks share, two by two.
ENCODERS = 12
TASK_BATCH = 128
LINKS = {
    "intra": {"latency_s": 1e-5, "bandwidth_bytes_per_s": 2e11},
    "inter": {"latency_s": 2e-5, "bandwidth_bytes_per_s": 2.5e10},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is planned.

    Attributes:
        solver: that plans it alone beside ``auto``.
        make: the workload and what it costs.
    """

    kind: str
    label: str
    solver: str
    make: Callable[[], Case]


def rows() -> Iterator[Row]:
    """Of all kinds."""
    for name, devices in itertools.product(MLLMS, MLLM_DEVICES):
        if devices >= MLLMS[name]:
            yield Row(
                kind="devices",
                label=f"{name} on {counted(devices, 'device')}",
                solver="convex",
                make=partial(mllm, name, devices),
            )
    for kind, solver, make, numbers, label in (
        ("samples", "distmm", towers, CLIP_SAMPLES, "clip-760m on 32 devices, {}"),
        ("modules", "convex", chain, CHAINS, f"chain of {{}} on {DEVICES} devices"),
        ("tasks", "mpsp", pairs, TASKS, f"{{}} on {DEVICES} devices"),
    ):
        for number in numbers:
            words = label.format(counted(number, kind.removesuffix("s")))
            yield Row(kind=kind, label=words, solver=solver, make=partial(make, number))


def mllm(name: str, devices: int) -> Case:
    """A model of MMScale on so many devices, whether or not the paper's cluster has them."""
    batch = min(MLLM_BATCH, MLLM_SAMPLES_PER_DEVICE * devices)
    path, cluster = f"papers/{name}.yaml", "a800-162"
    case = shipped(Shipped(shape="tree", path=path, cluster=cluster, devices=devices, batch=batch))
    nodes = max(case.profile.cluster.nodes, -(-devices // PER_NODE))
    own: Cluster = case.profile.cluster.model_copy(update={"nodes": nodes})
    costs = case.profile.model_copy(update={"cluster": own})
    return Case(name=case.name, shape=case.shape, devices=devices, job=case.job, profile=costs)


def towers(samples: int) -> Case:
    """CLIP with so many samples in a step, in contrastive batches of 512 at most."""
    path = "papers/clip-760m.yaml"
    case = shipped(Shipped(shape="towers", path=path, cluster="p3-8", devices=32, batch=samples))
    losses = {
        name: loss.model_copy(update={"sync_batch": min(samples, loss.sync_batch or samples)})
        for name, loss in case.job.losses.items()
    }
    job = case.job.model_copy(update={"losses": losses})
    return Case(name=case.name, shape=case.shape, devices=32, job=job, profile=case.profile)


def chain(modules: int) -> Case:
    """Modules in a row, the work of one up to five times another's."""
    names = [f"m{number}" for number in range(modules)]
    specs: dict[str, dict[str, Any]] = {names[0]: {}}
    specs |= {then: {"inputs": [name]} for name, then in pairwise(names)}
    job = workload(specs, batch=4 * DEVICES, losses={"loss": mse(names[-1])})
    return made(f"chain-{modules}", "chain", names, job)


def pairs(tasks: int) -> Case:
    """Contrastive tasks, each with two of the encoders that all of them share."""
    encoders = [f"m{number}" for number in range(ENCODERS)]
    both = list(itertools.islice(itertools.cycle(itertools.combinations(encoders, 2)), tasks))
    losses = {f"loss{i}": clip(a, b, TASK_BATCH) for i, (a, b) in enumerate(both)}
    own = {
        f"T{i}": {"modules": [a, b], "losses": [f"loss{i}"], "batch": TASK_BATCH}
        for i, (a, b) in enumerate(both)
    }
    used = [name for name in encoders if any(name in pair for pair in both)]
    job = workload({name: {} for name in used}, batch=TASK_BATCH, losses=losses, tasks=own)
    return made(f"tasks-{tasks}", "tasks", used, job)


def made(name: str, shape: str, modules: Sequence[str], job: Any) -> Case:
    """A workload of made-up modules of several sizes, with a large loss by tensor parallelism."""
    own = {
        module: module_profile(
            1e-2 * (1 + number % 5),
            2e-2 * (1 + number % 5),
            fixed_s=2e-3,
            blocks=12,
            tp={tp: tp / (1 + 0.15 * (tp - 1)) for tp in (1, 2, 4, 8)},
            parameters=1e8 * (1 + number % 5),
            activation_bytes=2e8,
            output_bytes_per_sample=1e5,
            boundary_bytes_per_sample=1e6,
        )
        for number, module in enumerate(modules)
    }
    costs = profile(own, DEVICES, per_node=PER_NODE, memory_bytes=40e9, **LINKS)
    return Case(name=name, shape=shape, devices=DEVICES, job=job, profile=costs)


def timed(case: Case, solver: str, top: int) -> dict[str, Any]:
    """CPU seconds and the plan's step."""
    started = time.process_time()
    found: dict[str, Any] = {}
    try:
        plan = solved(case, solver=solver, top=top)
        found = {"step_s": plan.predicted.iteration_s, "gap": plan.solver.gap}
    except InfeasibleError as error:
        found = {"infeasible": error.message}
    memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found | {"cpu_s": time.process_time() - started, "memory_bytes": memory_bytes}


def measured(row: Row) -> dict[str, Any]:
    """Both sides, each in a process of its own."""
    sides: dict[str, Any] = {}
    for solver in (row.solver, "auto"):
        command = [sys.executable, __file__, "--one", row.label, "--solver", solver]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        sides[solver] = json.loads(done.stdout.splitlines()[-1])
    return sides


def line(row: Row, sides: dict[str, Any]) -> list[str]:
    """A line of the table."""
    own, auto = sides[row.solver], sides["auto"]
    if "infeasible" in auto:
        return [row.label, f"{auto['cpu_s']:.3g}", "no plan fits", "", "", "", "", ""]
    has_both = "infeasible" not in own
    return [
        row.label,
        f"{auto['cpu_s']:.3g}",
        f"{own['cpu_s']:.3g} ({row.solver})",
        f"{auto['cpu_s'] / own['cpu_s']:.3g}",
        f"{auto['step_s']:.4g}",
        f"{own['step_s']:.4g}" if has_both else "none fits",
        f"{auto['gap']:.1%}",
        f"{auto['memory_bytes'] / 1e9:.2f}",
    ]


HEADER = [
    "workload",
    "auto, CPU s",
    "one solver alone, CPU s",
    "ratio",
    "step by auto, s",
    "alone, s",
    "gap of auto",
    "memory, GB",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", help="some kinds, with commas between them")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--solver", help=argparse.SUPPRESS)
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    if options.one:
        row = next(row for row in rows() if row.label == options.one)
        case = row.make()
        print(json.dumps(timed(case, options.solver, 8 if options.solver == "auto" else 1)))
        return
    load_before = os.getloadavg()[0]
    for kind in options.rows.split(",") if options.rows else KINDS:
        lines: list[list[str]] = []
        for row in rows():
            if row.kind == kind:
                lines.append(line(row, measured(row)))
                print(" | ".join(lines[-1]), file=sys.stderr, flush=True)
        text = table(HEADER, lines)
        print(f"{text}\n")
        if options.write_docs:
            command = f"`python benchmarks/bench_solve_time.py --rows {kind}`"
            write_section(f"solve-{kind}", f"{text}\n\n{command}. {conditions(load_before)}")


if __name__ == "__main__":
    main()
