"""ZeRO-3: parameters cut over replicas, gathered block by block around each compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.comm.strict import StrictWorld
from mmlaunch.execute.gathered_blocks import GatheredBlocks
from mmlaunch.execute.gradient_buckets import FlatShards
from mmlaunch.session.accelerator_check import check_on_accelerator
from mmlaunch.session.session import Session
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Compute, Instruction
from mmplan.program.model import Timings
from mmplan.program.text import format_program
from mmplan.proof.rows import hash_graph, hash_row
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from mmplan.simulation.peak_memory import ExpectedMemory
from mmplan.simulation.predict import costs_of
from tests.compiling import Backend
from tests.launching import check_over_gloo
from tests.matrix_cases import Case, small_case
from tests.matrix_models import wide
from tests.programs import loss, make_plan, trained_as, unit
from tests.proofs import certified, faults_of
from tests.solving import module_profile, profile
from tests.test_session import finish, run_ranks
from tests.training import train_planned, worst_difference
from tests.verification import HERE, make_workload, verify_in_process, verify_steps
from tests.zero_cases import (
    ADAMW,
    CONTRASTIVE,
    PIPELINE,
    TENSOR,
    held_bytes,
    under_zero,
)

pytestmark = pytest.mark.usefixtures("small_buckets")


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first parameter of each gather, as they come."""
    found: list[str] = []
    start = FlatShards.start_gather

    def noted(self: FlatShards, *args: Any) -> Any:
        found.append(self.slices[0].name)
        return start(self, *args)

    monkeypatch.setattr(FlatShards, "start_gather", noted)
    return found


