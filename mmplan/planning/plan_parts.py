"""Parts of a plan that do not depend on the solver: files, tasks, losses, orders, notes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mmplan.costs.program_costs import CostModel
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.schema.agreement import planned_task
from mmplan.schema.base import file_sha256
from mmplan.schema.plan import FileReference, Plan, PlanLoss, PlannedTask, Prediction, Unit
from mmplan.schema.workload import TaskView
from mmplan.solvers.placement import last_stage_ranks
from mmplan.solvers.problem import Problem, Request
from mmplan.wording import counted, missing, size

# Straggler factors below it are not worth a note.
_LEAST_STRAGGLER = 1.005


def file_reference(path: str | Path, folder: Path) -> FileReference:
    """A file's path relative to the plan's folder, and its hash."""
    relative = Path(os.path.relpath(Path(path).resolve(), folder)).as_posix()
    return FileReference(path=relative, sha256=file_sha256(path))


def planned_tasks(request: Request) -> dict[str, PlannedTask]:
    """The workload's tasks as the plan's file has them, for compiling and simulating.

    Raises:
        InvalidInputError: blocks are frozen that a module does not have.
    """
    planned: dict[str, PlannedTask] = {}
    for name, task in request.tasks.items():
        blocks = {m: request.costs.num_blocks(task=name, module=m) for m in task.modules}
        _check_frozen(task, blocks)
        planned[name] = planned_task(request.workload, task, blocks)
    return planned


def _check_frozen(task: TaskView, blocks: Mapping[str, int]) -> None:
    """Only the profile knows how many blocks there are."""
    for module, frozen in task.frozen.items():
        for a, b in () if isinstance(frozen, bool) else frozen:
            if b > blocks[module]:
                raise InvalidInputError(
                    f"modules.{module}.frozen: [{a}, {b}] ends beyond its {blocks[module]} blocks",
                    hint=f"blocks count from 0, the last range may end at {blocks[module]}; if the "
                    "module has changed, profile it again",
                )


def placed_losses(request: Request, units: Sequence[Unit]) -> tuple[PlanLoss, ...]:
    """Cross-sample losses on all ranks that have their features, others on their host module's."""
    placed: list[PlanLoss] = []
    for name, task in request.tasks.items():
        problem = Problem(request=request, task=task)
        last = {
            module: max(
                (u for u in units if (u.task, u.module) == (name, module)),
                key=lambda u: u.blocks[-1],
            )
            for module in task.modules
        }
        for loss in task.loss_inputs:
            modules = (
                problem.synced_modules(loss)
                if loss in task.sync_batches
                else [m for m in task.modules if loss in problem.hosted_losses(m)]
            )
            ranks = sorted({rank for module in modules for rank in last_stage_ranks(last[module])})
            placed.append(PlanLoss(name=loss, task=name, ranks=tuple(ranks)))
    return tuple(placed)


def other_orders(units: Sequence[Unit]) -> Iterator[tuple[Unit, ...]]:
    """The same units in orders that have the same formula.

    One or two more forwards before a batch-sync may hide it; and where memory holds one round
    only, batch-sync order without warm-up forwards may idle less than gpipe.
    """
    for sync_lead in (1, 2):
        yield tuple(
            _reordered(unit, {"sync_lead": sync_lead})
            if unit.schedule.kind == "batch-sync" and _rounds(unit) > 1
            else unit
            for unit in units
        )
    yield tuple(
        _reordered(unit, {"kind": "batch-sync", "lead": 0})
        if unit.schedule.kind == "gpipe"
        else unit
        for unit in units
    )


def _rounds(unit: Unit) -> int:
    return unit.samples[0] // sum(unit.microbatches[0])


def _reordered(unit: Unit, changes: Mapping[str, str | int]) -> Unit:
    return unit.model_copy(update={"schedule": unit.schedule.model_copy(update=changes)})


def none_fits(
    too_large: Sequence[float],
    dropped: Sequence[InvalidInputError],
    memory_bytes: float,
    notes: Sequence[str],
) -> InfeasibleError | InvalidInputError:
    """The error for a search without a plan.

    Args:
        too_large: peak memory of each candidate that does not fit, bytes.
        dropped: errors of the candidates that cannot run.
        memory_bytes: memory of a device.
        notes: remarks on the search.
    """
    if not too_large:
        return dropped[0]
    return InfeasibleError(
        f"the smallest of {counted(len(too_large), 'plan')} holds {size(min(too_large))} "
        f"on a device, {'; '.join((missing(min(too_large), memory_bytes), *notes))}",
        hint="raise --top, use more devices, recompute: full, or a smaller sync_batch",
    )


def peak_bytes(predicted: Prediction) -> float:
    """Predicted peak memory of the device with the highest one."""
    return max(predicted.memory_bytes, default=0.0)


def extrapolations(plan: Plan, costs: CostModel) -> list[str]:
    """Sizes of this plan beyond those that were measured."""
    asked = CostModel(costs.profile, costs.cluster, costs.training)
    for unit in plan.units:
        for samples in sorted({number for sizes in unit.microbatches for number in sizes}):
            asked.forward_s(task=unit.task, module=unit.module, tp=unit.tp, samples=samples)
    for task in plan.tasks.values():
        for name, loss in task.losses.items():
            if loss.sync_batch is not None:
                asked.loss_s(loss=name, samples=loss.sync_batch)
    return asked.extrapolations()


def straggler_note(plan: Plan, costs: CostModel) -> str | None:
    """The predicted work of the busiest replicas; None where all samples cost the same."""
    factors: list[str] = []
    for unit in plan.units:
        samples = plan.tasks[unit.task].period
        factor = costs.straggler(task=unit.task, module=unit.module, dp=unit.dp, samples=samples)
        if factor >= _LEAST_STRAGGLER:
            factors.append(f"{factor:.3g} x the mean of {unit.name}'s {unit.dp}")
    if not factors:
        return None
    return f"by the profile's data the busiest replicas have {', '.join(factors)}"
