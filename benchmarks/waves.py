"""Plans of several tasks at full size: how long planning takes, and what moving data costs.

Part of bench_mpsp.py. Transfers: a plan is simulated as it is and with messages between slices
for free; what that saves is the time for which the step waits for them. `plain` is the same
schedule with each slice on the free ranks with the lowest numbers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.planning import planner
from mmplan.profiling.analytic import analytic_profile
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Op
from mmplan.program.model import Edge, Stage
from mmplan.program.network import Traffic
from mmplan.schema.base import save_document
from mmplan.schema.cluster import load_cluster
from mmplan.schema.plan import Plan, PlanLoss, Unit, Wave
from mmplan.schema.profile import Profile, load_profile
from mmplan.schema.workload import load_workload
from mmplan.simulation.step import simulate

PAPERS = Path(__file__).parent.parent / "examples" / "papers"
CLIP_4, CLIP_7 = ("VT", "VA", "VD", "MT"), ("VT", "VA", "VD", "MT", "AT", "VH", "DT")
# Workload, tasks (none: all), numbers of devices.
CASES: tuple[tuple[str, tuple[str, ...], tuple[int, ...]], ...] = (
    ("multitask-clip", CLIP_4, (8, 16, 32)),
    ("multitask-clip", CLIP_7, (8, 16, 32)),
    ("multitask-clip", (), (8, 16, 32, 64, 256)),
    ("ofasys", (), (8, 16, 32, 64, 256)),
    ("qwen-val-9b", (), (8, 16, 32, 64, 256)),
    ("qwen-val-30b", (), (32, 64, 256)),
    ("qwen-val-70b", (), (64, 256)),
)
HEADER = [
    "workload",
    "devices",
    "planned in",
    "CPU",
    "iteration",
    "by bound",
    "transfers",
    "plain",
    "step",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan and the seconds that it took, simulation of candidates included."""

    plan: Plan
    profile: Profile
    wall_s: float
    cpu_s: float


class FreeMessages(ProgramCosts):
    """Costs of a program whose messages take no time."""

    def message_s(
        self, source: int, target: int, edge: Edge, samples: int, backward: bool
    ) -> float:
        return 0.0

    def message_traffic(
        self, source: int, target: int, edge: Edge, samples: int, backward: bool
    ) -> Traffic | None:
        return None

    def shares_s(self, stage: Stage, op: Op, samples: int) -> float:
        return 0.0


def rows() -> Iterator[list[str]]:
    """A row of the table for every case."""
    with tempfile.TemporaryDirectory() as folder:
        for name, tasks, sizes in CASES:
            profile = profiled(name, Path(folder))
            for devices in sizes:
                yield row(name, tasks, devices, profile, Path(folder))


def row(name: str, tasks: Sequence[str], devices: int, profile: Path, folder: Path) -> list[str]:
    """Plan one case and say what its transfers take."""
    label = f"{name}, {len(tasks)} tasks" if tasks else name
    try:
        made = planned(name, tasks, devices, profile, folder)
    except InfeasibleError as error:
        return [label, str(devices), error.message, *["–"] * (len(HEADER) - 3)]
    plan = made.plan
    return [
        label,
        str(devices),
        f"{made.wall_s:.2f} s",
        f"{made.cpu_s:.2f} s",
        f"{plan.predicted.iteration_s:.4g} s",
        f"{plan.predicted.iteration_s / plan.solver.formula_bound_s:.3f}",
        *transfer_cells(plan, made.profile),
    ]


def transfer_cells(plan: Plan, profile: Profile) -> list[str]:
    """Shares for transfers as placed and in plain order, and the plain step by the placed one."""
    own, other = transfers(plan, profile), transfers(plain(plan), profile)
    cells = ["–" if x is None else f"{100 * x[0]:.2f}%" for x in (own, other)]
    ratio = "–" if own is None or other is None else f"{other[1] / own[1]:.3f}"
    return [*cells, ratio]


def profiled(name: str, folder: Path) -> Path:
    """Its analytic profile on A800s, as ``mmplan profile --analytic`` makes it."""
    path = folder / f"{name}.json"
    if not path.exists():
        workload = load_workload(PAPERS / f"{name}.yaml")
        save_document(analytic_profile(workload, PAPERS, load_cluster("a800-8x8")), path)
    return path


