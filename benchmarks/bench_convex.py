"""Exact solver of disaggregated pipelines beside the paper's Algorithm 1 in CVXPY.

    python benchmarks/bench_convex.py [--limit 400] [--seconds 60] [--write-docs]

MLLM-9B: ViT-Huge (0.63B, 32 blocks), a 7B decoder (32 blocks, 8,192 tokens a sample), Stable
Diffusion 2.1 (1B) as the generator, on nodes of 8 A800 80 GB. Times are analytic: 6 FLOPs a
parameter and token, at 50% of the peak on one device and less with more tp. Both methods
have the same candidates in one run:

- all: tp of every module in {1, 2, 4, 8}, dp of the LLM a factor of the batch, dp of the others
  a factor of that;
- small: tp of all, dp of the LLM only; encoder and generator have pp = 1, and their dp follows
  from their devices.

CVXPY solves one parametrised problem (DPP, CLARABEL, rescaled) for each candidate. Beyond
--limit candidates or --seconds an evenly spaced sample is solved, and its mean time stands for
the others; the optimum is then that of the closed form, which equals CVXPY's to 1e-6.

The exact solver's column is the whole of it: tables from the profile, options, search. Times
are CPU seconds of this process, so that other work on the machine changes little. "free" is
the exact solver without the restriction to factors, with vpp and larger micro-batches.
Objectives are seconds of one step; rounding takes each module's stages down or up, whichever
is best and fits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from page import conditions, table, write_section

from mmplan.costs.program_costs import CostModel
from mmplan.schema.plan import PlannedTraining
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload, resolve_tasks
from mmplan.solvers.convex.backbone_groups import Pipelines
from mmplan.solvers.convex.branch_and_bound import FormulaPlan, best_plans
from mmplan.solvers.convex.relaxation import AlgorithmOne, Candidates, Relaxation
from mmplan.solvers.problem import Problem, Request

SIZES = ((112, 240), (324, 480), (648, 960), (1296, 1920))
LARGE = (100_000, 122_880)
PEAK, USED = 3.12e14, 0.5
# Part of the speed of one device that each of tp devices keeps.
KEPT = {1: 1.0, 2: 0.95, 4: 0.88, 8: 0.78}
REPEATS = 5
# Best relaxations that are rounded.
ROUNDED = 300
IMAGE_TOKENS = 1024 + 1024  # 512 x 512 in patches of 16, two images a sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """What the analytic profile needs to know."""

    parameters: float
    blocks: int
    tokens: float
    width: int
    bytes_per_token: float


MODULES = {
    "vision": Module(
        parameters=6.3e8, blocks=32, tokens=IMAGE_TOKENS, width=1280, bytes_per_token=34 * 1280
    ),
    "llm": Module(parameters=7e9, blocks=32, tokens=8192, width=4096, bytes_per_token=34 * 4096),
    "image": Module(parameters=1e9, blocks=24, tokens=4096, width=1024, bytes_per_token=34 * 1024),
}


def module_profile(module: Module) -> dict[str, Any]:
    """6 FLOPs a parameter and token, a third of them forward; bf16 activations."""
    points: list[dict[str, float]] = []
    for tp, kept in KEPT.items():
        forward_s = 2 * module.parameters * module.tokens / (PEAK * USED * tp * kept)
        held = module.bytes_per_token * module.tokens * module.blocks / tp
        points += [
            {
                "tp": tp,
                "microbatch": size,
                "forward_s": 0.002 + size * forward_s,
                "backward_s": 0.004 + size * 2 * forward_s,
                "activation_bytes": size * held,
            }
            for size in (1, 2)
        ]
    cut = module.tokens * module.width * 2
    return {
        "blocks": module.blocks,
        "parameters": module.parameters,
        "flops_per_sample": 2 * module.parameters * module.tokens,
        "output_bytes_per_sample": cut,
        "boundary_bytes_per_sample": cut,
        "points": points,
    }


def make_problem(devices: int, batch: int) -> Problem:
    """MLLM-9B on so many A800, bf16 with ZeRO-1 off and full recomputation of the LLM."""
    profile = Profile.model_validate(
        {
            "name": "mllm-9b",
            "source": "given",
            "cluster": {
                "name": "a800",
                "nodes": -(-devices // 8),
                "devices_per_node": 8,
                "device": {"name": "A800-80GB", "memory_bytes": 8e10, "peak_flops": PEAK},
                "links": {
                    "intra_node": {"latency_s": 5e-6, "bandwidth_bytes_per_s": 1.5e11},
                    "inter_node": {"latency_s": 2e-5, "bandwidth_bytes_per_s": 1e11},
                },
            },
            "modules": {name: module_profile(module) for name, module in MODULES.items()},
        }
    )
    factory = "mmplan.zoo.towers:text"
    modules = {
        "vision": {"factory": factory, "inputs": ["pixels"]},
        "llm": {"factory": factory, "inputs": ["vision"], "recompute": "full"},
        "image": {"factory": factory, "inputs": ["llm"]},
    }
    job = Workload.model_validate(
        {
            "name": "mllm-9b",
            "batch": batch,
            "modules": modules,
            "losses": {"mse": {"factory": "mmplan.zoo.losses:clip", "inputs": ["image"]}},
            "train": {"precision": "bf16"},
        }
    )
    tasks = resolve_tasks(job)
    training = PlannedTraining(precision="bf16")
    request = Request(
        workload=job,
        tasks=tasks,
        costs=CostModel(profile, profile.cluster, training),
        cluster=profile.cluster,
        devices=devices,
    )
    return Problem(request=request, task=tasks["default"])


def exact(problem: Problem, *, factors: bool) -> tuple[Pipelines, FormulaPlan]:
    """Everything the solver does but the plan's units."""
    pipelines = (
        Pipelines(problem, microbatches=[1], interleaved=False, divisible=True)
        if factors
        else Pipelines(problem)
    )
    found = best_plans(pipelines.groups(), pipelines.edges, devices=problem.devices)
    return pipelines, found[0]


