"""Parameters and optimizer state of one rank, as parts of full tensors."""

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
from mmlaunch.model.local_model import LocalModel
from mmlaunch.model.shard_layout import whole_place
from mmplan.program.model import Program
from mmplan.program.shards import held_shards, is_crowded

_WEIGHT = "param"
WeightSpec = tuple[str, tuple[int, ...], DType, tuple[Box, ...]]
# Before the name of what an optimizer keeps, in a checkpoint's kinds.
OPTIMIZER_KIND = "optim."


class Weights(Protocol):
    """One rank's part of weights that are written together."""

    def specs(self) -> list[WeightSpec]:
        """Name, full shape, type and boxes of what this rank writes, in a fixed order."""
        ...

    def parts(self, name: str) -> list[Tensor]:
        """One of them, cut into its boxes."""
        ...


class LocalState:
    """Saves, loads and gathers what a rank holds, under any later layout.

    Args:
        program: says who else holds a block.
        model: this rank's parameters.
        rank: this rank.
    """

    def __init__(self, program: Program, model: LocalModel, rank: int) -> None:
        self._model = model
        self._tensors: dict[str, Tensor] = dict(model.named_parameters())
        self._tensors.update(model.named_buffers())
        self._places = {
            name: model.places.get(name) or whole_place(tuple(tensor.shape))
            for name, tensor in self._tensors.items()
        }
        writers = _writers(program)
        self._written = {name for name in self._tensors if self._is_writer(name, writers, rank)}

    def _is_writer(
        self, name: str, writers: Mapping[tuple[str, int], tuple[int, ...]], rank: int
    ) -> bool:
        first, second = name.split(".")[:2]
        loss = first == "losses"
        ranks = writers.get((f"losses.{second}", 0) if loss else (first, int(second)), ())
        # Whole on every rank of a group: the first one writes it. A tied parameter may be saved
        # under the name of a block on other ranks, which write it.
        return rank in (ranks if name in self._model.places else ranks[:1])

    def writes(self, name: str) -> bool:
        """Whether this rank is the one of all replicas that saves a tensor."""
        return name in self._written

    def entries(
        self, optimizer: torch.optim.Optimizer | None, parts: Sequence[UpdatedSlice]
    ) -> list[Entry]:
        """What this rank writes into a checkpoint: of replicas, one writes.

        Args:
            optimizer: this rank's.
            parts: what it updates.
        """
        found: list[Entry] = []
        trained = {part.name for part in parts}
        for name, place in self._places.items():
            if name in self._written:
                views = self._weight_views(name)
                found.append(_entry(name, _WEIGHT, place.full_shape, views, name in trained))
        state = {} if optimizer is None else optimizer.state
        for part in parts:
            if part.counts:
                found += self._state_entries(state.get(part.tensor, {}), part)
        return found

    def _state_entries(self, state: Mapping[str, Any], part: UpdatedSlice) -> Iterator[Entry]:
        place = self._places[part.name]
        for key, value in state.items():
            kind = OPTIMIZER_KIND + key
            if isinstance(value, Tensor) and value.dim() and value.shape == part.tensor.shape:
                yield _entry(part.name, kind, place.full_shape, self._views(value, part))
            elif value is not None:
                yield _entry(part.name, kind, (), [(whole(()), torch.as_tensor(value))])

    def load(
        self,
        checkpoint: Checkpoint,
        optimizer: torch.optim.Optimizer | None,
        parts: Sequence[UpdatedSlice],
    ) -> None:
        """Fill parameters and optimizer state from a checkpoint of any plan.

        Raises:
            InvalidInputError: a parameter is missing or has another shape.
        """
        for name, place in self._places.items():
            _read(checkpoint, name, _WEIGHT, place.full_shape, self._weight_views(name))
        if optimizer is not None:
            for part in parts:
                self._load_state(checkpoint, optimizer.state[part.tensor], part)

    def _weight_views(self, name: str) -> list[tuple[Box, Tensor]]:
        tensor, place = self._tensors[name].detach(), self._places[name]
        pairs = zip(place.boxes, place.locals, strict=True)
        return [(box, tensor[local.slices]) for box, local in pairs]

    def _views(self, value: Tensor, part: UpdatedSlice) -> list[tuple[Box, Tensor]]:
        """Disjoint views of what an optimizer keeps of a part, with their full boxes."""
        place, shape = self._places[part.name], tuple(self._tensors[part.name].shape)
        if part.box is not None:
            return [(part.box, value)]
        if part.span is None:
            pairs = zip(place.boxes, place.locals, strict=True)
            return [(box, value[local.slices]) for box, local in pairs]
        views: list[tuple[Box, Tensor]] = []
        start = 0
        for piece in flat_to_boxes(shape, *part.span):
            stop = start + piece.num_elements
            values = value.view(-1)[start:stop].view(piece.sizes)
            found = place.to_full(piece)
            views += [(full, values[local.slices_in(piece)]) for full, local in found]
            start = stop
        return views

    def _load_state(
        self, checkpoint: Checkpoint, state: dict[str, Any], part: UpdatedSlice
    ) -> None:
        name, place = part.name, self._places[part.name]
        for kind in checkpoint.kinds(name):
            if not kind.startswith(OPTIMIZER_KIND):
                continue
            key = kind.removeprefix(OPTIMIZER_KIND)
            if checkpoint.full_shape(name, kind):
                value = torch.empty_like(part.tensor, requires_grad=False)
                _read(checkpoint, name, kind, place.full_shape, self._views(value, part))
            else:
                # A step count, which torch keeps on the CPU, or of a parameter that is a scalar.
                value = checkpoint.load_whole(name, kind)
            state[key] = value if key == "step" else value.to(part.tensor.device)

    def specs(self) -> list[WeightSpec]:
        """Name, full shape, type and boxes of what this rank writes, in a fixed order."""
        return [
            (name, self._places[name].full_shape, tensor.dtype, self._places[name].boxes)
            for name, tensor in self._tensors.items()
            if name in self._written
        ]

    def parts(self, name: str) -> list[Tensor]:
        """The local tensor cut into its boxes."""
        return [part for _, part in self._weight_views(name)]


