"""Spindle's experiments: many tasks over shared modules."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from page import table

from reproduction.figures import Bars, Line, bars, lines, link
from reproduction.jobs import Job, Profiled, Results
from reproduction.words import percent, rate, ratio, seconds

CLUSTER = "a800-8x8"
OURS = "mpsp"
SYSTEMS = (OURS, "spindle-seq", "spindle-optimus", "distmm-mt", "deepspeed")
FOUR = ("VT", "VA", "VD", "MT")
SEVEN = (*FOUR, "AT", "VH", "DT")
TEN = (*SEVEN, "VM", "HT", "AM")
OFASYS_FOUR = ("caption", "asr", "summary", "grounding")
# Name on the page to workload and tasks (none for all).
WORKLOADS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Multitask-CLIP, 4 tasks": ("multitask-clip", FOUR),
    "Multitask-CLIP, 7 tasks": ("multitask-clip", SEVEN),
    "Multitask-CLIP, 10 tasks": ("multitask-clip", TEN),
    "OFASys, 4 tasks": ("ofasys", OFASYS_FOUR),
    "OFASys, 7 tasks": ("ofasys", ()),
    "QWen-VAL 9B, 3 tasks": ("qwen-val-9b", ()),
}
DEVICES = (8, 16, 32, 64)
LARGE = {"QWen-VAL 30B": "qwen-val-30b", "QWen-VAL 70B": "qwen-val-70b"}
LARGE_CLUSTER, LARGE_DEVICES = "a800-32", 256
MEMORY_DEVICES = 16
# Task sets one after another, and steps of each.
OVER_TIME = (("4", FOUR), ("7", SEVEN), ("10", TEN), ("7", SEVEN), ("4", FOUR))
STEPS_EACH, OVER_TIME_DEVICES = 200, 32
# One task alone, under Spindle and DistMM.
ALONE = {"VT": ("VT",), "VA": ("VA",), "MT": ("MT",)}
ALONE_SYSTEMS = (OURS, "distmm", "colocated")


def _job(model: str, tasks: tuple[str, ...], solver: str, devices: int) -> Job:
    return Job(
        on=Profiled(model=model, cluster=CLUSTER), devices=devices, solver=solver, tasks=tasks
    )


def _large(model: str, solver: str) -> Job:
    on = Profiled(model=model, cluster=LARGE_CLUSTER)
    return Job(on=on, devices=LARGE_DEVICES, solver=solver)


def jobs() -> Iterator[Job]:
    """All plans of this section."""
    for solver in SYSTEMS:
        for model, tasks in WORKLOADS.values():
            for devices in DEVICES:
                yield _job(model, tasks, solver, devices)
        for model in LARGE.values():
            yield _large(model, solver)
    for solver in ALONE_SYSTEMS:
        for tasks in ALONE.values():
            for devices in (8, 16):
                yield _job("multitask-clip", tasks, solver, devices)


def section(results: Results) -> Iterator[str]:
    """The page's paragraphs."""
    yield (
        "## Spindle: many tasks over shared modules\n\n"
        "Nodes of 8 A800, 400 Gb/s each. `mpsp` runs slices of the tasks side by side in waves; "
        "`spindle-seq` runs whole tasks one after another, each on all devices at its best "
        "degrees; `spindle-optimus` whole tasks side by side, devices by marginal gain; "
        "`distmm-mt` tasks one after another, each planned by distmm; `deepspeed` tasks one after "
        "another under DP with ZeRO-1. Samples per second, all tasks together; in brackets the "
        "time over that of `mpsp`, above 1 where `mpsp` is faster; where another one is, "
        "`--solver auto` takes it. `distmm-mt` shares one second of search among its tasks; a "
        "longer `--budget` makes it a stronger rival. `spindle-optimus` falls below tasks in turn "
        "where these scale: the tasks of QWen-VAL lose next to nothing on all devices, while side "
        "by side the step waits for the slowest, as devices are whole (14% idle on 16 GPUs, 8% on "
        "32), and fewer replicas hold larger parts of the optimizer's state, so that micro-batches "
        "are smaller (1 sample where all 16 GPUs hold 8)."
    )
    for name, (model, tasks) in WORKLOADS.items():
        yield f"### {name}"
        yield table(
            ["system", *(f"{n} GPUs" for n in DEVICES)],
            [
                [solver, *(_cell(results, model, tasks, solver, n) for n in DEVICES)]
                for solver in SYSTEMS
            ],
        )
        yield link(
            lines(
                f"{model}-{len(tasks) or 'all'}",
                f"{name} (simulated)",
                [
                    Line(
                        label=solver,
                        x=DEVICES,
                        y=[results[_job(model, tasks, solver, n)].samples_per_s for n in DEVICES],
                    )
                    for solver in SYSTEMS
                ],
                across="GPUs",
                unit="samples/s",
            ),
            f"samples per second of {name} by number of GPUs",
        )
    yield f"### QWen-VAL 30B and 70B on {LARGE_DEVICES} GPUs"
    yield table(["system", *LARGE], [_large_row(results, solver) for solver in SYSTEMS])
    yield from _memory(results)
    yield from _over_time(results)
    yield (
        "### One task alone: Spindle and DistMM\n\n"
        "Tasks of Multitask-CLIP by themselves: step, in brackets the gap to the solver's bound."
    )
    yield table(
        ["task", *(f"{s}, {n} GPUs" for n in (8, 16) for s in ALONE_SYSTEMS)],
        [
            [name, *(_alone(results, tasks, s, n) for n in (8, 16) for s in ALONE_SYSTEMS)]
            for name, tasks in ALONE.items()
        ],
    )


