"""Plans that are made of a plan, to verify it: on one rank, and a small likeness of a big one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from mmplan.program.lower import lower
from mmplan.program.symmetry_classes import alike_components
from mmplan.schema.base import ZeroStage
from mmplan.schema.plan import Plan, PlannedTask, Prediction, Schedule, Unit
from mmplan.schema.workload import Workload

_UNPREDICTED = Prediction(iteration_s=0, samples_per_s=0)
# Rounds of a likeness: in the second one everything is done again with other samples.
_ROUNDS = 2


def on_one_rank(plan: Plan) -> Plan:
    """The plan's tasks on a single rank, every module whole, two micro-batches a round."""
    units: list[Unit] = []
    zero: dict[tuple[str, str], ZeroStage | None] = {
        (unit.task, unit.module): unit.zero for unit in plan.units
    }
    for name, task in plan.tasks.items():
        sizes = tuple(size for size in ((task.period + 1) // 2, task.period // 2) if size)
        units += [
            Unit(
                name=f"{name}.{module}",
                task=name,
                module=module,
                ranks=(((0,),),),
                blocks=((0, planned.blocks),),
                samples=(task.batch,),
                microbatches=(sizes,),
                schedule=Schedule(kind="gpipe"),
                zero=zero[name, module],
            )
            for module, planned in task.modules.items()
        ]
    return plan.model_copy(
        update={
            "devices": 1,
            "units": tuple(units),
            "losses": tuple(loss.model_copy(update={"ranks": (0,)}) for loss in plan.losses),
            "waves": (),
            "in_turn": (),
            "order": None,
            "predicted": _UNPREDICTED,
        }
    )


def likeness(plan: Plan, workload: Workload) -> tuple[Plan, Workload]:
    """A small plan with every class of alike ranks, and the workload with its batches.

    Of each class of alike components (:mod:`mmplan.program.symmetry_classes`) one stays, with its
    tensor-parallel groups; of a unit that would keep one of several replicas a second one does,
    so that there are sums over replicas. All batches and sync batches change in one ratio, and
    micro-batches with them: their numbers and their order stay. A task keeps two rounds at most.
    """
    kept = _kept_replicas(plan)
    ratio, divisor = _ratio(plan, kept)

    def scaled(size: int) -> int:
        return size * ratio // divisor

    ranks = sorted(
        {
            rank
            for unit, replicas in zip(plan.units, kept, strict=True)
            for d in replicas
            for rank in unit.grid.replica(d)
        }
    )
    number = {rank: position for position, rank in enumerate(ranks)}
    rounds = {n: min(_ROUNDS, task.batch // task.period) for n, task in plan.tasks.items()}
    units: list[Unit] = []
    for unit, replicas in zip(plan.units, kept, strict=True):
        task = plan.tasks[unit.task]
        sizes = _resized([unit.microbatches[d] for d in replicas], scaled(task.period))
        grid = tuple(
            tuple(tuple(number[rank] for rank in group) for group in unit.ranks[d])
            for d in replicas
        )
        samples = tuple(sum(row) * rounds[unit.task] for row in sizes)
        update = {"dp": len(replicas), "ranks": grid, "microbatches": sizes, "samples": samples}
        units.append(unit.model_copy(update=update))
    batches = {n: scaled(task.period) * rounds[n] for n, task in plan.tasks.items()}
    tasks = {n: _smaller_task(task, batches[n], scaled) for n, task in plan.tasks.items()}
    losses = tuple(
        loss.model_copy(update={"ranks": tuple(number[r] for r in loss.ranks if r in number)})
        for loss in plan.losses
    )
    grids = {unit.name: unit.all_ranks for unit in units}
    waves = tuple(
        wave.model_copy(
            update={
                "slices": tuple(
                    item.model_copy(
                        update={"ranks": grids[item.unit], "devices": len(grids[item.unit])}
                    )
                    for item in wave.slices
                )
            }
        )
        for wave in plan.waves
    )
    small = plan.model_copy(
        update={
            "devices": len(ranks),
            "units": tuple(units),
            "losses": losses,
            "waves": waves,
            "tasks": tasks,
            "predicted": _UNPREDICTED,
        }
    )
    return small, _smaller_workload(workload, tasks)


def _kept_replicas(plan: Plan) -> list[list[int]]:
    """For each unit, the replicas that stay."""
    kept: list[set[int]] = [set() for _ in plan.units]
    classes = alike_components(plan, lower(plan))
    for alike in classes:
        for own, replicas in zip(kept, alike[0], strict=True):
            own.update(replicas)
    for alike in classes:
        alone = any(
            replicas and len(own) == 1 < unit.dp
            for unit, own, replicas in zip(plan.units, kept, alike[0], strict=True)
        )
        for component in alike[1:2] if alone else ():
            for own, replicas in zip(kept, component, strict=True):
                own.update(replicas)
    return [sorted(own) for own in kept]


def _ratio(plan: Plan, kept: Sequence[Sequence[int]]) -> tuple[int, int]:
    """(k, g): all batches become k / g of what they are, the least that holds the replicas.

    Every sync batch and period stays a whole number, since g divides them all.
    """
    sizes = [task.period for task in plan.tasks.values()]
    for task in plan.tasks.values():
        sizes += [loss.sync_batch for loss in task.losses.values() if loss.sync_batch is not None]
    divisor = math.gcd(*sizes)
    needed = [
        (sum(sum(unit.microbatches[d]) for d in replicas), plan.tasks[unit.task].period)
        for unit, replicas in zip(plan.units, kept, strict=True)
    ]
    return max(-(-samples * divisor // period) for samples, period in needed), divisor


def _resized(rows: Sequence[Sequence[int]], total: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batches of replicas with another sum, in the same proportions, none empty."""
    before = sum(map(sum, rows))
    done, given = 0, 0
    resized: list[tuple[int, ...]] = []
    for row in rows:
        new: list[int] = []
        for size in row:
            done += size
            # Differences of rounded sums: they add up, and as total >= before none is zero.
            new.append(done * total // before - given)
            given += new[-1]
        resized.append(tuple(new))
    return tuple(resized)


def _smaller_task(task: PlannedTask, batch: int, scaled: Callable[[int], int]) -> PlannedTask:
    losses = {
        name: loss.model_copy(
            update={"sync_batch": None if loss.sync_batch is None else scaled(loss.sync_batch)}
        )
        for name, loss in task.losses.items()
    }
    return task.model_copy(update={"batch": batch, "losses": losses})


def _smaller_workload(workload: Workload, tasks: Mapping[str, PlannedTask]) -> Workload:
    """The workload with the batches and sync batches of planned tasks."""
    syncs = {
        name: loss.sync_batch
        for task in tasks.values()
        for name, loss in task.losses.items()
        if loss.sync_batch is not None
    }
    losses = {
        name: spec.model_copy(update={"sync_batch": syncs.get(name, spec.sync_batch)})
        for name, spec in workload.losses.items()
    }
    if not workload.tasks:
        (only,) = tasks.values()
        return workload.model_copy(update={"batch": only.batch, "losses": losses})
    specs = {
        name: spec.model_copy(update={"batch": tasks[name].batch}) if name in tasks else spec
        for name, spec in workload.tasks.items()
    }
    return workload.model_copy(update={"tasks": specs, "losses": losses})
