"""What runs its forward again in backward, where the workload leaves that to the plan.

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
from mmplan.schema.recompute import Recompute
from mmplan.schema.workload import Workload, recomputing

PlanOf = Callable[[Workload], Plan]
# The modules that recompute, with ``full`` or the number of their blocks.
_Choice = frozenset[tuple[str, Recompute]]
# Of a module's number of blocks; each is a search for a plan. Chosen by hand.
_HALVINGS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A workload whose recomputation is known.

    Attributes:
        workload: with ``recompute`` of each module.
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
    turned over, and stays so where the step gets shorter. Then each module that recomputes does so
    with fewer of its blocks, half of them first, as long as the step gets shorter: what need not
    run again costs no seconds, until memory asks for another plan.

    Args:
        workload: with modules whose recomputation is to be found.
        plan_of: plans a settled workload.

    Raises:
        InfeasibleError: nothing fits, whatever is recomputed.
    """
    free = free_modules(workload)
    found: dict[_Choice, Plan] = {}
    fault: InfeasibleError | None = None

    def takes_s(choice: _Choice) -> float:
        nonlocal fault
        try:
            found[choice] = plan_of(recomputing(workload, dict(choice)))
        except InfeasibleError as error:
            fault = error
            return math.inf
        return rounded(found[choice].predicted.iteration_s)

    none, every = _Choice(), _Choice(_pair(module, "full") for module in free)
    best, best_s = none, takes_s(none)
    if (every_s := takes_s(every)) < best_s:
        best, best_s = every, every_s
    for module in free if len(free) > 1 else ():
        if (turned_s := takes_s(other := best ^ {_pair(module, "full")})) < best_s:
            best, best_s = other, turned_s
    if best not in found:
        assert fault is not None
        raise fault
    numbers = {name: m.blocks for t in found[best].tasks.values() for name, m in t.modules.items()}
    for module in sorted(dict(best)):
        others = frozenset(pair for pair in best if pair[0] != module)
        too_few, enough = 0, numbers[module]
        for _ in range(_HALVINGS):
            count = (too_few + enough) // 2
            if count == too_few:
                break
            if (fewer_s := takes_s(other := others | {_pair(module, count)})) < best_s:
                best, best_s, enough = other, fewer_s, count
            else:
                too_few = count
    note = _note(best, none, found)
    return Settled(workload=recomputing(workload, dict(best)), plan=found[best], note=note)


def _pair(module: str, value: Recompute) -> tuple[str, Recompute]:
    return module, value


def _note(best: _Choice, none: _Choice, found: dict[_Choice, Plan]) -> str:
    if not best:
        return "no module recomputes: the step would take no less"
    named = [
        name if value == "full" else f"{value} blocks of {name}"
        for name, value in sorted(best, key=lambda pair: pair[0])
    ]
    said = f"recompute: full for {', '.join(named)}"
    if none not in found:
        return f"{said}: no plan fits without"
    gain = 1 - found[best].predicted.iteration_s / found[none].predicted.iteration_s
    return f"{said}: the step takes {100 * gain:.1f}% less than with none"
