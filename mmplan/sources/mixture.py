"""Several datasets as one, each with its share of the samples.

    data:
      factory: mmplan.sources.mixture:mixture
      args:
        parts:
          - {factory: "my.data:captions", weight: 3}
          - {factory: "my.data:scans", args: {split: train}, weight: 1}

Tasks with data of their own have mixtures of their own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil, inf
from typing import Any

import numpy as np

from mmplan.arrays import Indices
from mmplan.errors import InvalidInputError
from mmplan.schema.factories import build_part
from mmplan.sources.orders import epoch_length, epoch_order


def mixture(parts: Sequence[Mapping[str, Any]], epoch: int | None = None) -> Mixture:
    """A mixture of datasets that other factories make.

    Args:
        parts: each with ``factory``, ``args`` (none by default) and ``weight`` (1 by default).
        epoch: samples of an epoch; by default as many as it takes to see every sample of every
            part, those of others again and again.

    Raises:
        InvalidInputError: no part, a field that is none of these, a weight that is not above 0, or
            a dataset that is wrong.
    """
    if not parts:
        raise InvalidInputError("a mixture has no parts", hint="give parts: [{factory: ...}]")
    datasets: list[Any] = []
    weights: list[float] = []
    for number, part in enumerate(parts):
        weight = part.get("weight", 1)
        if not isinstance(weight, int | float) or not 0 < weight < inf:
            raise InvalidInputError(
                f"parts[{number}].weight is {weight!r}", hint="give a number above 0"
            )
        own = {name: value for name, value in part.items() if name != "weight"}
        datasets.append(build_part(own, field=f"parts[{number}]"))
        weights.append(float(weight))
    return Mixture(datasets, weights, epoch)


class Mixture:
    """Datasets one after another, taken by their weights.

    An epoch of n samples takes round(n * weight) of each part, by the largest remainder. A part
    goes through its own epochs, however many of the mixture's they last: none of its samples comes
    a second time before all have come once.

    Args:
        datasets: map-style, all with the same fields.
        weights: above 0, of each dataset.
        epoch: samples of an epoch; None for as many as it takes to see every sample.

    Raises:
        InvalidInputError: the datasets have different fields, or batches made in ways of their own.
    """

    def __init__(
        self, datasets: Sequence[Any], weights: Sequence[float], epoch: int | None = None
    ) -> None:
        self._datasets, total = list(datasets), sum(weights)
        self._starts = [0, *accumulate(map(len, self._datasets))]
        shares = [weight / total for weight in weights]
        lengths = [epoch_length(dataset) for dataset in self._datasets]
        if epoch is None:
            epoch = max(ceil(n / share) for n, share in zip(lengths, shares, strict=True))
        if epoch < 1:
            raise InvalidInputError(f"epoch is {epoch}", hint="give a number of samples")
        self._counts = _rounded(shares, epoch)
        self.epoch_length = epoch
        self._check_fields()
        self._offer("work")
        self._offer("collate")

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        part, own = self._place(index)
        return self._datasets[part][own]

    def epoch_order(self, seed: int, epoch: int) -> Indices:
        """See :class:`mmplan.sources.orders.OwnOrder`."""
        draw = np.random.default_rng((seed % 2**64, epoch))
        labels = np.repeat(np.arange(len(self._counts)), self._counts)
        draw.shuffle(labels)
        order = np.empty(len(labels), np.int64)
        for part, count in enumerate(self._counts):
            order[labels == part] = self._starts[part] + self._stream(part, seed, epoch * count)
        return order

    def _stream(self, part: int, seed: int, first: int) -> Indices:
        """A part's own indices for an epoch, the first of them the first-th that it ever gives."""
        dataset, count = self._datasets[part], self._counts[part]
        length = epoch_length(dataset)
        passes = range(first // length, -(-(first + count) // length))
        # Parts of equal length have orders of their own.
        orders = [epoch_order(dataset, seed + (part << 32), number) for number in passes]
        stream = np.concatenate([np.empty(0, np.int64), *orders])
        return stream[first % length :][:count]

    def _place(self, index: int) -> tuple[int, int]:
        """The part of an index, and the index in it."""
        part = bisect_right(self._starts, index) - 1
        if not 0 <= index < len(self):
            raise IndexError(f"{index} of {len(self)} samples")
        return part, index - self._starts[part]

    def _check_fields(self) -> None:
        fields = [set(dataset[0]) for dataset in self._datasets]
        for number, own in enumerate(fields):
            odd = sorted(own ^ fields[0])
            if odd:
                raise InvalidInputError(
                    f"parts[0] has the fields {', '.join(sorted(fields[0]))}, parts[{number}] has "
                    f"{', '.join(sorted(own))}",
                    hint="give all parts the same fields; a sample without a modality has a "
                    "mmplan.Ragged without rows",
                )

    def _offer(self, method: str) -> None:
        """Have a method that all parts have; one alone is refused."""
        found = [getattr(dataset, method, None) for dataset in self._datasets]
        if not any(found):
            return
        if not all(found):
            raise InvalidInputError(
                f"parts[{found.index(None)}] has no {method}(), others have",
                hint=f"give all parts {method}(), or none",
            )
        setattr(self, method, self._work if method == "work" else _common_collate(found))

    def _work(self, index: int) -> Any:
        part, own = self._place(index)
        return self._datasets[part].work(own)


def _common_collate(found: Sequence[Any]) -> Any:
    functions = {getattr(collate, "__func__", collate) for collate in found}
    if len(functions) > 1:
        raise InvalidInputError(
            "the parts' collate() differ", hint="use one function, or mmplan.Ragged without any"
        )
    return found[0]


def _rounded(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers with a sum, each next to its share of it: largest remainders round up."""
    exact = [share * total for share in shares]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda k: counts[k] - exact[k])
    for k in by_remainder[: total - sum(counts)]:
        counts[k] += 1
    return counts
