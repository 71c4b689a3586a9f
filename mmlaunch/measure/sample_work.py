"""The work of samples, by the dataset's own word or by their lengths.

Of a module that takes ragged fields it is the number of their rows. Attention inside ragged samples
(``mmplan::ragged_attention``) adds the squares of the lengths that it goes by, in rows that cost
as many FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mmlaunch.comm.batches import Tree, map_tensors
from mmlaunch.data.loader import StepLoader, check_dataset, step_indices
from mmlaunch.data.task_data import open_dataset, work_columns
from mmlaunch.model.whole_modules import call_blocks
from mmplan.ragged import Ragged, with_host_lengths
from mmplan.schema.base import Json
from mmplan.schema.factories import build_module
from mmplan.schema.workload import InputSource, TaskView, Workload, resolve_tasks
from mmplan.sources.orders import epoch_length

Columns = dict[str, list[float]]
# Attention inside samples, of mmplan.zoo.parts.ragged_attention.
_OPERATOR = "mmplan::ragged_attention"


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
        self._attention: dict[tuple[str, str], _Attention | None] = {}

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
        """Work by the ragged fields that modules take; other modules follow their producers."""
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
            own = {s.field: loaded[s.field] for s in sources if s.field}
            ragged = {name: value for name, value in own.items() if isinstance(value, Ragged)}
            # Lengths of texts in packs are no rows beside those that they are the lengths of.
            rows = [
                value.lengths.tolist()
                for name, value in ragged.items()
                if name.removesuffix("_lengths") not in {*ragged} - {name}
            ]
            if not own:
                # Projectors and the like: as many rows as come out of their producers.
                rows = [columns[s.module] for s in sources if s.module in columns]
            if rows:
                columns[module] = [float(sum(row)) for row in zip(*rows, strict=True)]
            if ragged:
                attention = self._attention_of(task, module, loaded, sum(columns[module]))
                if attention is not None:
                    columns[module] = attention.added(columns[module], loaded)
        return columns

    def _attention_of(
        self, task: TaskView, module: str, loaded: Mapping[str, Tree], rows: float
    ) -> _Attention | None:
        """A module's attention inside ragged samples, found on the first samples."""
        key = task.name, module
        if key not in self._attention:
            built = build_module(self._workload, module, self._folder, device="meta")
            self._attention[key] = _attention(built, task.inputs[module], loaded, rows)
        return self._attention[key]


@dataclass(frozen=True, slots=True)
class _Attention:
    """Attention inside the ragged samples of a field.

    Attributes:
        field: by whose lengths it goes, or whose values are lengths.
        by_values: which of both.
        rows_per_square: rows that cost as many FLOPs as a length of 1, squared.
    """

    field: str
    by_values: bool
    rows_per_square: float = 0.0

    def squares(self, loaded: Mapping[str, Tree]) -> list[float]:
        """Squares of the lengths in each sample."""
        value = cast(Ragged, loaded[self.field])
        if not self.by_values:
            return value.lengths.double().square().tolist()
        parts = value.values.double().square().split(value.lengths.tolist())
        return [float(part.sum()) for part in parts]

    def added(self, rows: Sequence[float], loaded: Mapping[str, Tree]) -> list[float]:
        """Rows of each sample, with those that attention costs."""
        pairs = zip(rows, self.squares(loaded), strict=True)
        return [own + self.rows_per_square * squares for own, squares in pairs]


def _attention(
    module: nn.Sequential, sources: Sequence[InputSource], loaded: Mapping[str, Tree], rows: float
) -> _Attention | None:
    """Run a module without values, and see by which field's lengths it attends.

    None where it does not, or cannot run without values or without other modules' outputs.

    Args:
        module: on the meta device.
        sources: of its inputs.
        loaded: fields of some samples.
        rows: of the module in them.
    """
    fields = [source.field for source in sources]
    given = [None if name is None else map_tensors(loaded[name], _on_meta) for name in fields]
    watch = _Watch()
    try:
        with torch.no_grad(), watch, FlopCounterMode(display=False) as counter:
            call_blocks(module, given)
    except Exception:
        return None
    flops = {str(op): count for op, count in counter.get_flop_counts().get("Global", {}).items()}
    attention = flops.pop(_OPERATOR.replace("::", "."), 0)
    found = [
        _Attention(name, by_values)
        for name, value in zip(fields, given, strict=True)
        if name is not None and isinstance(value, Ragged)
        for by_values in (False, True)
        if (value.values if by_values else value.lengths) is watch.lengths
    ]
    if not found or not rows or not (others := sum(flops.values())):
        return None
    squares = sum(found[0].squares(loaded))
    return replace(found[0], rows_per_square=attention / squares * rows / others)


def _on_meta(tensor: Tensor) -> Tensor:
    found = tensor.to("meta")
    if tensor.dim() == 1 and tensor.dtype == torch.int64:
        # They may be lengths, whose squares are counted.
        with_host_lengths(found, tensor.tolist())
    return found


class _Watch(TorchDispatchMode):
    """Keeps the lengths by which attention goes."""

    lengths: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == _OPERATOR:
            self.lengths = args[3]
        return func(*args, **(kwargs or {}))
