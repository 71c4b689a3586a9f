"""A module of a disaggregated pipeline as tables: seconds, bytes and stages of its degrees.

Everything about a stage is a sum over its blocks, times curves over the micro-batch size
that do not know the blocks. So all degrees and sizes are computed at once.

Shape suffixes: L = blocks, Q = shapes (pp, vpp), S = stages of a shape that can be its
slowest or fullest, B = micro-batch sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats, Ints
from mmplan.program.schedules.alternating import Alternating
from mmplan.program.schedules.interleaved_1f1b import Interleaved1F1B
from mmplan.solvers.partitioner import module_cuts
from mmplan.solvers.problem import Problem

# Columns of a stage's seconds: the module's forward, its input and its weight gradients, the
# hosted losses; messages: latency, and seconds per sample (times a link's own numbers).
FORWARD, INPUT, WEIGHT, LOSS, INNER, INNER_BYTES, OUTER, OUTER_BYTES = range(8)
# Columns of its bytes: weights and gradients, state, share of the activations held, block
# inputs held (recomputation), both again times the stages after it; communicators: always,
# for the reduction, for the losses of a last stage with dp and tp.
FIXED, STATE, HELD, HELD_AHEAD, INPUTS, INPUTS_AHEAD, GROUPS, REDUCED, HOSTED = range(9)
# The schedules it plans.
ONE_F_ONE_B = Alternating(whole_round=False)
INTERLEAVED = Interleaved1F1B(whole_round=False)
# More stages after a module than any pipeline has: memory sets no limit.
UNLIMITED = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Pipeline degrees of a module, cut into stages.

    Attributes:
        pp: [Q].
        vpp: [Q].
        cuts: the chunks of each shape.
        seconds: [Q, S, 8], columns above; the last stages repeat where there are fewer.
        total: [Q, 8], the same, summed over all stages.
        bytes: [Q, S, 9], columns above, at tp 1.
        total_bytes: [9], the first shape's, summed over its stages.
        gradient_bytes: [Q], of the stage that has the most, at tp 1.
        slack: [Q], micro-batches that interleaved chunks take in beyond what is linear in the
            stages after them: pp at a time.
    """

    pp: Ints
    vpp: Ints
    cuts: tuple[tuple[tuple[int, int], ...], ...]
    seconds: Floats
    total: Floats
    bytes: Floats
    total_bytes: Floats
    gradient_bytes: Floats
    slack: Ints

    @property
    def depth(self) -> Ints:
        """Micro-batches that it takes in before the first of them leaves backwards.

        Interleaved, its first chunk takes in two groups of pp.
        """
        return np.where(self.vpp > 1, 2 * self.pp + self.slack, self.pp)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    """What every block of a module adds to its stage, [L] each.

    Attributes:
        work: share of the module's time.
        passed: 1 where a gradient passes.
        trains: 1 where the weights train.
        held: share of the module's activations.
        parameters: their number.
        input_bytes: of the block's input, per sample.
        cut_bytes: of its output, per sample.
    """

    work: Floats
    passed: Floats
    trains: Floats
    held: Floats
    parameters: Floats
    input_bytes: Floats
    cut_bytes: Floats

    @staticmethod
    def of(problem: Problem, module: str) -> BlockCosts:
        """Read from the cost model."""
        costs, task, count = problem.costs, problem.task.name, problem.blocks(module)
        each = [(b, b + 1) for b in range(count)]
        cut_bytes = [costs.cut_bytes(task=task, module=module, after_block=b) for b in range(count)]
        facts = [problem.stage(module, block) for block in each]
        return BlockCosts(
            work=np.array([costs.work_share(task=task, module=module, blocks=b) for b in each]),
            passed=np.array([float(fact.passed is not None) for fact in facts]),
            trains=np.array([float(bool(fact.trainable)) for fact in facts]),
            held=np.array(
                [costs.activation_share(task=task, module=module, blocks=b) for b in each]
            ),
            parameters=np.array(
                [costs.parameters(task=task, module=module, blocks=b) for b in each]
            ),
            input_bytes=np.array([cut_bytes[max(b - 1, 0)] for b in range(count)]),
            cut_bytes=np.array(cut_bytes),
        )


def module_shapes(problem: Problem, module: str, shapes: Sequence[tuple[int, int]]) -> Shapes:
    """Tables of a module's stages for some (pp, vpp)."""
    blocks = BlockCosts.of(problem, module)
    cuts = module_cuts(problem, module, max(pp * vpp for pp, vpp in shapes))
    tables = [_Tables(problem, module, blocks, cuts[pp * vpp - 1], pp, vpp) for pp, vpp in shapes]
    return Shapes(
        pp=np.array([pp for pp, _ in shapes], dtype=np.int64),
        vpp=np.array([vpp for _, vpp in shapes], dtype=np.int64),
        cuts=tuple(cuts[pp * vpp - 1] for pp, vpp in shapes),
        seconds=_padded([_largest(table.seconds) for table in tables]),
        total=np.array([table.seconds.sum(axis=0) for table in tables]),
        bytes=_padded([_largest(table.bytes) for table in tables]),
        total_bytes=tables[0].bytes.sum(axis=0),
        gradient_bytes=np.array([table.gradient_bytes for table in tables]),
        slack=np.array([table.slack for table in tables], dtype=np.int64),
    )


