"""Waves: random MetaOps planned by mpsp, against the proven bound, Spindle's waves and in turn.

    python benchmarks/bench_mpsp.py [--parts random,optimum,papers] [--seconds 1] [--instances 4]
        [--seed 0] [--write-docs]

5 to 30 MetaOps of 8 to 32 blocks on 8 to 256 devices. Half of them may run on any number of
devices, half on powers of two; a third of the speed curves are concave (Amdahl), a third lose
speed with many devices (a cost in log n, so that T is not monotone), a third lose 15% where
they leave a node of 8. The bound is the best that mpsp proves: speed envelope, graph, and
configuration program. `waves` is the scheduler of the paper as printed, with its barriers;
`in turn` runs the MetaOps one after another, each on the devices that make it fastest. Graphs
give every second MetaOp one or two producers.

`optimum` holds short instances against CP-SAT's optimum (pip install ortools), `papers` plans the
workloads of examples/papers that have several tasks (see waves.py).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import waves
from page import conditions, table, write_section

from mmplan.solvers.mpsp.bounds import phase_bound
from mmplan.solvers.mpsp.instance import Chain, Instance
from mmplan.solvers.mpsp.list_schedule import Evaluator
from mmplan.solvers.mpsp.search import find_schedules
from mmplan.solvers.mpsp.wavefront import wavefront
from mmplan.solvers.search_budget import SearchBudget

sys.path.insert(0, str(Path(__file__).parent.parent))

SIZES = ((5, 8), (10, 16), (20, 32), (20, 64), (30, 64), (30, 256))
# Seconds for the bound, beside those of the search.
BOUND_S = 5.0
# Short instances, and seconds for the optimum of each.
OPTIMA, OPTIMUM_S = 16, 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Times as shares of the bound, and how long the plan took."""

    ours: float
    waves: float
    in_turn: float
    seconds: float


def make_instance(rng: np.random.Generator, chains: int, devices: int, *, graph: bool) -> Instance:
    """Random MetaOps, see above."""
    made: list[Chain] = []
    for m in range(chains):
        after: tuple[int, ...] = ()
        if graph and m % 2:
            some = rng.choice(m, size=min(m, int(rng.integers(1, 3))), replace=False)
            after = tuple(sorted(int(i) for i in some))
        made.append(make_chain(rng, m, devices, after))
    return Instance(chains=tuple(made), devices=devices)


def make_chain(rng: np.random.Generator, index: int, devices: int, after: tuple[int, ...]) -> Chain:
    """One MetaOp."""
    blocks = int(rng.integers(8, 33))
    counts = np.arange(1, devices + 1)
    if rng.random() < 0.5:
        counts = 2 ** np.arange(int(np.log2(devices)) + 1)
    work, kind = rng.lognormal(0.0, 1.0), rng.integers(3)
    time_s = work * (rng.uniform(0.0, 0.05) + 1 / counts)
    if kind == 1:
        time_s += work * rng.uniform(0.0, 0.02) * np.log2(counts)
    if kind == 2:
        time_s *= np.where(counts > 8, 1.15, 1.0)
    forward_s = np.outer(time_s, np.full(blocks, 1 / blocks))
    return Chain(
        name=f"m{index}",
        counts=tuple(counts.tolist()),
        forward_s=forward_s,
        backward_s=2 * forward_s,
        after=after,
    )


def measure(instance: Instance, seconds: float) -> Result:
    """Plan one instance each way."""
    tables = [chain.both_s for chain in instance.chains]
    bound = phase_bound(instance, tables, SearchBudget(BOUND_S))
    bound_s, configurations = bound.seconds, bound.configurations
    started = time.perf_counter()
    drafts = find_schedules(
        instance, bound_s=bound_s, configurations=configurations, budget=SearchBudget(seconds)
    )
    took = time.perf_counter() - started
    evaluator = Evaluator(instance)
    ours = min(evaluator.run(draft).total_s for draft in drafts.values())
    return Result(
        ours=ours / bound_s,
        waves=wavefront(instance).seconds / bound_s,
        in_turn=sum(float(t.sum(axis=1).min()) for t in tables) / bound_s,
        seconds=took,
    )


def row(name: str, results: list[Result]) -> list[str]:
    """Median and worst of each."""
    cells = [name, str(len(results))]
    for key in ("ours", "waves", "in_turn"):
        values = [getattr(result, key) for result in results]
        cells += [f"{statistics.median(values):.3f}", f"{max(values):.3f}"]
    return [*cells, f"{max(result.seconds for result in results):.2f} s"]


def by_optimum(rng: np.random.Generator, *, graph: bool, seconds: float) -> list[str] | None:
    """Of short chains on 8 devices, where CP-SAT proves the optimum; None without ortools."""
    try:
        from tests.mpsp_optimum import optimum
    except ImportError:
        return None
    ours: list[float] = []
    bounds: list[float] = []
    for _ in range(OPTIMA):
        instance = short(rng, graph=graph)
        tables = [own.forward_s for own in instance.chains]
        best = optimum(instance, tables, limit_s=OPTIMUM_S, tick_s=1.0)
        if best.proven:
            bound = phase_bound(instance, tables, SearchBudget(BOUND_S))
            bound_s, configurations = bound.seconds, bound.configurations
            drafts = find_schedules(
                instance,
                bound_s=2 * bound_s,
                configurations=configurations,
                budget=SearchBudget(seconds),
            )
            found_s = min(Evaluator(instance).run(draft).forward_s for draft in drafts.values())
            ours.append(found_s / best.seconds)
            bounds.append(bound_s / best.seconds)
    cells = [f"{len(ours)} of {OPTIMA}"]
    for values, worst in ((ours, max), (bounds, min)):
        cells += (
            [f"{statistics.median(values):.3f}", f"{worst(values):.3f}"] if values else ["–"] * 2
        )
    return ["graph" if graph else "one level", *cells]


