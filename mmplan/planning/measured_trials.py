"""Plans that were simulated, in order of merit, and trials that let real steps decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mmplan.errors import RunFailedError
from mmplan.planning.plan_labels import labelled
from mmplan.schema.plan import Plan, RunnerUp
from mmplan.solvers.problem import Candidate, Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A candidate that was simulated.

    Attributes:
        is_baseline: such a plan is taken only where it is better than all others.
        measured_s: a step's time on the devices at hand, where the plan was run.
    """

    solution: Solution
    candidate: Candidate
    plan: Plan
    is_baseline: bool = False
    measured_s: float | None = None

    @property
    def label(self) -> str:
        """The plan in a few words."""
        return f"{self.solution.solver}: {labelled(self.plan)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Runs of real steps that decide between the plans that are best by simulation.

    Attributes:
        count: plans to run.
        measure: seconds of a step of a plan on the devices at hand. A plan for which it raises
            :class:`RunFailedError` drops out.
    """

    count: int
    measure: Callable[[Plan], float]


# A finalist and the candidate that it was made from.
Finalist = tuple[Tried, Tried]


def run_trials(finalists: Sequence[Finalist], trials: Trials) -> tuple[list[Finalist], list[str]]:
    """Run the first of the finalists; they come first then, fastest first.

    Returns:
        The order, without those that failed, and what is to be said about it.

    Raises:
        RunFailedError: all that were run failed; the first one's.
    """
    ran: list[Finalist] = []
    failed: list[RunFailedError] = []
    told: list[str] = []
    chosen = _distinct(finalists, trials.count)
    for item, origin in chosen:
        try:
            seconds = trials.measure(item.plan)
        except RunFailedError as error:
            failed.append(error)
            told.append(f"{item.label} was run and failed: {error.message}")
        else:
            ran.append((replace(item, measured_s=seconds), origin))
    if not ran:
        raise failed[0]
    ran.sort(key=lambda pair: pair[0].measured_s or 0.0)
    if ran[0][1] is not finalists[0][1]:
        told.append(
            f"chosen by measurement; simulation alone would have chosen {finalists[0][0].label}"
        )
    tried = {id(origin) for _, origin in chosen}
    return [*ran, *(pair for pair in finalists if id(pair[1]) not in tried)], told


def _distinct(finalists: Sequence[Finalist], count: int) -> list[Finalist]:
    """The first of them that do different things: solvers may find the same plan."""
    found: list[Finalist] = []
    for pair in finalists:
        plan = pair[0].plan
        if all((plan.units, plan.waves) != (o.plan.units, o.plan.waves) for o, _ in found):
            found.append(pair)
        if len(found) == count:
            break
    return found


def rank(tried: Tried) -> tuple[float, bool, float]:
    """Less is better: simulated time; then no baseline; then the formula's value."""
    return (
        rounded(tried.plan.predicted.iteration_s),
        tried.is_baseline,
        tried.candidate.objective_s,
    )


def rounded(seconds: float) -> float:
    """Nine digits: plans that differ by rounding alone are equal."""
    return float(f"{seconds:.9g}")


def runner_up(tried: Tried, remark: str = "") -> RunnerUp:
    """What the chosen plan says of another one."""
    return RunnerUp(
        label=f"{tried.label}{remark}",
        objective_s=tried.candidate.objective_s,
        iteration_s=tried.plan.predicted.iteration_s,
        measured_s=tried.measured_s,
    )
