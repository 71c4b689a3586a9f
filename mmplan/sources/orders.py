"""Orders of samples that follow from a seed and an epoch alone.

A dataset may have an order of its own: ``epoch_length`` entries an epoch, and
``epoch_order(seed, epoch)``, which gives them as dataset indices. Of any other dataset an epoch is
every sample once, in random order. Ranks, loading processes and plans have no part in an order, so
a stream of samples survives any change of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeGuard, cast

import numpy as np
import torch

from mmplan.arrays import Indices


class OwnOrder(Protocol):
    """A dataset that says in which order its samples are taken."""

    @property
    def epoch_length(self) -> int:
        """Samples of an epoch, the same of every one."""
        ...

    def epoch_order(self, seed: int, epoch: int) -> Indices:
        """The dataset indices of an epoch, [epoch_length]; they may repeat."""
        ...


def epoch_length(dataset: Any) -> int:
    """Samples that an epoch of a dataset takes."""
    return dataset.epoch_length if _has_own_order(dataset) else len(dataset)


def epoch_order(dataset: Any, seed: int, epoch: int) -> Indices:
    """The dataset indices of an epoch, [epoch_length]; the last ones asked for are kept."""
    if _has_own_order(dataset):
        return _own_order(dataset, seed, epoch)
    return shuffled(len(dataset), seed, epoch)


def _has_own_order(dataset: object) -> TypeGuard[OwnOrder]:
    return hasattr(dataset, "epoch_order") and hasattr(dataset, "epoch_length")


@lru_cache(maxsize=4)
def _own_order(dataset: OwnOrder, seed: int, epoch: int) -> Indices:
    return dataset.epoch_order(seed, epoch)


@lru_cache(maxsize=4)
def shuffled(num_samples: int, seed: int, epoch: int) -> Indices:
    """All samples in random order: ``torch.randperm`` seeded with seed + epoch."""
    generator = torch.Generator().manual_seed(seed + epoch)
    order = cast(Indices, torch.randperm(num_samples, generator=generator).numpy())
    order.setflags(write=False)
    return order


def shuffled_nearby(starts: Sequence[int], seed: int, epoch: int, *, window: int) -> Indices:
    """Groups in random order, and each sample moved by less than a window from its place.

    What a shuffle buffer of ``window`` samples does to groups that are read one after another, but
    known in advance.

    Args:
        starts: of the groups, in order, and the end of the last one.
        seed: of the order.
        epoch: of the order.
        window: samples; 1 leaves the samples of a group in order.
    """
    draw = np.random.default_rng((seed % 2**64, epoch))
    groups = [np.arange(*starts[k : k + 2]) for k in draw.permutation(len(starts) - 1)]
    order = np.concatenate([np.empty(0, np.int64), *groups])
    places = np.arange(len(order)) + draw.random(len(order)) * window
    return order[np.argsort(places, kind="stable")]
