"""Encoder into model: ZeRO-1 and recomputation on and off, four freezes, dp and tp."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mmplan.schema.plan import Plan
from mmplan.schema.recompute import Recompute
from mmplan.schema.workload import Workload
from tests.programs import Frozen, loss, make_plan, unit
from tests.verification import make_workload, verify_in_process

# What trains: everything, the encoder's last block (a projector) and the model, the projector
# alone, the encoder alone.
FREEZES: dict[str, tuple[Frozen, Frozen]] = {
    "nothing": (False, False),
    "encoder": (((0, 2),), False),
    "all-but-projector": (((0, 2),), True),
    "model": (False, True),
}
ALL = list(itertools.product(FREEZES, (1, 2, 3), (1, 2), (0, 1), ("none", "full", 1)))
# Every value of every factor, quickly.
QUICK = [row for number, row in enumerate(ALL) if number % 17 == 3]


def _case(freeze: str, dp: int, tp: int, zero: int, recompute: Recompute) -> tuple[Plan, Workload]:
    """The model's replicas are other in number than the encoder's."""
    encoder, model = FREEZES[freeze]
    units = [
        unit("v", "a", blocks=3, pp=2, dp=dp, tp=3 - tp, k=2, kind="1f1b", frozen=encoder),
        unit("t", "v", "b", blocks=2, dp=dp % 3 + 1, tp=tp, k=3, kind="1f1b", frozen=model),
    ]
    losses = [loss("counted", "t", "mask"), loss("regression", "t", "target", weight=0.7)]
    workload = make_workload(units, losses, batch=12, train={"zero": zero})
    modules: dict[str, Any] = {
        name: spec.model_copy(update={"recompute": recompute})
        for name, spec in workload.modules.items()
    }
    plan = make_plan(*units, losses=losses, batch=12)
    return plan, workload.model_copy(update={"modules": modules})


def _check(row: tuple[Any, ...]) -> None:
    verdict = verify_in_process(*_case(*row))
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= 1e-12


@pytest.mark.parametrize("row", QUICK, ids=str)
def test_gradients_equal_one_process(row: tuple[Any, ...]) -> None:
    _check(row)


def test_the_quick_selection_has_every_value() -> None:
    assert [set(values) for values in zip(*QUICK, strict=True)] == [
        set(values) for values in zip(*ALL, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ALL if row not in QUICK], ids=str)
def test_gradients_equal_one_process_everywhere(row: tuple[Any, ...]) -> None:
    _check(row)
