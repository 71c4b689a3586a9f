"""Train a plan for some steps on threads, and the same with one process and plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.session.reference import Reference
from mmlaunch.session.session import Session, StepResult
from mmplan.program.compile import compile_plan
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.programs import trained_as
from tests.verification import HERE

UpdateRule = Callable[[dict[str, nn.Parameter]], Callable[[int], float | None]]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Weights by full name after the last step, and each step's loss and gradient norm."""

    weights: dict[str, Tensor]
    losses: list[float]
    norms: list[float | None]


def train_planned(
    plan: Plan,
    workload: Workload,
    steps: int,
    *,
    before: Callable[[Session], object] = lambda _: None,
    after: Callable[[Session], object] = lambda _: None,
) -> Trained:
    """Every rank's steps; ``before`` and ``after`` are called with each session."""

    def entry(transport: Any) -> Trained:
        session = Session(
            plan=trained_as(plan, workload), workload=workload, folder=HERE, transport=transport
        )
        before(session)
        return trained(session, steps, after=after)

    ranks = InProcessWorld(plan.devices).run(entry)
    assert all(rank.losses == ranks[0].losses for rank in ranks)
    assert all(rank.norms == ranks[0].norms for rank in ranks)
    return ranks[0]


def trained(
    session: Session, steps: int, *, after: Callable[[Session], object] = lambda _: None
) -> Trained:
    """Some steps of a session; rank 0's weights go to all ranks."""
    results: list[StepResult] = list(session.steps(steps))
    after(session)
    return Trained(
        weights=session.evaluate(lambda modules: _named(modules, session)),
        losses=[result.loss for result in results],
        norms=[result.grad_norm for result in results],
    )


def train_alone(plan: Plan, workload: Workload, steps: int, rule: UpdateRule) -> Trained:
    """One process; ``rule`` makes the function that updates parameters and gives the norm."""
    reference = Reference(workload=workload, folder=HERE, program=compile_plan(plan))
    parameters = reference.named_parameters()
    updated = {name: p for name, p in parameters.items() if p.requires_grad}
    update = rule(updated)
    losses: list[float] = []
    norms: list[float | None] = []
    for step in range(steps):
        losses.append(reference.step(step))
        norms.append(update(step))
        for parameter in updated.values():
            parameter.grad = None
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    return Trained(weights=weights, losses=losses, norms=norms)


def plain(workload: Workload) -> UpdateRule:
    """The workload's optimizer over all parameters, and nothing else."""

    def rule(parameters: dict[str, nn.Parameter]) -> Callable[[int], float | None]:
        kind = getattr(torch.optim, workload.train.optimizer)
        optimizer = kind(parameters.values(), **workload.train.optimizer_args)

        def update(_: int) -> float | None:
            optimizer.step()
            return None

        return update

    return rule


def worst_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest absolute difference; the names must be the same."""
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


def _named(modules: dict[str, nn.Module], session: Session) -> dict[str, Tensor]:
    """Parameters by full name, those of a shared module under their owner's only."""
    users = {s.module for s in session.program.stages} - {s.owner for s in session.program.stages}
    return {
        f"{owner}.{name}": parameter.detach().clone()
        for owner, module in modules.items()
        if owner not in users
        for name, parameter in module.named_parameters()
    }
