"""Slices of parameters whose gradients a set of ranks sums at once: all-reduced, or with ZeRO-1.

A sum begins when its gradients are complete, and is waited for later. Gradients that come in
between are a mistake, not added anywhere.

With ZeRO-1 the optimizer's state of a parameter is sharded over the ranks that hold copies of it.
The parameters that a set of ranks sums together lie one after another in one flat buffer.
REDUCE leaves each rank the summed gradient of its equal flat shard of the buffer, the optimizer
updates that shard alone, and an all-gather makes the buffer whole again. The result of an
elementwise optimizer is that of an update of whole parameters. In a training type of 16 bits the
buffer may be narrow; a rank has float32 values of its own shard only, which the optimizer updates.

Source: Rajbhandari et al., arXiv:1910.02054, section 5.1 (P_os).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from mmlaunch.checkpoint.boxes import Box
from mmlaunch.comm.transport import Transport, Work
from mmlaunch.model.shard_layout import ShardLayout, flat_parts, replicated_layout
from mmplan.errors import RunFailedError
from mmplan.program.shards import BUCKET_BYTES, Ranks, ShardSum


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


def whole_slice(name: str, parameter: nn.Parameter, *, contributes: bool = True) -> ParameterSlice:
    """All of a parameter that is not cut."""
    layout = replicated_layout(tuple(parameter.shape))
    return ParameterSlice(name=name, parameter=parameter, layout=layout, contributes=contributes)


def slices_of(
    part: ShardSum,
    parameters: Mapping[str, nn.Parameter],
    layouts: Mapping[str, ShardLayout],
    *,
    contributes: bool = True,
) -> Iterator[ParameterSlice]:
    """What a sum of a block takes of some of the block's parameters.

    Args:
        part: the sum.
        parameters: by full name.
        layouts: of those that tensor parallelism cuts.
        contributes: whether this rank brings gradients of whole parameters.
    """
    for name, parameter in parameters.items():
        layout = layouts.get(name)
        if part.parameters != "all" and (layout is not None) != (part.parameters == "cut"):
            continue
        if layout is None:
            yield whole_slice(name, parameter, contributes=contributes)
        else:
            boxes = layout.span(part.shards, part.tp)
            yield ParameterSlice(name=name, parameter=parameter, layout=layout, boxes=boxes)


class GradientBucket:
    """Slices whose gradients are all-reduced together, and every rank updates.

    Args:
        slices: of one type; the same on all ranks, but for their boxes.
        ranks: of the all-reduce.

    Attributes:
        slices: as given.
        num_ranks: on how many ranks each slice got a gradient; empty before the sum.
    """

    def __init__(self, slices: Sequence[ParameterSlice], ranks: Ranks) -> None:
        self.slices = slices
        self._ranks = ranks
        # The sums under way, and waits for them.
        self._under_way: list[tuple[Tensor, Work]] = []
        # On how many ranks each slice got a gradient.
        self.num_ranks = _flags([], slices[0].parameter)

    @property
    def is_under_way(self) -> bool:
        """Whether the sum has begun and is still to be taken."""
        return bool(self._under_way)

    def begin(self, transport: Transport, begun: set[str]) -> None:
        """Begin to sum the gradients, which are taken from the parameters.

        Args:
            transport: of this rank.
            begun: parameters that had no gradient and got one in this step, as the sum of an
                earlier slice.
        """
        has_gradient = [_gradient(item, begun) is not None for item in self.slices]
        flags = _flags(has_gradient, self.slices[0].parameter)
        flats = [_flat_gradient(item, begun) for item in self.slices]
        # The flags travel with the gradients, unless these need no copy: one may be very large.
        sums = [flats[0], flags] if len(flats) == 1 else [torch.cat([*flats, flags])]
        _take_gradients(self.slices)
        self._under_way = [(t, transport.start_all_reduce(t, self._ranks)) for t in sums]

    def finish(self, begun: set[str]) -> None:
        """Wait for the sums; they are the parameters' gradients then.

        Args:
            begun: see :meth:`begin`.

        Raises:
            RunFailedError: a parameter got a gradient after the sum began.
        """
        totals: list[Tensor] = []
        for total, work in self._under_way:
            work.wait()
            totals.append(total)
        self._under_way = []
        _refuse_late_gradients(self.slices)
        sizes = [*(item.num_elements for item in self.slices), len(self.slices)]
        *sums, self.num_ranks = totals if len(totals) > 1 else totals[0].split(sizes)
        for item, value in zip(self.slices, sums, strict=True):
            _set_gradient(item, value, begun)

    def drop_missing(self, num_ranks: Sequence[float]) -> None:
        """No gradient on any rank is none, not zero: an optimizer leaves such a parameter.

        Args:
            num_ranks: as the host has read them.
        """
        for item, count in zip(self.slices, num_ranks, strict=False):
            if count == 0:
                item.parameter.grad = None
        self.num_ranks = self.num_ranks[:0]

    def gather(self, transport: Transport) -> None:
        """Nothing: every rank updates all of its parameters."""


def _flags(has_gradient: Sequence[bool], like: Tensor) -> Tensor:
    """1 for each slice with a gradient, 0 for the others, beside the gradients."""
    # A copy that waits would end whatever the host is ahead of its device: CUDA copies from
    # pinned memory alone without the host.
    flags = torch.tensor(has_gradient, dtype=like.dtype, pin_memory=like.is_cuda)
    return flags.to(like.device, non_blocking=True)


def in_buckets(slices: Sequence[ParameterSlice]) -> list[list[ParameterSlice]]:
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


def _take_gradients(slices: Iterable[ParameterSlice]) -> None:
    """Let go of gradients that were copied; other slices of a larger shard are still to be."""
    for item in slices:
        if item.boxes is None:
            item.parameter.grad = None


def _refuse_late_gradients(slices: Iterable[ParameterSlice]) -> None:
    late = next((p.name for p in slices if p.boxes is None and p.parameter.grad is not None), None)
    if late is not None:
        raise RunFailedError(
            f"{late} got a gradient after the sum of its gradients over ranks had begun",
            hint="its block runs several backwards in one: use checkpoint(use_reentrant=False)",
        )


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


def _resize(tensor: Tensor, num_bytes: int) -> None:
    """Give a tensor, and all its views, memory or none; what they are views of stays the same."""
    # The tensors of a device without hardware, a subclass, have no memory.
    if type(tensor) is Tensor:
        tensor.untyped_storage().resize_(num_bytes)


class FlatShards:
    """Slices of parameters of which each rank of a set updates an equal flat shard.

    Whole parameters become views of one buffer. Slices of larger tensor-parallel shards stay
    where they are; the optimizer is given views on their boxes. With a narrow type it is given
    float32 copies of either, and :meth:`make_narrow` leaves parameters in that type.

    Args:
        slices: of one type; the same on all ranks, but for their boxes.
        ranks: of the reduce-scatter.
        rank: this rank, one of them.
        counted: names of parameters of which these ranks' shards count (:class:`UpdatedSlice`).
        narrow: type in which parameters are held whole; None for their own.
        gradients: type in which gradients add up; None for the parameters' own.
        in_rounds: whether there are several sums in a step, of a micro-batch each, which add up in
            this rank's shard (ZeRO-2).
        is_cut: whether a rank keeps its shard of the parameters only (ZeRO-3). Their memory is
            freed by :meth:`release`, and there again after :meth:`start_gather`.
        device: to which parameters come; None for their own.

    Attributes:
        slices: as given.
        in_rounds: as given.
        is_cut: as given.
        narrow: as given.
        updated: this rank's shard, parameter by parameter; empty where it is all padding.
        num_ranks: on how many ranks each slice got a gradient; empty before the sum.
    """

    def __init__(
        self,
        slices: Sequence[ParameterSlice],
        ranks: Ranks,
        rank: int,
        *,
        counted: frozenset[str],
        narrow: torch.dtype | None = None,
        gradients: torch.dtype | None = None,
        in_rounds: bool = False,
        is_cut: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self._ranks, self.slices, self.narrow = ranks, slices, narrow
        self.in_rounds, self.is_cut = in_rounds, is_cut
        # Of the optimizer's slices, of parameters, and of gradients and their sums.
        self._dtype, self._device = slices[0].parameter.dtype, device or slices[0].parameter.device
        self._held, self._summed = narrow or self._dtype, gradients or self._dtype
        total = sum(item.num_elements for item in slices)
        self._length = -(-total // len(ranks))
        self._low = ranks.index(rank) * self._length
        # This rank's part of the sum under way, what is summed, and a wait for it.
        self._under_way: tuple[Tensor, Tensor, Work] | None = None
        in_boxes = any(item.boxes is not None for item in slices)
        self._flat = self._own = None
        if not in_boxes:
            self._flat = self._new(self._length * len(ranks)).zero_().to(self._held)
            self._own = self._flat[self._low : self._low + self._length]
            if narrow is not None or is_cut:
                self._own = self._new(self._length).zero_()
        self.updated: list[UpdatedSlice] = []
        # Index of the slice of each updated one.
        self._slice_of: list[int] = []
        self.num_ranks = self._new(0, self._summed)
        for index, (item, start, stop) in enumerate(self._laid_out()):
            low, high = max(start, self._low), min(stop, self._low + self._length)
            if self._flat is not None and self._own is not None:
                values = item.parameter.detach()
                own = slice(low - self._low, high - self._low)
                if low < high:
                    self._own[own] = values.reshape(-1)[low - start : high - start]
                view = self._flat[start:stop].view(values.shape)
                if not is_cut:
                    view.copy_(values)
                item.parameter.data = view
            if low < high:
                cut = self._cut(item, start, low, high, counts=item.name in counted)
                self.updated += cut
                self._slice_of += [index] * len(cut)
        if is_cut:
            self.release()

    def _laid_out(self) -> Iterator[tuple[ParameterSlice, int, int]]:
        """Each slice with its first and end element in the flat buffer."""
        start = 0
        for item in self.slices:
            yield item, start, start + item.num_elements
            start += item.num_elements

    def _new(self, length: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(length, dtype=dtype or self._dtype, device=self._device)

    def _cut(
        self, item: ParameterSlice, start: int, low: int, high: int, *, counts: bool
    ) -> list[UpdatedSlice]:
        """Elements [low, high) of the flat buffer, all of one slice, as this rank updates them."""
        name, parameter = item.name, item.parameter
        if self._own is not None:
            tensor = self._own[low - self._low : high - self._low]
            tensor = tensor.view((high - low,) if parameter.dim() else ())
            span = low - start, high - start
            return [UpdatedSlice(name=name, tensor=nn.Parameter(tensor), counts=counts, span=span)]
        cut: list[UpdatedSlice] = []
        for local in flat_parts(item.boxes or (), low - start, high - start):
            values = parameter.data[local.slices]
            tensor = nn.Parameter(values if self.narrow is None else values.clone())
            ((full, _),) = item.layout.to_full(local)
            cut.append(UpdatedSlice(name=name, tensor=tensor, counts=counts, box=full))
        return cut

    def make_narrow(self) -> None:
        """Leave parameters in the narrow type."""
        for parameter in (item.parameter for item in self.slices):
            parameter.data = parameter.data.to(self._held)
            parameter.grad_dtype = self._summed

    @property
    def is_under_way(self) -> bool:
        """Whether the sum has begun and is still to be taken."""
        return self._under_way is not None

    def begin(self, transport: Transport, begun: set[str]) -> None:
        """Begin to sum the gradients, which are taken from the parameters.

        Args:
            transport: of this rank.
            begun: for sums in place (:class:`GradientBucket`).
        """
        has_gradient = [p.contributes and p.parameter.grad is not None for p in self.slices]
        length, width = max(self._length, 1), self._length + len(has_gradient)
        # Of every rank its shard, and behind it for every slice whether it has a gradient.
        mine = self._new(width, self._summed)
        full = mine.new_zeros(len(self._ranks), width)
        full[:, self._length :] = _flags(has_gradient, mine)
        for (item, start, stop), given in zip(self._laid_out(), has_gradient, strict=True):
            if not given:
                continue
            flat = item.flat(cast(Tensor, item.parameter.grad))
            for k in range(start // length, -(-stop // length)):
                first = k * length
                a, b = max(start, first), min(stop, first + length)
                full[k, a - first : b - first] = flat[a - start : b - start]
        _take_gradients(self.slices)
        work = transport.start_reduce_scatter(mine, full.view(-1), self._ranks)
        self._under_way = mine, full, work

    def finish(self, begun: set[str]) -> None:
        """Wait for the sums; each rank keeps those of its own shard.

        Args:
            begun: see :meth:`begin`.

        Raises:
            RunFailedError: a parameter got a gradient after the sum began.
        """
        del begun
        mine, _, work = cast("tuple[Tensor, Tensor, Work]", self._under_way)
        self._under_way = None
        work.wait()
        _refuse_late_gradients(self.slices)
        found = mine[self._length :]
        self.num_ranks = self.num_ranks + found if len(self.num_ranks) else found
        start = 0
        for tensor in (updated.tensor for updated in self.updated):
            part = mine[start : start + tensor.numel()].view(tensor.shape).to(self._dtype)
            tensor.grad = part if tensor.grad is None else tensor.grad.add_(part)
            start += tensor.numel()

    def drop_missing(self, num_ranks: Sequence[float]) -> None:
        """Slices of parameters that got no gradient on any rank have none.

        Args:
            num_ranks: as the host has read them.
        """
        for updated, index in zip(self.updated, self._slice_of, strict=True):
            if num_ranks and num_ranks[index] == 0:
                updated.tensor.grad = None
        for item in self.slices:
            item.parameter.grad = None
        self.num_ranks = self._new(0, self._summed)

    def start_gather(self, transport: Transport) -> Work:
        """Begin to gather parameters that are cut; they are whole after the wait."""
        full, mine = cast(Tensor, self._flat), cast(Tensor, self._own).to(self._held)
        _resize(full, full.numel() * full.element_size())
        return transport.start_gather_flat(full, mine, self._ranks)

    def release(self) -> None:
        """Free the memory of parameters that are cut; they and what refers to them keep shapes."""
        _resize(cast(Tensor, self._flat), 0)

    def drop_gradients(self) -> None:
        """Let go of gradients that no sum takes."""
        _take_gradients(self.slices)

    def gather(self, transport: Transport) -> None:
        """Gather the updated shards on all ranks, but of parameters that are cut."""
        if self.is_cut:
            return
        if self._flat is not None and self._own is not None:
            mine = self._own.to(self._held, copy=True)
            transport.gather_flat(self._flat, mine, self._ranks)
            return
        own = [updated.tensor.detach().reshape(-1) for updated in self.updated]
        padding = self._new(self._length - sum(map(len, own))).zero_()
        mine = torch.cat([*own, padding]).to(self._held)
        full = mine.new_empty(self._length * len(self._ranks))
        transport.gather_flat(full, mine, self._ranks)
        for item, start, stop in self._laid_out():
            item.write(item.parameter.data, full[start:stop])
