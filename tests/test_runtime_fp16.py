"""fp16: one scale of all gradients, an overflow that costs no step, and losses as of float32."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.model.precision import LossScale
from mmlaunch.session.session import Session
from mmlaunch.session.smaller_plans import on_one_rank
from mmlaunch.session.verify import planned_step
from mmplan.errors import NotFiniteError
from mmplan.schema.train import LARGEST_SCALE, LossScaleSpec, RateSpec
from mmplan.schema.workload import Workload
from tests.birds import copy_workload, edited, two_rank_plan
from tests.commands import run
from tests.matrix_cases import Case, small_case
from tests.programs import loss, make_plan, trained_as, unit
from tests.training import train_planned, worst_difference
from tests.verification import HERE, make_workload, verify_in_process, verify_steps


def _changed(workload: Workload, *, initial: float = 2.0**16, **train: Any) -> Workload:
    scale = LossScaleSpec(initial=initial, growth_interval=train.pop("growth_interval", 2000))
    fields = {"precision": "fp16", "loss_scale": scale, "optimizer_args": {"lr": 0.01}, **train}
    return workload.model_copy(update={"train": workload.train.model_copy(update=fields)})


@pytest.mark.parametrize(
    ("case", "initial"),
    [
        # Begins with overflows.
        (small_case(dp=2, pp=2, others="same"), 2.0**18),
        (small_case(dp=2, feature="sharded", others="single"), 2.0**16),
        *(
            pytest.param(case, 2.0**32, marks=pytest.mark.slow)
            for case in (
                small_case(dp=2, pp=2),
                small_case(dp=3, tp=2),
                small_case(dp=2, tp=2, feature="sharded"),
                small_case(dp=2, tp=2, feature="chain", kind="1f1b"),
                small_case(dp=2, pp=2, backward="split"),
                small_case(dp=2, feature="ragged"),
                small_case(dp=2, feature="counted"),
                small_case(dp=2, feature="frozen-range"),
                small_case(dp=2, feature="dropout"),
                small_case(dp=2, feature="shared"),
                small_case(dp=2, feature="tied"),
            )
        ),
    ],
    ids=str,
)
def test_gradients_are_as_near_as_rounding_allows(case: Case, initial: float) -> None:
    verdict = verify_in_process(case.plan(), _changed(case.workload(), initial=initial))
    assert not verdict.differences, verdict.differences[:5]
    # Noise is there, and it is seen to be noise.
    assert 0 < verdict.share < 1


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1])
def test_updates_and_a_reload_are_those_of_one_process(zero: int) -> None:
    case = small_case(dp=2, pp=2, feature="regression")
    workload = _changed(case.workload(), initial=2.0**28, zero=zero, clip_grad_norm=0.5)
    verdict = verify_steps(case.plan(), workload)
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.steps == 4


def test_gradients_too_small_for_fp16_are_kept_by_the_scale() -> None:
    units, losses = [unit("v", "a", blocks=2)], [loss("regression", "v", "target", weight=2.0**-22)]
    plan = make_plan(*units, losses=losses, batch=12)
    workload = make_workload(units, losses, batch=12)

    def gradients(trained: Workload) -> dict[str, Tensor]:
        def entry(transport: Any) -> dict[str, Tensor]:
            session = Session(
                plan=trained_as(plan, trained), workload=trained, folder=HERE, transport=transport
            )
            return planned_step(session).gradients

        (found,) = InProcessWorld(1).run(entry)
        return found

    wide = gradients(_changed(workload, precision="fp32"))
    scaled, plain = (gradients(_changed(workload, initial=initial)) for initial in (2.0**24, 1.0))
    for name, gradient in wide.items():
        assert (scaled[name] - gradient).norm() < 0.02 * gradient.norm(), name
    first = next(iter(wide))
    assert (plain[first] - wide[first]).norm() > 0.5 * wide[first].norm()


def _overflowing(scales: list[float | None]) -> Callable[[Session], None]:
    """In step 1 one gradient of one module overflows on one rank, under all but small scales."""

    def before(session: Session) -> None:
        if session.rank == 2:
            name, parameter = session.model.trained()[0]
            assert name.startswith("t.")

            def spoil(gradient: Tensor) -> Tensor:
                scale = session.loss_scale
                overflows = session.step_count == 1 and scale is not None and scale.value > 2.0**9
                return gradient * (math.inf if overflows else 1.0)

            parameter.register_hook(spoil)
        if session.rank == 0:
            session.hooks.on_step.append(lambda _, result: scales.append(result.loss_scale))

    return before


@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_overflow_in_one_module_costs_no_rank_a_step_or_a_sample(zero: int) -> None:
    units = [unit("v", "a", pp=2), unit("t", "b", dp=2)]
    losses = [loss("contrastive", "v", "t", sync_batch=12)]
    plan = make_plan(*units, losses=losses, batch=12)
    workload = _changed(
        make_workload(units, losses, batch=12),
        initial=2.0**10,
        optimizer="AdamW",
        clip_grad_norm=0.1,
        schedule=RateSpec(warmup_steps=3),
        zero=zero,
        compare_replicas=1,
    )
    scales: list[float | None] = []
    found = train_planned(plan, workload, 3, before=_overflowing(scales))
    assert scales == [2.0**10, 2.0**9, 2.0**9]
    # Half the scale is another exponent: the same numbers, but for those near zero.
    other = train_planned(plan, workload, 3)
    assert found.losses == pytest.approx(other.losses, rel=1e-5)
    assert found.norms == pytest.approx(other.norms, rel=1e-5)
    assert worst_difference(found.weights, other.weights) < 1e-5


def test_what_no_scale_makes_finite_is_not_taken_for_an_overflow() -> None:
    units, losses = [unit("v", "a", blocks=2)], [loss("regression", "v", "target")]
    plan = make_plan(*units, losses=losses, batch=12)
    workload = _changed(make_workload(units, losses, batch=12), initial=4.0)
    attempts: list[float] = []

    def entry(transport: Any) -> float:
        session = Session(
            plan=trained_as(plan, workload), workload=workload, folder=HERE, transport=transport
        )
        scale = session.loss_scale
        assert scale is not None

        def spoil(gradient: Tensor) -> Tensor:
            attempts.append(scale.value)
            return gradient * math.nan

        session.model.trained()[0][1].register_hook(spoil)
        with pytest.raises(NotFiniteError, match=r"the gradient of v\.0\."):
            session.step()
        return scale.value

    assert InProcessWorld(1).run(entry) == [4.0]
    assert attempts == [4.0, 2.0, 1.0]


def test_a_checkpoint_keeps_the_scale_and_its_steps(tmp_path: Path) -> None:
    units, losses = [unit("v", "a", blocks=2, pp=2)], [loss("regression", "v", "target")]
    plan = make_plan(*units, losses=losses, batch=12)
    workload = _changed(make_workload(units, losses, batch=12), initial=4.0, growth_interval=3)
    plan = trained_as(plan, workload)

    def scales(transport: Any, number: int, *, of: Any = plan) -> list[float | None]:
        session = Session(plan=of, workload=workload, folder=HERE, transport=transport)
        if of is not plan:
            session.load(tmp_path / "step-2")
        found = [session.step().loss_scale for _ in range(number)]
        if session.step_count == 2:
            session.save(tmp_path)
        return found

    assert InProcessWorld(2).run(lambda t: scales(t, 2)) == [[4.0, 4.0]] * 2
    one = on_one_rank(plan)
    assert InProcessWorld(1).run(lambda t: scales(t, 4, of=one)) == [[4.0, 8.0, 8.0, 8.0]]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_writes_its_scale_and_goes_on_with_it(tmp_path: Path) -> None:
    workload = copy_workload(tmp_path)
    scale = "loss_scale: {initial: 1024, growth_interval: 3}"
    edited(workload, "train: {", f"train: {{precision: fp16, {scale}, ")
    (tmp_path / "plans").mkdir()
    plan = two_rank_plan(workload, tmp_path / "plans" / "plan.json", dp=True)
    options = ("--run-dir", tmp_path / "run", "--save-every", 2)
    first = run("mmlaunch", "run", plan, *options, "--steps", 4, cwd=tmp_path)
    assert first.code == 0, first.err
    then = run("mmlaunch", "run", plan, *options, "--steps", 7, "--resume", cwd=tmp_path)
    assert then.code == 0, then.err
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    scales = [json.loads(line)["loss_scale"] for line in lines]
    assert scales == [1024.0] * 3 + [2048.0] * 3 + [4096.0]


specs = st.builds(
    LossScaleSpec,
    initial=st.integers(0, 64).map(lambda n: 2.0**n),
    factor=st.sampled_from([1.5, 2.0, 10.0]),
    growth_interval=st.integers(1, 5),
)


@given(specs, st.lists(st.booleans(), max_size=40))
def test_the_scale_follows_from_the_steps(spec: LossScaleSpec, overflows: list[bool]) -> None:
    scale = LossScale(spec)
    for position, overflow in enumerate(overflows):
        before, again = scale.value, LossScale(spec)
        again.load(json.loads(json.dumps(scale.state())))
        for one in (scale, again):
            if overflow:
                assert one.shrink() == (before > 1.0)
                assert one.value == max(1.0, before / spec.factor)
            else:
                one.stepped()
                quiet = overflows[max(0, position + 1 - spec.growth_interval) : position + 1]
                if any(quiet) or len(quiet) < spec.growth_interval:
                    assert one.value == before
        assert (scale.value, scale.state()) == (again.value, again.state())
    if not any(overflows):
        grown = spec.initial * spec.factor ** (len(overflows) // spec.growth_interval)
        assert scale.value == pytest.approx(min(grown, LARGEST_SCALE))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_contrastive_model_trains_within_the_spread_of_float32_seeds() -> None:
    case = small_case(dp=2, others="single")

    def last_loss(seed: int, precision: str) -> float:
        train: dict[str, Any] = {"precision": precision, "seed": seed, "optimizer": "AdamW"}
        found = train_planned(case.plan(), _changed(case.workload(), **train), 60)
        # Two steps are an epoch.
        assert fmean(found.losses[-2:]) < 0.8 * fmean(found.losses[:2])
        return fmean(found.losses[-2:])

    wide = sorted((last_loss(seed, "fp32"), seed) for seed in (3, 4, 5))
    (low, _), (_, middle), (high, _) = wide
    assert low < last_loss(middle, "fp16") < high