class _Tables:
    """One shape's stages: [pp, 8] seconds and [pp, 9] bytes; a rank's chunks are added up."""

    def __init__(
        self,
        problem: Problem,
        module: str,
        blocks: BlockCosts,
        cuts: tuple[tuple[int, int], ...],
        pp: int,
        vpp: int,
    ) -> None:
        self._problem, self._module, self._blocks = problem, module, blocks
        self._starts = np.array([start for start, _ in cuts])
        count = len(cuts)
        again = problem.request.workload.modules[module].recompute == "full"
        ahead = np.array([ONE_F_ONE_B.in_flight(1, count - 1 - c) for c in range(count)])
        passed = self._summed(blocks.work * blocks.passed)
        held = self._summed(blocks.held * blocks.passed)
        inputs = self._summed(blocks.input_bytes * blocks.passed)
        fixed, state = self._parameter_bytes()
        seconds = [
            self._summed(blocks.work) + (passed if again else 0.0),
            passed,
            self._summed(blocks.work * blocks.trains),
            (np.arange(count) == count - 1).astype(np.float64),
            *self._messages(cuts),
        ]
        held_bytes = [fixed, state, held, held * ahead, inputs, inputs * ahead]
        chunk = np.array([ONE_F_ONE_B.position(c, pp) for c in range(count)])
        self.seconds = _by_rank(np.stack(seconds, axis=1), chunk, pp)
        bytes_held = _by_rank(np.stack(held_bytes, axis=1), chunk, pp)
        self.slack = pp - 1 if vpp > 1 and problem.consumers(module) else 0
        if vpp > 1:
            chunks = [INTERLEAVED.chunks_in_flight(p, pp, vpp, self.slack) for p in range(pp)]
            for column, each in ((HELD_AHEAD, held), (INPUTS_AHEAD, inputs)):
                bytes_held[:, column] = np.array(chunks) * each.reshape(vpp, pp).max(axis=0)
        self.bytes = np.hstack([bytes_held, self._communicators(cuts, chunk, pp, vpp)])
        trained = _by_rank(self._summed(blocks.parameters * blocks.trains)[:, None], chunk, pp)
        self.gradient_bytes = float(trained.max()) * problem.costs.gradient_bytes

    def _summed(self, per_block: Floats) -> Floats:
        return np.add.reduceat(per_block, self._starts)

    def _parameter_bytes(self) -> tuple[Floats, Floats]:
        """Bytes at dp 1 without the part that ZeRO-1 divides, and that part."""
        costs, blocks = self._problem.costs, self._blocks
        one, two = (costs.bytes_per_parameter(trainable=True, dp=dp) for dp in (1, 2))
        frozen = costs.bytes_per_parameter(trainable=False)
        trained = self._summed(blocks.parameters * blocks.trains)
        rest = self._summed(blocks.parameters * (1 - blocks.trains))
        shared = 2 * (one - two)
        return trained * (one - shared) + rest * frozen, trained * shared

    def _messages(self, cuts: tuple[tuple[int, int], ...]) -> list[Floats]:
        """Messages after each stage, there and back: numbers and bytes per sample."""
        problem, module = self._problem, self._module
        count = len(cuts)
        last = np.arange(count) == count - 1
        edges = bool(problem.consumers(module))
        back = np.array(
            [problem.stage(module, cuts[c + 1]).input_gradient for c in range(count - 1)]
            + [problem.makes_gradient(module)],
            dtype=np.float64,
        )
        number = 1.0 + back
        size = number * self._blocks.cut_bytes[[stop - 1 for _, stop in cuts]]
        outer = last & edges
        return [
            np.where(last, 0.0, number),
            np.where(last, 0.0, size),
            np.where(outer, number, 0.0),
            np.where(outer, size, 0.0),
        ]

    def _communicators(
        self, cuts: tuple[tuple[int, int], ...], chunk: Ints, pp: int, vpp: int
    ) -> Floats:
        """[pp, 3]: communicators whatever dp is, of the reduction, of hosted losses."""
        problem, module = self._problem, self._module
        edges = bool(problem.producers(module) or problem.consumers(module))
        several = problem.devices > 1
        # All ranks, and messages forward and back.
        fixed = np.full(pp, float(several) + 2.0 * (pp * vpp > 1 or edges))
        trained = self._summed(self._blocks.parameters * self._blocks.trains) > 0
        reduced = _by_rank(trained[:, None].astype(np.float64), chunk, pp)
        hosts = (np.arange(pp) == pp - 1) & bool(problem.hosted_losses(module))
        return np.stack([fixed, np.minimum(reduced[:, 0], 1.0), hosts.astype(np.float64)], axis=1)


def _by_rank(per_chunk: Floats, rank: NDArray[np.int64], pp: int) -> Floats:
    result = np.zeros((pp, per_chunk.shape[1]))
    np.add.at(result, rank, per_chunk)
    return result


def _largest(rows: Floats) -> Floats:
    """Rows that no other row equals or exceeds in every column."""
    rows = np.unique(rows, axis=0)
    exceeded = np.all(rows[:, None] <= rows[None], axis=2)
    np.fill_diagonal(exceeded, False)
    return rows[~np.any(exceeded, axis=1)]


def _padded(rows: Sequence[Floats]) -> Floats:
    most = max(map(len, rows))
    return np.stack([row[np.minimum(np.arange(most), len(row) - 1)] for row in rows])
