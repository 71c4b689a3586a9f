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

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mmplan.costs.hardware import load_hardware
from mmplan.costs.links import collective_s
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.schema.plan import Unit, Wave
from mmplan.solvers.distmm.solver import solve_distmm
from mmplan.solvers.mpsp.bounds import RoundBounds, curve, level_bound, round_bounds
from mmplan.solvers.mpsp.initial_schedules import portfolio
from mmplan.solvers.mpsp.instance import Chain, GradientSum, Instance
from mmplan.solvers.mpsp.list_schedule import ChainSchedule, Evaluator
from mmplan.solvers.mpsp.metaops import contract
from mmplan.solvers.mpsp.placement import Placed, UnplacedSlice, place, spread_s
from mmplan.solvers.mpsp.scaling_curves import Scaling, Scalings
from mmplan.solvers.mpsp.search import find_schedules, sequential_schedule
from mmplan.solvers.mpsp.staged_schedules import staged_schedules
from mmplan.solvers.mpsp.to_plan import BlockMemory, Emitter, waves
from mmplan.solvers.mpsp.wavefront import wavefront
from mmplan.solvers.problem import Candidate, Problem, Request, Solution
from mmplan.solvers.search_budget import SearchBudget
from mmplan.wording import size

METHODS = {"search": "the best of many schedules", "wavefront": "Spindle's scheduler as printed"}
# Share of the search time that is left, for the first tp choice. Chosen by hand.
_FIRST_CHOICE_SHARE = 0.5
# The same for each other one, which is less promising.
_OTHER_CHOICE_SHARE = 0.25
# Share of the budget for placing a schedule by memory alone.
_PLACEMENT_SHARE = 0.1
# Ways to choose tp for shared modules that are tried, most promising first.
MAX_TP_CHOICES = 4
# Share of the memory by which bytes of placements may be more than what a device holds; by hand.
_OVERRATED = 0.05
# So often with as much more as was lacking: with more room other placements are the best.
_LARGER = 4
# Sums of bytes in another order are equal up to this share of the memory.
_ROUNDING = 1e-9
# Micro-batches of staged schedules at least: with fewer a pipeline idles between its stages.
_STAGED_MICROBATCHES = 32
# Staged schedules are kept within this factor of the best: their estimates compare well.
_STAGED_WITHIN = 1.03
# A step has at most 2 to the power of this rounds: it ends the loop. Chosen by hand.
_MAX_DOUBLINGS = 12
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
# For placements in the order of time alone.
_NO_SEARCH = SearchBudget(0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCandidate:
    """A candidate, and what decides whether it is simulated.

    Attributes:
        rounds: of a step.
        peak_bytes: on the device that holds most.
        staged: its slices follow each other micro-batch by micro-batch.
    """

    candidate: Candidate
    rounds: int
    peak_bytes: float
    staged: bool


class CandidateFinder:
    """Finds candidates for one number of rounds after another.

    Trial schedules, made without a search, tell how much memory is missing. Candidates are staged
    schedules, for models that no device holds, and the schedules that a search finds.

    Attributes:
        problems: by task.
        ops: the MetaOps of all tasks.
        least_shortfall_bytes: of a device, over all placements that failed.
        staged_can_fit: False once staged schedules did not even fit without activations.
    """

    def __init__(self, request: Request, method: str) -> None:
        self._request, self._method = request, method
        self._budget = SearchBudget(request.budget_s)
        self.problems = {
            name: Problem(request=request, task=task) for name, task in request.tasks.items()
        }
        self._block_memory = BlockMemory(self.problems)
        self.ops = contract(request.workload, request.tasks)
        self._memory_bytes = request.cluster.device.memory_bytes
        self.least_shortfall_bytes = math.inf
        self.staged_can_fit = True

    def part(self, share: float) -> SearchBudget:
        """A share of what searches still have."""
        return self._budget.part(share * self._budget.left_s)

    def emitter(self, scalings: Sequence[Scaling], rounds: int) -> Emitter:
        """The instance of these curves, as slices, units and waves."""
        tasks = list(self._request.tasks)
        instance = Instance(
            chains=tuple(own.chain(tasks.index(own.op.task)) for own in scalings),
            devices=self._request.devices,
            sums=tuple(self._sums(scalings, rounds)),
        )
        return Emitter(self.problems, self._block_memory, scalings, instance, rounds)

    def _sums(self, scalings: Sequence[Scaling], rounds: int) -> Iterator[GradientSum]:
        """Of each module, a round's share of its sum after the last round.

        What one task has alone is summed beside its last backward, which gets slower by that.
        """
        beside = 1 / load_hardware().compute_slowdown(self._request.cluster.device)
        chains: defaultdict[str, list[int]] = defaultdict(list)
        for m, own in enumerate(scalings):
            chains[own.op.owner].append(m)
        for members in chains.values():
            first = scalings[members[0]]
            widest = first.allocations[-1]
            num_bytes = float(
                self._block_memory.parameters(first.op, widest.tp, widest.dp)[1].sum()
            )
            share = (1.0 if len(members) > 1 else 1 - beside) / rounds
            if num_bytes:
                seconds = partial(self._sum_s, num_bytes, widest.tp, share)
                yield GradientSum(chains=tuple(members), seconds=seconds)

    def _sum_s(self, num_bytes: float, tp: int, share: float, devices: int) -> float:
        """That share of the seconds of a sum over the first devices, each ``tp`` of them a rank."""
        ranks = range(0, devices, tp)
        if len(ranks) == 1:
            return 0.0
        return share * collective_s(self._request.cluster, "all_reduce", ranks, num_bytes)

    def activations_fit(self, emitter: Emitter) -> bool:
        """Whether a round's activations fit the devices if all share them equally."""
        least_bytes = emitter.least_activation_bytes() / self._request.devices
        shortfall_bytes = least_bytes - self._memory_bytes
        if shortfall_bytes > 0:
            self._failed(shortfall_bytes)
        return shortfall_bytes <= 0

    def trial_shortfall(self, scalings: Sequence[Scaling], rounds: int) -> tuple[float, float]:
        """The memory shortfall in bytes of schedules made without a search, 0 where one fits.

        Returns:
            For parameters and activations, and for parameters alone.
        """
        emitter = self.emitter(scalings, rounds)
        instance, evaluator = emitter.instance, Evaluator(emitter.instance)
        span_s = max(float(c.both_s.sum(axis=1).min()) for c in instance.chains)
        targets = [[span_s] * len(instance.chains)]
        total = without_activations = math.inf
        for schedule in (sequential_schedule(instance), next(portfolio(instance, targets, (1.0,)))):
            slices = emitter.slices(schedule, evaluator.run(schedule).starts)
            total = min(total, self._shortfall(slices))
            if total > 0:
                shortfall = self._shortfall_without_activations(slices)
                without_activations = min(without_activations, shortfall)
        if total == 0:
            return 0.0, 0.0
        self._failed(total)
        return total, without_activations

    def staged(self, rounds: int) -> list[PlacedCandidate]:
        """Schedules that divide the blocks among groups of devices, the fewest groups that fit."""
        found: list[PlacedCandidate] = []
        fits_without_activations = False
        scalings = Scalings(self.ops, self.problems, rounds, _STAGED_MICROBATCHES)
        for chosen in scalings.tp_choices()[:MAX_TP_CHOICES]:
            emitter = self.emitter(chosen, rounds)
            fixed_bytes = emitter.least_fixed_bytes()
            for staged in staged_schedules(chosen, emitter.instance, fixed_bytes):
                if staged.fixed_bytes > self._memory_bytes:
                    self._failed(staged.fixed_bytes - self._memory_bytes)
                    continue
                slices = emitter.slices(staged.schedule, staged.starts, staged.rank_ranges)
                placed = self._place(slices, _NO_SEARCH, streamed=True)
                if isinstance(placed, Placed):
                    label = f"blocks divided among {staged.groups} groups of devices"
                    found.append(
                        _candidate(
                            emitter, staged.schedule, slices, placed, rounds, label, staged=True
                        )
                    )
                    break
                self._failed(placed)
                if not fits_without_activations:
                    fits_without_activations = not self._shortfall_without_activations(slices)
        self.staged_can_fit = bool(found) or fits_without_activations
        found.sort(key=lambda item: item.candidate.objective_s)
        return [
            item
            for item in found
            if item.candidate.objective_s <= _STAGED_WITHIN * found[0].candidate.objective_s
        ]

    def searched(
        self,
        choices: Sequence[Sequence[Scaling]],
        rounds: int,
        bounds: RoundBounds,
        *,
        is_first: bool,
    ) -> Iterator[PlacedCandidate]:
        """Schedules of each tp choice that a search finds and that fit the memory.

        Args:
            bounds: of a round.
            is_first: there is no candidate yet; placing may then take more than the search time.
        """
        request, best_s, fits = self._request, math.inf, not is_first
        for position, chosen in enumerate(choices):
            emitter = self.emitter(chosen, rounds)
            instance = emitter.instance
            curves = [curve(c.counts, c.both_s) for c in instance.chains]
            if level_bound(curves, request.devices) * rounds >= best_s:
                continue
            share = _FIRST_CHOICE_SHARE if is_first and not position else _OTHER_CHOICE_SHARE
            budget = self.part(share)
            # The cost of a cut is known once slices have ranks: nothing, or about the estimate.
            instances = [instance]
            if self._method == "search":
                instances.append(self._with_cut_costs(chosen, instance, rounds))
            schedules: list[tuple[Instance, str, ChainSchedule]] = []
            each_s = budget.left_s / len(instances)
            for own in instances:
                found = self._schedules(own, bounds, budget.part(each_s))
                for label, schedule in found.items():
                    if all(schedule != other for _, _, other in schedules):
                        schedules.append((own, label, schedule))
            for own, label, schedule in schedules:
                slices = emitter.slices(schedule, Evaluator(own).run(schedule).starts)
                limit_s = request.budget_s * _PLACEMENT_SHARE
                own_budget = self.part(1.0).part(limit_s) if fits else SearchBudget(limit_s)
                placed = self._place(slices, own_budget)
                if isinstance(placed, Placed):
                    candidate = _candidate(
                        emitter, schedule, slices, placed, rounds, label, staged=False
                    )
                    best_s = min(best_s, candidate.candidate.objective_s)
                    fits = True
                    yield candidate
                else:
                    self._failed(placed)

    def _schedules(
        self, instance: Instance, bounds: RoundBounds, budget: SearchBudget
    ) -> dict[str, ChainSchedule]:
        """The method's schedules by label."""
        if self._method == "wavefront":
            found = wavefront(instance)
            label = f"waves as printed: {found.waves}, {found.seconds:.4g} s with their barriers"
            return {label: found.schedule}
        return find_schedules(
            instance,
            bound_s=bounds.total_s,
            configurations=bounds.configurations,
            budget=budget,
        )

    def _with_cut_costs(
        self, scalings: Sequence[Scaling], instance: Instance, rounds: int
    ) -> Instance:
        """The instance with estimated waits at cuts, which one micro-batch's transfer causes."""
        request = self._request
        chains: list[Chain] = []
        for own, chain in zip(scalings, instance.chains, strict=True):
            op, widest = own.op, own.allocations[-1]
            share = -(-op.batch // rounds // widest.dp)
            samples = op.batch / rounds / -(-share // widest.size)
            problem = self.problems[op.task]
            moved = [samples * problem.output_bytes(op.module, b) for b in range(chain.blocks - 1)]
            cut_s = [spread_s(request.cluster, request.devices, size) for size in moved]
            chains.append(replace(chain, cut_s=np.array([0.0, *cut_s])))
        return replace(instance, chains=tuple(chains))

    def _failed(self, shortfall_bytes: float) -> None:
        self.least_shortfall_bytes = min(self.least_shortfall_bytes, shortfall_bytes)

    def _shortfall_without_activations(self, slices: Sequence[UnplacedSlice]) -> float:
        return self._shortfall([replace(own, activation_bytes=0.0) for own in slices])

    def _shortfall(self, slices: Sequence[UnplacedSlice]) -> float:
        placed = self._place(slices, _NO_SEARCH)
        return 0.0 if isinstance(placed, Placed) else placed

    def _place(
        self, slices: Sequence[UnplacedSlice], budget: SearchBudget, *, streamed: bool = False
    ) -> Placed | float:
        request = self._request
        return place(slices, request.cluster, request.devices, budget=budget, streamed=streamed)


def _candidate(
    emitter: Emitter,
    schedule: ChainSchedule,
    slices: Sequence[UnplacedSlice],
    placed: Placed,
    rounds: int,
    label: str,
    *,
    staged: bool,
) -> PlacedCandidate:
    peak_bytes = max(placed.memory_bytes)
    mean_bytes = sum(placed.memory_bytes) / len(placed.memory_bytes)
    imbalance = peak_bytes / mean_bytes if mean_bytes else 1.0
    notes = [f"{label}; the peak device holds {imbalance:.3g} x the mean memory"]
    if rounds > 1:
        notes.append(f"the waves run {rounds} times a step, each on 1/{rounds} of the batches")
    units = emitter.units(schedule, placed)
    candidate = Candidate(
        units=units,
        waves=waves(units, slices, placed),
        objective_s=rounds * (placed.forward_s + placed.backward_s) + placed.reduce_s,
        closed_form=False,
        kind=label,
        notes=tuple(notes),
    )
    return PlacedCandidate(candidate=candidate, rounds=rounds, peak_bytes=peak_bytes, staged=staged)


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
    """The best schedules that fit the memory, or a little more."""
    memory_bytes = request.cluster.device.memory_bytes
    shortfall_bytes, found, bounds = _fitting(request, method)
    room_bytes, lacking_bytes = memory_bytes, shortfall_bytes
    for _ in range(_LARGER):
        # What a simulation counts may fit: it knows what is held at one time.
        room_bytes = room_bytes * (1 + _ROUNDING) + lacking_bytes
        if found or room_bytes > (1 + _OVERRATED) * memory_bytes:
            break
        device = request.cluster.device.model_copy(update={"memory_bytes": room_bytes})
        cluster = request.cluster.model_copy(update={"device": device})
        lacking_bytes, found, bounds = _fitting(replace(request, cluster=cluster), method)
    if not found:
        raise InfeasibleError(
            f"mpsp: no placement fits, a device lacks {size(shortfall_bytes)} at best",
            hint="use more devices, zero: 1, recompute: full, or a smaller sync_batch",
        )
    return _solution(request, method, found, bounds)


def _fitting(
    request: Request, method: str
) -> tuple[float, list[PlacedCandidate], dict[int, RoundBounds]]:
    """Try rounds until a schedule fits: the least shortfall, what was found, and bounds."""
    finder = CandidateFinder(request, method)
    memory_bytes = request.cluster.device.memory_bytes
    found: list[PlacedCandidate] = []
    bounds: dict[int, RoundBounds] = {}
    further = 0
    # More rounds save activations only: this is False once trial schedules lack memory without.
    can_fit_unstaged = True
    for rounds in _rounds(finder.problems):
        scalings = Scalings(finder.ops, finder.problems, rounds)
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
            budget = finder.part(_BOUND_SHARE)
            bounds[rounds] = round_bounds(at_own_best.instance, rounds, budget)
        if searched:
            found += finder.searched(searched, rounds, bounds[rounds], is_first=not found)
        if not all(item.staged for item in found) or further > _FURTHER_ROUNDS:
            break
        if not (can_fit_unstaged or (finder.staged_can_fit and not found)):
            break
        if found:
            further += 1
    return finder.least_shortfall_bytes, found, bounds


def _rounds(problems: Mapping[str, Problem]) -> Iterator[int]:
    """Numbers of rounds that every task's batch can be cut into, whole sync batches in each."""
    for rounds in (2**i for i in range(_MAX_DOUBLINGS + 1)):
        if all(
            p.rounds % rounds == 0 if p.task.sync_batches else p.task.batch % rounds == 0
            for p in problems.values()
        ):
            yield rounds


def _solution(
    request: Request, method: str, found: list[PlacedCandidate], bounds: Mapping[int, RoundBounds]
) -> Solution:
    """The candidates that are worth a simulation, and the bound over their numbers of rounds."""
    found.sort(key=lambda item: item.candidate.objective_s)
    least_s = found[0].candidate.objective_s
    is_full = found[0].peak_bytes > _NEARLY_FULL * request.cluster.device.memory_bytes
    kept: dict[tuple[tuple[Unit, ...], tuple[Wave, ...]], Candidate] = {}
    for item in found:
        factor = _STAGED_SIMULATED_WITHIN if item.staged else _SIMULATED_WITHIN
        if is_full or item.candidate.objective_s <= least_s * factor:
            kept.setdefault((item.candidate.units, item.candidate.waves), item.candidate)
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
    solution = request.solved.get("distmm")
    try:
        solution = solution or solve_distmm(replace(request, method=None))
    except InfeasibleError:
        return []
    return [
        replace(c, closed_form=solution.closed_form and c.closed_form) for c in solution.candidates
    ]
