"""ZeRO-2: gradients summed after each micro-batch, of which each rank keeps its part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.comm.strict import StrictWorld
from mmlaunch.execute.gradient_buckets import FlatShards
from mmlaunch.session.session import Session
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Collective, Compute, Instruction, Op
from mmplan.program.reduction_starts import starting_stages
from mmplan.simulation.peak_memory import ExpectedMemory
from mmplan.simulation.predict import costs_of
from tests.matrix_cases import Case, small_case
from tests.matrix_models import wide
from tests.programs import loss, make_plan, trained_as, unit
from tests.proofs import certified, faults_of
from tests.solving import module_profile, profile
from tests.training import train_planned, worst_difference
from tests.verification import HERE, make_workload, verify_in_process, verify_steps
from tests.zero_cases import ADAMW, CONTRASTIVE, PIPELINE, TENSOR, under_zero

pytestmark = pytest.mark.usefixtures("small_buckets")


@pytest.mark.parametrize(
    ("case", "train"),
    [
        (PIPELINE, {}),
        (CONTRASTIVE, {"clip_grad_norm": 0.5}),
        (TENSOR, {"precision": "bf16", "narrow_gradients": True}),
        pytest.param(PIPELINE, {"precision": "fp16"}, marks=pytest.mark.slow),
        pytest.param(small_case(dp=2, feature="frozen-range"), {}, marks=pytest.mark.slow),
        pytest.param(small_case(dp=3, k=2, feature="dropout"), {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_and_a_reload_equal_one_process(case: Case, train: dict[str, Any]) -> None:
    plan, workload = under_zero(case, 2, **train)
    assert any(r.rounds for r in compile_plan(plan).block_reductions)
    verdict = verify_steps(plan, workload, steps=2)
    assert not verdict.differences, verdict.differences[:5]


def test_steps_are_those_of_zero_1() -> None:
    one = train_planned(*under_zero(PIPELINE, 1), 3)
    two = train_planned(*under_zero(PIPELINE, 2), 3)
    assert two.losses == pytest.approx(one.losses, rel=1e-12)
    assert worst_difference(two.weights, one.weights) < 1e-9


def test_the_rules_of_gpus_are_kept() -> None:
    plan, workload = under_zero(PIPELINE, 2)
    world = StrictWorld(plan.devices)
    verdict = verify_in_process(plan, workload, world=world)
    assert world.faults == []
    assert not verdict.differences, verdict.differences[:5]


@pytest.mark.parametrize(
    "case",
    [
        small_case(dp=2, pp=2, feature="chain", kind="1f1b"),
        small_case(dp=2, pp=2, others="same", feature="chain", kind="1f1b", backward="split"),
    ],
    ids=str,
)
def test_gradients_add_up_where_replicas_differ_or_backwards_are_split(case: Case) -> None:
    program = compile_plan(under_zero(case, 2)[0])
    assert any(reduction.rounds is None for reduction in program.block_reductions)
    for reduction in program.block_reductions:
        stages = starting_stages(program, reduction)
        assert reduction.rounds is None or (stages and not any(stage.split for stage in stages))
    assert check_program(program) == []


@pytest.mark.parametrize("zero", [2, 3])
def test_ranks_sum_in_one_order_where_tasks_share_them(zero: int) -> None:
    """Sums inside backwards meet: no rank may begin another one's backward first."""
    pairs, alone = [[[0, 1]], [[2, 3]]], [[[rank]] for rank in range(4)]
    units = [
        unit("alone", "a", name="A.alone", task="A", dp=4, k=2, ranks=alone),
        unit("paired", "b", name="A.paired", task="A", tp=2, dp=2, ranks=pairs),
        unit("other", "a", name="B.other", task="B", tp=2, dp=2, ranks=pairs),
    ]
    losses = [
        loss("contrastive", "alone", "paired", task="A", sync_batch=12),
        loss("regression", "other", "target", task="B"),
    ]
    workload = make_workload(units, losses, batch=12, train={**ADAMW, "zero": zero})
    plan = trained_as(make_plan(*units, losses=losses, batch=12), workload)
    program = compile_plan(plan)
    assert sum(each.rounds is not None for each in program.block_reductions) > 2
    assert check_program(program) == []
    world = StrictWorld(plan.devices)
    verdict = verify_in_process(plan, workload, world=world)
    assert world.faults == []
    assert not verdict.differences, verdict.differences[:5]


# --- checks and proof ------------------------------------------------------------------

Row = tuple[Instruction, ...]


def _is_sum(item: Instruction, op: Op) -> bool:
    return isinstance(item, Collective) and item.op is op and item.mb == 1


