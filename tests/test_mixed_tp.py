"""Parameters of one module under several tensor-parallel degrees, against one process."""

from __future__ import annotations

import pytest

from mmplan.program.check import check_program
from mmplan.program.compile import compile_plan
from tests.mixed_tp_cases import MIXED
from tests.verification import verify_in_process


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", MIXED)
def test_gradients_equal_one_process(name: str, zero: int) -> None:
    case = MIXED[name]
    assert not check_program(compile_plan(case.plan()))
    verdict = verify_in_process(case.plan(), case.workload(zero=zero))
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.compared > 8
