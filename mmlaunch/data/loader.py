"""The samples of a step: which they are, and loading those that one rank needs.

Which samples a step takes follows from (seed, step) alone, so the sampler's whole
state is one integer and it survives a change of ranks and shares.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import time
import traceback
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from threading import Thread
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mmlaunch.comm.batches import num_samples, slice_samples
from mmlaunch.process import fork_server
from mmlaunch.process.process_tree import guard_loader
from mmplan.errors import InvalidInputError, MMPlanError, RunFailedError
from mmplan.ragged import Ragged
from mmplan.sources.orders import epoch_length, epoch_order
from mmplan.wording import counted

# What a dataset gives for a sample without a modality: no other value says shape and type.
_NONE_OF_IT = (
    "a sample without it has mmplan.Ragged(rows, torch.tensor([0])), rows = torch.zeros(0, ...) "
    "in the shape and type of other samples' rows"
)
Field = Tensor | Ragged
DataSample = Mapping[str, Field]


def check_sample(sample: Any, index: int) -> None:
    """Refuse a sample that is not a dict of tensors.

    Raises:
        InvalidInputError: names the dataset index and the field.
    """
    if not isinstance(sample, Mapping):
        raise InvalidInputError(
            f"dataset[{index}] is a {type(sample).__name__}, not a dict of tensors",
            hint="return a dict from field name to tensor",
        )
    for field, value in sample.items():
        if not isinstance(value, Tensor | Ragged):
            raise InvalidInputError(
                f"dataset[{index}][{field!r}] is a {type(value).__name__}, not a tensor",
                hint=_NONE_OF_IT if value is None else "wrap it in torch.as_tensor",
            )
        if isinstance(value, Ragged) and value.lengths.tolist() != [len(value.values)]:
            raise InvalidInputError(
                f"dataset[{index}][{field!r}] is Ragged with {len(value.values)} rows and lengths "
                f"{value.lengths.tolist()}: a sample's Ragged has one length, its number of rows",
                hint="Ragged(values, torch.tensor([len(values)]))",
            )


def collate_samples(
    samples: Sequence[DataSample], indices: Sequence[int], fields: Collection[str]
) -> dict[str, Field]:
    """Stack the wanted fields of samples; ``Ragged`` fields are joined row by row.

    Raises:
        InvalidInputError: a missing field, or one whose shape or type changes.
    """
    batched: dict[str, Field] = {}
    for field in fields:
        elsewhere = any(field in sample for sample in samples)
        values = [
            field_of(sample, field, index, elsewhere=elsewhere)
            for sample, index in zip(samples, indices, strict=True)
        ]
        kinds = [_kind(value) for value in values]
        other = next((k for k, kind in enumerate(kinds) if kind != kinds[0]), None)
        if other is not None:
            raise InvalidInputError(
                f"field {field!r} differs within a batch: dataset[{indices[0]}] has {kinds[0]}, "
                f"dataset[{indices[other]}] has {kinds[other]}",
                hint=_NONE_OF_IT
                if isinstance(values[0], Ragged) or isinstance(values[other], Ragged)
                else "give all samples one shape, define collate, or use mmplan.Ragged",
            )
        if isinstance(values[0], Ragged):
            batched[field] = Ragged(*map(torch.cat, zip(*values, strict=True)))
        else:
            batched[field] = torch.stack(cast(list[Tensor], values))
    return batched


def check_batched(batched: Any, expected: int) -> None:
    """Check the result of a dataset's own collate.

    Raises:
        InvalidInputError: no dict of tensors, or not the expected number of samples.
    """
    if not isinstance(batched, Mapping):
        raise InvalidInputError(
            f"the dataset's collate returned a {type(batched).__name__}, not a dict of tensors"
        )
    for field, value in batched.items():
        found = num_samples(value) if isinstance(value, Tensor | Ragged) else None
        if found != expected:
            raise InvalidInputError(
                f"the dataset's collate gave field {field!r} {found} samples of {expected}",
                hint="return tensors with the samples along dim 0, or mmplan.Ragged",
            )


def field_of(sample: DataSample, field: str, index: int, *, elsewhere: bool = False) -> Field:
    """A field of a sample or batch.

    Args:
        sample: or batch.
        field: its name.
        index: the dataset index, for the message.
        elsewhere: whether other samples have the field.

    Raises:
        InvalidInputError: there is none; names those that exist.
    """
    if field not in sample:
        raise InvalidInputError(
            f"dataset[{index}] has no field {field!r}; it has {', '.join(sorted(sample))}",
            hint=_NONE_OF_IT
            if elsewhere
            else "name one of these, or a module, in the workload's inputs, or add it to the data",
        )
    return sample[field]


def _kind(value: Field) -> str:
    """Shape and type, which all samples of a batch share; of Ragged rows those of one row."""
    if isinstance(value, Ragged):
        return f"Ragged rows {list(value.values.shape[1:])} of {value.values.dtype}"
    return f"{list(value.shape)} of {value.dtype}"


Collate = Callable[[list[Any]], dict[str, Field]]
# Dataset indices of a step's batch and the step, to the same indices in another order.
Permutation = Callable[[Sequence[int], int], Sequence[int]]


def step_indices(dataset: Any, batch: int, seed: int, step: int) -> list[int]:
    """Dataset indices of a step's batch, in batch order.

    An epoch is cut into batches, the incomplete one dropped; step s takes batch s mod n of epoch
    s div n. The order of epoch e is the dataset's own (:mod:`mmplan.sources.orders`), else
    ``torch.randperm`` with a generator seeded with seed + e.

    Raises:
        InvalidInputError: fewer samples than one batch.
    """
    length = epoch_length(dataset)
    _check_size(length, batch)
    epoch, index = divmod(step, length // batch)
    return epoch_order(dataset, seed, epoch)[index * batch : (index + 1) * batch].tolist()


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Union of half-open ranges as disjoint ones, in order, none empty."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(item for item in ranges if item[0] < item[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def check_dataset(dataset: Any, batch: int) -> None:
    """Check that a dataset is map-style and has at least one batch.

    Raises:
        InvalidInputError: the data factory returned something else, or less than a batch.
    """
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not sized or isinstance(dataset, IterableDataset | Mapping | str | Tensor):
        raise InvalidInputError(
            f"the data factory returned a {type(dataset).__name__}, not a map-style Dataset",
            hint="return an object with __len__ and __getitem__(index) -> dict of tensors",
        )
    _check_size(epoch_length(dataset), batch)


def check_fields(sample: DataSample, modules: Collection[str]) -> None:
    """Refuse a data field that is named like a module.

    Raises:
        InvalidInputError: in ``inputs`` such a name would mean the module's output.
    """
    both = sorted(set(sample) & set(modules))
    if both:
        raise InvalidInputError(
            f"data field {both[0]!r} has the name of a module",
            hint="rename the field in the data factory, or the module in the workload",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepData:
    """The samples of one step's batch that one rank loaded.

    Attributes:
        step: the optimizer step.
        ranges: the batch positions that were loaded, disjoint and in order.
        indices: the dataset indices that stand there, one after another.
        fields: per field the loaded samples, one after another.
        load_s: that loading them took, in whichever process did it.
        core_s: of that the time on a core, or ready for one; the rest are waits, as for files.
    """

    step: int
    ranges: Sequence[tuple[int, int]]
    fields: Mapping[str, Field]
    indices: Sequence[int] = ()
    load_s: float = 0.0
    core_s: float = 0.0

    def get(self, field: str, start: int, stop: int) -> Field:
        """Samples at batch positions [start, stop), as a view.

        Raises:
            KeyError: the field or some of the positions were not asked for.
        """
        before = 0
        for low, high in self.ranges:
            if low <= start and stop <= high:
                row = before + start - low
                return cast(Field, slice_samples(self.fields[field], row, row + stop - start))
            before += high - low
        raise KeyError(f"batch positions [{start}, {stop}) of {field!r} are not loaded here")


class StepLoader(Iterator[StepData]):
    """Endless steps of data, each needed sample loaded once, ahead of time by workers.

    Random numbers drawn in ``__getitem__`` (augmentation) are seeded from (seed, epoch,
    dataset index): a sample is the same on every rank, under every plan and after a
    restart. A dataset's own ``collate(list of samples)`` must treat each sample alike
    whatever stands beside it, since no rank sees the whole batch.

    Args:
        dataset: map-style, of dicts of tensors.
        batch: samples per step.
        seed: of the order.
        ranges: batch positions [a, b) that this rank needs; they may overlap.
        fields: the data fields that it needs.
        order: permutes each step's batch, alike on all ranks.
        start_step: first step to give.
        num_workers: loading processes; 0 loads in this one.
        ahead: steps that each of them is ahead at most.
        pin_memory: give page-locked tensors, for copies to a GPU.

    Raises:
        InvalidInputError: no dataset, too few samples, a sample that is not a dict of
            tensors, a missing field, or shapes that differ.
        RunFailedError: the dataset raised, or a loading process died.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch: int,
        seed: int,
        ranges: Sequence[tuple[int, int]],
        fields: Collection[str],
        order: Permutation | None = None,
        start_step: int = 0,
        num_workers: int = 0,
        ahead: int = 2,
        pin_memory: bool = False,
    ) -> None:
        check_dataset(dataset, batch)
        self._ranges = merge_ranges(ranges)
        self._step = start_step
        if self._ranges and not 0 <= self._ranges[0][0] < self._ranges[-1][1] <= batch:
            raise InvalidInputError(f"batch positions {self._ranges} of a batch of {batch}")
        self._batch, self._num_workers, self._ahead = batch, num_workers, ahead
        self._pin_memory = pin_memory
        self._reader = Reader(dataset, tuple(fields), seed, self._ranges, order)
        self._batches: Iterator[Any] | None = self._open()

    def _open(self) -> Iterator[Any]:
        """What :class:`Reader` gives of this step and of those that follow."""
        if self._num_workers and multiprocessing.get_start_method() == "forkserver":
            # A rank that a fork server started has none of its own: unguarded, the loader's
            # would outlive it.
            fork_server.start()
        reader = self._reader
        steps = _steps(reader.dataset, self._batch, reader.seed, self._step)
        batches = iter(self._loader(reader, steps, self._num_workers))
        # Here they are made in the rank's own thread, with random numbers that are the process's.
        return TakenAhead(batches) if self._num_workers else batches

    def _loader(
        self, reader: Dataset[Any], steps: Iterable[Any], num_workers: int, **more: Any
    ) -> DataLoader[Any]:
        return DataLoader(
            reader,
            batch_sampler=cast(Any, steps),
            collate_fn=_as_is,
            num_workers=num_workers,
            prefetch_factor=self._ahead if num_workers else None,
            pin_memory=self._pin_memory,
            worker_init_fn=guard_loader,
            # A generator of its own: the default one would be advanced here, and with it
            # the model's random numbers.
            generator=torch.Generator().manual_seed(self._reader.seed),
            **more,
        )

    def __next__(self) -> StepData:
        """The next step's data."""
        if self._batches is None:
            raise StopIteration
        got = self._next_batch(self._batches)
        if isinstance(got, LoadFailure):
            raise got.error from (RuntimeError(got.trace) if got.trace else None)
        # A tuple until here: of other objects nothing would be page-locked.
        indices, fields, load_s, core_s = got
        data = StepData(
            step=self._step,
            ranges=self._ranges,
            fields=fields,
            indices=indices,
            load_s=load_s,
            core_s=core_s,
        )
        self._step += 1
        return data

    def close(self) -> None:
        """End the loading processes."""
        batches, self._batches = self._batches, None
        if isinstance(batches, TakenAhead):
            batches.close()

    def _next_batch(self, batches: Iterator[Any]) -> Any:
        try:
            return next(batches)
        except RuntimeError as exc:
            if "DataLoader worker" not in str(exc):
                raise
            raise RunFailedError(
                f"step {self._step}: {str(exc).splitlines()[0]}",
                hint="it may have run out of memory; load without worker processes to see more",
            ) from exc


