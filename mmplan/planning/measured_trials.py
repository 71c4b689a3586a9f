"""Simulated plans, their order of merit, and trials in which real steps decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from mmplan.errors import RunFailedError
from mmplan.schema.plan import Plan, Prediction, RunnerUp
from mmplan.solvers.problem import Candidate, Solution

# Plans of one task that take less than this times the shortest step are as fast to a reader: the
# simulator is no more exact. Chosen by hand.
AS_FAST = 1.002
# End of the label of a plan that runs several modules on one device.
SHARED = ", shared devices)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPlan:
    """A candidate with its simulated plan.

    Attributes:
        is_baseline: a baseline's plan is chosen only where it is better than all others.
        measured_s: seconds of a real step; None where the plan was not run.
    """

    solution: Solution
    candidate: Candidate
    plan: Plan
    is_baseline: bool = False
    measured_s: float | None = None

    @property
    def label(self) -> str:
        """Solver and degrees."""
        return f"{self.solution.solver}: {plan_label(self.plan)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Runs of real steps that decide between the plans that are best by simulation.

    Attributes:
        count: plans to run.
        measure: seconds of a real step of a plan; a plan for which it raises
            :class:`RunFailedError` drops out.
    """

    count: int
    measure: Callable[[Plan], float]


# A refined plan (other micro-batch order, split backwards) and the plan that it was made from.
Finalist = tuple[SimulatedPlan, SimulatedPlan]


def run_trials(finalists: Sequence[Finalist], trials: Trials) -> tuple[list[Finalist], list[str]]:
    """Run the first finalists and sort them by measured time, before all others.

    Returns:
        The new order without the failed finalists, and notes for the plan.

    Raises:
        RunFailedError: all that were run failed; the first one's.
    """
    ran: list[Finalist] = []
    failed: list[RunFailedError] = []
    notes: list[str] = []
    chosen = _distinct(finalists, trials.count)
    for item, origin in chosen:
        try:
            seconds = trials.measure(item.plan)
        except RunFailedError as error:
            failed.append(error)
            notes.append(f"{item.label} was run and failed: {error.message}")
        else:
            ran.append((replace(item, measured_s=seconds), origin))
    if not ran:
        raise failed[0]
    ran.sort(key=lambda pair: pair[0].measured_s or 0.0)
    if ran[0][1] is not finalists[0][1]:
        notes.append(
            f"chosen by measurement; simulation alone would have chosen {finalists[0][0].label}"
        )
    others = [pair for pair in finalists if not any(pair is run for run in chosen)]
    return [*ran, *others], notes


def _distinct(finalists: Sequence[Finalist], count: int) -> list[Finalist]:
    """The first different plans: several solvers may find the same one."""
    distinct: list[Finalist] = []
    for pair in finalists:
        plan = pair[0].plan
        if all((plan.units, plan.waves) != (o.plan.units, o.plan.waves) for o, _ in distinct):
            distinct.append(pair)
        if len(distinct) == count:
            break
    return distinct


def merit(item: SimulatedPlan) -> tuple[float, bool, float]:
    """Less is better: simulated time; then no baseline; then the formula's value."""
    return (rounded(item.plan.predicted.iteration_s), item.is_baseline, item.candidate.objective_s)


def plainest_first(finalists: Sequence[Finalist]) -> tuple[list[Finalist], list[str]]:
    """Of the plans of one task that are about as fast as the first, the plainest before all others.

    A plan without waves is plainer than one with, and fewer units are plainer than more. Of equally
    plain ones the first stays.

    Args:
        finalists: by merit, least first.

    Returns:
        The new order, and a note on what it costs for the plan.
    """
    first = finalists[0][0].plan
    if len(first.tasks) > 1:
        return list(finalists), []
    limit_s = AS_FAST * first.predicted.iteration_s
    near = [pair for pair in finalists if pair[0].plan.predicted.iteration_s <= limit_s]
    chosen = min(near, key=lambda pair: (bool(pair[0].plan.waves), len(pair[0].plan.units)))
    if chosen is finalists[0]:
        return list(finalists), []
    saved = 1 - first.predicted.iteration_s / chosen[0].plan.predicted.iteration_s
    why = "has no waves" if first.waves and not chosen[0].plan.waves else "has fewer units"
    notes = [f"{finalists[0][0].label} takes {saved:.2%} less time; this plan {why}"]
    return [chosen, *(pair for pair in finalists if pair is not chosen)], notes


def rounded(seconds: float) -> float:
    """Nine digits: plans that differ by rounding alone are equal."""
    return float(f"{seconds:.9g}")


def runner_up(item: SimulatedPlan, remark: str = "") -> RunnerUp:
    """The entry of another plan in the report of the chosen one."""
    return RunnerUp(
        label=f"{item.label}{remark}",
        objective_s=item.candidate.objective_s,
        iteration_s=item.plan.predicted.iteration_s,
        measured_s=item.measured_s,
    )


def plan_label(plan: Plan) -> str:
    """Degrees and largest micro-batch of every unit, and whether units share devices."""
    degrees = ", ".join(
        f"{unit.name} {unit.dp}x{unit.pp}x{unit.tp}" + (f" vpp {unit.vpp}" if unit.vpp > 1 else "")
        for unit in plan.units
    )
    sizes = [
        max((max(row, default=0) for row in unit.microbatches), default=0) for unit in plan.units
    ]
    shown = sizes[:1] if len(set(sizes)) == 1 else sizes
    ranks = [rank for unit in plan.units for rank in set(unit.all_ranks)]
    end = SHARED if len(set(ranks)) < len(ranks) else ")"
    return f"{degrees}, micro-batch {'/'.join(map(str, shown))} (dp x pp x tp{end}"


def peak_bytes(predicted: Prediction) -> float:
    """Predicted peak memory of the device with the highest one."""
    return max(predicted.memory_bytes, default=0.0)


def as_fast_as(plans: Iterable[SimulatedPlan]) -> float:
    """Seconds of the longest step that is as good as the best of some plans."""
    return AS_FAST * min(map(step_s, plans))


def step_s(item: SimulatedPlan) -> float:
    """Seconds of a plan's step, without the last digits."""
    return rounded(item.plan.predicted.iteration_s)
