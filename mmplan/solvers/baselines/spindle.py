"""The baselines of Spindle: whole tasks one after another, or side by side.

``spindle-seq``: every task on all devices with its own best TP x DP (x PP where its losses are
per sample, as under ``megatron``), its modules colocated.

``spindle-optimus``: every task on devices of its own. Each starts with the fewest that it runs on;
then the task with the largest marginal gain (T(n) - T(n')) / (n' - n) gets what it needs to go
from n devices to n', the next number on which it is faster, until none can.

Source: Spindle, arXiv:2409.03365, section 5; Optimus, EuroSys 2018, for the marginal gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from mmplan.errors import InfeasibleError
from mmplan.schema.grid import RankGrid
from mmplan.schema.plan import Unit
from mmplan.solvers.baselines.megatron import solve_megatron
from mmplan.solvers.baselines.one_grid import (
    Layout,
    OneGrid,
    Split,
    allowed,
    colocated_layouts,
    nothing_allowed,
    too_large,
)
from mmplan.solvers.baselines.sequential_tasks import InTurn, named
from mmplan.solvers.placement import place_modules
from mmplan.solvers.problem import Candidate, Problem, Request, Solution


def solve_spindle_seq(request: Request) -> Solution:
    """The fastest grid of each task, one after another; of one task ``megatron``'s.

    Raises:
        InvalidInputError: a method.
        InfeasibleError: pins, devices or memory leave no grid; names what is missing.
    """
    request.check_exact("spindle-seq")
    if len(request.tasks) == 1:
        return replace(solve_megatron(request), solver="spindle-seq")
    return InTurn(request, "spindle-seq", colocated_layouts).solution()


def solve_spindle_optimus(request: Request) -> Solution:
    """Devices by marginal gain, each task on the fastest grid of its own; of one ``megatron``'s.

    The value of the formula is the slowest task's.

    Raises:
        InvalidInputError: a method.
        InfeasibleError: a task fits no devices, or all together need more than there are.
    """
    request.check_exact("spindle-optimus")
    if len(request.tasks) == 1:
        return replace(solve_megatron(request), solver="spindle-optimus")
    problems = [Problem(request=request, task=task) for task in request.tasks.values()]
    points = [_points(problem) for problem in problems]
    candidates = [_candidate(request, "", [_curve(own) for own in points])]
    if any(unit.pp > 1 for unit in candidates[0].units):
        # Stages of one device wait for each other in ways that the formula does not know.
        flat = [_curve([p for p in own if p.grid.layout.positions == 1]) for own in points]
        with suppress(InfeasibleError):
            candidates.append(_candidate(request, "no pipeline", flat))
    return Solution(
        solver="spindle-optimus",
        method="exact",
        candidates=tuple(sorted(candidates, key=lambda c: c.objective_s)),
        formula_bound_s=min(c.objective_s for c in candidates),
        # Tasks meet in the reductions of what they share.
        closed_form=False,
        idle_because="no task gets faster with so few more",
    )


def share_out(curves: Sequence[Sequence[tuple[int, float]]], devices: int) -> list[int]:
    """For every task the position of its point, by marginal gain.

    Args:
        curves: of every task (devices, seconds), devices ascending and seconds descending.
        devices: to share out; the first points of all tasks need no more.

    Ties go to the first task.
    """
    at = [0] * len(curves)
    left = devices - sum(own[0][0] for own in curves)
    while True:
        gains: list[tuple[float, int, int]] = []
        for i, (own, k) in enumerate(zip(curves, at, strict=True)):
            if k + 1 < len(own) and own[k + 1][0] - own[k][0] <= left:
                more = own[k + 1][0] - own[k][0]
                gains.append(((own[k][1] - own[k + 1][1]) / more, -i, more))
        if not gains:
            return at
        _, negative, more = max(gains)
        at[-negative] += 1
        left -= more


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """A task on some number of devices."""

    devices: int
    time_s: float
    grid: OneGrid
    split: Split


def _points(problem: Problem) -> list[_Point]:
    """The fastest split that fits of every layout and number of replicas.

    Raises:
        InfeasibleError: nothing that devices and pins allow, or nothing that fits the memory.
    """
    layouts = list(colocated_layouts(problem))
    found: list[_Point] = []
    lacking: list[tuple[float, Layout]] = []
    for layout in layouts:
        grid = OneGrid(problem, layout)
        splits = grid.splits(grid.counts()) if allowed(problem, layout) else []
        if not splits:
            continue
        compute_s, needed = grid.compute_s(splits), grid.needed_bytes(splits)
        lacking += [(own, layout) for own in needed.tolist()]
        fastest: dict[int, Split] = {}
        for i in np.argsort(compute_s, kind="stable"):
            if needed[i] <= problem.memory_bytes:
                fastest.setdefault(splits[i].dp, splits[i])
        found += [
            _Point(
                devices=split.dp * layout.tp * layout.positions,
                time_s=grid.step_s(split),
                grid=grid,
                split=split,
            )
            for split in fastest.values()
        ]
    if not lacking:
        raise nothing_allowed(problem, "spindle-optimus", layouts)
    if not found:
        raise too_large(problem, "spindle-optimus", lacking)
    return found


def _curve(points: Sequence[_Point]) -> list[_Point]:
    """Those that are faster than all on as many or fewer devices, by devices."""
    found: list[_Point] = []
    for point in sorted(points, key=lambda p: (p.devices, p.time_s)):
        if not found or point.time_s < found[-1].time_s:
            found.append(point)
    return found


def _candidate(request: Request, kind: str, curves: Sequence[Sequence[_Point]]) -> Candidate:
    """The plan of the shares.

    Raises:
        InfeasibleError: the tasks need more devices than there are, or their TP groups more nodes.
    """
    names = list(request.tasks)
    if not all(curves):
        raise InfeasibleError("a task fits no grid", hint="use more devices")
    fewest = {name: own[0].devices for name, own in zip(names, curves, strict=True)}
    missing = sum(fewest.values()) - request.devices
    if missing > 0:
        listed = ", ".join(f"{name} {n}" for name, n in fewest.items())
        raise InfeasibleError(
            f"spindle-optimus gives each of {len(names)} tasks devices of its own, at least "
            f"{sum(fewest.values())} ({listed}); there are {request.devices}: {missing} missing",
            hint="use --solver spindle-seq, which runs one after another on all devices",
        )
    pairs = [[(point.devices, point.time_s) for point in own] for own in curves]
    chosen = {
        name: own[k]
        for name, own, k in zip(names, curves, share_out(pairs, request.devices), strict=True)
    }
    shapes = {
        name: (point.split.dp, point.grid.layout.positions, point.grid.layout.tp)
        for name, point in chosen.items()
    }
    grids = place_modules(shapes, cluster=request.cluster, devices=request.devices)
    if grids is None:
        raise InfeasibleError(
            "spindle-optimus: no placement keeps every tensor-parallel group inside a node",
            hint="limit tp in the modules' plan, or give it more devices",
        )
    shares = ", ".join(f"{name} {point.devices}" for name, point in chosen.items())
    return Candidate(
        units=tuple(u for name, point in chosen.items() for u in _units(point, grids[name])),
        objective_s=max(point.time_s for point in chosen.values()),
        notes=(f"devices by marginal gain: {shares}",),
        closed_form=False,
        kind=kind,
    )


def _units(point: _Point, grid: RankGrid) -> Iterator[Unit]:
    """The task's units on the ranks of its grid."""
    for unit in named(point.grid.units(point.split)):
        yield unit.model_copy(update={"ranks": unit.grid.on(grid.members).ranks})
