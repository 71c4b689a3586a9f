"""Reordering: how good and how fast, beside the paper's algorithms and long searches.

    python benchmarks/bench_reorder.py [--seeds 8] [--models 9b,15b,72b] [--devices 96]
        [--write-docs]

Intra: 1,920 samples of log-normal work into groups of equal size; heaviest group over the bound
max(mean load, largest + the c-1 smallest). Inter: an encoder, an LLM and a generator in 1F1B,
one micro-batch a sample, the work of each log-normal; makespan over the best that long searches
and all others find. MMScale's algorithms: 2 as printed (smallest first, to the lightest group,
no equal counts) and 3 with the bound l-2p+2 and sorted where l < 2p-1. Step: the three MLLMs of
examples/papers as convex plans them on devices of their own (``--top 1``), batches whose images
are log-normal and whose sequences are equal; times per sample from the profile, messages free.
Times are CPU seconds of this process, so that other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from bench_quality import MODELS, degrees, planned, profiled
from numpy.typing import NDArray
from page import conditions, table, write_section

from mmplan.costs.cost_model import CostModel
from mmplan.costs.program_costs import ProgramCosts
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Op
from mmplan.program.model import Program
from mmplan.reordering.batch_order import BatchOrder
from mmplan.reordering.microbatch_order import FoundOrder, OrderBudget, full_budget, search_order
from mmplan.reordering.pipeline_recurrence import Recurrence, make_recurrence
from mmplan.reordering.replica_assignment import assign_groups
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile, load_profile

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]
SAMPLES = 1920
STEP_SEEDS = 3
LONG = OrderBudget(first=1024, generations=512, scans=1024)


# --- intra ----------------------------------------------------------------------------------


def lightest(work: Floats, groups: int, order: Indices) -> Indices:
    """Each sample, in that order, to the lightest group; no equal counts."""
    load = np.zeros(groups)
    result = np.empty(len(work), np.intp)
    for sample in order:
        group = int(load.argmin())
        result[sample] = group
        load[group] += work[sample]
    return result


def group_bound(work: Floats, num_groups: int) -> float:
    """The mean load, or the largest sample with the c - 1 smallest ones of its group of c."""
    ascending = np.sort(work)
    largest = ascending[-1] + ascending[: len(work) // num_groups - 1].sum()
    return max(float(work.sum()) / num_groups, float(largest))


def intra(seeds: int) -> str:
    rows: list[list[str]] = []
    for dp in (30, 60, 120):
        for sigma in (0.8, 1.2, 1.8):
            over: dict[str, list[float]] = {"ours": [], "random": [], "paper": []}
            sizes: list[int] = []
            seconds: list[float] = []
            for seed in range(seeds):
                rng = np.random.default_rng(seed)
                work = rng.lognormal(0, sigma, SAMPLES)
                bound = group_bound(work, dp)
                began = time.process_time()
                ours = assign_groups(work, dp)
                seconds.append(time.process_time() - began)
                paper = lightest(work, dp, np.argsort(work))
                random = rng.permutation(np.repeat(np.arange(dp), SAMPLES // dp))
                for name, groups in (("ours", ours), ("random", random), ("paper", paper)):
                    over[name].append(np.bincount(groups, weights=work).max() / bound)
                sizes += np.bincount(paper, minlength=dp).tolist()
            rows.append(
                [
                    f"DP {dp}, sigma {sigma}",
                    f"{max(over['ours']):.4f}",
                    f"{np.mean(over['random']):.2f}",
                    f"{np.mean(over['paper']):.3f} ({min(sizes)}-{max(sizes)} a group)",
                    f"{min(seconds) * 1e3:.2f}",
                    f"{float(np.median(seconds)) * 1e3:.2f}",
                ]
            )
    times = ["CPU ms, best", "CPU ms, median"]
    return table(["1,920 samples", "ours, worst", "random", "Algorithm 2", *times], rows)


# --- inter ----------------------------------------------------------------------------------


def order_makespans(
    recurrence: Recurrence, orders_RM: Indices, forward_SM: Floats, backward_SM: Floats
) -> Floats:
    """Makespans [R] when position k of every stage holds micro-batch ``orders_RM[r, k]``."""
    table = np.stack([forward_SM, backward_SM])
    time_NR = table[
        recurrence.backward.astype(int)[:, None],
        recurrence.stage[:, None],
        orders_RM.T[recurrence.mb],
    ]
    time_NR[recurrence.stage < 0] = 0
    return recurrence.makespans(time_NR)


def ordered(
    recurrence: Recurrence,
    forward_SM: Floats,
    backward_SM: Floats,
    *,
    seed: int,
    budget: OrderBudget | None = None,
) -> FoundOrder:
    """The order of the micro-batches of one replica that the search finds."""
    count = forward_SM.shape[1]
    return search_order(
        lambda orders: order_makespans(recurrence, orders, forward_SM, backward_SM),
        forward_SM + backward_SM,
        [range(count)],
        seed=seed,
        budget=budget or full_budget(count),
    )


def algorithm_3(recurrence: Recurrence, forward: Floats, backward: Floats) -> Indices:
    """MMScale's Algorithm 3, corrected."""
    stages, count = forward.shape
    by_size = np.argsort((forward + backward).sum(axis=0)).tolist()
    if count < 2 * stages - 1:
        return np.array(by_size)
    order, tail, rest = by_size[:1], by_size[1:stages], by_size[stages:]
    for interval in range(count - 2 * stages + 2):
        if not rest:
            break
        gap = first_interval(recurrence, forward, backward, order, interval)
        filled = 0.0
        for _ in range(stages - 1 if interval == 0 else 1):
            if rest:
                chosen = min(rest, key=lambda m: abs(gap - filled - forward[0, m]))
                rest.remove(chosen)
                order.append(chosen)
                filled += forward[0, chosen]
    return np.array(order + rest + tail)


