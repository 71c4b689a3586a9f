"""The plans of the campaign, each with the workload that it is for: matrix, tasks, solvers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.program.compile import compile_plan
from mmplan.program.model import Program
from mmplan.schema.plan import Plan
from mmplan.schema.workload import DataSpec, Workload
from tests.matrix_cases import FEATURES, Case
from tests.mixed_tp_cases import MIXED, random_case
from tests.mutants import profile_of
from tests.programs import LossSpec, UnitSpec, loss, make_plan, trained_as, unit
from tests.solving import run_solve
from tests.task_sets import job
from tests.verification import make_workload

# A rule by which weights show gradients, what has one, and the norm of all of them.
TRAIN: dict[str, Any] = {
    "optimizer": "SGD",
    "optimizer_args": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "clip_grad_norm": 0.1,
}
# Dropout is drawn by micro-batch, which a workload does not know.
UNJUDGED = ("dropout",)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A plan, its workload, and the kind of plan that it is counted as."""

    name: str
    kind: str
    plan: Plan
    workload: Workload

    @cached_property
    def program(self) -> Program:
        """The compiled program."""
        return compile_plan(self.plan)


def _subject(name: str, kind: str, plan: Plan, workload: Workload) -> Subject:
    train = workload.train.model_copy(update=TRAIN)
    # Other samples for each task: of equal ones nobody would miss an exchange.
    tasks = {
        task: spec.model_copy(update={"data": _data(3 * workload.batch + place)})
        for place, (task, spec) in enumerate(workload.tasks.items())
    }
    trained = workload.model_copy(update={"train": train, "tasks": tasks})
    return Subject(name=name, kind=kind, plan=trained_as(plan, trained), workload=trained)


def _data(length: int) -> DataSpec:
    return DataSpec(factory="tests.matrix_models:Samples", args={"length": length})


DEGREES: dict[str, dict[str, Any]] = {
    "pipelines": {"pp": 2, "dp": 2, "k": 2, "others": "single"},
    "replicas": {"dp": 3, "k": 2, "syncs": 2, "others": "single", "kind": "1f1b"},
    "groups": {"tp": 2, "k": 2, "syncs": 2, "sync_lead": 1, "lead": 2, "others": "same"},
    "split": {"pp": 3, "k": 4, "backward": "split", "lead": 2, "others": "single"},
    "nodes": {"pp": 2, "tp": 2, "k": 2, "per_node": 2, "kind": "gpipe", "others": "single"},
    "chunks": {"pp": 2, "vpp": 2, "k": 4, "kind": "interleaved", "others": "single"},
}


# Whose optimizer's state is cut over the ranks that sum a gradient.
SHARDED = ("nodes",)


def of_the_matrix() -> Iterator[Subject]:
    """Every feature with several sets of degrees."""
    for feature in FEATURES:
        for degrees, fields in DEGREES.items():
            if feature in UNJUDGED or (feature == "colocated" and degrees == "chunks"):
                continue
            case = Case(feature=feature, samples=8, **fields)
            plan, workload = case.plan(), case.workload()
            if degrees in SHARDED:
                train = workload.train.model_copy(update={"zero": 1})
                workload = workload.model_copy(update={"train": train})
            yield _subject(f"{feature}, {degrees}", feature, plan, workload)


def of_mixed_degrees() -> Iterator[Subject]:
    """Slices of one module under several tensor-parallel degrees."""
    for name, case in MIXED.items():
        yield _subject(name, "several tp degrees", case.plan(), case.workload())
    for seed in range(6):
        case = random_case(seed)
        yield _subject(f"any slices {seed}", "any slices", case.plan(), case.workload())


def _units(
    kind: str, units: list[UnitSpec], losses: list[LossSpec], batch: int, **options: Any
) -> Subject:
    plan = make_plan(*units, losses=losses, batch=batch, task_weights=options.get("task_weights"))
    return _subject(kind, kind, plan, make_workload(units, losses, batch=batch, **options))


