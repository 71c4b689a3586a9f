"""Modules with ZeRO stages of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmlaunch.comm.strict import StrictWorld
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.proof.rows import hash_graph, hash_row
from mmplan.schema.agreement import plan_differences
from mmplan.schema.base import ZeroStage
from mmplan.schema.faults import plan_faults
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from mmplan.simulation.peak_memory import ExpectedMemory
from mmplan.simulation.predict import costs_of
from tests.launching import check_over_gloo
from tests.matrix_cases import Case, small_case
from tests.matrix_models import wide
from tests.programs import loss, make_plan, trained_as, unit
from tests.proofs import certified, faults_of
from tests.solving import module_profile, profile, run_solve
from tests.solving import workload as planned_workload
from tests.training import train_planned
from tests.verification import make_workload, verify_in_process, verify_steps
from tests.zero_cases import (
    ADAMW,
    CONTRASTIVE,
    PIPELINE,
    TENSOR,
    held_bytes,
    under_zero,
)

pytestmark = pytest.mark.usefixtures("small_buckets")


def of_modules(
    case: Case, default: int, stages: dict[str, ZeroStage], **train: Any
) -> tuple[Plan, Workload]:
    """The case's plan and workload with stages of some modules, and another one of all else."""
    _, workload = under_zero(case, default, **train)
    modules = {
        name: spec.model_copy(update={"zero": stages.get(name)})
        for name, spec in workload.modules.items()
    }
    workload = workload.model_copy(update={"modules": modules})
    return trained_as(case.plan(), workload), workload


DROPOUT = small_case(dp=3, k=2, feature="dropout")
SHARED = small_case(dp=2, k=2, others="same", feature="shared")


