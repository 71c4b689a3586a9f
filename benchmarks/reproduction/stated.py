"""Batches and degrees as the papers state them, beside the best plan of the same job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from page import table

from reproduction.jobs import Job, Profiled, Results
from reproduction.words import NONE, degrees, percent, rate, ratio, seconds

Changes = tuple[tuple[str, Any], ...]


def _pins(module: str, **pins: int) -> Changes:
    return tuple((f"modules.{module}.plan.{name}", value) for name, value in pins.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """A row: a job as a paper states it, and the same one planned freely.

    Attributes:
        said: what the paper says, in words.
        changes: of the workload: batch, recomputation.
        pins: the degrees that the paper states.
        free: the solver of the second plan.
    """

    model: str
    cluster: str
    devices: int
    solver: str
    said: str
    changes: Changes
    pins: Changes
    free: str

    def job(self, *, pinned: bool) -> Job:
        """The plan with the paper's degrees, or with any."""
        return Job(
            on=Profiled(model=self.model, cluster=self.cluster),
            devices=self.devices,
            solver=self.solver if pinned else self.free,
            changes=(*self.changes, *(self.pins if pinned else ())),
        )


def _clip(batch: int, recompute: str) -> Changes:
    modules = ("vision", "text")
    return (
        ("batch", batch),
        ("losses.contrastive.sync_batch", batch),
        *((f"modules.{name}.recompute", recompute) for name in modules),
    )


def _towers(model: str, solver: str, said: str, changes: Changes, pins: Changes) -> Stated:
    return Stated(
        model=model,
        cluster="p3-8",
        devices=64,
        solver=solver,
        said=said,
        changes=changes,
        pins=pins,
        free=solver,
    )


# DistMM, section 6.1: batches and degrees.
TOWERS = (
    _towers(
        "clip-760m",
        "megatron",
        "data parallelism, 8 samples a GPU, no recomputation",
        _clip(512, "none"),
        (*_pins("vision", tp=1, pp=1, dp=64), *_pins("text", tp=1, pp=1, dp=64)),
    ),
    _towers(
        "clip-760m",
        "distmm",
        "replicas alone, 600 samples: vision 10 a GPU, text 150, no recomputation",
        _clip(600, "none"),
        (*_pins("vision", tp=1, pp=1, dp=60), *_pins("text", tp=1, pp=1, dp=4)),
    ),
    _towers(
        "clip-6.7b",
        "megatron",
        "tp 8, 512 samples",
        _clip(512, "full"),
        (*_pins("vision", tp=8, pp=1), *_pins("text", tp=8, pp=1)),
    ),
    _towers(
        "clip-6.7b",
        "distmm",
        "text tp 4, no pipeline, 600 samples",
        _clip(600, "full"),
        (*_pins("vision", pp=1), *_pins("text", tp=4, pp=1)),
    ),
)
# MMScale: tp 8 everywhere, stages of the LLM by model; encoder and generator on their own.
_LLM_STAGES = {"mllm-9b": 1, "mllm-15b": 2, "mllm-72b": 10}
_SMALL_BATCHES = {"mllm-9b": 128, "mllm-15b": 64, "mllm-72b": 40}


def _chain(model: str, devices: int, batch: int) -> Stated:
    stages = _LLM_STAGES[model]
    return Stated(
        model=model,
        cluster=f"a800-{devices // 8}",
        devices=devices,
        solver="megatron-rigid",
        said=f"tp 8, LLM pp {stages}, {batch:,} samples",
        changes=(("batch", batch),),
        pins=(
            *_pins("vision", tp=8),
            *_pins("llm", tp=8, pp=stages),
            *_pins("generator", tp=8),
        ),
        free="convex",
    )


CHAINS = tuple(
    _chain(model, devices, batch)
    for model in _LLM_STAGES
    for devices, batch in ((1296, 1920), (96, _SMALL_BATCHES[model]))
)
# Spindle does not give its batches: of each of the four tasks.
BATCHES = (32, 64, 128, 256, 512, 1024)
SWEEP_TASKS = ("VT", "VA", "VD", "MT")
SWEEP_SYSTEMS = ("mpsp", "spindle-seq", "distmm-mt", "megatron", "deepspeed")
SWEEP_DEVICES = 16


def _sweep(solver: str, batch: int) -> Job:
    return Job(
        on=Profiled(model="multitask-clip", cluster="a800-8x8"),
        devices=SWEEP_DEVICES,
        solver=solver,
        tasks=SWEEP_TASKS,
        changes=tuple((f"tasks.{task}.batch", batch) for task in SWEEP_TASKS),
    )


def jobs() -> Iterator[Job]:
    """All plans of this section."""
    for row in (*TOWERS, *CHAINS):
        yield row.job(pinned=True)
        yield row.job(pinned=False)
    for solver in SWEEP_SYSTEMS:
        for batch in BATCHES:
            yield _sweep(solver, batch)


def section(results: Results) -> Iterator[str]:
    """The page's paragraphs."""
    yield (
        "## As the papers state their runs\n\n"
        "Above each system has its best degrees. Here it has the batch and the degrees that its "
        "paper states, beside the best plan of the same batch: of the same system for DistMM's "
        "models, of `convex` for MMScale's. The contrastive batch is whole. Left out: tp 16 over "
        "two nodes (CLIP 13B under Megatron), for tensor parallelism stays inside a node here. "
        "Gradients are summed in the workload's precision. *stated / free* above 1: the free plan "
        "is faster."
    )
    yield table(
        [
            "model",
            "GPUs",
            "system",
            "as stated",
            "step",
            "samples/s",
            "idle",
            "free",
            "stated / free",
        ],
        [_row(results, row) for row in (*TOWERS, *CHAINS)],
    )
    yield (
        f"### Multitask-CLIP, 4 tasks on {SWEEP_DEVICES} GPUs, by the batch of a task\n\n"
        "Spindle's batches are not stated. Samples per second; in brackets the time over that of "
        "`mpsp`."
    )
    yield table(
        ["system", *(f"{batch:,} a task" for batch in BATCHES)],
        [
            [solver, *(_cell(results, solver, batch) for batch in BATCHES)]
            for solver in SWEEP_SYSTEMS
        ],
    )


def _row(results: Results, row: Stated) -> list[str]:
    stated, free = results[row.job(pinned=True)], results[row.job(pinned=False)]
    return [
        row.model,
        f"{row.devices:,}",
        row.solver,
        row.said,
        seconds(stated),
        rate(stated) if stated.plan else "-",
        percent(stated.plan.predicted.bubble_fraction) if stated.plan else "-",
        f"{row.free}: {degrees(free)}" if free.plan else NONE,
        ratio(stated, free),
    ]


def _cell(results: Results, solver: str, batch: int) -> str:
    found, ours = results[_sweep(solver, batch)], results[_sweep("mpsp", batch)]
    return f"{rate(found)}" + ("" if solver == "mpsp" else f" ({ratio(found, ours)})")
