"""Inputs of measured modules and losses: real samples, and features made of them."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from mmlaunch.comm.batches import (
    NO_ROWS,
    Tree,
    cat_samples,
    element_of,
    lacks_rows,
    leaf_of,
    map_tensors,
    num_samples,
    slice_samples,
    tensors_of,
)
from mmlaunch.data.loader import StepData, StepLoader
from mmlaunch.data.task_data import open_dataset
from mmlaunch.model.precision import TrainingPrecision
from mmplan.errors import InvalidInputError, MMPlanError
from mmplan.ragged import Ragged
from mmplan.schema.factories import build_module, dtype_of
from mmplan.schema.profile import TIMED_STEPS
from mmplan.schema.protocols import ShardedLoss
from mmplan.schema.workload import (
    InputSource,
    TaskView,
    Workload,
    crossing_elements,
    resolve_tasks,
)

# Micro-batches at most over which the bytes of samples that differ are averaged.
_MOST_MICROBATCHES = 16

# Producers run over the pool so many samples at a time, to keep their activations small.
_POOL_STEP = 16


class Inputs:
    """Inputs of modules and losses, from the first samples of the first step's batch.

    The batch is a random subset of the data, so that work that differs between samples is
    met as it is met in training. Sizes beyond the pool repeat it. Where no sample of it has a
    modality, a later step's is taken: modules without rows take no time.

    Args:
        workload: has the inputs of modules and losses.
        folder: the workload file's folder.
        device: where inputs are put.
        pool: samples to load; more only repeat these.
    """

    def __init__(
        self, workload: Workload, folder: Path, device: torch.device, *, pool: int
    ) -> None:
        self._workload, self._folder, self._device = workload, folder, device
        self._pool = pool
        self._tasks = resolve_tasks(workload)
        self._data: dict[str, StepData] = {}
        self._made: dict[tuple[str, str], Tree] = {}

    def takes_gradients(self, task: str, module: str) -> bool:
        """Whether a module is fed by another one, so that its inputs' gradients are wanted."""
        return any(source.module for source in self._tasks[task].inputs[module])

    def only_features(self, task: str, loss: str) -> bool:
        """Whether a loss takes outputs of modules and no data."""
        return all(source.module for source in self._tasks[task].loss_inputs[loss])

    def crossing(self, task: str, module: str, output: Tree) -> Tree:
        """The elements of a module's output that cross the cut after its last block."""
        elements = crossing_elements(self._tasks[task], module)
        if elements is None:
            return output
        return tuple(element_of(output, element, module) for element in elements)

    def of_module(self, task: str, module: str, size: int, repeat: int = 0) -> tuple[Tree, ...]:
        """Inputs of a module's first block: ``size`` samples, others for each repeat."""
        return self._args(self._tasks[task], self._tasks[task].inputs[module], size, repeat)

    def different(self, task: str, module: str, size: int) -> Iterator[tuple[Tree, ...]]:
        """Micro-batches that stand for all of the pool: one where samples are alike in size."""
        first = self.of_module(task, module, size)
        count = max(1, self._pool_of(self._tasks[task]) // size) if _is_ragged(first) else 1
        kept = min(count, _MOST_MICROBATCHES)
        yield first
        for k in range(1, kept):
            yield self.of_module(task, module, size, k * count // kept)

    def of_loss(self, task: str, loss: str, size: int) -> tuple[Tree, ...]:
        """Inputs of a loss: ``size`` samples."""
        return self._args(self._tasks[task], self._tasks[task].loss_inputs[loss], size, 0)

    def _args(
        self, task: TaskView, sources: Sequence[InputSource], size: int, repeat: int
    ) -> tuple[Tree, ...]:
        return tuple(self._arg(task, source, size, repeat) for source in sources)

    def _arg(self, task: TaskView, source: InputSource, size: int, repeat: int) -> Tree:
        if source.module is not None:
            made = element_of(self._outputs(task, source.module), source.element, source.module)
            return map_tensors(_take(made, size, repeat), leaf_of)
        if source.field is None:
            return None
        return _take(self._field(task, source.field), size, repeat)

    def _field(self, task: TaskView, field: str) -> Tree:
        key = task.name, f"data.{field}"
        dtype = dtype_of(self._workload.train.precision)

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(self._device, dtype if tensor.is_floating_point() else tensor.dtype)

        if key not in self._made:
            if task.name not in self._data:
                self._data[task.name] = self._load(task)
            found = self._data[task.name].get(field, 0, self._pool_of(task))
            self._made[key] = map_tensors(found, moved)
        return self._made[key]

    def _pool_of(self, task: TaskView) -> int:
        return max(1, min(self._pool, task.batch))

    def _load(self, task: TaskView) -> StepData:
        sources = [s for used in (task.inputs, task.loss_inputs) for s in used.values()]
        loader = StepLoader(
            open_dataset(self._workload, task, self._folder),
            batch=task.batch,
            seed=self._workload.train.seed,
            ranges=[(0, self._pool_of(task))],
            fields=sorted({s.field for args in sources for s in args if s.field}),
        )
        try:
            steps = islice(loader, TIMED_STEPS)
            first = next(steps)
            found = (data for data in chain([first], steps) if not _lacks_any(data))
            return next(found, first)
        finally:
            loader.close()

    def _outputs(self, task: TaskView, name: str) -> Tree:
        """A module's output for the whole pool; made once, without gradients."""
        key = task.name, name
        if key not in self._made:
            module = build_module(self._workload, name, self._folder).to(self._device)
            pool = self._pool_of(task)
            everything = self._args(task, task.inputs[name], pool, 0)
            parts: list[Tree] = []
            precision = TrainingPrecision(self._workload.train, self._device)
            with torch.no_grad(), precision.compute(keep_casts=True):
                for first in range(0, pool, _POOL_STEP):
                    last = min(first + _POOL_STEP, pool)
                    part = tuple(slice_samples(item, first, last) for item in everything)
                    parts.append(checked_blocks(name, module, part))
            self._made[key] = cat_samples(parts)
        return self._made[key]


def _lacks_any(data: StepData) -> bool:
    return any(map(lacks_rows, data.fields.values()))


def _is_ragged(tree: Tree) -> bool:
    if isinstance(tree, Ragged):
        return True
    return isinstance(tree, tuple) and any(map(_is_ragged, tree))


def float_outputs(tree: Tree) -> list[Tensor]:
    """The outputs that a gradient comes back for."""
    return [tensor for tensor in tensors_of(tree) if tensor.requires_grad]


def checked_blocks(name: str, module: nn.Sequential, args: tuple[Tree, ...]) -> Tree:
    """A module's forward, block by block; failures name the block.

    Raises:
        InvalidInputError: a block raised, or changed one of its buffers.
    """
    for index, block in enumerate(module):
        args = (checked_block(name, index, block, args),)
    return args[0]


def checked_block(name: str, index: int, block: nn.Module, args: tuple[Tree, ...]) -> Tree:
    """One block's forward.

    Raises:
        InvalidInputError: it raised, changed a buffer, or returned something that cannot travel.
    """
    where = f"modules.{name}: block {index} ({type(block).__name__})"
    versions = {buffer_name: b._version for buffer_name, b in block.named_buffers()}
    try:
        out = block(*args)
    except (MMPlanError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        _raise_users(error, where, args)
    for buffer_name, buffer in block.named_buffers():
        if versions.get(buffer_name, buffer._version) != buffer._version:
            raise InvalidInputError(
                f"{where} changes its buffer {buffer_name!r} in forward, which no cut into "
                "micro-batches repeats",
                hint="keep no state in forward, or put the layer into eval mode in the factory",
            )
    if num_samples(out) is None:
        raise InvalidInputError(
            f"{where} returned a {type(out).__name__} without a tensor that has samples",
            hint="return a tensor, or a tuple of tensors, batch first",
        )
    return out


def checked_loss(name: str, loss: nn.Module, args: tuple[Tree, ...]) -> Tensor:
    """A loss's forward.

    Raises:
        InvalidInputError: it raised, or returned no scalar.
    """
    try:
        value = loss(*args)
    except (MMPlanError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        _raise_users(error, f"losses.{name} ({type(loss).__name__})", args)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InvalidInputError(
            f"losses.{name} returned {got}, not a scalar", hint="return the mean, or the sum"
        )
    return value


def compute_shard(loss: ShardedLoss, args: tuple[Tree, ...]) -> None:
    """A rank's part of a sharded loss, with all rows its own."""
    full = [tensor.detach() for tensor in tensors_of(args)]
    rows = {i: torch.arange(len(x), device=x.device) for i, x in enumerate(full)}
    own = {i: full[i][positions] for i, positions in rows.items()}
    loss.sharded(own, rows, dict(enumerate(full)), lambda stats: stats)


def block_flops(block: nn.Module, args: tuple[Tree, ...]) -> int:
    """Floating-point operations of one forward."""
    # Torch counts attention on GPUs only.
    mapping: dict[Any, Any] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops
    }
    # A view of a tensor with a gradient says that it has one too, where none is recorded, and the
    # counter asks it for its node.
    given = [map_tensors(arg, Tensor.detach) for arg in args]
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        block(*given)
    return counter.get_total_flops()


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    return sdpa_flop_count(query, key, value)


def _take(tree: Tree, size: int, repeat: int) -> Tree:
    """``size`` samples of a pool: the repeat's own ones, the pool repeated when too small."""
    pool = num_samples(tree)
    if pool is None:
        return tree
    if size <= pool:
        first = repeat % (pool // size) * size
        return slice_samples(tree, first, first + size)
    times, rest = divmod(size, pool)
    return cat_samples([tree] * times + ([slice_samples(tree, 0, rest)] if rest else []))


def _raise_users(error: Exception, where: str, args: tuple[Tree, ...]) -> NoReturn:
    own = [
        f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename
    ]
    lines = str(error).strip().splitlines()
    problem = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    raise InvalidInputError(
        f"{where} raised {problem} ({own[-1].filename}:{own[-1].lineno}) for inputs "
        f"{', '.join(map(_shown, args))}",
        hint=NO_ROWS
        if any(map(lacks_rows, args))
        else "a block takes what the one before it returns, the first the module's inputs",
    ) from error


def _shown(arg: Tree) -> str:
    if isinstance(arg, Tensor):
        return f"{list(arg.shape)} {str(arg.dtype).removeprefix('torch.')}"
    if isinstance(arg, tuple):
        return f"({', '.join(map(_shown, arg))})"
    return type(arg).__name__
