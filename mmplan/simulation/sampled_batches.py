"""Simulate steps on batches drawn from the data: how iteration times spread.

The plan's own prediction takes one time for all micro-batches of a size. Here each takes the
time of the samples that are in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmplan.arrays import Floats
from mmplan.costs.program_costs import ProgramCosts
from mmplan.costs.sample_work import SampledWork
from mmplan.program.clocks import Durations, replay
from mmplan.program.dependencies import Wiring, wire
from mmplan.program.instructions import Compute, Op
from mmplan.program.model import Program
from mmplan.reordering.batch_order import BatchOrder
from mmplan.simulation.step import durations_of

Batch = Mapping[str, Mapping[str, Floats]]  # task, module: work of each sample
Key = tuple[int, Op, int, int]  # stage, op, replica, micro-batch

# Draws at most and at least, and instructions to replay in all of them.
MOST_DRAWS, FEWEST_DRAWS = 64, 8
_INSTRUCTIONS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Iteration times of the drawn batches: their mean and three quantiles."""

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
    """Simulated steps on drawn batches.

    Attributes:
        draws: batches.
        samples: of the profile's subset, from which they are drawn with replacement.
        alike_s: the step's time if all samples were worth the mean.
        drawn: batches in the order in which they are drawn.
        reordered: the same batches as the runtime orders them; None where it does not.
    """

    draws: int
    samples: int
    alike_s: float
    drawn: Spread
    reordered: Spread | None


def sample_steps(costs: ProgramCosts, *, draws: int | None = None) -> SampledSteps | None:
    """Simulate a program on drawn batches; None where the profile has no data.

    Args:
        costs: of the program.
        draws: batches; by default up to 64, fewer for programs of many instructions.

    Raises:
        InvalidInputError: the program deadlocks.
    """
    program = costs.program
    known = {task: costs.costs.sampled_work(task) for task in program.batches}
    works = {task: work for task, work in known.items() if work is not None}
    if not works:
        return None
    clock = _Clock(costs)
    draws = default_draws(program) if draws is None else max(draws, 1)
    batches = [_draw(program, works, number) for number in range(draws)]
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
    """The first batches of a run, in the order in which it takes their samples.

    None where the profile has no data: then nothing tells one batch from another.
    """
    program = costs.program
    known = {task: costs.costs.sampled_work(task) for task in program.batches}
    works = {task: work for task, work in known.items() if work is not None}
    orders = {t: BatchOrder(program, t) for t, work in works.items() if work.reordered}
    batches: Iterator[Batch] = (
        {task: work.batch(program.batches[task], number=i) for task, work in works.items()}
        for i in range(number if works else 0)
    )
    return [_reordered(batch, orders, i) for i, batch in enumerate(batches)]


def running_works(batch: Batch) -> dict[tuple[str, str], list[float]]:
    """Task and module to the running sums of its samples' work, from 0."""
    return {
        (task, module): [0.0, *np.cumsum(values).tolist()]
        for task, work in batch.items()
        for module, values in work.items()
    }


def default_draws(program: Program) -> int:
    """Draws that do not take long."""
    instructions = sum(map(len, program.instructions))
    return min(MOST_DRAWS, max(FEWEST_DRAWS, _INSTRUCTIONS // max(instructions, 1)))


def _draw(program: Program, works: Mapping[str, SampledWork], number: int) -> Batch:
    return {task: work.draw(program.batches[task], number=number) for task, work in works.items()}


def _reordered(batch: Batch, orders: Mapping[str, BatchOrder], seed: int) -> Batch:
    ordered = {task: order(batch[task], seed) for task, order in orders.items()}
    return {
        task: {m: w[ordered[task]] if task in ordered else w for m, w in work.items()}
        for task, work in batch.items()
    }


class _Clock:
    """Times a program's step again and again, with other times of its computes."""

    def __init__(self, costs: ProgramCosts) -> None:
        self._costs, self._program = costs, costs.program
        self._wiring: Wiring = wire(costs.program)
        self._base: Durations = durations_of(costs.program, costs, self._wiring)
        self._places = [list(self._computes(rank)) for rank in range(costs.program.num_ranks)]
        self._keys = {key for row in self._places for _, key in row}
        self._known_s: dict[tuple[int, Op, int, float], float] = {}

    def _computes(self, rank: int) -> Iterator[tuple[int, Key]]:
        """Positions of a rank's computes, and whose they are."""
        replicas = {stage.index: stage.place(rank)[0] for stage in self._program.stages_of(rank)}
        for position, item in enumerate(self._program.instructions[rank]):
            if isinstance(item, Compute):
                yield position, (item.stage, item.op, replicas[item.stage], item.mb)

    def step_s(self, batch: Batch) -> float:
        """Seconds of a step; tasks and modules that the batch does not name are of mean work."""
        done = running_works(batch)
        seconds = {key: self._seconds(key, done) for key in self._keys}
        rows = [list(row) for row in self._base.instruction]
        for row, places in zip(rows, self._places, strict=True):
            for position, key in places:
                row[position] = seconds[key]
        clocks = replay(self._wiring, replace(self._base, instruction=rows))
        return max((row[-1] for row in clocks.end if row), default=0.0)

    def _seconds(self, key: Key, done: Mapping[tuple[str, str], Sequence[float]]) -> float:
        index, op, replica, mb = key
        stage = self._program.stages[index]
        start, stop = stage.microbatches[replica][mb]
        sums = done.get((stage.task, stage.module))
        # Sums of the same works differ in their last digits; an empty one may be below nothing.
        worth = stop - start if sums is None else max(round(sums[stop] - sums[start], 9), 0.0)
        known = index, op, stop - start, worth
        if known not in self._known_s:
            self._known_s[known] = self._costs.work_s(stage, op, stop - start, worth)
        return self._known_s[known]
