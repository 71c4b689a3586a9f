"""Gradients of planned steps equal one process's, over the matrix of plans and features."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.session.optimizer import build_optimizer
from mmlaunch.session.reference import Reference
from mmlaunch.session.session import Session
from mmlaunch.session.verify import Verdict
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.matrix_cases import FEATURES, SOME_FEATURES, Case
from tests.pairwise import few_rows, pairwise_rows
from tests.programs import Kind, LossSpec, UnitSpec, in_flight, loss, make_plan, trained_as, unit
from tests.selection import some
from tests.verification import HERE, TOLERANCE, verify_in_process, verify_units

PP, DP, TP, K, SYNCS = (1, 2, 3), (1, 2, 3), (1, 2), (1, 2, 4), (1, 2, 3)
# Any two values of any two factors; the whole product is among the slow tests.
DEGREES = [
    (pp, dp, tp, k, syncs)
    for pp, dp, tp, k, syncs in itertools.product(PP, DP, TP, K, SYNCS)
    if (pp + dp + K.index(k) + syncs) % 3 == tp % 3
]
KINDS: tuple[Kind, ...] = ("batch-sync", "gpipe", "1f1b", "interleaved")

FACTORS: dict[str, tuple[Any, ...]] = {
    "pp": PP,
    "dp": DP,
    "tp": TP,
    "k": K,
    "syncs": SYNCS,
    "modalities": (2, 3),
    "feature": tuple(FEATURES),
    "others": ("rotated", "same", "single"),
    "kind": ("batch-sync", "gpipe", "1f1b"),
    "lead": (0, 1, 2),
    "sync_lead": (0, 1),
    "vpp": (1, 2),
    "backward": ("whole", "split", "even"),
    "per_node": (None, 2, 4),
}
PAIRWISE = [Case(**row) for row in pairwise_rows(FACTORS)]
QUICK = [Case(**row) for row in few_rows(FACTORS, "feature")]


def check(case: Case) -> None:
    """Run the case; fail with the worst differences."""
    built = FEATURES[case.feature](case)
    _check_verdict(verify_in_process(case.plan(), case.workload()), built.units, case.precision)


def _check_verdict(verdict: Verdict, units: list[UnitSpec], precision: str = "fp64") -> None:
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= TOLERANCE[precision]
    # Holding because next to nothing was compared would be no success.
    ranks = sum(u.dp * u.pp * u.tp for u in units if u.frozen is False)
    assert verdict.compared > ranks


@pytest.mark.slow
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_every_degree(degrees: tuple[int, ...]) -> None:
    pp, dp, tp, k, syncs = degrees
    check(Case(pp=pp, dp=dp, tp=tp, k=k, syncs=syncs))


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_every_feature_and_every_two_degrees(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", PAIRWISE, ids=str)
def test_every_two_features_and_degrees(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("feature", SOME_FEATURES)
def test_every_feature_from_three_replicas_to_two(feature: str) -> None:
    """Shares of 22, 21 and 21 samples meet shares of 32: every message is cut unevenly."""
    check(Case(feature=feature, pp=2, dp=3, k=2, syncs=2, modalities=3))


@pytest.mark.parametrize(
    "case", some([dataclasses.replace(c, precision="fp32") for c in QUICK[::9]], 0), ids=str
)
def test_single_precision(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("modalities", [2, 3])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("pp", "dp", "tp"), list(itertools.product(PP, DP, TP)))
def test_the_whole_product(pp: int, dp: int, tp: int, feature: str, modalities: int) -> None:
    for k, syncs in itertools.product(K, SYNCS):
        check(Case(pp=pp, dp=dp, tp=tp, k=k, syncs=syncs, feature=feature, modalities=modalities))


def test_pairwise_rows_hold_every_pair() -> None:
    rows = pairwise_rows(FACTORS)
    for a, b in itertools.combinations(FACTORS, 2):
        met = {(row[a], row[b]) for row in rows}
        assert met == set(itertools.product(FACTORS[a], FACTORS[b]))
    assert rows == pairwise_rows(FACTORS)
    assert len(rows) < 2 * 3 * len(FEATURES)


@pytest.mark.parametrize("cap", [2, pytest.param(3, marks=pytest.mark.slow), 4, 5])
@pytest.mark.parametrize("lead", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_cap_on_micro_batches_changes_no_gradient(cap: int, lead: int) -> None:
    units = [
        unit("v", "a", pp=3, k=2, lead=lead, in_flight=cap),
        unit("t", "b", dp=2, k=2, lead=lead, in_flight=cap),
    ]
    losses = [loss("contrastive", "v", "t", sync_batch=8)]
    _check_verdict(verify_units(units, losses, batch=24), units)
    program = compile_plan(make_plan(*units, losses=losses, batch=24))
    assert max(in_flight(program).values()) <= cap


def test_two_tasks_share_a_tower_that_one_of_them_freezes() -> None:
    units = [
        unit("v", "a", task="one", pp=2, k=2),
        unit("t", "b", task="one", dp=2, k=2),
        unit("v", "c", task="two", dp=2, k=3, blocks=2, frozen=((0, 1),)),
        unit("l", "v", "b", task="two", pp=2, dp=3),
    ]
    losses = [
        loss("contrastive", "v", "t", sync_batch=8, task="one"),
        loss("regression", "l", "target", task="two", weight=0.4),
    ]
    _check_verdict(verify_units(units, losses, batch=24, task_weights={"two": 0.3}), units)


def test_two_tasks_on_the_same_ranks() -> None:
    grid = [[[0], [1]], [[2], [3]]]
    units = [
        unit("v", "a", task="one", pp=2, dp=2, k=2, ranks=grid),
        unit("t", "b", task="one", pp=2, dp=2, k=4, ranks=grid),
        unit("v", "c", task="two", pp=2, dp=2, k=3, ranks=grid),
        unit("l", "v", "b", task="two", pp=2, dp=2, ranks=grid),
    ]
    losses = [
        loss("contrastive", "v", "t", sync_batch=12, task="one"),
        loss("counted", "l", "mask", task="two"),
    ]
    _check_verdict(verify_units(units, losses, batch=24), units)


def test_slices_of_a_module_with_degrees_of_their_own() -> None:
    """Waves plan a module as several units, each a slice of its blocks."""
    units = [
        unit("v", "a", name="v.0", dp=3, k=2, blocks=2, cuts=[(0, 2)], kind="wave"),
        unit("v", "a", name="v.1", pp=2, k=3, blocks=4, cuts=[(2, 3), (3, 4)], kind="wave"),
        unit("t", "b", dp=2, k=2, kind="wave"),
    ]
    losses = [loss("contrastive", "v", "t", sync_batch=12), loss("regression", "v", "target")]
    _check_verdict(verify_units(units, losses, batch=24), units)


def test_two_losses_whose_sync_batches_do_not_divide_each_other() -> None:
    """Sync batches of 8 and 12: one round is 24 samples, and micro-batches straddle both."""
    units = [unit("v", "a", pp=2, k=5, dp=2), unit("t", "b", dp=3, k=2), unit("u", "c", k=4)]
    losses = [
        loss("contrastive", "v", "t", sync_batch=8),
        loss("contrastive2", "t", "u", sync_batch=12, weight=0.2),
        loss("contrastive3", "u", "v", sync_batch=6),
    ]
    _check_verdict(verify_units(units, losses, batch=48), units)


def test_integers_travel_forward_only() -> None:
    units = [
        unit("v", "a", pp=2, dp=3, k=2, blocks=3),
        unit("t", "v", "b", pp=2, dp=2, k=2),
    ]
    losses = [loss("contrastive", "v.0", "v.1", "t", sync_batch=12)]
    factories = {
        "v": "with_ids",
        "t": "id_reader",
        "contrastive": "tests.matrix_models:WithIntegers",
    }
    _check_verdict(verify_units(units, losses, batch=24, factories=factories), units)


@pytest.mark.parametrize("name", ["contrastive", "clip"])
def test_a_cross_sample_loss_that_takes_a_data_field(name: str) -> None:
    """A field is no rank's: a loss with a sharded form is then computed whole."""
    units = [unit("v", "a", pp=2, dp=3, k=2), unit("t", "b", dp=2, tp=2)]
    losses = [loss(name, "v", "c", "t", sync_batch=12)]
    factories = {"clip": "mmplan.zoo.losses:clip"}
    _check_verdict(verify_units(units, losses, batch=24, factories=factories), units)


