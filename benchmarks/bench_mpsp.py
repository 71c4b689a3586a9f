"""Waves: random MetaOps planned by mpsp, against the proven bound, Spindle's waves and in turn.

    python benchmarks/bench_mpsp.py [--seconds 1] [--instances 4] [--seed 0] [--write-docs]

5 to 30 MetaOps of 8 to 32 blocks on 8 to 256 devices. Half of them may run on any number of
devices, half on powers of two; a third of the speed curves are concave (Amdahl), a third lose
speed with many devices (a cost in log n, so that T is not monotone), a third lose 15% where
they leave a node of 8. The bound is the best that mpsp proves: speed envelope, graph, and
configuration program. `waves` is the scheduler of the paper as printed, with its barriers;
`in turn` runs the MetaOps one after another, each on the devices that make it fastest. Graphs
give every second MetaOp one or two producers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass

import numpy as np
from page import conditions, table, write_section

from mmplan.solvers.mpsp_find import find, phase_bound
from mmplan.solvers.mpsp_model import Chain, Instance
from mmplan.solvers.mpsp_schedule import Evaluator
from mmplan.solvers.mpsp_wavefront import wavefront

SIZES = ((5, 8), (10, 16), (20, 32), (20, 64), (30, 64), (30, 256))
# Seconds for the bound, beside those of the search.
BOUND_S = 5.0


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
    bound_s = phase_bound(instance, tables, BOUND_S)
    started = time.perf_counter()
    drafts = find(instance, bound_s=bound_s, limit_s=seconds)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="of search an instance")
    parser.add_argument("--instances", type=int, default=4, help="of each size and kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write-docs", action="store_true", help="replace the section in docs")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rng = np.random.default_rng(options.seed)
    header = ["MetaOps, devices", "instances", "mpsp", "worst", "waves", "worst", "in turn"]
    header += ["worst", "slowest plan"]
    rows: list[list[str]] = []
    every: list[Result] = []
    for graph in (False, True):
        for chains, devices in SIZES:
            results = [
                measure(make_instance(rng, chains, devices, graph=graph), options.seconds)
                for _ in range(options.instances)
            ]
            if not graph:
                every += results
            rows.append(row(f"{chains}, {devices}{', graph' if graph else ''}", results))
            print(rows[-1], flush=True)
    rows.insert(len(SIZES), row("all of one level", every))
    text = (
        "## Several tasks: makespan by the proven bound\n\n"
        f"`python benchmarks/bench_mpsp.py --seconds {options.seconds:g} --instances "
        f"{options.instances} --seed {options.seed}`. Medians, and the worst beside each. "
        f"{conditions(load)}\n\n{table(header, rows)}\n\n"
        "`mpsp` has so many seconds for each instance; `waves` is Spindle's scheduler as "
        "printed; `in turn` one MetaOp after another. For graphs the bound is weaker: the "
        "configuration program knows no order."
    )
    print(text)
    if options.write_docs:
        write_section("mpsp", text)


if __name__ == "__main__":
    main()
