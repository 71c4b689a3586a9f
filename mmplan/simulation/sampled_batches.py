"""Simulate steps on batches sampled from the data: the spread of iteration times.

The plan's own prediction takes one time for all micro-batches of a size. Here each micro-batch
takes the time of its own samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmplan.arrays import Floats
from mmplan.costs.program_costs import ProgramCosts
from mmplan.costs.sample_work import SampledWork
from mmplan.program.clocks import Durations, replay
from mmplan.program.dependencies import Dependencies, find_dependencies
from mmplan.program.instructions import Compute, Op
from mmplan.program.model import Program, Stage
from mmplan.program.samples import SampleRange
from mmplan.reordering.batch_order import BatchOrder
from mmplan.simulation.step import durations_of

Batch = Mapping[str, Mapping[str, Floats]]  # task, module: work of each sample
RunningWorks = Mapping[tuple[str, str], Sequence[float]]  # task and module: sums of work, from 0
ComputeKey = tuple[int, Op, int, int]  # stage, op, replica, micro-batch

# Sampled batches by default: 64 for a stable 10% quantile, 8 at least to show a spread. In between,
# as many as keep the instructions of all batches below the limit. Chosen by hand.
_MAX_BATCHES = 64
_MIN_BATCHES = 8
_MAX_INSTRUCTIONS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Iteration times of sampled batches: their mean and three quantiles."""

    mean_s: float
    p10_s: float
    p50_s: float
    p90_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """The spread of some times."""
        low, middle, high = (float(q) for q in np.quantile(seconds, (0.1, 0.5, 0.9)))
        return cls(mean_s=float(np.mean(seconds)), p10_s=low, p50_s=middle, p90_s=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSteps:
    """Simulated steps on sampled batches; the fields are those of ``simulate --json``.

    Attributes:
        draws: number of batches.
        samples: of the profile's subset, from which batches are drawn with replacement.
        alike_s: the step's time if all samples had the mean work.
        drawn: batches in the order in which their samples are drawn.
        reordered: the same batches in the order of the runtime; None where it does not reorder.
    """

    draws: int
    samples: int
    alike_s: float
    drawn: Spread
    reordered: Spread | None


def sample_steps(costs: ProgramCosts, *, draws: int | None = None) -> SampledSteps | None:
    """Simulate a program on sampled batches; None where the profile has no data.

    Args:
        costs: of the program.
        draws: number of batches; by default up to 64, fewer for programs of many instructions.

    Raises:
        InvalidInputError: the program deadlocks.
    """
    program = costs.program
    works = _sampled_works(costs)
    if not works:
        return None
    clock = _Clock(costs)
    draws = default_num_batches(program) if draws is None else max(draws, 1)
    batches = [
        {task: work.draw(program.batches[task], number=number) for task, work in works.items()}
        for number in range(draws)
    ]
    orders = {t: BatchOrder(program, t) for t, work in works.items() if work.reordered}
    return SampledSteps(
        draws=draws,
        samples=max(len(work.relative(work.modules[0])) for work in works.values()),
        alike_s=clock.step_s({}),
        drawn=Spread.of([clock.step_s(batch) for batch in batches]),
        reordered=Spread.of(
            [clock.step_s(_reordered(batch, orders, i)) for i, batch in enumerate(batches)]
        )
        if orders
        else None,
    )


def first_batches(costs: ProgramCosts, *, number: int) -> list[Batch]:
    """The first batches of a run, as the runtime orders them; empty where there are no data."""
    program, works = costs.program, _sampled_works(costs)
    orders = {t: BatchOrder(program, t) for t, work in works.items() if work.reordered}
    batches: Iterator[Batch] = (
        {task: work.batch(program.batches[task], number=i) for task, work in works.items()}
        for i in range(number if works else 0)
    )
    return [_reordered(batch, orders, i) for i, batch in enumerate(batches)]


def _sampled_works(costs: ProgramCosts) -> dict[str, SampledWork]:
    known = {task: costs.costs.sampled_work(task) for task in costs.program.batches}
    return {task: work for task, work in known.items() if work is not None}


def running_works(batch: Batch) -> RunningWorks:
    """The running sums of the work of a batch's samples."""
    return {
        (task, module): [0.0, *np.cumsum(values).tolist()]
        for task, work in batch.items()
        for module, values in work.items()
    }


def weighted_samples(stage: Stage, span: SampleRange, works: RunningWorks) -> float:
    """A micro-batch in samples of mean work; each sample is one where the work is not known."""
    start, stop = span
    sums = works.get((stage.task, stage.module))
    # Equal works differ in the last digits of their sums, and free samples may come out negative.
    return stop - start if sums is None else max(round(sums[stop] - sums[start], 9), 0.0)


def default_num_batches(program: Program) -> int:
    """As many sampled batches as can be simulated in seconds."""
    instructions = sum(map(len, program.instructions))
    return min(_MAX_BATCHES, max(_MIN_BATCHES, _MAX_INSTRUCTIONS // max(instructions, 1)))


def _reordered(batch: Batch, orders: Mapping[str, BatchOrder], seed: int) -> Batch:
    ordered = {task: order(batch[task], seed) for task, order in orders.items()}
    return {
        task: {m: w[ordered[task]] if task in ordered else w for m, w in work.items()}
        for task, work in batch.items()
    }


class _Clock:
    """Times one program's step for many batches."""

    def __init__(self, costs: ProgramCosts) -> None:
        self._costs, self._program = costs, costs.program
        self._dependencies: Dependencies = find_dependencies(costs.program)
        self._base: Durations = durations_of(costs.program, costs, self._dependencies)
        self._computes = [list(self._computes_of(rank)) for rank in range(costs.program.num_ranks)]
        self._keys = {key for row in self._computes for _, key in row}
        self._known_s: dict[tuple[int, Op, int, float], float] = {}

    def _computes_of(self, rank: int) -> Iterator[tuple[int, ComputeKey]]:
        """Positions and keys of a rank's computes."""
        replicas = {stage.index: stage.place(rank)[0] for stage in self._program.stages_of(rank)}
        for position, item in enumerate(self._program.instructions[rank]):
            if isinstance(item, Compute):
                yield position, (item.stage, item.op, replicas[item.stage], item.mb)

    def step_s(self, batch: Batch) -> float:
        """Seconds of a step; tasks and modules that the batch does not name have mean work."""
        works = running_works(batch)
        seconds = {key: self._seconds(key, works) for key in self._keys}
        rows = [list(row) for row in self._base.instruction]
        for row, computes in zip(rows, self._computes, strict=True):
            for position, key in computes:
                row[position] = seconds[key]
        clocks = replay(self._dependencies, replace(self._base, instruction=rows))
        return max((row[-1] for row in clocks.end if row), default=0.0)

    def _seconds(self, key: ComputeKey, works: RunningWorks) -> float:
        index, op, replica, mb = key
        stage = self._program.stages[index]
        start, stop = span = stage.microbatches[replica][mb]
        weighted = weighted_samples(stage, span, works)
        known = index, op, stop - start, weighted
        if known not in self._known_s:
            self._known_s[known] = self._costs.work_s(stage, op, stop - start, weighted)
        return self._known_s[known]
