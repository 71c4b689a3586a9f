"""The program of a plan's evaluation: its forward passes alone, with metrics beside the losses.

The ranks, stages and micro-batches are those of training, so that no rank holds more than it does
in a step. What is left of the rows keeps its order. What has run in that order once runs again
without the rest: everything that waits has less to wait for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Collective, Compute, Instruction, Message, Op
from mmplan.program.lower import modules_in_order
from mmplan.program.model import Program
from mmplan.program.schedules.registry import POLICIES
from mmplan.schema.evaluation import MetricSpec
from mmplan.schema.plan import Plan, PlanLoss, PlannedLoss, PlannedTask
from mmplan.schema.workload import parse_source

_KEPT = frozenset({Op.FORWARD, Op.SEND_F, Op.RECV_F, Op.COUNT})


def evaluation_program(plan: Plan, metrics: Mapping[str, MetricSpec]) -> Program:
    """The forward program of a plan whose tasks have these metrics as further losses.

    Every loss and metric has the weight 1, so that its term is its mean over the batch.

    Args:
        plan: without faults.
        metrics: by name; those of tasks that the plan does not train are left out.

    Raises:
        InvalidInputError: as :func:`mmplan.program.compile.compile_plan`.
    """
    tasks = {name: task.model_copy(update=_losses(task)) for name, task in plan.tasks.items()}
    placed = list(plan.losses)
    first = next(iter(tasks))
    for name, metric in metrics.items():
        task = metric.task or first
        if task not in tasks:
            continue
        sync = (metric.sync_batch or tasks[task].batch) if metric.cross_sample else None
        added = PlannedLoss(inputs=metric.inputs, sync_batch=sync)
        losses = {**tasks[task].losses, name: added}
        tasks[task] = tasks[task].model_copy(update={"losses": losses})
        placed.append(PlanLoss(name=name, task=task, ranks=_ranks(plan, task, added)))
    changed = {"tasks": tasks, "losses": tuple(placed)}
    return forward_only(compile_plan(plan.model_copy(update=changed)))


def forward_only(program: Program) -> Program:
    """The program without backward passes, sums of gradients and updates."""
    return replace(
        program,
        stages=tuple(
            replace(s, trainable=(), has_backward=False, input_gradient=False, split=False)
            for s in program.stages
        ),
        edges=tuple(
            replace(e, carries_gradient=False, scattered_back=False) for e in program.edges
        ),
        reductions=(),
        updates=(),
        instructions=tuple(tuple(filter(_stays, row)) for row in program.instructions),
    )


def _stays(item: Instruction) -> bool:
    return not isinstance(item, Compute | Message | Collective) or item.op in _KEPT


def _losses(task: PlannedTask) -> dict[str, object]:
    losses = {n: loss.model_copy(update={"weight": 1.0}) for n, loss in task.losses.items()}
    return {"losses": losses, "weight": 1.0}


def _ranks(plan: Plan, task: str, loss: PlannedLoss) -> tuple[int, ...]:
    """The ranks of the last stages that a loss takes something from; of one per sample, the last.

    Stages are numbered module by module, producers first.
    """
    modules = plan.tasks[task].modules
    taken = {parse_source(text, modules).module for text in loss.inputs}
    hosts = [m for m in modules_in_order(task, plan.tasks[task]) if m in taken]
    if loss.sync_batch is None:
        hosts = hosts[-1:]
    found: set[int] = set()
    for module in hosts:
        units = [u for u in plan.units if (u.task, u.module) == (task, module)]
        unit = max(units, key=lambda u: u.blocks[-1])
        last = POLICIES[unit.schedule.kind].position(len(unit.blocks) - 1, unit.pp)
        found.update(rank for group in unit.grid.stage(last) for rank in group)
    return tuple(sorted(found))