class TakenAhead(Iterator[Any]):
    """The items of a loader with processes, each taken in a thread while the one before is used.

    A ready batch still costs a millisecond: its tensors' files are sent, mapped and unpickled.
    """

    def __init__(self, items: Any) -> None:
        self._items = items
        self._next = self._take()

    def __next__(self) -> Any:
        try:
            return self._next.result()
        finally:
            self._next = self._take()

    def _take(self) -> Future[Any]:
        taken: Future[Any] = Future()

        def take() -> None:
            try:
                taken.set_result(next(self._items))
            except BaseException as exc:
                taken.set_exception(exc)

        # Nobody waits for it: with its processes the loader's own wait ends.
        Thread(target=take, daemon=True).start()
        return taken

    def close(self) -> None:
        """End the processes."""
        self._items._shutdown_workers()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailure:
    """An error on its way out of a loading process, which would reword any exception."""

    error: MMPlanError
    trace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A step's whole batch: its dataset indices, as they are drawn."""

    step: int
    epoch: int
    indices: Sequence[int]


def step_batch(dataset: Any, batch: int, seed: int, step: int) -> StepBatch:
    """A step's batch; where it is read it is put in order and cut."""
    indices = step_indices(dataset, batch, seed, step)
    return StepBatch(step=step, epoch=step // (epoch_length(dataset) // batch), indices=indices)


def _steps(dataset: Any, batch: int, seed: int, start_step: int) -> Iterator[list[StepBatch]]:
    for step in count(start_step):
        yield [step_batch(dataset, batch, seed, step)]


@dataclass
class Reader(Dataset[Any]):
    """Loads and batches a step's samples in one go, in a loading process or here."""

    dataset: Any
    fields: Sequence[str]
    seed: int
    ranges: Sequence[tuple[int, int]]
    order: Permutation | None
    draws: bool = False

    def __getitems__(
        self, batches: list[StepBatch]
    ) -> tuple[list[int], dict[str, Field], float, float] | LoadFailure:
        """One step's samples and the times of :class:`StepData`, in place of calls per sample."""
        if not self.ranges or not self.fields:
            return [], {}, 0.0, 0.0
        began_s, core_began_s = time.perf_counter(), _core_s()
        try:
            with _own_random_numbers():
                keys = self._keys(*batches)
                samples = self._load_all(keys)
                _seed_random_numbers(self.seed, *keys[0])
                indices = [index for _, index in keys]
                fields = self._batch(samples, indices)
            load_s, core_s = time.perf_counter() - began_s, _core_s() - core_began_s
            return indices, fields, load_s, core_s
        except MMPlanError as exc:
            cause = exc.__cause__
            trace = "".join(traceback.format_exception(cause)) if cause else None
            return LoadFailure(error=exc, trace=trace)

    def _keys(self, batch: StepBatch) -> list[tuple[int, int]]:
        """(epoch, dataset index) of every sample to load."""
        order = self.order
        indices = batch.indices if order is None else order(batch.indices, batch.step)
        return [(batch.epoch, index) for low, high in self.ranges for index in indices[low:high]]

    def _load_all(self, keys: list[tuple[int, int]]) -> list[Any]:
        """The samples, each from random numbers of its own.

        Seeding costs 11 µs a sample, more than many datasets take to answer, so it starts
        with the first step in which one draws; that step is loaded once more.
        """
        if not self.draws:
            before = _random_state()
            samples = [self._load(index) for _, index in keys]
            if _random_state() == before:
                return samples
            self.draws = True
        samples = []
        for epoch, index in keys:
            _seed_random_numbers(self.seed, epoch, index)
            samples.append(self._load(index))
        return samples

    def _load(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except MMPlanError:
            raise
        except Exception as exc:
            raise _user_error(f"dataset[{index}]", exc) from exc

    def _batch(self, samples: list[Any], indices: list[int]) -> dict[str, Field]:
        collate: Collate | None = getattr(self.dataset, "collate", None)
        if collate is None:
            for sample, index in zip(samples, indices, strict=True):
                check_sample(sample, index)
            return collate_samples(samples, indices, self.fields)
        try:
            batched: Any = collate(samples)
        except MMPlanError:
            raise
        except Exception as exc:
            what = f"the dataset's collate of {counted(len(samples), 'sample')}, the first of them "
            raise _user_error(f"{what}dataset[{indices[0]}],", exc) from exc
        check_batched(batched, len(samples))
        return {field: field_of(batched, field, indices[0]) for field in self.fields}


def _user_error(what: str, exc: Exception) -> RunFailedError:
    return RunFailedError(
        f"{what} raised {type(exc).__name__}: {exc}", hint="mend the workload's data factory"
    )


def _as_is(batch: Any) -> Any:
    return batch


def _check_size(num_samples: int, batch: int) -> None:
    if num_samples < batch:
        raise InvalidInputError(
            f"the dataset has {counted(num_samples, 'sample')}, one batch takes {batch}",
            hint="lower `batch` in the workload, or give more data",
        )


@contextmanager
def _own_random_numbers() -> Generator[None]:
    """Leave this process's random numbers as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


def _core_s() -> float:
    """Seconds that this thread ran or, where others had all cores, was ready to."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            ran_ns, ready_ns, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return time.thread_time()
    return (ran_ns + ready_ns) / 1e9


def _random_state() -> tuple[object, ...]:
    """Equal as long as nobody draws a random number."""
    name, keys, *position = np.random.get_state()  # noqa: NPY002
    state = torch.get_rng_state().numpy().tobytes()
    return random.getstate(), name, cast(Any, keys).tobytes(), position, state


def _seed_random_numbers(seed: int, epoch: int, index: int) -> None:
    """Seed every generator that a dataset may draw from, all of them the global ones."""
    digest = hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little")
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(value)
