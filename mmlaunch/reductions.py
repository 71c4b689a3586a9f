"""Collectives at the ends of a step: targets counted before it, gradients summed after it.

With ZeRO-1 (:mod:`mmlaunch.zero`) a sum leaves each rank its slice, and the update ends with a
gather of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmlaunch.batch_sync import sync_channel
from mmlaunch.model import LocalModel, Tie, tie_groups
from mmlaunch.transport import Group, Ranks, Transport
from mmlaunch.zero import FlatGroup, Part, flat_groups
from mmplan.program.model import Loss, Program, Reduction


class Reductions:
    """COUNT and REDUCE of one rank. Sums, never means: the loss is normalised globally.

    Args:
        program: the whole program.
        model: this rank's parameters.
        transport: sums.
        ties: all ranks' ties, in one order (:func:`gather_ties`).
        zero: whether optimizer state is cut over the ranks of each sum.
    """

    def __init__(
        self,
        program: Program,
        model: LocalModel,
        transport: Transport,
        ties: Sequence[Tie],
        *,
        zero: bool,
    ) -> None:
        self._program, self._model, self._transport = program, model, transport
        self._trained = dict(model.trained())
        self._sums = {
            r.index: self._sum(self._members_of(r), r.ranks, r.tp_index, zero=zero)
            for r in program.reductions
            if transport.rank in r.ranks
        }
        self._tied = [
            self._sum({tie.name: self._trained[tie.name]}, ranks, t, zero=zero)
            for tie, groups in tie_groups(program, list(ties))
            for t, ranks in enumerate(groups)
            if len(ranks) > 1 and transport.rank in ranks and tie.name in self._trained
        ]
        self._totals: dict[int, float] = {}

    def _members_of(self, reduction: Reduction) -> dict[str, nn.Parameter]:
        if reduction.kind == "blocks":
            return self._model.block_parameters(reduction.owner, reduction.blocks)
        prefix = f"losses.{reduction.owner}."
        return {name: p for name, p in self._trained.items() if name.startswith(prefix)}

    def _sum(
        self, members: dict[str, nn.Parameter], ranks: Ranks, tp_index: int, *, zero: bool
    ) -> _Sum:
        if not zero:
            return _Sum(list(members.values()), ranks, [])
        # Uncut parameters are equal on all ranks of a tensor-parallel group: one set counts.
        counted = frozenset(n for n in members if n in self._model.shards or tp_index == 0)
        rank = self._transport.rank
        flats = flat_groups(list(members.items()), ranks, rank, counted=counted)
        return _Sum([], ranks, flats)

    def parts(self, writes: Callable[[str], bool]) -> list[Part]:
        """What this rank's optimizer updates, in the order of its parameters.

        Args:
            writes: whether this rank is the one of all replicas that saves a parameter.
        """
        flats = [flat for item in self._all_sums() for flat in item.flats]
        pieces = {part.name: part for flat in flats for part in flat.parts}
        cut = {name for flat in flats for name in flat.names}
        found: list[Part] = []
        for name, parameter in self._trained.items():
            if name not in cut:
                found.append(Part(name=name, tensor=parameter, span=None, counts=writes(name)))
            elif name in pieces:
                found.append(pieces[name])
        return found

    def _all_sums(self) -> list[_Sum]:
        return [*self._sums.values(), *self._tied]

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
        self._sums[index].reduce(self._transport)

    def finish(self) -> None:
        """Sum the gradients of parameters that stand in several blocks; forget absent ones."""
        for item in self._tied:
            item.reduce(self._transport)
        for item in self._all_sums():
            item.drop_absent()

    def gather(self) -> None:
        """After the update: bring parameters together whose slices ranks updated apart."""
        for item in self._all_sums():
            for flat in item.flats:
                flat.gather(self._transport)


@dataclass(frozen=True, slots=True)
class _Sum:
    """Parameters whose gradients are summed over ranks: plain ones, or in flat slices.

    Attributes:
        counts: of plain parameters, the number of ranks on which each got a gradient.
    """

    parameters: list[nn.Parameter]
    ranks: Ranks
    flats: list[FlatGroup]
    counts: list[tuple[list[nn.Parameter], Tensor]] = field(default_factory=list)

    def reduce(self, transport: Transport) -> None:
        self.counts[:] = _sum_gradients(self.parameters, self.ranks, transport)
        for flat in self.flats:
            flat.reduce(transport)

    def drop_absent(self) -> None:
        """No gradient on any rank is none, not zero: an optimizer leaves such a parameter."""
        # At the step's end, because reading the counts waits for the device.
        for parameters, counts in self.counts:
            for parameter, count in zip(parameters, counts.tolist(), strict=True):
                if count == 0:
                    parameter.grad = None
        self.counts.clear()
        for flat in self.flats:
            flat.drop_absent()


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


def _sum_gradients(
    parameters: Sequence[nn.Parameter], ranks: Ranks, transport: Transport
) -> list[tuple[list[nn.Parameter], Tensor]]:
    """Sum gradients in place; returns on how many ranks each was there, by type."""
    counts: list[tuple[list[nn.Parameter], Tensor]] = []
    for dtype in sorted({p.dtype for p in parameters}, key=str):
        same = [p for p in parameters if p.dtype == dtype]
        there = torch.tensor([p.grad is not None for p in same], dtype=dtype).to(same[0].device)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
        flat = torch.cat([*(grad.reshape(-1) for grad in grads), there])
        transport.all_reduce(flat, ranks)
        *parts, there = flat.split([*(p.numel() for p in same), len(same)])
        counts.append((same, there))
        for parameter, part in zip(same, parts, strict=True):
            parameter.grad = cast(Tensor, part.view_as(parameter))
    return counts
