"""The data of every task that a rank takes part in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmlaunch.data.batch_order import step_order
from mmlaunch.data.loader import StepData, StepLoader, check_fields
from mmplan.errors import InvalidInputError
from mmplan.program.model import Program
from mmplan.schema.factories import build_dataset
from mmplan.schema.workload import TaskView, Workload


class TaskData:
    """Loads the samples of every task's batches that one rank needs.

    Args:
        program: says which samples and fields that is.
        workload: gives the datasets.
        folder: the workload file's folder.
        tasks: the plan's tasks by name.
        rank: this rank.
        num_workers: data loading processes.
        pin_memory: whether batches go to a GPU.

    Raises:
        InvalidInputError: a task has no data, or a dataset is wrong.
    """

    def __init__(
        self,
        *,
        program: Program,
        workload: Workload,
        folder: Path,
        tasks: Mapping[str, TaskView],
        rank: int,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        self._workload, self._folder, self._tasks = workload, folder, tasks
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self._needs = rank_needs(program, rank)
        self._datasets = {n: self._dataset(v) for n, v in tasks.items() if n in self._needs}
        self._orders = {
            name: step_order(program, name, dataset, workload)
            for name, dataset in self._datasets.items()
        }
        self._loaders: dict[str, StepLoader] = {}

    def step(self, step: int) -> dict[str, StepData]:
        """This rank's data of a step; steps are asked for one after another."""
        return {name: self.of_task(name, step) for name in self._needs}

    def of_task(self, task: str, step: int) -> StepData:
        """The data of one task."""
        return next(self._loader(task, step))

    def close(self) -> None:
        """Stop loading; the next step asked for may be any."""
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()

    def _loader(self, task: str, step: int) -> StepLoader:
        if task not in self._loaders:
            need = self._needs[task]
            self._loaders[task] = StepLoader(
                self._datasets[task],
                batch=self._tasks[task].batch,
                seed=self._workload.train.seed,
                ranges=need.ranges,
                fields=need.fields,
                start_step=step,
                order=self._orders[task],
                num_workers=self._num_workers,
                pin_memory=self._pin_memory,
            )
        return self._loaders[task]

    def _dataset(self, view: TaskView) -> Any:
        dataset = open_dataset(self._workload, view, self._folder)
        if not hasattr(dataset, "collate"):
            check_fields(dataset[0], self._workload.modules)
        return dataset


def open_dataset(workload: Workload, view: TaskView, folder: Path) -> Any:
    """The dataset of a task.

    Raises:
        InvalidInputError: the task has no data, or the data factory is wrong.
    """
    if view.data is None:
        raise InvalidInputError(
            f"task {view.name} has no data", hint="add data: {factory: ...} to the workload"
        )
    field = "data" if view.data == workload.data else f"tasks.{view.name}.data"
    return build_dataset(view.data, folder, seed=workload.train.seed, field=field)


@dataclass(slots=True)
class TaskNeeds:
    """The part of one task's batch that one rank loads.

    Attributes:
        ranges: batch positions.
        fields: data fields.
    """

    ranges: list[tuple[int, int]] = field(default_factory=list)
    fields: set[str] = field(default_factory=set)


def rank_needs(program: Program, rank: int) -> dict[str, TaskNeeds]:
    """Needs by task; a task of which the rank runs nothing is absent."""
    needs: dict[str, TaskNeeds] = {}
    for stage in program.stages_of(rank):
        hosted = [source for i in stage.hosted for source in program.per_sample(i).inputs]
        fields = {s.field for s in (*stage.inputs, *hosted) if s.field is not None}
        need = needs.setdefault(stage.task, TaskNeeds())
        if fields:
            need.fields |= fields
            need.ranges += stage.microbatches[stage.place(rank)[0]]
    for loss in program.cross_sample_losses:
        fields = {s.field for s in loss.inputs if s.field is not None}
        if rank in loss.ranks and fields:
            # A cross-sample loss sees the data of its whole sync batches.
            needs[loss.task].fields |= fields
            needs[loss.task].ranges.append((0, program.batches[loss.task]))
    return needs
