"""Training steps on two machines with a slow link between them; needs root.

    python benchmarks/bench_hosts.py [--megabits 3,12,48,100] [--workloads balanced,chain,tasks]
                                     [--pairs 3] [--steps 1] [--write-docs]

The machines are network namespaces of this one with a core each, and the link between them is
throttled (tc, token bucket). A core of some 50 GFLOP/s behind 3 Mbit/s has the bytes per FLOP of
DistMM's cluster, where 8 V100 at 40% of 125 TFLOP/s share 25 Gbit/s. All systems of a row live in
the same processes, take the same samples from the same weights, and are timed in turns: plans of
the planner, its `megatron` and `colocated` baselines, the best plan of one machine alone, and for
two towers also DistributedDataParallel with gathered features, as open_clip has it, with and
without bfloat16 gradients, and FSDP2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench_training import Entry, summarise
from namespaces import Host, network
from page import conditions, table, write_section
from peers import COMPRESSED, PEERS, Race, RaceResult
from planning import described, profiled, workload_path

from mmlaunch.launch.hosts import Meeting
from mmlaunch.launch.launch import launch
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.planning import planner
from mmplan.schema.base import save_document
from mmplan.schema.cluster import Cluster, Link
from mmplan.schema.plan import Plan
from mmplan.schema.profile import load_profile
from mmplan.schema.workload import load_workload

WORKLOADS = {
    "balanced": "two towers of equal size",
    "chain": "an image encoder into a decoder",
    "tasks": "three contrastive tasks that share encoders",
}
TOWERS = ("balanced",)
SOLVERS = ("auto", "colocated", "megatron")
ALONE = "one machine alone"
# Of a message between namespaces, besides its bytes: what a ping takes here, rounded up.
_LATENCY_S = 2e-4
_PORT = 29413
# The slowest system at the slowest link sends all parameters several times.
_TIMEOUT_S = 900.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if options.agent is not None:
        return _agent(Path(options.agent), options.node)
    load_before = os.getloadavg()[0]
    began = time.monotonic()
    sections: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mmplan-bench-") as folder:
        for name in options.workloads.split(","):
            print(f"{name}: profiling", file=sys.stderr)
            profile = profiled(name, Path(folder) / name, rounds=1)
            sections += [
                _race(name, profile, float(megabits), options, Path(folder))
                for megabits in options.megabits.split(",")
            ]
    where = conditions(load_before)
    print(f"\n{where}\n{time.monotonic() - began:.0f} s in all")
    if options.write_docs:
        command = (
            f"`python benchmarks/bench_hosts.py --megabits {options.megabits} --workloads "
            f"{options.workloads} --pairs {options.pairs} --steps {options.steps}`"
        )
        write_section("hosts", "\n\n".join([f"{command}. {where}", *sections]))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabits", default="3,12,48,100", help="of the link, a second")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="some of these")
    parser.add_argument("--pairs", type=int, default=3, help="turns of every system")
    parser.add_argument("--steps", type=int, default=1, help="timed steps of a turn")
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    parser.add_argument("--agent", help=argparse.SUPPRESS)
    parser.add_argument("--node", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    unknown = set(options.workloads.split(",")) - set(WORKLOADS)
    if unknown or options.pairs < 1 or options.steps < 1:
        parser.error(f"unknown: {unknown}" if unknown else "at least one pair and one step")
    return options


def _race(
    name: str, profile: Path, megabits: float, options: argparse.Namespace, folder: Path
) -> str:
    plans, notes = _plans(name, profile, megabits)
    print(f"{name}: {megabits:g} Mbit/s: {', '.join(plans)}", file=sys.stderr)
    job = Race(
        workload=str(workload_path(name)),
        plans={label: str(path) for label, (path, _) in plans.items()},
        pairs=options.pairs,
        steps=options.steps,
        peers=(*PEERS, COMPRESSED) if name in TOWERS else (),
    )
    with network(2) as hosts:
        for host in hosts:
            host.throttle(megabits)
        result = _raced(hosts, job, folder / f"{name}-{megabits:g}")
    entries = summarise(result, batch=load_workload(workload_path(name)).batch)
    text = "\n".join(
        [
            f"### {name}: {WORKLOADS[name]}; two machines, {megabits:g} Mbit/s between them",
            "",
            _entries_table(entries, {label: plan for label, (_, plan) in plans.items()}),
            "",
            *(f"- `{label}`: {described(plan)}." for label, (_, plan) in plans.items()),
            *(f"- {note}" for note in notes),
        ]
    )
    print(f"\n{text}", flush=True)
    return text


def _plans(
    name: str, profile: Path, megabits: float
) -> tuple[dict[str, tuple[Path, Plan]], list[str]]:
    """The plans for two machines with that link; one that others chose too is not timed twice."""
    costs = load_profile(profile)
    link = Link(latency_s=_LATENCY_S, bandwidth_bytes_per_s=megabits * 1e6 / 8)
    links = costs.cluster.links.model_copy(
        update={"inter_node": link, "inter_node_collectives": None}
    )
    cluster = costs.cluster.model_copy(update={"nodes": 2, "devices_per_node": 1, "links": links})
    costs = costs.model_copy(update={"cluster": cluster})
    path = profile.with_name(f"{name}-{megabits:g}.profile.json")
    save_document(costs, path)
    plans: dict[str, tuple[Path, Plan]] = {}
    notes: list[str] = []
    for label in (*SOLVERS, ALONE):
        target = path.with_suffix(f".{label.replace(' ', '-')}.plan.json")
        try:
            plan = planner.solve(
                load_workload(workload_path(name)),
                workload_path=workload_path(name),
                profile=costs,
                profile_path=path,
                plan_path=target,
                devices=1 if label == ALONE else None,
                solver="auto" if label == ALONE else label,
            )
        except (InfeasibleError, InvalidInputError) as error:
            notes.append(f"`{label}`: no plan: {error.message}.")
            continue
        if label == ALONE:
            plan = _with_an_idle_machine(plan, cluster)
        same = next((other for other, (_, p) in plans.items() if p.units == plan.units), None)
        if same is None:
            save_document(plan, target)
            plans[label] = target, plan
        else:
            notes.append(f"`{label}` is the same plan as `{same}`.")
    return plans, notes


def _with_an_idle_machine(plan: Plan, cluster: Cluster) -> Plan:
    """A plan of one device, for the processes of two."""
    memory = (*plan.predicted.memory_bytes, 0.0)
    return plan.model_copy(
        update={
            "devices": 2,
            "cluster": cluster,
            "predicted": plan.predicted.model_copy(update={"memory_bytes": memory}),
        }
    )


def _raced(hosts: Sequence[Host], job: Race, folder: Path) -> RaceResult:
    """Run the race with a process on each machine, which has one core.

    Raises:
        RuntimeError: it failed; has what machine 0 said.
    """
    folder.mkdir()
    told = folder / "job.json"
    told.write_text(json.dumps({"race": asdict(job), "endpoint": f"{hosts[0].address}:{_PORT}"}))
    cores = sorted(os.sched_getaffinity(0))
    agent = [sys.executable, __file__, "--agent", str(told), "--node"]
    processes = [
        host.start(
            ["taskset", "--cpu-list", str(cores[node % len(cores)]), *agent, str(node)],
            cwd=folder,
            env=os.environ,
        )
        for node, host in enumerate(hosts)
    ]
    said = [process.communicate()[1] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError("\n".join(said))
    return RaceResult(**json.loads((folder / "result.json").read_text()))


def _agent(told: Path, node: int) -> int:
    """One machine's part of a race; machine 0 writes the result beside the job."""
    job = json.loads(told.read_text())
    results = launch(
        entry="peers:race",
        args=(Race(**job["race"]),),
        num_ranks=2,
        per_node=1,
        run_dir=told.parent / "run",
        timeout_s=_TIMEOUT_S,
        meeting=Meeting(num_nodes=2, node_rank=node, endpoint=job["endpoint"]),
    )
    if node == 0:
        (told.parent / "result.json").write_text(json.dumps(results[0]))
    return 0


def _entries_table(entries: Sequence[Entry], plans: dict[str, Plan]) -> str:
    ours = entries[0].system
    return table(
        ("system", "median s/step", "predicted", f"time / {ours}'s", "least to most of the pairs"),
        [
            (
                entry.system,
                f"{entry.median_s:.3f}",
                f"{plans[entry.system].predicted.iteration_s:.3f}" if entry.system in plans else "",
                f"{entry.ratio:.2f}",
                f"{entry.ratio_min:.2f} to {entry.ratio_max:.2f}",
            )
            for entry in entries
        ],
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {' '.join(error.cmd)}: {error.stderr.decode().strip()}; it needs root")