def test_a_per_sample_loss_of_two_modules() -> None:
    units = [unit("v", "a", pp=2, dp=3, k=2), unit("t", "b", dp=2, tp=2, k=3)]
    losses = [loss("mse", "v", "t"), loss("contrastive", "v", "t", sync_batch=12)]
    factories = {"mse": "mmplan.zoo.losses:mse"}
    _check_verdict(verify_units(units, losses, batch=24, factories=factories), units)


def test_a_module_and_its_sharer_on_the_same_ranks_in_another_order() -> None:
    units = [
        unit("v", "a", pp=2, blocks=3, ranks=[[[0], [1]]], k=2),
        unit("t", "b", dp=2, blocks=3, ranks=[[[1]], [[0]]], k=3, share="v"),
        unit("u", "c", blocks=3, ranks=[[[2]]], share="v", frozen=True),
    ]
    losses = [loss("contrastive", "v", "t", "u", sync_batch=12)]
    _check_verdict(verify_units(units, losses, batch=24), units)


@st.composite
def planned_units(draw: st.DrawFn) -> tuple[list[UnitSpec], list[LossSpec], int]:
    """Up to three modules with degrees, shares, sizes and ranks of any kind.

    Towers and chains; on ranks of their own, or all drawn from the same twelve; the later
    modules may run the first one's parameters.
    """
    sync = draw(st.sampled_from([None, 6, 12, 13]))
    batch = (sync or 12) * draw(st.integers(1, 3))
    names = ["v", "t", "u"][: draw(st.integers(1 if sync is None else 2, 3))]
    pooled, shared = draw(st.booleans()), draw(st.booleans())
    units: list[UnitSpec] = []
    for i, name in enumerate(names):
        pp, vpp = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2]))
        shares = draw(_shares(sync or batch, most=3 if not pooled or pp < 3 else 2))
        tp = 1 if shared else draw(st.integers(1, 2))
        feeds = [n for n in names[:i] if draw(st.booleans())]
        units.append(
            unit(
                name,
                *feeds,
                "abc"[i],
                pp=pp,
                dp=len(shares),
                tp=tp,
                vpp=vpp,
                blocks=6 if shared else pp * vpp,
                ranks=_grid(draw, len(shares), pp, tp) if pooled else None,
                sizes=[draw(_shares(share, most=4)) for share in shares],
                kind=draw(st.sampled_from(KINDS if vpp > 1 else KINDS[:3])),
                lead=draw(st.integers(0, 2)),
                sync_lead=draw(st.integers(0, 1)),
                frozen=draw(st.sampled_from([False, False, True, ((0, 1),)])) if i else False,
                share="v" if i and shared and draw(st.booleans()) else None,
            )
        )
    losses = [loss("contrastive", *names, sync_batch=sync)] if sync else []
    if not sync or draw(st.booleans()):
        losses.append(loss("regression", names[-1], "target", weight=0.5))
        losses.append(loss("counted", names[0], "mask"))
    return units, losses, batch


