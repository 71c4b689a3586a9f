"""Emulated devices: every compute is a wait of the time that the profile gives it.

Launcher, program, processes, data, messages and reductions are the real ones; only blocks and
losses are replaced by waits that take and give tensors of zeros in the right shapes (a ragged
output has the lengths of the first ragged input). So more ranks than cores can run as if each had
a device of its own, which holds a prediction against everything but the computes. Nothing is
trained.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmlaunch.comm.batches import Tree, float_leaves
from mmlaunch.comm.messages import LeafSpec, Spec, spec_leaves, tree_of
from mmlaunch.execute.blocks import StageBlocks
from mmlaunch.execute.gathered_blocks import GatheredBlocks
from mmlaunch.execute.weight_gradients import SplitBackward, WeightGradients, once
from mmlaunch.model.local_model import LocalModel
from mmlaunch.model.seeds import Seeds
from mmplan.errors import InvalidInputError
from mmplan.program.instructions import Op
from mmplan.program.model import Stage, Timings
from mmplan.ragged import Ragged, host_lengths


class EmulatedBlocks(StageBlocks):
    """Blocks that wait; the model's losses wait as well from then on.

    Args:
        model: its parameters get gradients of zeros, so that reductions are as large.
        seeds: not used.
        specs: output spec of every stage.
        timings: seconds of every compute and loss.
        gathered: gathers parameters as in a step.
    """

    def __init__(
        self,
        model: LocalModel,
        seeds: Seeds,
        specs: Sequence[Spec],
        timings: Timings,
        *,
        gathered: GatheredBlocks,
    ) -> None:
        super().__init__(model, seeds, frozenset(), gathered=gathered)
        for name, loss in model.losses.items():
            model.losses[name] = EmulatedLoss(loss, timings.losses.get(name, 0.0))
        self._specs, self._timings = specs, timings
        self.split = _LaterWaits()
        # An input of every output, which so has a backward.
        self._anchor = torch.zeros((), requires_grad=True)

    def run(
        self,
        stage: Stage,
        step: int,
        first_sample: int,
        arguments: Sequence[Tree],
        later: WeightGradients | None = None,
    ) -> Tree:
        """Wait as long as the forward takes; the output waits in its backward."""
        begun_s = time.perf_counter()
        spans = (span for row in stage.microbatches for span in row)
        samples = next(stop - start for start, stop in spans if start == first_sample)
        seconds = {op: self._timings.computes.get((stage.index, op, samples), 0.0) for op in Op}
        if isinstance(later, _LaterWait):
            later.seconds = seconds[Op.WEIGHT]
        backward_s = seconds[Op.INPUT] if later is not None else seconds[Op.BACKWARD]
        given = [leaf for item in arguments for leaf in float_leaves(item)]
        wait = _Wait(self._model, stage, backward_s)
        spec, rows = self._specs[stage.index], _RowCount(samples, _lengths(arguments))
        shapes = [((rows.of(leaf), *leaf.tail), leaf.dtype) for leaf in spec_leaves(spec)]
        outputs = iter(cast("Any", _Compute.apply(wait, shapes, self._anchor, *given)))
        for index in range(*stage.blocks):
            self._gathered.before_forward(stage, index)
            self._gathered.after_forward(stage, index, None)

        def output(leaf: LeafSpec) -> Tree:
            return Ragged(next(outputs), rows.given()) if leaf.ragged else next(outputs)

        _spend(seconds[Op.FORWARD], begun_s)
        return tree_of(spec, output)


class EmulatedLoss(nn.Module):
    """A loss that waits: its value is 0, its gradients are zeros.

    Args:
        loss: the real one; the parameters are its, under the same names.
        seconds: its time; 0 where the time of its stage contains it.
    """

    def __init__(self, loss: nn.Module, seconds: float) -> None:
        super().__init__()
        self.__dict__.update(loss.__dict__)
        self._seconds = seconds

    def forward(self, *arguments: Tree) -> Tensor:
        """Wait; a sum of zeros that depends on all floating inputs and parameters."""
        begun_s = time.perf_counter()
        leaves = [leaf for item in arguments for leaf in float_leaves(item)]
        parts = [tensor.sum() * 0 for tensor in (*leaves, *self.parameters())]
        value = torch.stack(parts).sum() if parts else torch.zeros(())
        _spend(self._seconds, begun_s)
        return value


@dataclass(frozen=True, slots=True)
class _RowCount:
    """Rows of a micro-batch's outputs: one a sample, or as many as the ragged input has."""

    samples: int
    lengths: Tensor | None

    def of(self, spec: LeafSpec) -> int:
        """Rows of an output."""
        return sum(host_lengths(self.given())) if spec.ragged else self.samples

    def given(self) -> Tensor:
        """Rows of each sample.

        Raises:
            InvalidInputError: no input says them.
        """
        if self.lengths is None:
            raise InvalidInputError(
                "a module makes ragged outputs of inputs that are not, so that their size is known "
                "only when they are computed",
                hint="run without --emulate",
            )
        return self.lengths


class _Wait:
    """A stage's backward for one micro-batch."""

    def __init__(self, model: LocalModel, stage: Stage, seconds: float) -> None:
        self._model, self._stage, self._seconds = model, stage, seconds

    def __call__(self) -> None:
        begun_s = time.perf_counter()
        frozen = set(self._model.frozen_here[self._stage.index])
        for index in range(*self._stage.blocks):
            for parameter in self._model.blocks[self._stage.owner, index].parameters():
                trains = parameter.requires_grad and parameter not in frozen
                if trains and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        _spend(self._seconds, begun_s)


class _Compute(torch.autograd.Function):
    """Zeros out, zeros back, and a wait in between."""

    @staticmethod
    def forward(
        ctx: Any,
        wait: _Wait,
        shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        """Tensors of zeros of the shapes asked for."""
        ctx.wait = wait
        ctx.given = [(tensor.shape, tensor.dtype, tensor.device) for tensor in given]
        outputs = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in shapes)
        ctx.mark_non_differentiable(*(t for t in outputs if not t.is_floating_point()))
        return outputs

    @staticmethod
    @once
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Wait, then gradients of zeros."""
        ctx.wait()
        zeros = (torch.zeros(shape, dtype=d, device=where) for shape, d, where in ctx.given)
        return None, None, *zeros


class _LaterWaits(SplitBackward):
    """Split backwards of waits."""

    def microbatch(self) -> _LaterWait:
        """The wait of a micro-batch's ``W``."""
        return _LaterWait(self)


class _LaterWait(WeightGradients):
    """The ``W`` of one micro-batch."""

    def __init__(self, split: SplitBackward) -> None:
        super().__init__(split)
        self.seconds = 0.0

    def compute(self) -> None:
        """Wait."""
        _spend(self.seconds, time.perf_counter())


def _spend(seconds: float, begun_s: float) -> None:
    """Sleep for the rest of the seconds since the beginning."""
    time.sleep(max(0.0, begun_s + seconds - time.perf_counter()))


def _lengths(arguments: Sequence[Tree]) -> Tensor | None:
    """Lengths of the first ragged input."""
    for item in arguments:
        if isinstance(item, Ragged):
            return item.lengths
        found = _lengths(item) if isinstance(item, tuple) else None
        if found is not None:
            return found
    return None
