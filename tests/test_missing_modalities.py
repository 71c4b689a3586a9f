"""Missing modalities: a sample, a micro-batch, a replica and whole steps without images or audio.

Every plan trains some steps with AdamW, which decays weights whose gradient is zero and leaves
those alone that have none: both must be as in one process, whose modules run on whole batches.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmlaunch.execute.executor import ExecutionError
from mmlaunch.measure.inputs import Inputs
from mmlaunch.measure.sample_work import WorkSampler
from mmlaunch.session.session import Session
from mmplan.errors import RunFailedError
from mmplan.profiling.data import timed_means
from mmplan.ragged import Ragged
from mmplan.schema.base import document_text
from mmplan.schema.workload import Workload
from tests.commands import ROOT, call
from tests.gloo_entries import train
from tests.launching import launched
from tests.missing_cases import BATCH, GRID, PLACES, STEPS, MissingCase, train_plainly
from tests.mllm_cases import MllmCase
from tests.pairwise import Row, pairwise_rows
from tests.training import Trained, train_planned, worst_difference
from tests.verification import HERE, verify_in_process

FACTORS: dict[str, tuple[Any, ...]] = {
    "where": tuple(PLACES),
    "kind": tuple(GRID),
    "tp": (1, 2),
    "joins": ("adds", "skips", "passes"),
    "losses": ("naming", "contrastive", "matching", "none"),
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
        if row["joins"] == "passes" and row["losses"] != "none":
            return False
        return ranks is None or MissingCase(**row).plan().devices <= ranks

    return [MissingCase(**r) for r in pairwise_rows(FACTORS, valid=fits, most=most, seed=seed)]


# A step without pictures, then those that each kind of plan may stumble over.
QUICK = (
    MissingCase(where="step", joins="skips", losses="none"),
    MissingCase(where="first-step", kind="waves", joins="skips", losses="none", zero=1),
    MissingCase(where="everywhere", kind="colocated", recompute="full"),
    MissingCase(where="first-step", kind="interleaved", joins="passes", losses="none", split=True),
    MissingCase(where="both", kind="waves", losses="matching", joins="skips", tasks=2),
    MissingCase(where="replica", kind="colocated", tp=2, nodes=True),
)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_a_few_of_each(case: MissingCase) -> None:
    _judge(train_planned(case.plan(), case.workload(), STEPS), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", _cases(0), ids=str)
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
        every = set(itertools.product(FACTORS[a], FACTORS[b]))
        left_out = {("passes", losses) for losses in FACTORS["losses"] if losses != "none"}
        assert met == (every - left_out if (a, b) == ("joins", "losses") else every)


def test_a_block_that_cannot_take_no_rows_is_named() -> None:
    """Shapes are inferred from a batch without pictures all the same: the first step fails."""
    case = MissingCase(where="first-step", kind="waves", losses="none", recompute="full")
    spec = case.workload().model_dump(exclude_none=True, mode="json")
    spec["modules"]["eye"]["factory"] = "tests.missing_cases:fussy_eye"
    with pytest.raises(ExecutionError) as caught:
        train_planned(case.plan(), Workload.model_validate(spec), STEPS)
    assert str(caught.value).startswith(
        "modules.eye: block 1 (Rows) cannot take a micro-batch without any row of its ragged "
        "input: RuntimeError: cannot reshape tensor of 0 elements"
    )
    assert str(caught.value.hint).startswith("let the block take 0 rows")
    assert "x.reshape" in caught.value.detail


def test_an_output_that_nobody_waits_for_is_an_error() -> None:
    """Not a wait without end: of None nothing would be sent, and the others wait for lengths."""
    case = MissingCase(where="step", kind="waves", losses="none")
    spec = case.workload().model_dump(exclude_none=True, mode="json")
    spec["modules"]["eye"]["factory"] = "tests.missing_cases:vanishing_eye"
    with pytest.raises(RunFailedError) as caught:
        train_planned(case.plan(), Workload.model_validate(spec), STEPS)
    assert str(caught.value) == (
        "modules.eye returns None for a micro-batch, others wait for Ragged [*, 8] float64"
    )
    assert str(caught.value.hint).endswith("mmplan.Ragged with 0 rows")


@pytest.mark.parametrize("zero", [0, 1])
def test_a_module_that_was_never_updated_is_saved_and_goes_on(zero: int, tmp_path: Path) -> None:
    """After a first step without pictures their module has no state; others load it so."""
    case = MissingCase(where="first-step", kind="waves", joins="skips", losses="none", zero=zero)
    other = replace(case, kind="colocated", zero=1 - zero)

    def save(session: Session) -> None:
        session.save(tmp_path)

    def load(session: Session) -> None:
        session.load(tmp_path / "step-1")

    train_planned(case.plan(), case.workload(), 1, after=save)
    found = train_planned(other.plan(), other.workload(), STEPS, before=load)
    plain = train_plainly(case)
    assert worst_difference(found.weights, plain.weights) <= TOLERANCE["fp64"]
    assert found.losses == pytest.approx(plain.losses[1:], rel=TOLERANCE["fp64"])


def test_profiles_time_samples_that_have_the_modality() -> None:
    """The first step has no picture: the second one is timed, and its work is what ``at`` says."""
    workload = MissingCase(where="first-step").workload()
    (pictures,) = Inputs(workload, HERE, torch.device("cpu"), pool=BATCH).of_module(
        "default", "eye", BATCH
    )
    assert isinstance(pictures, Ragged)
    rows = len(pictures.values)
    point = {"task": "default", "order": "random", "samples": BATCH}
    sampler = WorkSampler(workload, HERE)
    pieces = [sampler.work(point | {"piece": step})["work"]["eye"] for step in range(STEPS)]
    assert sum(pieces[0]) == 0 < rows
    work = {"eye": [*itertools.chain(*pieces)]}
    assert timed_means(work, BATCH, BATCH) == {"eye": rows / BATCH}
    assert timed_means({"eye": [0.0] * 36}, BATCH, BATCH) == {}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["first-step", "everywhere"])
def test_planned_from_data_without_pictures(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profile with the data's work, plan, proof, simulation of sampled batches and report."""
    workload = MissingCase(where=where, joins="adds").workload()
    spec, profile, plan = (tmp_path / name for name in ("w.json", "p.json", "plan.json"))
    spec.write_text(document_text(workload))
    # A process of its own reads the data.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def done(*args: str | Path) -> None:
        result = call("mmplan", *args)
        assert result.code == 0, result.err

    done("profile", spec, "--analytic", "--cluster", "p3-8", "--data", "-o", profile)
    done("solve", spec, "--profile", profile, "--devices", "4", "-o", plan)
    done("check", plan)
    done("simulate", plan)
    done("report", plan, "-o", tmp_path / "report.html")
    data = json.loads(profile.read_text())["data"]["default"]
    assert ("eye" in data["work"]) == (where == "first-step")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        MllmCase(encoder_dp=2, dp=3, pp=2),
        MllmCase(tp=2, vpp=2, pp=2, encoders=2, recompute="full"),
        MllmCase(encoder_dp=3, zero=1, freeze="encoder"),
    ],
    ids=str,
)
def test_the_zoo_s_modules_take_a_step_of_text_alone(case: MllmCase) -> None:
    """Encoders, language model and generator, with no image to read or to draw."""
    spec = case.workload().model_dump(exclude_none=True, mode="json")
    spec["data"]["factory"] = "tests.missing_cases:TextAlone"
    verdict = verify_in_process(case.plan(), Workload.model_validate(spec))
    assert not verdict.differences
    assert verdict.loss > 0


@pytest.mark.slow
def test_over_gloo(tmp_path: Path) -> None:
    """Real processes: nobody waits for a message or a collective that does not come."""
    cases: Sequence[MissingCase] = _cases(2, ranks=RANKS, most=6)
    found = launched(
        train,
        ([(case.plan(devices=RANKS), case.workload()) for case in cases], STEPS),
        num_ranks=RANKS,
        run_dir=tmp_path,
        timeout_s=180.0,
    )
    for index, case in enumerate(cases):
        for rank in found:
            assert rank[index].losses == found[0][index].losses
        _judge(found[0][index], case)
