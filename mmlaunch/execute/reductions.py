"""Collectives at the ends of a step: targets counted before it, gradients summed at its end.

Sums begin inside the last backward of their blocks where the program starts them there, after it
elsewhere.

With ZeRO-1 a sum leaves each rank its flat shard, and the update ends with a gather of the
parameters.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, islice
from typing import cast

import torch
from torch import Tensor, nn

from mmlaunch.comm.batches import Tree
from mmlaunch.comm.transport import Transport
from mmlaunch.data.loader import Field
from mmlaunch.execute.gathered_blocks import GatheredBlocks
from mmlaunch.execute.gradient_buckets import (
    FlatShards,
    GradientBucket,
    ParameterSlice,
    UpdatedSlice,
    in_buckets,
    slices_of,
    whole_slice,
)
from mmlaunch.model.local_model import LocalModel, tensors_in
from mmlaunch.model.precision import widen_rows
from mmlaunch.model.whole_modules import BlockKey
from mmplan.program.model import (
    Loss,
    LossReduction,
    LossUpdate,
    ParameterUpdate,
    Program,
    Reduction,
    Stage,
    TieReduction,
    TieUpdate,
)
from mmplan.program.reduction_starts import is_cut, rounds_of
from mmplan.program.shards import Ranks
from mmplan.schema.protocols import as_counting

_Sum = GradientBucket | FlatShards
# (task, field, start, stop) to a data field.
FieldOf = Callable[[str, str, int, int], Tree]

# Of the sum of loss 0's targets, of later losses below: messages' tags are smaller.
_COUNT_TAG = 2**31 - 1


class Reductions:
    """COUNT and REDUCE of one rank. Sums, never means: the loss is normalised globally.

    Args:
        program: the whole program.
        model: this rank's parameters.
        transport: sums.
        narrow: type in which ranks hold matrices whole whose update ZeRO cuts; None for their own.
        narrow_gradients: whether their gradients are of that type too.

    Attributes:
        gathered: the parameters that ZeRO-3 cuts.
        cut_names: full names of parameters whose own values lie cut with the optimizer: of narrow
            ones in float32, and of those that are gathered.
    """

    def __init__(
        self,
        program: Program,
        model: LocalModel,
        transport: Transport,
        narrow: torch.dtype | None = None,
        *,
        narrow_gradients: bool = False,
    ) -> None:
        self._narrow, self._narrow_gradients = narrow, narrow_gradients
        self._program, self._model, self._transport = program, model, transport
        self._trained = dict(model.trained())
        self._ties = {tie.name: tie for tie in model.ties}
        self._updates = [u for u in program.updates if transport.rank in u.ranks]
        # Parameters whose gradient began in this step as the sum of a slice.
        self._begun: set[str] = set()
        self._sums = {
            r.index: list(self._sums_of(r)) for r in program.reductions if transport.rank in r.ranks
        }
        self._all_sums = [*chain.from_iterable(self._sums.values())]
        # After all of them: several may have parts of one parameter.
        narrow_names: set[str] = set()
        cut: defaultdict[BlockKey, list[FlatShards]] = defaultdict(list)
        for item in self._all_sums:
            if isinstance(item, FlatShards) and item.narrow is not None:
                item.make_narrow()
                narrow_names.update(part.name for part in item.slices)
            if isinstance(item, FlatShards) and item.is_cut:
                owner, block, _ = item.slices[0].name.split(".", 2)
                cut[owner, int(block)].append(item)
        widen_rows(model.blocks.values(), {self._trained[name] for name in narrow_names})
        self.gathered = GatheredBlocks(cut, transport)
        for block in model.blocks.values():
            # What is not cut, buffers and frozen parameters, may still be on the host.
            if any(t.is_cpu for t in tensors_in(block)) and transport.device.type == "cuda":
                block.to(transport.device)
        self.cut_names = narrow_names | self.gathered.names
        # Those that begin inside the next compute, in order.
        self._starting: list[_Sum] = []
        self._totals: dict[int, float] = {}

    def _slices_of(self, reduction: Reduction) -> list[ParameterSlice]:
        if isinstance(reduction, LossReduction):
            prefix = f"losses.{reduction.owner}."
            names = [name for name in self._trained if name.startswith(prefix)]
            return [whole_slice(name, self._trained[name]) for name in names]
        if isinstance(reduction, TieReduction):
            shared = reduction.owner, reduction.blocks
            names = [n for n, tie in self._ties.items() if (tie.owner, tie.blocks) == shared]
            parameters = {n: self._trained[n] for n in names if n in self._trained}
        else:
            parameters = self._model.block_parameters(reduction.owner, reduction.blocks)
        contributes = self._transport.rank in reduction.contributors
        return [*slices_of(reduction, parameters, self._model.layouts, contributes=contributes)]

    def _sums_of(self, reduction: Reduction) -> Iterator[_Sum]:
        """The sums of a reduction, each of one type of numbers and one way to update.

        Last parameters come first: a backward completes their gradients first.
        """
        rank = self._transport.rank
        gathers = any(stage.gathers for stage, _ in rounds_of(self._program, reduction))
        # What is gathered apart is summed apart: the parameters of each block.
        found: defaultdict[tuple[str, Ranks, bool, str], list[ParameterSlice]] = defaultdict(list)
        counted: set[str] = set()
        places: dict[str, int] = {}
        for place, item in enumerate(self._slices_of(reduction)):
            update = self._update_of(item.name, reduction)
            sharers = update.ranks if update.sharded else ()
            is_narrow = bool(self._narrow and sharers) and item.name in self._model.matrices
            block = item.name.split(".")[1] if gathers else ""
            found[str(item.parameter.dtype), sharers, is_narrow, block].append(item)
            places[item.name] = place
            if rank in update.counted:
                counted.add(item.name)
        buckets = [
            (sharers, is_narrow, bucket)
            for (_, sharers, is_narrow, _), slices in found.items()
            for bucket in in_buckets(slices[::-1])
        ]
        # A bucket is complete with the first of its parameters.
        buckets.sort(key=lambda item: -min(places[part.name] for part in item[2]))
        for sharers, is_narrow, bucket in buckets:
            if not sharers:
                yield GradientBucket(bucket, reduction.ranks)
                continue
            yield FlatShards(
                bucket,
                sharers,
                rank,
                counted=frozenset(counted),
                narrow=self._narrow if is_narrow else None,
                gradients=self._narrow if is_narrow and self._narrow_gradients else None,
                in_rounds=is_cut(reduction),
                is_cut=gathers,
                device=self._transport.device if gathers else None,
            )

    def _update_of(self, name: str, reduction: Reduction) -> ParameterUpdate:
        """The update of a parameter, or of the part of it that a reduction sums."""
        found = self._updates_of(name)
        if not isinstance(reduction, LossReduction) and reduction.parameters == "cut":
            part = reduction.tp, reduction.shards
            found = [u for u in found if not isinstance(u, LossUpdate) and (u.tp, u.shards) == part]
        (update,) = found
        return update

    def _updates_of(self, name: str) -> list[ParameterUpdate]:
        """This rank's updates of a parameter: several where it holds parts with other ranks."""
        return [update for update in self._updates if self._is_of(update, name)]

    def _is_of(self, update: ParameterUpdate, name: str) -> bool:
        first, second = name.split(".")[:2]
        tie = self._ties.get(name)
        if isinstance(update, LossUpdate):
            return first == "losses" and second == update.owner
        kind = "cut" if name in self._model.layouts else "whole"
        if first != update.owner or update.parameters not in ("all", kind):
            return False
        if isinstance(update, TieUpdate):
            return tie is not None and tie.blocks == update.blocks
        start, end = update.blocks
        return tie is None and start <= int(second) < end

    def updated_slices(self) -> list[UpdatedSlice]:
        """The slices that this rank's optimizer updates, in the order of its parameters."""
        sharded: defaultdict[str, list[UpdatedSlice]] = defaultdict(list)
        cut: set[str] = set()
        for item in self._all_sums:
            if isinstance(item, FlatShards):
                cut.update(part.name for part in item.slices)
                for updated in item.updated:
                    sharded[updated.name].append(updated)
        found: list[UpdatedSlice] = []
        for name, parameter in self._trained.items():
            updates = self._updates_of(name)
            if name in cut:
                found += sharded[name]
            elif updates:
                counts = all(self._transport.rank in update.counted for update in updates)
                found.append(UpdatedSlice(name=name, tensor=parameter, counts=counts))
        return found

    def begin(self) -> None:
        """Forget the last step's counts."""
        self._totals.clear()
        self._starting.clear()

    def count(self, index: int, field_of: FieldOf) -> None:
        """Sum a loss's targets over the whole batch, known from the data alone.

        Args:
            index: of the loss.
            field_of: gives a loss its data fields, on the host.
        """
        loss = self._program.per_sample(index)
        counting = as_counting(self._model.losses[loss.name])
        if counting is None:
            return
        stage = self._program.stages[loss.host]
        place = stage.find_place(self._transport.rank)
        names = [source.field for source in loss.inputs if source.field is not None]
        # Accumulated in float64: a batch may hold more tokens than float32 counts exactly.
        total = torch.zeros((), dtype=torch.float64)
        if place is not None and place[1] == 0:
            for start, stop in stage.microbatches[place[0]]:
                fields = {name: field_of(loss.task, name, start, stop) for name in names}
                total += counting.count(cast("dict[str, Field]", fields)).sum()
        self._sum_on_host(total, loss.ranks, _COUNT_TAG - index)
        # A batch without a single target has a loss of zero, not of NaN.
        self._totals[index] = max(float(total), 1.0)

    def _sum_on_host(self, total: Tensor, ranks: Ranks, tag: int) -> None:
        """Replace a tensor by its sum over ranks: up a binomial tree, and down again."""
        place = ranks.index(self._transport.rank)
        width, below = 1, list[int]()
        while width < len(ranks) and not place & width:
            below += ranks[place + width : place + width + 1]
            width *= 2
        above = ranks[place - width] if place else None
        part = torch.empty_like(total)
        for rank in below:
            self._transport.receive_on_host(part, rank, tag).wait()
            total += part
        if above is not None:
            self._transport.send_on_host(total, above, tag).wait()
            self._transport.receive_on_host(total, above, tag).wait()
        for rank in reversed(below):
            self._transport.send_on_host(total, rank, tag).wait()

    def scale(self, loss: Loss, samples: int) -> float:
        """The factor of a micro-batch's value of a per-sample loss."""
        total = self._totals.get(loss.index)
        if total is not None:
            return float(loss.weight) / total
        return float(loss.weight * samples / loss.divisor)

    def start(self, index: int) -> None:
        """Let the sums of one reduction begin inside the next compute."""
        self._starting += self._sums[index]

    @property
    def are_starting(self) -> bool:
        """Whether any sum begins inside the next compute."""
        return bool(self._starting)

    def starting_inside(
        self, pending: Collection[Tensor] | None = None
    ) -> AbstractContextManager[None]:
        """Around a compute: sums that start in it begin as soon as their gradients are complete.

        All ranks begin them in one order, the one in which they were cut. A sum with a parameter
        that gets no gradient here begins at the end, and so do those after it.

        Args:
            pending: the parameters that get a gradient in the compute; None for any.
        """
        return self._beginning(pending) if self._starting else nullcontext()

    @contextmanager
    def _beginning(self, pending: Collection[Tensor] | None) -> Generator[None]:
        waiting = deque(
            (item, {p.parameter for p in item.slices if pending is None or p.parameter in pending})
            for item in self._starting
        )
        self._starting = []
        incomplete: dict[Tensor, set[nn.Parameter]] = {p: left for _, left in waiting for p in left}

        begin = self._one_at_a_time()

        def begin_complete() -> None:
            while waiting and not waiting[0][1]:
                begin(waiting.popleft()[0])

        def completed(parameter: Tensor) -> None:
            incomplete[parameter] -= {parameter}
            begin_complete()

        hooks = [p.register_post_accumulate_grad_hook(completed) for p in incomplete]
        try:
            begin_complete()
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for item, _ in waiting:
            begin(item)

    def _one_at_a_time(self) -> Callable[[_Sum], None]:
        """What begins sums: of those that add up one is under way while the next gradients come."""
        under_way: deque[FlatShards] = deque()

        def begin(item: _Sum) -> None:
            if under_way:
                under_way.popleft().finish(self._begun)
            item.begin(self._transport, self._begun)
            if isinstance(item, FlatShards) and item.in_rounds:
                under_way.append(item)

        return begin

    def gathering(self, stage: Stage) -> AbstractContextManager[None]:
        """Around a backward of a stage that gathers; sums that start in it begin block by block."""
        started, self._starting = self._starting, []
        return self.gathered.backward(stage, self._one_at_a_time() if started else None)

    def reduce(self, index: int) -> None:
        """Take the sums of one reduction over its ranks, and make those that have not begun."""
        for item in self._sums[index]:
            if isinstance(item, FlatShards) and item.in_rounds:
                # Begun in the backward, and most have ended there.
                if item.is_under_way:
                    item.finish(self._begun)
                continue
            if not item.is_under_way:
                item.begin(self._transport, self._begun)
            item.finish(self._begun)

    def finish(self) -> None:
        """All gradients are summed."""
        self._begun.clear()

    def num_ranks(self) -> Tensor:
        """On how many ranks each slice got a gradient: float64, for :meth:`drop_missing`."""
        nothing = torch.empty(0, dtype=torch.float64, device=self._transport.device)
        return torch.cat([nothing, *(item.num_ranks.double() for item in self._all_sums)])

    def drop_missing(self, num_ranks: Sequence[float]) -> None:
        """Drop the gradients that no rank has.

        Args:
            num_ranks: :meth:`num_ranks`, read with what else the host reads at the step's end.
        """
        counts = iter(num_ranks)
        for item in self._all_sums:
            item.drop_missing([*islice(counts, len(item.num_ranks))])

    def gather(self) -> None:
        """After the update: gather parameters whose shards ranks updated apart."""
        for item in self._all_sums:
            item.gather(self._transport)