def first_interval(
    recurrence: Recurrence, forward: Floats, backward: Floats, placed: list[int], index: int
) -> float:
    """How long the first stage, all that is placed behind it, waits for backward ``index``."""
    end = np.zeros((recurrence.num_nodes, 1))
    for node, stage in enumerate(recurrence.stage.tolist()):
        mb = int(recurrence.mb[node])
        if stage >= 0 and mb < len(placed):
            times = backward if recurrence.backward[node] else forward
            end[node] = times[stage, placed[mb]]
    own = end.copy()
    recurrence.makespans(end)  # Leaves the ends.
    first = recurrence.stage == 0
    before = first & (recurrence.mb < np.where(recurrence.backward, index, len(placed)))
    wanted = int(np.flatnonzero(first & recurrence.backward & (recurrence.mb == index))[0])
    return float(end[wanted, 0] - own[wanted, 0] - end[before].max())


def chain_plan(stages: int, count: int) -> Plan:
    """One module in 1F1B, micro-batches of one sample."""
    file = {"path": "none", "sha256": "0" * 64}
    link = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e12}
    return Plan.model_validate(
        {
            "version": 1,
            "name": "chain",
            "workload": file,
            "profile": file,
            "cluster": {
                "version": 1,
                "name": "chain",
                "nodes": 1,
                "devices_per_node": stages,
                "device": {"name": "any", "memory_bytes": 1e12, "peak_flops": 1e12},
                "links": {"intra_node": link, "inter_node": link},
            },
            "devices": stages,
            "tasks": {
                "default": {
                    "batch": count,
                    "modules": {"v": {"inputs": ["x"], "blocks": stages}},
                    "losses": {"l": {"inputs": ["v"]}},
                }
            },
            "solver": {
                "name": "none",
                "method": "hand",
                "seconds": 0,
                "objective_s": 0,
                "formula_bound_s": 0,
                "formula_gap": 0,
            },
            "units": [
                {
                    "name": "v",
                    "task": "default",
                    "module": "v",
                    "pp": stages,
                    "ranks": [[[rank] for rank in range(stages)]],
                    "blocks": [(block, block + 1) for block in range(stages)],
                    "samples": [count],
                    "microbatches": [[1] * count],
                    "schedule": {"kind": "1f1b"},
                }
            ],
            "losses": [{"name": "l", "task": "default", "ranks": [stages - 1]}],
            "predicted": {"iteration_s": 0, "samples_per_s": 0},
        }
    )


