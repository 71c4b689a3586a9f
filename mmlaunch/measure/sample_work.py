"""The work of samples, by the dataset's own word or by their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmlaunch.data.loader import StepLoader, check_dataset, step_indices
from mmlaunch.data.task_data import open_dataset, work_columns
from mmplan.ragged import Ragged
from mmplan.schema.base import Json
from mmplan.schema.workload import TaskView, Workload, resolve_tasks
from mmplan.sources.orders import epoch_length

Columns = dict[str, list[float]]


class WorkSampler:
    """Asks the data sets of a workload's tasks for the work of their samples.

    Args:
        workload: the job.
        folder: the workload file's folder.
    """

    def __init__(self, workload: Workload, folder: Path) -> None:
        self._workload, self._folder = workload, folder
        self._tasks = resolve_tasks(workload)
        self._datasets: dict[str, Any] = {}

    def work(self, point: Json) -> Json:
        """Work of the samples of one piece of the first epoch's order, or spread over the data.

        Args:
            point: ``task``; ``order``: "random" or "spread"; ``samples`` of a piece; ``piece``.

        Returns:
            ``dataset`` (all its samples), ``samples`` (those of the piece; none past the end),
            ``source`` ("work" or "lengths") and ``work``: module to one number a sample; the
            modules of which the data say nothing are not there.

        Raises:
            InvalidInputError: the data cannot be used, or their work is no number from 0 on.
            RunFailedError: the dataset raised.
        """
        task = self._tasks[point["task"]]
        dataset = self._dataset(task)
        told = callable(getattr(dataset, "work", None))
        indices = self._indices(point, dataset)
        work = (self._told if told else self._lengths)(task, dataset, indices) if indices else {}
        return {
            "dataset": len(dataset),
            "samples": len(indices),
            "source": "work" if told else "lengths",
            "work": {name: work[name] for name in task.modules if name in work},
        }

    def _dataset(self, task: TaskView) -> Any:
        if task.name not in self._datasets:
            dataset = open_dataset(self._workload, task, self._folder)
            check_dataset(dataset, task.batch)
            self._datasets[task.name] = dataset
        return self._datasets[task.name]

    def _indices(self, point: Json, dataset: Any) -> list[int]:
        if point["order"] == "spread":
            number = point["samples"]
            return sorted({i * len(dataset) // number for i in range(number)})
        length = epoch_length(dataset)
        size = min(point["samples"], length)
        if (point["piece"] + 1) * size > length:
            return []
        return step_indices(dataset, size, self._workload.train.seed, point["piece"])

    def _told(self, task: TaskView, dataset: Any, indices: Sequence[int]) -> Columns:
        columns = work_columns(
            dataset, indices, modules=self._workload.modules, otherwise="leave --data out"
        )
        return {name: values.tolist() for name, values in columns.items()}

    def _lengths(self, task: TaskView, dataset: Any, indices: Sequence[int]) -> Columns:
        """Rows of the ragged fields that modules take; other modules follow their producers."""
        fields = {s.field for sources in task.inputs.values() for s in sources if s.field}
        loader = StepLoader(
            dataset,
            batch=len(indices),
            seed=self._workload.train.seed,
            ranges=[(0, len(indices))],
            fields=sorted(fields),
            order=lambda _indices, _step: indices,
        )
        try:
            loaded = next(loader).fields
        finally:
            loader.close()
        columns: Columns = {}
        for module, sources in task.inputs.items():
            own = [loaded[source.field] for source in sources if source.field]
            rows = [value.lengths.tolist() for value in own if isinstance(value, Ragged)]
            if not own:
                # Projectors and the like: as many rows as come out of their producers.
                rows = [columns[s.module] for s in sources if s.module in columns]
            if rows:
                columns[module] = [float(sum(row)) for row in zip(*rows, strict=True)]
        return columns
