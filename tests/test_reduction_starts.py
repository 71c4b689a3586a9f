"""Sums that begin inside a backward: where they start, and that gradients are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from torch import nn

from mmlaunch.comm.inprocess import InProcessTransport, InProcessWorld
from mmlaunch.execute import gradient_buckets
from mmlaunch.execute.gradient_buckets import GradientBucket, ParameterSlice
from mmlaunch.execute.reductions import Reductions
from mmlaunch.model.shard_layout import replicated_layout
from mmplan.errors import RunFailedError
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Collective, Compute, Op
from mmplan.program.model import BlockReduction
from mmplan.program.reduction_starts import with_starts
from mmplan.schema.plan import Plan
from tests.matrix_cases import small_case
from tests.plants import not_started
from tests.programs import loss, make_plan, unit
from tests.selection import some
from tests.training import train_planned, worst_difference


def test_a_start_stands_before_the_last_backward_of_its_stage_on_all_ranks() -> None:
    plan = make_plan(unit("v", pp=2, dp=2, k=3, kind="1f1b"), losses=[loss("l", "v")], batch=6)
    program = compile_plan(plan)
    blocks = [r for r in program.reductions if isinstance(r, BlockReduction)]
    assert len(blocks) == 2
    for reduction in blocks:
        for rank in reduction.ranks:
            row = program.instructions[rank]
            place = row.index(Collective(Op.REDUCE_START, reduction.index))
            assert str(row[place + 1]) == f"{program.stages_of(rank)[0].index}B2"
    assert check_program(program) == []


def test_the_last_weight_gradients_complete_a_split_backward() -> None:
    plan = make_plan(
        unit("v", pp=2, dp=2, k=4, split=True), losses=[loss("c", "v", sync_batch=8)], batch=8
    )
    program = compile_plan(plan)
    first = program.instructions[program.stages[1].ranks[0][0]]
    starts = [p for p, x in enumerate(first) if x.op is Op.REDUCE_START]
    last = max(p for p, x in enumerate(first) if isinstance(x, Compute))
    assert starts == [last - 1]
    assert first[last].op is Op.WEIGHT
    assert check_program(program) == []


def of_two_tasks() -> Plan:
    """Both run module v, on ranks 0 and 1, and on 1 and 2."""
    return make_plan(
        unit("v", "a", task="one", dp=2),
        unit("v", "b", task="two", dp=2, ranks=[[[1]], [[2]]]),
        losses=[loss("l", "v", task="one"), loss("m", "v", task="two")],
        batch=2,
    )


def test_blocks_that_two_tasks_train_begin_in_the_last_backward_of_both() -> None:
    program = compile_plan(of_two_tasks())
    reductions = [r for r in program.reductions if isinstance(r, BlockReduction)]
    assert reductions
    for reduction in reductions:
        assert reduction.ranks == (0, 1, 2)
        for row in program.instructions:
            place = row.index(Collective(Op.REDUCE_START, reduction.index))
            last = max(p for p, item in enumerate(row) if isinstance(item, Compute))
            assert place < last == row.index(row[last])
            assert not [x for x in row[place:last] if x.op is not Op.REDUCE_START]
    assert check_program(program) == []


def test_a_sum_that_starts_before_the_backward_of_another_task_is_a_fault() -> None:
    program = compile_plan(of_two_tasks())
    row = list(program.instructions[1])
    start = next(p for p, item in enumerate(row) if item.op is Op.REDUCE_START)
    first = next(p for p, item in enumerate(row) if item.op is Op.BACKWARD)
    row.insert(first, row.pop(start))
    rows = list(program.instructions)
    rows[1] = tuple(row)
    faults = check_program(replace(program, instructions=tuple(rows)))
    assert any("not before the last backward of its blocks" in fault for fault in faults)


@pytest.mark.parametrize("split", [False, True])
def test_chunks_on_the_same_ranks_are_summed_together_inside_the_last_one(split: bool) -> None:
    """Of split backwards the last chunk's weight gradients come last, of others the first chunk."""
    plan = make_plan(
        unit("v", dp=2, k=2, vpp=2, kind="interleaved", split=split),
        losses=[loss("l", "v")],
        batch=4,
    )
    program = compile_plan(plan)
    (reduction,) = program.block_reductions
    assert (reduction.blocks, len(program.stages)) == ((0, 2), 2)
    for row in program.instructions:
        place = row.index(Collective(Op.REDUCE_START, reduction.index))
        assert str(row[place + 1]) == ("1W1" if split else "0B1")
    assert check_program(program) == []


