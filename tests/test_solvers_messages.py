"""What solvers say of messages under way is not less than what a plan's program holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.errors import InfeasibleError
from mmplan.program.compile import compile_plan
from mmplan.schema.plan import Plan
from mmplan.simulation.step import peak_bytes
from mmplan.solvers.communicators import PlacedModule
from mmplan.solvers.messages import stage_messages
from mmplan.solvers.problem import Problem
from mmplan.solvers.stage_rows import largest_rows
from tests.programs import in_flight
from tests.solving import run_solve, workload
from tests.test_convex import problem_of
from tests.test_symmetry import CHAIN, LOSSES, SOLVERS, costs_of

JOBS = {
    "chain": CHAIN,
    "frozen": {**CHAIN, "vision": {"frozen": True}},
    "skip": {**CHAIN, "image": {"inputs": ["llm", "vision"]}},
}


def check(folder: Path, name: str, seed: int) -> int:
    """The plans of all solvers for a random chain; how many ranks have messages."""
    rng = np.random.default_rng(seed)
    devices, batch = int(rng.integers(6, 17)), int(rng.choice([12, 24]))
    job = workload(JOBS[name], batch=batch, losses=LOSSES)
    costs = costs_of(rng, devices)
    problem = problem_of(job, costs, devices)
    found, refused = 0, list[str]()
    for solver in SOLVERS:
        try:
            plan = run_solve(folder, job, costs, solver=solver, top=1)
        except InfeasibleError as error:
            refused.append(error.message)
            continue
        found += check_plan(plan, problem)
    # A plan that a solver takes for one that fits does.
    assert not any("the smallest of" in message for message in refused), refused
    return found


def check_plan(plan: Plan, problem: Problem) -> int:
    """Every rank's stages, each with the micro-batches that it holds in the program."""
    program = compile_plan(plan)
    costs = ProgramCosts(
        program, CostModel(problem.costs.profile, plan.cluster, plan.training), plan
    )
    placed = {
        unit.module: PlacedModule(
            stages=tuple((unit.grid.stage(c % unit.pp), cut) for c, cut in enumerate(unit.blocks)),
            tp=unit.tp,
            dp=unit.dp,
        )
        for unit in plan.units
    }
    flights, found = in_flight(program), 0
    for rank, peak in enumerate(peak_bytes(program, costs)):
        fixed = costs.static_bytes(rank) + costs.communicator_bytes(rank)
        active = alone = 0.0
        for stage in program.stages_of(rank):
            spans = stage.microbatches[stage.place(rank)[0]]
            size, flight = max(b - a for a, b in spans), flights[rank, stage.index]
            messages = stage_messages(problem, stage.module, stage.blocks, placed)
            held = costs.activation_bytes(stage, size)
            alone += held * flight
            active += (held + size * messages.carried) * flight
            active += size * messages.bytes_beside(len(spans))
        assert peak <= fixed + active * (1 + 1e-9), (plan.solver.name, rank)
        found += peak > fixed + alone
    return found


@pytest.mark.parametrize("name", JOBS)
def test_no_rank_holds_more_than_is_said(tmp_path: Path, name: str) -> None:
    assert check(tmp_path, name, 1) > 10


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", JOBS)
def test_no_rank_holds_more_than_is_said_often(tmp_path: Path, name: str) -> None:
    assert sum(check(tmp_path, name, seed) for seed in range(10, 30)) > 200


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=1, max_size=8))
def test_no_row_is_above_the_largest_ones(rows: list[tuple[int, ...]]) -> None:
    found = largest_rows(np.array(rows, dtype=np.float64)).tolist()

    def reached(i: int, j: int) -> bool:
        return all(a <= b for a, b in zip(rows[i], rows[j], strict=True))

    assert all(any(reached(i, j) for j in found) for i in range(len(rows)))
    assert not any(reached(i, j) for i in found for j in found if i != j)
    assert all(rows.index(rows[i]) == i for i in found)
