"""Ragged samples filled into packs of a number of rows: whole samples, one after another.

    data:
      factory: mmplan.sources.packing:packed
      args:
        source: {factory: "mmplan.sources.hf_datasets:on_disk", args: {path: chats}}
        field: tokens
        budget: 2048

An item of the dataset is a pack. A ragged field has the rows of all its samples, and ``x_lengths``
says how many rows of field ``x`` each of them has: ``Ragged(x.values, x_lengths.values)`` are the
samples apart. Any other field has a row for each sample.

Packs follow from ``train.seed`` and are the same in every epoch: so all epochs have as many steps,
a pack has one index, and any epoch sees every sample once. Their order is another one each time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mmplan.arrays import Ints
from mmplan.errors import InvalidInputError, MMPlanError, RunFailedError
from mmplan.ragged import Ragged
from mmplan.schema.factories import build_part, workload_folder
from mmplan.sources.orders import epoch_order


def packed(
    source: Mapping[str, Any], field: str, budget: int, lengths: str | None = None
) -> Packed:
    """Packs of the samples of a dataset that another factory makes.

    Args:
        source: the other's ``factory`` and ``args``.
        field: ragged; its rows fill the packs.
        budget: rows of a pack.
        lengths: ``.npy`` file with the rows of every sample, [samples]; from the workload file's
            folder on. By default the dataset's own ``lengths(field)`` says them.

    Raises:
        InvalidInputError: a sample with more rows than the budget, a dataset that cannot be
            packed, or lengths that are not its own.
    """
    part = build_part(source, field="source")
    # The factory's generator follows train.seed.
    seed = int(torch.randint(2**62, ()))
    if lengths is not None:
        place = workload_folder() / lengths
        try:
            counts = np.load(place, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise InvalidInputError(
                f"{place}: no array of lengths: {error}", hint="write it with numpy.save"
            ) from error
    elif callable(getattr(part, "lengths", None)):
        counts = part.lengths(field)
    else:
        raise InvalidInputError(
            f"{type(part).__name__} has no lengths(field), so all samples would have to be read",
            hint="give lengths: a .npy file with the rows of every sample",
        )
    return Packed(part, field, budget, counts, seed)


class Packed:
    """Packs of samples, a dataset of its own.

    Args:
        part: map-style, each sample once an epoch, without a ``collate`` of its own.
        field: ragged; its rows fill the packs.
        budget: rows of a pack; a sample without rows takes the place of one.
        lengths: [samples], rows of each sample.
        seed: of the packs.

    Raises:
        InvalidInputError: see :func:`packed`.
    """

    def __init__(self, part: Any, field: str, budget: int, lengths: ArrayLike, seed: int) -> None:
        self._part, self._field = part, field
        self._check_part()
        self._lengths = _checked(lengths, len(part), budget)
        pack = best_fit(self._lengths, budget, seed)
        self._order = np.argsort(pack, kind="stable")
        self._starts = np.searchsorted(pack[self._order], np.arange(pack.max() + 2))
        if callable(getattr(part, "work", None)):
            self.work = self._work

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> dict[str, Ragged]:
        """A pack.

        Raises:
            InvalidInputError: a sample has other rows than its length said, or other fields.
            RunFailedError: reading a sample raised.
        """
        samples = {i: self._sample(i) for i in self._samples(index)}
        try:
            return dict(_joined(list(samples.values())))
        except (KeyError, AttributeError, TypeError, RuntimeError) as error:
            raise InvalidInputError(
                f"samples {', '.join(map(str, samples))} do not join: {error}",
                hint="give all samples the same fields, each with rows of one shape",
            ) from error

    def _work(self, index: int) -> dict[str, float]:
        """The sum of its samples' work, by module."""
        total: dict[str, float] = {}
        for sample in self._samples(index):
            for module, cost in self._part.work(sample).items():
                total[module] = total.get(module, 0.0) + cost
        return total

    def _samples(self, index: int) -> list[int]:
        return self._order[self._starts[index] : self._starts[index + 1]].tolist()

    def _sample(self, index: int) -> Mapping[str, Any]:
        try:
            sample = self._part[index]
        except MMPlanError:
            raise
        except Exception as error:
            raise RunFailedError(
                f"sample {index} raised {type(error).__name__}: {error}",
                hint="mend the factory of the packs' source",
            ) from error
        rows = len(sample[self._field].values)
        if max(rows, 1) != self._lengths[index]:
            raise InvalidInputError(
                f"sample {index} has {rows} rows of {self._field!r}, its length said "
                f"{self._lengths[index]}",
                hint="correct the lengths",
            )
        return sample

    def _check_part(self) -> None:
        part, field = self._part, self._field
        once = np.array_equal(np.sort(epoch_order(part, 0, 0)), np.arange(len(part)))
        if not once or hasattr(part, "collate"):
            raise InvalidInputError(
                f"{type(part).__name__} cannot be packed: its samples come by weights, or are put "
                "together by a collate of its own",
                hint="pack the parts of a mixture, and mix the packs",
            )
        sample = part[0]
        if not isinstance(sample.get(field), Ragged):
            ragged = [name for name, value in sample.items() if isinstance(value, Ragged)]
            raise InvalidInputError(
                f"no ragged field {field!r}", hint=f"ragged are {', '.join(ragged) or 'none'}"
            )
        taken = [name for name in sample if f"{name}_lengths" in sample]
        if taken:
            raise InvalidInputError(
                f"there is a field {taken[0]}_lengths already", hint="rename it in the source"
            )


