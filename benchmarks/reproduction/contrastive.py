"""DistMM's experiments: nine contrastive models, and its components switched off one by one."""

from __future__ import annotations

from collections.abc import Iterator

from page import table

from reproduction.figures import Bars, bars, link
from reproduction.jobs import Job, Profiled, Result, Results
from reproduction.words import degrees, percent, ratio, seconds, utilisations

FAMILIES = {
    "CLIP": ("clip-760m", "clip-6.7b", "clip-13b"),
    "CoCa": ("coca-760m", "coca-6.7b", "coca-13b"),
    "LiT": ("lit-350m", "lit-2.7b", "lit-6.7b"),
}
CLUSTER, DEVICES = "p3-8", 64
# What the models' sizes forbid on a V100 shows on devices that are the same but for this.
LARGE_MEMORY = 64e9
OURS, THEIRS = "distmm", "megatron"
# What is switched off, by the method that lacks it.
COMPONENTS = {
    "exact": "whole",
    "one-grid": "without the partitioner: one tp × pp for all modules",
    "same-devices": "without the load balancer: as many devices for every module",
    "drained": "without interleaving: every sync batch drains before the next begins",
}
ABLATED = ("clip-760m", "clip-13b", "coca-760m", "lit-6.7b")


def _job(model: str, solver: str, *, large: bool = False, method: str | None = None) -> Job:
    on = Profiled(model=model, cluster=CLUSTER, memory_bytes=LARGE_MEMORY if large else None)
    return Job(on=on, devices=DEVICES, solver=solver, method=method)


def jobs() -> Iterator[Job]:
    """All plans of this section."""
    for models in FAMILIES.values():
        for model in models:
            for large in (False, True):
                yield _job(model, OURS, large=large)
                yield _job(model, THEIRS, large=large)
            yield _job(model, "auto")
    for model in ABLATED:
        for method in COMPONENTS:
            yield _job(model, OURS, method=method)


def section(results: Results) -> Iterator[str]:
    """The page's paragraphs."""
    yield (
        "## DistMM: contrastive models on 8 × p3.16xlarge\n\n"
        "64 V100 with 16 GB, 25 Gb/s between nodes. `megatron` is one TP × DP for all modules on "
        "all devices: a pipeline would shrink the batch that the loss sees. It holds every module "
        "on every device, so the larger models do not fit 16 GB; what it would do then is shown "
        "on devices that are the same but for 64 GB of memory. `distmm` is held against it on "
        "the same devices; `auto` is the best of all systems on 16 GB (equal plans go by the first "
        "that found them). An activation between nodes travels once to a tensor-parallel group (a "
        "share for each rank, gathered inside the node)."
    )
    yield table(
        [
            "model",
            "distmm",
            "megatron / distmm",
            "distmm, 64 GB",
            "megatron / distmm, 64 GB",
            "auto",
            "distmm: dp×pp×tp",
        ],
        [row(results, model) for models in FAMILIES.values() for model in models],
    )
    names = [model for models in FAMILIES.values() for model in models]
    yield link(
        bars(
            "distmm-speedups",
            "Times faster than megatron (simulated, 64 GB)",
            names,
            [
                Bars(
                    label="distmm", values=[_speedup(results, model, large=True) for model in names]
                )
            ],
            unit="× megatron's samples/s",
            line=1.0,
        ),
        "speed-ups of distmm over megatron",
    )
    yield (
        "### Components of DistMM, one switched off at a time\n\n"
        "Utilisation is a module's useful FLOP/s over the peak of its own devices; communication "
        "is the share of the devices' time in which it is not hidden. The ratio is the time over "
        "that of the whole system."
    )
    yield table(
        ["model", "system", "step", "ratio", "idle", "communication", "utilisation"],
        [line for model in ABLATED for line in component_rows(results, model)],
    )


def _speedup(results: Results, model: str, *, large: bool) -> float | None:
    ours = results[_job(model, OURS, large=large)].samples_per_s
    theirs = results[_job(model, THEIRS, large=large)].samples_per_s
    return ours / theirs if ours and theirs else None


def row(results: Results, model: str) -> list[str]:
    """One model."""
    own = results[_job(model, OURS)]
    return [
        model,
        seconds(own),
        ratio(results[_job(model, THEIRS)], own),
        seconds(results[_job(model, OURS, large=True)]),
        ratio(results[_job(model, THEIRS, large=True)], results[_job(model, OURS, large=True)]),
        _best(results[_job(model, "auto")]),
        degrees(own),
    ]


def _best(result: Result) -> str:
    name = f" ({result.plan.solver.name})" if result.plan else ""
    return seconds(result) + name


def component_rows(results: Results, model: str) -> Iterator[list[str]]:
    """The whole system, and each of what is left of it."""
    whole = results[_job(model, OURS, method="exact")]
    for method, what in COMPONENTS.items():
        found = results[_job(model, OURS, method=method)]
        plan = found.plan
        yield [
            model if method == "exact" else "",
            what,
            seconds(found),
            ratio(found, whole),
            percent(plan.predicted.bubble_fraction) if plan else "-",
            percent(plan.predicted.communication_fraction) if plan else "-",
            utilisations(found),
        ]
