"""All modules on all devices, one after another: no module waits for another's devices.

Every rank runs a replica of every module. Module m with K micro-batches a round takes
K (f + b) a round, so a step takes

    T = sum_m (G K_m (f_m + b_m) + reduce_m) + G s.

The modules choose apart from each other but for the memory that they share: their fronts
of time against bytes are merged, which is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.schema.plan import Schedule
from mmplan.solvers.options import Stages
from mmplan.solvers.placement import grid
from mmplan.solvers.problem import Candidate, Problem, Request, Solution
from mmplan.solvers.shares import microbatch_sizes
from mmplan.solvers.units import last_stage_ranks, make_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One module's way to share all devices."""

    tp: int
    dp: int
    size: int
    pinned: bool
    time_s: float
    held_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Whole:
    """Parts of the modules so far, and their sums."""

    parts: tuple[_Part, ...]
    time_s: float
    held_bytes: float


def solve_colocated(request: Request) -> Solution:
    """The best plans with every module on every device.

    Raises:
        InvalidInputError: several tasks or a pinned vpp (:class:`NotApplicableError`), or a
            method.
        InfeasibleError: the modules do not fit a device's memory together, or their pins
            do not allow to share all devices.
    """
    if request.method not in (None, "exact"):
        raise InvalidInputError(
            f"--method {request.method}: colocated knows exact", hint="leave --method out"
        )
    problem = Problem(request=request, task=request.only_task("colocated"))
    request.check_not_interleaved("colocated")
    wholes = _wholes(problem)
    least_sync_s = problem.rounds * problem.least_sync_s()
    candidates = sorted(
        (_candidate(problem, whole) for whole in wholes[: max(request.top, 1)]),
        key=lambda c: c.objective_s,
    )
    # A plan left out is no faster without its syncs than the last one taken.
    rest_s = [whole.time_s + least_sync_s for whole in wholes[len(candidates) :]]
    bound_s = min([candidates[0].objective_s, *rest_s])
    return Solution(
        solver="colocated",
        method="exact",
        candidates=tuple(candidates),
        lower_bound_s=bound_s,
        closed_form=problem.closed_form(),
    )


def _wholes(problem: Problem) -> list[_Whole]:
    """Undominated plans that fit, fastest first.

    Modules that take each other's outputs get one tp and one micro-batch size where their
    pins allow it: what they give each other then stays on its device.
    """
    parts = {name: list(_parts(problem, name)) for name in problem.task.modules}
    if not problem.chained():
        return _merge(problem, parts)
    cuts = [{(part.tp, part.size) for part in own} for own in parts.values()]
    aligned: list[_Whole] = []
    for key in sorted(set.intersection(*cuts)):
        same = {n: [p for p in own if (p.tp, p.size) == key] for n, own in parts.items()}
        with suppress(InfeasibleError):
            aligned += _merge(problem, same)
    return sorted(aligned, key=lambda w: w.time_s) or _merge(problem, parts)


def _parts(problem: Problem, module: str) -> Iterator[_Part]:
    pins = problem.request.workload.modules[module].plan
    if not pins.allows("pp", 1):
        return
    for tp in problem.costs.tp_options(task=problem.task.name, module=module):
        dp = min(problem.devices // tp, problem.round_samples)
        fits_node = problem.request.cluster.devices_per_node % tp == 0
        if not dp or not fits_node or not pins.allows("tp", tp) or not pins.allows("dp", dp):
            continue
        stages = Stages(problem, module, tp, 1)
        share = -(-problem.round_samples // dp)
        for size in microbatch_sizes(share, pins):
            yield _part(problem, stages, dp, share, size, pinned=pins.microbatch is not None)


def _part(
    problem: Problem, stages: Stages, dp: int, share: int, size: int, *, pinned: bool
) -> _Part:
    count = -(-share // size)
    (forward_s, backward_s), (held,) = stages.times(size, dp)[0], stages.held(size)
    flight = min(problem.rounds * count, count if problem.task.sync_batches else 1)
    return _Part(
        tp=stages.tp,
        dp=dp,
        size=size,
        pinned=pinned,
        time_s=problem.rounds * count * (forward_s + backward_s) + stages.reduce_s(dp),
        held_bytes=stages.fixed(dp)[0] + held * flight,
    )


def _merge(problem: Problem, parts: dict[str, list[_Part]]) -> list[_Whole]:
    """Undominated sums of time and bytes that fit a device, fastest first."""
    wholes: list[_Whole] = [_Whole(parts=(), time_s=0.0, held_bytes=0.0)]
    for name, own in parts.items():
        if not own:
            raise InfeasibleError(
                f"module {name}: its plan does not allow pp 1 with all {problem.devices} devices, "
                "so it cannot share them",
                hint=f"loosen modules.{name}.plan, or use --solver distmm",
            )
        grown = sorted(
            (
                _Whole(
                    parts=(*whole.parts, part),
                    time_s=whole.time_s + part.time_s,
                    held_bytes=whole.held_bytes + part.held_bytes,
                )
                for whole in wholes
                for part in own
            ),
            key=lambda w: (w.time_s, w.held_bytes),
        )
        wholes = []
        for whole in grown:
            if not wholes or whole.held_bytes < wholes[-1].held_bytes:
                wholes.append(whole)
    fitting = [whole for whole in wholes if whole.held_bytes <= problem.memory_bytes]
    if not fitting:
        needed, memory = wholes[-1].held_bytes, problem.memory_bytes
        raise InfeasibleError(
            f"all modules together need {needed:.3g} bytes on each device at best, a device has "
            f"{memory:.3g}: {needed - memory:.3g} bytes missing",
            hint="use --solver distmm with more devices, recompute: full, or a smaller sync_batch",
        )
    return fitting


def _candidate(problem: Problem, whole: _Whole) -> Candidate:
    units = tuple(
        make_unit(
            problem,
            name,
            ranks=grid(0, part.dp, 1, part.tp),
            blocks=((0, problem.blocks(name)),),
            size=part.size,
            pinned=part.pinned,
            # The consumer is on the same devices: running ahead of it only holds memory.
            schedule=Schedule(kind="batch-sync" if problem.task.sync_batches else "1f1b", lead=0),
        )
        for name, part in zip(problem.task.modules, whole.parts, strict=True)
    )
    sync_s = problem.sync_s({unit.module: last_stage_ranks(unit) for unit in units})
    return Candidate(units=units, objective_s=whole.time_s + problem.rounds * sync_s)
