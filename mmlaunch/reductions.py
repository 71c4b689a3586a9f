"""Collectives at the ends of a step: targets counted before it, gradients summed after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmlaunch.batch_sync import sync_channel
from mmlaunch.model import LocalModel, Tie, tie_groups
from mmlaunch.transport import Group, Ranks, Transport
from mmplan.program.model import Loss, Program


class Reductions:
    """COUNT and REDUCE of one rank. Sums, never means: the loss is normalised globally.

    Args:
        program: the whole program.
        model: this rank's parameters.
        transport: sums.
        ties: all ranks' ties, in one order (:func:`gather_ties`).
    """

    def __init__(
        self, program: Program, model: LocalModel, transport: Transport, ties: Sequence[Tie]
    ) -> None:
        self._program, self._model, self._transport = program, model, transport
        self._parameters = [self._parameters_of(r.index) for r in program.reductions]
        self._tied = self._tied_here(ties)
        self._totals: dict[int, float] = {}

    def _parameters_of(self, index: int) -> list[nn.Parameter]:
        reduction = self._program.reductions[index]
        if self._transport.rank not in reduction.ranks:
            return []
        if reduction.kind == "loss":
            module = self._model.losses[reduction.owner]
            return [p for p in module.parameters() if p.requires_grad]
        return self._model.block_parameters(reduction.owner, reduction.blocks)

    def _tied_here(self, ties: Sequence[Tie]) -> list[tuple[nn.Parameter, Ranks]]:
        mine = dict(self._model.trained())
        return [
            (mine[tie.name], ranks)
            for tie, groups in tie_groups(self._program, list(ties))
            for ranks in groups
            if len(ranks) > 1 and self._transport.rank in ranks and tie.name in mine
        ]

    def begin(self) -> None:
        """Forget the last step's counts."""
        self._totals.clear()

    def count(self, index: int, field_of: Callable[[str, str, int, int], Any]) -> None:
        """Sum a loss's targets over the whole batch, known from the data alone."""
        loss = self._program.losses[index]
        module = self._model.losses[loss.name]
        if not hasattr(module, "count") or loss.host is None:
            return
        stage = self._program.stages[loss.host]
        place = stage.place(self._transport.rank)
        names = [source.field for source in loss.host_inputs if source.field is not None]
        # Accumulated in float64: a batch may hold more tokens than float32 counts exactly.
        total = torch.zeros((), dtype=torch.float64, device=self._transport.device)
        if place is not None and place[1] == 0:
            for start, stop in stage.microbatches[place[0]]:
                fields = {name: field_of(loss.task, name, start, stop) for name in names}
                total += cast(Any, module).count(fields).sum()
        self._transport.all_reduce(total, loss.ranks)
        # A batch without a single target has a loss of zero, not of NaN.
        self._totals[index] = max(float(total), 1.0)

    def scale(self, loss: Loss, samples: int, batch: int) -> float:
        """What a micro-batch's value of a per-sample loss is multiplied with."""
        total = self._totals.get(loss.index)
        return loss.weight / total if total is not None else loss.weight * samples / batch

    def reduce(self, index: int) -> None:
        """Sum the gradients of one reduction over its ranks."""
        reduction = self._program.reductions[index]
        _sum_gradients(self._parameters[index], reduction.ranks, self._transport)

    def finish(self) -> None:
        """Sum the gradients of parameters that stand in several blocks."""
        for parameter, ranks in self._tied:
            _sum_gradients([parameter], ranks, self._transport)


def gather_ties(model: LocalModel, transport: Transport) -> list[Tie]:
    """The ties of all modules, in one order on every rank."""
    found = {tie.name: tie for ties in transport.gather_objects(model.ties) for tie in ties}
    return [found[name] for name in sorted(found)]


def collective_groups(program: Program, ties: Sequence[Tie]) -> list[Group]:
    """Every group that a step's collectives use, once, in one order on all ranks."""
    groups: dict[Ranks, None] = {}
    for stage in program.stages:
        if stage.tp > 1:
            groups.update(dict.fromkeys(tuple(sorted(group)) for group in stage.ranks))
    groups.update(dict.fromkeys(loss.ranks for loss in program.losses))
    groups.update(dict.fromkeys(reduction.ranks for reduction in program.reductions))
    for _, tied in tie_groups(program, list(ties)):
        groups.update(dict.fromkeys(tied))
    gathers = [(x.ranks, sync_channel(x)) for x in program.losses if x.sync_batch is not None]
    return [group for group in [*((ranks, 0) for ranks in groups), *gathers] if len(group[0]) > 1]


def _sum_gradients(parameters: Sequence[nn.Parameter], ranks: Ranks, transport: Transport) -> None:
    if not parameters:
        return
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        same = [p for p in parameters if p.dtype == dtype]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        transport.all_reduce(flat, ranks)
        for parameter, part in zip(same, flat.split([p.numel() for p in same]), strict=True):
            parameter.grad = cast(Tensor, part.view_as(parameter))