def _grid(draw: st.DrawFn, dp: int, pp: int, tp: int) -> list[list[list[int]]]:
    """``[dp][pp][tp]`` ranks out of twelve, each at most once."""
    order = draw(st.permutations(range(12)))
    return [
        [[order[(d * pp + p) * tp + t] for t in range(tp)] for p in range(pp)] for d in range(dp)
    ]


@st.composite
def _shares(draw: st.DrawFn, total: int, most: int) -> tuple[int, ...]:
    """One to ``most`` positive numbers that add up to ``total``."""
    parts = draw(st.integers(1, min(most, total)))
    if parts == 1:
        return (total,)
    cuts = draw(st.sets(st.integers(1, total - 1), min_size=parts - 1, max_size=parts - 1))
    return tuple(b - a for a, b in itertools.pairwise([0, *sorted(cuts), total]))


@settings(max_examples=3, deadline=None, derandomize=True)
@given(planned_units())
def test_any_plan_equals_one_process(planned: tuple[list[UnitSpec], list[LossSpec], int]) -> None:
    units, losses, batch = planned
    assert check_program(compile_plan(make_plan(*units, losses=losses, batch=batch))) == []
    verdict = verify_units(units, losses, batch=batch)
    assert not verdict.differences, verdict.differences[:5]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=1000, deadline=None)
