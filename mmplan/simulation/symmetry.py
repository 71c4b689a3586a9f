"""Simulate a plan without simulating replicas that do the same.

Parts of a plan that are alike (:mod:`mmplan.simulation.symmetry_classes`) do the same at the same
time: every instruction of one has its twin in the other. One part of each kind is compiled and
simulated, with the costs of the whole plan (reductions and syncs over all ranks, optimizer state
divided by all replicas, interfaces used by all parts of the kind), and the other ranks get what
their twins have. A plan of 600 equal replicas so takes the time of one.

The ranks of a tensor-parallel group do the same too. Where all units that a rank runs have
the same group there, its first rank is simulated for all, with times and bytes of one rank
of the group, and what it sends counts as often as the group sends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.processes import rare_collections
from mmplan.program.compile import compile_graph
from mmplan.program.instructions import Op
from mmplan.program.model import (
    BlockReduction,
    CrossSampleLoss,
    Edge,
    Graph,
    Program,
    Reduction,
    Stage,
)
from mmplan.program.network import Traffic, exchange, incoming, outgoing
from mmplan.schema.plan import Plan, Prediction
from mmplan.simulation.step import Simulation, prediction, simulate
from mmplan.simulation.symmetry_classes import Excerpt, Outline, outline


def predict(plan: Plan, costs: CostModel) -> Prediction:
    """What simulating the plan gives, in less time where parts of it are alike.

    Raises:
        InvalidInputError: the plan's schedules wait for each other.
    """
    return prediction(simulated(plan, costs)[0], plan)


# A step, whose program has rows of some ranks only, and for every rank that is used the one of
# them that does the same.
Simulated = tuple[Simulation, Mapping[int, int]]


class BestSteps:
    """The shortest steps that a planner simulated, for whoever shows the plan that it chose."""

    _KEPT = 2

    def __init__(self) -> None:
        self._steps: list[tuple[float, Prediction, Simulated]] = []

    def keep(self, predicted: Prediction, step: Simulated) -> None:
        """One more step, with what is predicted by it."""
        self._steps.append((predicted.iteration_s, predicted, step))
        self._steps.sort(key=lambda item: item[0])
        del self._steps[self._KEPT :]

    def of(self, plan: Plan) -> Simulated | None:
        """The step that the plan's prediction is of; None where it was not kept."""
        found = (step for _, predicted, step in self._steps if predicted is plan.predicted)
        return next(found, None)


@rare_collections()
def simulated(plan: Plan, costs: CostModel, drawn: Outline | None = None) -> Simulated:
    """One step of the plan, in less time where parts of it are alike.

    Args:
        plan: the plan.
        costs: of its modules.
        drawn: its outline, where it is there already.

    Raises:
        InvalidInputError: the plan's schedules wait for each other.
    """
    drawn = outline(plan) if drawn is None else drawn
    program, found = compile_graph(plan, drawn.enough, drawn.orders), drawn.found
    if found is None:
        whole_step = simulate(program, ProgramCosts(program, costs, plan))
        return whole_step, {r: r for r in range(plan.devices) if whole_step.used[r]}
    simulation = simulate(program, _WholeCosts(_whole(program, drawn.graph), costs, plan, found))
    return _expanded(simulation, found, plan), found.twin


def _whole(program: Program, graph: Graph) -> Program:
    """The program with all that the whole plan has but its other rows."""
    return replace(
        program,
        stages=tuple(graph.stages),
        edges=tuple(graph.edges),
        losses=tuple(graph.losses),
        reductions=tuple(graph.reductions),
    )


class _WholeCosts(ProgramCosts):
    """Costs of a whole plan, of whose program only some rows are there.

    The simulation asks with what the excerpt's program has; the answer is the whole one's. Of
    all nodes of a kind there is one, and on it every rank stands for those that do the same.
    """

    def __init__(self, program: Program, costs: CostModel, plan: Plan, found: Excerpt) -> None:
        super().__init__(program, costs, plan)
        self._found = found

    def message_traffic(
        self, source: int, target: int, edge: Edge, samples: int, backward: bool
    ) -> Traffic | None:
        """What a message and its twins need of the interfaces."""
        alone = super().message_traffic(source, target, edge, samples, backward)
        if alone is None:
            return None
        load, node, kind = self._found.load, self.costs.cluster.node_of, self._found.node_kind
        times = self._messages(edge, backward)
        loads = (
            (outgoing(kind[node(source)]), load[source] * times),
            (incoming(kind[node(target)]), load[target] * times),
        )
        return Traffic(seconds=alone.seconds, loads=loads)

    def _messages(self, edge: Edge, backward: bool) -> int:
        """Messages that groups exchange for one of theirs: each rank that receives takes one."""
        receives = edge.producer if backward else edge.consumer
        return self.program.stages[receives].tp if self._found.folded else 1

    def reduce_traffic(self, reduction: Reduction) -> Traffic | None:
        """What a reduction over all of its ranks needs of the interfaces of each kind of node."""
        whole = self._whole_one(reduction)
        # The other shards are reduced at the same time.
        shards = whole.tp if self._found.folded and isinstance(whole, BlockReduction) else 1
        return self._of_kinds(super().reduce_traffic(whole), whole.ranks, shards)

    def gather_traffic(self, loss: CrossSampleLoss) -> Traffic | None:
        """What a gather on all of its ranks needs of the interfaces of each kind of node."""
        whole = self.program.cross_sample(loss.index)
        return self._of_kinds(super().gather_traffic(whole), whole.ranks, 1)

    def _of_kinds(self, alone: Traffic | None, ranks: Sequence[int], load: float) -> Traffic | None:
        """The traffic of a collective on one node of each kind that has some of its ranks."""
        if alone is None:
            return None
        nodes = {self.costs.cluster.node_of(rank) for rank in ranks}
        kinds = {self._found.node_kind[node] for node in nodes}
        return Traffic(seconds=alone.seconds, loads=exchange(kinds, load))

    def compute_s(self, stage: Stage, op: Op, samples: int) -> float:
        """Seconds of a compute with all replicas of its stage."""
        return super().compute_s(self.program.stages[stage.index], op, samples)

    def activation_bytes(self, stage: Stage, samples: float) -> float:
        """Bytes that a device holds of one micro-batch until its backward has run."""
        return super().activation_bytes(self.program.stages[stage.index], samples)

    def gather_s(self, loss: CrossSampleLoss) -> float:
        """Seconds of gathering features on all ranks of the loss."""
        return super().gather_s(self.program.cross_sample(loss.index))

    def sync_s(self, loss: CrossSampleLoss, batch: int = 0) -> float:
        """Seconds of a batch-sync of all ranks of the loss."""
        return super().sync_s(self.program.cross_sample(loss.index), batch)

    def reduce_s(self, reduction: Reduction) -> float:
        """Seconds of the reduction over all of its ranks."""
        return super().reduce_s(self._whole_one(reduction))

    def _whole_one(self, reduction: Reduction) -> Reduction:
        return self.program.reductions[self._found.reductions[reduction.index]]


def _expanded(simulation: Simulation, found: Excerpt, plan: Plan) -> Simulation:
    """The simulation with every rank of the whole plan in its per-rank values."""

    def expand(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values[found.twin.get(rank, rank)] for rank in range(plan.devices))

    return replace(
        simulation,
        busy_s=expand(simulation.busy_s),
        communication_s=expand(simulation.communication_s),
        idle_s=expand(simulation.idle_s),
        used=tuple(rank in found.twin for rank in range(plan.devices)),
        peak_bytes=expand(simulation.peak_bytes),
    )
