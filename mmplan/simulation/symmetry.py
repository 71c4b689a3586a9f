"""Simulate a plan through its quotient: one representative of each class of components.

Equivalent components (:mod:`mmplan.program.symmetry_classes`) do the same at the same time. One
component of each class is compiled and simulated with the costs of the whole plan: reductions and
syncs over all ranks, optimizer state divided by all replicas, interfaces used by all components of
the class. The other ranks get the values of their representatives. A plan of 600 equal replicas
so takes the time of one.

The ranks of a tensor-parallel group do the same too. Where all units of a rank have the same
group, its first rank is simulated for all. Times and bytes are those of this rank, which has the
most messages of the group, and a message counts as often as the group sends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.processes import rare_collections
from mmplan.program.compile import compile_graph
from mmplan.program.instructions import Op
from mmplan.program.model import (
    CrossSampleLoss,
    Edge,
    LossReduction,
    Program,
    Reduction,
    Stage,
)
from mmplan.program.network import Traffic, exchange, incoming, outgoing
from mmplan.program.symmetry_classes import LoweredPlan, Quotient, lower_plan
from mmplan.schema.plan import Plan, Prediction
from mmplan.simulation.step import Simulation, peak_bytes, prediction, simulate


def predict(plan: Plan, costs: CostModel) -> Prediction:
    """The prediction of :func:`simulated`.

    Raises:
        InvalidInputError: the plan's schedules wait for each other.
    """
    return prediction(simulated(plan, costs)[0], plan)


# A step, whose program has rows of the representative ranks only, and the representative of every
# used rank.
Simulated = tuple[Simulation, Mapping[int, int]]


class BestSteps:
    """The shortest steps that a planner simulated, so that showing its plan simulates nothing."""

    # The chosen plan is among the shortest; chosen by hand, more only take memory.
    _KEPT = 2

    def __init__(self) -> None:
        self._steps: list[tuple[float, Prediction, Simulated]] = []

    def keep(self, predicted: Prediction, step: Simulated) -> None:
        """Remember one more step, with its prediction."""
        self._steps.append((predicted.iteration_s, predicted, step))
        self._steps.sort(key=lambda item: item[0])
        del self._steps[self._KEPT :]

    def of(self, plan: Plan) -> Simulated | None:
        """The step of the plan's prediction; None where it was not kept."""
        found = (step for _, predicted, step in self._steps if predicted is plan.predicted)
        return next(found, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """The program of a plan's quotient: what it holds is known before it is simulated.

    Attributes:
        quotient: None where the program is that of the whole plan.
        held: bytes of each rank with a row at its peak.
    """

    plan: Plan
    program: Program
    costs: ProgramCosts
    quotient: Quotient | None
    held: tuple[float, ...]

    @property
    def num_instructions(self) -> int:
        """Of all rows."""
        return sum(map(len, self.program.instructions))

    @property
    def peak_bytes(self) -> float:
        """Of the fullest rank."""
        return max(self.held)

    @rare_collections()
    def simulated(self) -> Simulated:
        """One step of the plan."""
        step = simulate(self.program, self.costs, held=self.held)
        if self.quotient is None:
            return step, {r: r for r in range(self.plan.devices) if step.used[r]}
        return _expanded(step, self.quotient, self.plan), self.quotient.representative


@rare_collections()
def compiled(plan: Plan, costs: CostModel, lowered: LoweredPlan | None = None) -> CompiledStep:
    """The program of a plan's quotient.

    Args:
        plan: the plan.
        costs: of its modules.
        lowered: the plan lowered, where that is done already.

    Raises:
        InvalidInputError: the plan's schedules wait for each other.
    """
    lowered = lower_plan(plan) if lowered is None else lowered
    program = compile_graph(plan, lowered.simulated_graph, lowered.orders)
    quotient = lowered.quotient
    if quotient is None:
        own = ProgramCosts(program, costs, plan)
    else:
        # The whole plan, with the instructions of the representatives only.
        whole = Program.of(plan, lowered.graph, program.instructions)
        own = _WholeCosts(whole, costs, plan, quotient)
    return CompiledStep(
        plan=plan, program=program, costs=own, quotient=quotient, held=peak_bytes(program, own)
    )


def simulated(plan: Plan, costs: CostModel, lowered: LoweredPlan | None = None) -> Simulated:
    """One step of the plan, simulated through its quotient; see :func:`compiled`."""
    return compiled(plan, costs, lowered).simulated()


class _WholeCosts(ProgramCosts):
    """Costs of a whole plan, asked for stages, reductions and losses of its quotient.

    One node stands for all nodes of a class. On it, each rank stands for all ranks that it
    represents there.
    """

    def __init__(self, program: Program, costs: CostModel, plan: Plan, quotient: Quotient) -> None:
        super().__init__(program, costs, plan)
        self._quotient = quotient

    def message_traffic(
        self, source: int, target: int, edge: Edge, samples: int, backward: bool
    ) -> Traffic | None:
        """What a message, and the messages that it stands for, need of the interfaces."""
        alone = super().message_traffic(source, target, edge, samples, backward)
        if alone is None:
            return None
        number, node = self._quotient.multiplicity, self.costs.cluster.node_of
        classes = self._quotient.node_class
        times = self._messages(edge, backward) * alone.loads[0][1]
        loads = (
            (outgoing(classes[node(source)]), number[source] * times),
            (incoming(classes[node(target)]), number[target] * times),
        )
        return Traffic(seconds=alone.seconds, loads=loads)

    def _messages(self, edge: Edge, backward: bool) -> int:
        """Messages of two groups for one of their representatives: one for each receiving rank."""
        receives = edge.producer if backward else edge.consumer
        return self.program.stages[receives].tp if self._quotient.merges_tp else 1

    def reduce_traffic(self, reduction: Reduction, parts: int = 1) -> Traffic | None:
        """What a reduction over all of its ranks needs of the interfaces of each class of nodes."""
        whole = self._whole_one(reduction)
        # The other shards are reduced at the same time.
        merges = self._quotient.merges_tp
        shards = whole.tp if merges and not isinstance(whole, LossReduction) else 1
        return self._by_node_class(super().reduce_traffic(whole, parts), whole.ranks, shards)

    def gather_traffic(self, loss: CrossSampleLoss) -> Traffic | None:
        """What a gather on all of its ranks needs of the interfaces of each class of nodes."""
        whole = self.program.cross_sample(loss.index)
        return self._by_node_class(super().gather_traffic(whole), whole.ranks, 1)

    def _by_node_class(
        self, alone: Traffic | None, ranks: Sequence[int], times: int
    ) -> Traffic | None:
        """The traffic of so many collectives on one node of each class that has their ranks."""
        if alone is None:
            return None
        nodes = {self.costs.cluster.node_of(rank) for rank in ranks}
        classes = {self._quotient.node_class[node] for node in nodes}
        return Traffic(seconds=alone.seconds, loads=exchange(classes, times * alone.loads[0][1]))

    def compute_s(self, stage: Stage, op: Op, samples: int) -> float:
        """Seconds of a compute with all replicas of its stage."""
        return super().compute_s(self.program.stages[stage.index], op, samples)

    def activation_bytes(self, stage: Stage, samples: float) -> float:
        """Bytes that a device holds of one micro-batch until its backward has run."""
        return super().activation_bytes(self.program.stages[stage.index], samples)

    def static_bytes(self, rank: int) -> float:
        """Weights, gradients and optimizer state; 0 where another rank stands for this one."""
        is_kept = self._quotient.representative.get(rank, rank) == rank
        return super().static_bytes(rank) if is_kept else 0.0

    def gather_s(self, loss: CrossSampleLoss) -> float:
        """Seconds of gathering features on all ranks of the loss."""
        return super().gather_s(self.program.cross_sample(loss.index))

    def sync_s(self, loss: CrossSampleLoss) -> float:
        """Seconds of a batch-sync of all ranks of the loss."""
        return super().sync_s(self.program.cross_sample(loss.index))

    def reduce_s(self, reduction: Reduction) -> float:
        """Seconds of the reduction over all of its ranks."""
        return super().reduce_s(self._whole_one(reduction))

    def reduce_parts(
        self, reduction: Reduction, stages: Sequence[Stage]
    ) -> list[tuple[float, float]]:
        """The parts of the reduction over all of its ranks."""
        of_all = [self.program.stages[stage.index] for stage in stages]
        return super().reduce_parts(self._whole_one(reduction), of_all)

    def _whole_one(self, reduction: Reduction) -> Reduction:
        return self.program.reductions[self._quotient.reductions[reduction.index]]


def _expanded(simulation: Simulation, quotient: Quotient, plan: Plan) -> Simulation:
    """The simulation with every rank of the whole plan in its per-rank values."""

    def expand(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(
            values[quotient.representative.get(rank, rank)] for rank in range(plan.devices)
        )

    return replace(
        simulation,
        busy_s=expand(simulation.busy_s),
        communication_s=expand(simulation.communication_s),
        idle_s=expand(simulation.idle_s),
        used=tuple(rank in quotient.representative for rank in range(plan.devices)),
        peak_bytes=expand(simulation.peak_bytes),
    )
