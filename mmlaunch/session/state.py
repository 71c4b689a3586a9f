"""Parameters and optimizer state of one rank, as boxes of full tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mmlaunch.checkpoint.boxes import Box, flat_to_boxes, whole
from mmlaunch.checkpoint.exported_weights import weights_order, write_weights
from mmlaunch.checkpoint.restore import Checkpoint
from mmlaunch.checkpoint.save import Entry
from mmlaunch.checkpoint.tensorfile import TensorSpec
from mmlaunch.comm.transport import Transport
from mmlaunch.comm.wire import DType
from mmlaunch.execute.gradient_buckets import UpdatedSlice
from mmlaunch.execute.reductions import Reductions
from mmlaunch.model.local_model import LocalModel
from mmlaunch.model.shard_layout import replicated_layout
from mmplan.program.model import Program
from mmplan.program.shards import Ranks, writing_ranks

_WEIGHT = "param"
WeightSpec = tuple[str, tuple[int, ...], DType, tuple[Box, ...]]
# Prefix of the kinds of optimizer state in a checkpoint.
OPTIMIZER_KIND = "optim."


class Weights(Protocol):
    """One rank's part of weights that are written together."""

    def specs(self) -> list[WeightSpec]:
        """Name, full shape, type and boxes of the weights that this rank writes, in fixed order."""
        ...

    def parts(self, name: str) -> list[Tensor]:
        """One of them, cut into its boxes."""
        ...


