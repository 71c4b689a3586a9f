"""Missing modalities: a sample, a micro-batch, a replica and whole steps without images or audio.

Every plan trains some steps with AdamW, which decays weights whose gradient is zero and leaves
those alone that have none: both must be as in one process, whose modules run on whole batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mmlaunch.launch.launch import launch
from tests.gloo_entries import train
from tests.missing_cases import GRID, PLACES, STEPS, MissingCase, train_plainly
from tests.pairwise import Row, pairwise_rows
from tests.training import Trained, train_planned, worst_difference

FACTORS: dict[str, tuple[Any, ...]] = {
    "where": tuple(PLACES),
    "kind": tuple(GRID),
    "tp": (1, 2),
    "joins": ("adds", "skips"),
    "losses": ("naming", "contrastive", "none"),
    "tasks": (1, 2),
    "zero": (0, 1),
    "recompute": ("none", "full"),
    "split": (False, True),
    "nodes": (False, True),
}
# Rounding of three steps in float64; of bf16 less than a weight decays by in a step.
TOLERANCE = {"fp64": 1e-12, "bf16": 5e-3}
RANKS = 9

pytestmark = pytest.mark.usefixtures("one_thread")


def _judge(found: Trained, case: MissingCase) -> None:
    plain = train_plainly(case)
    tolerance = TOLERANCE[case.precision]
    assert worst_difference(found.weights, plain.weights) <= tolerance, str(case)
    errors = [abs(a - b) for a, b in zip(found.losses, plain.losses, strict=True)]
    assert max(errors) <= tolerance


def _cases(seed: int, *, ranks: int | None = None, most: int | None = None) -> list[MissingCase]:
    def fits(row: Row) -> bool:
        return ranks is None or MissingCase(**row).plan().devices <= ranks

    return [MissingCase(**r) for r in pairwise_rows(FACTORS, valid=fits, most=most, seed=seed)]


# A step without pictures, then those that each kind of plan may stumble over.
QUICK = (
    MissingCase(where="step", joins="skips", losses="none"),
    MissingCase(where="first-step", kind="waves", joins="skips", losses="none", zero=1),
    MissingCase(where="everywhere", kind="colocated", recompute="full"),
    MissingCase(where="replica", kind="interleaved", joins="skips", split=True),
    MissingCase(where="both", kind="waves", losses="contrastive", joins="skips", tasks=2),
    MissingCase(where="first-microbatch", kind="colocated", tp=2, nodes=True, losses="none"),
)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_few_of_each(case: MissingCase) -> None:
    _judge(train_planned(case.plan(), case.workload(), STEPS), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", _cases(0) + _cases(1), ids=str)
def test_every_two_factors(case: MissingCase) -> None:
    _judge(train_planned(case.plan(), case.workload(), STEPS), case)


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
def test_in_bf16(where: str) -> None:
    case = MissingCase(where=where, kind="interleaved", joins="skips", precision="bf16", split=True)
    _judge(train_planned(case.plan(), case.workload(), STEPS), case)


def test_the_selection_holds_every_pair() -> None:
    cases = _cases(0)
    for a, b in itertools.combinations(FACTORS, 2):
        met = {(getattr(case, a), getattr(case, b)) for case in cases}
        assert met == set(itertools.product(FACTORS[a], FACTORS[b]))


@pytest.mark.slow
def test_over_gloo(tmp_path: Path) -> None:
    """Real processes: nobody waits for a message or a collective that does not come."""
    cases: Sequence[MissingCase] = _cases(2, ranks=RANKS, most=6)
    found = launch(
        entry=train,
        args=([(case.plan(devices=RANKS), case.workload()) for case in cases], STEPS),
        num_ranks=RANKS,
        run_dir=tmp_path,
        timeout_s=180.0,
    )
    for index, case in enumerate(cases):
        for rank in found:
            assert rank[index].losses == found[0][index].losses
        _judge(found[0][index], case)
