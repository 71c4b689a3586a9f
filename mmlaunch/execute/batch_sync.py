"""Batch-sync: a loss over the samples of all modules and replicas (DistMM, section 5).

Each rank gives the feature rows that it holds and receives those that it reads
(:mod:`mmplan.program.features`). A :class:`mmplan.schema.protocols.ShardedLoss` then works on its
rank's own rows and exchanges row statistics; any other loss is evaluated over the full features on
every rank, and each keeps the gradient of its own rows. Gradients of a loss's own parameters are
kept such that their sum over the ranks is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from mmlaunch.comm.batches import Tree, element_of, slice_samples
from mmlaunch.comm.messages import LeafSpec, Spec
from mmlaunch.comm.transport import Transport
from mmlaunch.execute.gathered_rows import Finish, GatheredRows, rows_of
from mmlaunch.execute.reductions import FieldOf
from mmlaunch.model.local_model import LocalModel
from mmlaunch.model.precision import TrainingPrecision, widened
from mmlaunch.model.seeds import Seeds
from mmplan.errors import RunFailedError
from mmplan.program.model import CrossSampleLoss, MicroBatch, Program, Stage
from mmplan.schema.protocols import ShardedLoss, as_sharded, others_only


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """Samples [start, stop) of one of this rank's micro-batches, which a loss's input takes.

    Attributes:
        first: position in the sync batch of the first of them.
        element: of the micro-batch's output.
    """

    key: MicroBatch
    start: int
    stop: int
    first: int
    element: int | None
    module: str


class BatchSync:
    """Collects features, computes cross-sample losses, keeps their gradients.

    Args:
        program: the whole program.
        model: has the losses.
        transport: gathers.
        specs: output spec of every stage.
        seeds: for losses that draw random numbers.
        precision: has the scale of gradients.
        field_of: gives a loss its data fields.
    """

    def __init__(
        self,
        program: Program,
        model: LocalModel,
        transport: Transport,
        specs: Sequence[Spec],
        seeds: Seeds,
        precision: TrainingPrecision,
        field_of: FieldOf,
    ) -> None:
        self._program, self._model, self._transport = program, model, transport
        self._specs, self._seeds, self._field_of = specs, seeds, field_of
        self._precision = precision
        # The same in every step.
        self._rows: dict[tuple[int, int], GatheredRows] = {}
        self._given: dict[tuple[int, int], dict[int, list[_Given]]] = {}
        self._num_uses: dict[MicroBatch, int] = {}
        self._positions: dict[tuple[int, int], dict[int, Tensor]] = {}

    def begin(self, step: int) -> None:
        """Forget the last step."""
        self._step = step
        self.terms = no_terms(self._program, self._transport.device)
        self._features: dict[MicroBatch, Tree] = {}
        self._pending: dict[tuple[int, int], Finish] = {}
        self._gradients: defaultdict[MicroBatch, list[tuple[int | None, int, int, Tensor]]]
        self._gradients = defaultdict(list)
        self._uses: dict[MicroBatch, int] = {}

    def keep(self, stage: Stage, key: MicroBatch, output: Tree) -> None:
        """Remember a micro-batch's output until its syncs are over."""
        if not stage.syncs:
            return
        number = self._num_uses.get(key)
        if number is None:
            span = stage.microbatches[stage.place(self._transport.rank)[0]][key[1]]
            losses = map(self._program.cross_sample, stage.syncs)
            number = self._num_uses[key] = sum(len(loss.batches_of(span)) for loss in losses)
        self._uses[key] = number
        self._features[key] = output

    def gradients(self, key: MicroBatch) -> Sequence[tuple[int | None, int, int, Tensor]]:
        """(element, first sample, end, gradient) of a micro-batch's outputs; given once."""
        return self._gradients.pop(key, ())

    def start(self, index: int, batch: int) -> None:
        """Begin to gather the features of one sync batch."""
        loss = self._program.cross_sample(index)
        rows = {i: (spec.tail, spec.dtype) for i, spec in self._specs_of(loss).items()}
        own = self._own(loss, batch)
        self._pending[index, batch] = self._gathered(loss, batch).gather(own, rows, loss.channel)

    def wait(self, index: int, batch: int) -> None:
        """Finish the gather, compute the loss and the gradients of this rank's features."""
        loss = self._program.cross_sample(index)
        full = {i: widened(x) for i, x in self._pending.pop((index, batch))().items()}
        scale = float(loss.weight / loss.divisor)
        self._seeds.enter(self._step, f"losses.{loss.name}", 0, loss.samples(batch)[0])
        sharded = self._sharded_form(loss)
        if sharded is not None:
            grads = self._sharded(loss, batch, sharded, full, scale)
        else:
            grads = self._full(loss, batch, full, scale)
        self._dispatch(loss, batch, grads)

    def _sharded_form(self, loss: CrossSampleLoss) -> ShardedLoss | None:
        # Own rows alone are worth their exchanges where a backward follows.
        trains = any(self._wants_gradient(loss, i) for i in range(len(loss.inputs)))
        if not trains or any(item.stage is None for item in loss.inputs):
            return None
        return as_sharded(self._model.losses[loss.name])

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
            self.terms[loss.index].add_(value.detach())
        if not value.requires_grad or not (wanted or parameters):
            return {}
        seed = torch.full_like(value, self._precision.gradient_scale)
        grads = torch.autograd.grad(
            value, [*(leaves[i] for i in wanted), *parameters], seed, allow_unused=True
        )
        for parameter, grad in zip(parameters, grads[len(wanted) :], strict=True):
            _accumulate(parameter, grad)
        # A feature that the loss leaves out has no gradient, and so has the module behind it.
        mine = self._own_positions(loss, batch)
        return {
            i: grad[mine[i]]
            for i, grad in zip(wanted, grads, strict=False)
            if grad is not None and i in mine
        }

    def _sharded(
        self,
        loss: CrossSampleLoss,
        batch: int,
        module: ShardedLoss,
        full: Mapping[int, Tensor],
        scale: float,
    ) -> dict[int, Tensor]:
        """Own rows against all others; partial losses and parameter gradients add up."""
        own = {i: widened(rows) for i, rows in self._own(loss, batch).items()}
        positions = {i: rows[: len(own[i])] for i, rows in self._own_positions(loss, batch).items()}
        before = {p: p.grad for p in cast(nn.Module, module).parameters()}
        for parameter in before:
            parameter.grad = None
        part, own_grads = module.sharded(
            own,
            positions,
            full,
            lambda stats: self._exchange(loss, batch, stats),
        )
        seed = scale * self._precision.gradient_scale
        for parameter, grad in before.items():
            added = None if parameter.grad is None else parameter.grad * seed
            parameter.grad = grad
            _accumulate(parameter, added)
        self.terms[loss.index].add_(part.detach(), alpha=scale)
        return self._share_in_tp_groups(loss, batch, own_grads, seed)

    def _own(self, loss: CrossSampleLoss, batch: int) -> dict[int, Tensor]:
        """Rows that this rank answers for, by input; none of a tensor-parallel sibling's."""
        found: dict[int, Tensor] = {}
        for i, given in self._given_to(loss, batch).items():
            spec = self._specs_of(loss)[i]
            stage = self._program.stages[loss.inputs[i].stage or 0]
            parts = [self._feature(item) for item in given] if self._is_first(stage) else []
            none = torch.empty((0, *spec.tail), dtype=spec.dtype, device=self._transport.device)
            with torch.no_grad():
                found[i] = torch.cat(parts) if parts else none
        return found

    def _own_positions(self, loss: CrossSampleLoss, batch: int) -> dict[int, Tensor]:
        """Positions in the sync batch of this rank's replica's rows, by input."""
        if (loss.index, batch) in self._positions:
            return self._positions[loss.index, batch]
        positions = self._positions[loss.index, batch] = dict[int, Tensor]()
        for i, given in self._given_to(loss, batch).items():
            spans = [(item.first, item.first + item.stop - item.start) for item in given]
            device = self._transport.device
            parts = [torch.arange(*span, device=device) for span in spans or [(0, 0)]]
            positions[i] = torch.cat(parts)
        return positions

    def _is_first(self, stage: Stage) -> bool:
        """Whether this rank is the first of its tensor-parallel group, which gives the rows."""
        return stage.place(self._transport.rank)[1] == 0

    def _share_in_tp_groups(
        self, loss: CrossSampleLoss, batch: int, own_grads: Mapping[int, Tensor], seed: float
    ) -> dict[int, Tensor]:
        """Only the first rank of a tensor-parallel group computes; the others get its result."""
        grads: dict[int, Tensor] = {}
        for i, rows in self._own_positions(loss, batch).items():
            stage = self._program.stages[loss.inputs[i].stage or 0]
            if not self._wants_gradient(loss, i):
                continue
            d, t = stage.place(self._transport.rank)
            grad = own_grads[i] * seed
            group = stage.ranks[d]
            if len(group) > 1:
                if t:
                    grad = grad.new_zeros(len(rows), *grad.shape[1:])
                self._transport.all_reduce(grad, tuple(sorted(group)))
            grads[i] = grad
        return grads

    def _dispatch(self, loss: CrossSampleLoss, batch: int, grads: Mapping[int, Tensor]) -> None:
        """Cut the gradients of this rank's rows back into its micro-batches."""
        given_to = self._given_to(loss, batch)
        for i, grad in grads.items():
            given = given_to[i]
            cuts = grad.split([item.stop - item.start for item in given])
            for item, cut in zip(given, cuts, strict=True):
                self._gradients[item.key].append((item.element, item.start, item.stop, cut))
        # Each stage's micro-batches once, however many inputs it brings.
        for key in dict.fromkeys(item.key for given in given_to.values() for item in given):
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._features[key], self._uses[key]

    def _given_to(self, loss: CrossSampleLoss, batch: int) -> dict[int, list[_Given]]:
        """What this rank's micro-batches give to each input of which it holds any stage."""
        found = self._given.get((loss.index, batch))
        if found is None:
            found = self._given[loss.index, batch] = self._find_given(loss, batch)
        return found

    def _find_given(self, loss: CrossSampleLoss, batch: int) -> dict[int, list[_Given]]:
        found: dict[int, list[_Given]] = {}
        samples = loss.samples(batch)
        for i, item in enumerate(loss.inputs):
            stage = self._program.stages[item.stage or 0]
            place = stage.find_place(self._transport.rank)
            if item.stage is None or place is None:
                continue
            found[i] = []
            for held in rows_of(stage, place[0], samples, i):
                before = samples[0] - stage.microbatches[place[0]][held.mb][0]
                span = before + held.start, before + held.stop
                key = stage.index, held.mb
                found[i].append(_Given(key, *span, held.start, item.element, stage.module))
        return found

    def _wants_gradient(self, loss: CrossSampleLoss, index: int) -> bool:
        stage = loss.inputs[index].stage
        return stage is not None and self._program.stages[stage].has_backward

    def _feature(self, given: _Given) -> Tensor:
        tree = element_of(self._features[given.key], given.element, given.module)
        return cast(Tensor, slice_samples(tree, given.start, given.stop))

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

    def _exchange(
        self, loss: CrossSampleLoss, batch: int, stats: Mapping[int, Tensor]
    ) -> dict[int, Tensor]:
        """Per-row statistics of own rows to those of all rows, for every input that is read."""
        sample = next(iter(stats.values()))
        like = tuple(sample.shape[1:]), sample.dtype
        rows = dict.fromkeys(range(len(loss.inputs)), like)
        return self._gathered(loss, batch).gather(stats, rows, 0)()

    def _gathered(self, loss: CrossSampleLoss, batch: int) -> GatheredRows:
        key = loss.index, batch
        if key not in self._rows:
            sharded = self._sharded_form(loss)
            self._rows[key] = GatheredRows(
                self._program,
                self._transport,
                loss,
                batch,
                others_only=sharded is not None and others_only(sharded),
            )
        return self._rows[key]


def no_terms(program: Program, device: torch.device) -> Tensor:
    """Zeros for the term of each loss, [losses] float64."""
    return torch.zeros(len(program.losses), dtype=torch.float64, device=device)


def _accumulate(parameter: nn.Parameter, grad: Tensor | None) -> None:
    if grad is not None:
        parameter.grad = grad.clone() if parameter.grad is None else parameter.grad + grad
