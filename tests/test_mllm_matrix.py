"""The multimodal LLM against one process: degrees, chunks, freezes, ZeRO, recomputation.

Samples have from no to many images and different numbers of tokens that count, and some
micro-batches, with dp 3 some whole replicas, have no image at all
(:mod:`tests.test_zoo_mllm` shows that the data are so).
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from typing import Any

import pytest

from mmlaunch.session.verify import LocalGradients, Verdict, compare
from mmplan.program.compile import compile_plan
from tests.gloo_entries import gradients
from tests.launching import launched
from tests.mllm_cases import FREEZES, MllmCase
from tests.pairwise import Row, few_rows, pairwise_rows
from tests.verification import HERE, TOLERANCE, verify_in_process

FACTORS: dict[str, tuple[Any, ...]] = {
    "encoder_dp": (1, 2, 3),
    "dp": (1, 2, 3),
    "pp": (1, 2),
    "tp": (1, 2),
    "vpp": (1, 2),
    "freeze": tuple(FREEZES),
    "zero": (0, 1),
    "recompute": ("none", "full", 1),
    "encoders": (1, 2),
}
RANKS = 8

pytestmark = pytest.mark.usefixtures("one_thread")


def _judge(verdict: Verdict, case: MllmCase) -> None:
    assert not verdict.differences, (str(case), verdict.differences[:5])
    assert verdict.worst <= TOLERANCE["fp64"]
    assert verdict.compared >= (6 if case.freeze == "all" else 20)


QUICK = [MllmCase(**row) for row in few_rows(FACTORS, "freeze", seed=2)]


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_every_two_degrees(case: MllmCase) -> None:
    _judge(verify_in_process(case.plan(), case.workload()), case)


PAIRWISE = [MllmCase(**row) for row in pairwise_rows(FACTORS, seed=2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", PAIRWISE, ids=str)
def test_every_two_factors(case: MllmCase) -> None:
    _judge(verify_in_process(case.plan(), case.workload()), case)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("freeze", FREEZES)
@pytest.mark.parametrize("encoders", FACTORS["encoders"])
@pytest.mark.parametrize(("encoder_dp", "dp"), list(itertools.product((1, 2, 3), (1, 2, 3))))
def test_the_whole_product(encoder_dp: int, dp: int, encoders: int, freeze: str) -> None:
    rest = ("pp", "tp", "vpp", "zero", "recompute")
    for values in itertools.product(*(FACTORS[name] for name in rest)):
        case = MllmCase(
            encoder_dp=encoder_dp,
            dp=dp,
            encoders=encoders,
            freeze=freeze,
            **dict(zip(rest, values, strict=True)),
        )
        _judge(verify_in_process(case.plan(), case.workload()), case)


def test_the_quick_selection_holds_every_pair() -> None:
    for a, b in itertools.combinations(FACTORS, 2):
        met = {(getattr(case, a), getattr(case, b)) for case in PAIRWISE}
        assert met == set(itertools.product(FACTORS[a], FACTORS[b]))


@cache
def _over_gloo() -> list[MllmCase]:
    """At most 24 cases of at most 8 ranks."""

    def fits(row: Row) -> bool:
        return MllmCase(**row).plan().devices <= RANKS

    return [MllmCase(**row) for row in pairwise_rows(FACTORS, valid=fits, most=24, seed=4)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[LocalGradients]]:
    """``[rank][case]``."""
    return launched(
        gradients,
        ([(case.plan(devices=RANKS), case.workload()) for case in _over_gloo()],),
        num_ranks=RANKS,
        run_dir=tmp_path_factory.mktemp("mllm"),
        timeout_s=180.0,
    )


@pytest.mark.slow
@pytest.mark.parametrize("index", range(17))
def test_gradients_equal_one_process_over_gloo(
    index: int, found: list[list[LocalGradients]]
) -> None:
    cases = _over_gloo()
    assert len(cases) == 17
    case = cases[index]
    program = compile_plan(case.plan(devices=RANKS))
    _judge(compare(case.workload(), HERE, program, [rank[index] for rank in found]), case)


def test_a_frozen_model_computes_no_gradient_before_what_trains() -> None:
    """Encoder and model frozen whole: nothing runs backward before the generator."""
    case = MllmCase(encoder_dp=2, pp=2, freeze="all")
    workload, plan = case.workload(), case.plan()
    modules = dict(workload.modules)
    modules["vision"] = modules["vision"].model_copy(update={"frozen": True})
    modules["generator"] = modules["generator"].model_copy(update={"frozen": False})
    task = plan.tasks["default"]
    planned = {
        name: spec.model_copy(update={"frozen": modules[name].frozen})
        for name, spec in task.modules.items()
    }
    plan = plan.model_copy(
        update={"tasks": {"default": task.model_copy(update={"modules": planned})}}
    )
    stages = compile_plan(plan).stages
    assert {s.module for s in stages if s.has_backward and not s.hosted} == set()
    workload = workload.model_copy(update={"modules": modules})
    assert not verify_in_process(plan, workload).differences


def test_cases_are_what_they_say() -> None:
    plan = dataclasses.replace(QUICK[0], vpp=2, pp=2, dp=3, encoders=2).plan()
    assert plan.unit("llm").schedule.kind == "interleaved"
    assert {unit.name: unit.dp for unit in plan.units}["llm"] == 3
    assert "eyes" in {unit.name for unit in plan.units}