def best_fit(lengths: Ints, budget: int, seed: int) -> Ints:
    """The pack of every sample: best fit, longest samples first.

    Each sample goes into the fullest pack that has room, a new one where none has. A sample costs
    a bisection of the different rooms that packs have left. Equally long samples come in random
    order.

    Args:
        lengths: [samples], from 1 to the budget.
        budget: of a pack.
        seed: of the order.

    Source:
        Johnson, Near-optimal bin packing algorithms (1973): at most 11/9 of the fewest packs and 4.
    """
    shuffled = np.random.default_rng(seed).permutation(len(lengths))
    longest_first = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    pack = np.empty(len(lengths), np.int64)
    # Packs by the room that they have left, and these rooms from the least on.
    packs: dict[int, list[int]] = {}
    rooms: list[int] = []
    count = 0
    for sample, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        place = bisect_left(rooms, length)
        if place == len(rooms):
            room, number = budget, count
            count += 1
        else:
            room = rooms[place]
            number = packs[room].pop()
            if not packs[room]:
                del packs[room], rooms[place]
        pack[sample] = number
        left = room - length
        if left and left not in packs:
            insort(rooms, left)
        if left:
            packs.setdefault(left, []).append(number)
    return pack


def _joined(samples: list[Mapping[str, Any]]) -> Iterator[tuple[str, Ragged]]:
    """The fields of samples, one after another."""
    for name in dict.fromkeys(name for sample in samples for name in sample):
        values: list[Any] = [sample[name] for sample in samples]
        if isinstance(values[0], Ragged):
            rows = torch.cat([value.values for value in values])
            yield f"{name}_lengths", _rows(torch.cat([value.lengths for value in values]))
        else:
            rows = torch.stack(values)
        yield name, _rows(rows)


def _rows(values: Tensor) -> Ragged:
    return Ragged(values, torch.tensor([len(values)]))


def _checked(lengths: ArrayLike, samples: int, budget: int) -> Ints:
    counts = np.asarray(lengths)
    if counts.shape != (samples,) or counts.dtype.kind not in "iu":
        raise InvalidInputError(
            f"the lengths are {list(counts.shape)} of {counts.dtype}, the source has {samples} "
            "samples",
            hint="give one whole number for each sample",
        )
    wrong = np.flatnonzero((counts < 0) | (counts > budget))
    if len(wrong):
        raise InvalidInputError(
            f"sample {wrong[0]} has {counts[wrong[0]]} rows, a pack {budget}; so have "
            f"{len(wrong)} samples",
            hint="raise the budget, or cut the samples",
        )
    return np.maximum(counts.astype(np.int64), 1)
