"""Work that differs between samples: the straggler, and solvers that count with it."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmplan.costs.program_costs import CostModel
from mmplan.costs.sample_work import SampledWork
from mmplan.schema.profile import DataWork, Profile
from mmplan.solvers.baselines.megatron import solve_megatron
from mmplan.solvers.distmm.solver import solve_distmm
from mmplan.solvers.problem import Problem
from tests.solving import module_profile, profile, run_solve, workload
from tests.test_baselines import Oracle as GridOracle
from tests.test_baselines import least_s, without_communicators
from tests.test_convex import Oracle, candidates, problem_of, random_problem


def skewed(count: int, sigma: float, seed: int = 0) -> tuple[float, ...]:
    draws = np.exp(sigma * np.random.default_rng(seed).normal(size=count))
    return tuple(float(x) for x in draws)


def sampled(reordered: bool = False, **work: tuple[float, ...]) -> SampledWork:
    return SampledWork(DataWork(work=work), seed=0, reordered=reordered)


def with_data(costs: Profile, **data: Any) -> Profile:
    return Profile.model_validate(costs.model_dump() | {"data": {"default": data}})


# --- the straggler -------------------------------------------------------------------


def every_batch(rows: tuple[float, ...], dp: int, samples: int) -> float:
    """Expected work of the busiest replica over the mean, from every batch there is."""
    share = -(-samples // dp)
    mean = sum(rows) / len(rows)
    busiest = [
        max(sum(batch[d * share : (d + 1) * share]) for d in range(dp))
        for batch in itertools.product(rows, repeat=dp * share)
    ]
    return sum(busiest) / len(busiest) / (share * mean)


@pytest.mark.parametrize(
    ("rows", "dp", "samples"),
    [
        ((1.0, 3.0), 2, 2),
        ((1.0, 3.0), 2, 4),
        ((0.0, 0.0, 1.0), 3, 3),
        ((1.0, 2.0, 6.0), 2, 5),  # shares of 3 and 2: counted as two of 3
        ((5.0, 5.0), 4, 8),
    ],
)
def test_straggler_equals_every_batch(rows: tuple[float, ...], dp: int, samples: int) -> None:
    got = sampled(a=rows).straggler("a", dp=dp, samples=samples)
    assert got == pytest.approx(every_batch(rows, dp, samples), rel=0.02)


@pytest.mark.parametrize(("dp", "samples"), [(3, 24), (11, 64), (56, 1920), (240, 1920)])
def test_straggler_equals_plain_sampling(dp: int, samples: int) -> None:
    rows = np.array(skewed(512, 0.8))
    rows /= rows.mean()
    share = -(-samples // dp)
    picks = np.random.default_rng(5).integers(512, size=(3000, dp * share))
    expected = rows[picks].reshape(3000, dp, share).sum(axis=2).max(axis=1).mean() / share
    got = sampled(a=tuple(rows.tolist())).straggler("a", dp=dp, samples=samples)
    # 11 and 240 lie between two numbers of replicas that were drawn, with shares of their own.
    assert got == pytest.approx(expected, rel=0.04 if dp in (11, 240) else 0.015)


@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.integers(0, 100).map(float), min_size=1, max_size=8).filter(any),
    st.integers(1, 80),
    st.booleans(),
)
def test_straggler_never_falls_with_more_replicas(
    rows: list[float], samples: int, reordered: bool
) -> None:
    known = sampled(reordered, a=tuple(rows))
    factors = [known.straggler("a", dp=dp, samples=samples) for dp in range(1, samples + 1)]
    assert factors[0] == 1
    assert all(b >= a for a, b in itertools.pairwise(factors))


def test_dealt_batches_have_less_of_a_straggler() -> None:
    rows = skewed(512, 0.8)
    dealt, given_order = (
        sampled(reordered, a=rows).straggler("a", dp=8, samples=256) for reordered in (True, False)
    )
    assert 1 <= dealt < 1.01
    assert given_order > 1.2
    # Lengths are no work(index): the runtime cannot deal by them.
    lengths = SampledWork(DataWork(source="lengths", work={"a": rows}), seed=0, reordered=True)
    assert lengths.straggler("a", dp=8, samples=256) == given_order


def test_modules_without_work_and_equal_samples_have_no_straggler() -> None:
    known = sampled(a=(2.0, 2.0, 2.0), b=skewed(3, 1.0))
    assert known.straggler("a", dp=16, samples=64) == 1
    assert known.straggler("elsewhere", dp=16, samples=64) == 1
    assert known.straggler("b", dp=16, samples=64) > 1


def test_draws_keep_samples_together_and_are_repeatable() -> None:
    known = sampled(a=(1.0, 2.0, 3.0), b=(30.0, 20.0, 10.0))
    drawn = known.draw(1000, number=3)
    assert np.allclose(drawn["a"] + drawn["b"], 2)  # a / 2 and b / 20 of the same row
    assert np.array_equal(drawn["a"], known.draw(1000, number=3)["a"])
    assert not np.array_equal(drawn["a"], known.draw(1000, number=4)["a"])


# --- costs ---------------------------------------------------------------------------


def test_times_are_for_samples_of_mean_work() -> None:
    given_profile = profile({"a": module_profile(1.0, 2.0, fixed_s=4.0)}, 1)
    plain = CostModel(given_profile)
    # Points were taken on samples worth 2, the data are worth 3 on average.
    worth = CostModel(with_data(given_profile, work={"a": [1.0, 5.0]}, at={"a": 2.0}))
    where: dict[str, Any] = {"task": "default", "module": "a", "tp": 1}
    assert worth.forward_s(**where, samples=4) == pytest.approx(4 + 1.5 * 4)
    assert worth.forward_s(**where, samples=4) == plain.forward_s(**where, samples=6)
    assert worth.curves(**where).backward.at(4) == pytest.approx(4 + 1.5 * 8)
    assert worth.activation_bytes(**where, samples=4) == plain.activation_bytes(**where, samples=6)


# --- solvers -------------------------------------------------------------------------


def varied(problem: Problem, rng: np.random.Generator) -> Problem:
    """The same problem with samples of which some are worth more."""
    costs = problem.costs
    work = {
        name: [float(x) for x in rng.lognormal(0, 1.2, 20)]
        for name in problem.task.modules
        if rng.random() < 0.8
    } or {problem.task.modules[0]: [1.0, 4.0]}
    data = {"work": work, "source": str(rng.choice(["work", "lengths"]))}
    request = replace(
        problem.request,
        costs=CostModel(with_data(costs.profile, **data), costs.cluster, costs.training),
        top=1,
    )
    return Problem(request=request, task=problem.task)


@pytest.mark.parametrize("graph", ["llm", "1 + 0", "1 + 1"])
def test_convex_equals_enumeration_on_varied_data(graph: str) -> None:
    rng = np.random.default_rng(len(graph))
    solved, dearer = 0, 0
    for _ in range(14):
        plain = random_problem(rng, graph)
        problem = varied(plain, rng)
        values = [c.objective_s for c in candidates(problem)]
        expected = Oracle(problem).best_s()
        assert min(values, default=math.inf) == pytest.approx(expected, rel=1e-9)
        solved += bool(values)
        alone = Problem(request=replace(plain.request, top=1), task=plain.task)
        before = min((c.objective_s for c in candidates(alone)), default=math.inf)
        assert expected >= before * (1 - 1e-9)
        dearer += before < expected < math.inf
    assert solved > 3
    assert dearer > 1


def test_grids_equal_enumeration_on_varied_data() -> None:
    rng = np.random.default_rng(8)
    solved = 0
    for _ in range(25):
        problem = varied(without_communicators(random_problem(rng, "1 + 0")), rng)
        oracle = GridOracle(problem)
        found = least_s(solve_megatron, problem)
        assert found == pytest.approx(oracle.best_s(oracle.colocated()), rel=1e-9)
        solved += found < math.inf
    assert solved > 6


def test_distmm_counts_the_busiest_replica() -> None:
    """A module alone on three devices: its three replicas wait for the busiest at each sync."""
    job = workload({"a": {}}, batch=24, sync_batch=12)
    rows = skewed(256, 1.0)
    costs = with_data(profile({"a": module_profile(1.0, 2.0, blocks=1)}, 3), work={"a": rows})
    job = job.model_copy(update={"train": job.train.model_copy(update={"reorder": False})})
    solution = solve_distmm(problem_of(job, costs, 3).request)
    factor = sampled(a=rows).straggler("a", dp=3, samples=12)
    # Two rounds of four samples a replica, one second forward and two backward each.
    assert solution.candidates[0].objective_s == pytest.approx(2 * 4 * 3 * factor)
    assert solution.formula_bound_s <= solution.candidates[0].objective_s


def test_formula_and_simulation_see_the_same_stragglers(tmp_path: Path) -> None:
    job = workload({"a": {}, "b": {}}, batch=48, sync_batch=24)
    costs = with_data(
        profile({"a": module_profile(blocks=1), "b": module_profile(3.0, 5.0, blocks=1)}, 8),
        work={"a": skewed(256, 1.0), "b": skewed(256, 0.5, seed=1)},
    )
    plan = run_solve(tmp_path, job, costs, solver="distmm", top=1)
    assert all(unit.dp > 1 for unit in plan.units)
    assert plan.predicted.iteration_s == pytest.approx(plan.solver.objective_s)
    assert plan.solver.formula_bound_s <= plan.solver.objective_s
    even = run_solve(tmp_path, job, costs.model_copy(update={"data": {}}), solver="distmm", top=1)
    assert plan.solver.objective_s > even.solver.objective_s
