"""Parameters and optimizer state of one rank, as parts of full tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmlaunch.boxes import Box, flat_to_boxes, intersect, shard_boxes, whole
from mmlaunch.checkpoint import Entry
from mmlaunch.model import LocalModel
from mmlaunch.restore import Checkpoint
from mmlaunch.tensorfile import TensorSpec
from mmlaunch.tp import ParameterShard
from mmlaunch.transport import Transport
from mmlaunch.weights import weights_order, write_weights
from mmlaunch.zero import Part
from mmplan.program.model import Program

_WEIGHT = "param"
# Before the name of what an optimizer keeps, in a checkpoint's kinds.
OPTIMIZER_KIND = "optim."
_NOBODY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a local tensor lies in the full one.

    Attributes:
        boxes: its parts; concatenated along ``dim`` they are the local tensor.
        writes: whether this rank is the replica that saves it.
    """

    full_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    dim: int
    writes: bool


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
        writers = _writers(program)
        self._places: dict[str, _Place] = {}
        for name, tensor in self._tensors.items():
            index, count, writer = _holder(name, program, rank, writers)
            shard = self._shard_of(name)
            self._places[name] = _place(tensor, shard, index, count, writes=writer == rank)

    def _shard_of(self, name: str) -> ParameterShard | None:
        return self._model.shards.get(name)

    def writes(self, name: str) -> bool:
        """Whether this rank is the one of all replicas that saves a tensor."""
        return self._places[name].writes

    def entries(
        self, optimizer: torch.optim.Optimizer | None, parts: Sequence[Part]
    ) -> list[Entry]:
        """What this rank writes into a checkpoint: of replicas, one writes.

        Args:
            optimizer: this rank's.
            parts: what it updates.
        """
        found: list[Entry] = []
        for name, place in self._places.items():
            if place.writes:
                found.append(_entry(name, _WEIGHT, place.full_shape, self._weight_views(name)))
        state = {} if optimizer is None else optimizer.state
        for part in parts:
            if part.counts:
                found += self._state_entries(state.get(part.tensor, {}), part)
        return found

    def _state_entries(self, state: Mapping[str, Any], part: Part) -> Iterator[Entry]:
        shape, place = tuple(self._tensors[part.name].shape), self._places[part.name]
        for key, value in state.items():
            kind = OPTIMIZER_KIND + key
            if isinstance(value, Tensor) and value.dim() and value.shape == part.tensor.shape:
                views = _views(value, shape, place, part.span)
                yield _entry(part.name, kind, place.full_shape, views)
            elif value is not None:
                yield _entry(part.name, kind, (), [(whole(()), torch.as_tensor(value))])

    def load(
        self,
        checkpoint: Checkpoint,
        optimizer: torch.optim.Optimizer | None,
        parts: Sequence[Part],
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
        tensor = self._tensors[name].detach()
        return _views(tensor, tuple(tensor.shape), self._places[name])

    def _load_state(self, checkpoint: Checkpoint, state: dict[str, Any], part: Part) -> None:
        name, place = part.name, self._places[part.name]
        shape = tuple(self._tensors[name].shape)
        for kind in checkpoint.kinds(name):
            if not kind.startswith(OPTIMIZER_KIND):
                continue
            key = kind.removeprefix(OPTIMIZER_KIND)
            if checkpoint.full_shape(name, kind):
                value = torch.empty_like(part.tensor, requires_grad=False)
                views = _views(value, shape, place, part.span)
                _read(checkpoint, name, kind, place.full_shape, views)
            else:
                # A step count, which torch keeps on the CPU, or of a parameter that is a scalar.
                value = checkpoint.load_whole(name, kind)
            state[key] = value if key == "step" else value.to(part.tensor.device)

    def specs(self) -> list[tuple[str, tuple[int, ...], torch.dtype, tuple[Box, ...]]]:
        """Name, full shape, type and boxes of what this rank writes, in a fixed order."""
        return [
            (name, self._places[name].full_shape, tensor.dtype, self._places[name].boxes)
            for name, tensor in self._tensors.items()
            if self._places[name].writes
        ]

    def parts(self, name: str) -> list[Tensor]:
        """The local tensor cut into its boxes."""
        return [part for _, part in self._weight_views(name)]


def write_final_weights(path: Path, state: LocalState, transport: Transport) -> list[Path]:
    """Rank 0 writes all weights, unsharded; the others send it their parts in turn.

    Raises:
        UnfitEnvironmentError: disk full, or another failure of the file system.
    """
    catalogue = _Catalogue(transport.gather_objects(state.specs()))
    order = [spec for file in weights_order(catalogue.specs) for spec in file]
    if transport.rank == 0:
        feed = _feed(order, catalogue, state, transport)
        return write_weights(path, catalogue.specs, lambda name: next(feed))
    for spec in order:
        _send_parts(spec.name, catalogue, state, transport)
    return []


def gather_weights(state: LocalState, transport: Transport) -> dict[str, Tensor]:
    """All weights on rank 0, on the CPU; empty on the others."""
    catalogue = _Catalogue(transport.gather_objects(state.specs()))
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
    order: Sequence[TensorSpec], catalogue: _Catalogue, state: LocalState, transport: Transport
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


def _send_parts(name: str, catalogue: _Catalogue, state: LocalState, transport: Transport) -> None:
    for rank, _ in catalogue.holders[name]:
        if rank == transport.rank:
            for part in state.parts(name):
                transport.isend(part.contiguous(), 0, 0, backward=False).wait()


def _writers(program: Program) -> dict[tuple[str, int, int], int]:
    """(owner, block, tp index) and ("losses.name", 0, 0) to the lowest rank that holds it."""
    writers: dict[tuple[str, int, int], int] = {}
    for stage in program.stages:
        for group in stage.ranks:
            for t, rank in enumerate(group):
                for block in range(*stage.blocks):
                    key = stage.owner, block, t
                    writers[key] = min(writers.get(key, rank), rank)
    for loss in program.losses:
        key = f"losses.{loss.name}", 0, 0
        writers[key] = min(writers.get(key, loss.ranks[0]), *loss.ranks)
    return writers


def _holder(
    name: str, program: Program, rank: int, writers: Mapping[tuple[str, int, int], int]
) -> tuple[int, int, int]:
    """(tp index, tp degree, writing rank) of a tensor on this rank."""
    first, second = name.split(".")[:2]
    if first == "losses":
        return 0, 1, writers[f"losses.{second}", 0, 0]
    block = int(second)
    for stage in program.stages_of(rank):
        place = stage.place(rank)
        if (
            place is not None
            and stage.owner == first
            and stage.blocks[0] <= block < stage.blocks[1]
        ):
            return place[1], stage.tp, writers[first, block, place[1]]
    # A tied parameter saved under the name of a block on another rank, which writes it.
    return 0, 1, _NOBODY


def _place(
    tensor: Tensor, shard: ParameterShard | None, index: int, count: int, *, writes: bool
) -> _Place:
    if shard is None:
        shape = tuple(tensor.shape)
        # Whole on every rank of the group: the first one writes it.
        return _Place(full_shape=shape, boxes=(whole(shape),), dim=0, writes=writes and index == 0)
    boxes = shard_boxes(shard.full_shape, shard.style, index, count, shard.parts)
    dim = 1 if shard.style == "rowwise" else 0
    return _Place(full_shape=shard.full_shape, boxes=tuple(boxes), dim=dim, writes=writes)


def _views(
    tensor: Tensor, shape: tuple[int, ...], place: _Place, span: tuple[int, int] | None = None
) -> list[tuple[Box, Tensor]]:
    """Disjoint views of a local tensor, or of a flat slice of one, with their full boxes.

    Args:
        tensor: of the local shape, or as long as the slice.
        shape: the local shape.
        place: where the local tensor lies in the full one.
        span: the slice's first and end element in the flattened local tensor.
    """
    locals_ = _local_boxes(place)
    if span is None:
        return [
            (box, tensor[local.slices]) for box, local in zip(place.boxes, locals_, strict=True)
        ]
    views: list[tuple[Box, Tensor]] = []
    start = 0
    for piece in flat_to_boxes(shape, *span):
        part = tensor.view(-1)[start : start + piece.num_elements].view(piece.sizes)
        start += piece.num_elements
        for box, local in zip(place.boxes, locals_, strict=True):
            common = intersect(piece, local)
            if common is not None:
                moved = zip(box.offsets, common.offsets, local.offsets, strict=True)
                target = Box(offsets=tuple(b + c - o for b, c, o in moved), sizes=common.sizes)
                views.append((target, part[common.slices_in(piece)]))
    return views


def _local_boxes(place: _Place) -> list[Box]:
    """Where the parts of a full tensor lie in the local one, in the order of the parts."""
    found: list[Box] = []
    start = 0
    for box in place.boxes:
        offsets = tuple(start if d == place.dim else 0 for d in range(len(box.sizes)))
        found.append(Box(offsets=offsets, sizes=box.sizes))
        start += box.sizes[place.dim] if box.sizes else 0
    return found


def _entry(
    name: str, kind: str, full_shape: tuple[int, ...], views: Sequence[tuple[Box, Tensor]]
) -> Entry:
    boxes = [(tuple(box.offsets), part.contiguous()) for box, part in views]
    return Entry(name=name, kind=kind, full_shape=full_shape, boxes=boxes)


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