@pytest.mark.parametrize(
    ("case", "train"),
    [
        (CONTRASTIVE, {"clip_grad_norm": 0.5, "compare_replicas": 1}),
        (TENSOR, {"clip_grad_norm": 0.5, "compare_replicas": 1}),
        pytest.param(PIPELINE, {"precision": "fp16"}, marks=pytest.mark.slow),
        pytest.param(TENSOR, {"precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param(
            CONTRASTIVE, {"precision": "bf16", "narrow_gradients": True}, marks=pytest.mark.slow
        ),
        pytest.param(small_case(dp=2, feature="frozen-range"), {}, marks=pytest.mark.slow),
        pytest.param(small_case(dp=3, k=2, feature="dropout"), {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_and_a_reload_equal_one_process(case: Case, train: dict[str, Any]) -> None:
    plan, workload = under_zero(case, 3, **train)
    assert any(stage.gathers for stage in compile_plan(plan).stages)
    verdict = verify_steps(plan, workload, steps=2)
    assert not verdict.differences, verdict.differences[:5]


def _of_tasks(**second: Any) -> tuple[Plan, Workload]:
    """Two tasks with other micro-batches use the same modules on the same ranks."""
    ranks = [[[0]], [[1]]]
    units = [
        unit("v", "a", dp=2, k=2, blocks=2, ranks=ranks, task="one"),
        unit("t", "v", dp=2, k=2, blocks=2, ranks=ranks, task="one"),
        unit("v", "a", name="two.v", dp=2, k=3, blocks=2, ranks=ranks, task="two", **second),
        unit("t", "v", name="two.t", dp=2, k=3, blocks=2, ranks=ranks, task="two"),
    ]
    losses = [
        loss("regression", "t", "target", task="one"),
        loss("regression2", "t", "target", task="two"),
    ]
    batches = {"one": 8, "two": 12}
    workload = make_workload(
        units, losses, batch=8, task_batches=batches, train={**ADAMW, "zero": 3}
    )
    return make_plan(*units, losses=losses, batch=batches), workload


def test_tasks_that_share_modules_sum_in_each_of_their_backwards() -> None:
    plan, workload = _of_tasks()
    trained = trained_as(plan, workload)
    program = compile_plan(trained)
    assert [reduction.rounds for reduction in program.block_reductions] == [5, 5]
    assert all(stage.gathers for stage in program.stages)
    assert check_program(program) == []
    world = StrictWorld(plan.devices)
    verdict = verify_in_process(trained, workload, world=world)
    assert world.faults == []
    assert not verdict.differences, verdict.differences[:5]
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"zero": 3})})
    certificate = certified(plan)
    assert faults_of(plan, certificate) == []
    for row in certificate["rows"]:
        row["instructions"] = row["instructions"].replace("REDUCE:0.4", "REDUCE:0.9")
    assert faults_of(plan, certificate) != []


def test_blocks_that_a_task_freezes_stay_whole() -> None:
    program = compile_plan(trained_as(*_of_tasks(frozen=((0, 1),))))
    whole = {r.blocks for r in program.block_reductions if r.owner == "v" and r.rounds is None}
    assert whole == {(0, 2)}
    assert [stage.gathers for stage in program.stages if stage.owner == "t"] == [True, True]
    assert not any(stage.gathers for stage in program.stages if stage.owner == "v")


@pytest.mark.slow
def test_steps_are_those_of_zero_1() -> None:
    one = train_planned(*under_zero(PIPELINE, 1), 3)
    three = train_planned(*under_zero(PIPELINE, 3), 3)
    assert three.losses == pytest.approx(one.losses, rel=1e-12)
    assert worst_difference(three.weights, one.weights) < 1e-9


@pytest.mark.parametrize("case", [PIPELINE, TENSOR], ids=str)
@pytest.mark.parametrize(
    "ahead",
    [pytest.param(False, id="in turn", marks=pytest.mark.slow), pytest.param(True, id="ahead")],
)
def test_the_rules_of_gpus_are_kept(
    ahead: bool, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the next block's gather runs beside a compute, as on a GPU."""
    init = GatheredBlocks.__init__

    def made(self: GatheredBlocks, *args: Any) -> None:
        init(self, *args)
        self.is_ahead = ahead

    monkeypatch.setattr(GatheredBlocks, "__init__", made)
    plan, workload = under_zero(case, 3)
    world = StrictWorld(plan.devices)
    verdict = verify_in_process(plan, workload, world=world)
    assert world.faults == []
    assert not verdict.differences, verdict.differences[:5]


def test_recomputed_blocks_are_gathered_once_for_their_backward(gathers: list[str]) -> None:
    units = [unit("v", "a", dp=2, k=2, blocks=3)]
    losses = [loss("regression", "v", "target")]
    plan = make_plan(*units, losses=losses, batch=8)
    workload = make_workload(units, losses, batch=8, train={**ADAMW, "zero": 3}, recompute="full")
    verdict = verify_in_process(trained_as(plan, workload), workload)
    assert not verdict.differences, verdict.differences[:5]
    # Two ranks, two micro-batches, one step: in each forward and in each backward.
    assert {gathers.count(name) for name in gathers} == {2 * 2 * 2}


def test_evaluation_and_checkpoints_are_those_of_zero_0(tmp_path: Path) -> None:
    evaluated = {
        "eval": {"data": {"factory": "tests.matrix_models:Samples", "args": {"length": 24}}}
    }
    units = [unit("v", "a", dp=2, k=2, blocks=3)]
    losses = [loss("regression", "v", "target")]
    plan = make_plan(*units, losses=losses, batch=8)

    def made(zero: int) -> Workload:
        return make_workload(units, losses, batch=8, train={**ADAMW, **evaluated, "zero": zero})

    def first(session: Session) -> tuple[dict[str, float], Path, dict[str, Any]]:
        list(session.steps(2))
        values, path = session.run_evaluation(), session.save(tmp_path)
        return values, path, finish(session, 4)

    def second(session: Session, path: Path) -> tuple[dict[str, float], dict[str, Any]]:
        session.load(path)
        return session.run_evaluation(), finish(session, 4)

    for saved, loaded in ((3, 0), (0, 3), (3, 3)):
        values, path, weights = run_ranks(plan, made(saved), first)[0]
        others, same = run_ranks(plan, made(loaded), lambda session, p=path: second(session, p))[0]
        assert others == pytest.approx(values, rel=1e-12)
        assert worst_difference(same, weights) < 1e-12


@pytest.mark.parametrize(
    ("case", "way"),
    [
        (CONTRASTIVE, "warm up"),
        pytest.param(CONTRASTIVE, "compile", marks=pytest.mark.slow),
        pytest.param(TENSOR, "warm up", marks=pytest.mark.slow),
        pytest.param(TENSOR, "compile", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_steps_are_the_same_behind_a_warm_up_and_compiled(
    case: Case, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMLAUNCH_WARM_UP", "1")
    if way == "compile":
        Backend("aot_eager", monkeypatch)
    plan, workload = under_zero(case, 3, compile=way == "compile")
    held: list[int] = []

    def parameters_are_freed(session: Session) -> None:
        named = session.model.named_parameters()
        model = [p for name, p in named if p.requires_grad and not name.startswith("losses.")]
        held.append(sum(p.untyped_storage().nbytes() for p in model))
        assert not any(p.grad is not None for p in model)

    warm = train_planned(plan, workload, 2, before=parameters_are_freed)
    assert held == [0] * plan.devices
    monkeypatch.setenv("MMLAUNCH_WARM_UP", "0")
    cold = train_planned(*under_zero(case, 3), 2)
    assert warm.losses == pytest.approx(cold.losses, rel=1e-12)
    assert worst_difference(warm.weights, cold.weights) < 1e-12


@pytest.mark.slow
def test_gradients_and_a_resumed_run_over_gloo(tmp_path: Path) -> None:
    check_over_gloo([under_zero(PIPELINE, 3), under_zero(TENSOR, 3)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [CONTRASTIVE, TENSOR], ids=str)
def test_a_step_keeps_the_rules_of_an_accelerator(case: Case) -> None:
    verdict = check_on_accelerator(*under_zero(case, 3, precision="bf16"), HERE)
    assert (verdict.failure, verdict.faults) == (None, ())


def test_emulated_ranks_gather_as_in_a_step(gathers: list[str]) -> None:
    plan, workload = under_zero(CONTRASTIVE, 3)
    counts: list[Counter[str]] = []
    for emulation in (None, Timings(computes={}, losses={})):
        gathers.clear()

        def entry(transport: Any, emulation: Timings | None = emulation) -> None:
            Session(
                plan=plan,
                workload=workload,
                folder=HERE,
                transport=transport,
                emulation=emulation,
            ).step()

        InProcessWorld(plan.devices).run(entry)
        counts.append(Counter(gathers))
    assert counts[0] == counts[1]


# --- checks and proof ------------------------------------------------------------------

Row = tuple[Instruction, ...]


def _swapped(row: Row) -> Row:
    """The first two forwards of a stage the other way round."""
    one, other = [i for i, x in enumerate(row) if isinstance(x, Compute) and str(x)[1] == "F"][:2]
    changed = list(row)
    changed[one], changed[other] = row[other], row[one]
    return tuple(changed)


def test_replicas_that_gather_in_different_orders_are_found() -> None:
    program = compile_plan(
        under_zero(small_case(dp=2, k=2, others="same", feature="regression"), 3)[0]
    )
    assert check_program(program) == []
    assert "gathers its blocks" in format_program(program)
    rows = (_swapped(program.instructions[0]), *program.instructions[1:])
    assert check_program(replace(program, instructions=rows)) != []
    # Without gathers the orders of replicas are their own.
    alone = tuple(replace(stage, gathers=False) for stage in program.stages)
    assert check_program(replace(program, instructions=rows, stages=alone)) == []


@pytest.mark.parametrize("case", [PIPELINE, CONTRASTIVE, TENSOR], ids=str)
def test_a_certificate_is_made_and_holds(case: Case) -> None:
    plan = case.plan()
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"zero": 3})})
    assert faults_of(plan, certified(plan)) == []


def _not_gathered(certificate: Any) -> None:
    for stage in certificate["graph"]["stages"]:
        stage.pop("gathers")
    sha256 = hash_graph(certificate["graph"])
    for row in certificate["rows"]:
        row["sha256"] = hash_row(sha256, row["instructions"])


def _one_level_later(certificate: Any) -> None:
    own = certificate["classes"][0]
    own["levels"] = " ".join(str(int(level) + 1) for level in own["levels"].split(" "))


@pytest.mark.parametrize(
    ("change", "said"),
    [(_not_gathered, "stages.0.gathers"), (_one_level_later, "('F', 0, 1, 0) is on another level")],
)
def test_a_certificate_that_hides_what_is_gathered_is_refused(
    change: Callable[[Any], None], said: str
) -> None:
    # Replicas with other micro-batches are no copies of each other.
    units = [unit("v", "a", dp=2, sizes=[[2, 3], [1, 3]])]
    plan = make_plan(*units, losses=[loss("regression", "v", "target")], batch=9)
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"zero": 3})})
    certificate = certified(plan)
    assert faults_of(plan, certificate) == []
    change(certificate)
    faults = faults_of(plan, certificate)
    assert any(said in fault for fault in faults), faults[:5]


