"""Recomputation that the plan chooses: against every setting, and as files and runs take it."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Literal

import pytest

from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.planning.recomputation import free_modules
from mmplan.schema.agreement import check_agrees
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.recompute import Recompute, recomputed_blocks
from mmplan.schema.workload import Workload
from tests.solving import module_profile, profile, run_solve, workload


def _random_job(rng: random.Random) -> tuple[Workload, Profile]:
    """A chain of two modules whose activations the memory holds in part."""
    first, second = rng.choice([1, 2, 3]), rng.choice([2, 3, 4])
    towers = {
        "a": module_profile(1, 1, blocks=first, activation_bytes=rng.choice([2, 8])),
        "b": module_profile(2, 1, blocks=second, activation_bytes=rng.choice([2, 8])),
    }
    losses = {"own": {"factory": "x:y", "inputs": ["b"]}}
    modules = {"a": {}, "b": {"inputs": ["a", "b_data"]}}
    job = workload(modules, batch=rng.choice([4, 8]), losses=losses)
    return job, profile(towers, rng.randint(2, 5), memory_bytes=rng.choice([2.0, 4.0, 8.0, 14.0]))


def _with(job: Workload, **recompute: Recompute | Literal["auto"]) -> Workload:
    modules = {
        name: spec.model_copy(update={"recompute": recompute.get(name, spec.recompute)})
        for name, spec in job.modules.items()
    }
    return job.model_copy(update={"modules": modules})


def _solved(folder: Path, job: Workload, costs: Profile) -> Plan | None:
    try:
        return run_solve(folder, job, costs, solver="convex", top=4)
    except InfeasibleError:
        return None


def test_two_modules_get_the_best_of_all_settings(tmp_path: Path) -> None:
    rng, chosen = random.Random(11), Counter[str]()
    for _ in range(3):
        job, costs = _random_job(rng)
        free = _with(job, a="auto", b="auto")
        assert free_modules(free) == ("a", "b")
        plan = _solved(tmp_path, free, costs)
        settings = [_with(job, a=a, b=b) for a, b in product(("none", "full"), repeat=2)]
        plans = [_solved(tmp_path, each, costs) for each in settings]
        least_s = min((p.predicted.iteration_s for p in plans if p), default=math.inf)
        if plan is None:
            assert math.isinf(least_s)
            chosen["nothing fits"] += 1
            continue
        recomputed = plan.recomputing.values()
        if {*recomputed} <= {"full"}:
            assert plan.predicted.iteration_s == pytest.approx(least_s, rel=1e-9)
        else:
            assert plan.predicted.iteration_s < least_s
            again = _solved(tmp_path, _with(job, **plan.recomputing), costs)
            assert again is not None
            assert again.predicted.iteration_s == plan.predicted.iteration_s
            chosen["some blocks"] += 1
        check_agrees(plan, free)
        check_agrees(plan, _with(job, **plan.recomputing))
        chosen["+".join(sorted(plan.recomputing)) or "none"] += 1
    assert chosen["none"]
    assert chosen["some blocks"]
    assert len(chosen) >= 3


def test_some_blocks_lie_evenly_among_the_others() -> None:
    for blocks, count in product(range(1, 9), repeat=2):
        if count > blocks:
            continue
        ranges = recomputed_blocks(count, blocks)
        chosen = [any(a <= b < z for a, z in ranges) for b in range(blocks)]
        assert sum(chosen) == count
        for a in range(blocks):
            for z in range(a + 1, blocks + 1):
                assert abs(sum(chosen[a:z]) - count * (z - a) / blocks) < 1
    assert recomputed_blocks("none", 3) == ()
    assert recomputed_blocks("full", 3) == recomputed_blocks(3, 3) == ((0, 3),)


def test_more_blocks_than_there_are_cannot_recompute(tmp_path: Path) -> None:
    towers = {"a": module_profile(1, 2, blocks=2, activation_bytes=1)}
    job = workload({"a": {"recompute": 3}}, batch=4)
    with pytest.raises(InvalidInputError, match="3 of 2 blocks"):
        run_solve(tmp_path, job, profile(towers, 2), solver="auto")


def test_a_plan_that_recomputes_is_not_one_of_a_workload_that_does_not(tmp_path: Path) -> None:
    towers = {"a": module_profile(1, 2, activation_bytes=1)}
    job = workload({"a": {"recompute": "full"}}, batch=4)
    costs = profile(towers, 2)
    plan = run_solve(tmp_path, job, costs, solver="auto")
    check_agrees(plan, _with(job, a="auto"))
    with pytest.raises(InvalidInputError, match="recompute"):
        check_agrees(plan, _with(job, a="none"))