def _without(op: Op) -> Callable[[Row], Row]:
    return lambda row: tuple(item for item in row if not _is_sum(item, op))


def _before_its_backward(row: Row) -> Row:
    """The sum of micro-batch 1 has the gradients of micro-batch 0 once more."""
    place = next(i for i, item in enumerate(row) if _is_sum(item, Op.REDUCE))
    begin = max(i for i in range(place) if isinstance(row[i], Compute))
    return (*row[: begin - 1], row[place], *row[begin - 1 : place], *row[place + 1 :])


def _at_the_end(row: Row) -> Row:
    """The sum of micro-batch 1 waits until those after it are there."""
    kept = [item for item in row if not _is_sum(item, Op.REDUCE)]
    return (*kept[:-1], *(item for item in row if _is_sum(item, Op.REDUCE)), kept[-1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without(Op.REDUCE), "REDUCE:0.1"),
        (_without(Op.REDUCE_START), "REDUCE_START:0.1"),
        (_before_its_backward, "adds to gradients already reduced"),
        (_at_the_end, "has gradients of 0B2 in it"),
    ],
)
def test_a_sum_that_lacks_a_micro_batch_or_has_two_is_found(
    change: Callable[[Row], Row], said: str
) -> None:
    program = compile_plan(under_zero(PIPELINE, 2)[0])
    assert check_program(program) == []
    members = next(r for r in program.block_reductions if r.index == 0).ranks
    rows = [change(r) if n in members else r for n, r in enumerate(program.instructions)]
    found = check_program(replace(program, instructions=tuple(rows)))
    assert any(said in fault for fault in found), found[:5]


@pytest.mark.parametrize("case", [PIPELINE, CONTRASTIVE, TENSOR], ids=str)
def test_a_certificate_is_made_and_holds(case: Case) -> None:
    plan = case.plan()
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"zero": 2})})
    assert faults_of(plan, certified(plan)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" REDUCE:0.1 ", " "),
        (" REDUCE_START:0.1 ", " "),
        ("REDUCE_START:0.1 B:0.1 REDUCE:0.1", "REDUCE_START:0.1 REDUCE:0.1 B:0.1"),
    ],
)
def test_a_certificate_without_a_micro_batch_of_a_sum_is_refused(old: str, new: str) -> None:
    plan = PIPELINE.plan()
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"zero": 2})})
    certificate = certified(plan)
    rows = [row for row in certificate["rows"] if old in row["instructions"]]
    assert rows
    for row in rows:
        row["instructions"] = row["instructions"].replace(old, new)
    assert faults_of(plan, certificate) != []


# --- memory ----------------------------------------------------------------------------


def test_a_rank_keeps_its_part_of_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, width, dp = 3, 64, 4
    units, losses = [unit("v", "a", dp=dp, k=3, blocks=blocks)], [loss("regression", "v", "target")]
    plan = make_plan(*units, losses=losses, batch=12)
    workload = make_workload(
        units,
        losses,
        batch=12,
        precision="fp32",
        factories={"v": "wide"},
        args={"v": {"width": width}},
        train={**ADAMW, "zero": 2},
    )
    plan = trained_as(plan, workload)
    module = wide(blocks, width)
    numbers = sum(p.numel() for p in module.parameters())
    largest = max(p.numel() for p in module.parameters())
    most: list[int] = []
    begin = FlatShards.begin

    def held(session: Session) -> int:
        gradients = [p.grad for _, p in session.model.trained()]
        gradients += [item.tensor.grad for item in session.update.slices]
        return sum(grad.nbytes for grad in gradients if grad is not None)

    def entry(transport: Any) -> int:
        session = Session(plan=plan, workload=workload, folder=HERE, transport=transport)

        def noted(self: FlatShards, *args: Any) -> None:
            begin(self, *args)
            most.append(held(session))

        for item in cast("Any", session)._reductions._all_sums:
            item.begin = noted.__get__(item)
        session.forward_backward()
        return held(session)

    kept = InProcessWorld(dp).run(entry)
    # Each bucket is cut apart, so a part may be larger by an element of each.
    part = 4 * numbers / dp
    assert kept == pytest.approx([part] * dp, rel=0.05)
    assert max(most) <= 1.05 * part + 3 * 4 * largest
    costs = profile(
        {"v": module_profile(blocks=blocks, parameters=numbers, tp={1: 1.0, 2: 1.0})}, 16
    )
    counted = costs_of(plan, costs)
    assert counted.static_bytes(0) == pytest.approx(numbers * (4 + (4 + 8) / dp))
    assert ExpectedMemory(counted).peak(0).gradients == 0
