"""A task's data and what flows between its modules, on the meta device: shapes without values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mmplan.errors import InvalidInputError
from mmplan.ragged import Ragged, as_known, with_host_lengths
from mmplan.schema.factories import build_dataset
from mmplan.schema.workload import InputSource, TaskView, Workload

# Some samples' ragged fields, joined: of the data set, its collate, the fields.
LookAtRagged = Callable[[Any, Callable[..., Any], Sequence[str]], dict[str, Ragged]]


class TaskShapes:
    """Inputs of a task's modules and losses; sample 0 of its data set stands for all samples.

    Args:
        workload: the job.
        folder: the workload file's folder.
        task: one of its tasks.
        samples: in a batch.
        dtype: of floating-point fields.
        output: the output of a module on such a batch.
        look_at: some samples' ragged fields, whose mean number of rows all samples have; where
            it does not say, they have one.

    Raises:
        InvalidInputError: the task has no data, or its factory cannot be used.
    """

    def __init__(
        self,
        workload: Workload,
        folder: Path,
        task: TaskView,
        *,
        samples: int,
        dtype: torch.dtype,
        output: Callable[[str], Any],
        look_at: LookAtRagged = lambda dataset, collate, fields: {},
    ) -> None:
        self._samples, self._output = samples, output
        if task.data is None:
            raise InvalidInputError(
                f"task {task.name} has no data, so the shapes of its inputs are unknown",
                hint="add data: {factory: ...} to the workload",
            )
        dataset = build_dataset(task.data, folder, seed=workload.train.seed)
        collate = getattr(dataset, "collate", None) or _collate
        fields = collate([dataset[0]] * samples)
        self._fields = {name: on_meta(value, dtype) for name, value in fields.items()}
        ragged = [name for name, value in self._fields.items() if isinstance(value, Ragged)]
        looked_at = look_at(dataset, collate, ragged)
        for name in ragged:
            values, lengths = self._fields[name]
            found = looked_at.get(name)
            per_sample = len(found.values) / len(found.lengths) if found else 1.0
            num_rows = max(round(samples * per_sample), 1 if per_sample else 0)
            resized = values.new_empty((num_rows, *values.shape[1:]))
            if found:
                with_host_lengths(lengths, found.lengths.tolist())
                # Of packs the lengths of texts are values of a field.
                if resized.dtype == torch.int64 and resized.dim() == 1:
                    with_host_lengths(resized, found.values.tolist())
            self._fields[name] = Ragged(resized, lengths)

    def inputs(self, consumer: str, sources: Sequence[InputSource], samples: int) -> list[Any]:
        """Arguments of a module or a loss for a micro-batch, on the meta device.

        Raises:
            InvalidInputError: one is no module and no field of the data.
        """
        return [self._resize(self._value(consumer, source), samples) for source in sources]

    def _value(self, consumer: str, source: InputSource) -> Any:
        if source.module is not None:
            output = self._output(source.module)
            return output if source.element is None else output[source.element]
        if source.field is None:
            return None
        if source.field not in self._fields:
            raise InvalidInputError(
                f"{consumer} takes {source.field!r}, which is no module and no field of the data",
                hint=f"the data has {', '.join(sorted(self._fields))}",
            )
        return self._fields[source.field]

    def _resize(self, tree: Any, samples: int) -> Any:
        """A batch as one of another size; shapes only."""

        def grow(leaf: Tensor) -> Tensor:
            if not leaf.dim():
                return leaf
            shape = leaf.shape[0] * samples // self._samples, *leaf.shape[1:]
            return as_known(leaf.new_empty(shape), leaf)

        return pytree.tree_map_only(Tensor, grow, tree)


def on_meta(tree: Any, dtype: torch.dtype) -> Any:
    """The tensors of a tree without their values; floating-point ones of another type."""

    def move(leaf: Tensor) -> Tensor:
        return leaf.to("meta", dtype if leaf.is_floating_point() else leaf.dtype)

    return pytree.tree_map_only(Tensor, move, tree)


def _collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: _join([sample[name] for sample in samples]) for name in samples[0]}


def _join(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Ragged):
        return Ragged(*(torch.cat(column) for column in zip(*values, strict=True)))
    return torch.stack(list(values))
