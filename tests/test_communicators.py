"""Communicators before there is a program: never fewer than the program has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path

import pytest

from mmplan.program.communicators import communicator_counts
from mmplan.program.compile import compile_plan
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload, load_workload
from mmplan.solvers.communicators import PlacedModule, communicators
from mmplan.solvers.problem import Problem
from tests.test_convex import problem_of
from tests.test_symmetry import plans, plans_of_tasks


def expected(plan: Plan, problem: Problem, *, alone: bool) -> dict[int, set[Hashable]]:
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


@pytest.mark.parametrize("seed", range(4))
def test_no_program_has_more_communicators_than_a_solver_counts(seed: int, tmp_path: Path) -> None:
    more = 0
    for plan, costs in plans(tmp_path, seed):
        problem = problem_of(load_workload(tmp_path / "w.json"), costs.profile, plan.devices)
        ranks = [{r for r in unit.all_ranks} for unit in plan.units]
        apart = sum(map(len, ranks)) == len(set().union(*ranks))
        for alone in (False, True) if apart else (False,):
            names = expected(plan, problem, alone=alone)
            for count in communicator_counts(compile_plan(plan)):
                if count.rank in names:
                    more = max(more, len(names[count.rank]) - count.total)
                    assert len(names[count.rank]) >= count.total, (
                        plan.solver.name,
                        alone,
                        count,
                        names[count.rank],
                        [(u.name, u.tp, u.pp, u.vpp, u.dp) for u in plan.units],
                    )
                    print(plan.solver.name, alone, len(names[count.rank]) - count.total)
    assert more <= 3
