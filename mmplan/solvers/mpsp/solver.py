"""Several tasks over shared modules, their slices side by side on all devices.

Each task's use of a module is a MetaOp (:mod:`mmplan.solvers.mpsp.metaops`), its blocks a chain
that may change its number of devices between any two. All forwards of a round come before its
backwards, which mirror them. The formula is rounds x (end of the forwards + end of the backwards)
on the ranks where the slices are placed, with what goes over links between slices, + the reduction
of the gradients. The bound is that of the forwards plus that of the backwards, each the best of the
relaxations in :mod:`mmplan.solvers.mpsp.bounds`, with every MetaOp on its own best degrees; it
knows no links. Method ``wavefront`` is Spindle's scheduler as printed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.schema.plan import Unit, Wave
from mmplan.solvers.distmm.solver import solve_distmm
from mmplan.solvers.mpsp.bounds import curve, level_bound
from mmplan.solvers.mpsp.certificate import Bounds, bounds_of
from mmplan.solvers.mpsp.initial_schedules import portfolio
from mmplan.solvers.mpsp.instance import Chain, Instance, parts
from mmplan.solvers.mpsp.list_schedule import ChainSchedule, Evaluator
from mmplan.solvers.mpsp.metaops import contract
from mmplan.solvers.mpsp.placement import Placed, place
from mmplan.solvers.mpsp.scaling_curves import Scaling, Scalings
from mmplan.solvers.mpsp.search import find, one_after_another
from mmplan.solvers.mpsp.slices import Slot
from mmplan.solvers.mpsp.staged import staged
from mmplan.solvers.mpsp.to_plan import Emitter, Sizes
from mmplan.solvers.mpsp.transfer_costs import spread_s
from mmplan.solvers.mpsp.wavefront import wavefront
from mmplan.solvers.problem import Candidate, Problem, Request, Solution
from mmplan.wording import size

METHODS = {
    "search": "the best of many schedules",
    "wavefront": "Spindle's scheduler as printed",
}
# Shares of the budget for all that is done here, at least and at most; the rest is for simulating
# so many plans, of so many seconds a compute (it depends on the machine, and so does the search).
_LEAST, _MOST, _ROOM, _PLANS, _COMPUTE_S = 0.3, 0.5, 0.1, 3, 4e-5
# Shares of what is left of it: the bounds; the search with the first choice of degrees for shared
# modules, with each other one. Of the budget: placing a draft that does not fit.
_BOUNDS, _FIRST, _OTHER, _PLACING = 0.2, 0.5, 0.25, 0.1
# Degrees of shared modules that are searched, and rounds that are tried.
_CHOICES = 4
_MOST_ROUNDS = 4096
# Plans whose estimate is worse than the best by more than this are not simulated, unless the best
# nearly fills the memory, which is an estimate too. That of staged drafts may be half too much.
_WORSE, _WORSE_STAGED, _FULL = 1.08, 1.5, 0.95
# Degrees are searched where drafts made without a search lack less than this share of the memory.
_HOPE = 0.1
# Micro-batches of staged drafts at least; those worse than the best of them by more than this are
# not simulated: among themselves their estimates are good.
_PARTS, _ALIKE = 32, 1.03
# Numbers of rounds that are tried after those at which staged drafts fit.
_FURTHER = 3


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
        return _Planning(request, method).run()
    except InfeasibleError:
        if len(request.tasks) > 1 or method != "search":
            raise
        # Slices do not fit, or may not be: then the plans of a single task are pipelines.
        return replace(solve_distmm(replace(request, method=None)), solver="mpsp", method=method)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A placed draft.

    Attributes:
        staged: its slices follow each other micro-batch by micro-batch.
    """

    candidate: Candidate
    rounds: int
    fullest_bytes: float
    staged: bool = False


