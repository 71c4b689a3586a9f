"""Regret of `auto`: its plans beside those of a long random search in simulation.

    python benchmarks/bench_regret.py [--names "towers-0, 4;clip-digits, 8"] [--evaluations 1000]
        [--results FILE] [--seconds S] [--write-docs]

See regret_cases.py for the workloads and long_search.py for the search, which simulates 1,000 plans
for each: random restarts, and changes of the plan of `auto` that its own search does not have.
Regret is what the step of `auto` takes more than the shortest of both sides. Each workload's
result is appended to the file of results; a rerun goes on behind them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import regret_cases
from long_search import LongSearch
from page import conditions, table, write_section

from mmplan.errors import InfeasibleError
from mmplan.schema.plan import Plan

Result = dict[str, Any]


def result(case: regret_cases.Case, evaluations: int) -> Result:
    """Both sides of a workload."""
    started = time.process_time()
    own: Result = {"name": case.name, "shape": case.shape, "devices": case.devices}
    try:
        plan = regret_cases.solved(case)
    except InfeasibleError as error:
        return own | {"infeasible": error.message}
    solved = time.process_time()
    found = LongSearch(case.job, case.profile, plan, seed=0).run(evaluations)
    auto_s = plan.predicted.iteration_s
    best = found.plan if found.plan and found.plan.predicted.iteration_s < auto_s else plan
    return own | {
        "auto_s": auto_s,
        "shortest_s": best.predicted.iteration_s,
        "regret": auto_s / best.predicted.iteration_s - 1,
        "gap": plan.solver.gap,
        "evaluations": found.evaluations,
        "solver": plan.solver.name,
        "auto": words(plan),
        "shortest": words(best),
        "auto_cpu_s": solved - started,
        "search_cpu_s": time.process_time() - solved,
    }


def words(plan: Plan) -> str:
    """A plan in a line."""
    units = "; ".join(
        f"{unit.name}@{min(unit.all_ranks)}: tp {unit.tp} pp {unit.pp}x{unit.vpp} dp {unit.dp} "
        f"mb {max(map(max, unit.microbatches))} {unit.schedule.kind} lead {unit.schedule.lead}"
        + (f" sync_lead {unit.schedule.sync_lead}" if unit.schedule.sync_lead else "")
        + (" split" if unit.schedule.split_backward else "")
        + (" even" if unit.schedule.even_in_flight else "")
        for unit in plan.units
    )
    order = plan.order.rule + (" timed" if plan.order.times else "") if plan.order else "usual"
    recomputing = ",".join(sorted(plan.recomputing))
    turns = f" in turn {','.join(plan.in_turn)}" if plan.in_turn else ""
    full = f" recompute {recomputing}" if recomputing else ""
    return f"{units}; zero {plan.training.zero}, order {order}{turns}{full}"


def section(results: Sequence[Result]) -> str:
    """The table by class, and the workloads with a regret."""
    done = [item for item in results if "regret" in item]
    shapes = [s for s in regret_cases.SHAPES if any(item["shape"] == s for item in done)]
    rows = [row(shape, [i for i in done if i["shape"] == shape]) for shape in shapes]
    rows.append(row("all", done))
    header = ["workloads", "number", "devices", "plans simulated", "median", "above 2%", "worst"]
    worse = sorted((i for i in done if i["regret"] > 0.005), key=lambda i: -i["regret"])
    lines = [
        f"- {i['name']} devices, {i['regret']:.1%}: {i['auto_s']:.4g} s by {i['solver']}, "
        f"{i['shortest_s']:.4g} s is possible."
        for i in worse
    ]
    unsolved = [f"- {i['name']} devices: {i['infeasible']}." for i in results if "infeasible" in i]
    listed = "\n".join([*lines, *unsolved])
    return "\n\n".join([table(header, rows), listed or "None has 0.5% or more."])


def row(label: str, items: Sequence[Result]) -> list[str]:
    """A line of the table."""
    regrets, devices = [item["regret"] for item in items], [item["devices"] for item in items]
    return [
        label,
        str(len(items)),
        f"{min(devices)} to {max(devices):,}",
        f"{sum(item['evaluations'] for item in items):,}",
        f"{median(regrets):.2%}",
        str(sum(regret > 0.02 for regret in regrets)),
        f"{max(regrets):.1%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", help="some workloads, with ; between them")
    parser.add_argument("--evaluations", type=int, default=1000, help="plans simulated for each")
    parser.add_argument(
        "--results", type=Path, default=Path("build/regret.jsonl"), help="goes on here"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="of CPU, then none is begun"
    )
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    names = options.names.split(";") if options.names else regret_cases.names()
    lines = options.results.read_text("utf-8").splitlines() if options.results.exists() else []
    results = {item["name"]: item for item in map(json.loads, lines)}
    for name in names:
        if name not in results and time.process_time() < options.seconds:
            item = results[name] = result(regret_cases.case(name), options.evaluations)
            options.results.parent.mkdir(parents=True, exist_ok=True)
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(item) + "\n")
            print(json.dumps(item), file=sys.stderr, flush=True)
    found = [results[name] for name in names if name in results]
    text = f"{section(found)}\n\n{len(found)} of {len(regret_cases.names())} workloads were run."
    print(text)
    if options.write_docs:
        command = f"`python benchmarks/bench_regret.py --evaluations {options.evaluations}`"
        write_section("regret", f"{text}\n\n{command}. {conditions(load_before)}")


if __name__ == "__main__":
    main()
