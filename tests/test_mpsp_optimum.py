"""The scheduler of chains and its bounds against CP-SAT's optimum; needs ortools."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest
from hypothesis import example, given, settings

from mmplan.solvers.mpsp.bounds import phase_bound
from mmplan.solvers.mpsp.instance import Chain, Instance
from mmplan.solvers.mpsp.list_schedule import Evaluator
from mmplan.solvers.mpsp.search import find_schedules
from mmplan.solvers.search_budget import SearchBudget
from tests.mpsp_cases import brute_force, chain, instances

pytest.importorskip("ortools", reason="the optima are ortools'; pip install ortools")

from tests.mpsp_optimum import optimum

ONE_TASK = Instance(
    chains=(chain([1, 2, 4], [8, 6, 4], blocks=2), chain([1, 2], [4, 2], blocks=2, after=[0])),
    devices=4,
)


@settings(max_examples=15, deadline=None)
@given(
    instances(max_chains=3, max_blocks=2, max_devices=4).filter(
        lambda i: sum(c.blocks for c in i.chains) <= 4
    )
)
def test_cp_sat_and_brute_force_agree(instance: Instance) -> None:
    tables = [own.forward_s for own in instance.chains]
    found = optimum(instance, tables, limit_s=20, tick_s=1.0)
    assert found.proven
    assert found.seconds == pytest.approx(brute_force(instance, tables))


@settings(max_examples=20, deadline=None)
@given(instances(max_chains=5, max_blocks=4, max_devices=8))
@example(Instance(chains=(chain([2], [6], blocks=3),), devices=3))
@example(Instance(chains=tuple(chain([1], [6], blocks=2) for _ in range(5)), devices=2))
@example(ONE_TASK)
@example(Instance(chains=(chain([1, 2, 3], [6, 8, 3]), chain([1, 2, 3], [6, 8, 3])), devices=3))
def test_no_bound_exceeds_the_optimum_and_no_schedule_is_shorter(instance: Instance) -> None:
    tables = [own.forward_s for own in instance.chains]
    found = optimum(instance, tables, limit_s=5, tick_s=1.0)
    bound = phase_bound(instance, tables, SearchBudget(5))
    assert bound.seconds <= found.seconds * (1 + 1e-9)
    schedules = find_schedules(
        instance, bound_s=0.0, configurations=bound.configurations, budget=SearchBudget(0.05)
    )
    best_s = min(Evaluator(instance).run(own).forward_s for own in schedules.values())
    assert best_s >= found.bound_s * (1 - 1e-9)


def small(rng: np.random.Generator, graph: bool) -> Instance:
    """Short chains on 8 devices: speed curves concave and not, monotone and not."""
    chains: list[Chain] = []
    for m in range(int(rng.integers(3, 6))):
        counts = [1, 2, 4, 8] if rng.random() < 0.5 else list(range(1, 9))
        work = int(rng.integers(10, 60))
        time_s = [
            1 + round(work * (rng.uniform(0, 0.1) + rng.uniform(0.9, 1.2) / n)) for n in counts
        ]
        blocks = int(rng.integers(2, 4))
        after = (int(rng.integers(0, m)),) if graph and m % 2 else ()
        table = np.outer(np.array(time_s, dtype=np.float64), np.ones(blocks))
        chains.append(
            Chain(
                name=f"m{m}",
                counts=tuple(counts),
                forward_s=table,
                backward_s=table,
                after=after,
            )
        )
    return Instance(chains=tuple(chains), devices=8)


@pytest.mark.slow
@pytest.mark.parametrize("graph", [False, True])
def test_within_a_percent_of_the_optimum_in_the_median(graph: bool) -> None:
    rng = np.random.default_rng(11)
    ratios: list[float] = []
    for _ in range(12):
        instance = small(rng, graph)
        tables = [own.forward_s for own in instance.chains]
        best = optimum(instance, tables, limit_s=6, tick_s=1.0)
        if not best.proven:
            continue
        bound = phase_bound(instance, tables, SearchBudget(1))
        schedules = find_schedules(
            instance,
            bound_s=2 * bound.seconds,
            configurations=bound.configurations,
            budget=SearchBudget(1),
        )
        ratios.append(
            min(Evaluator(instance).run(own).forward_s for own in schedules.values()) / best.seconds
        )
    assert len(ratios) >= 8
    assert median(ratios) <= 1.01, sorted(ratios)
    assert min(ratios) >= 1 - 1e-9
