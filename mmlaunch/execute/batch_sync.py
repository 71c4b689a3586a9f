"""Batch-sync: a loss over the samples of all modules and replicas (DistMM, section 5).

Each rank gives the feature rows that it holds, and one all-gather over the loss's ranks gives
all rows to each. A :class:`mmplan.schema.protocols.ShardedLoss` then works on its rank's own
rows and exchanges row statistics; any other loss is evaluated over the full features on every
rank, and each keeps the gradient of its own rows. Gradients of a loss's own parameters are
kept such that their sum over the ranks is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import cast

import torch
from torch import Tensor, nn

from mmlaunch.comm.batches import Tree, element_of, slice_samples
from mmlaunch.comm.messages import LeafSpec, Spec
from mmlaunch.comm.transport import CommGroup, Transport, Work
from mmlaunch.execute.reductions import FieldOf
from mmlaunch.model.local_model import LocalModel
from mmlaunch.model.precision import widened
from mmlaunch.model.seeds import Seeds
from mmplan.errors import RunFailedError
from mmplan.program.model import CrossSampleLoss, Program, Stage
from mmplan.program.samples import SampleRange, intersect
from mmplan.schema.protocols import ShardedLoss, as_sharded


@dataclass(frozen=True, slots=True)
class _HeldRows:
    """Rows ``[start, stop)`` of an input that a rank holds: part of a micro-batch."""

    input: int
    stage: int
    mb: int
    start: int
    stop: int


class BatchSync:
    """Collects features, computes cross-sample losses, keeps their gradients.

    Args:
        program: the whole program.
        model: has the losses.
        transport: gathers.
        specs: output spec of every stage.
        seeds: for losses that draw random numbers.
        field_of: gives a loss its data fields.
    """

    def __init__(
        self,
        program: Program,
        model: LocalModel,
        transport: Transport,
        specs: Sequence[Spec],
        seeds: Seeds,
        field_of: FieldOf,
    ) -> None:
        self._program, self._model, self._transport = program, model, transport
        self._specs, self._seeds, self._field_of = specs, seeds, field_of
        # The same in every step.
        self._layouts: dict[tuple[int, int], dict[int, list[_HeldRows]]] = {}
        self._positions: dict[tuple[int, int], dict[int, Tensor]] = {}

    def begin(self, step: int) -> None:
        """Forget the last step."""
        self._step = step
        self.loss = torch.zeros((), dtype=torch.float64, device=self._transport.device)
        self._features: dict[tuple[int, int], Tree] = {}
        self._pending: dict[tuple[int, int], tuple[Work, list[Tensor]]] = {}
        self._gradients: defaultdict[tuple[int, int], list[tuple[int | None, int, int, Tensor]]]
        self._gradients = defaultdict(list)
        self._uses: defaultdict[tuple[int, int], int] = defaultdict(int)

    def keep(self, stage: Stage, mb: int, output: Tree) -> None:
        """Remember a micro-batch's output until its syncs are over."""
        if not stage.syncs:
            return
        span = stage.microbatches[stage.place(self._transport.rank)[0]][mb]
        for index in stage.syncs:
            self._uses[stage.index, mb] += len(self._program.cross_sample(index).batches_of(span))
        self._features[stage.index, mb] = output

    def gradients(self, stage: Stage, mb: int) -> list[tuple[int | None, int, int, Tensor]]:
        """(element, first sample, end, gradient) of a micro-batch's outputs; given once."""
        return self._gradients.pop((stage.index, mb), [])

    def start(self, index: int, batch: int) -> None:
        """Begin to gather the features of one sync batch."""
        loss = self._program.cross_sample(index)
        specs = self._specs_of(loss)
        mine = self._layout(loss, batch)[self._transport.rank]
        own = [self._feature(loss, batch, rows).detach() for rows in mine]
        size = self._longest(loss, batch, {i: prod(spec.tail) for i, spec in specs.items()})
        dtype = reduce(torch.promote_types, (spec.dtype for spec in specs.values()))
        group = loss.ranks, loss.channel
        self._pending[index, batch] = self._gather(own, size, dtype, group)

    def wait(self, index: int, batch: int) -> None:
        """Finish the gather, compute the loss and the gradients of this rank's features."""
        loss = self._program.cross_sample(index)
        full = self._unpack(loss, batch, *self._pending.pop((index, batch)))
        scale = float(loss.weight / loss.divisor)
        self._seeds.enter(self._step, f"losses.{loss.name}", 0, loss.samples(batch)[0])
        only_features = all(item.stage is not None for item in loss.inputs)
        sharded = as_sharded(self._model.losses[loss.name]) if only_features else None
        if sharded is not None:
            grads = self._sharded(loss, batch, sharded, full, scale)
        else:
            grads = self._full(loss, batch, full, scale)
        self._dispatch(loss, batch, grads)

    def _full(
        self,
        loss: CrossSampleLoss,
        batch: int,
        full: Mapping[int, Tensor],
        scale: float,
    ) -> dict[int, Tensor]:
        """Loss over all features on every rank; only the first one's parameters count."""
        module = self._model.losses[loss.name]
        leaves = {
            i: tensor.requires_grad_(self._wants_gradient(loss, i) and tensor.is_floating_point())
            for i, tensor in full.items()
        }
        arguments = [
            leaves.get(i)
            if item.field is None
            else self._field_of(loss.task, item.field, *loss.samples(batch))
            for i, item in enumerate(loss.inputs)
        ]
        value = module(*arguments) * scale
        first = self._transport.rank == loss.ranks[0]
        wanted = [i for i, tensor in leaves.items() if tensor.requires_grad]
        parameters = [p for p in module.parameters() if p.requires_grad] if first else []
        if first:
            self.loss += value.detach()
        if not value.requires_grad or not (wanted or parameters):
            return {}
        grads = torch.autograd.grad(
            value, [*(leaves[i] for i in wanted), *parameters], allow_unused=True
        )
        for parameter, grad in zip(parameters, grads[len(wanted) :], strict=True):
            _accumulate(parameter, grad)
        # A feature that the loss leaves out has no gradient, and so has the module behind it.
        return {i: grad for i, grad in zip(wanted, grads, strict=False) if grad is not None}

    def _sharded(
        self,
        loss: CrossSampleLoss,
        batch: int,
        module: ShardedLoss,
        full: Mapping[int, Tensor],
        scale: float,
    ) -> dict[int, Tensor]:
        """Own rows against all others; partial losses and parameter gradients add up."""
        positions = self._own_positions(loss, batch)
        own = {i: full[i][rows] for i, rows in positions.items()}
        before = {p: p.grad for p in cast(nn.Module, module).parameters()}
        for parameter in before:
            parameter.grad = None
        part, own_grads = module.sharded(
            own,
            positions,
            [full[i] for i in range(len(loss.inputs))],
            lambda stats: self._exchange(loss, batch, stats),
        )
        for parameter, grad in before.items():
            added = None if parameter.grad is None else parameter.grad * scale
            parameter.grad = grad
            _accumulate(parameter, added)
        self.loss += part.detach() * scale
        return self._share_in_tp_groups(loss, full, positions, own_grads, scale)

    def _own_positions(self, loss: CrossSampleLoss, batch: int) -> dict[int, Tensor]:
        """Rows that this rank answers for, by input; none of a tensor-parallel sibling's."""
        if (loss.index, batch) in self._positions:
            return self._positions[loss.index, batch]
        mine = self._layout(loss, batch)[self._transport.rank]
        positions = self._positions[loss.index, batch] = dict[int, Tensor]()
        for i, item in enumerate(loss.inputs):
            stage = self._program.stages[item.stage or 0]
            if stage.find_place(self._transport.rank) is not None:
                device = self._transport.device
                spans = [(r.start, r.stop) for r in mine if r.input == i] or [(0, 0)]
                parts = [torch.arange(*span, device=device) for span in spans]
                positions[i] = torch.cat(parts)
        return positions

    def _share_in_tp_groups(
        self,
        loss: CrossSampleLoss,
        full: Mapping[int, Tensor],
        positions: Mapping[int, Tensor],
        own_grads: Mapping[int, Tensor],
        scale: float,
    ) -> dict[int, Tensor]:
        """Only the first rank of a tensor-parallel group computes; the others get its result."""
        grads: dict[int, Tensor] = {}
        for i, item in enumerate(loss.inputs):
            stage = self._program.stages[item.stage or 0]
            place = stage.find_place(self._transport.rank)
            if place is None or not self._wants_gradient(loss, i):
                continue
            grad = torch.zeros_like(full[i])
            if i in positions:
                grad[positions[i]] = own_grads[i].to(grad.dtype) * scale
            group = stage.ranks[place[0]]
            if len(group) > 1:
                self._transport.all_reduce(grad, tuple(sorted(group)))
            grads[i] = grad
        return grads

    def _dispatch(self, loss: CrossSampleLoss, batch: int, grads: Mapping[int, Tensor]) -> None:
        """Cut the gradients of full inputs back into this rank's micro-batches."""
        first = loss.samples(batch)[0]
        for i, full in grads.items():
            stage = self._program.stages[loss.inputs[i].stage or 0]
            place = stage.find_place(self._transport.rank)
            for rows in _rows_of(stage, place[0], loss.samples(batch), i) if place else ():
                low, high = first + rows.start, first + rows.stop
                cut = loss.inputs[i].element, low, high, full[rows.start : rows.stop]
                self._gradients[stage.index, rows.mb].append(cut)
        self._release(loss, batch)

    def _release(self, loss: CrossSampleLoss, batch: int) -> None:
        for stage in self._program.stages:
            place = stage.find_place(self._transport.rank)
            if loss.index not in stage.syncs or place is None:
                continue
            for rows in _rows_of(stage, place[0], loss.samples(batch), 0):
                key = stage.index, rows.mb
                self._uses[key] -= 1
                if not self._uses[key]:
                    del self._features[key], self._uses[key]

    def _wants_gradient(self, loss: CrossSampleLoss, index: int) -> bool:
        stage = loss.inputs[index].stage
        return stage is not None and self._program.stages[stage].has_backward

    def _layout(self, loss: CrossSampleLoss, batch: int) -> dict[int, list[_HeldRows]]:
        """The rows that each rank contributes; of a tensor-parallel group, the first rank does."""
        key = loss.index, batch
        if key not in self._layouts:
            layout: dict[int, list[_HeldRows]] = {rank: [] for rank in loss.ranks}
            for i, item in enumerate(loss.inputs):
                if item.stage is None:
                    continue
                stage = self._program.stages[item.stage]
                for d, group in enumerate(stage.ranks):
                    layout[group[0]] += _rows_of(stage, d, loss.samples(batch), i)
            self._layouts[key] = layout
        return self._layouts[key]

    def _feature(self, loss: CrossSampleLoss, batch: int, rows: _HeldRows) -> Tensor:
        item = loss.inputs[rows.input]
        stage = self._program.stages[rows.stage]
        d, _ = stage.place(self._transport.rank)
        first = loss.samples(batch)[0] - stage.microbatches[d][rows.mb][0]
        tree = element_of(self._features[rows.stage, rows.mb], item.element, stage.module)
        return cast(Tensor, slice_samples(tree, first + rows.start, first + rows.stop))

    def _specs_of(self, loss: CrossSampleLoss) -> dict[int, LeafSpec]:
        """Specs of the features that a loss takes, by input; each must be one tensor."""
        found: dict[int, LeafSpec] = {}
        for i, item in enumerate(loss.inputs):
            if item.stage is None:
                continue
            stage = self._program.stages[item.stage]
            spec = element_of(self._specs[stage.index], item.element, stage.module)
            if not isinstance(spec, LeafSpec) or spec.ragged:
                raise RunFailedError(
                    f"losses.{loss.name} takes {stage.module}, which does not return one tensor",
                    hint="name one element of its output in inputs",
                )
            found[i] = spec
        return found

    def _gather(
        self, tensors: Iterable[Tensor], size: int, dtype: torch.dtype, group: CommGroup
    ) -> tuple[Work, list[Tensor]]:
        """All that each rank of a group contributes in one gather, padded to the longest."""
        flat = torch.zeros(size, dtype=dtype, device=self._transport.device)
        position = 0
        for tensor in tensors:
            flat[position : position + tensor.numel()] = tensor.reshape(-1)
            position += tensor.numel()
        return self._transport.all_gather(flat, *group)

    def _longest(self, loss: CrossSampleLoss, batch: int, widths: Mapping[int, int]) -> int:
        """Numbers of the rank that contributes most; ``widths`` are those of an input's row."""
        return max(
            sum((r.stop - r.start) * widths[r.input] for r in rows)
            for rows in self._layout(loss, batch).values()
        )

    def _unpack(
        self, loss: CrossSampleLoss, batch: int, work: Work, gathered: Sequence[Tensor]
    ) -> dict[int, Tensor]:
        """Full features by input, ``[sync_batch, ...]`` in sample order, at least float32."""
        work.wait()
        samples, device = loss.sync_batch, self._transport.device
        full = {
            i: torch.empty((samples, *spec.tail), dtype=spec.dtype, device=device)
            for i, spec in self._specs_of(loss).items()
        }
        self._scatter(loss, batch, gathered, full)
        return {i: widened(tensor) for i, tensor in full.items()}

    def _scatter(
        self,
        loss: CrossSampleLoss,
        batch: int,
        gathered: Sequence[Tensor],
        full: Mapping[int, Tensor],
    ) -> None:
        """Put the gathered rows of every rank into full tensors by input."""
        for rank, flat in zip(loss.ranks, gathered, strict=True):
            position = 0
            for rows in self._layout(loss, batch)[rank]:
                target = full[rows.input][rows.start : rows.stop]
                target.copy_(flat[position : position + target.numel()].view(target.shape))
                position += target.numel()

    def _exchange(
        self, loss: CrossSampleLoss, batch: int, stats: Mapping[int, Tensor]
    ) -> list[Tensor]:
        """Per-row statistics of own rows to those of all rows, for every input."""
        sample = next(iter(stats.values()))
        tail = sample.shape[1:]
        inputs = range(len(loss.inputs))
        longest = self._longest(loss, batch, dict.fromkeys(inputs, tail.numel()))
        own = [stats[i] for i in sorted(stats)]
        work, gathered = self._gather(own, longest, sample.dtype, (loss.ranks, 0))
        work.wait()
        full = {i: sample.new_empty((loss.sync_batch, *tail)) for i in inputs}
        self._scatter(loss, batch, gathered, full)
        return list(full.values())


def _rows_of(stage: Stage, d: int, samples: SampleRange, index: int) -> list[_HeldRows]:
    """Rows of a sync batch that a replica's micro-batches hold, in order."""
    found: list[_HeldRows] = []
    for mb, span in enumerate(stage.microbatches[d]):
        shared = intersect(span, samples)
        if shared is not None:
            low, high = shared[0] - samples[0], shared[1] - samples[0]
            found.append(_HeldRows(index, stage.index, mb, low, high))
    return found


def _accumulate(parameter: nn.Parameter, grad: Tensor | None) -> None:
    if grad is not None:
        parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad
