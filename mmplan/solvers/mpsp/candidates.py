"""Candidate plans of one number of rounds: schedules with ranks that fit the memory.

Trial schedules, made without a search, tell how much memory is missing. Candidates are staged
schedules, for models that no device holds, and the schedules that a search finds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmplan.solvers.mpsp.bounds import curve, level_bound
from mmplan.solvers.mpsp.initial_schedules import portfolio
from mmplan.solvers.mpsp.instance import Chain, Instance
from mmplan.solvers.mpsp.list_schedule import ChainSchedule, Evaluator
from mmplan.solvers.mpsp.metaops import contract
from mmplan.solvers.mpsp.placement import Placed, place
from mmplan.solvers.mpsp.scaling_curves import Scaling, Scalings
from mmplan.solvers.mpsp.search import find_schedules, sequential_schedule
from mmplan.solvers.mpsp.slices import UnplacedSlice
from mmplan.solvers.mpsp.staged_schedules import staged_schedules
from mmplan.solvers.mpsp.to_plan import BlockMemory, Emitter
from mmplan.solvers.mpsp.transfer_costs import spread_s
from mmplan.solvers.mpsp.wavefront import wavefront
from mmplan.solvers.problem import Candidate, Problem, Request

# Least share of the budget for the search. Chosen by hand: less finds worse schedules.
_MIN_SEARCH_SHARE = 0.3
# Largest share of the budget for the search. Chosen by hand: the rest is for simulating.
_MAX_SEARCH_SHARE = 0.5
# Share of the budget that neither the search nor the simulation plans with.
_RESERVE_SHARE = 0.1
# Plans that are to be simulated within the budget.
_SIMULATED_PLANS = 3
# Seconds that one compute of a plan takes to simulate. It depends on the machine.
_SIMULATED_COMPUTE_S = 4e-5
# Share of the search time that is left, for the first tp choice. Chosen by hand.
_FIRST_CHOICE_SHARE = 0.5
# The same for each other one, which is less promising.
_OTHER_CHOICE_SHARE = 0.25
# Share of the budget for placing a schedule by memory alone.
_PLACEMENT_SHARE = 0.1
# Ways to choose tp for shared modules that are tried, most promising first.
MAX_TP_CHOICES = 4
# Micro-batches of staged schedules at least: with fewer a pipeline idles between its stages.
_STAGED_MICROBATCHES = 32
# Staged schedules are kept within this factor of the best: their estimates compare well.
_STAGED_WITHIN = 1.03


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

    Attributes:
        problems: by task.
        least_shortfall_bytes: of a device, over all placements that failed.
        staged_can_fit: False once staged schedules did not even fit without activations.
    """

    def __init__(self, request: Request, method: str) -> None:
        self._request, self._method = request, method
        self._begun = time.monotonic()
        self._until = self._begun + _MAX_SEARCH_SHARE * request.budget_s
        self.problems = {
            name: Problem(request=request, task=task) for name, task in request.tasks.items()
        }
        self._block_memory = BlockMemory(self.problems)
        self._ops = contract(request.workload, request.tasks)
        self._memory_bytes = request.cluster.device.memory_bytes
        self.least_shortfall_bytes = math.inf
        self.staged_can_fit = True

    def left_s(self) -> float:
        """Seconds that searches still have."""
        return max(0.0, self._until - time.monotonic())

    def scalings(self, rounds: int, *, least_microbatches: int = 1) -> Scalings:
        """Scaling curves of all MetaOps."""
        return Scalings(self._ops, self.problems, rounds, least_microbatches=least_microbatches)

    def emitter(self, scalings: Sequence[Scaling], rounds: int) -> Emitter:
        """The instance of these curves, as slices, units and waves."""
        tasks = list(self._request.tasks)
        instance = Instance(
            chains=tuple(own.chain(tasks.index(own.op.task)) for own in scalings),
            devices=self._request.devices,
        )
        return Emitter(self.problems, self._block_memory, scalings, instance, rounds)

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
            self._reserve_simulations(slices, rounds)
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
        scalings = self.scalings(rounds, least_microbatches=_STAGED_MICROBATCHES)
        for chosen in scalings.tp_choices()[:MAX_TP_CHOICES]:
            emitter = self.emitter(chosen, rounds)
            fixed_bytes = emitter.least_fixed_bytes()
            for staged in staged_schedules(chosen, emitter.instance, fixed_bytes):
                if staged.fixed_bytes > self._memory_bytes:
                    self._failed(staged.fixed_bytes - self._memory_bytes)
                    continue
                slices = emitter.slices(staged.schedule, staged.starts, staged.rank_ranges)
                placed = self._place(slices, 0.0, streamed=True)
                if isinstance(placed, Placed):
                    label = f"blocks divided among {staged.groups} groups of devices"
                    found.append(
                        _candidate(emitter, staged.schedule, placed, rounds, label, staged=True)
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
        self, choices: Sequence[Sequence[Scaling]], rounds: int, bound_s: float, *, is_first: bool
    ) -> Iterator[PlacedCandidate]:
        """Schedules of each tp choice that a search finds and that fit the memory.

        Args:
            bound_s: no schedule of a round takes less.
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
            limit_s = self.left_s() * share
            # The cost of a cut is known once slices have ranks: nothing, or about the estimate.
            instances = [instance]
            if self._method == "search":
                instances.append(self._with_cut_costs(chosen, instance, rounds))
            schedules: list[tuple[Instance, str, ChainSchedule]] = []
            for own in instances:
                found = self._schedules(own, bound_s, limit_s / len(instances))
                for label, schedule in found.items():
                    if all(schedule != other for _, _, other in schedules):
                        schedules.append((own, label, schedule))
            for own, label, schedule in schedules:
                slices = emitter.slices(schedule, Evaluator(own).run(schedule).starts)
                limit_s = request.budget_s * _PLACEMENT_SHARE
                placed = self._place(slices, min(limit_s, self.left_s()) if fits else limit_s)
                if isinstance(placed, Placed):
                    candidate = _candidate(emitter, schedule, placed, rounds, label, staged=False)
                    best_s = min(best_s, candidate.candidate.objective_s)
                    fits = True
                    yield candidate
                else:
                    self._failed(placed)

    def _schedules(
        self, instance: Instance, bound_s: float, limit_s: float
    ) -> dict[str, ChainSchedule]:
        """The method's schedules by label."""
        if self._method == "wavefront":
            found = wavefront(instance)
            label = f"waves as printed: {found.waves}, {found.seconds:.4g} s with their barriers"
            return {label: found.schedule}
        return find_schedules(instance, bound_s=bound_s, limit_s=limit_s)

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

    def _reserve_simulations(self, slices: Sequence[UnplacedSlice], rounds: int) -> None:
        """End searches so early that plans of such slices can be simulated within the budget."""
        computes = 2 * rounds * sum(own.dp * own.num_microbatches for own in slices)
        budget_s = self._request.budget_s
        simulated_s = _SIMULATED_PLANS * _SIMULATED_COMPUTE_S * computes
        share = 1 - _RESERVE_SHARE - simulated_s / max(budget_s, 1e-9)
        self._until = self._begun + budget_s * min(_MAX_SEARCH_SHARE, max(_MIN_SEARCH_SHARE, share))

    def _failed(self, shortfall_bytes: float) -> None:
        self.least_shortfall_bytes = min(self.least_shortfall_bytes, shortfall_bytes)

    def _shortfall_without_activations(self, slices: Sequence[UnplacedSlice]) -> float:
        return self._shortfall([replace(own, activation_bytes=0.0) for own in slices])

    def _shortfall(self, slices: Sequence[UnplacedSlice]) -> float:
        placed = self._place(slices, 0.0)
        return 0.0 if isinstance(placed, Placed) else placed

    def _place(
        self, slices: Sequence[UnplacedSlice], limit_s: float, *, streamed: bool = False
    ) -> Placed | float:
        request = self._request
        return place(slices, request.cluster, request.devices, limit_s=limit_s, streamed=streamed)


def _candidate(
    emitter: Emitter,
    schedule: ChainSchedule,
    placed: Placed,
    rounds: int,
    label: str,
    *,
    staged: bool,
) -> PlacedCandidate:
    notes = [f"{label}; the peak device holds {placed.memory_imbalance:.3g} x the mean memory"]
    if rounds > 1:
        notes.append(f"the waves run {rounds} times a step, each on 1/{rounds} of the batches")
    candidate = Candidate(
        units=emitter.units(schedule, placed),
        waves=emitter.waves(schedule, placed),
        objective_s=rounds * (placed.forward_s + placed.backward_s) + placed.reduce_s,
        closed_form=False,
        kind=label,
        notes=tuple(notes),
    )
    peak_bytes = max(placed.memory_bytes)
    return PlacedCandidate(candidate=candidate, rounds=rounds, peak_bytes=peak_bytes, staged=staged)
