"""The simulator on big clusters: with and without alike parts merged, and shared links.

    python benchmarks/bench_simulator.py [--models 15b,72b] [--devices 1296] [--batch 1920]
        [--repeats 3] [--write-docs]

MLLMs of examples/papers on nodes of 8 A800 from analytic profiles, plans by `convex`. Each plan's
whole program is compiled and simulated, every rank and instruction of it, with transfers that
share the nodes' network interfaces and without; then as the planner does it, one of all parts
that do the same. Both must give the same step. Last, the step is simulated with all sums of
gradients behind the last backward, as it would be without starts inside of it.

Times are CPU seconds of this process, the least of the repeats.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

from bench_quality import profiled, workload_path
from page import conditions, table, write_section

from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.planning import planner
from mmplan.processes import rare_collections
from mmplan.program.clocks import replay
from mmplan.program.compile import compile_plan
from mmplan.program.dependencies import find_dependencies
from mmplan.schema.cluster import load_cluster
from mmplan.schema.plan import Plan
from mmplan.schema.profile import load_profile
from mmplan.schema.workload import load_workload
from mmplan.simulation.step import durations_of, simulate
from mmplan.simulation.symmetry import simulated

Result = TypeVar("Result")
SAME = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model's times, CPU seconds, and what the step takes."""

    model: str
    ranks: int
    instructions: int
    transfers: int
    simulated_ranks: int
    compile_s: float
    whole_s: float
    shared_s: float
    alone_s: float
    merged_s: float
    step_s: float
    step_alone_s: float
    merged_step_s: float
    late_step_s: float
    exposed: float
    late_exposed: float


def main() -> int:
    options = _parse()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mmplan-bench-") as folder:
        entries = [_entry(model, Path(folder), options) for model in options.models.split(",")]
    text = f"{_table(entries)}\n\n{_verdict(entries)}"
    where = conditions(load_before)
    print(f"\n{text}\n\n{where}")
    if options.write_docs:
        command = (
            f"`python benchmarks/bench_simulator.py --models {options.models} "
            f"--devices {options.devices} --batch {options.batch} --repeats {options.repeats}`"
        )
        write_section("simulator", f"{command}. {where}\n\n{text}")
    return int(any(abs(e.merged_step_s / e.step_s - 1) > SAME for e in entries))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="15b,72b")
    parser.add_argument("--devices", type=int, default=1296)
    parser.add_argument("--batch", type=int, default=1920)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    return parser.parse_args()


def _plan(model: str, folder: Path, options: argparse.Namespace) -> tuple[Plan, CostModel]:
    profile_path = profiled(model, folder)
    profile = load_profile(profile_path)
    workload = load_workload(workload_path(model)).model_copy(update={"batch": options.batch})
    plan = planner.solve(
        workload,
        workload_path=workload_path(model),
        profile=profile,
        profile_path=profile_path,
        plan_path=folder / f"{model}.plan.json",
        cluster=load_cluster(f"a800-{-(-options.devices // 8)}"),
        devices=options.devices,
        solver="convex",
        top=1,
    )
    return plan, CostModel(profile, plan.cluster, plan.training)


@rare_collections()
def _entry(model: str, folder: Path, options: argparse.Namespace) -> Entry:
    print(f"MLLM-{model}: profile and plan", file=sys.stderr)
    plan, costs = _plan(model, folder, options)

    def least(call: Callable[[], Result]) -> tuple[float, Result]:
        runs = [_timed(call) for _ in range(options.repeats)]
        return min(runs, key=lambda run: run[0])

    compile_s, program = least(lambda: compile_plan(plan))
    priced = ProgramCosts(program, costs, plan)
    whole_s, step = least(lambda: simulate(program, priced))
    dependencies = find_dependencies(program)
    durations = durations_of(program, priced, dependencies)
    shared_s, _ = least(lambda: replay(dependencies, durations))
    apart = durations_of(program, priced, dependencies, contention=False)
    alone_s, alone = least(lambda: replay(dependencies, apart))
    merged_s, (merged, _) = least(lambda: simulated(plan, costs))
    shared = durations.shared
    with _without_starts():
        late, _ = simulated(plan, costs)
    with patch.object(ProgramCosts, "reduced_bytes", lambda *_: 0.0):
        others = simulated(plan, costs)[0].communication_fraction
    return Entry(
        model=model,
        ranks=step.devices_used,
        instructions=sum(map(len, program.instructions)),
        transfers=0 if shared is None else sum(item is not None for item in shared.message),
        simulated_ranks=sum(map(bool, merged.program.instructions)),
        compile_s=compile_s,
        whole_s=whole_s,
        shared_s=shared_s,
        alone_s=alone_s,
        merged_s=merged_s,
        step_s=step.iteration_s,
        step_alone_s=max(row[-1] for row in alone.end if row),
        merged_step_s=merged.iteration_s,
        late_step_s=late.iteration_s,
        exposed=merged.communication_fraction - others,
        late_exposed=late.communication_fraction - others,
    )


