"""bf16: float32 weights, narrow activations and messages, within what rounding explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.comm.transport import CommGroup, TransferEnd
from mmlaunch.session.session import Session
from mmlaunch.session.verify import planned_step
from mmplan.program.model import Program
from mmplan.schema.workload import Workload
from tests.matrix_cases import Case, small_case
from tests.programs import trained_as
from tests.training import plain, train_alone, train_planned, worst_difference
from tests.verification import HERE, verify_in_process


def _workload(case: Case, **train: Any) -> Workload:
    workload = case.workload()
    fields = {"precision": "bf16", "optimizer_args": {"lr": 0.01}, **train}
    return workload.model_copy(update={"train": workload.train.model_copy(update=fields)})


@pytest.mark.parametrize(
    "case",
    [
        small_case(dp=2, pp=2),
        small_case(dp=3, tp=2),
        small_case(dp=2, feature="sharded"),
        small_case(dp=2, tp=2, feature="chain", kind="1f1b"),
        small_case(dp=2, feature="ragged"),
        small_case(dp=2, feature="counted"),
        small_case(dp=2, feature="frozen-range"),
        small_case(dp=2, feature="dropout"),
        small_case(dp=2, feature="shared"),
    ],
    ids=str,
)
def test_gradients_are_as_near_as_rounding_allows(case: Case) -> None:
    verdict = verify_in_process(case.plan(), _workload(case))
    assert not verdict.differences, verdict.differences[:5]
    # Noise is there, and it is seen to be noise.
    assert 0 < verdict.share < 1


def _without_last_microbatch(program: Program) -> Program:
    """The last backward of rank 0 is left out."""
    row = list(program.instructions[0])
    last = max(i for i, item in enumerate(row) if str(item).endswith("B1"))
    del row[last]
    return replace(program, instructions=(tuple(row), *program.instructions[1:]))


def test_a_missing_backward_is_seen_through_the_noise() -> None:
    case = small_case(others="single")
    verdict = verify_in_process(case.plan(), _workload(case), change=_without_last_microbatch)
    assert any(d.name.startswith("v.") for d in verdict.differences)


def test_messages_are_narrow_and_weights_and_gradients_wide() -> None:
    case = small_case(pp=2, dp=2)
    sent: set[torch.dtype] = set()

    def entry(transport: Any) -> Any:
        post = transport.post

        def noted(transfers: Sequence[TransferEnd], channel: CommGroup) -> Any:
            sent.update(item.tensor.dtype for item in transfers)
            return post(transfers, channel)

        transport.post = noted
        workload = _workload(case)
        session = Session(
            plan=trained_as(case.plan(), workload),
            workload=workload,
            folder=HERE,
            transport=transport,
        )
        found = planned_step(session)
        return {p.dtype for _, p in session.model.named_parameters()}, found

    for types, found in InProcessWorld(case.plan().devices).run(entry):
        assert types <= {torch.float32}
        assert {g.dtype for g in found.gradients.values()} <= {torch.float32}
    assert sent == {torch.bfloat16}


@pytest.mark.parametrize("zero", [0, 1])
def test_three_steps_stay_near_one_process(zero: int) -> None:
    case = small_case(dp=2, pp=2, feature="regression")
    workload = _workload(case, zero=zero, optimizer="SGD")
    planned = train_planned(case.plan(), workload, 3)
    alone = train_alone(case.plan(), workload, 3, plain(workload))
    assert planned.losses == pytest.approx(alone.losses, rel=2**-7)
    # Plain SGD: weights differ by the gradients' difference times the rate.
    assert worst_difference(planned.weights, alone.weights) < 0.01 * 3 * 2**-6
