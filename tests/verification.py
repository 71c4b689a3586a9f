"""Run a plan on the in-process transport and hold it against one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.session.session import Session
from mmlaunch.session.verify import Verdict, compare, judge, planned_step, planned_steps
from mmplan.program.compile import compile_plan
from mmplan.program.model import Program
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.programs import LossSpec, UnitSpec, make_plan, trained_as

HERE = Path(__file__).parent
MODELS = "tests.matrix_models"
# Largest difference of a gradient over the largest gradient of the model.
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}
FACTORIES = {"contrastive": "Contrastive", "regression": "Regression", "counted": "Counted"}


def make_workload(
    units: list[UnitSpec],
    losses: list[LossSpec],
    *,
    batch: int,
    precision: str = "fp64",
    args: dict[str, dict[str, Any]] | None = None,
    factories: dict[str, str] | None = None,
    train: dict[str, Any] | None = None,
    task_weights: dict[str, float] | None = None,
    task_batches: dict[str, int] | None = None,
    recompute: str = "none",
) -> Workload:
    """The workload that a test's units and losses stand for."""
    modules = {
        unit.module: {
            "factory": f"{MODELS}:{(factories or {}).get(unit.module, 'tower')}",
            "args": {
                "blocks": max(u.blocks for u in units if u.module == unit.module),
                **(args or {}).get(unit.module, {}),
            },
            "inputs": list(unit.inputs),
            "frozen": _frozen(unit),
            "share": unit.share,
            "recompute": recompute,
        }
        for unit in units
    }
    spelled = {
        loss.name: {
            "factory": (factories or {}).get(loss.name)
            or f"{MODELS}:{FACTORIES[loss.name.rstrip('0123456789')]}",
            "inputs": list(loss.inputs),
            "cross_sample": loss.sync_batch is not None,
            "sync_batch": loss.sync_batch,
            "weight": loss.weight,
        }
        for loss in losses
    }
    return Workload.model_validate(
        {
            "name": "matrix",
            "batch": batch,
            "modules": modules,
            "losses": spelled,
            "tasks": _tasks(units, losses, task_weights or {}, task_batches or {}),
            "data": {"factory": f"{MODELS}:Samples", "args": {"length": 2 * batch}},
            "train": {"precision": precision, "seed": 3, **(train or {})},
        }
    )


def _frozen(unit: UnitSpec) -> bool | list[tuple[int, int]]:
    return unit.frozen if isinstance(unit.frozen, bool) else list(unit.frozen)


def _tasks(
    units: list[UnitSpec],
    losses: list[LossSpec],
    weights: dict[str, float],
    batches: dict[str, int],
) -> dict[str, Any]:
    """The workload's tasks; none where all units are in the default one."""
    names = dict.fromkeys(unit.task for unit in units)
    if list(names) == ["default"]:
        return {}
    return {
        name: {
            "modules": list(dict.fromkeys(u.module for u in units if u.task == name)),
            "losses": [loss.name for loss in losses if loss.task == name],
            "inputs": {u.module: list(u.inputs) for u in units if u.task == name}
            | {loss.name: list(loss.inputs) for loss in losses if loss.task == name},
            "frozen": {u.module: _frozen(u) for u in units if u.task == name},
            "weight": weights.get(name, 1.0),
            "batch": batches.get(name),
        }
        for name in names
    }


def verify_in_process(
    plan: Plan,
    workload: Workload,
    *,
    change: Callable[[Program], Program] | None = None,
    world: InProcessWorld | None = None,
    timed: bool = False,
) -> Verdict:
    """One step on threads against one process; ``change`` plants a fault in the program."""

    # Once, not by every rank: a program takes as long as what most of these plans train.
    program = compile_plan(trained_as(plan, workload))
    if change is not None:
        program = change(program)

    def entry(transport: Any) -> Any:
        session = Session(
            plan=trained_as(plan, workload),
            workload=workload,
            folder=HERE,
            transport=transport,
            heartbeat=transport.heartbeat,
        )
        return planned_step(session, timed=timed)

    with patch("mmlaunch.session.session.compile_plan", return_value=program):
        found = (world or InProcessWorld(plan.devices)).run(entry)
    return compare(workload, HERE, compile_plan(plan), found)


def verify_steps(plan: Plan, workload: Workload, *, steps: int = 3) -> Verdict:
    """What ``mmlaunch verify --in-process`` does: steps with their updates, and a reload."""
    plan = trained_as(plan, workload)

    def entry(transport: Any) -> None:
        session = Session(plan=plan, workload=workload, folder=HERE, transport=transport)
        planned_steps(session, steps, records)

    with TemporaryDirectory() as folder:
        records = Path(folder)
        InProcessWorld(plan.devices).run(entry)
        return judge(workload, HERE, plan, records, steps)


def verify_units(
    units: list[UnitSpec], losses: list[LossSpec], *, batch: int, **options: Any
) -> Verdict:
    """Plan and verify in one call."""
    plan = make_plan(*units, losses=losses, batch=batch, task_weights=options.get("task_weights"))
    return verify_in_process(plan, make_workload(units, losses, batch=batch, **options))