class _Planning:
    def __init__(self, request: Request, method: str) -> None:
        self._request, self._method = request, method
        self._begun = time.monotonic()
        self._until = self._begun + _MOST * request.budget_s
        self._problems = {
            name: Problem(request=request, task=task) for name, task in request.tasks.items()
        }
        self._sizes = Sizes(self._problems)
        self._ops = contract(request.workload, request.tasks)
        self._memory_bytes = request.cluster.device.memory_bytes
        self._missing = float("inf")
        # Drafts without a search, and staged ones, can fit at some number of rounds.
        self._plain = self._stages = True

    def run(self) -> Solution:
        """Try rounds until a schedule fits the memory."""
        found: list[_Found] = []
        bounds: dict[int, Bounds] = {}
        further = 0
        for rounds in _rounds(self._problems):
            scalings = Scalings(self._ops, self._problems, rounds)
            lacking = self._lacking(scalings)
            if lacking > 0:
                self._missing = min(self._missing, lacking)
                continue
            choices = scalings.choices()[:_CHOICES]
            lacks = [self._lacks(own, rounds) for own in choices] if self._plain else []
            hopeful = [
                own
                for own, (lack, _) in zip(choices, lacks, strict=False)
                if lack < _HOPE * self._memory_bytes
            ]
            # Rounds spare activations only.
            self._plain = any(bare <= 0 for _, bare in lacks)
            if self._method == "search" and len(hopeful) < len(choices) and not further:
                found += self._staged(rounds)
            if hopeful or any(item.rounds == rounds for item in found):
                bounds[rounds] = bounds_of(
                    _instance(scalings.free(), self._request), rounds, self._left_s() * _BOUNDS
                )
            if hopeful:
                found += self._searched(hopeful, rounds, bounds[rounds], is_first=not found)
            if not all(item.staged for item in found) or further > _FURTHER:
                break
            if not (self._plain or (self._stages and not found)):
                break
            further += bool(found)
        if not found:
            raise InfeasibleError(
                f"mpsp: no placement fits, a device lacks {size(self._missing)} at best",
                hint="use more devices, zero: 1, recompute: full, or a smaller sync_batch",
            )
        used = {item.rounds: bounds[item.rounds] for item in found}
        return self._solution(found, used)

    def _leave_time(self, slots: Sequence[Slot], rounds: int) -> None:
        """Searches end so that plans of such slots can be simulated within the budget."""
        computes = 2 * rounds * sum(slot.dp * slot.messages for slot in slots)
        budget_s = self._request.budget_s
        share = 1 - _ROOM - _PLANS * _COMPUTE_S * computes / max(budget_s, 1e-9)
        self._until = self._begun + budget_s * min(_MOST, max(_LEAST, share))

    def _left_s(self) -> float:
        """Seconds that searches still have."""
        return max(0.0, self._until - time.monotonic())

    def _with_cuts(self, scalings: Sequence[Scaling], rounds: int) -> Instance:
        """The instance with what cuts cost: all but the last micro-batch travel meanwhile."""
        request, instance = self._request, _instance(scalings, self._request)
        chains: list[Chain] = []
        for own, chain in zip(scalings, instance.chains, strict=True):
            op, widest = own.op, own.allocations[-1]
            share = -(-op.batch // rounds // widest.dp)
            samples = op.batch / rounds / -(-share // widest.size)
            problem = self._problems[op.task]
            moved = [samples * problem.output_bytes(op.module, b) for b in range(chain.blocks - 1)]
            cut_s = [spread_s(request.cluster, request.devices, size) for size in moved]
            chains.append(replace(chain, cut_s=np.array([0.0, *cut_s])))
        return replace(instance, chains=tuple(chains))

    def _lacking(self, scalings: Scalings) -> float:
        """Bytes that each device lacks for a round's activations, if all share them equally."""
        free, request = scalings.free(), self._request
        emitter = Emitter(
            self._problems, self._sizes, free, _instance(free, request), scalings.rounds
        )
        return emitter.least_bytes() / request.devices - self._memory_bytes

    # --- drafts without a search -------------------------------------------------------

    def _lacks(self, chosen: Sequence[Scaling], rounds: int) -> tuple[float, float]:
        """Bytes that drafts made without a search lack at best, with activations and without."""
        instance = _instance(chosen, self._request)
        emitter = Emitter(self._problems, self._sizes, chosen, instance, rounds)
        evaluator = Evaluator(instance)
        span_s = max(float(c.both_s.sum(axis=1).min()) for c in instance.chains)
        targets = [[span_s] * len(instance.chains)]
        drafts = [one_after_another(instance), next(portfolio(instance, targets, (1.0,)))]
        lacking = bare = float("inf")
        for draft in drafts:
            slots = emitter.slots(draft, evaluator.run(draft).starts)
            self._leave_time(slots, rounds)
            lacking = min(lacking, self._lack(slots))
            if lacking > 0:
                bare = min(bare, self._lack([replace(slot, held_bytes=0.0) for slot in slots]))
        self._missing = min(self._missing, lacking) if lacking else self._missing
        return lacking, bare if lacking else 0.0

    def _lack(self, slots: Sequence[Slot]) -> float:
        placed = self._place(slots, 0.0)
        return placed if isinstance(placed, float) else 0.0

    def _place(
        self, slots: Sequence[Slot], limit_s: float, *, streamed: bool = False
    ) -> Placed | float:
        request = self._request
        return place(slots, request.cluster, request.devices, limit_s=limit_s, streamed=streamed)

    def _staged(self, rounds: int) -> list[_Found]:
        """Drafts that divide the blocks among groups of devices, the fewest groups that fit."""
        found: list[_Found] = []
        scalings = Scalings(self._ops, self._problems, rounds, least_parts=_PARTS)
        fits_without_activations = False
        for chosen in scalings.choices()[:_CHOICES]:
            instance = _instance(chosen, self._request)
            emitter = Emitter(self._problems, self._sizes, chosen, instance, rounds)
            for made in staged(chosen, instance, emitter.block_bytes()):
                if made.rank_bytes > self._memory_bytes:
                    self._missing = min(self._missing, made.rank_bytes - self._memory_bytes)
                    continue
                slots = emitter.slots(made.draft, made.starts, made.within)
                placed = self._place(slots, 0.0, streamed=True)
                if isinstance(placed, Placed):
                    label = f"blocks divided among {made.groups} groups of devices"
                    found.append(
                        self._made(emitter, made.draft, placed, rounds, label, staged=True)
                    )
                    break
                self._missing = min(self._missing, placed)
                if not fits_without_activations:
                    bare = [replace(slot, held_bytes=0.0) for slot in slots]
                    fits_without_activations = not self._lack(bare)
        self._stages = bool(found) or fits_without_activations
        found.sort(key=lambda item: item.candidate.objective_s)
        return [
            item
            for item in found
            if item.candidate.objective_s <= _ALIKE * found[0].candidate.objective_s
        ]

    # --- drafts that are searched for ---------------------------------------------------

    def _searched(
        self,
        choices: Sequence[Sequence[Scaling]],
        rounds: int,
        bounds: Bounds,
        *,
        is_first: bool,
    ) -> Iterator[_Found]:
        request, best_s, fits = self._request, float("inf"), not is_first
        for position, chosen in enumerate(choices):
            instance = _instance(chosen, request)
            curves = [curve(c.counts, parts(c.both_s)) for c in instance.chains]
            if level_bound(curves, request.devices) * rounds >= best_s:
                continue
            limit_s = self._left_s() * (_FIRST if is_first and not position else _OTHER)
            # What a cut costs is known once slices have ranks: it is nothing, or as estimated.
            ways = [instance, self._with_cuts(chosen, rounds)][: 1 + (self._method == "search")]
            drafts: list[tuple[Instance, str, ChainSchedule]] = []
            for way in ways:
                for label, draft in _drafts(way, self._method, bounds.total_s, limit_s / len(ways)):
                    if all(draft != other for _, _, other in drafts):
                        drafts.append((way, label, draft))
            emitter = Emitter(self._problems, self._sizes, chosen, instance, rounds)
            for way, label, draft in drafts:
                slots = emitter.slots(draft, Evaluator(way).run(draft).starts)
                limit_s = request.budget_s * _PLACING
                placed = self._place(slots, min(limit_s, self._left_s()) if fits else limit_s)
                if isinstance(placed, Placed):
                    found = self._made(emitter, draft, placed, rounds, label)
                    best_s = min(best_s, found.candidate.objective_s)
                    fits = True
                    yield found
                else:
                    self._missing = min(self._missing, placed)

    def _made(
        self,
        emitter: Emitter,
        draft: ChainSchedule,
        placed: Placed,
        rounds: int,
        label: str,
        *,
        staged: bool = False,
    ) -> _Found:
        return _Found(
            candidate=_candidate(emitter, draft, placed, rounds, label),
            rounds=rounds,
            fullest_bytes=max(placed.memory_bytes),
            staged=staged,
        )

    # --- the answer -------------------------------------------------------------------

    def _solution(self, found: list[_Found], bounds: Mapping[int, Bounds]) -> Solution:
        found.sort(key=lambda item: item.candidate.objective_s)
        least_s, streamed = found[0].candidate.objective_s, any(item.staged for item in found)
        full = found[0].fullest_bytes > _FULL * self._memory_bytes
        kept: dict[tuple[Unit, ...], Candidate] = {}
        for item in found:
            most_s = least_s * (_WORSE_STAGED if item.staged else _WORSE)
            if full or item.candidate.objective_s <= most_s:
                kept.setdefault(item.candidate.units, item.candidate)
        kinds = {c.kind: c for c in reversed(kept.values())}
        others = [c for c in kept.values() if kinds[c.kind] is not c]
        candidates = sorted([*kinds.values(), *others[:1]], key=lambda c: c.objective_s)
        if len(self._request.tasks) == 1 and self._method == "search":
            candidates += _of_one_task(self._request)
        values = {
            rounds: rounds * (own.area_s if streamed else own.total_s)
            for rounds, own in bounds.items()
        }
        rounds = min(values, key=lambda rounds: values[rounds])
        return Solution(
            solver="mpsp",
            method=self._method,
            candidates=tuple(candidates),
            formula_bound_s=values[rounds],
            notes=bounds[rounds].notes,
            curves=bounds[rounds].curves,
        )


def _rounds(problems: Mapping[str, Problem]) -> Iterator[int]:
    """Numbers of rounds that every task's batch can be cut into, whole sync batches in each."""
    rounds = 1
    while rounds <= _MOST_ROUNDS:
        if all(
            p.rounds % rounds == 0 if p.task.sync_batches else p.task.batch % rounds == 0
            for p in problems.values()
        ):
            yield rounds
        rounds *= 2


def _of_one_task(request: Request) -> list[Candidate]:
    """What ``distmm`` makes of a single task: no worse is expected."""
    try:
        solution = solve_distmm(replace(request, method=None))
    except InfeasibleError:
        return []
    return [
        replace(c, closed_form=solution.closed_form and c.closed_form) for c in solution.candidates
    ]


# --- schedules -----------------------------------------------------------------------------


def _instance(scalings: Sequence[Scaling], request: Request) -> Instance:
    tasks = list(request.tasks)
    return Instance(
        chains=tuple(own.chain(tasks.index(own.op.task)) for own in scalings),
        devices=request.devices,
    )


def _candidate(
    emitter: Emitter, draft: ChainSchedule, placed: Placed, rounds: int, label: str
) -> Candidate:
    waves: tuple[Wave, ...] = emitter.waves(draft, placed)
    return Candidate(
        units=emitter.units(draft, placed),
        waves=waves,
        objective_s=rounds * (placed.forward_s + placed.backward_s) + placed.reduce_s,
        closed_form=False,
        kind=label,
        notes=(
            f"{label}; the fullest device holds {placed.imbalance:.3g} x the mean memory",
            *(
                [f"the waves run {rounds} times a step, each on 1/{rounds} of the batches"]
                * (rounds > 1)
            ),
        ),
    )


def _drafts(
    instance: Instance, method: str, bound_s: float, limit_s: float
) -> Iterator[tuple[str, ChainSchedule]]:
    if method == "wavefront":
        found = wavefront(instance)
        yield (
            f"waves as printed: {found.waves}, {found.seconds:.4g} s with their barriers",
            found.draft,
        )
        return
    yield from find(instance, bound_s=bound_s, limit_s=limit_s).items()
