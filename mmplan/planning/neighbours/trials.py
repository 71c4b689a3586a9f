"""Trials of layouts in simulation, and what they tell of others' bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from mmplan.planning.measured_trials import rounded
from mmplan.planning.neighbours.changes import LayoutChanges
from mmplan.planning.neighbours.estimates import LayoutEstimates
from mmplan.planning.neighbours.layout import LayoutSpace, PlanLayout
from mmplan.planning.unit_schedules import SHORTER
from mmplan.schema.base import ZeroStage
from mmplan.schema.plan import Order, Plan
from mmplan.solvers.problem import Candidate, Request
from mmplan.solvers.search_budget import SearchBudget


class LayoutTrials:
    """Simulates layouts of a request and pays for it.

    Args:
        request: whose plans these are.
        trial: the simulated plan of a candidate, None where it does not fit or cannot run, and the
            bytes that it needs at least, 0 or infinite where nobody knows. It spends from the
            budget what it takes.
        critical_modules: (task, module) that the plan of the last trial waits for; empty where
            nobody knows.
        trial_s: seconds of a quiet core that a trial takes about.
        budget: of all trials and estimates.

    Attributes:
        space, estimates, changes: of the layouts.
        evaluations: trials so far.
    """

    def __init__(
        self,
        request: Request,
        *,
        trial: Callable[[Candidate], tuple[Plan | None, float]],
        critical_modules: Callable[[Plan], frozenset[tuple[str, str]]],
        trial_s: float,
        budget: SearchBudget,
    ) -> None:
        self.budget, self.trial_s = budget, trial_s
        self.memory_bytes = request.cluster.device.memory_bytes
        self.space = LayoutSpace(request)
        self.estimates = LayoutEstimates(self.space)
        self.changes = LayoutChanges(self.space, self.estimates)
        self.evaluations = 0
        self._trial, self._critical_modules = trial, critical_modules
        # By :func:`_held_by` the least factor by which plans held more activations than estimated.
        self._factors: dict[tuple[object, ...], float] = {}

    def candidate(self, layout: PlanLayout) -> Candidate | None:
        """Its units and order; None where tensor-parallel groups would cross nodes."""
        units = self.space.units_of(layout)
        if units is None:
            return None
        is_ordered = layout.shares_devices and layout != layout.in_usual_order()
        return Candidate(
            units=units,
            objective_s=0.0,
            in_turn=layout.in_turn,
            zero=cast(ZeroStage, self.space.plan_zero(layout)),
            order=Order(rule=layout.rule) if is_ordered else None,
            is_timed=is_ordered and layout.timed,
        )

    def run(self, layout: PlanLayout, candidate: Candidate) -> tuple[Plan | None, float]:
        """The plan of a layout, None where it does not fit or cannot run; and bytes, or 0."""
        plan, num_bytes = self._trial(candidate)
        self.evaluations += 1
        fixed_bytes, active_bytes = self.estimates.fullest(layout)
        if 0 < num_bytes < math.inf and active_bytes:
            key = _held_by(layout)
            factor = (num_bytes - fixed_bytes) / active_bytes
            self._factors[key] = max(1.0, min(factor, self._factors.get(key, math.inf)))
        return plan, num_bytes

    def critical_units(self, plan: Plan) -> set[int]:
        """Units of a layout that the step waits for, by the last trial; empty if nobody knows."""
        found = self._critical_modules(plan)
        return {
            index
            for index, (_, problem, module) in enumerate(self.space.modules)
            if (problem.task.name, module) in found
        }

    def needed(self, layout: PlanLayout) -> float:
        """Bytes of the fullest device, by the estimate and what others held of activations."""
        self.budget.spend(self.changes.estimate_s)
        fixed_bytes, active_bytes = self.estimates.fullest(layout)
        return fixed_bytes + self._factors.get(_held_by(layout), 1.0) * active_bytes

    def least_bytes(self, layout: PlanLayout) -> float:
        """Bytes of the fullest device at least."""
        self.budget.spend(self.changes.estimate_s)
        return self.estimates.least_bytes(layout)

    def small_budget(self) -> SearchBudget:
        """For making layouts that are unlike the starts."""
        return self.budget.part(self.budget.left_s / 8)


def degrees_of(layout: PlanLayout) -> tuple[object, ...]:
    """Degrees and places of all units, whatever their micro-batches and leads."""
    places = ((c.tp, c.pp, c.vpp, c.dp, c.offset, c.items) for c in layout.choices)
    return layout.groups, *places


def _held_by(layout: PlanLayout) -> tuple[object, ...]:
    """What estimates of bytes are corrected by."""
    return layout.zero, layout.backwards, layout.in_turn, *degrees_of(layout)


def merit(plan: Plan) -> tuple[float, int]:
    """Less is better: the step, then its device-seconds; split backwards must gain something."""
    split = any(unit.schedule.split_backward for unit in plan.units)
    step_s = plan.predicted.iteration_s / (SHORTER if split else 1)
    return rounded(step_s), plan.predicted.devices_used