def _cell(results: Results, model: str, tasks: tuple[str, ...], solver: str, devices: int) -> str:
    found = results[_job(model, tasks, solver, devices)]
    ours = results[_job(model, tasks, OURS, devices)]
    if found.plan is None or solver == OURS:
        return rate(found)
    return f"{rate(found)} ({ratio(found, ours)})"


def _large_row(results: Results, solver: str) -> list[str]:
    cells: list[str] = []
    for model in LARGE.values():
        found, ours = results[_large(model, solver)], results[_large(model, OURS)]
        more = f", MFU {percent(found.plan.predicted.mfu)}" if found.plan else ""
        times = "" if solver == OURS or found.plan is None else f" ({ratio(found, ours)})"
        cells.append(f"{rate(found)}{times}{more}")
    return [solver, *cells]


def _memory(results: Results) -> Iterator[str]:
    model, tasks = WORKLOADS["Multitask-CLIP, 4 tasks"]
    plans = {s: results[_job(model, tasks, s, MEMORY_DEVICES)].plan for s in SYSTEMS}
    held = {s: plan.predicted.memory_bytes for s, plan in plans.items() if plan}
    yield f"### Memory per device: Multitask-CLIP, 4 tasks, {MEMORY_DEVICES} GPUs"
    yield table(
        ["system", "most", "least", "mean", "most / mean"],
        [
            [
                s,
                *(f"{x / 1e9:.2f} GB" for x in (max(b), min(b), sum(b) / len(b))),
                f"{max(b) * len(b) / sum(b):.2f}",
            ]
            for s, b in held.items()
        ],
    )
    yield link(
        bars(
            "memory",
            "Most memory held by each device (simulated)",
            [str(rank) for rank in range(MEMORY_DEVICES)],
            [Bars(label=s, values=[x / 1e9 for x in b]) for s, b in held.items()],
            unit="GB, by rank",
        ),
        "memory of each device under five systems",
    )


def _over_time(results: Results) -> Iterator[str]:
    """The steps of all task sets one after another, under every system."""
    yield (
        f"### A run over changing task sets: Multitask-CLIP, {OVER_TIME_DEVICES} GPUs\n\n"
        f"{', '.join(name for name, _ in OVER_TIME)} tasks, {STEPS_EACH} steps each; planning and "
        "loading at the changes are not counted."
    )
    curves: list[Line] = []
    rows: list[list[str]] = []
    whole: dict[str, float] = {}
    for solver in SYSTEMS:
        found = [
            results[_job("multitask-clip", tasks, solver, OVER_TIME_DEVICES)]
            for _, tasks in OVER_TIME
        ]
        plans = [result.plan for result in found if result.plan]
        if len(plans) < len(OVER_TIME):
            rows.append([solver, "does not fit", "-"])
            continue
        ends = [0.0]
        for plan in plans:
            ends.append(ends[-1] + STEPS_EACH * plan.predicted.iteration_s)
        whole[solver] = ends[-1]
        rates = [plan.predicted.samples_per_s for plan in plans]
        curves.append(Line(label=solver, x=ends, y=[*rates, rates[-1]]))
        rows.append([solver, f"{ends[-1]:.0f} s", f"{ends[-1] / whole.get(OURS, ends[-1]):.2f}"])
        if any(b < a for a, b in pairwise(ends)):
            raise ValueError(f"{solver}: a step of negative time")
    yield table(["system", "whole run", "time / ours"], rows)
    yield link(
        lines(
            "task-sets",
            "Throughput while the task set changes (simulated)",
            curves,
            across="seconds",
            unit="samples/s",
            steps=True,
        ),
        "throughput over time while the task set changes",
    )


def _alone(results: Results, tasks: tuple[str, ...], solver: str, devices: int) -> str:
    found = results[_job("multitask-clip", tasks, solver, devices)]
    gap = f" ({found.plan.solver.formula_gap:.1%})" if found.plan else ""
    return seconds(found) + gap
