"""Small plans in one line, for tests of everything that reads plans or programs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hypothesis import strategies as st

from mmplan.program.instructions import Compute, Op
from mmplan.program.lower import modules_in_order
from mmplan.program.model import Program
from mmplan.schema.agreement import depended_on, planned_task
from mmplan.schema.cluster import Cluster, Device, Link, Links
from mmplan.schema.factories import build_module, tied_blocks
from mmplan.schema.plan import (
    FileReference,
    Plan,
    PlanLoss,
    PlannedLoss,
    PlannedModule,
    PlannedTask,
    PlannedTraining,
    Prediction,
    Schedule,
    SolverReport,
    Unit,
)
from mmplan.schema.workload import Workload, parse_source, resolve_tasks

Kind = Literal["batch-sync", "gpipe", "1f1b", "interleaved", "wave"]
Frozen = bool | tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """See :func:`unit`."""

    module: str
    inputs: tuple[str | None, ...]
    name: str
    task: str
    pp: int
    dp: int
    tp: int
    vpp: int
    k: int | tuple[int, ...]
    shares: tuple[int, ...] | None
    sizes: tuple[tuple[int, ...], ...] | None
    blocks: int
    cuts: tuple[tuple[int, int], ...] | None
    ranks: tuple[tuple[tuple[int, ...], ...], ...] | None
    frozen: Frozen
    share: str | None
    schedule: Schedule


def unit(
    module: str,
    *inputs: str | None,
    name: str | None = None,
    task: str = "default",
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    vpp: int = 1,
    k: int | Sequence[int] = 1,
    shares: Sequence[int] | None = None,
    sizes: Sequence[Sequence[int]] | None = None,
    blocks: int | None = None,
    cuts: Sequence[tuple[int, int]] | None = None,
    ranks: Sequence[Sequence[Sequence[int]]] | None = None,
    frozen: Frozen = False,
    share: str | None = None,
    kind: Kind = "batch-sync",
    lead: int = 1,
    sync_lead: int = 0,
    in_flight: int | None = None,
    split: bool = False,
    even: bool = False,
) -> UnitSpec:
    """A unit of :func:`make_plan`.

    Args:
        module: its name, and the unit's unless ``name`` is given.
        inputs: data fields or modules; default: a field called after the module.
        k: micro-batches of a round, for all replicas or one number each.
        shares: samples of a round per replica; default: even, the first ones get more.
        sizes: ``[dp][k]`` micro-batch sizes of a round, instead of k and shares.
        blocks: blocks of the whole module; default: one per chunk.
        cuts: chunks; default: as even as possible over all blocks.
        ranks: ``[dp][pp][tp]``; default: the next unused ranks.
    """
    blocks = blocks or (cuts[-1][1] if cuts else pp * vpp)
    return UnitSpec(
        module=module,
        inputs=inputs or (f"{module}_data",),
        name=name or (module if task == "default" else f"{task}.{module}"),
        task=task,
        pp=pp,
        dp=dp,
        tp=tp,
        vpp=vpp,
        k=k if isinstance(k, int) else tuple(k),
        shares=tuple(shares) if shares else None,
        sizes=tuple(map(tuple, sizes)) if sizes else None,
        blocks=blocks,
        cuts=tuple(cuts) if cuts else None,
        ranks=tuple(tuple(map(tuple, replica)) for replica in ranks) if ranks else None,
        frozen=frozen,
        share=share,
        schedule=Schedule(
            kind=kind,
            lead=lead,
            sync_lead=sync_lead,
            in_flight=in_flight,
            split_backward=split,
            even_in_flight=even,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """See :func:`loss`."""

    name: str
    inputs: tuple[str | None, ...]
    task: str
    sync_batch: int | None
    weight: float


def loss(
    name: str,
    *inputs: str | None,
    sync_batch: int | None = None,
    task: str = "default",
    weight: float = 1.0,
) -> LossSpec:
    """A loss of :func:`make_plan`; with ``sync_batch`` it couples that many samples."""
    return LossSpec(name=name, inputs=inputs, task=task, sync_batch=sync_batch, weight=weight)


def make_cluster(
    devices: int = 8,
    *,
    devices_per_node: int | None = None,
    latency_s: float = 0.0,
    bandwidth: float = 1e12,
) -> Cluster:
    """Equal nodes and equal links everywhere."""
    per_node = devices_per_node or devices
    link = Link(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)
    return Cluster(
        name="test",
        nodes=-(-devices // per_node),
        devices_per_node=per_node,
        device=Device(name="cpu", memory_bytes=1e12, peak_flops=1e12),
        links=Links(intra_node=link, inter_node=link),
    )


@dataclass
class _Builder:
    batches: dict[str, int]
    units: list[Unit] = field(default_factory=list)
    next_rank: int = 0

    def add(self, spec: UnitSpec, losses: Sequence[LossSpec]) -> None:
        sizes = spec.sizes or self._sizes(spec, losses)
        rounds = self.batches[spec.task] // sum(map(sum, sizes))
        ranks = spec.ranks or self._fresh_ranks(spec)
        used = [rank for replica in ranks for stage in replica for rank in stage]
        self.next_rank = max(self.next_rank, 1 + max(used))
        self.units.append(
            Unit(
                name=spec.name,
                task=spec.task,
                module=spec.module,
                tp=spec.tp,
                pp=spec.pp,
                vpp=spec.vpp,
                dp=spec.dp,
                ranks=ranks,
                blocks=spec.cuts or _even_cuts(spec.blocks, spec.pp * spec.vpp),
                samples=tuple(sum(row) * rounds for row in sizes),
                microbatches=sizes,
                schedule=spec.schedule,
            )
        )

    def _fresh_ranks(self, spec: UnitSpec) -> tuple[tuple[tuple[int, ...], ...], ...]:
        start = self.next_rank
        return tuple(
            tuple(
                tuple(start + (d * spec.pp + p) * spec.tp + t for t in range(spec.tp))
                for p in range(spec.pp)
            )
            for d in range(spec.dp)
        )

    def _sizes(self, spec: UnitSpec, losses: Sequence[LossSpec]) -> tuple[tuple[int, ...], ...]:
        syncs = [x.sync_batch for x in losses if x.task == spec.task and x.sync_batch]
        round_samples = math.lcm(*syncs) if syncs else self.batches[spec.task]
        shares = spec.shares or split_evenly(round_samples, spec.dp)
        ks = (spec.k,) * spec.dp if isinstance(spec.k, int) else spec.k
        return tuple(split_evenly(share, k) for share, k in zip(shares, ks, strict=True))


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Whole shares of a total; the first ones are one larger where it does not divide."""
    return tuple(total // parts + (i < total % parts) for i in range(parts))


def _even_cuts(blocks: int, chunks: int) -> tuple[tuple[int, int], ...]:
    ends = [0]
    for size in split_evenly(blocks, chunks):
        ends.append(ends[-1] + size)
    return tuple(itertools.pairwise(ends))


def make_plan(
    *units: UnitSpec,
    losses: Sequence[LossSpec],
    batch: int | dict[str, int] = 8,
    devices: int | None = None,
    cluster: Cluster | None = None,
    per_node: int | None = None,
    task_weights: dict[str, float] | None = None,
    zero: Literal[0, 1] = 0,
    seed: int = 0,
    name: str = "test",
) -> Plan:
    """A plan of the given units; everything not given has an even, small default.

    ``make_plan(unit("vision", pp=2, k=4), unit("text", dp=2, k=2),
    losses=[loss("clip", "vision", "text", sync_batch=8)], batch=16)``
    """
    names = list(dict.fromkeys(spec.task for spec in units))
    batches = dict.fromkeys(names, batch) if isinstance(batch, int) else batch
    builder = _Builder(batches)
    for spec in units:
        builder.add(spec, losses)
    used = 1 + max(rank for built in builder.units for rank in built.all_ranks)
    num_devices = devices or used
    tasks = {
        task: _task(task, batches[task], (task_weights or {}).get(task, 1.0), units, losses)
        for task in names
    }
    return Plan(
        name=name,
        workload=FileReference(path="workload.yaml", sha256="0" * 64),
        profile=FileReference(path="profile.json", sha256="0" * 64),
        cluster=cluster or make_cluster(num_devices, devices_per_node=per_node),
        devices=num_devices,
        training=PlannedTraining(zero=zero, seed=seed),
        tasks=tasks,
        solver=SolverReport(
            name="test", method="hand", seconds=0, objective_s=0, formula_bound_s=0, formula_gap=0
        ),
        units=tuple(builder.units),
        losses=tuple(_placed(spec, tasks[spec.task], builder.units) for spec in losses),
        predicted=Prediction(iteration_s=0, samples_per_s=0),
    )


def _task(
    task: str,
    batch: int,
    weight: float,
    units: Sequence[UnitSpec],
    losses: Sequence[LossSpec],
) -> PlannedTask:
    modules: dict[str, Any] = {}
    for spec in units:
        if spec.task == task:
            # Slices of one module differ in blocks only; the module is as long as the longest.
            known = modules.get(spec.module)
            length = max(spec.blocks, known.blocks if known else 0)
            modules[spec.module] = PlannedModule(
                inputs=spec.inputs, blocks=length, frozen=spec.frozen, share=spec.share
            )
    return PlannedTask(
        batch=batch,
        weight=weight,
        modules=modules,
        losses={
            spec.name: PlannedLoss(
                inputs=spec.inputs, sync_batch=spec.sync_batch, weight=spec.weight
            )
            for spec in losses
            if spec.task == task
        },
    )


def _placed(spec: LossSpec, task: PlannedTask, units: Sequence[Unit]) -> PlanLoss:
    sources = [parse_source(text, task.modules).module for text in spec.inputs]
    # A per-sample loss is computed where the last of its inputs is made.
    modules = [module for module in modules_in_order(spec.task, task) if module in sources]
    ranks: set[int] = set()
    for module in modules if spec.sync_batch else modules[-1:]:
        same = [u for u in units if (u.task, u.module) == (spec.task, module)]
        if same:
            last = max(same, key=lambda u: u.blocks[-1])
            ranks |= {rank for replica in last.ranks for rank in replica[-1]}
    return PlanLoss(name=spec.name, task=spec.task, ranks=tuple(sorted(ranks)))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Chains and towers of one to three modules, with any degrees, shares and schedules."""
    sync = draw(st.sampled_from([0, 6, 12]))
    share = sync or 12
    synced: list[Kind] = ["batch-sync", "interleaved"]
    kinds: list[Kind] = synced if sync else ["1f1b", "gpipe", "interleaved"]
    kind = draw(st.sampled_from(kinds))
    chained = draw(st.booleans())
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    units = []
    for i, name in enumerate(names):
        dp = draw(st.integers(1, 3))
        ks = [draw(st.integers(1, s)) for s in split_evenly(share, dp)]
        units.append(
            unit(
                name,
                *([names[i - 1]] if chained and i else []),
                pp=draw(st.integers(1, 3)),
                vpp=draw(st.integers(1, 3)) if kind == "interleaved" else 1,
                dp=dp,
                tp=draw(st.integers(1, 2)),
                k=ks,
                kind=kind,
                lead=draw(st.integers(0, 2)),
                sync_lead=draw(st.integers(0, 2)),
                frozen=draw(st.sampled_from([False, False, True, ((0, 1),)])),
            )
        )
    losses = (
        [loss("sync", *names, sync_batch=sync)]
        if sync
        else [loss(f"l{n}", n) for n in (names[-1:] if chained else names)]
    )
    return make_plan(*units, losses=losses, batch=12)


def in_flight(program: Program) -> dict[tuple[int, int], int]:
    """Most micro-batches that each (rank, stage) holds at once.

    A micro-batch is held from its forward to its backward, a split one to its ``W``; a
    stage without a backward holds the one that it computes.
    """
    most: Counter[tuple[int, int]] = Counter()
    for rank, row in enumerate(program.instructions):
        held: Counter[int] = Counter()
        for item in row:
            if not isinstance(item, Compute):
                continue
            if item.op is Op.FORWARD:
                held[item.stage] += 1
                most[rank, item.stage] = max(most[rank, item.stage], held[item.stage])
            ends = item.op in (Op.BACKWARD, Op.WEIGHT)
            if ends or not program.stages[item.stage].has_backward:
                held[item.stage] -= 1
    return dict(most)


def trained_as(plan: Plan, workload: Workload, folder: Path | None = Path(__file__).parent) -> Plan:
    """The plan, saying of its tasks and of training what a workload made beside it says.

    Args:
        plan: the plan.
        workload: that it is for.
        folder: of its factories, whose modules say which blocks share parameters; None where no
            blocks do.
    """
    views = resolve_tasks(workload)
    tasks: dict[str, PlannedTask] = {}
    for name, task in plan.tasks.items():
        blocks = {m: planned.blocks for m, planned in task.modules.items()}
        owners = {m: workload.modules[m].share or m for m in blocks}
        ties = {m: ties_of(workload, o, folder) for m, o in owners.items()} if folder else {}
        tasks[name] = planned_task(workload, views[name], blocks, ties)
    same = workload.train.model_dump(include=set(PlannedTraining.model_fields))
    same["zero"] = max(same["zero"], plan.training.zero)
    training = plan.training.model_copy(update=same)
    units = tuple(
        unit.model_copy(update={"zero": own})
        if (own := workload.zero_of(unit.module)) != workload.train.zero
        else unit
        for unit in plan.units
    )
    depends_on = depended_on(workload, plan.tasks, working=())
    changed = {"tasks": tasks, "training": training, "units": units, "depends_on": depends_on}
    return plan.model_copy(update=changed)


_TIES: dict[str, tuple[tuple[int, ...], ...]] = {}


def ties_of(workload: Workload, module: str, folder: Path) -> tuple[tuple[int, ...], ...]:
    """The blocks of each parameter that several blocks of a module share."""
    spec = workload.modules[module]
    key = f"{folder} {spec.factory} {spec.args}"
    if key not in _TIES:
        _TIES[key] = tied_blocks(build_module(workload, module, folder))
    return _TIES[key]
