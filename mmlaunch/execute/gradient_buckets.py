"""Gradient buckets: slices of parameters whose gradients a set of ranks sums in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from mmlaunch.checkpoint.boxes import Box
from mmlaunch.comm.transport import Transport
from mmlaunch.model.shard_layout import ShardLayout
from mmplan.program.shards import BUCKET_BYTES, Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedSlice:
    """A parameter that the optimizer of one rank updates, or a slice of one.

    Attributes:
        name: the parameter's full name.
        tensor: the optimizer's; a slice is flat, of a scalar it is the scalar.
        counts: whether this rank, of several with an equal slice, saves its state and adds it
            to the gradients' norm.
        span: of a flat slice, the first and end element in the local, flattened parameter.
        box: of a slice that is a box, its place in the full parameter.
    """

    name: str
    tensor: nn.Parameter
    counts: bool
    span: tuple[int, int] | None = None
    box: Box | None = None

    @property
    def label(self) -> str:
        """The name, and the box: a rank may update several boxes of one parameter."""
        return self.name if self.box is None else f"{self.name}{self.box}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlice:
    """Elements of a local parameter whose gradients are summed.

    Attributes:
        name: the parameter's full name.
        layout: of the parameter.
        boxes: of the local tensor, flat one after the other; None for all of it.
        contributes: whether this rank's gradient is in the sum. Where it is not, another rank
            contributes the same one, and this rank only takes the sum.
    """

    name: str
    parameter: nn.Parameter
    layout: ShardLayout
    boxes: tuple[Box, ...] | None = None
    contributes: bool = True

    @property
    def num_elements(self) -> int:
        """Elements of the slice."""
        if self.boxes is None:
            return self.parameter.numel()
        return sum(box.num_elements for box in self.boxes)

    def flat(self, tensor: Tensor) -> Tensor:
        """The slice's elements of a tensor like the parameter, in flat order."""
        if self.boxes is None:
            return tensor.reshape(-1)
        return torch.cat([tensor[box.slices].reshape(-1) for box in self.boxes])

    def write(self, tensor: Tensor, flat: Tensor) -> None:
        """Put the slice's elements into a tensor like the parameter."""
        values = flat.split([box.num_elements for box in self.boxes or ()])
        for box, value in zip(self.boxes or (), values, strict=True):
            tensor[box.slices] = value.view(box.sizes)


def by_type(slices: Sequence[ParameterSlice]) -> list[list[ParameterSlice]]:
    """The slices of each type of numbers, which a collective needs to itself."""
    found: defaultdict[str, list[ParameterSlice]] = defaultdict(list)
    for item in slices:
        found[str(item.parameter.dtype)].append(item)
    return [found[name] for name in sorted(found)]


class GradientBuckets:
    """Slices whose gradients are all-reduced in place, so many at a time as fill a bucket.

    Args:
        slices: of one type; the same on all ranks, but for their boxes.
        ranks: of the all-reduce.

    Attributes:
        slices: as given.
        updated: slices that the optimizer updates in place of these parameters: none.
    """

    updated: Sequence[UpdatedSlice] = ()

    def __init__(self, slices: Sequence[ParameterSlice], ranks: Ranks) -> None:
        self.slices = slices
        self._ranks = ranks
        self._buckets = _buckets(slices)
        # On how many ranks each slice got a gradient.
        self._num_ranks: Tensor | None = None

    def reduce(self, transport: Transport, begun: set[str]) -> None:
        """Replace the gradients by their sums.

        Args:
            transport: of this rank.
            begun: parameters that had no gradient and got one in this step, as the sum of an
                earlier slice.
        """
        has_gradient = [_gradient(item, begun) is not None for item in self.slices]
        flags = self.slices[0].parameter.new_tensor(has_gradient)
        for bucket in self._buckets[:-1]:
            self._reduce_bucket(bucket, (), transport, begun)
        # The flags travel with the last bucket, which spares a collective.
        sums = self._reduce_bucket(self._buckets[-1], (flags,), transport, begun)
        self._num_ranks = sums[-1]

    def _reduce_bucket(
        self,
        bucket: Sequence[ParameterSlice],
        others: Sequence[Tensor],
        transport: Transport,
        begun: set[str],
    ) -> Sequence[Tensor]:
        """Sum the gradients of a bucket and other flat tensors; returns all sums."""
        flats = [*(_flat_gradient(item, begun) for item in bucket), *others]
        sizes = [len(flat) for flat in flats]
        total = flats[0] if len(flats) == 1 else torch.cat(flats)
        del flats
        transport.all_reduce(total, self._ranks)
        sums = total.split(sizes)
        for item, value in zip(bucket, sums, strict=False):
            _set_gradient(item, value, begun)
        return sums

    def drop_missing(self) -> None:
        """No gradient on any rank is none, not zero: an optimizer leaves such a parameter."""
        # At the step's end, because reading the counts waits for the device.
        if self._num_ranks is not None:
            for item, count in zip(self.slices, self._num_ranks.tolist(), strict=True):
                if count == 0:
                    item.parameter.grad = None
        self._num_ranks = None

    def gather(self, transport: Transport) -> None:
        """Nothing: every rank updates all of its parameters."""


def _buckets(slices: Sequence[ParameterSlice]) -> list[list[ParameterSlice]]:
    """Neighbours together while they fit a bucket; a larger slice is alone in one."""
    found: list[list[ParameterSlice]] = []
    left_bytes = 0
    for item in slices:
        size = item.num_elements * item.parameter.element_size()
        if not found or size > left_bytes:
            found.append([])
            left_bytes = BUCKET_BYTES
        found[-1].append(item)
        left_bytes -= size
    return found


def _flat_gradient(item: ParameterSlice, begun: set[str]) -> Tensor:
    """This rank's contribution to the sum of a slice."""
    grad = _gradient(item, begun)
    return item.parameter.new_zeros(item.num_elements) if grad is None else item.flat(grad)


def _gradient(item: ParameterSlice, begun: set[str]) -> Tensor | None:
    """This rank's own gradient; None where it contributes none."""
    return item.parameter.grad if item.contributes and item.name not in begun else None


def _set_gradient(item: ParameterSlice, flat: Tensor, begun: set[str]) -> None:
    parameter = item.parameter
    if item.boxes is None:
        parameter.grad = cast(Tensor, flat.view_as(parameter))
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
        begun.add(item.name)
    item.write(parameter.grad, flat)