def chain_times(stages: int, count: int, sigma: float, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    images, drawn = rng.lognormal(0, sigma, count), rng.lognormal(0, sigma, count)
    sequence = rng.lognormal(0, sigma / 4, count)
    return np.vstack(
        [images / images.mean(), *[sequence / sequence.mean()] * (stages - 2), drawn / drawn.mean()]
    )


def inter(seeds: int) -> str:
    rows: list[list[str]] = []
    for stages, count in ((6, 32), (12, 64)):
        recurrence = make_recurrence(compile_plan(chain_plan(stages, count)))
        rows += [
            [
                f"{stages} x {count}, sigma {sigma}",
                *inter_row(recurrence, stages, count, sigma, seeds),
            ]
            for sigma in (0.4, 0.8, 1.2)
        ]
    header = [
        "stages x micro-batches",
        "ours, mean",
        "ours, worst",
        "random",
        "Algorithm 3",
        "CPU ms, best",
        "iteration for 1%",
    ]
    return table(header, rows)


def inter_row(
    recurrence: Recurrence, stages: int, count: int, sigma: float, seeds: int
) -> list[str]:
    ours: list[float] = []
    random: list[float] = []
    paper: list[float] = []
    seconds: list[float] = []
    for seed in range(seeds):
        forward = chain_times(stages, count, sigma, seed)
        backward = 2 * forward
        found = ordered(recurrence, forward, backward, seed=seed)
        for _ in range(3):
            began = time.process_time()
            ordered(recurrence, forward, backward, seed=seed)
            seconds.append(time.process_time() - began)
        draws = np.random.default_rng(seed).permuted(np.tile(np.arange(count), (64, 1)), axis=1)
        spans = order_makespans(recurrence, draws, forward, backward)
        third = algorithm_3(recurrence, forward, backward)
        third_span = float(order_makespans(recurrence, third[None], forward, backward)[0])
        longest = [
            ordered(recurrence, forward, backward, seed=1000 + k, budget=LONG).makespan
            for k in range(2)
        ]
        best = min(found.makespan, third_span, *longest)
        ours.append(found.makespan / best)
        random.append(float(spans.mean()) / best)
        paper.append(third_span / best)
    return [
        f"{np.mean(ours):.4f}",
        f"{max(ours):.4f}",
        f"{np.mean(random):.3f}",
        f"{np.mean(paper):.3f}",
        f"{min(seconds) * 1e3:.1f}",
        f"{min(seconds) * 100:.1f} s",
    ]


# --- whole steps ----------------------------------------------------------------------------


def step_times(
    program: Program, costs: ProgramCosts, recurrence: Recurrence
) -> Callable[[Indices, dict[str, Floats]], float]:
    """Seconds of a step whose micro-batches cost their mean work times the profile's time."""

    def seconds(order: Indices, work: dict[str, Floats]) -> float:
        done = {name: np.cumsum([0.0, *values[order]]) for name, values in work.items()}
        node_s = np.zeros((recurrence.num_nodes, 1))
        for node, index in enumerate(recurrence.stage.tolist()):
            if index >= 0:
                stage = program.stages[index]
                start, stop = stage.microbatches[recurrence.replica[node]][recurrence.mb[node]]
                load = done[stage.module][stop] - done[stage.module][start]
                op = Op.BACKWARD if recurrence.backward[node] else Op.FORWARD
                node_s[node] = load / (stop - start) * costs.compute_s(stage, op, stop - start)
        return float(recurrence.makespans(node_s)[0])

    return seconds


def steps(models: list[str], devices: int, seeds: int) -> str:
    """Steps of the MLLMs in random order and reordered."""
    rows: list[list[str]] = []
    options = argparse.Namespace(top=1, budget=1.0)
    with tempfile.TemporaryDirectory(prefix="mmplan-bench-") as folder:
        for model in models:
            profile = profiled(model, Path(folder))
            plan = planned(model, profile, devices, "convex", options).plan
            if plan is not None:
                rows += step_rows(plan, load_profile(profile), seeds)
    return table(["plan", "random", "reordered", "ratio", "ordering", "of the step"], rows)


def step_rows(plan: Plan, profile: Profile, seeds: int) -> Iterator[list[str]]:
    """A line for every skew."""
    program = compile_plan(plan)
    costs = ProgramCosts(program, CostModel(profile, plan.cluster, plan.training), plan)
    (task,) = program.batches
    order = BatchOrder(program, task)
    # The LLM: the module of the most stages.
    backbone = statistics.mode(stage.module for stage in program.stages)
    seconds = step_times(program, costs, make_recurrence(program))
    for sigma in (0.4, 0.8, 1.2):
        random: list[float] = []
        ours: list[float] = []
        taken: list[float] = []
        for seed in range(seeds):
            work = skewed_work(order, backbone, sigma, seed)
            rng = np.random.default_rng(seed)
            random.append(seconds(rng.permutation(order.batch), work))
            began = time.process_time()
            found = order(work, seed)
            taken.append(time.process_time() - began)
            ours.append(seconds(found, work))
        yield [
            f"{plan.name}, {degrees(plan.units)}, sigma {sigma}",
            f"{np.mean(random):.2f} s",
            f"{np.mean(ours):.2f} s",
            f"{np.sum(random) / np.sum(ours):.3f}",
            f"{min(taken) * 1e3:.0f} ms",
            f"{min(taken) / float(np.mean(ours)):.2%}",
        ]


def skewed_work(order: BatchOrder, backbone: str, sigma: float, seed: int) -> dict[str, Floats]:
    """Mean 1 in every module; sequences are equally long."""
    rng = np.random.default_rng(seed)
    work = {
        name: np.ones(order.batch) if name == backbone else rng.lognormal(0, sigma, order.batch)
        for name in order.modules
    }
    return {name: values / values.mean() for name, values in work.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, or nothing")
    parser.add_argument("--devices", type=int, default=96, help="of the models' plans")
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    sections: list[str] = []
    for part in parts(options):
        sections.append(part)
        print(part, end="\n\n", flush=True)
    where = conditions(load_before)
    print(where)
    if options.write_docs:
        command = f"`python benchmarks/bench_reorder.py --seeds {options.seeds}`"
        write_section("reorder", "\n\n".join([f"{command}. {where}", *sections]))


def parts(options: argparse.Namespace) -> Iterator[str]:
    """The page's paragraphs."""
    yield (
        "Which replica a sample goes to, heaviest group over the bound "
        f"max(mean load, largest + the c-1 smallest), {options.seeds} draws:\n\n"
        f"{intra(options.seeds)}"
    )
    yield (
        "The order in which micro-batches enter a pipeline, makespan over the best that long "
        f"searches and all others find, {options.seeds} draws; the last column is the step "
        f"of which the search takes 1%, and shorter steps get a shorter search:\n\n"
        f"{inter(options.seeds)}"
    )
    models = [name for name in options.models.split(",") if name]
    if models:
        yield (
            "Both together on whole steps, plans of devices of their own, skewed images and equal "
            f"sequences, {STEP_SEEDS} draws:\n\n{steps(models, options.devices, STEP_SEEDS)}"
        )


if __name__ == "__main__":
    main()
