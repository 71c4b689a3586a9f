"""Which modules run their forward again in backward, where the workload leaves that to the plan.

Recomputation costs a forward, and pays where memory is what keeps a pipeline short or a
micro-batch small. An encoder before a deep pipeline holds as many micro-batches as there are stages
after it: no formula of one module sees what its bytes cost the others, so whole plans decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mmplan.errors import InfeasibleError
from mmplan.planning.measured_trials import rounded
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload, recomputing

PlanOf = Callable[[Workload], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A workload whose recomputation is known.

    Attributes:
        workload: with ``full`` or ``none`` for each module.
        plan: of it.
        note: what was chosen, and what it brings.
    """

    workload: Workload
    plan: Plan
    note: str


def free_modules(workload: Workload) -> tuple[str, ...]:
    """Modules with ``recompute: auto``."""
    return tuple(n for n, spec in workload.modules.items() if spec.recompute == "auto")


def best_recomputation(workload: Workload, plan_of: PlanOf) -> Settled:
    """The recomputation with the shortest step.

    No module recomputes first, then all do; from the better of both on, one module at a time is
    turned over, and stays so where the step gets shorter: two plans, and one for each module.

    Args:
        workload: with modules whose recomputation is to be found.
        plan_of: plans a settled workload.

    Raises:
        InfeasibleError: nothing fits, whatever is recomputed.
    """
    free = free_modules(workload)
    none, every = frozenset[str](), frozenset(free)
    found: dict[frozenset[str], Plan] = {}
    fault: InfeasibleError | None = None

    def takes_s(full: frozenset[str]) -> float:
        nonlocal fault
        try:
            found[full] = plan_of(recomputing(workload, full))
        except InfeasibleError as error:
            fault = error
            return math.inf
        return rounded(found[full].predicted.iteration_s)

    best, best_s = none, takes_s(none)
    if (every_s := takes_s(every)) < best_s:
        best, best_s = every, every_s
    for module in free if len(free) > 1 else ():
        if (turned_s := takes_s(other := best ^ {module})) < best_s:
            best, best_s = other, turned_s
    if best not in found:
        assert fault is not None
        raise fault
    note = _note(best, none, {full: plan.predicted.iteration_s for full, plan in found.items()})
    return Settled(workload=recomputing(workload, best), plan=found[best], note=note)


def _note(best: frozenset[str], none: frozenset[str], seconds: dict[frozenset[str], float]) -> str:
    if not best:
        return "no module recomputes: the step would take no less"
    said = f"recompute: full for {', '.join(sorted(best))}"
    if none not in seconds:
        return f"{said}: no plan fits without"
    gain = 1 - seconds[best] / seconds[none]
    return f"{said}: the step takes {100 * gain:.1f}% less than with none"
