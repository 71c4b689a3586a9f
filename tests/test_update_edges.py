"""Updates at the edges: gradients that never come, random losses, another run's optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from mmlaunch.session.session import Session
from mmplan.errors import InvalidInputError
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.matrix_models import WIDTH, Counted, Regression, tower
from tests.programs import loss, make_plan, unit
from tests.training import plain, train_alone, train_planned, worst_difference
from tests.verification import make_workload, verify_in_process

ADAMW = {"optimizer": "AdamW", "optimizer_args": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}}
BATCH = 12


class Sometimes(nn.Module):
    """One Linear is never used, another only for samples with a large first number."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.some = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        large = x[:, 0] > 1.0
        return x + self.some(x) * large[:, None] if bool(large.any()) else x


def sometimes(blocks: int) -> nn.Sequential:
    return nn.Sequential(Sometimes(), *tower(blocks - 1))


class RandomRegression(Regression):
    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(features, 0.3), target)


class RandomCounted(Counted):
    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(features, 0.3), mask)


def _sometimes(zero: Literal[0, 1], dp: int) -> tuple[Plan, Workload]:
    units = [unit("v", "a", blocks=2, k=2, dp=dp)]
    losses = [loss("regression", "v", "target")]
    workload = make_workload(
        units,
        losses,
        batch=BATCH,
        factories={"v": "sometimes"},
        train={**ADAMW, "zero": zero},
    )
    modules = {
        name: module.model_copy(update={"factory": "tests.test_update_edges:sometimes"})
        for name, module in workload.modules.items()
    }
    plan = make_plan(*units, losses=losses, batch=BATCH, zero=zero)
    return plan, workload.model_copy(update={"modules": modules})


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("zero", [0, 1])
def test_a_parameter_without_gradient_stays_as_torch_leaves_it(
    zero: Literal[0, 1], dp: int
) -> None:
    plan, workload = _sometimes(zero, dp)
    steps = 3
    began = train_planned(plan, workload, 0)
    alone = train_alone(plan, workload, steps, plain(workload))
    planned = train_planned(plan, workload, steps)
    assert worst_difference(planned.weights, alone.weights) < 1e-12
    # Weight decay alone would have moved it.
    assert torch.equal(planned.weights["v.0.never.weight"], began.weights["v.0.never.weight"])
    assert not torch.equal(planned.weights["v.0.some.weight"], began.weights["v.0.some.weight"])


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("kind", ["regression", "counted"])
def test_a_random_loss_equals_one_process(kind: str, dp: int) -> None:
    units = [unit("v", "a", blocks=2, k=3, pp=2, dp=dp)]
    losses = [loss(kind, "v", "target" if kind == "regression" else "mask")]
    factory = f"tests.test_update_edges:Random{kind.capitalize()}"
    workload = make_workload(units, losses, batch=BATCH, factories={kind: factory})
    verdict = verify_in_process(make_plan(*units, losses=losses, batch=BATCH), workload)
    assert not verdict.differences, verdict.differences[:3]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            {"optimizer": "SGD", "optimizer_args": {"lr": 0.1}},
            r"step-1 was saved with train\.optimizer AdamW, the workload has SGD",
        ),
        (
            {"optimizer": "AdamW", "optimizer_args": {"lr": 0.1, "amsgrad": True}},
            r"step-1 holds exp_avg, exp_avg_sq, step of v\.\d\.\S+, AdamW with these arguments "
            r"keeps exp_avg, exp_avg_sq, max_exp_avg_sq, step",
        ),
    ],
)
@pytest.mark.parametrize("zero", [0, 1])
def test_another_optimizers_checkpoint_is_refused(
    train: dict[str, Any], message: str, zero: Literal[0, 1], tmp_path: Path
) -> None:
    plan, workload = _sometimes(zero, 2)
    paths: list[Path] = []
    train_planned(plan, workload, 1, after=lambda s: paths.append(s.save(tmp_path)))
    other = workload.train.model_copy(update=train)
    changed = workload.model_copy(update={"train": other})

    def load(session: Session) -> None:
        with pytest.raises(InvalidInputError, match=message) as caught:
            session.load(paths[0])
        assert caught.value.hint

    train_planned(plan, changed, 0, before=load)
    # The same optimizer goes on, also where a parameter has no state.
    resumed = train_planned(plan, workload, 2, before=lambda s: s.load(paths[0]))
    unbroken = train_planned(plan, workload, 2)
    assert worst_difference(resumed.weights, unbroken.weights) == 0.0
