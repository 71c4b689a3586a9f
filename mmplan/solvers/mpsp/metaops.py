"""Graph contraction: the MetaOps of all tasks and the order between them.

A module is a chain of blocks of one kind. One task's use of one module is a MetaOp: it has one
batch, and no data enters or leaves it between its first and its last block.

Source: graph contraction of Spindle, arXiv:2409.03365, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmplan.schema.workload import TaskView, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaOp:
    """One task's use of one module.

    Attributes:
        owner: the module whose parameters it uses.
        batch: samples of a step.
        after: indices of the MetaOps whose outputs it takes, also for a loss on its ranks.
        level: MetaLevel, the number of MetaOps on the longest path before it.
    """

    task: str
    module: str
    owner: str
    batch: int
    after: tuple[int, ...]
    level: int

    @property
    def name(self) -> str:
        """Task and module, joined by a dot."""
        return f"{self.task}.{self.module}"


def contract(workload: Workload, tasks: Mapping[str, TaskView]) -> tuple[MetaOp, ...]:
    """The MetaOps of all tasks, producers before consumers."""
    found: list[MetaOp] = []
    for task in tasks.values():
        index: dict[str, int] = {}
        for module in task.modules:
            after = tuple(index[name] for name in _producers(task, module))
            index[module] = len(found)
            found.append(
                MetaOp(
                    task=task.name,
                    module=module,
                    owner=workload.modules[module].share or module,
                    batch=task.batch,
                    after=after,
                    level=1 + max((found[i].level for i in after), default=-1),
                )
            )
    return tuple(found)


def _producers(task: TaskView, module: str) -> tuple[str, ...]:
    """Modules whose outputs a module takes, also for a per-sample loss after its last block."""
    names = [source.module for source in task.inputs[module]]
    order = task.modules
    for loss, sources in task.loss_inputs.items():
        used = [source.module for source in sources if source.module]
        if loss not in task.sync_batches and max(used, key=order.index) == module:
            names += used
    return tuple(dict.fromkeys(name for name in names if name and name != module))
