"""Where the planner splits backwards, and how the workload decides it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Pins
from tests.programs import in_flight
from tests.solving import module_profile, profile, run_solve, workload


def solved(
    folder: Path, *, split: bool | str = "auto", memory_bytes: float = 1e12, **options: Any
) -> Plan:
    """Four equal stages and eight micro-batches, whatever else the planner may choose."""
    more: dict[str, Any] = {"block_parameters": [0, 0, 0, 1]}
    known = module_profile(activation_bytes=1.0, parameters=1.0, **more)
    pins: dict[str, Any] = {"pp": 4, "dp": 1, "microbatch": 1, "split_backward": split}
    job = workload({"a": {"plan": pins}}, batch=8, losses=_loss("a"))
    return run_solve(folder, job, profile({"a": known}, 4, memory_bytes=memory_bytes), **options)


def _loss(module: str) -> dict[str, Any]:
    return {"mean": {"factory": "mmplan.zoo.losses:clip", "inputs": [module]}}


def schedule(plan: Plan) -> tuple[bool, bool]:
    return plan.units[0].schedule.split_backward, plan.units[0].schedule.even_in_flight


def test_backwards_are_split_where_that_is_faster(tmp_path: Path) -> None:
    whole = solved(tmp_path, split=False)
    plan = solved(tmp_path)
    assert schedule(whole) == (False, False)
    assert schedule(plan) == (True, True)
    # A block takes a quarter of (1, 2) seconds: 24 units of work and 9, or 3, of idling.
    assert whole.predicted.iteration_s == pytest.approx(33 / 4)
    assert plan.predicted.iteration_s == pytest.approx(27 / 4)
    assert check_program(compile_plan(plan)) == []
    (note,) = (n for n in plan.solver.notes if "split backward" in n)
    assert "18.2% less than with fused backwards" in note
    first = plan.solver.runners_up[0]
    assert first.label.endswith(", fused backwards")
    assert first.iteration_s == whole.predicted.iteration_s
    assert plan.solver.objective_s == whole.solver.objective_s


def test_memory_decides_how_long_weight_gradients_wait(tmp_path: Path) -> None:
    """The last stage holds 16 bytes of parameters: there is room for few micro-batches more."""
    plan = solved(tmp_path, memory_bytes=16.5)
    assert schedule(plan) == (True, False)
    assert plan.predicted.iteration_s == pytest.approx(30 / 4)
    assert max(plan.predicted.memory_bytes) <= 16.5
    whole = solved(tmp_path, split=False, memory_bytes=16.5)
    assert in_flight(compile_plan(plan)) == in_flight(compile_plan(whole))
    assert plan.predicted.memory_bytes == whole.predicted.memory_bytes


def test_the_workload_may_force_or_forbid_it(tmp_path: Path) -> None:
    assert schedule(solved(tmp_path, split=True, top=1)) == (True, False)
    assert schedule(solved(tmp_path, split=True, solver="megatron")) == (True, False)
    assert schedule(solved(tmp_path, split=False)) == (False, False)
    assert Pins().split_backward == "auto"


def test_the_formulas_optimum_and_baselines_have_whole_backwards(tmp_path: Path) -> None:
    whole: list[dict[str, Any]] = [{"top": 1}, {"solver": "megatron"}]
    for options in whole:
        assert schedule(solved(tmp_path, **options)) == (False, False)


def test_one_stage_has_nothing_to_split(tmp_path: Path) -> None:
    known = profile({"a": module_profile()}, 1)
    plan = run_solve(
        tmp_path, workload({"a": {"plan": {"split_backward": "auto"}}}, batch=8), known
    )
    assert schedule(plan) == (False, False)
    assert not [n for n in plan.solver.notes if "split backward" in n]


def test_a_chain_gains_across_its_modules(tmp_path: Path) -> None:
    """The second module's stages send gradients to the first one's."""
    known = profile({"a": module_profile(), "b": module_profile()}, 4)
    pins: dict[str, Any] = {"pp": 2, "dp": 1, "microbatch": 1, "split_backward": "auto"}
    job = workload(
        {"a": {"plan": pins}, "b": {"plan": pins, "inputs": ["a"]}}, batch=8, losses=_loss("b")
    )
    plan = run_solve(tmp_path, job, known, solver="convex")
    stages = compile_plan(plan).stages
    assert [stage.split for stage in stages] == [False, True, True, True]


@pytest.mark.parametrize("value", ["yes", 1, [True]])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="split_backward"):
        Pins.model_validate({"split_backward": value})
