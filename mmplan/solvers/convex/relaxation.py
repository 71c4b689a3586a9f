"""The convex relaxation of a disaggregated pipeline: the paper's Algorithm 1, and in closed form.

For given tp and dp of every module the paper lets the devices x_k be real numbers and solves

    min  sum_k w_k / x_k + (l - 1) max_k a_k / x_k    s.t.  sum_k x_k <= N,  x_k >= tp_k dp_k

(a_k = dp_k tp_k C_k: device-seconds of a micro-batch; x_k >= tp dp, that is pp >= 1, is not in
the paper). Where dp is given the warm-ups are constants, w = 0, and the optimum has a closed
form: x_k = max(a_k / tau, low_k) with tau such that they fill N. Where dp follows from x (an
encoder without pp), w_k = a_k.

CVXPY solves it as one parametrised problem (DPP), in x = N u and with an objective near 1:
unscaled, answers were off by up to 1e-4. Rounding to whole stages, each module's down or up,
gives a plan; it may be far from the optimum, or not fit.

Shape suffixes: C = candidates, K = modules.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import merge
from typing import Any

import numpy as np

from mmplan.arrays import Floats, Ints
from mmplan.errors import InfeasibleError
from mmplan.solvers.convex.backbone_groups import BackboneShape, Pipelines
from mmplan.solvers.convex.branch_and_bound import FormulaPlan, Options, longest_after, plan_value
from mmplan.solvers.convex.module_tables import INNER, Table
from mmplan.solvers.problem import Problem
from mmplan.solvers.search_budget import SearchBudget
from mmplan.wording import counted

# A quotient so little below a whole number of stages is that number.
ROUNDING = 1e-6
# Seconds of a quiet core: a frame, each of its candidates, and a program of CVXPY with rounding.
_FRAME_S = 4e-4
_CANDIDATE_S = 1e-6
_PROGRAM_S = 4e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """An optimum over real numbers of devices.

    Attributes:
        value_s: of the objective above.
        devices: x, [K].
    """

    value_s: float
    devices: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Degrees of all modules in one frame; one row each.

    Attributes:
        tp: [C, K].
        dp: [C, K].
        work_s: [C, K], a.
        low: [C, K], fewest devices.
        warm_s: [C], what does not depend on x.
        value_s: [C], the closed form's optimum.
    """

    frame: BackboneShape
    tp: Ints
    dp: Ints
    work_s: Floats
    low: Floats
    warm_s: Floats
    value_s: Floats