def short(rng: np.random.Generator, *, graph: bool) -> Instance:
    """Three to five MetaOps of two or three blocks, in whole numbers, as CP-SAT wants them."""
    made: list[Chain] = []
    for m in range(int(rng.integers(3, 6))):
        after = (int(rng.integers(m)),) if graph and m % 2 else ()
        own = make_chain(rng, m, 8, after)
        table = np.ceil(own.forward_s[:, : int(rng.integers(2, 4))] * 400)
        made.append(
            Chain(name=own.name, counts=own.counts, forward_s=table, backward_s=table, after=after)
        )
    return Instance(chains=tuple(made), devices=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="random,optimum,papers", help="what to run")
    parser.add_argument("--seconds", type=float, default=1.0, help="of search an instance")
    parser.add_argument("--instances", type=int, default=4, help="of each size and kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write-docs", action="store_true", help="replace the sections in docs")
    options = parser.parse_args()
    sections = {"random": random_part, "optimum": optimum_part, "papers": papers_part}
    for name in options.parts.split(","):
        text = sections[name](options)
        print(text)
        if options.write_docs and text:
            write_section("mpsp" if name == "random" else f"mpsp-{name}", text)


def random_part(options: argparse.Namespace) -> str:
    """Random MetaOps by their proven bound."""
    load = os.getloadavg()[0]
    rng = np.random.default_rng(options.seed)
    header = ["MetaOps, devices", "instances", "mpsp", "worst", "waves", "worst", "in turn"]
    header += ["worst", "slowest plan"]
    rows: list[list[str]] = []
    every: dict[bool, list[Result]] = {False: [], True: []}
    for graph in (False, True):
        for chains, devices in SIZES:
            results = [
                measure(make_instance(rng, chains, devices, graph=graph), options.seconds)
                for _ in range(options.instances)
            ]
            every[graph] += results
            rows.append(row(f"{chains}, {devices}{', graph' if graph else ''}", results))
            print(rows[-1], flush=True)
    rows.insert(len(SIZES), row("all of one level", every[False]))
    rows.append(row("all graphs", every[True]))
    return (
        "## Several tasks: makespan by the proven bound\n\n"
        f"`python benchmarks/bench_mpsp.py --parts random --seconds {options.seconds:g} "
        f"--instances {options.instances} --seed {options.seed}`. Medians, and the worst beside "
        f"each. {conditions(load)}\n\n{table(header, rows)}\n\n"
        "`mpsp` has so many seconds for each instance; `waves` is Spindle's scheduler as "
        "printed; `in turn` one MetaOp after another."
    )


def optimum_part(options: argparse.Namespace) -> str:
    """Short MetaOps by CP-SAT's optimum."""
    load, rng = os.getloadavg()[0], np.random.default_rng(options.seed)
    found = [by_optimum(rng, graph=graph, seconds=options.seconds) for graph in (False, True)]
    rows = [own for own in found if own is not None]
    if not rows:
        return ""
    header = ["MetaOps", "optimum proven", "mpsp", "worst", "bound", "lowest"]
    return (
        "## Several tasks: makespan by the optimum\n\n"
        f"`python benchmarks/bench_mpsp.py --parts optimum --seconds {options.seconds:g} --seed "
        f"{options.seed}`: 3 to 5 MetaOps of 2 or 3 blocks on 8 devices, forwards only, where "
        f"CP-SAT proves its optimum within {OPTIMUM_S:g} s. {conditions(load)}\n\n"
        f"{table(header, rows)}\n\n`bound` is the one that mpsp proves, by the same optimum."
    )


def papers_part(options: argparse.Namespace) -> str:
    """Workloads of full size: planning and transfers."""
    load = os.getloadavg()[0]
    found: list[list[str]] = []
    for own in waves.rows():
        found.append(own)
        print(own, flush=True)
    return (
        "## Several tasks at full size: planning, and transfers between waves\n\n"
        "`python benchmarks/bench_mpsp.py --parts papers`: workloads of examples/papers on nodes "
        "of 8 A800, analytic profiles, `mmplan solve --solver mpsp` with its default budget. "
        f"{conditions(load)}\n\n{table(waves.HEADER, found)}\n\n"
        "`planned in` has solving and simulating in it; loading the program takes "
        f"{waves.start_s():.2f} s more. `by bound`: the simulated step by the proven bound, "
        "which knows no links. `transfers`: share of the step in which it waits for data on their "
        "way between slices, as planned; `plain`: with each slice of the same schedule on the free "
        "ranks with the lowest numbers, and `step` its step by the planned one."
    )


if __name__ == "__main__":
    main()
