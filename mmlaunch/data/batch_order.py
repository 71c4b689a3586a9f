"""The order of a step's batch from its samples' work, which the dataset may tell.

Every rank asks the dataset for the work of the whole batch and finds the same order: which
samples a step takes, and so its loss, does not depend on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmplan.errors import InvalidInputError, MMPlanError, RunFailedError
from mmplan.program.model import Program
from mmplan.reordering.batch_order import BatchOrder
from mmplan.schema.workload import Workload


class StepOrder:
    """Dataset indices of a step, in the order in which they fill the batch.

    Args:
        order: of the task's batches.
        dataset: has ``work(index) -> {module: cost}``; each module in a unit of its own.
        modules: names that may stand there.
        seed: of the training.
    """

    def __init__(
        self, order: BatchOrder, dataset: Any, *, modules: Collection[str], seed: int
    ) -> None:
        self._order, self._dataset = order, dataset
        self._modules, self._seed = modules, seed

    def __call__(self, indices: Sequence[int], step: int) -> list[int]:
        """The indices of a step's batch, reordered.

        Raises:
            InvalidInputError: ``work`` does not give finite numbers from 0 on, or names no
                module.
            RunFailedError: it raised.
        """
        work = work_columns(
            self._dataset,
            indices,
            modules=self._modules,
            otherwise="set train.reorder: false",
        )
        # A seed sequence takes whole numbers from 0 on.
        order = self._order(work, (self._seed % 2**32) * 2**32 + step)
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
    return StepOrder(
        BatchOrder(program, task),
        dataset,
        modules=workload.modules,
        seed=workload.train.seed,
    )
