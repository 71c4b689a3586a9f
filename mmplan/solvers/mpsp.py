"""Several tasks over shared modules, their slices side by side on all devices.

Each task's use of a module is a MetaOp (:mod:`mmplan.solvers.metaops`), its blocks a chain that
may change its number of devices between any two. All forwards of a round come before its
backwards, which mirror them, so the formula is rounds x (end of the forwards + end of the
backwards) on the ranks where the slices are placed; gradients' reduction and messages are left
to the simulator. The bound is that of the forwards plus that of the backwards, each the best of
the relaxations in :mod:`mmplan.solvers.mpsp_bounds`, with every MetaOp on its own best degrees.

Methods: ``search`` (default) and ``wavefront``, Spindle's scheduler as printed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.schema.plan import Wave
from mmplan.solvers.distmm import solve_distmm
from mmplan.solvers.metaops import contract
from mmplan.solvers.mpsp_bounds import (
    Column,
    configuration_bound,
    curve,
    dag_bound,
    level_bound,
    paper_value,
)
from mmplan.solvers.mpsp_emit import Emitter
from mmplan.solvers.mpsp_model import Floats, Instance, in_proportion, parts
from mmplan.solvers.mpsp_placement import Placed, place
from mmplan.solvers.mpsp_schedule import Draft, Evaluator
from mmplan.solvers.mpsp_search import search
from mmplan.solvers.mpsp_tables import Scaling, Scalings
from mmplan.solvers.mpsp_wavefront import wavefront
from mmplan.solvers.problem import Candidate, Problem, Request, Solution

_METHODS = ("search", "wavefront")
# Shares of the budget: the bounds; the searches with the first choice of degrees for shared
# modules and with each other one; all further attempts to place. What is left is for simulating.
_BOUNDS, _FIRST, _OTHER, _PLACING = 0.1, 0.35, 0.15, 0.1
# Within a search: the configuration programs that guide it.
_GUIDES = 0.3
# Degrees of shared modules that are searched, and rounds that are tried.
_CHOICES = 3
_MOST_ROUNDS = 4096
# Plans whose estimate is worse than the best by more than this are not simulated, unless the best
# nearly fills the memory: the simulation counts what the placement estimates.
_WORSE, _FULL = 1.08, 0.95


def solve_mpsp(request: Request) -> Solution:
    """The best schedules of all tasks' MetaOps, placed on ranks.

    Raises:
        InvalidInputError: an unknown method.
        InfeasibleError: a module fits no degrees, or no placement fits the memory.
    """
    method = request.method or "search"
    if method not in _METHODS:
        raise InvalidInputError(
            f"--method {method}: mpsp knows {' and '.join(_METHODS)}", hint="choose one of these"
        )
    problems = {name: Problem(request=request, task=task) for name, task in request.tasks.items()}
    ops = contract(request.workload, request.tasks)
    missing = float("inf")
    for rounds in _rounds(problems):
        scalings = Scalings(ops, problems, rounds)
        lacking = _lacking_bytes(request, problems, scalings)
        if lacking > 0:
            missing = min(missing, lacking)
            continue
        bounds = _bounds(scalings, request)
        found = list(_placed(request, problems, scalings, bounds, method))
        placed = [item for item in found if isinstance(item, _Found)]
        if placed:
            return _solution(request, method, placed, bounds, rounds)
        missing = min([missing, *(item for item in found if isinstance(item, float))])
    raise InfeasibleError(
        f"mpsp: no placement of the slices fits, a device lacks {missing:.3g} bytes at best",
        hint="use more devices, zero: 1, recompute: full, or a smaller sync_batch",
    )


def _lacking_bytes(request: Request, problems: Mapping[str, Problem], scalings: Scalings) -> float:
    """Bytes that each device lacks for the activations of a round, if all share them equally."""
    free = scalings.free()
    emitter = Emitter(problems, free, _instance(free, request), scalings.rounds)
    return emitter.least_bytes() / request.devices - request.cluster.device.memory_bytes


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


def _solution(
    request: Request, method: str, placed: list[_Found], bounds: _Bounds, rounds: int
) -> Solution:
    placed.sort(key=lambda found: found.candidate.objective_s)
    best, memory_bytes = placed[0], request.cluster.device.memory_bytes
    most_s = best.candidate.objective_s * _WORSE
    if best.fullest_bytes > _FULL * memory_bytes:
        most_s = float("inf")
    candidates = [f.candidate for f in placed if f.candidate.objective_s <= most_s]
    kinds = {c.kind: c for c in reversed(candidates)}
    others = [c for c in candidates if kinds[c.kind] is not c]
    candidates = sorted([*kinds.values(), *others[:1]], key=lambda c: c.objective_s)
    notes = list(bounds.notes)
    if rounds > 1:
        notes.append(f"the waves run {rounds} times a step, each on 1/{rounds} of the batches")
    if len(request.tasks) == 1 and method == "search":
        candidates += _of_one_task(request)
    return Solution(
        solver="mpsp",
        method=method,
        candidates=tuple(candidates),
        lower_bound_s=bounds.total_s * rounds,
        notes=tuple(notes),
    )


def _of_one_task(request: Request) -> list[Candidate]:
    """What ``distmm`` makes of a single task: no worse is expected."""
    try:
        solution = solve_distmm(replace(request, method=None))
    except InfeasibleError:
        return []
    return [
        replace(c, closed_form=solution.closed_form and c.closed_form) for c in solution.candidates
    ]


# --- bounds --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds:
    """What no schedule of a round beats.

    Attributes:
        total_s: forwards and backwards.
        notes: how it came about.
    """

    total_s: float
    notes: tuple[str, ...]


def _bounds(scalings: Scalings, request: Request) -> _Bounds:
    instance = _instance(scalings.free(), request)
    chains = instance.chains
    forward_s = phase_bound(instance, [c.forward_s for c in chains], request.budget_s * _BOUNDS / 2)
    ratio = in_proportion(chains)
    if ratio is not None:
        backward_s = ratio * forward_s
    else:
        tables = [c.backward_s for c in chains]
        backward_s = phase_bound(instance, tables, request.budget_s * _BOUNDS / 2)
    paper_s = sum(
        paper_value(
            [chains[m].counts for m in members],
            [chains[m].both_s.sum(axis=1) for m in members],
            request.devices,
        )
        for members in map(instance.of_level, range(instance.levels))
    )
    return _Bounds(
        total_s=forward_s + backward_s,
        notes=(
            f"{len(chains)} MetaOps on {instance.levels} levels; bound {forward_s:.4g} s forward + "
            f"{backward_s:.4g} s backward a round; Spindle's continuous optimum (Eq. 11, no bound) "
            f"is {paper_s:.4g} s",
        ),
    )


def phase_bound(instance: Instance, tables: Sequence[Floats], limit_s: float) -> float:
    """The best proven bound of one phase.

    Args:
        tables: ``[K, L]`` seconds of every chain in that phase.
        limit_s: seconds for the configuration program.
    """
    chains, devices = instance.chains, instance.devices
    curves = [curve(c.counts, parts(table)) for c, table in zip(chains, tables, strict=True)]
    if not any(own.time_s[-1] for own in curves):
        return 0.0
    found = [level_bound(curves, devices)]
    if instance.levels > 1:
        found.append(dag_bound(curves, [c.after for c in chains], devices)[0])
    found.append(configuration_bound(chains, tables, devices, limit_s=limit_s).bound_s)
    return max(found)


# --- schedules -----------------------------------------------------------------------------


def _instance(scalings: Sequence[Scaling], request: Request) -> Instance:
    tasks = list(request.tasks)
    return Instance(
        chains=tuple(own.chain(tasks.index(own.op.task)) for own in scalings),
        devices=request.devices,
    )


def _placed(
    request: Request,
    problems: Mapping[str, Problem],
    scalings: Scalings,
    bounds: _Bounds,
    method: str,
) -> Iterator[_Found | float]:
    """Candidates, and the bytes that drafts without a placement lacked."""
    best_s = float("inf")
    for position, chosen in enumerate(scalings.choices()[:_CHOICES]):
        instance = _instance(chosen, request)
        curves = [curve(c.counts, parts(c.both_s)) for c in instance.chains]
        if level_bound(curves, request.devices) * scalings.rounds >= best_s:
            continue
        limit_s = request.budget_s * (_OTHER if position else _FIRST)
        drafts = list(_drafts(instance, method, bounds.total_s, limit_s))
        emitter = Emitter(problems, chosen, instance, scalings.rounds)
        for label, draft in drafts:
            slots = emitter.slots(draft, Evaluator(instance).run(draft).starts)
            placed = place(
                slots,
                request.cluster,
                request.devices,
                limit_s=request.budget_s * _PLACING / len(drafts),
            )
            if isinstance(placed, Placed):
                candidate = _candidate(emitter, draft, placed, scalings.rounds, label)
                best_s = min(best_s, candidate.objective_s)
                yield _Found(candidate=candidate, fullest_bytes=max(placed.memory_bytes))
            else:
                yield placed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    candidate: Candidate
    fullest_bytes: float


def _candidate(
    emitter: Emitter, draft: Draft, placed: Placed, rounds: int, label: str
) -> Candidate:
    waves: tuple[Wave, ...] = emitter.waves(draft, placed)
    return Candidate(
        units=emitter.units(draft, placed),
        waves=waves,
        objective_s=rounds * (placed.forward_s + placed.backward_s) + placed.reduce_s,
        closed_form=False,
        kind=label,
        notes=(f"{label}; the fullest device holds {placed.imbalance:.3g} x the mean memory",),
    )


def _drafts(
    instance: Instance, method: str, bound_s: float, limit_s: float
) -> Iterator[tuple[str, Draft]]:
    if method == "wavefront":
        found = wavefront(instance)
        yield (
            f"{found.waves} waves as printed, {found.seconds:.4g} s with their barriers",
            found.draft,
        )
        return
    found = find(instance, bound_s=bound_s, limit_s=limit_s)
    yield from found.items()


def find(instance: Instance, *, bound_s: float, limit_s: float) -> dict[str, Draft]:
    """The best drafts by where they come from: all of them, one slice each, one after another."""
    begun = time.monotonic()
    targets, columns = _guides(instance, limit_s * _GUIDES)
    left_s = limit_s - (time.monotonic() - begun)
    evaluator = Evaluator(instance)
    found = search(
        evaluator, targets=targets, columns=columns, bound_s=bound_s, limit_s=max(left_s, 0.0)
    )
    sequential = one_after_another(instance)
    drafts = {
        "the best schedule of slices": found.best,
        "one slice for each MetaOp": found.whole,
        "tasks one after another": sequential,
    }
    unique: dict[str, Draft] = {}
    for label, draft in drafts.items():
        if not any(draft == other for other in unique.values()):
            unique[label] = draft
    return unique


def _guides(
    instance: Instance, limit_s: float
) -> tuple[list[list[float]], list[tuple[Column, ...]]]:
    """Spans to aim at and the configuration program's columns: level by level, and over all."""
    chains, devices = instance.chains, instance.devices
    curves = [curve(c.counts, parts(c.both_s)) for c in chains]
    by_level = [0.0] * len(chains)
    columns: list[Column] = []
    for level in range(instance.levels):
        members = instance.of_level(level)
        span_s = level_bound([curves[m] for m in members], devices)
        own = configuration_bound(
            [chains[m] for m in members],
            [chains[m].both_s for m in members],
            devices,
            limit_s=limit_s / instance.levels,
        )
        for column in own.columns:
            choices = tuple((members[m], p, k) for m, p, k in column.choices)
            columns.append(replace(column, choices=choices))
        for m in members:
            by_level[m] = span_s
    targets = [by_level]
    if instance.levels > 1:
        targets.append(dag_bound(curves, [c.after for c in chains], devices)[1])
    return targets, [tuple(columns)]


def one_after_another(instance: Instance) -> Draft:
    """Tasks one after another, each MetaOp on the devices that make it fastest."""
    order = sorted(range(len(instance.chains)), key=lambda m: (instance.chains[m].group, m))
    return Draft(
        [
            [(int(c.both_s.sum(axis=1).argmin()), 0, c.blocks, float(order.index(m)))]
            for m, c in enumerate(instance.chains)
        ],
        strict=True,
    )
