"""A loss that explodes is named, ordinary noise and a falling loss are not."""

from __future__ import annotations

import random

import pytest

from mmlaunch.run.loss_jumps import LossJumps
from mmplan.schema.train import LossJumpSpec


def jumps(losses: list[float], rule: LossJumpSpec | None = None) -> list[int]:
    """The steps whose loss jumps."""
    watch = LossJumps(rule or LossJumpSpec())
    return [step for step, loss in enumerate(losses) if watch.add(loss) is not None]


def falling(steps: int) -> list[float]:
    noise = random.Random(0)
    return [4.2 / (1 + 0.05 * step) + noise.gauss(0.0, 0.1) for step in range(steps)]


def test_an_exploding_loss_is_named_until_it_is_the_usual_one() -> None:
    assert jumps(falling(130)) == []
    found = jumps([*falling(100), *(loss * 1e30 for loss in falling(100))])
    assert found == list(range(100, 100 + len(found)))
    assert 20 <= len(found) <= 30  # half a window
    assert jumps([*falling(100), 1e300, *falling(100)[50:]]) == [100]


@pytest.mark.parametrize(
    ("before", "loss", "named"),
    [
        ([2.0] * 10, 4.1, True),  # twenty times a twentieth: twice the median
        ([2.0] * 10, 3.9, False),
        ([2.0] * 9, 1e9, False),  # too few to tell
        ([-2.0] * 10, 0.1, True),
        ([0.0] * 10, -1.0, False),
        ([1.0, 3.0] * 5, 21.9, False),  # a spread of 1
        ([1.0, 3.0] * 5, 22.1, True),
    ],
)
def test_the_rule(before: list[float], loss: float, named: bool) -> None:
    assert jumps([*before, loss]) == [len(before)] * named


def test_the_rule_has_parameters() -> None:
    assert jumps([2.0] * 10 + [2.3], LossJumpSpec(window=10, times=2.0)) == [10]
