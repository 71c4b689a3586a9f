"""Communicators before there is a program: never fewer than the program has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path

import numpy as np
import pytest

from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.program.communicators import communicator_counts
from mmplan.program.compile import compile_plan
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import load_workload
from mmplan.solvers.communicators import PlacedModule, communicators
from mmplan.solvers.problem import Problem
from tests.solving import module_profile, profile, run_solve, workload
from tests.test_convex import problem_of
from tests.test_symmetry import plans

Names = dict[int, set[Hashable]]


def names_of(plan: Plan, problem: Problem, *, alone: bool) -> Names:
    """By rank, names of communicators; ``alone`` as of each module by itself."""
    placed = {
        unit.module: PlacedModule(
            stages=tuple(
                (frozenset(r for group in unit.grid.stage(c % unit.pp) for r in group), blocks)
                for c, blocks in enumerate(unit.blocks)
            ),
            tp=unit.tp,
            dp=unit.dp,
        )
        for unit in plan.units
    }
    found: defaultdict[int, set[Hashable]] = defaultdict(set)
    for part in [{m: own} for m, own in placed.items()] if alone else [placed]:
        for place, names in communicators(problem, part).items():
            for rank in place if isinstance(place, frozenset) else ():
                found[rank] |= names
    return found


def check_counts(folder: Path, plan: Plan, costs: Profile, most_more: int) -> None:
    """A plan's ranks have no more communicators than is said, and few less."""
    problem = problem_of(load_workload(folder / "w.json"), costs, plan.devices)
    used = [rank for unit in plan.units for rank in set(unit.all_ranks)]
    counts = [count for count in communicator_counts(compile_plan(plan)) if count.rank in used]
    for alone in (False, True) if len(used) == len({*used}) else (False,):
        names = names_of(plan, problem, alone=alone)
        more = [len(names[count.rank]) - count.total for count in counts]
        assert 0 <= min(more) <= max(more) <= most_more


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_chains_have_no_more_communicators_than_solvers_count(seed: int, tmp_path: Path) -> None:
    for plan, costs in plans(tmp_path, seed):
        check_counts(tmp_path, plan, costs.profile, 2)


SOLVERS = ["distmm", "colocated", "megatron", "megatron-rigid", "deepspeed", "ratio"]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))]
)
def test_towers_have_no_more_communicators_than_solvers_count(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    devices = int(rng.integers(2, 13))
    names = list("abc")[: rng.integers(1, 4)]
    made = {
        name: module_profile(
            blocks=int(rng.integers(2, 5)),
            tp={1: 1.0, 2: 1.7},
            activation_bytes=float(rng.integers(1, 60)),
        )
        for name in names
    }
    costs = profile(made, devices, memory_bytes=float(rng.choice([400, 1e9])))
    pins = [{"pp": 2}, {"tp": 2}, {"dp": 1}, {}, {}]
    job = workload(
        {n: {"plan": pins[rng.integers(5)], "frozen": bool(rng.random() < 0.2)} for n in names[:-1]}
        | {names[-1]: {}},
        batch=24,
        sync_batch=12,
    )
    solved = 0
    for solver in SOLVERS:
        try:
            plan = run_solve(tmp_path, job, costs, solver=solver, top=1)
        except (InfeasibleError, InvalidInputError):
            continue
        solved += 1
        check_counts(tmp_path, plan, costs, 2)
    assert solved
