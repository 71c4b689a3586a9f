"""The data of every task that a rank takes part in, and the order of each step's batch.

The order follows from the samples' work, which the dataset may tell. Every rank asks the dataset
for the work of the whole batch and finds the same order: which samples a step takes, and so its
loss, does not depend on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmlaunch.data.loader import StepData, StepLoader, check_fields
from mmlaunch.data.loading_processes import Loading, sent_bytes
from mmlaunch.data.producers import DataSource, NoProducersError, Producers, RemoteLoader
from mmplan.errors import InvalidInputError, MMPlanError, RunFailedError
from mmplan.program.model import Program
from mmplan.reordering.batch_order import BatchOrder
from mmplan.schema.workload import TaskView, Workload


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Dataset indices of a step, in the order in which they fill the batch.

    Attributes:
        order: of the task's batches.
        dataset: has ``work(index) -> {module: cost}``; each module in a unit of its own.
        modules: names that may stand there.
        seed: of the training.
    """

    order: BatchOrder
    dataset: Any
    modules: Collection[str]
    seed: int

    def __call__(self, indices: Sequence[int], step: int) -> list[int]:
        """The indices of a step's batch, reordered.

        Raises:
            InvalidInputError: ``work`` does not give finite numbers from 0 on, or names no
                module.
            RunFailedError: it raised.
        """
        otherwise = "set train.reorder: false"
        work = work_columns(self.dataset, indices, modules=self.modules, otherwise=otherwise)
        # A seed sequence takes whole numbers from 0 on.
        order = self.order(work, (self.seed % 2**32) * 2**32 + step)
        return [indices[position] for position in order.tolist()]


def work_columns(
    dataset: Any, indices: Sequence[int], *, modules: Collection[str], otherwise: str
) -> dict[str, NDArray[np.float64]]:
    """The dataset's ``work(index)`` of samples: for every module one number a sample.

    Args:
        dataset: has ``work``.
        indices: of the samples.
        modules: names that may stand there.
        otherwise: the way out where it cannot be mended, for hints.

    Raises:
        InvalidInputError: ``work`` does not give finite numbers from 0 on, or names no module.
        RunFailedError: it raised.
    """
    known = frozenset(modules)
    rows = [_work_of(dataset, index, known, otherwise) for index in indices]
    names = sorted({name for row in rows for name in row})
    return {name: _column(name, rows, indices, otherwise) for name in names}


def _work_of(
    dataset: Any, index: int, modules: frozenset[str], otherwise: str
) -> Mapping[str, Any]:
    try:
        row = dataset.work(index)
    except MMPlanError:
        raise
    except Exception as exc:
        raise RunFailedError(
            f"the dataset's work({index}) raised {type(exc).__name__}: {exc}",
            hint=f"mend it, or {otherwise}",
        ) from exc
    if not isinstance(row, Mapping):
        raise InvalidInputError(
            f"the dataset's work({index}) is a {type(row).__name__}, not a dict",
            hint="return {module: cost}",
        )
    unknown = sorted(set(row) - modules, key=str)
    if unknown:
        raise InvalidInputError(
            f"the dataset's work({index}) names {unknown[0]!r}, which is not a module",
            hint=f"the workload's modules are {', '.join(sorted(modules))}",
        )
    return row


def _column(
    name: str, rows: Sequence[Mapping[str, Any]], indices: Sequence[int], otherwise: str
) -> NDArray[np.float64]:
    values = np.zeros(len(rows))
    for position, row in enumerate(rows):
        try:
            values[position] = float(row.get(name, 0.0))
        except (TypeError, ValueError):
            values[position] = np.nan
        if not 0 <= values[position] < np.inf:
            raise InvalidInputError(
                f"the dataset's work({indices[position]}) gives {name} {row[name]!r}, "
                "not a finite number from 0 on",
                hint=f"mend it, or {otherwise}",
            )
    return values


