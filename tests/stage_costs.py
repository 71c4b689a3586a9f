"""Costs of one stage and one micro-batch, from the cost model's scalar answers.

The solvers read the cost table (:mod:`mmplan.solvers.cost_table`); these stand beside it.
"""

from __future__ import annotations

from typing import cast

from mmplan.costs.block_ranges import Blocks
from mmplan.schema.recompute import Recompute
from mmplan.solvers.problem import Problem


def stage_s(
    problem: Problem, module: str, blocks: Blocks, tp: int, samples: int, dp: int = 1
) -> tuple[float, float]:
    """Forward and backward of the busiest replica, with the losses that the stage hosts."""
    costs, task, stage = problem.costs, problem.task.name, problem.stage(module, blocks)
    factor = costs.straggler(task=task, module=module, dp=dp, samples=problem.round_samples)
    forward = costs.forward_s(
        task=task, module=module, tp=tp, samples=samples * factor, blocks=blocks
    )
    backward = costs.backward_s(
        task=task,
        module=module,
        tp=tp,
        samples=samples * factor,
        blocks=blocks,
        trainable=stage.trainable,
        input_gradient=stage.input_gradient,
        recompute=_recompute(problem, module),
    )
    for loss in stage.hosted:
        own = costs.loss_s(loss=loss, samples=samples)
        forward, backward = forward + own[0], backward + own[1]
    return forward, backward


def held_bytes(problem: Problem, module: str, blocks: Blocks, tp: int, samples: int) -> float:
    """What a device holds of one micro-batch from its forward to its backward."""
    passed = problem.stage(module, blocks).passed
    if passed is None:
        return 0.0
    return problem.costs.activation_bytes(
        task=problem.task.name,
        module=module,
        tp=tp,
        samples=samples,
        blocks=passed,
        recompute=_recompute(problem, module),
    )


def fixed_bytes(
    problem: Problem, module: str, blocks: Blocks, tp: int, dp: int, *, in_rounds: bool = False
) -> float:
    """Weights, gradients and optimizer state on one device."""
    costs, task = problem.costs, problem.task.name
    trained = _trained(problem, module, blocks)
    frozen = costs.parameters(task=task, module=module, blocks=blocks) - trained
    # Of tensor-parallel stages the gradients alone are cut.
    gathers = in_rounds and dp > 1
    each = costs.bytes_per_parameter(
        trainable=True,
        zero=problem.zero_of(module),
        dp=dp,
        in_rounds=in_rounds,
        gathers=gathers,
    )
    return (trained * each + frozen * costs.bytes_per_parameter(trainable=False)) / tp


def gradient_bytes(problem: Problem, module: str, blocks: Blocks, tp: int) -> float:
    """Gradient that a device contributes to its reduction."""
    each = problem.costs.gradient_bytes(problem.zero_of(module))
    return _trained(problem, module, blocks) / tp * each


def _trained(problem: Problem, module: str, blocks: Blocks) -> float:
    return sum(
        problem.costs.parameters(task=problem.task.name, module=module, blocks=part)
        for part in problem.trainable(module, blocks)
    )


def _recompute(problem: Problem, module: str) -> Recompute:
    return cast(Recompute, problem.request.workload.modules[module].recompute)
