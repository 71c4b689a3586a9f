"""The data of every task that a rank takes part in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmlaunch.data import StepData, StepLoader, check_fields
from mmlaunch.needs import rank_needs
from mmlaunch.ordering import step_order
from mmplan.errors import InvalidInputError
from mmplan.program.model import Program
from mmplan.schema.factories import build_dataset
from mmplan.schema.workload import TaskView, Workload


class TaskData:
    """Loads what one rank needs of every task's batches.

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
        if view.data is None:
            raise InvalidInputError(
                f"task {view.name} has no data", hint="add data: {factory: ...} to the workload"
            )
        same = view.data == self._workload.data
        dataset = build_dataset(
            view.data,
            self._folder,
            seed=self._workload.train.seed,
            field="data" if same else f"tasks.{view.name}.data",
        )
        if not hasattr(dataset, "collate"):
            check_fields(dataset[0], self._workload.modules)
        return dataset