def test_starts_that_ranks_would_put_in_several_orders_are_left_out() -> None:
    plan = make_plan(
        unit("v", "a", dp=2),
        unit("w", "b", dp=2, ranks=[[[0]], [[1]]]),
        losses=[loss("l", "v"), loss("m", "w")],
        batch=2,
    )
    program = not_started(compile_plan(plan))
    row = program.instructions[0]
    backwards = [p for p, x in enumerate(row) if x.op is Op.BACKWARD]
    turned = list(row)
    turned[backwards[0]], turned[backwards[1]] = row[backwards[1]], row[backwards[0]]

    def starts(rows: list[Any]) -> int:
        found = with_starts(program, rows)
        return sum(x.op is Op.REDUCE_START for row in found for x in row)

    assert starts([row, row]) == 4
    # Of the two sums one starts.
    assert starts([row, tuple(turned)]) == 2


# Feature, degrees and other fields of a case.
CASES: list[dict[str, Any]] = [
    {"dp": 2},
    {"dp": 2, "tp": 2, "others": "single"},
    {"dp": 2, "pp": 2, "backward": "split", "others": "single"},
    {"dp": 2, "vpp": 2, "others": "single"},
    {"dp": 2, "vpp": 2, "backward": "split", "others": "single"},
    {"dp": 2, "feature": "shared", "others": "same"},
    {"dp": 3, "feature": "tied", "others": "single"},
    {"dp": 2, "feature": "ragged", "others": "single"},
    {"dp": 2, "feature": "frozen-range", "others": "single"},
]


@pytest.mark.parametrize("zero", some([0, 1], 1))
@pytest.mark.parametrize("fields", CASES, ids=str)
def test_weights_are_those_of_sums_behind_the_last_backward(
    fields: dict[str, Any], zero: Literal[0, 1], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 200)
    case = small_case(**fields)
    workload = case.workload()
    train = {"optimizer": "SGD", "optimizer_args": {"lr": 0.1}, "zero": zero}
    workload = workload.model_copy(update={"train": workload.train.model_copy(update=train)})
    early: list[bool] = []
    reduce = Reductions.reduce

    def noted(self: Reductions, index: int) -> None:
        early.extend(item.is_under_way for item in self._sums[index])
        reduce(self, index)

    monkeypatch.setattr(Reductions, "reduce", noted)
    started = train_planned(case.plan(), workload, 2)
    assert any(early)
    early.clear()
    with patch("mmplan.program.compile.with_starts", lambda _, rows: rows):
        late = train_planned(case.plan(), workload, 2)
    assert not any(early)
    assert worst_difference(started.weights, late.weights) < 1e-12
    assert started.losses == pytest.approx(late.losses, rel=1e-12)


def test_a_gradient_after_its_sum_began_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    item = ParameterSlice(name="v.0.weight", parameter=parameter, layout=replicated_layout((2,)))
    parameter.grad = torch.ones(2)

    def entry(transport: InProcessTransport) -> None:
        bucket = GradientBucket([item], (0,))
        bucket.begin(transport, set())
        parameter.grad = torch.ones(2)
        bucket.finish(set())

    with pytest.raises(RunFailedError, match=r"v\.0\.weight got a gradient after"):
        InProcessWorld(1).run(entry)