@pytest.mark.parametrize(
    ("case", "default", "stages", "train"),
    [
        (CONTRASTIVE, 2, {"t": 0}, {"clip_grad_norm": 0.5}),
        (TENSOR, 1, {"v": 0, "t": 2}, {}),
        pytest.param(
            PIPELINE, 0, {"v": 3, "t": 1}, {"clip_grad_norm": 0.5}, marks=pytest.mark.slow
        ),
        pytest.param(
            CONTRASTIVE,
            0,
            {"v": 3},
            {"precision": "bf16", "narrow_gradients": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(SHARED, 1, {"v": 2}, {}, marks=pytest.mark.slow),
        pytest.param(PIPELINE, 3, {"v": 1}, {"precision": "fp16"}, marks=pytest.mark.slow),
        pytest.param(
            small_case(dp=3, k=2, feature="dropout"),
            0,
            {"v": 1, "t": 3},
            {},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_steps_and_a_reload_equal_one_process(
    case: Case, default: int, stages: dict[str, ZeroStage], train: dict[str, Any]
) -> None:
    plan, workload = of_modules(case, default, stages, **train)
    assert check_program(compile_plan(plan)) == []
    verdict = verify_steps(plan, workload, steps=2)
    assert not verdict.differences, verdict.differences[:5]


def test_each_module_is_cut_as_its_unit_says() -> None:
    plan, workload = of_modules(PIPELINE, 1, {"v": 3, "t": 0})
    program = compile_plan(plan)
    gathers = {stage.module: stage.gathers for stage in program.stages}
    rounds = {sum.owner: sum.rounds is not None for sum in program.block_reductions}
    sharded = {update.owner: update.sharded for update in program.updates if update.ranks[1:]}
    assert gathers == rounds == {"v": True, "t": False}
    assert sharded == {"v": True, "t": False, "counted": True, "regression": True}
    world = StrictWorld(plan.devices)
    verdict = verify_in_process(plan, workload, world=world)
    assert world.faults == []
    assert not verdict.differences, verdict.differences[:5]


@pytest.mark.slow
def test_gradients_and_a_resumed_run_over_gloo(tmp_path: Path) -> None:
    check_over_gloo([of_modules(PIPELINE, 0, {"v": 3, "t": 1})], tmp_path)


# --- faults ----------------------------------------------------------------------------


def test_a_stage_that_hides_or_invents_its_gathers_is_refused() -> None:
    plan, _ = of_modules(PIPELINE, 0, {"v": 3, "t": 2})
    certificate = certified(plan)
    assert faults_of(plan, certificate) == []
    stages = certificate["graph"]["stages"]
    for stage in stages:
        stage["gathers"] = stage["module"] == "t"
    sha256 = hash_graph(certificate["graph"])
    for row in certificate["rows"]:
        row["sha256"] = hash_row(sha256, row["instructions"])
    faults = faults_of(plan, certificate)
    for index in range(len(stages)):
        assert any(f"stages.{index}.gathers" in fault for fault in faults), faults[:5]


def test_an_owner_with_a_whole_and_a_cut_update_is_found() -> None:
    plan, _ = of_modules(PIPELINE, 0, {"v": 1})
    program = compile_plan(plan)
    index = next(i for i, update in enumerate(program.updates) if update.owner == "v")
    whole = replace(program.updates[index], sharded=False)
    updates = (*program.updates[:index], whole, *program.updates[index + 1 :])
    assert check_program(replace(program, updates=updates)) != []


def test_units_with_the_same_parameters_cut_them_alike() -> None:
    plan = SHARED.plan()
    one = next(unit for unit in plan.units if plan.tasks["default"].modules[unit.module].share)
    units = [unit.model_copy(update={"zero": 2}) if unit is one else unit for unit in plan.units]
    (fault,) = plan_faults(plan.model_copy(update={"units": tuple(units)}))
    assert f"units.{one.name}.zero: 2, and 0 of unit" in fault


def test_a_module_has_the_stage_of_the_parameters_that_it_shares() -> None:
    document = SHARED.workload().model_dump(mode="json", exclude_none=True)
    sharer, spec = next(item for item in document["modules"].items() if "share" in item[1])
    document["modules"][spec["share"]]["zero"] = 2
    workload = Workload.model_validate(document)
    assert workload.zero_of(sharer) == workload.zero_of(spec["share"]) == 2
    spec["zero"] = 1
    with pytest.raises(ValueError, match=rf"modules.{sharer}.zero: 1, and 2 of {spec['share']}"):
        Workload.model_validate(document)


def test_a_plan_cuts_no_less_than_its_workload_asks_for() -> None:
    plan, workload = of_modules(PIPELINE, 0, {"v": 2})
    assert plan_differences(plan, workload) == []
    units = [unit.model_copy(update={"zero": 1}) for unit in plan.units]
    found = plan_differences(plan.model_copy(update={"units": tuple(units)}), workload)
    assert found == ["units.v.zero: the plan has 1, the workload 2"]


# --- memory and planning ---------------------------------------------------------------


def test_a_rank_holds_of_each_module_what_its_stage_says() -> None:
    blocks, width, dp = 4, 256, 2
    units = [
        unit("v", "a", dp=dp, k=3, blocks=blocks, ranks=[[[0]], [[1]]]),
        unit("t", "v", dp=dp, k=3, blocks=blocks, ranks=[[[0]], [[1]]]),
    ]
    losses = [loss("regression", "t", "target")]
    workload = make_workload(
        units,
        losses,
        batch=6,
        precision="fp32",
        factories={"v": "wide", "t": "wide"},
        args={"v": {"width": width}, "t": {"width": width}},
        train={**ADAMW, "zero": 1},
    )
    modules = {**workload.modules, "v": workload.modules["v"].model_copy(update={"zero": 3})}
    workload = workload.model_copy(update={"modules": modules})
    plan = trained_as(make_plan(*units, losses=losses, batch=6), workload)
    numbers = sum(p.numel() for p in wide(blocks, width).parameters())
    kept, most = held_bytes(plan, workload)
    module = module_profile(blocks=blocks, parameters=numbers)
    counted = costs_of(plan, profile({"v": module, "t": module}, dp))
    # Between two steps gradients are gone.
    assert kept == pytest.approx([numbers * (12 / dp + 4 + 8 / dp)] * dp, rel=0.05)
    expected = numbers * (16 / dp + 4 + 4 + 8 / dp) + numbers / blocks * 8
    assert counted.static_bytes(0) == pytest.approx(expected)
    assert max(most) == pytest.approx(expected, rel=0.05)
    assert ExpectedMemory(counted).peak(0).gradients == pytest.approx(4 * numbers)


def _chain(**vision: Any) -> Workload:
    pins = {"plan": {"tp": 1, "pp": 1}}
    modules = {"vision": {**pins, **vision}, "llm": {"inputs": ["vision"], **pins}}
    losses = {"lm": {"factory": "m:lm", "inputs": ["llm"]}}
    return planned_workload(modules, batch=8, losses=losses)


@pytest.mark.parametrize("solver", ["colocated", "megatron", "convex", "deepspeed"])
def test_a_plan_has_the_stages_of_its_workload(solver: str, tmp_path: Path) -> None:
    modules = {name: module_profile(parameters=8.0) for name in ("vision", "llm")}
    plan = run_solve(tmp_path, _chain(zero=2), profile(modules, 8), solver=solver)
    least = 1 if solver == "deepspeed" else 0
    assert plan.training.zero == least
    assert {unit.module: plan.zero_of(unit) for unit in plan.units} == {"vision": 2, "llm": least}


def test_neighbours_cut_no_module_further_than_memory_asks_for(tmp_path: Path) -> None:
    """Sums after each micro-batch take time, and the smaller module fits without them."""
    numbers = {"vision": 100.0, "llm": 10.0}
    modules = {name: module_profile(parameters=number) for name, number in numbers.items()}
    slow = {"latency_s": 0.5, "bandwidth_bytes_per_s": 1e4}
    costs = profile(modules, 4, memory_bytes=800.0, intra=slow)
    plans = [run_solve(tmp_path, _chain(), costs, solver=name) for name in ("auto", "deepspeed")]
    stages = [{unit.module: plan.zero_of(unit) for unit in plan.units} for plan in plans]
    assert stages == [{"vision": 2, "llm": 1}, {"vision": 2, "llm": 2}]
    assert plans[0].predicted.iteration_s < 0.8 * plans[1].predicted.iteration_s
    assert max(plans[0].predicted.memory_bytes) == pytest.approx(
        100 * (4 + 12 / 4) + 10 * (4 + 4 + 8 / 4)
    )


def test_only_modules_that_are_cut_hold_narrow_weights() -> None:
    plan, workload = of_modules(CONTRASTIVE, 0, {"v": 1}, precision="bf16")
    seen: dict[str, set[torch.dtype]] = {}

    def note(session: Any) -> None:
        for name, parameter in session.model.trained():
            if parameter.dim() > 1:
                seen.setdefault(name.split(".")[0], set()).add(parameter.dtype)

    train_planned(plan, workload, 1, before=note)
    assert seen["v"] == {torch.bfloat16}
    assert seen["t"] == {torch.float32}
