"""Which stages of a plan are the heavy ones, where its blocks cannot be cut evenly.

Under 1F1B a step is shorter with heavy stages early, which hold the most micro-batches: they take
memory. On ranks of several units heavy stages would add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mmplan.schema.base import Range
from mmplan.schema.plan import Plan, Unit
from mmplan.solvers.partitioner import module_stages
from mmplan.solvers.problem import Problem, Request

_Cut = tuple[Range, ...]


class StageCuts:
    """The cuts of a request's modules, with heavy stages late and early.

    Args:
        request: whose plans are cut otherwise.
    """

    def __init__(self, request: Request) -> None:
        self._problems = {
            name: Problem(request=request, task=task) for name, task in request.tasks.items()
        }

    def early(self, plan: Plan) -> Plan:
        """Heavy stages early in units with ranks of their own; the plan itself where they are."""
        if all(len(unit.blocks) == 1 for unit in plan.units):
            return plan
        users = Counter(rank for unit in plan.units for rank in unit.all_ranks)
        alone = (u for u in plan.units if all(users[rank] == 1 for rank in u.all_ranks))
        pairs = ((unit, *self._both(unit)) for unit in alone)
        return _with(plan, {unit.name: early for unit, late, early in pairs if unit.blocks == late})

    def turned(self, plan: Plan) -> Plan:
        """Heavy stages early where they are late and late where they are early."""
        cuts = dict[str, _Cut]()
        for unit in plan.units:
            late, early = self._both(unit)
            cuts[unit.name] = {late: early, early: late}.get(unit.blocks, unit.blocks)
        return _with(plan, cuts)

    def _both(self, unit: Unit) -> tuple[_Cut, _Cut]:
        """The cut of solvers, and that with heavy stages early."""
        problem, stages = self._problems[unit.task], len(unit.blocks)
        if stages == 1:
            return unit.blocks, unit.blocks
        late = module_stages(problem, unit.module, stages)
        return late, module_stages(problem, unit.module, stages, heavy_early=True)


def _with(plan: Plan, cuts: Mapping[str, _Cut]) -> Plan:
    """The plan with other cuts of some units; itself where they are its own."""
    units = tuple(
        unit
        if cuts.get(unit.name, unit.blocks) == unit.blocks
        else unit.model_copy(update={"blocks": cuts[unit.name]})
        for unit in plan.units
    )
    return plan if units == plan.units else plan.model_copy(update={"units": units})