def planned(
    name: str, tasks: Sequence[str], devices: int, profile_path: Path, folder: Path
) -> Planned:
    """Plan with the default budget, as ``mmplan solve --solver mpsp``."""
    workload_path, profile = PAPERS / f"{name}.yaml", load_profile(profile_path)
    workload, cluster = load_workload(workload_path), profile.cluster
    nodes = max(cluster.nodes, -(-devices // cluster.devices_per_node))
    wall, cpu = time.perf_counter(), time.process_time()
    plan = planner.solve(
        workload,
        workload_path=workload_path,
        profile=profile,
        profile_path=profile_path,
        plan_path=folder / "plan.json",
        cluster=cluster.model_copy(update={"nodes": nodes}),
        devices=devices,
        solver="mpsp",
        tasks=tasks or None,
    )
    return Planned(
        plan=plan,
        profile=profile,
        wall_s=time.perf_counter() - wall,
        cpu_s=time.process_time() - cpu,
    )


def transfers(plan: Plan, profile: Profile) -> tuple[float, float] | None:
    """Share of the step in which messages keep it waiting, and the step; None without order."""
    costs = CostModel(profile, plan.cluster, plan.training)
    try:
        program = compile_plan(plan)
    except InvalidInputError:
        # Slices of several tensor-parallel degrees of one module may not share ranks.
        return None
    whole_s = simulate(program, ProgramCosts(program, costs, plan)).iteration_s
    free_s = simulate(program, FreeMessages(program, costs, plan)).iteration_s
    return 1 - free_s / whole_s, whole_s


def plain(plan: Plan) -> Plan:
    """The plan's slices on the free ranks with the lowest numbers, in the order of the waves."""
    units = {unit.name: unit for unit in plan.units}
    free_at = [0.0] * plan.devices
    placed: dict[str, Unit] = {}
    waves: list[Wave] = []
    slices = sorted(
        (item for wave in plan.waves for item in wave.slices), key=lambda item: item.start_s
    )
    for item in slices:
        unit = units[item.unit]
        groups = [
            tuple(range(first, first + unit.tp))
            for first in range(0, plan.devices - unit.tp + 1, unit.tp)
        ]
        ends = {group: max(free_at[rank] for rank in group) for group in groups}
        start = max(item.start_s, sorted(ends.values())[unit.dp - 1])
        chosen = [group for group in groups if ends[group] <= start * (1 + 1e-9)][: unit.dp]
        ranks = tuple(rank for group in chosen for rank in group)
        for rank in ranks:
            free_at[rank] = start + item.duration_s
        placed[unit.name] = unit.model_copy(update={"ranks": tuple((group,) for group in chosen)})
        moved = item.model_copy(update={"ranks": ranks, "start_s": start})
        waves.append(Wave(start_s=start, duration_s=item.duration_s, slices=(moved,)))
    moved_units = tuple(placed[unit.name] for unit in plan.units)
    losses = tuple(
        loss.model_copy(update={"ranks": _ranks(plan, loss, moved_units)}) for loss in plan.losses
    )
    return plan.model_copy(update={"units": moved_units, "waves": tuple(waves), "losses": losses})


def _ranks(plan: Plan, loss: PlanLoss, units: Sequence[Unit]) -> tuple[int, ...]:
    """Ranks of the slices that a loss takes its features from; of its host, micro-batch wise."""
    task = plan.tasks[loss.task]
    known = task.losses[loss.name]
    named = {str(name).partition(".")[0] for name in known.inputs if name is not None}
    modules = [module for module in task.modules if module in named]
    if known.sync_batch is None:
        modules = modules[-1:]
    ranks: set[int] = set()
    for module in modules:
        own = [unit for unit in units if (unit.task, unit.module) == (loss.task, module)]
        ranks |= set(max(own, key=lambda unit: unit.blocks[-1]).all_ranks)
    return tuple(sorted(ranks))


def start_s() -> float:
    """Seconds until a process has loaded what planning needs."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import mmplan.planning.planner"], check=True)
    return time.perf_counter() - begun
