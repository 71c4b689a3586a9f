"""Collectives at the ends of a step: targets counted before it, gradients summed after it.

With ZeRO-1 (:mod:`mmlaunch.execute.zero`) a sum leaves each rank its slice, and the update ends
with a gather of the parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from mmlaunch.comm.transport import Group, Transport
from mmlaunch.execute.gradient_buckets import GradientSum, Piece, UpdatedSlice
from mmlaunch.execute.zero import FlatGroups
from mmlaunch.model.local_model import LocalModel, Tie, tie_sums
from mmlaunch.model.shard_layout import ShardLayout, whole_place
from mmplan.program.model import BlockReduction, Loss, LossReduction, Program, Reduction
from mmplan.program.shards import Ranks

_Sum = GradientSum | FlatGroups


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
        self.zero = zero
        self._trained = dict(model.trained())
        # Parameters whose gradient began in this step as the sum of a part of it.
        self._made: set[int] = set()
        self._sums = {
            r.index: self._sum(
                self._pieces_of(r),
                r.ranks,
                first=isinstance(r, LossReduction) or r.shards[0] == 0,
            )
            for r in program.reductions
            if transport.rank in r.ranks
        }
        self._tied = [
            self._sum([self._whole(tie.name, adds)], ranks, first=index == 0)
            for tie, sums in tie_sums(program, ties)
            for index, (ranks, adds) in enumerate(sums)
            if len(ranks) > 1 and transport.rank in ranks and tie.name in self._trained
        ]
        self._totals: dict[int, float] = {}

    def _pieces_of(self, reduction: Reduction) -> list[Piece]:
        if isinstance(reduction, LossReduction):
            prefix = f"losses.{reduction.owner}."
            names = [name for name in self._trained if name.startswith(prefix)]
            return [self._whole(name, reduction.ranks) for name in names]
        names = list(self._model.block_parameters(reduction.owner, reduction.blocks))
        places = self._model.places
        if reduction.parameters != "all":
            names = [n for n in names if (n in places) == (reduction.parameters == "cut")]
        return [
            self._shards(name, places[name], reduction)
            if name in places
            else self._whole(name, reduction.contributors)
            for name in names
        ]

    def _shards(self, name: str, place: ShardLayout, reduction: BlockReduction) -> Piece:
        boxes = place.span(reduction.shards, reduction.tp)
        return Piece(name=name, parameter=self._trained[name], place=place, boxes=boxes)

    def _whole(self, name: str, adds: Ranks) -> Piece:
        parameter = self._trained[name]
        place = whole_place(tuple(parameter.shape))
        brings = self._transport.rank in adds
        return Piece(name=name, parameter=parameter, place=place, brings=brings)

    def _sum(self, pieces: Sequence[Piece], ranks: Ranks, *, first: bool) -> _Sum:
        """How some pieces are summed.

        Args:
            pieces: what is summed.
            ranks: over which ranks.
            first: whether, of ranks that sum equal parameters apart, these ones count.
        """
        if not self.zero:
            return GradientSum(pieces, ranks)
        counted = frozenset(p.name for p in pieces if first or p.name in self._model.places)
        return FlatGroups(pieces, ranks, self._transport.rank, counted=counted)

    def parts(self, writes: Callable[[str], bool]) -> list[UpdatedSlice]:
        """What this rank's optimizer updates, in the order of its parameters.

        Args:
            writes: whether this rank is the one of all replicas that saves a parameter.
        """
        cut: defaultdict[str, list[UpdatedSlice]] = defaultdict(list)
        for item in self._all_sums():
            for part in item.parts:
                cut[part.name].append(part)
        names = {name for item in self._all_sums() for name in item.names}
        found: list[UpdatedSlice] = []
        for name, parameter in self._trained.items():
            if name in names:
                found += cut[name]
            else:
                found.append(UpdatedSlice(name=name, tensor=parameter, counts=writes(name)))
        return found

    def _all_sums(self) -> list[_Sum]:
        return [*self._sums.values(), *self._tied]

    def begin(self) -> None:
        """Forget the last step's counts."""
        self._totals.clear()

    def count(self, index: int, field_of: Callable[[str, str, int, int], Any]) -> None:
        """Sum a loss's targets over the whole batch, known from the data alone."""
        loss = self._program.per_sample(index)
        module = self._model.losses[loss.name]
        if not hasattr(module, "count"):
            return
        stage = self._program.stages[loss.host]
        place = stage.find_place(self._transport.rank)
        names = [source.field for source in loss.inputs if source.field is not None]
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
        self._sums[index].reduce(self._transport, self._made)

    def finish(self) -> None:
        """Sum the gradients of parameters that stand in several blocks; forget absent ones."""
        for item in self._tied:
            item.reduce(self._transport, self._made)
        for item in self._all_sums():
            item.drop_absent()
        self._made.clear()

    def gather(self) -> None:
        """After the update: bring parameters together whose slices ranks updated apart."""
        for item in self._all_sums():
            item.gather(self._transport)


def gather_ties(model: LocalModel, transport: Transport) -> list[Tie]:
    """The ties of all modules, in one order on every rank."""
    found = {
        tie.name: tie for ties in transport.gather_objects(model.ties, list[Tie]) for tie in ties
    }
    return [found[name] for name in sorted(found)]


def collective_groups(program: Program, ties: Sequence[Tie]) -> list[Group]:
    """Every group that a step's collectives use, once, in one order on all ranks."""
    groups: dict[Ranks, None] = {}
    for stage in program.stages:
        if stage.tp > 1:
            groups.update(dict.fromkeys(tuple(sorted(group)) for group in stage.ranks))
    groups.update(dict.fromkeys(loss.ranks for loss in program.losses))
    groups.update(dict.fromkeys(reduction.ranks for reduction in program.reductions))
    for _, sums in tie_sums(program, ties):
        groups.update(dict.fromkeys(ranks for ranks, _ in sums))
    gathers = [(loss.ranks, loss.channel) for loss in program.cross_sample_losses]
    return [group for group in [*((ranks, 0) for ranks in groups), *gathers] if len(group[0]) > 1]
