"""Reorder a step's batch: the replica of each sample, and its position in the pipeline.

A program names samples by their position in the batch, so the result is a permutation of the
batch. The step's samples, and so its loss and gradient, stay the same.

Shape suffixes used in this file: S = stages, M = micro-batches, R = candidates, C = cells,
B = samples of the batch, N = nodes of the recurrence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from mmplan.arrays import Floats, Indices
from mmplan.errors import InvalidInputError
from mmplan.program.model import Program, Stage
from mmplan.reordering.microbatch_order import FoundOrder, OrderBudget, full_budget, search_order
from mmplan.reordering.pipeline_recurrence import Recurrence, make_recurrence
from mmplan.reordering.replica_assignment import assign_groups, check_work

# Ordering a batch may take this share of the step's predicted time, or of a second where that
# is unknown. Its time is estimated from counts, since clocks differ from process to process.
_SHARE = 0.01
# Seconds of a level of the recurrence for 64 candidates: a numpy call. Measured on one core.
_LEVEL_S = 6e-6
# Seconds of a node for one candidate. Measured on one core.
_NODE_S = 3e-8
# The short searches that choose the weights to balance try 1 / 2 of the pyramids.
_TRIAL_DIVISOR = 2


class BatchOrder:
    """Orders the batches of one task of a program.

    The unit with the most micro-batches in a step is the reference unit. Its replicas get equal
    work in the numbers of samples that the plan gives them, and so do its micro-batches. Their
    order is searched with the recurrence of the whole program. Samples stay within the sync
    batches of cross-sample losses. Equal arguments give the same order in every process.

    Work is compared within its module only. A plan gives modules devices so that all are busy, so
    the busiest stages of all modules are assumed to be busy for equal times: 1 in a whole step.
    Within a module, the time of a stage is proportional to its blocks over its tp degree. A
    backward takes one forward for input gradients, and one more for the blocks that train.

    Args:
        program: of a plan.
        task: its name.

    Attributes:
        batch: samples of a step.
        modules: of the task.

    Raises:
        InvalidInputError: the program runs nothing of the task.
    """

    def __init__(self, program: Program, task: str) -> None:
        stages = [stage for stage in program.stages if stage.task == task]
        if not stages:
            raise InvalidInputError(f"the program runs nothing of the task {task}")
        self.batch = program.batches[task]
        self.modules = tuple(dict.fromkeys(stage.module for stage in stages))
        self._recurrence = make_recurrence(program)
        self._module_loads = [_ModuleLoad.of(stages, module) for module in self.modules]
        self._load_N, self._scale_N = self._node_times({s.index: s for s in stages})
        reference = max(stages, key=lambda stage: (sum(map(len, stage.microbatches)), stage.dp))
        self._cells = list(_cells(reference, _cuts(program, task)))
        self._start_C = np.array([cell.start for cell in self._cells])
        sizes = [cell.stop - cell.start for cell in self._cells]
        self._cell_B = np.repeat(np.arange(len(sizes)), sizes)
        self._offset_B = np.arange(self.batch) - self._start_C[self._cell_B]
        seconds = _SHARE * (program.predicted_s or 1.0)
        self._budget = _affordable_budget(
            self._recurrence, max(map(len, reference.microbatches)), seconds
        )

    def __call__(self, work: Mapping[str, Floats], seed: int) -> Indices:
        """The order: batch position p takes sample ``order[p]`` of the batch as given.

        Args:
            work: per module the work of each sample of the batch, in any unit; a module that
                is absent counts as free.
            seed: of the search, the same on every rank.

        Raises:
            InvalidInputError: work is negative or not finite, or not one number a sample.
        """
        work = self._scaled(work)
        given = np.arange(self.batch)
        groupings = [self._grouped(weight_B) for weight_B in self._weights(work)]
        if not groupings:
            return given
        trial = replace(
            self._budget, first=self._budget.first // _TRIAL_DIVISOR, generations=0, scans=0
        )
        spans = [self._searched(grouped, work, seed, trial).makespan for grouped in groupings]
        grouped = groupings[spans.index(min(spans))]
        found = self._searched(grouped, work, seed, self._budget)
        order = self._sources(found.order[None, :], grouped)[0]
        before, after = self._makespans(np.array([given, order]), work)
        return order if after < before else given

    def makespans(self, orders: Indices, work: Mapping[str, Floats]) -> Floats:
        """Makespans [R] of orders [R, batch]; 1 is the busy time of the busiest stages."""
        return self._makespans(orders, self._scaled(work))

    def _makespans(self, orders: Indices, work: Mapping[str, Floats]) -> Floats:
        loads = [np.zeros((1, len(orders)))]
        for part in self._module_loads:
            load = np.zeros((len(part.start), len(orders)))
            if part.module in work:
                done = np.zeros((self.batch + 1, len(orders)))
                np.cumsum(work[part.module][orders.T], axis=0, out=done[1:])
                np.subtract(done.take(part.stop, axis=0), done.take(part.start, axis=0), out=load)
            loads.append(load)
        time_NR = np.vstack(loads).take(self._load_N, axis=0)
        time_NR *= self._scale_N
        return self._recurrence.makespans(time_NR)

    def _node_times(self, stages: Mapping[int, Stage]) -> tuple[Indices, Floats]:
        """Per node, its row in the loads of all modules, and as a column its time per load."""
        first = np.cumsum([1, *(len(part.start) for part in self._module_loads)]).tolist()
        loads = {
            part.module: (row, part) for row, part in zip(first, self._module_loads, strict=False)
        }
        rows: list[int] = []
        scales: list[float] = []
        known = self._recurrence
        # Whether a node computes (forward, input gradients, weight gradients).
        does = np.stack([~known.backward & ~known.weights, known.backward, known.weights], axis=1)
        does[:, 2] |= known.backward & (known.share == 1)
        keys = zip(known.stage, known.replica, known.mb, does, strict=True)
        for index, replica, mb, parts in keys:
            # Row 0 is free: losses, reductions, other tasks.
            row, scale = 0, 0.0
            if index in stages:
                stage = stages[index]
                before, part = loads[stage.module]
                row = before + part.rows[stage.microbatches[replica][mb]]
                scale = float(np.dot(_cost(stage, part.blocks), parts))
            rows.append(row)
            scales.append(scale)
        return np.array(rows, np.intp), np.array(scales)[:, None]

    def _scaled(self, work: Mapping[str, Floats]) -> dict[str, Floats]:
        """Work in units of the busiest stage's time, averaged over its replicas."""
        scaled: dict[str, Floats] = {}
        for name, values in work.items():
            check_work(values)
            if len(values) != self.batch:
                raise InvalidInputError(
                    f"{len(values)} samples have work for {name}, the batch has {self.batch}"
                )
        for part in self._module_loads:
            if part.module in work:
                # A running sum has the same rounding on every processor.
                busy = float(np.cumsum(work[part.module])[-1]) * part.slowest / part.replicas
                scaled[part.module] = work[part.module] / (busy or 1.0)
        return scaled

    def _weights(self, work: Mapping[str, Floats]) -> Iterator[Floats]:
        """The weights to balance over replicas: all of a sample's work, or that of one module."""
        uneven = [p for p in self._module_loads if p.module in work and np.ptp(work[p.module]) > 0]
        weights = [part.slowest * work[part.module] for part in uneven]
        if len(weights) > 1:
            yield np.cumsum(weights, axis=0)[-1]
        yield from weights

    def _grouped(self, weight_B: Floats) -> Indices:
        """Samples assigned to the reference unit's replicas, and there to its micro-batches."""
        order = np.empty(self.batch, np.intp)
        by_segment: defaultdict[tuple[int, int], defaultdict[int, list[_Cell]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for cell in self._cells:
            by_segment[cell.segment][cell.replica].append(cell)
        for (start, stop), replicas in by_segment.items():
            counts = [sum(c.stop - c.start for c in cells) for cells in replicas.values()]
            group_B = assign_groups(weight_B[start:stop], counts)
            for group, cells in enumerate(replicas.values()):
                samples = start + np.flatnonzero(group_B == group)
                _fill(order, samples, weight_B[samples], cells)
        return order

    def _searched(
        self, grouped: Indices, work: Mapping[str, Floats], seed: int, budget: OrderBudget
    ) -> FoundOrder:
        rows = [p.slowest * work[p.module][grouped] for p in self._module_loads if p.module in work]
        lists: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for index, cell in enumerate(self._cells):
            lists[cell.segment, cell.replica, cell.stop - cell.start].append(index)
        return search_order(
            lambda orders: self._makespans(self._sources(orders, grouped), work),
            self._per_cell(np.array(rows)),
            list(lists.values()),
            seed=seed,
            budget=budget,
        )

    def _per_cell(self, time_FB: Floats) -> Floats:
        # Differences of running sums: other sums round differently on other processors.
        done = np.zeros((len(time_FB), self.batch + 1))
        np.cumsum(time_FB, axis=1, out=done[:, 1:])
        return done[:, [*self._start_C[1:], self.batch]] - done[:, self._start_C]

    def _sources(self, orders_RC: Indices, grouped: Indices) -> Indices:
        """[R, batch]: the sample at each position when cells are ordered so."""
        return grouped[self._start_C[orders_RC][:, self._cell_B] + self._offset_B]


@dataclass(frozen=True, slots=True)
class _Cell:
    """Batch positions [start, stop): a reference micro-batch, cut where no sample may pass."""

    segment: tuple[int, int]
    replica: int
    start: int
    stop: int


def _cuts(program: Program, task: str) -> list[int]:
    """Batch positions that no sample may pass, first and last included."""
    batch = program.batches[task]
    sizes = {loss.sync_batch for loss in program.cross_sample_losses if loss.task == task}
    return sorted({0, batch, *(cut for size in sizes for cut in range(0, batch, size))})


def _cells(reference: Stage, cuts: Sequence[int]) -> Iterator[_Cell]:
    """In order of their positions."""
    spans = sorted((span, d) for d, row in enumerate(reference.microbatches) for span in row)
    for (start, stop), replica in spans:
        for segment in pairwise(cuts):
            low, high = max(start, segment[0]), min(stop, segment[1])
            if low < high:
                yield _Cell(segment, replica, low, high)


def _fill(order: Indices, samples: Indices, weight: Floats, cells: Sequence[_Cell]) -> None:
    """Write a replica's samples at the positions of its cells, cells of equal weight."""
    sizes = [cell.stop - cell.start for cell in cells]
    if max(sizes) == 1:
        order[[cell.start for cell in cells]] = samples
        return
    group = assign_groups(weight, sizes)
    for index, cell in enumerate(cells):
        order[cell.start : cell.stop] = samples[group == index]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModuleLoad:
    """The micro-batches of one module, for the work of each.

    Attributes:
        start: [U], first batch positions of its distinct micro-batches.
        stop: [U], their ends.
        rows: batch positions of a micro-batch to its row in ``start``.
        blocks: of the whole module.
        slowest: forward and backward of its slowest stage, per work.
        replicas: most replicas of a stage.
    """

    module: str
    start: Indices
    stop: Indices
    rows: dict[tuple[int, int], int]
    blocks: int
    slowest: float
    replicas: int

    @classmethod
    def of(cls, stages: Sequence[Stage], module: str) -> _ModuleLoad:
        own = [stage for stage in stages if stage.module == module]
        spans = sorted({span for stage in own for row in stage.microbatches for span in row})
        blocks = max(stage.blocks[1] for stage in own)
        return cls(
            module=module,
            start=np.array([start for start, _ in spans], np.intp),
            stop=np.array([stop for _, stop in spans], np.intp),
            rows={span: row for row, span in enumerate(spans)},
            blocks=blocks,
            slowest=max(sum(_cost(stage, blocks)) for stage in own),
            replicas=max(stage.dp for stage in own),
        )


def _cost(stage: Stage, blocks: int) -> tuple[float, float, float]:
    """Forward, input gradients and weight gradients of a stage per work of a sample."""
    own = stage.blocks[1] - stage.blocks[0]
    forward = own / blocks / stage.tp
    trained = sum(high - low for low, high in stage.trainable) / own
    return (forward, forward, forward * trained) if stage.has_backward else (forward, 0.0, 0.0)


def _affordable_budget(
    recurrence: Recurrence, num_microbatches: int, seconds: float
) -> OrderBudget:
    """The full budget, or the part of it that fits the time."""
    full = full_budget(num_microbatches)
    batches = full.first / 64 + full.generations + full.scans
    needed_s = recurrence.num_levels * batches * _LEVEL_S
    needed_s += recurrence.num_nodes * full.columns * _NODE_S
    share = min(1.0, seconds / needed_s)
    return OrderBudget(
        first=int(full.first * min(1.0, 4 * share)),
        generations=int(full.generations * share),
        scans=int(full.scans * share),
    )
