"""Collectives at the ends of a step: targets counted before it, gradients summed after it.

With ZeRO-1 a sum leaves each rank its flat shard, and the update ends with a gather of the
parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import cast

import torch

from mmlaunch.comm.batches import Tree
from mmlaunch.comm.transport import CommGroup, Transport
from mmlaunch.data.loader import Field
from mmlaunch.execute.gradient_buckets import (
    FlatShards,
    GradientBuckets,
    ParameterSlice,
    UpdatedSlice,
    by_type,
)
from mmlaunch.model.local_model import LocalModel, Tie, tie_sums
from mmlaunch.model.shard_layout import replicated_layout
from mmplan.program.model import Loss, LossReduction, Program, Reduction
from mmplan.program.shards import Ranks
from mmplan.schema.protocols import as_counting

_Sum = GradientBuckets | FlatShards
# (task, field, start, stop) to a data field on the device.
FieldOf = Callable[[str, str, int, int], Tree]


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
        # Parameters whose gradient began in this step as the sum of a slice.
        self._begun: set[str] = set()
        self._sums = {
            r.index: self._sums_of(
                self._slices_of(r),
                r.ranks,
                first=isinstance(r, LossReduction) or r.shards[0] == 0,
            )
            for r in program.reductions
            if transport.rank in r.ranks
        }
        self._tied = [
            item
            for tie, sums in tie_sums(program, ties)
            for index, (ranks, contributors) in enumerate(sums)
            if len(ranks) > 1 and transport.rank in ranks and tie.name in self._trained
            for item in self._sums_of(
                [self._whole(tie.name, contributors)], ranks, first=index == 0
            )
        ]
        self._all_sums = [*chain.from_iterable(self._sums.values()), *self._tied]
        self._totals: dict[int, float] = {}

    def _slices_of(self, reduction: Reduction) -> list[ParameterSlice]:
        if isinstance(reduction, LossReduction):
            prefix = f"losses.{reduction.owner}."
            names = [name for name in self._trained if name.startswith(prefix)]
            return [self._whole(name, reduction.ranks) for name in names]
        names = list(self._model.block_parameters(reduction.owner, reduction.blocks))
        layouts = self._model.layouts
        if reduction.parameters != "all":
            names = [n for n in names if (n in layouts) == (reduction.parameters == "cut")]
        return [
            ParameterSlice(
                name=name,
                parameter=self._trained[name],
                layout=layouts[name],
                boxes=layouts[name].span(reduction.shards, reduction.tp),
            )
            if name in layouts
            else self._whole(name, reduction.contributors)
            for name in names
        ]

    def _whole(self, name: str, contributors: Ranks) -> ParameterSlice:
        parameter = self._trained[name]
        return ParameterSlice(
            name=name,
            parameter=parameter,
            layout=replicated_layout(tuple(parameter.shape)),
            contributes=self._transport.rank in contributors,
        )

    def _sums_of(
        self, slices: Sequence[ParameterSlice], ranks: Ranks, *, first: bool
    ) -> list[_Sum]:
        """The sums of slices over ranks, one for each type of numbers.

        Args:
            slices: to be summed.
            ranks: of the sums.
            first: whether, of ranks that sum equal parameters apart, these ones count.
        """
        if not self.zero:
            return [GradientBuckets(same, ranks) for same in by_type(slices)]
        counted = frozenset(s.name for s in slices if first or s.name in self._model.layouts)
        rank = self._transport.rank
        return [FlatShards(same, ranks, rank, counted=counted) for same in by_type(slices)]

    def updated_slices(self, writes: Callable[[str], bool]) -> list[UpdatedSlice]:
        """The slices that this rank's optimizer updates, in the order of its parameters.

        Args:
            writes: whether this rank is the one of all replicas that saves a parameter.
        """
        sharded: defaultdict[str, list[UpdatedSlice]] = defaultdict(list)
        for item in self._all_sums:
            for updated in item.updated:
                sharded[updated.name].append(updated)
        summed = {part.name for item in self._all_sums for part in item.slices}
        found: list[UpdatedSlice] = []
        for name, parameter in self._trained.items():
            if self.zero and name in summed:
                found += sharded[name]
            else:
                found.append(UpdatedSlice(name=name, tensor=parameter, counts=writes(name)))
        return found

    def begin(self) -> None:
        """Forget the last step's counts."""
        self._totals.clear()

    def count(self, index: int, field_of: FieldOf) -> None:
        """Sum a loss's targets over the whole batch, known from the data alone."""
        loss = self._program.per_sample(index)
        counting = as_counting(self._model.losses[loss.name])
        if counting is None:
            return
        stage = self._program.stages[loss.host]
        place = stage.find_place(self._transport.rank)
        names = [source.field for source in loss.inputs if source.field is not None]
        # Accumulated in float64: a batch may hold more tokens than float32 counts exactly.
        total = torch.zeros((), dtype=torch.float64, device=self._transport.device)
        if place is not None and place[1] == 0:
            for start, stop in stage.microbatches[place[0]]:
                fields = {name: field_of(loss.task, name, start, stop) for name in names}
                total += counting.count(cast("dict[str, Field]", fields)).sum()
        self._transport.all_reduce(total, loss.ranks)
        # A batch without a single target has a loss of zero, not of NaN.
        self._totals[index] = max(float(total), 1.0)

    def scale(self, loss: Loss, samples: int) -> float:
        """The factor of a micro-batch's value of a per-sample loss."""
        total = self._totals.get(loss.index)
        if total is not None:
            return float(loss.weight) / total
        return float(loss.weight * samples / loss.divisor)

    def reduce(self, index: int) -> None:
        """Sum the gradients of one reduction over its ranks."""
        for item in self._sums[index]:
            item.reduce(self._transport, self._begun)

    def finish(self) -> None:
        """Sum the gradients of tied parameters; drop those that no rank has."""
        for item in self._tied:
            item.reduce(self._transport, self._begun)
        for item in self._all_sums:
            item.drop_missing()
        self._begun.clear()

    def gather(self) -> None:
        """After the update: gather parameters whose shards ranks updated apart."""
        for item in self._all_sums:
            item.gather(self._transport)


def gather_ties(model: LocalModel, transport: Transport) -> list[Tie]:
    """The ties of all modules, in one order on every rank."""
    found = {
        tie.name: tie for ties in transport.gather_objects(model.ties, list[Tie]) for tie in ties
    }
    return [found[name] for name in sorted(found)]


def collective_groups(program: Program, ties: Sequence[Tie]) -> list[CommGroup]:
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