# --- memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_holds_its_part_and_one_block(precision: str, tp: int) -> None:
    blocks, width, dp = 4, 256, 4 // tp
    units = [unit("v", "a", dp=dp, tp=tp, k=3, blocks=blocks)]
    losses = [loss("regression", "v", "target")]
    plan = make_plan(*units, losses=losses, batch=12)
    workload = make_workload(
        units,
        losses,
        batch=12,
        precision=precision,
        factories={"v": "wide"},
        args={"v": {"width": width}},
        train={**ADAMW, "zero": 3},
    )
    plan = trained_as(plan, workload)
    training = plan.training.model_copy(update={"precision": precision})
    plan = plan.model_copy(update={"training": training})
    module = wide(blocks, width)
    numbers = sum(p.numel() for p in module.parameters())
    kept, most = held_bytes(plan, workload)
    costs = profile(
        {"v": module_profile(blocks=blocks, parameters=numbers, tp={1: 1.0, 2: 1.0})}, 16
    )
    counted = costs_of(plan, costs)
    # Between two steps gradients are gone.
    assert kept == pytest.approx([12 * numbers / dp / tp] * dp * tp, rel=0.05)
    narrow = 2 if precision == "bf16" else 4
    block = numbers / blocks * (narrow + 4)
    assert counted.static_bytes(0) == pytest.approx((16 * numbers / dp + block) / tp)
    assert max(most) == pytest.approx(counted.static_bytes(0), rel=0.05)
    assert ExpectedMemory(counted).peak(0).gradients == 0