def _without_starts() -> AbstractContextManager[object]:
    """Inside, sums of gradients begin in REDUCE."""
    return patch("mmplan.program.compile.with_starts", lambda _, rows: rows)


def _timed(call: Callable[[], Result]) -> tuple[float, Result]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def _table(entries: list[Entry]) -> str:
    header = ("", *(f"MLLM-{entry.model.upper()}" for entry in entries))
    rows: list[tuple[str, Callable[[Entry], str]]] = [
        ("ranks of the plan", lambda e: f"{e.ranks:,}"),
        ("instructions", lambda e: f"{e.instructions:,}"),
        ("messages between nodes", lambda e: f"{e.transfers:,}"),
        ("compile, s", lambda e: f"{e.compile_s:.2f}"),
        ("simulate all ranks, s", lambda e: f"{e.whole_s:.2f}"),
        ("of it clocks, links shared, s", lambda e: f"{e.shared_s:.2f}"),
        ("clocks, links not shared, s", lambda e: f"{e.alone_s:.2f}"),
        ("shared / not shared", lambda e: f"{e.shared_s / e.alone_s:.2f}"),
        ("an instruction, all ranks, µs", lambda e: f"{_each_us(e.whole_s, e.instructions):.1f}"),
        ("with its compilation, µs", lambda e: f"{_each_us(_all_s(e), e.instructions):.1f}"),
        ("ranks simulated for all", lambda e: f"{e.simulated_ranks:,}"),
        ("compile and simulate these, s", lambda e: f"{e.merged_s:.2f}"),
        ("an instruction of the plan, µs", lambda e: f"{_each_us(e.merged_s, e.instructions):.1f}"),
        ("all ranks / these", lambda e: f"{_all_s(e) / e.merged_s:.1f}"),
        ("step, links shared, s", lambda e: f"{e.step_s:.4f}"),
        ("step, simulated ranks for all, s", lambda e: f"{e.merged_step_s:.4f}"),
        ("step, links not shared, s", lambda e: f"{e.step_alone_s:.4f}"),
        ("step, sums behind the last backward, s", lambda e: f"{e.late_step_s:.4f}"),
        ("step / that", lambda e: f"{e.step_s / e.late_step_s:.4f}"),
        ("sums of gradients exposed, %", lambda e: f"{100 * e.exposed:.2f}"),
        ("the same behind the last backward, %", lambda e: f"{100 * e.late_exposed:.2f}"),
        ("exposed / that", lambda e: f"{e.exposed / e.late_exposed:.2f}"),
    ]
    return table(header, [(name, *(text(entry) for entry in entries)) for name, text in rows])


def _all_s(entry: Entry) -> float:
    """CPU seconds without merging."""
    return entry.compile_s + entry.whole_s


def _each_us(seconds: float, count: int) -> float:
    return 1e6 * seconds / count


def _verdict(entries: list[Entry]) -> str:
    off = max(abs(entry.merged_step_s / entry.step_s - 1) for entry in entries)
    longer = ", ".join(
        f"MLLM-{e.model.upper()} {100 * (e.step_s / e.step_alone_s - 1):.1f}%" for e in entries
    )
    changes = f"by {off:.0e} at most, relatively: rounding" if off else "not by a digit"
    return (
        "CPU seconds of one process. Merging alike parts and tensor-parallel groups changes the "
        f"step {changes}. Sharing the nodes' links makes it longer: {longer}. Exposed is the share "
        f"of the ranks' time in which only a sum of gradients keeps them; computes beside a sum "
        f"are longer by profiles/devices.yaml."
    )


if __name__ == "__main__":
    sys.exit(main())
