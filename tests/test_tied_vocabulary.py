"""A vocabulary that embedding and head share, cut over tensor-parallel groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmlaunch.comm.strict import StrictWorld
from mmlaunch.session.session import Session
from mmplan.errors import InvalidInputError
from mmplan.profiling.counting import block_parameters
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.program.lower import lower
from mmplan.program.model import Program, TieReduction
from mmplan.schema.factories import build_module
from mmplan.schema.fingerprints import built_parts
from mmplan.schema.profile import Fingerprint
from mmplan.schema.workload import Workload
from mmplan.simulation.predict import costs_of
from mmplan.solvers.cost_table import ModuleCosts
from tests.launching import check_over_gloo
from tests.mixed_tp_cases import MIXED
from tests.programs import trained_as
from tests.row_texts import VOCAB, TextCase
from tests.solving import module_profile, profile
from tests.training import plain, train_alone, train_planned, worst_difference
from tests.verification import HERE, TOLERANCE, verify_in_process
from tests.zero_cases import held_bytes

pytestmark = pytest.mark.usefixtures("one_thread")
TRAIN: dict[str, Any] = {
    "optimizer": "AdamW",
    "optimizer_args": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4},
}
CLIP = 0.5
TABLE = "llm.0.before.model.embed_tokens.weight"
ONE_STAGE = TextCase(model="tied", tp=4)
TWO_STAGES = TextCase(model="tied", tp=2, pp=2)
SPLIT = TextCase(model="tied", tp=2, pp=3, dp=2, split=True, ragged=True)
EACH = pytest.mark.parametrize(
    "case", [ONE_STAGE, TWO_STAGES, pytest.param(SPLIT, marks=pytest.mark.slow)], ids=str
)


STATES = pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 1])


@EACH
@pytest.mark.parametrize("rows", [False, pytest.param(True, marks=pytest.mark.slow)])
@STATES
def test_gradients_equal_one_process(case: TextCase, rows: bool, zero: int) -> None:
    plan, workload = case.plan(), case.workload(rows=rows, zero=zero)
    verdict = verify_in_process(plan, workload, world=StrictWorld(plan.devices))
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= TOLERANCE["fp64"]


BOTH_DEGREES = TextCase(model="tied", tp=2, pp=2, dp=2)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_that_are_cut_equal_one_process(zero: int) -> None:
    plan, workload = BOTH_DEGREES.plan(), BOTH_DEGREES.workload(zero=zero)
    verdict = verify_in_process(trained_as(plan, workload), workload, world=StrictWorld(8))
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= TOLERANCE["fp64"]


@pytest.mark.slow
def test_gradients_and_a_resumed_run_over_gloo(tmp_path: Path) -> None:
    workloads = [TWO_STAGES.workload(zero=zero, **TRAIN) for zero in (1, 3)]
    check_over_gloo([(trained_as(TWO_STAGES.plan(), w), w) for w in workloads], tmp_path)


def _large(case: TextCase, **train: Any) -> Workload:
    """The case's workload in float32, with a table that is nearly the whole model."""
    workload = case.workload(rows=False, precision="fp32", **TRAIN, **train)
    module = workload.modules["llm"]
    config = {**module.args["config"], "vocab_size": 2000}
    module = module.model_copy(update={"args": {"config": config}})
    return workload.model_copy(update={"modules": {"llm": module}})


@STATES
def test_the_first_and_the_last_stage_are_planned_to_hold_the_table(zero: int) -> None:
    case = TextCase(model="tied", tp=1, pp=2, dp=2)
    workload = _large(case, zero=zero)
    plan = trained_as(case.plan(), workload)
    kept, _ = held_bytes(plan, workload)
    module = workload.modules["llm"]
    built = built_parts(workload, HERE)["modules.llm"]
    table = {(0, 2): 2000 * 16}
    assert built.shared_parameters == table
    numbers = block_parameters(build_module(workload, "llm", HERE, device="meta"))
    given = module_profile(
        blocks=3,
        parameters=float(sum(numbers)),
        block_parameters=numbers,
        tied_blocks=tuple(table),
        fingerprint=Fingerprint(factory=module.factory, args=module.args, built=built),
    )
    counted = costs_of(plan, profile({"llm": given}, plan.devices))
    # Between two steps gradients are gone.
    planned = [
        counted.static_bytes(rank) - sum(counted.gradient_bytes(rank).values())
        for rank in range(plan.devices)
    ]
    assert kept == pytest.approx(planned, rel=0.02)
    # All four ranks sum it.
    assert min(planned) > 2000 * 16 * (4 + 8 / (4 if zero else 1))
    sums = [r for r in counted.program.reductions if isinstance(r, TieReduction)]
    assert [counted.reduced_bytes(own) for own in sums] == [4 * 2000 * 16]
    of_solvers = ModuleCosts(
        counted.costs,
        task="default",
        module="llm",
        passed=[True] * 3,
        trains=[True] * 3,
        losses=(),
        recompute="none",
        round_samples=4,
        zero=zero,
    )
    cuts = tuple(stage.blocks for stage in counted.program.stages)
    assert sum(of_solvers.stages(cuts).trained) == pytest.approx(sum(numbers) + 2000 * 16)