def write_final_weights(path: Path, state: Weights, transport: Transport) -> list[Path]:
    """Rank 0 writes all weights, unsharded; the others send it their parts in turn.

    Raises:
        UnfitEnvironmentError: disk full, or another failure of the file system.
    """
    catalogue = _Catalogue(transport.gather_objects(state.specs(), list[WeightSpec]))
    order = [spec for file in weights_order(catalogue.specs) for spec in file]
    if transport.rank == 0:
        feed = _feed(order, catalogue, state, transport)
        return write_weights(path, catalogue.specs, lambda name: next(feed))
    for spec in order:
        _send_parts(spec.name, catalogue, state, transport)
    return []


def gather_weights(state: LocalState, transport: Transport) -> dict[str, Tensor]:
    """All weights on rank 0, on the CPU; empty on the others."""
    catalogue = _Catalogue(transport.gather_objects(state.specs(), list[WeightSpec]))
    if transport.rank == 0:
        feed = _feed(catalogue.specs, catalogue, state, transport)
        return {spec.name: next(feed) for spec in catalogue.specs}
    for spec in catalogue.specs:
        _send_parts(spec.name, catalogue, state, transport)
    return {}


class _Catalogue:
    """Which rank has which boxes of every weight."""

    def __init__(self, by_rank: Sequence[Any]) -> None:
        self.holders: defaultdict[str, list[tuple[int, tuple[Box, ...]]]] = defaultdict(list)
        found: dict[str, TensorSpec] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for rank, specs in enumerate(by_rank):
            for name, shape, dtype, boxes in specs:
                self.holders[name].append((rank, boxes))
                self.dtypes[name] = dtype
                found[name] = TensorSpec(name=name, shape=shape, dtype=dtype)
        self.specs = [found[name] for name in sorted(found, key=_natural)]


def _natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Sort key that puts block 2 before block 10."""
    return tuple(
        (part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")
    )


def _feed(
    order: Sequence[TensorSpec], catalogue: _Catalogue, state: Weights, transport: Transport
) -> Iterator[Tensor]:
    """Full tensors in order, each assembled from the ranks that hold it."""
    for spec in order:
        stored: list[tuple[Box, Tensor]] = []
        for rank, boxes in catalogue.holders[spec.name]:
            if rank == 0:
                parts = state.parts(spec.name)
            else:
                parts = [_receive(box, spec.name, rank, catalogue, transport) for box in boxes]
            stored += zip(boxes, (part.cpu() for part in parts), strict=True)
        full = torch.empty(spec.shape, dtype=catalogue.dtypes[spec.name])
        for box, part in stored:
            full[box.slices] = part
        yield full


def _receive(box: Box, name: str, rank: int, catalogue: _Catalogue, transport: Transport) -> Tensor:
    buffer = torch.empty(box.sizes, dtype=catalogue.dtypes[name], device=transport.device)
    transport.irecv(buffer, rank, 0, backward=False).wait()
    return buffer


def _send_parts(name: str, catalogue: _Catalogue, state: Weights, transport: Transport) -> None:
    for rank, _ in catalogue.holders[name]:
        if rank == transport.rank:
            for part in state.parts(name):
                transport.isend(part.contiguous(), 0, 0, backward=False).wait()


def _writers(program: Program) -> dict[tuple[str, int], tuple[int, ...]]:
    """(owner, block) and ("losses.name", 0) to the ranks that write it, one for each shard.

    Of equal shards the lowest rank's is written; where a block has several tp degrees, those
    of the degree under which the lowest rank of all holds it. A rank that runs a block as two
    shards has all of it, and writes it.
    """
    holders: defaultdict[tuple[str, int], list[tuple[int, ...]]] = defaultdict(list)
    for stage in program.stages:
        for block in range(*stage.blocks):
            holders[stage.owner, block] += stage.ranks
    for loss in program.losses:
        holders[f"losses.{loss.name}", 0] += [(rank,) for rank in loss.ranks]
    writers: dict[tuple[str, int], tuple[int, ...]] = {}
    for key, groups in holders.items():
        held = held_shards(groups)
        if is_crowded(groups):
            writers[key] = (min(rank for rank, shard in held.items() if shard == (0, 1)),)
            continue
        degree = len(min(groups, key=min))
        same = [group for group in groups if len(group) == degree]
        writers[key] = tuple(min(ranks) for ranks in zip(*same, strict=True))
    return writers


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
    """Fill views of a local tensor with what is stored of it."""
    for box, view in views:
        (stored,) = checkpoint.load(name, kind, [box], view.dtype, full_shape=full_shape)
        view.copy_(stored)
