"""Plans that are made of a plan, to verify it."""

from __future__ import annotations

from mmplan.schema.plan import Plan, Prediction, Schedule, Unit


def on_one_rank(plan: Plan) -> Plan:
    """The plan's tasks on a single rank, every module whole, two micro-batches a round."""
    units: list[Unit] = []
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
            "predicted": Prediction(iteration_s=0, samples_per_s=0),
        }
    )
