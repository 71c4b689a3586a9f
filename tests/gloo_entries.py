"""What the ranks of tests/test_gloo.py run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmlaunch.comm.transport import DistTransport
from mmlaunch.launch.launch import WorkerContext
from mmlaunch.session.session import Session
from mmlaunch.session.verify import LocalGradients, planned_step
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.matrix_cases import Case
from tests.programs import trained_as
from tests.training import Trained, trained
from tests.verification import HERE


def run_cases(ctx: WorkerContext, cases: list[Case]) -> list[LocalGradients]:
    """One planned step of each case; ranks that a plan does not use take part idly."""
    return [planned_step(_session(ctx, case)) for case in cases]


def train_and_resume(ctx: WorkerContext, case: Case, folder: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, one more; and the same third step from the checkpoint."""
    return _train_and_resume(lambda: _session(ctx, case), folder)


def gradients(ctx: WorkerContext, cases: list[tuple[Plan, Workload]]) -> list[LocalGradients]:
    """One planned step of each."""
    return [planned_step(_made(ctx, *case)) for case in cases]


def gradients_and_resume(
    ctx: WorkerContext, cases: list[tuple[Plan, Workload]], folder: Path
) -> tuple[list[LocalGradients], dict[str, Any]]:
    """One planned step of each, and what :func:`train_and_resume` does with the first."""
    return gradients(ctx, cases), _train_and_resume(lambda: _made(ctx, *cases[0]), folder)


def train(ctx: WorkerContext, cases: list[tuple[Plan, Workload]], steps: int) -> list[Trained]:
    """Some steps of each, with updates."""
    return [trained(_made(ctx, *case), steps) for case in cases]


def _made(ctx: WorkerContext, plan: Plan, workload: Workload) -> Session:
    transport = DistTransport(ctx.device.device, ctx.heartbeat)
    return Session(
        plan=trained_as(plan, workload), workload=workload, folder=HERE, transport=transport
    )


def _train_and_resume(made: Callable[[], Session], folder: Path) -> dict[str, Any]:
    session = made()
    for _ in session.steps(2):
        pass
    path = session.save(folder)
    losses = [session.step().loss]
    session.write_weights(folder / "unbroken.safetensors")
    resumed = made()
    resumed.load(path)
    losses.append(resumed.step().loss)
    resumed.write_weights(folder / "resumed.safetensors")
    return {"losses": losses, "step": resumed.step_count}


def _session(ctx: WorkerContext, case: Case) -> Session:
    return Session(
        plan=trained_as(case.plan(devices=ctx.world_size), case.workload()),
        workload=case.workload(),
        folder=HERE,
        transport=DistTransport(ctx.device.device, ctx.heartbeat),
        heartbeat=ctx.heartbeat,
    )
