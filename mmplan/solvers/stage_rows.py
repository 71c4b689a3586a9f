"""A module cut into pipeline stages: rows of the cost table for bytes, one for each position.

Shape suffixes: C = chunks of a pipeline, P = positions, B = (replicas, micro-batch size).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import numpy as np

from mmplan.arrays import Floats, Indices, Ints
from mmplan.program.schedules.alternating import Alternating
from mmplan.program.schedules.interleaved_1f1b import Interleaved1F1B
from mmplan.program.schedules.registry import POLICIES
from mmplan.schema.plan import ScheduleKind
from mmplan.solvers.communicators import PlacedModules, communicator_counts
from mmplan.solvers.messages import StageMessages, bytes_beside, stage_messages
from mmplan.solvers.problem import Blocks, Problem

# Columns of a position's bytes at tp 1: parameters that train and others, share of the activations
# held, outputs held of recomputed blocks, messages carried, all three again times the micro-batches
# that the stages after it have first; those stages; messages to wait for
# (:class:`mmplan.solvers.messages.StageMessages`); communicators: always, and what tp, dp, and both
# together add; and what a group of micro-batches that is longer than pp by one adds to those held.
TRAINED_NUMBERS, FROZEN_NUMBERS = range(2)
HELD, INPUTS, CARRIED = range(2, 5)
HELD_AHEAD, INPUTS_AHEAD, CARRIED_AHEAD, STAGES_AFTER = range(5, 9)
RETURNS, RECEIVES, KEPT, GROUPS, OF_TP, OF_DP, OF_BOTH = range(9, 16)
HELD_LONGER, INPUTS_LONGER, CARRIED_LONGER = range(16, 19)
NUM_COLUMNS = 19
# The orders of chunks: of one on each position, and of several.
ONE_F_ONE_B = Alternating(whole_round=False)
INTERLEAVED = Interleaved1F1B(whole_round=False)


def positions(count: int, pp: int) -> Ints:
    """[C] the pipeline position of each of ``count`` chunks."""
    return np.array([ONE_F_ONE_B.position(c, pp) for c in range(count)])


def summed_by_position(per_chunk: Floats, pp: int) -> Floats:
    """[P, columns] of [C, columns]: the chunks of a position added up."""
    result = np.zeros((pp, per_chunk.shape[1]))
    np.add.at(result, positions(len(per_chunk), pp), per_chunk)
    return result


def stage_rows(
    problem: Problem,
    module: str,
    cuts: tuple[Blocks, ...],
    pp: int,
    placed: PlacedModules | None = None,
    of_stage: Callable[[Blocks], StageMessages] | None = None,
) -> Floats:
    """[P, 19], columns above.

    Args:
        problem: the task.
        module: of the task.
        cuts: its chunks.
        pp: positions.
        placed: the module, and others on the same devices: their communicators are not counted.
            Default: it is alone there.
        of_stage: a stage's messages, where they are known.
    """
    own, count = problem.module_costs(module).stages(cuts), len(cuts)
    vpp = count // pp
    after = np.arange(count)[::-1]
    if of_stage is None:
        of_stage = partial(stage_messages, problem, module, placed=placed or {})
    messages = list(map(of_stage, cuts))
    per_chunk = np.zeros((count, NUM_COLUMNS))
    per_chunk[:, TRAINED_NUMBERS], per_chunk[:, FROZEN_NUMBERS] = own.trained, own.frozen
    held = np.stack([own.held, own.outputs, [each.carried for each in messages]], axis=1)
    per_chunk[:, HELD : CARRIED + 1] = held
    per_chunk[:, HELD_AHEAD : CARRIED_AHEAD + 1] = held * ONE_F_ONE_B.in_flight(1, after[:, None])
    waits = [(each.returned, each.received, each.kept) for each in messages]
    per_chunk[:, RETURNS : KEPT + 1] = waits
    rows = summed_by_position(per_chunk, pp)
    rows[:, STAGES_AFTER] = after[:pp]
    if vpp > 1:
        most = held.reshape(vpp, pp, 3).max(axis=0)

        def held_by_groups(size: int) -> Floats:
            # For the stages after it a module takes in a group at a time: all but one at once.
            slack = size - 1 if problem.consumers(module) else 0
            chunks = [INTERLEAVED.chunks_in_flight(p, pp, vpp, size, slack) for p in range(pp)]
            return np.array(chunks)[:, None] * most

        ahead = held_by_groups(pp)
        rows[:, HELD_AHEAD : CARRIED_AHEAD + 1] = ahead
        rows[:, HELD_LONGER : CARRIED_LONGER + 1] = held_by_groups(pp + 1) - ahead
    if problem.request.cluster.device.communicator_bytes and placed is None:
        one, tp, dp, both = (
            communicator_counts(problem, module, cuts, tp=tp, pp=pp, dp=dp)
            for tp, dp in ((1, 1), (2, 1), (1, 2), (2, 2))
        )
        rows[:, GROUPS : OF_BOTH + 1] = np.stack(
            [one, tp - one, dp - one, both - tp - dp + one], axis=1
        )
    return rows


def largest_rows(rows: Floats) -> Indices:
    """Rows [n, columns] that no other one reaches in every column; of equal ones the first."""
    reached = np.all(rows[:, None] <= rows[None], axis=2)
    # Equal rows reach each other: of these only by one before it.
    by_one_before = np.tri(len(rows), k=-1, dtype=np.bool_)
    return np.flatnonzero(~np.any(reached & (by_one_before | ~reached.T), axis=1))


class StageBytes:
    """Bytes on the devices of stages, for degrees and micro-batches at once.

    Args:
        problem: its task.
        module: of the task.
        rows: [..., P, 19] of :func:`stage_rows`.

    Results have the shape [..., P, B], with axes of ``tp`` before.
    """

    def __init__(self, problem: Problem, module: str, rows: Floats) -> None:
        self._costs, self._rounds = problem.module_costs(module), problem.rounds
        self._each = problem.request.cluster.device.communicator_bytes
        self._columns = np.moveaxis(rows, -1, 0)[..., None]

    def of(self, rows: Ints) -> StageBytes:
        """[P] of those rows, each with a tp, dp and micro-batch of its own: all arguments [P]."""
        some = copy.copy(self)
        some._columns = self._columns[:, rows, 0]
        return some

    def fixed_bytes(self, tp: int | Ints, dp: Ints, *, in_rounds: bool = False) -> Floats:
        """Parameters and communicators (:meth:`ModuleCosts.parameter_bytes`)."""
        columns = self._columns
        numbers = columns[TRAINED_NUMBERS], columns[FROZEN_NUMBERS]
        parameters = self._costs.parameter_bytes(*numbers, tp=tp, dp=dp, in_rounds=in_rounds)
        if not self._each:
            return parameters
        groups = (
            columns[GROUPS]
            + columns[OF_TP] * np.greater(tp, 1)
            + columns[OF_DP] * np.greater(dp, 1)
            + columns[OF_BOTH] * (np.greater(dp, 1) & np.greater(tp, 1))
        )
        return parameters + groups * self._each

    def held_bytes(
        self,
        tp: int | Ints,
        size: Ints | Floats,
        activation: Floats | None = None,
        *,
        first: int = HELD,
    ) -> Floats:
        """Activations and messages of one micro-batch in flight.

        Args:
            tp: of the stages.
            size: of the micro-batch.
            activation: bytes of the whole module, where there are several ``tp``.
            first: column: ``HELD_AHEAD`` for all that 1F1B has in flight for the module's own
                stages, ``HELD_LONGER`` for what a longer group adds to those.
        """
        held, outputs, carried = self._columns[first : first + 3]
        own = self._costs.held_bytes(held, outputs, tp=tp, size=size, activation=activation)
        return own + carried * size

    def bytes_beside(self, size: Ints | Floats, steps: int | Ints) -> Floats:
        """Messages beside those that micro-batches in flight carry, of so many in a step."""
        returned, received, kept = self._columns[RETURNS : KEPT + 1]
        return bytes_beside(returned, received, kept, steps) * size

    def active_bytes(
        self,
        tp: int,
        size: Ints | Floats,
        count: Ints,
        kind: ScheduleKind,
        *,
        lead: int,
        later: int = 0,
    ) -> Floats:
        """Activations and messages of a step.

        Args:
            tp: of the stages.
            size: of the micro-batches.
            count: micro-batches of a round, K.
            kind: order of the stages.
            lead: micro-batches that a stage runs ahead of the next one.
            later: forwards that stages of other modules must have first.
        """
        ahead = lead * self._columns[STAGES_AFTER] + later
        flights = POLICIES[kind].held_of_step(count, self._rounds, ahead)
        beside = self.bytes_beside(size, self._rounds * count)
        return self.held_bytes(tp, size) * flights + beside