@given(planned_units())
def test_a_thousand_plans_equal_one_process(
    planned: tuple[list[UnitSpec], list[LossSpec], int],
) -> None:
    units, losses, batch = planned
    assert not verify_units(units, losses, batch=batch).differences


TRAINED = {
    "towers": Case(pp=2, dp=3, k=2, syncs=2),
    "tensor-parallel": Case(pp=2, tp=2, k=4, feature="tied", modalities=3),
    "chain": Case(dp=3, k=2, feature="chain"),
    "sharded": Case(dp=2, k=2, feature="sharded"),
    "shared": Case(pp=3, k=2, feature="shared"),
    "ragged": Case(dp=2, k=2, feature="ragged"),
    "dropout": Case(pp=2, dp=2, k=2, feature="dropout"),
    "frozen": Case(pp=2, k=2, feature="frozen-range"),
}


@pytest.mark.parametrize("name", some(TRAINED, 7))
def test_three_steps_of_training_equal_one_process(name: str) -> None:
    case = TRAINED[name]
    workload = with_train(case.workload(), optimizer="AdamW", optimizer_args={"lr": 0.01})
    losses, weights = train_planned(case.plan(), workload, steps=3)
    expected_losses, expected = train_alone(case.plan(), workload, steps=3)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    assert len(set(losses)) == 3
    assert weights.keys() == expected.keys()
    for parameter, value in expected.items():
        torch.testing.assert_close(weights[parameter], value, rtol=1e-11, atol=1e-12)


def with_train(workload: Workload, **train: Any) -> Workload:
    """The workload with other training settings."""
    changed = workload.train.model_copy(update=train)
    return workload.model_copy(update={"train": changed})


def train_planned(
    plan: Plan, workload: Workload, *, steps: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and all weights after some steps of the plan."""

    def entry(transport: Any) -> tuple[list[float], dict[str, Tensor]]:
        session = Session(
            plan=trained_as(plan, workload), workload=workload, folder=HERE, transport=transport
        )
        losses = [result.loss for result in session.steps(steps)]
        return losses, session.evaluate(_weights_of)

    found = InProcessWorld(plan.devices).run(entry)
    assert all(losses == found[0][0] for losses, _ in found)
    return found[0]


def _weights_of(modules: dict[str, torch.nn.Module]) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": parameter.detach().clone()
        for name, module in modules.items()
        for key, parameter in module.named_parameters()
    }


def train_alone(
    plan: Plan, workload: Workload, *, steps: int
) -> tuple[list[float], dict[str, Tensor]]:
    """The same in one process."""
    reference = Reference(workload=workload, folder=Path(HERE), program=compile_plan(plan))
    trained = [(n, p) for n, p in reference.named_parameters().items() if p.requires_grad]
    optimizer = build_optimizer(workload.train, trained, sharded=False)
    assert optimizer is not None
    losses: list[float] = []
    for step in range(steps):
        losses.append(reference.step(step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    modules = {**reference.modules, **{f"losses.{n}": m for n, m in reference.losses.items()}}
    for stage in compile_plan(plan).stages:
        modules[stage.module] = reference.modules[stage.owner]
    return losses, _weights_of(modules)
