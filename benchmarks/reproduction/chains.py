"""MMScale's experiments: encoder, LLM and generator on about 1,300 and about 100 GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from page import table

from mmplan.simulation.sampled_batches import sample_steps
from reproduction.figures import Bars, bars, link
from reproduction.jobs import DATA_SAMPLES, Job, Profiled, Results
from reproduction.words import NONE, degrees, percent, rate, ratio, seconds

MODELS = ("mllm-9b", "mllm-15b", "mllm-72b")
OURS = "convex"
SYSTEMS = (OURS, "megatron", "megatron-rigid", "ratio")
# (devices, samples of a step)
LARGE = (1296, 1920)
SMALL = ((96, 128), (96, 64), (96, 40))
# The encoder's last block is its projector, the generator's first takes the LLM's states.
ENCODER = ("modules.vision.frozen", ((0, 32),))
LLM = ("modules.llm.frozen", True)
GENERATOR = ("modules.generator.frozen", ((1, 26),))
FROZEN: dict[str, tuple[tuple[str, Any], ...]] = {
    "only the projectors": (ENCODER, LLM, GENERATOR),
    "only the encoder": (LLM, GENERATOR),
    "only the LLM": (ENCODER, GENERATOR),
    "only the generator": (ENCODER, LLM),
}
FROZEN_SYSTEMS = (OURS, "megatron", "megatron-rigid")


def _job(
    model: str,
    solver: str,
    devices: int,
    batch: int,
    *,
    frozen: str | None = None,
    data: bool = False,
) -> Job:
    changes = (("batch", batch), *(FROZEN[frozen] if frozen else ()))
    on = Profiled(model=model, cluster=f"a800-{devices // 8}", data=data)
    return Job(on=on, devices=devices, solver=solver, changes=changes)


def jobs() -> Iterator[Job]:
    """All plans of this section."""
    for model in MODELS:
        for devices, batch in (LARGE, *SMALL):
            for solver in SYSTEMS:
                yield _job(model, solver, devices, batch)
        for frozen in FROZEN:
            for solver in FROZEN_SYSTEMS:
                yield _job(model, solver, *SMALL[0], frozen=frozen)
        yield _job(model, OURS, *SMALL[0], data=True)


def section(results: Results) -> Iterator[str]:
    """The page's paragraphs."""
    yield (
        "## MMScale: an encoder, an LLM and a generator on A800s\n\n"
        "Nodes of 8 A800, 4 × 200 Gb/s each, sequences of 8,192 tokens. `convex` gives each "
        "module devices of its own; `megatron` is one TP × DP × PP with every module on every "
        "position; `megatron-rigid` puts encoder and generator on positions of their own with "
        "the LLM's TP and DP (MMScale's baseline, here with the best degrees rather than TP 8 "
        "and fixed PP); `ratio` gives devices in proportion to FLOPs. MFU counts all devices, "
        "idle ones too. *time / ours* above 1: `convex` is faster. Where another system is "
        "better `--solver auto` takes it: MLLM-9B fits two GPUs, so that plain data parallelism "
        "has neither ramp nor messages, and wins where there are samples enough for it.\n\n"
        "`ratio` gives MLLM-72B's encoder 2 of 96 GPUs. The encoder comes before the whole "
        "pipeline, and holds a micro-batch for each stage after it: what fits its share, not the "
        "LLM's, says how many stages there are. All its modules recompute for that reason. "
        "Without recomputation in encoder and generator the steps for 1,920 samples on 96 GPUs "
        "were 1,395 s (`ratio`, 45 GPUs idle), 677 s (`megatron-rigid`) and 588 s (`convex`); "
        "with it 689, 560 and 507 s."
    )
    for devices, batch in (LARGE, *SMALL):
        yield f"### {devices} GPUs, batch {batch:,}"
        yield table(
            ["model", "system", "samples/s", "MFU", "step", "time / ours", "idle", "dp×pp×tp"],
            [line for model in MODELS for line in system_rows(results, model, devices, batch)],
        )
    yield link(
        bars(
            "mllm-mfu",
            "MFU (simulated)",
            [f"{m.removeprefix('mllm-')}, {d}/{b}" for d, b in (LARGE, *SMALL) for m in MODELS],
            [
                Bars(
                    label=solver,
                    values=[
                        _mfu(results, m, solver, d, b) for d, b in (LARGE, *SMALL) for m in MODELS
                    ],
                )
                for solver in SYSTEMS
            ],
            unit="MFU, model and GPUs/batch",
        ),
        "MFU of four systems",
    )
    yield (
        f"### Frozen modules, {SMALL[0][0]} GPUs, batch {SMALL[0][1]}\n\n"
        "What trains; projectors always do (the encoder's last block and the generator's first)."
    )
    yield table(
        ["trains", *MODELS],
        [
            [f"{frozen}: {solver}", *(_frozen(results, m, solver, frozen) for m in MODELS)]
            for frozen in FROZEN
            for solver in FROZEN_SYSTEMS
        ],
    )
    yield (
        f"### Reordering, {SMALL[0][0]} GPUs, batch {SMALL[0][1]}\n\n"
        f"Steps of `convex`'s plans on batches drawn from {DATA_SAMPLES} samples of the "
        "workload's data (images per sample log-normal), in the order in which they are drawn and "
        "as the runtime orders them (which sample goes to which replica, and when). With one or "
        "two replicas and a long pipeline there is little to balance."
    )
    yield table(
        ["model", "all samples alike", "as drawn", "reordered", "drawn / reordered"],
        [_reordered(results, model) for model in MODELS],
    )


def system_rows(results: Results, model: str, devices: int, batch: int) -> Iterator[list[str]]:
    """One model under every system."""
    ours = results[_job(model, OURS, devices, batch)]
    for solver in SYSTEMS:
        found = results[_job(model, solver, devices, batch)]
        predicted = found.plan.predicted if found.plan else None
        yield [
            model if solver == OURS else "",
            solver,
            rate(found),
            percent(predicted.mfu) if predicted else "-",
            seconds(found) if predicted else "-",
            ratio(found, ours),
            percent(predicted.bubble_fraction) if predicted else "-",
            degrees(found),
        ]


def _mfu(results: Results, model: str, solver: str, devices: int, batch: int) -> float | None:
    plan = results[_job(model, solver, devices, batch)].plan
    return plan.predicted.mfu if plan else None


def _frozen(results: Results, model: str, solver: str, frozen: str) -> str:
    found = results[_job(model, solver, *SMALL[0], frozen=frozen)]
    ours = results[_job(model, OURS, *SMALL[0], frozen=frozen)]
    if found.plan is None:
        return NONE
    return f"{rate(found)}/s" + ("" if solver == OURS else f" (× {ratio(found, ours)})")


def _reordered(results: Results, model: str) -> list[str]:
    found = results[_job(model, OURS, *SMALL[0], data=True)]
    steps = sample_steps(found.costs) if found.plan else None
    if steps is None or steps.reordered is None:
        return [model, NONE, "-", "-", "-"]
    return [
        model,
        f"{steps.alike_s:.2f} s",
        f"{steps.drawn.mean_s:.2f} s",
        f"{steps.reordered.mean_s:.2f} s",
        f"{steps.drawn.mean_s / steps.reordered.mean_s:.3f}",
    ]
