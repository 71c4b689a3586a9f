"""``verify --shrink``: a small plan with every class of alike ranks, which is verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mmlaunch.session.smaller_plans import likeness, on_one_rank
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.schema.agreement import check_agrees
from mmplan.schema.faults import plan_faults
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.matrix_cases import small_case
from tests.programs import LossSpec, UnitSpec, loss, make_plan, trained_as, unit
from tests.verification import make_workload, verify_steps

TOWERS = [loss("contrastive", "v", "t", sync_batch=64), loss("regression", "v", "target")]


def made(units: Sequence[UnitSpec], losses: list[LossSpec], *, batch: int) -> tuple[Plan, Workload]:
    workload = make_workload(list(units), losses, batch=batch)
    return trained_as(make_plan(*units, losses=losses, batch=batch), workload), workload


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("units", "ranks", "batch"),
    [
        # 16 and 4 alike replicas of one micro-batch: two stay of each, and half of a quarter.
        _slow([unit("v", "a", dp=16, tp=2), unit("t", "b", dp=4)], 2 * 2 + 2, 2 * 32),
        # 22, 21 and 21 samples: two classes, which are two replicas.
        _slow([unit("v", "a", blocks=2, pp=2, dp=3), unit("t", "b")], 2 * 2 + 1, 2 * 64),
        # A chain: encoders of 4 samples feed replicas of 8.
        ([unit("v", "a", dp=16), unit("t", "v", "b", dp=8)], 2 * 2 + 2, 2 * 16),
    ],
)
def test_a_likeness_is_a_sound_plan_of_every_class(
    units: Sequence[UnitSpec], ranks: int, batch: int
) -> None:
    plan, workload = made(units, TOWERS, batch=4 * 64)
    small, its = likeness(plan, workload)
    assert (small.devices, its.batch) == (ranks, batch)
    assert plan_faults(small) == []
    check_agrees(small, its)
    assert check_program(compile_plan(small)) == []
    assert {unit.name for unit in small.units} == {unit.name for unit in plan.units}
    assert [unit.tp for unit in small.units] == [unit.tp for unit in plan.units]
    verdict = verify_steps(small, its, steps=1)
    assert not verdict.differences, verdict.differences[:5]


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["two-syncs", "colocated", "shared", "ragged", "chain"])
def test_features_stay(feature: str) -> None:
    case = small_case(dp=3, tp=2, k=2, feature=feature)
    plan, workload = trained_as(case.plan(), case.workload()), case.workload()
    small, its = likeness(plan, workload)
    assert plan_faults(small) == []
    assert check_program(compile_plan(small)) == []
    assert not verify_steps(small, its, steps=2).differences


def test_tasks_shrink_in_one_ratio_and_lie_on_one_rank() -> None:
    units = [
        unit("v", "a", task="one", dp=8),
        unit("t", "b", task="two", dp=4, share="v"),
    ]
    losses = [
        loss("regression", "v", "target", task="one"),
        loss("regression2", "t", "target", task="two", weight=0.5),
    ]
    batches = {"one": 32, "two": 16}
    workload = make_workload(units, losses, batch=32, task_batches=batches)
    plan = trained_as(make_plan(*units, losses=losses, batch=batches), workload)
    small, its = likeness(plan, workload)
    assert plan_faults(small) == []
    check_agrees(small, its)
    # Of replicas of 4 samples two stay: a quarter of the one batch, half of the other.
    assert {name: task.batch for name, task in small.tasks.items()} == {"one": 16, "two": 8}
    alone = on_one_rank(plan)
    assert plan_faults(alone) == []
    assert check_program(compile_plan(alone)) == []