def water_filling(work_CK: Floats, low_CK: Floats, devices: float) -> tuple[Floats, Floats]:
    """([C] least max_k a_k / x_k, [C, K] devices); inf where the lower limits do not fit.

    Modules are taken to their limits in the order of a_k / low_k, until the others share
    what is left in proportion to a_k and are above theirs.
    """
    count = len(work_CK)
    ratio = work_CK / low_CK
    order = np.argsort(ratio, axis=1)
    work, low, ratio = (np.take_along_axis(m, order, axis=1) for m in (work_CK, low_CK, ratio))
    zeros = np.zeros((count, 1))
    # Column j: the first j modules are at their limits.
    left = devices - np.hstack([zeros, np.cumsum(low, axis=1)])
    open_work = np.hstack([np.cumsum(work[:, ::-1], axis=1)[:, ::-1], zeros])
    with np.errstate(divide="ignore", invalid="ignore"):
        tau = open_work / left
    tau[:, -1] = ratio[:, -1]
    tau = np.where(left > 0, tau, np.inf)
    tau[:, -1] = ratio[:, -1]
    limit = np.hstack([ratio, np.full((count, 1), np.inf)])
    first = np.argmax(tau < limit, axis=1)
    best = tau[np.arange(count), first]
    best = np.where(low.sum(axis=1) <= devices, best, np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(best[:, None] > 0, work_CK / best[:, None], 0.0)
    return best, np.maximum(share, low_CK)


class AlgorithmOne:
    """The paper's convex program, parametrised once for a number of modules."""

    def __init__(self, modules: int) -> None:
        import cvxpy

        cp: Any = cvxpy
        self._share = cp.Variable(modules, pos=True)
        self._work = cp.Parameter(modules, nonneg=True)
        self._warm = cp.Parameter(modules, nonneg=True)
        self._low = cp.Parameter(modules, nonneg=True)
        slowest = cp.Variable()
        inverse = cp.inv_pos(self._share)
        self._problem = cp.Problem(
            cp.Minimize(cp.sum(cp.multiply(self._warm, inverse)) + slowest),
            [
                cp.multiply(self._work, inverse) <= slowest,
                cp.sum(self._share) <= 1,
                self._share >= self._low,
            ],
        )
        self._solver: Any = cp.CLARABEL

    def solve(
        self, *, steady_s: Floats, warm_s: Floats, low: Floats, devices: float
    ) -> Relaxed | None:
        """min sum warm / x + max steady / x, x >= low, sum x <= devices; None where none fits."""
        scale = float((steady_s.sum() + warm_s.sum()) / devices) or 1.0
        self._work.value = steady_s / devices / scale
        self._warm.value = warm_s / devices / scale
        self._low.value = low / devices
        with warnings.catch_warnings():
            # An inaccurate answer is one: the closed form stands beside it as the bound.
            warnings.simplefilter("ignore", UserWarning)
            self._problem.solve(solver=self._solver)
        if self._problem.status not in ("optimal", "optimal_inaccurate"):
            return None
        shares = np.asarray(self._share.value, dtype=np.float64)
        return Relaxed(value_s=float(self._problem.value) * scale, devices=shares * devices)


class Relaxation:
    """The relaxation over all degrees of one task's modules.

    Args:
        pipelines: the candidates; dp divides the batch and the backbone's dp.
    """

    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines = pipelines
        self._devices = pipelines.problem.devices
        self._tables = cache(pipelines.tables_of)

    def candidates(self, frame: BackboneShape) -> Candidates:
        """Every tp and dp in a frame, best relaxation first."""
        columns = [self._module(k, frame) for k in range(len(self._pipelines.modules))]
        grid = np.indices([c.shape[1] for c in columns]).reshape(len(columns), -1)
        picked = [
            np.stack([c[i][g] for c, g in zip(columns, grid, strict=True)], axis=1)
            for i in range(5)
        ]
        fits = picked[4].sum(axis=1) <= self._devices
        tp, dp, warm, work, low = (values[fits] for values in picked)
        warm_s = self._longest(warm)
        value = warm_s + (frame.steps - 1) * water_filling(work, low, self._devices)[0]
        order = np.argsort(value, kind="stable")
        return Candidates(
            frame=frame,
            tp=tp[order].astype(np.int64),
            dp=dp[order].astype(np.int64),
            work_s=work[order],
            low=low[order],
            warm_s=warm_s[order],
            value_s=value[order],
        )

    def _module(self, k: int, frame: BackboneShape) -> Floats:
        """Rows of tp, dp, seconds of a micro-batch, device-seconds, fewest devices."""
        own, problem = self._pipelines.tables[k], self._pipelines.problem
        dp, size = self._pipelines.replicas(k, frame)
        rows: list[Floats] = []
        if not len(dp):
            return np.zeros((5, 0))
        basis = own.basis(size)
        for t, tp in enumerate(own.tps):
            seconds = own.shapes.total[0, :INNER] @ basis[t, :INNER]
            # All stages' bytes: some stage holds at least their mean.
            blocks = own.costs.blocks
            numbers = blocks.trained.sum(), blocks.frozen.sum()
            fixed = own.costs.parameter_bytes(*numbers, tp=tp, dp=dp)
            fewest = tp * dp * np.maximum(1.0, fixed / problem.memory_bytes)
            rows.append(np.stack([np.full(len(dp), tp), dp, seconds, tp * dp * seconds, fewest]))
        return np.concatenate(rows, axis=1)

    def _longest(self, warm_CK: Floats) -> Floats:
        after = np.zeros_like(warm_CK)
        for k in reversed(range(warm_CK.shape[1])):
            for p, c in self._pipelines.edges:
                if p == k:
                    after[:, k] = np.maximum(after[:, k], after[:, c] + warm_CK[:, c])
        return (after + warm_CK).max(axis=1)

    def rounded(self, found: Candidates, row: int, devices: Floats) -> FormulaPlan | None:
        """The best way to round each module's stages down or up; None where none fits."""
        frame, pipelines = found.frame, self._pipelines
        tables = self._tables(frame)
        options = [table.options.all() for table in tables]
        degrees = zip(found.tp[row], found.dp[row], devices, strict=True)
        rows = [
            self._whole(k, tables[k], int(tp), int(dp), float(x) / float(tp * dp))
            for k, (tp, dp, x) in enumerate(degrees)
        ]
        group = pipelines.frames.index(frame)
        fitting = (
            FormulaPlan(
                value_s=plan_value(options, choice, frame.steps, pipelines.edges),
                group=group,
                choice=choice,
            )
            for choice in itertools.product(*rows)
            if self._fits(options, choice)
        )
        return min(fitting, default=None)

    def _whole(self, k: int, table: Table, tp: int, dp: int, stages: float) -> list[int]:
        """Rows of the module's options with the nearest numbers of stages."""
        own = self._pipelines.tables[k]
        pp = own.shapes.pp[own.shapes.vpp == 1]
        below, above = pp[pp <= stages + ROUNDING], pp[pp >= stages - ROUNDING]
        wanted = {int(near) for near in (*below[-1:], *above[:1])}
        same = (table.tp == own.tps.index(tp)) & (table.dp == dp)
        same &= own.shapes.vpp[table.shape] == 1
        return np.flatnonzero(same & np.isin(own.shapes.pp[table.shape], [*wanted])).tolist()

    def _fits(self, options: Sequence[Options], choice: Sequence[int]) -> bool:
        rows = list(zip(options, choice, strict=True))
        if sum(int(own.devices[o]) for own, o in rows) > self._devices:
            return False
        after = longest_after([int(own.depth[o]) for own, o in rows], self._pipelines.edges)
        return all(int(own.depth_limit[o]) >= n for (own, o), n in zip(rows, after, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxedPlans:
    """Rounded plans, best first, and a bound on the formula over all candidates."""

    rounded: tuple[FormulaPlan, ...]
    formula_bound_s: float
    pipelines: Pipelines


def relax(problem: Problem) -> RelaxedPlans:
    """Solve relaxations with CVXPY, best first, and round them.

    Stops when no relaxation left can round to a better plan, or at the end of the budget once
    there is a plan.

    Raises:
        InfeasibleError: no relaxation has a solution, or none rounds to a plan that fits.
    """
    budget = SearchBudget(problem.request.budget_s)
    pipelines = Pipelines(problem, microbatches=[1], interleaved=False, divisible=True)
    relaxation = Relaxation(pipelines)
    bounds = {
        frame: g.bound_s for g, frame in zip(pipelines.groups(), pipelines.frames, strict=True)
    }
    frames = sorted(bounds, key=lambda frame: bounds[frame])
    rows: list[Iterator[tuple[float, int, int, Candidates]]] = []
    skipped_s = float("inf")
    for index, frame in enumerate(frames):
        if rows and budget.is_over:
            skipped_s = bounds[frame]
            break
        found = relaxation.candidates(frame)
        budget.spend(_FRAME_S + _CANDIDATE_S * len(found.value_s))
        rows.append(_rows(index, found))
    plans: list[FormulaPlan] = []
    bound_s = skipped_s
    program = AlgorithmOne(len(pipelines.modules))
    for value, _, row, found in merge(*rows, key=lambda item: item[:3]):
        worst = sorted(p.value_s for p in plans)[: problem.request.top][-1:]
        if (plans and budget.is_over) or (len(plans) >= problem.request.top and value >= worst[0]):
            break
        budget.spend(_PROGRAM_S)
        solved = program.solve(
            steady_s=(found.frame.steps - 1) * found.work_s[row],
            warm_s=np.zeros(len(pipelines.modules)),
            low=found.low[row],
            devices=problem.devices,
        )
        if solved is None:
            continue
        bound_s = min(bound_s, value, float(found.warm_s[row]) + solved.value_s)
        plan = relaxation.rounded(found, row, solved.devices)
        if plan is not None:
            plans.append(plan)
    if not plans:
        raise _nothing_rounds(problem, bound_s)
    plans.sort(key=lambda plan: plan.value_s)
    return RelaxedPlans(rounded=tuple(plans), formula_bound_s=bound_s, pipelines=pipelines)


def _rows(index: int, found: Candidates) -> Iterator[tuple[float, int, int, Candidates]]:
    for row, value in enumerate(found.value_s):
        yield float(value), index, row, found


def _nothing_rounds(problem: Problem, bound_s: float) -> InfeasibleError:
    if np.isfinite(bound_s):
        return InfeasibleError(
            f"no relaxation (the best takes {bound_s:.4g} s) rounds to whole stages that fit "
            f"{counted(problem.devices, 'device')} and their memory",
            hint="use --method exact",
        )
    return InfeasibleError(
        f"the convex relaxation has no solution on {counted(problem.devices, 'device')}",
        hint="use --method exact, which says what is missing",
    )
