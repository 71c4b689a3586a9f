"""A run that leaves a step out ends with the weights of one process that does the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mmlaunch.session.session import Session
from tests.matrix_cases import small_case
from tests.training import plain, train_alone, train_planned, worst_difference

BAD_STEP = 1


def poison(session: Session) -> None:
    """One backward on one rank gives NaN for one parameter, in one step."""
    if session.rank == 0:
        _, parameter = session.model.trained()[0]

        def spoil(gradient: Tensor) -> Tensor:
            return gradient * (math.nan if session.step_count == BAD_STEP else 1.0)

        parameter.register_hook(spoil)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "dp", "tp", "zero"),
    [
        ("regression", 2, 2, 1),
        ("regression", 2, 2, 0),
        ("tied", 3, 1, 1),
        ("shared", 2, 2, 1),
    ],
)
def test_all_ranks_leave_the_same_step_out(feature: str, dp: int, tp: int, zero: int) -> None:
    case = small_case(dp=dp, tp=tp, feature=feature)
    workload = case.workload()
    fields = {
        "optimizer": "AdamW",
        "optimizer_args": {"lr": 0.01},
        "zero": zero,
        "non_finite": "skip",
        "compare_replicas": 1,
    }
    workload = workload.model_copy(update={"train": workload.train.model_copy(update=fields)})
    found = train_planned(case.plan(), workload, 3, before=poison)

    def rule(parameters: dict[str, nn.Parameter]) -> Callable[[int], float | None]:
        update = plain(workload)(parameters)
        return lambda step: None if step == BAD_STEP else update(step)

    alone = train_alone(case.plan(), workload, 3, rule)
    assert worst_difference(found.weights, alone.weights) < 1e-9
    assert all(map(math.isfinite, found.losses))
    torch.testing.assert_close(found.losses, alone.losses, rtol=1e-9, atol=0.0)
