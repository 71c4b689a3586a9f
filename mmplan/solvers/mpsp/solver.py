"""Several tasks over shared modules, their slices side by side on all devices.

Each task's use of a module is a MetaOp (:mod:`mmplan.solvers.mpsp.metaops`): a chain of blocks
whose number of devices may change between any two blocks. All forwards of a round come before its
backwards, which mirror them. The formula is rounds x (end of the forwards + end of the backwards)
on the ranks where the slices are placed, with the transfers between slices, + the reduction of the
gradients. The bound is that of the forwards plus that of the backwards, each the best of the
relaxations in :mod:`mmplan.solvers.mpsp.bounds`, with every MetaOp on its own best degrees; it
knows no links. Method ``wavefront`` is Spindle's scheduler as printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.schema.plan import Unit
from mmplan.solvers.distmm.solver import solve_distmm
from mmplan.solvers.mpsp.bounds import RoundBounds, round_bounds
from mmplan.solvers.mpsp.candidates import MAX_TP_CHOICES, CandidateFinder, PlacedCandidate
from mmplan.solvers.problem import Candidate, Problem, Request, Solution
from mmplan.wording import size

METHODS = {"search": "the best of many schedules", "wavefront": "Spindle's scheduler as printed"}
# Largest number of rounds of a step: it ends the loop. Chosen by hand.
_MAX_ROUNDS = 4096
# Share of the search time that is left, for the bounds.
_BOUND_SHARE = 0.2
# A tp choice is searched where its trial schedules lack less than this share of the memory: the
# search may fit where they do not. Chosen by hand.
_SEARCHED_SHORTFALL = 0.1
# Numbers of rounds that are tried after the first at which staged schedules fit. Chosen by hand.
_FURTHER_ROUNDS = 3
# Candidates within this factor of the best estimate are simulated: estimates do not have every
# message. Chosen by hand.
_SIMULATED_WITHIN = 1.08
# The same for staged schedules, whose estimates may be half too large.
_STAGED_SIMULATED_WITHIN = 1.5
# All candidates are simulated where the best one fills more than this share of the memory: the
# memory is an estimate too, and the best one may not fit.
_NEARLY_FULL = 0.95


def solve_mpsp(request: Request) -> Solution:
    """The best schedules of all tasks' MetaOps, placed on ranks.

    Raises:
        InvalidInputError: an unknown method.
        InfeasibleError: a module fits no degrees, or no placement fits the memory.
    """
    method = request.method or "search"
    if method not in METHODS:
        raise InvalidInputError(
            f"--method {method}: mpsp knows {' and '.join(METHODS)}", hint="choose one of these"
        )
    try:
        return _solve(request, method)
    except InfeasibleError:
        if len(request.tasks) > 1 or method != "search":
            raise
        # A single task without slices that fit, or whose pins need pipeline stages.
        return replace(solve_distmm(replace(request, method=None)), solver="mpsp", method=method)


def _solve(request: Request, method: str) -> Solution:
    """Try rounds until a schedule fits the memory."""
    finder = CandidateFinder(request, method)
    memory_bytes = request.cluster.device.memory_bytes
    found: list[PlacedCandidate] = []
    bounds: dict[int, RoundBounds] = {}
    further = 0
    # More rounds save activations only: this is False once trial schedules lack memory without.
    can_fit_unstaged = True
    for rounds in _rounds(finder.problems):
        scalings = finder.scalings(rounds)
        at_own_best = finder.emitter(scalings.at_own_best(), rounds)
        if not finder.activations_fit(at_own_best):
            continue
        choices = scalings.tp_choices()[:MAX_TP_CHOICES]
        shortfalls = (
            [finder.trial_shortfall(own, rounds) for own in choices] if can_fit_unstaged else []
        )
        can_fit_unstaged = any(of_parameters <= 0 for _, of_parameters in shortfalls)
        searched = [
            own
            for own, (shortfall_bytes, _) in zip(choices, shortfalls, strict=False)
            if shortfall_bytes < _SEARCHED_SHORTFALL * memory_bytes
        ]
        if method == "search" and len(searched) < len(choices) and not further:
            found += finder.staged(rounds)
        if searched or any(item.rounds == rounds for item in found):
            limit_s = finder.left_s() * _BOUND_SHARE
            bounds[rounds] = round_bounds(at_own_best.instance, rounds, limit_s)
        if searched:
            bound_s = bounds[rounds].total_s
            found += finder.searched(searched, rounds, bound_s, is_first=not found)
        if not all(item.staged for item in found) or further > _FURTHER_ROUNDS:
            break
        if not (can_fit_unstaged or (finder.staged_can_fit and not found)):
            break
        if found:
            further += 1
    if not found:
        raise InfeasibleError(
            f"mpsp: no placement fits, a device lacks {size(finder.least_shortfall_bytes)} at best",
            hint="use more devices, zero: 1, recompute: full, or a smaller sync_batch",
        )
    return _solution(request, method, found, bounds)


def _rounds(problems: Mapping[str, Problem]) -> Iterator[int]:
    """Numbers of rounds that every task's batch can be cut into, whole sync batches in each."""
    rounds = 1
    while rounds <= _MAX_ROUNDS:
        if all(
            p.rounds % rounds == 0 if p.task.sync_batches else p.task.batch % rounds == 0
            for p in problems.values()
        ):
            yield rounds
        rounds *= 2


def _solution(
    request: Request, method: str, found: list[PlacedCandidate], bounds: Mapping[int, RoundBounds]
) -> Solution:
    """The candidates that are worth a simulation, and the bound over their numbers of rounds."""
    found.sort(key=lambda item: item.candidate.objective_s)
    least_s = found[0].candidate.objective_s
    is_full = found[0].peak_bytes > _NEARLY_FULL * request.cluster.device.memory_bytes
    kept: dict[tuple[Unit, ...], Candidate] = {}
    for item in found:
        factor = _STAGED_SIMULATED_WITHIN if item.staged else _SIMULATED_WITHIN
        if is_full or item.candidate.objective_s <= least_s * factor:
            kept.setdefault(item.candidate.units, item.candidate)
    best_of_kind = {c.kind: c for c in reversed(kept.values())}
    others = [c for c in kept.values() if best_of_kind[c.kind] is not c]
    candidates = sorted([*best_of_kind.values(), *others[:1]], key=lambda c: c.objective_s)
    if len(request.tasks) == 1 and method == "search":
        candidates += _of_one_task(request)
    any_staged = any(item.staged for item in found)
    values = {
        rounds: rounds * (own.area_s if any_staged else own.total_s)
        for rounds, own in bounds.items()
        if any(item.rounds == rounds for item in found)
    }
    rounds = min(values, key=lambda rounds: values[rounds])
    return Solution(
        solver="mpsp",
        method=method,
        candidates=tuple(candidates),
        formula_bound_s=values[rounds],
        notes=(bounds[rounds].note,),
        curves=bounds[rounds].curves,
    )


def _of_one_task(request: Request) -> list[Candidate]:
    """The candidates of ``distmm`` for a single task, so that the plan is no worse."""
    try:
        solution = solve_distmm(replace(request, method=None))
    except InfeasibleError:
        return []
    return [
        replace(c, closed_form=solution.closed_form and c.closed_form) for c in solution.candidates
    ]