def timed_exact(devices: int, batch: int, *, factors: bool) -> tuple[float, float]:
    """(median seconds, objective); the cost model is new each time, nothing is remembered."""
    seconds: list[float] = []
    value = float("nan")
    for _ in range(REPEATS):
        problem = make_problem(devices, batch)
        started = time.process_time()
        value = exact(problem, factors=factors)[1].value_s
        seconds.append(time.process_time() - started)
    return statistics.median(seconds), value


@dataclass(frozen=True, slots=True, kw_only=True)
class Enumerated:
    """Algorithm 1 over many candidates.

    Attributes:
        solved: how many CVXPY solved; the seconds of all are in proportion.
        bound_s: the least relaxed objective.
        first_s: the best relaxation's plan that fits, None without any.
        rounded_s: the best plan of the best relaxations.
        error: largest relative difference between CVXPY and the closed form.
    """

    count: int
    solved: int
    seconds: float
    closed_s: float
    bound_s: float
    first_s: float | None
    rounded_s: float | None
    error: float


def enumerate_all(problem: Problem, *, limit: int, seconds: float) -> Enumerated:
    """tp and dp of every module: warm-ups are constants, pp is free."""
    pipelines = Pipelines(problem, microbatches=[1], interleaved=False, divisible=True)
    pipelines.groups()
    relaxation = Relaxation(pipelines)
    started = time.process_time()
    found = [relaxation.candidates(frame) for frame in pipelines.frames]
    closed_s = time.process_time() - started
    rows = [(group, row) for group, own in enumerate(found) for row in range(len(own.value_s))]
    program = AlgorithmOne(len(pipelines.modules))
    zeros = np.zeros(len(pipelines.modules))
    chosen = rows[:: max(1, len(rows) // limit)]
    solved, error = 0, 0.0
    started = time.process_time()
    for group, row in chosen:
        own = found[group]
        answer = program.solve(
            steady_s=(own.frame.steps - 1) * own.work_s[row],
            warm_s=zeros,
            low=own.low[row],
            devices=problem.devices,
        )
        solved += 1
        expected = own.value_s[row] - own.warm_s[row]
        if answer is not None and expected > 0:
            error = max(error, abs(answer.value_s / expected - 1))
        if time.process_time() - started > seconds:
            break
    spent_s = (time.process_time() - started) / solved * len(rows)
    first_s, rounded_s = rounded_values(problem, relaxation, program, found)
    return Enumerated(
        count=len(rows),
        solved=solved,
        seconds=spent_s,
        closed_s=closed_s,
        bound_s=min(float(own.value_s[0]) for own in found if len(own.value_s)),
        first_s=first_s,
        rounded_s=rounded_s,
        error=error,
    )


def rounded_values(
    problem: Problem, relaxation: Relaxation, program: AlgorithmOne, found: Sequence[Candidates]
) -> tuple[float | None, float | None]:
    """Objectives after rounding: of the best relaxation that fits, and the best of ROUNDED."""
    rows = sorted(
        (float(own.value_s[row]), group, row)
        for group, own in enumerate(found)
        for row in range(min(ROUNDED, len(own.value_s)))
    )
    values: list[float] = []
    for _, group, row in rows[:ROUNDED]:
        own = found[group]
        answer = program.solve(
            steady_s=(own.frame.steps - 1) * own.work_s[row],
            warm_s=np.zeros(own.work_s.shape[1]),
            low=own.low[row],
            devices=problem.devices,
        )
        plan = None if answer is None else relaxation.rounded(own, row, answer.devices)
        if plan is not None:
            values.append(plan.value_s)
    return (values[0], min(values)) if values else (None, None)


def enumerate_small(problem: Problem, *, seconds: float) -> tuple[int, float, float]:
    """(candidates, seconds for all, least objective): tp of all, dp of the LLM only."""
    pipelines = Pipelines(problem, microbatches=[1], interleaved=False, divisible=True)
    pipelines.groups()
    program, best, solved = AlgorithmOne(3), float("inf"), 0
    one = np.ones(1, dtype=np.int64)
    rows = [own.rows(one, problem.devices) for own in pipelines.tables]
    per_sample = [
        own.times(each, one)[1][each.shape == 0]
        for own, each in zip(pipelines.tables, rows, strict=True)
    ]
    tps = [own.tps for own in pipelines.tables]
    combinations = [
        (frame, index)
        for frame in pipelines.frames
        for index in np.ndindex(*(len(own) for own in tps))
    ]
    started = time.process_time()
    for frame, index in combinations:
        tp = np.array([own[i] for own, i in zip(tps, index, strict=True)], dtype=np.float64)
        micro = np.array([own[i] for own, i in zip(per_sample, index, strict=True)])
        work = frame.replicas * tp * micro
        low = tp * np.where(np.arange(3) == pipelines.backbone, frame.replicas, 1)
        warm = np.where(np.arange(3) == pipelines.backbone, 0.0, work)
        answer = program.solve(
            steady_s=(frame.steps - 1) * work, warm_s=warm, low=low, devices=problem.devices
        )
        solved += 1
        if answer is not None:
            best = min(best, answer.value_s + float(micro[pipelines.backbone]))
        if time.process_time() - started > seconds:
            break
    spent_s = (time.process_time() - started) / solved * len(combinations)
    return len(combinations), spent_s, best


def compared(rounded_s: float | None, exact_s: float) -> str:
    """A rounded plan beside the optimum."""
    return "-" if rounded_s is None else f"{rounded_s:.4f} ({rounded_s / exact_s - 1:+.1%})"


SPEED = (
    "devices, batch",
    "exact ms",
    "candidates (solved)",
    "CVXPY, all, s",
    "ratio",
    "closed form, all, s",
    "candidates, small",
    "CVXPY, small, s",
    "ratio",
)
QUALITY = (
    "devices, batch",
    "relaxation",
    "exact",
    "rounded, first that fits",
    f"rounded, best of {ROUNDED}",
    "free",
    "free, ms",
    "CVXPY - closed form",
)


def compare(
    devices: int, batch: int, options: argparse.Namespace
) -> tuple[Sequence[str], Sequence[str]]:
    """A line of each table."""
    own_s, value = timed_exact(devices, batch, factors=True)
    problem = make_problem(devices, batch)
    all_ = enumerate_all(problem, limit=options.limit, seconds=options.seconds)
    count, small_s, _ = enumerate_small(problem, seconds=options.seconds)
    free_s, free_value = timed_exact(devices, batch, factors=False)
    size = f"{devices}, {batch}"
    return (
        size,
        f"{own_s * 1e3:.3g}",
        f"{all_.count} ({all_.solved})",
        f"{all_.seconds:.3g}",
        f"{all_.seconds / own_s:.3g}",
        f"{all_.closed_s:.3g}",
        str(count),
        f"{small_s:.3g}",
        f"{small_s / own_s:.3g}",
    ), (
        size,
        f"{all_.bound_s:.4f}",
        f"{value:.4f}",
        compared(all_.first_s, value),
        compared(all_.rounded_s, value),
        f"{free_value:.4f}",
        f"{free_s * 1e3:.3g}",
        f"{all_.error:.1e}",
    )


def large() -> str:
    """The largest problem, in a sentence."""
    parts: list[str] = []
    for factors in (True, False):
        own_s, value = timed_exact(*LARGE, factors=factors)
        what = "factors only" if factors else "free"
        parts.append(f"{own_s * 1e3:.3g} ms ({what}, {value:.4f} s a step)")
    return f"N = {LARGE[0]:,}, batch {LARGE[1]:,}: {' and '.join(parts)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit", type=int, default=400, help="CVXPY problems solved per size")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of one CVXPY run")
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    lines: list[tuple[Sequence[str], Sequence[str]]] = []
    for devices, batch in SIZES:
        lines.append(compare(devices, batch, options))
        print(f"{devices} devices: {lines[-1][0][4]} times", file=sys.stderr, flush=True)
    sections = [
        f"CPU seconds, ours the median of {REPEATS}:",
        table(SPEED, [speed for speed, _ in lines]),
        "Seconds of a step by the formula:",
        table(QUALITY, [quality for _, quality in lines]),
        large(),
    ]
    where = conditions(load_before)
    print("\n\n".join([*sections, where]))
    if options.write_docs:
        command = f"`python benchmarks/bench_convex.py --limit {options.limit}`"
        write_section("convex", "\n\n".join([f"{command}. {where}", *sections]))


if __name__ == "__main__":
    main()
