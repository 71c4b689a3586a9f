"""The cost table against the cost model's scalar answers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from mmplan.costs.program_costs import CostModel
from mmplan.schema.plan import PlannedTraining
from mmplan.solvers.problem import Problem
from tests.stage_costs import fixed_bytes, gradient_bytes, held_bytes, stage_s
from tests.test_convex import GRAPHS, random_problem


def with_training(problem: Problem, training: PlannedTraining) -> Problem:
    costs = CostModel(problem.costs.profile, problem.request.cluster, training)
    request = replace(problem.request, costs=costs, zero=training.zero)
    return Problem(request=request, task=problem.task)


@pytest.mark.parametrize("graph", ["1 + 1", "2 + 1"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_stage_costs_what_the_cost_model_says(graph: str, zero: int) -> None:
    rng = np.random.default_rng(zero + len(GRAPHS[graph]))
    for number in range(6):
        training = PlannedTraining.model_validate(
            {"zero": zero, "precision": "bf16", "sequence_parallel": number % 2 == 1}
        )
        problem = with_training(random_problem(rng, graph), training)
        for module in problem.task.modules:
            check_module(problem, module, rng)


def check_module(problem: Problem, module: str, rng: np.random.Generator) -> None:
    costs, blocks = problem.module_costs(module), problem.blocks(module)
    inner = rng.choice(range(1, blocks), int(rng.integers(0, blocks)), replace=False)
    ends = [0, *sorted(inner.tolist()), blocks]
    cuts = tuple(pairwise(ends))
    own, size, dp = costs.stages(cuts), np.array([1, 2, 5]), np.array([1, 2, 3])
    for tp in problem.costs.tp_options(task=problem.task.name, module=module):
        forward, backward = (own.shares @ x for x in costs.seconds(tp, size, dp))
        held = costs.held_bytes(own.held[:, None], own.outputs[:, None], tp=tp, size=size)
        numbers = own.trained[:, None], own.frozen[:, None]
        fixed = {
            in_rounds: costs.parameter_bytes(*numbers, tp=tp, dp=dp, in_rounds=in_rounds)
            for in_rounds in (False, True)
        }
        for s, cut in enumerate(cuts):
            summed = own.trained[s] / tp * costs.gradient_bytes
            assert summed == pytest.approx(gradient_bytes(problem, module, cut, tp))
            for i, (samples, replicas) in enumerate(zip(size.tolist(), dp.tolist(), strict=True)):
                seconds = stage_s(problem, module, cut, tp, samples, replicas)
                assert (forward[s, i], backward[s, i]) == pytest.approx(seconds)
                assert held[s, i] == pytest.approx(held_bytes(problem, module, cut, tp, samples))
                for in_rounds, found in fixed.items():
                    want = fixed_bytes(problem, module, cut, tp, replicas, in_rounds=in_rounds)
                    assert found[s, i] == pytest.approx(want)