def of_tasks() -> Iterator[Subject]:
    """Several tasks, slices, sync batches that do not divide each other, odd inputs."""
    yield _units(
        "tower that one task freezes",
        [
            unit("v", "a", task="one", pp=2, k=2),
            unit("t", "b", task="one", dp=2, k=2),
            unit("v", "c", task="two", dp=2, k=3, blocks=2, frozen=((0, 1),)),
            unit("l", "v", "b", task="two", pp=2),
        ],
        [
            loss("contrastive", "v", "t", sync_batch=6, task="one"),
            loss("regression", "l", "target", task="two", weight=0.4),
        ],
        12,
        task_weights={"two": 0.3},
    )
    grid = [[[0], [1]], [[2], [3]]]
    yield _units(
        "two tasks on the same ranks",
        [
            unit("v", "a", task="one", pp=2, dp=2, k=2, ranks=grid),
            unit("t", "b", task="one", pp=2, dp=2, k=2, ranks=grid),
            unit("v", "c", task="two", pp=2, dp=2, ranks=grid),
            unit("l", "v", "b", task="two", pp=2, dp=2, ranks=grid),
        ],
        [
            loss("contrastive", "v", "t", sync_batch=8, task="one"),
            loss("counted", "l", "mask", task="two"),
        ],
        8,
    )
    yield _units(
        "slices with degrees of their own",
        [
            unit("v", "a", name="v.0", dp=3, k=2, blocks=2, cuts=[(0, 2)], kind="wave"),
            unit("v", "a", name="v.1", pp=2, k=3, blocks=4, cuts=[(2, 3), (3, 4)], kind="wave"),
            unit("t", "b", dp=2, k=2, kind="wave"),
        ],
        [loss("contrastive", "v", "t", sync_batch=12), loss("regression", "v", "target")],
        12,
    )
    yield _units(
        "sync batches that do not divide each other",
        [unit("v", "a", pp=2, k=5), unit("t", "b", dp=2, k=2), unit("u", "c", k=4)],
        [
            loss("contrastive", "v", "t", sync_batch=8),
            loss("contrastive2", "t", "u", sync_batch=12, weight=0.2),
            loss("contrastive3", "u", "v", sync_batch=6),
        ],
        24,
    )
    yield _units(
        "integers that travel forward only",
        [unit("v", "a", pp=2, dp=2, k=2, blocks=3), unit("t", "v", "b", pp=2, k=2)],
        [loss("contrastive", "v.0", "v.1", "t", sync_batch=12)],
        12,
        factories={
            "v": "with_ids",
            "t": "id_reader",
            "contrastive": "tests.matrix_models:WithIntegers",
        },
    )
    for name in ("contrastive", "clip"):
        yield _units(
            f"data field in a cross-sample loss, {name}",
            [unit("v", "a", pp=2, dp=2, k=2), unit("t", "b", dp=2)],
            [loss(name, "v", "c", "t", sync_batch=12)],
            12,
            factories={"clip": "mmplan.zoo.losses:clip"},
        )
    yield _units(
        "per-sample loss of two modules",
        [unit("v", "a", pp=2, dp=2, k=2), unit("t", "b", dp=2, tp=2, k=3)],
        [loss("mse", "v", "t"), loss("contrastive", "v", "t", sync_batch=12)],
        12,
        factories={"mse": "mmplan.zoo.losses:mse"},
    )
    yield _units(
        "sharers on the same ranks",
        [
            unit("v", "a", pp=2, blocks=3, ranks=[[[0], [1]]], k=2),
            unit("t", "b", dp=2, blocks=3, ranks=[[[1]], [[0]]], k=3, share="v"),
            unit("u", "c", blocks=3, ranks=[[[2]]], share="v", frozen=True),
        ],
        [loss("contrastive", "v", "t", "u", sync_batch=12)],
        12,
    )


TOWERS = ("distmm", "convex", "colocated", "megatron", "megatron-rigid", "ratio", "mpsp")
CHAINS = ("convex", "megatron", "ratio")
OF_TASKS = ("mpsp", "megatron", "deepspeed", "spindle-seq", "spindle-optimus", "distmm-mt")


def _solvable(*, chained: bool) -> Workload:
    """Two towers and a third one, or the third one behind them."""
    units = [
        unit("v", "a", blocks=4, frozen=False),
        unit("t", "b", blocks=3, frozen=((0, 1),)),
        unit("u", *(["v", "t"] if chained else []), "c", blocks=2),
    ]
    losses = (
        [loss("regression", "u", "target"), loss("counted", "u", "mask", weight=0.5)]
        if chained
        else [loss("contrastive", "v", "t", "u", sync_batch=8)]
    )
    return make_workload(units, losses, batch=16)


def solved(folder: Path) -> Iterator[Subject]:
    """What the solvers plan; those that have no plan for a workload are left out."""
    towers, chain = _solvable(chained=False), _solvable(chained=True)
    tasks = job(steps=1, tasks_from_step={}, optimizer_args={})
    wanted = [
        ("towers", towers, TOWERS, 4),
        ("chain", chain, CHAINS, 4),
        ("tasks", tasks, OF_TASKS, 2),
        ("tasks", tasks, OF_TASKS, 4),
    ]
    for what, workload, solvers, devices in wanted:
        for solver in solvers:
            try:
                plan = run_solve(
                    folder,
                    workload,
                    profile_of(workload, devices),
                    solver=solver,
                    devices=devices,
                    top=2,
                    budget_s=0.2,
                )
            except (InfeasibleError, InvalidInputError):
                continue
            yield _subject(f"{solver}, {what} on {devices}", solver, plan, workload)


def all_subjects(folder: Path) -> list[Subject]:
    """Every plan of the campaign."""
    return [*of_the_matrix(), *of_mixed_degrees(), *of_tasks(), *solved(folder)]