class LocalState:
    """Saves, loads and gathers the tensors of a rank, under any later layout.

    Args:
        program: says which other ranks hold a block.
        model: this rank's parameters.
        rank: this rank.
        reductions: says what its optimizer updates.
    """

    def __init__(
        self, program: Program, model: LocalModel, rank: int, reductions: Reductions
    ) -> None:
        self._model, self._slices = model, reductions.updated_slices()
        self._tensors: dict[str, Tensor] = dict(model.named_parameters())
        self._tensors.update(model.named_buffers())
        self._layouts = {
            name: model.layouts.get(name) or replicated_layout(tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        }
        writers = _writers(program)
        # Of these the optimizer's slices are saved, which ranks have cut.
        self._cut = {name: list[UpdatedSlice]() for name in reductions.cut_names}
        self._gathered = reductions.gathered.names
        for item in self._slices:
            if item.counts and item.name in self._cut:
                self._cut[item.name].append(item)
        self._written = {
            name
            for name in self._tensors
            if self._cut.get(name, self._is_writer(name, writers, rank))
        }

    def _is_writer(
        self, name: str, writers: Mapping[tuple[str, int], tuple[int, ...]], rank: int
    ) -> bool:
        first, second = name.split(".")[:2]
        loss = first == "losses"
        ranks = writers.get((f"losses.{second}", 0) if loss else (first, int(second)), ())
        # Whole on every rank of a group: the first one writes it. A tied parameter may be saved
        # under the name of a block on other ranks, which write it.
        return rank in (ranks if name in self._model.layouts else ranks[:1])

    def entries(self, optimizer: torch.optim.Optimizer | None) -> list[Entry]:
        """This rank's entries of a checkpoint: of replicas, one rank writes.

        Args:
            optimizer: of this rank.
        """
        found: list[Entry] = []
        trained = {item.name for item in self._slices}
        for name, layout in self._layouts.items():
            if name in self._written:
                views = self._saved_views(name)
                found.append(_entry(name, _WEIGHT, layout.full_shape, views, name in trained))
        state = {} if optimizer is None else optimizer.state
        for item in self._slices:
            if item.counts:
                found += self._state_entries(state.get(item.tensor, {}), item)
        return found

    def _state_entries(self, state: Mapping[str, Any], item: UpdatedSlice) -> Iterator[Entry]:
        full_shape = self._layouts[item.name].full_shape
        for key, value in state.items():
            kind = OPTIMIZER_KIND + key
            if isinstance(value, Tensor) and value.dim() and value.shape == item.tensor.shape:
                yield _entry(item.name, kind, full_shape, self._views(value, item))
            elif value is not None:
                yield _entry(item.name, kind, (), [(whole(()), torch.as_tensor(value))])

    def load(self, checkpoint: Checkpoint, optimizer: torch.optim.Optimizer | None) -> None:
        """Fill parameters and optimizer state from a checkpoint of any plan.

        Raises:
            InvalidInputError: a parameter is missing or has another shape.
        """
        for name, layout in self._layouts.items():
            if name not in self._gathered:
                _read(checkpoint, name, _WEIGHT, layout.full_shape, self._weight_views(name))
        for item in self._slices:
            if item.name in self._cut:
                full_shape, views = self._layouts[item.name].full_shape, self._values(item)
                _read(checkpoint, item.name, _WEIGHT, full_shape, views)
        if optimizer is not None:
            groups = {p: group for group in optimizer.param_groups for p in group["params"]}
            for item in self._slices:
                state, group = optimizer.state[item.tensor], groups[item.tensor]
                self._load_state(checkpoint, state, group, item)

    def _weight_views(self, name: str) -> list[tuple[Box, Tensor]]:
        return self._layouts[name].views(self._tensors[name].detach())

    def _saved_views(self, name: str) -> list[tuple[Box, Tensor]]:
        """This rank's part of a weight that it saves."""
        if name not in self._cut:
            return self._weight_views(name)
        return [view for item in self._cut[name] for view in self._values(item)]

    def _values(self, item: UpdatedSlice) -> list[tuple[Box, Tensor]]:
        return self._views(item.tensor.detach(), item)

    def _views(self, value: Tensor, item: UpdatedSlice) -> list[tuple[Box, Tensor]]:
        """Disjoint views of a slice's optimizer state, with their boxes in the full tensor."""
        layout, shape = self._layouts[item.name], tuple(self._tensors[item.name].shape)
        if item.box is not None:
            return [(item.box, value)]
        if item.span is None:
            return layout.views(value)
        views: list[tuple[Box, Tensor]] = []
        start = 0
        for box in flat_to_boxes(shape, *item.span):
            stop = start + box.num_elements
            values = value.view(-1)[start:stop].view(box.sizes)
            found = layout.to_full(box)
            views += [(full, values[local.slices_in(box)]) for full, local in found]
            start = stop
        return views

    def _load_state(
        self,
        checkpoint: Checkpoint,
        state: dict[str, Any],
        group: Mapping[str, Any],
        item: UpdatedSlice,
    ) -> None:
        # Where torch keeps the count of steps, which all others have on the CPU.
        counts_on_device = group.get("fused") or group.get("capturable")
        name, full_shape = item.name, self._layouts[item.name].full_shape
        for kind in checkpoint.kinds(name):
            if not kind.startswith(OPTIMIZER_KIND):
                continue
            key = kind.removeprefix(OPTIMIZER_KIND)
            if checkpoint.full_shape(name, kind):
                value = torch.empty_like(item.tensor, requires_grad=False)
                _read(checkpoint, name, kind, full_shape, self._views(value, item))
            else:
                # A count of steps, or state of a scalar parameter.
                value = checkpoint.load_whole(name, kind)
            on_host = key == "step" and not counts_on_device
            state[key] = value if on_host else value.to(item.tensor.device)

    def specs(self) -> list[WeightSpec]:
        """See :class:`Weights`."""
        found: list[WeightSpec] = []
        for name in self._tensors:
            if name in self._written:
                views = self._saved_views(name)
                boxes, dtype = tuple(box for box, _ in views), views[0][1].dtype
                found.append((name, self._layouts[name].full_shape, dtype, boxes))
        return found

    def parts(self, name: str) -> list[Tensor]:
        """See :class:`Weights`."""
        return [part for _, part in self._saved_views(name)]


def write_final_weights(path: Path, holders: Sequence[Weights], transport: Transport) -> list[Path]:
    """Write all weights, unsharded, on rank 0, to which the others send their boxes in turn.

    Args:
        path: ``final.safetensors``.
        holders: of this rank's weights, each of other names.
        transport: of all ranks.

    Raises:
        UnfitEnvironmentError: disk full, or another failure of the file system.
    """
    catalogue = _Catalogue(holders, transport)
    order = [spec for file in weights_order(catalogue.specs) for spec in file]
    if transport.rank == 0:
        full = catalogue.receive(order)
        return write_weights(path, catalogue.specs, lambda name: next(full))
    catalogue.send(order)
    return []


def gather_weights(state: LocalState, transport: Transport) -> dict[str, Tensor]:
    """All weights on rank 0, on the CPU; empty on the others."""
    catalogue = _Catalogue([state], transport)
    if transport.rank == 0:
        full = catalogue.receive(catalogue.specs)
        return {spec.name: next(full) for spec in catalogue.specs}
    catalogue.send(catalogue.specs)
    return {}


class _Catalogue:
    """The ranks that hold boxes of every weight, and their way to rank 0; all ranks make it.

    Attributes:
        specs: every weight of any rank, in the order of names.
    """

    def __init__(self, holders: Sequence[Weights], transport: Transport) -> None:
        self._transport = transport
        self._own = {spec[0]: holder for holder in holders for spec in holder.specs()}
        own = [spec for holder in holders for spec in holder.specs()]
        self._holders: defaultdict[str, list[tuple[int, tuple[Box, ...]]]] = defaultdict(list)
        found: dict[str, TensorSpec] = {}
        for rank, specs in enumerate(transport.gather_objects(own, list[WeightSpec])):
            for name, shape, dtype, boxes in specs:
                self._holders[name].append((rank, boxes))
                found[name] = TensorSpec(name=name, shape=shape, dtype=dtype)
        self.specs = [found[name] for name in sorted(found, key=_natural)]

    def receive(self, order: Sequence[TensorSpec]) -> Iterator[Tensor]:
        """Rank 0: full tensors in order, each assembled from the ranks that hold it."""
        for spec in order:
            full = torch.empty(spec.shape, dtype=spec.dtype)
            for rank, boxes in self._holders[spec.name]:
                if rank == 0:
                    parts = self._own[spec.name].parts(spec.name)
                else:
                    parts = [self._receive(box, spec.dtype, rank) for box in boxes]
                for box, part in zip(boxes, parts, strict=True):
                    full[box.slices] = part.cpu()
            yield full

    def _receive(self, box: Box, dtype: torch.dtype, rank: int) -> Tensor:
        buffer = torch.empty(box.sizes, dtype=dtype)
        self._transport.receive_on_host(buffer, rank, 0).wait()
        return buffer

    def send(self, order: Sequence[TensorSpec]) -> None:
        """The other ranks: their boxes in order."""
        for spec in order:
            for rank, _ in self._holders[spec.name]:
                if rank == self._transport.rank:
                    for part in self._own[spec.name].parts(spec.name):
                        self._transport.send_on_host(part.cpu().contiguous(), 0, 0).wait()


def _natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Sort key that puts block 2 before block 10."""
    return tuple(
        (part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")
    )


def _writers(program: Program) -> dict[tuple[str, int], Ranks]:
    """(owner, block) and ("losses.name", 0) to the ranks that write it, one for each shard."""
    holders: defaultdict[tuple[str, int], list[Ranks]] = defaultdict(list)
    for stage in program.stages:
        for block in range(*stage.blocks):
            holders[stage.owner, block] += stage.ranks
    for loss in program.losses:
        holders[f"losses.{loss.name}", 0] += [(rank,) for rank in loss.ranks]
    return {key: writing_ranks(groups) for key, groups in holders.items()}


def _entry(
    name: str,
    kind: str,
    full_shape: tuple[int, ...],
    views: Sequence[tuple[Box, Tensor]],
    trained: bool = True,
) -> Entry:
    boxes = [(tuple(box.offsets), part.contiguous()) for box, part in views]
    return Entry(name=name, kind=kind, full_shape=full_shape, boxes=boxes, trained=trained)


def _read(
    checkpoint: Checkpoint,
    name: str,
    kind: str,
    full_shape: tuple[int, ...],
    views: Sequence[tuple[Box, Tensor]],
) -> None:
    """Fill views of a local tensor with its stored values."""
    for box, view in views:
        (stored,) = checkpoint.load(name, kind, [box], view.dtype, full_shape=full_shape)
        view.copy_(stored)
