"""A pairwise selection of the matrix over real processes and gloo."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mmlaunch.session.verify import LocalGradients, compare
from mmplan.program.compile import compile_plan
from tests.gloo_entries import run_cases, train_and_resume
from tests.launching import launched
from tests.matrix_cases import FEATURES, Case
from tests.pairwise import Row, pairwise_rows
from tests.verification import HERE

RANKS = 8
TIMEOUT_S = 90.0
FACTORS: dict[str, tuple[Any, ...]] = {
    "feature": tuple(FEATURES),
    "pp": (1, 2, 3),
    "dp": (1, 2, 3),
    "tp": (1, 2),
    "k": (1, 2, 4),
    "syncs": (1, 2, 3),
    "modalities": (2, 3),
    "others": ("rotated", "same", "single"),
    "lead": (0, 1),
    "sync_lead": (0, 1),
    "vpp": (1, 2),
    "backward": ("whole", "split", "even"),
    "per_node": (2, 4),
}


def _fits(row: Row) -> bool:
    return Case(**row).plan().devices <= RANKS


@cache
def selected() -> list[Case]:
    """At most 24 cases of at most 8 ranks."""
    return [Case(**row) for row in pairwise_rows(FACTORS, valid=_fits, most=24, seed=52)]


@pytest.mark.parametrize("cases", [range(4), pytest.param(range(4, 24), marks=pytest.mark.slow)])
def test_gradients_equal_one_process_over_gloo(cases: range, tmp_path: Path) -> None:
    """Many cases in one launch, because starting workers costs most."""
    chosen = [selected()[index] for index in cases]
    found: list[list[LocalGradients]] = launched(
        run_cases, (chosen,), num_ranks=RANKS, run_dir=tmp_path, timeout_s=TIMEOUT_S
    )
    for index, case in enumerate(chosen):
        program = compile_plan(case.plan(devices=RANKS))
        verdict = compare(case.workload(), HERE, program, [rank[index] for rank in found])
        assert not verdict.differences, (str(case), verdict.differences[:5])
        assert verdict.compared > RANKS


def test_the_selection_uses_every_feature_and_every_degree() -> None:
    cases = selected()
    assert len(cases) == 24
    for name, values in FACTORS.items():
        assert {getattr(case, name) for case in cases} == set(values), name
    assert max(case.plan().devices for case in cases) == RANKS


def test_a_resumed_run_over_gloo_goes_on_bit_for_bit(tmp_path: Path) -> None:
    case = Case(pp=2, dp=1, tp=2, k=2, syncs=2, others="single", feature="dropout")
    reports = launched(
        train_and_resume,
        (case, tmp_path / "checkpoints"),
        num_ranks=case.plan().devices,
        run_dir=tmp_path / "run",
        timeout_s=TIMEOUT_S,
    )
    for report in reports:
        assert report["losses"][0] == report["losses"][1]
        assert report["step"] == 3
    unbroken = load_file(tmp_path / "checkpoints" / "unbroken.safetensors")
    resumed = load_file(tmp_path / "checkpoints" / "resumed.safetensors")
    assert unbroken.keys() == resumed.keys()
    assert "losses.contrastive.scale" in unbroken
    for name, value in unbroken.items():
        assert torch.equal(value, resumed[name]), name