def _clipped(parameters: dict[str, nn.Parameter]) -> Callable[[int], float | None]:
    """The update of TRAIN and CLIP in torch's own words."""
    optimizer = torch.optim.AdamW(parameters.values(), **TRAIN["optimizer_args"])

    def update(_: int) -> float | None:
        norm = nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        optimizer.step()
        return norm.item()

    return update


@EACH
@STATES
def test_three_steps_equal_plain_torch(case: TextCase, zero: int) -> None:
    """A rank of the first or the last stage has the table's rows of its own tokens, once."""
    workload = case.workload(zero=zero, clip_grad_norm=CLIP, **TRAIN)
    held: list[int] = []

    def look(session: Session) -> None:
        whole = session.evaluate(lambda modules: modules["llm"].state_dict())
        whole = session.transport.broadcast_object(whole, 0)
        for name, parameter in session.model.named_parameters():
            layout = session.model.layouts.get(name)
            full = whole[name.removeprefix("llm.")]
            assert torch.equal(parameter, full if layout is None else layout.take(full)), name
            held.extend([len(parameter)] if name == TABLE else [])

    planned = train_planned(case.plan(), workload, 3, after=look)
    alone = train_alone(case.plan(), workload, 3, _clipped)
    assert planned.losses == pytest.approx(alone.losses, rel=1e-12)
    assert planned.norms == pytest.approx(alone.norms, rel=1e-11)
    assert all(norm is not None and norm > CLIP for norm in alone.norms)
    assert worst_difference(planned.weights, alone.weights) < 1e-12
    ends = case.dp * min(case.pp, 2)
    assert len(held) == ends * case.tp
    assert sum(held) == ends * VOCAB


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (TWO_STAGES, ONE_STAGE),
        pytest.param(ONE_STAGE, TWO_STAGES, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_resumes_under_another_degree(
    first: TextCase, then: TextCase, tmp_path: Path
) -> None:
    train_planned(
        first.plan(), first.workload(zero=1, **TRAIN), 2, after=lambda s: s.save(tmp_path)
    )
    workload = then.workload(**TRAIN)
    went_on = train_planned(then.plan(), workload, 4, before=lambda s: s.load(tmp_path / "step-2"))
    alone = train_alone(then.plan(), workload, 4, plain(workload))
    assert went_on.losses == pytest.approx(alone.losses[2:], rel=1e-9)
    assert worst_difference(went_on.weights, alone.weights) < 1e-9


@pytest.mark.parametrize(
    "name",
    ["3 ranks: tp 2 and tp 1", pytest.param("5 ranks: tp 3 and tp 2", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("zero", [0, 1])
def test_degrees_may_differ_where_no_rank_has_two_shards(name: str, zero: int) -> None:
    """Of other degrees the parts of the table have other holders."""
    case = replace(MIXED[name], factories={"v": "tied_words"})
    verdict = verify_in_process(case.plan(), case.workload(zero=zero))
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= TOLERANCE["fp64"]


def test_two_shards_on_one_rank_are_refused() -> None:
    case = replace(MIXED["2 ranks: tp 2 and dp 2"], factories={"v": "tied_words"})
    with pytest.raises(InvalidInputError, match="share a parameter"):
        lower(trained_as(case.plan(), case.workload()))


def _without(program: Program, index: int) -> Program:
    """A program in which nobody makes one sum."""
    gone = f"REDUCE:{index}"
    rows = tuple(
        tuple(item for item in row if not str(item).startswith(gone))
        for row in program.instructions
    )
    return replace(program, instructions=rows)


def test_a_shard_that_is_not_summed_is_seen_by_check_and_by_verify() -> None:
    plan, workload = trained_as(TWO_STAGES.plan(), TWO_STAGES.workload()), TWO_STAGES.workload()
    program = compile_plan(plan)
    sums = [r for r in program.reductions if isinstance(r, TieReduction)]
    assert [(r.ranks, r.shards, r.tp) for r in sums] == [((0, 2), (0, 1), 2), ((1, 3), (1, 2), 2)]
    for own in sums:
        assert check_program(_without(program, own.index))
        verdict = verify_in_process(plan, workload, change=lambda p, k=own.index: _without(p, k))
        assert verdict.differences