def step_order(program: Program, task: str, dataset: Any, workload: Workload) -> StepOrder | None:
    """The order of a task's batches; None where the data tell no work or nobody wants it."""
    if not workload.train.reorder or not callable(getattr(dataset, "work", None)):
        return None
    return StepOrder(BatchOrder(program, task), dataset, workload.modules, workload.train.seed)


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
        producers: prepare the data in place of loading processes.
        field: the place of the data in the workload file, for errors; default: the task's.

    Attributes:
        datasets: of the tasks that the rank takes part in.
        starved: why the last step got samples of an earlier one; else None.

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
        producers: Producers | None = None,
        field: str | None = None,
    ) -> None:
        self._workload, self._folder, self._tasks = workload, folder, tasks
        self._field = field
        self._pin_memory = pin_memory
        self._loading = {name: Loading(processes=num_workers) for name in tasks}
        self._rank, self._needs = rank, rank_needs(program, rank)
        self.datasets = {n: self._dataset(v) for n, v in tasks.items() if n in self._needs}
        self._orders = {
            name: step_order(program, name, dataset, workload)
            for name, dataset in self.datasets.items()
        }
        self._loaders: dict[str, StepLoader] = {}
        self._producers = _as_seen_by(rank, program, producers) if producers else None
        self._last: dict[str, StepData] = {}
        self.starved: NoProducersError | None = None

    def step(self, step: int) -> dict[str, StepData]:
        """This rank's data of a step; steps are asked for one after another.

        Where no producer comes the samples are those of an earlier step, and ``starved`` is set:
        other ranks are in the step by then, and all can leave it only at its end.
        """
        return {name: self._of_task_or_earlier(name, step) for name in self._needs}

    def _of_task_or_earlier(self, task: str, step: int) -> StepData:
        try:
            return self.of_task(task, step)
        except NoProducersError as error:
            if task not in self._last:
                raise
            self.starved = error
            return self._last[task]

    def of_task(self, task: str, step: int) -> StepData:
        """The data of one task.

        Raises:
            MMPlanError: names this rank, and the sample that is wrong or could not be read.
        """
        try:
            return self._next(task, step)
        except MMPlanError as error:
            # A new one of its kind: its first argument is what a record keeps.
            said = f"rank {self._rank}: {error.message}"
            raise type(error)(said, hint=error.hint) from error.__cause__

    def _next(self, task: str, step: int) -> StepData:
        if task not in self._loaders:
            self._loaders[task] = self._loader(task, step)
        data = next(self._loaders[task])
        if self._producers is not None:
            self._last[task] = data
        return data

    def _loader(self, task: str, step: int) -> StepLoader:
        need, view = self._needs[task], self._tasks[task]
        arguments: dict[str, Any] = {
            "batch": view.batch,
            "seed": self._workload.train.seed,
            "ranges": need.ranges,
            "fields": need.fields,
            "start_step": step,
            "order": self._orders[task],
            "num_workers": self._loading[task].processes,
            "ahead": self._loading[task].ahead,
            "pin_memory": self._pin_memory,
        }
        dataset, producers = self.datasets[task], self._producers
        if producers is None or not need.fields:
            return StepLoader(dataset, **arguments)
        source = source_of(self._workload, view, self._folder)
        return RemoteLoader(dataset, source=source, producers=producers, **arguments)

    def use(self, loading: Mapping[str, Loading]) -> None:
        """Load tasks in other processes from the next step on."""
        self.close()
        self._loading.update(loading)

    def sent_bytes(self, task: str, most: float) -> int | None:
        """See :func:`mmlaunch.data.loading_processes.sent_bytes`."""
        return sent_bytes(self.datasets[task], most)

    def close(self) -> None:
        """Stop loading; the next step asked for may be any."""
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()

    def _dataset(self, view: TaskView) -> Any:
        source = source_of(self._workload, view, self._folder)
        dataset = (replace(source, field=self._field) if self._field else source).open()
        if not hasattr(dataset, "collate"):
            check_fields(dataset[0], self._workload.modules)
        return dataset


def open_dataset(workload: Workload, view: TaskView, folder: Path) -> Any:
    """The dataset of a task.

    Raises:
        InvalidInputError: the task has no data, or the data factory is wrong.
    """
    return source_of(workload, view, folder).open()


def source_of(workload: Workload, view: TaskView, folder: Path) -> DataSource:
    """How the dataset of a task is made.

    Raises:
        InvalidInputError: the task has no data.
    """
    if view.data is None:
        raise InvalidInputError(
            f"task {view.name} has no data", hint="add data: {factory: ...} to the workload"
        )
    field = "data" if view.data == workload.data else f"tasks.{view.name}.data"
    return DataSource(data=view.data, folder=folder, seed=workload.train.seed, field=field)


def _as_seen_by(rank: int, program: Program, producers: Producers) -> Producers:
    """Its share of the cluster; of the ranks that load the first one tells of it."""
    needs = {r: rank_needs(program, r) for r in range(program.num_ranks)}
    loading = [r for r, found in needs.items() if any(need.fields for need in found.values())]
    tell = producers.tell if rank == loading[0] else lambda _: None
    return replace(producers, ranks=len(loading), tell=tell)


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
