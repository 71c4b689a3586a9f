"""Algorithm 1 in CVXPY, its closed form, and what rounding makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from mmplan.errors import InfeasibleError
from mmplan.solvers.convex.backbone_groups import Pipelines
from mmplan.solvers.convex.relaxation import AlgorithmOne, Relaxation, relax, water_filling
from mmplan.solvers.convex.solver import solve_convex
from tests.selection import some
from tests.test_convex import GRAPHS, random_problem


def test_water_filling_equals_cvxpy() -> None:
    rng = np.random.default_rng(6)
    programs = {modules: AlgorithmOne(modules) for modules in (1, 2, 3, 5)}
    for _ in range(60):
        modules = int(rng.choice([1, 2, 3, 5]))
        devices = float(rng.integers(8, 2000))
        work = np.exp(rng.uniform(-6, 9, modules))
        low = rng.uniform(0.5, 1.2 * devices / modules, modules)
        tau, x = water_filling(work[None], low[None], devices)
        found = programs[modules].solve(
            steady_s=work, warm_s=np.zeros(modules), low=low, devices=devices
        )
        if low.sum() > devices:
            assert np.isinf(tau[0])
            assert found is None
            continue
        assert found is not None
        assert found.value_s == pytest.approx(tau[0], rel=1e-6)
        assert (x[0] >= low * (1 - 1e-12)).all()
        assert x[0].sum() <= devices * (1 + 1e-9)
        assert max(work / x[0]) == pytest.approx(tau[0])


def test_water_filling_closed_forms() -> None:
    # Nobody at a limit: devices in proportion to work.
    tau, x = water_filling(np.array([[3.0, 1.0]]), np.array([[0.1, 0.1]]), 8.0)
    assert tau[0] == 0.5
    assert x[0].tolist() == [6.0, 2.0]
    # The second needs its limit, the first has the rest.
    tau, x = water_filling(np.array([[3.0, 1.0]]), np.array([[1.0, 4.0]]), 8.0)
    assert tau[0] == 0.75
    assert x[0].tolist() == [4.0, 4.0]
    # All at their limits exactly, and one device too few.
    tau, _ = water_filling(np.array([[3.0, 1.0]]), np.array([[4.0, 4.0]]), 8.0)
    assert tau[0] == 0.75
    tau, _ = water_filling(np.array([[3.0, 1.0]]), np.array([[4.0, 4.0]]), 7.9)
    assert np.isinf(tau[0])


def test_warm_ups_that_fall_with_devices() -> None:
    """One free module has a closed form: all devices, T = (w + a) / N."""
    program = AlgorithmOne(1)
    found = program.solve(
        steady_s=np.array([6.0]), warm_s=np.array([2.0]), low=np.array([1.0]), devices=4.0
    )
    assert found is not None
    assert found.value_s == pytest.approx(2.0, rel=1e-7)
    two = AlgorithmOne(2).solve(
        steady_s=np.array([5.0, 0.0]),
        warm_s=np.array([0.0, 4.0]),
        low=np.array([0.1, 0.1]),
        devices=9.0,
    )
    assert two is not None
    split = np.linspace(0.1, 8.9, 100001)
    assert two.value_s == pytest.approx((5 / split + 4 / (9 - split)).min(), rel=1e-6)


@pytest.mark.parametrize("graph", some(GRAPHS, 3, 4))
def test_relaxation_bounds_every_plan_it_could_round_to(graph: str) -> None:
    rng = np.random.default_rng(len(graph))
    rounded = 0
    for _ in range(12):
        problem = random_problem(rng, graph)
        try:
            exact = solve_convex(problem.request).formula_bound_s
        except InfeasibleError:
            continue
        try:
            plans = relax(problem)
        except InfeasibleError:
            continue
        rounded += 1
        assert plans.formula_bound_s <= plans.rounded[0].value_s * (1 + 1e-9)
        assert plans.rounded[0].value_s >= exact * (1 - 1e-9)
    assert rounded


def test_candidates_are_all_degrees_in_the_order_of_their_bound() -> None:
    problem = random_problem(np.random.default_rng(3), "1 + 1")
    pipelines = Pipelines(problem, microbatches=[1], interleaved=False, divisible=True)
    pipelines.groups()
    for frame in pipelines.frames:
        found = Relaxation(pipelines).candidates(frame)
        assert (np.diff(found.value_s) >= 0).all()
        rows = np.concatenate([found.tp, found.dp], axis=1)
        assert len(np.unique(rows, axis=0)) == len(rows)
        assert (frame.samples % found.dp == 0).all()
