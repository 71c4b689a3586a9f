"""What pictures of a compared plan need, small enough to travel between processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from mmplan.costs.cost_model import CostModel
from mmplan.program.trace import trace_events
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.simulation.symmetry import BestSteps, simulated
from mmplan.simulation.utilisation import ModuleUse, module_uses

# Most rows of a plan's timeline, and how many where fewer would show everything that ranks do.
SHOWN_RANKS, FEWEST_RANKS = 12, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """What pictures of a plan need.

    Attributes:
        events: Chrome trace slices of some ranks of its simulated step.
        uses: its modules', most work first.
    """

    events: tuple[dict[str, Any], ...]
    uses: tuple[ModuleUse, ...]


def details_of(plan: Plan, profile: Profile, steps: BestSteps) -> Details:
    """Some ranks' events and all modules' use of their devices, of a plan's simulated step.

    Args:
        plan: to simulate, where that was not done.
        profile: what it costs.
        steps: that planning simulated.
    """
    known = steps.of(plan)
    if known is None:
        known = simulated(plan, CostModel(profile, plan.cluster, plan.training))
    simulation, twins = known
    shown = sorted({twins[rank] for rank in _shown_ranks(plan)})
    timed = (event for rank in shown for event in simulation.events_of(rank))
    events = trace_events(simulation.program, timed, process_name=plan.solver.name)
    return Details(
        events=tuple(event for event in events if event["ph"] == "X" and event["dur"] > 0),
        uses=tuple(module_uses(simulation, plan.cluster.device.peak_flops, twins)),
    )


def _shown_ranks(plan: Plan) -> list[int]:
    """A rank of each set of stages that some rank runs; seconds ones where these are few."""
    stages: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    for unit in plan.units:
        for _, p, group in unit.grid.groups():
            stages[group[0]].append((unit.name, p))
    alike: defaultdict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for rank, does in stages.items():
        alike[tuple(does)].append(rank)
    ordered = [rank for row in zip_longest(*alike.values()) for rank in row if rank is not None]
    if len(alike) <= SHOWN_RANKS:
        return ordered[: max(FEWEST_RANKS, len(alike))]
    return evenly(ordered[: len(alike)], SHOWN_RANKS)


def evenly(items: Sequence[int], most: int) -> list[int]:
    """At most so many of them, the first and the last among them."""
    if len(items) <= most or most < 2:
        return list(items[:most])
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]
