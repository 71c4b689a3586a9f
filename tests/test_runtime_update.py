"""Clipping, schedules and parameter groups: three steps equal plain torch in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.session.optimizer import build_optimizer, rate_factor
from mmlaunch.session.session import Session
from mmplan.errors import InvalidInputError
from mmplan.program.compile import compile_plan
from mmplan.schema.base import parse_document
from mmplan.schema.workload import TrainSpec, Workload
from tests.matrix_cases import Case
from tests.programs import loss, make_plan, trained_as, unit
from tests.selection import some
from tests.training import Trained, train_alone, train_planned, worst_difference
from tests.verification import HERE, make_workload

CLIP = 0.5
TRAIN: dict[str, Any] = {
    "optimizer": "AdamW",
    "optimizer_args": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4},
    "clip_grad_norm": CLIP,
    "schedule": {"kind": "cosine", "warmup_steps": 2, "total_steps": 5, "final_ratio": 0.1},
    "groups": [
        {"match": "*.bias", "optimizer_args": {"weight_decay": 0.0}},
        {"match": "t.*", "optimizer_args": {"lr": 0.003}},
    ],
}


def _with(workload: Workload, recompute: bool = False, **train: Any) -> Workload:
    spec = TrainSpec.model_validate({**workload.train.model_dump(), **TRAIN, **train})
    modules = {
        name: module.model_copy(update={"recompute": "full" if recompute else "none"})
        for name, module in workload.modules.items()
    }
    return workload.model_copy(update={"train": spec, "modules": modules})


def _by_hand(parameters: dict[str, nn.Parameter]) -> Callable[[int], float | None]:
    """The above in torch's own words; shares no code with the runtime."""
    biases = [p for n, p in parameters.items() if fnmatchcase(n, "*.bias")]
    texts = [p for n, p in parameters.items() if n.startswith("t.") and not n.endswith(".bias")]
    rest = [p for n, p in parameters.items() if not n.startswith("t.") and not n.endswith(".bias")]
    groups: list[dict[str, Any]] = [
        {"params": biases, "weight_decay": 0.0},
        {"params": texts, "lr": 0.003},
        {"params": rest},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=0.01, weight_decay=0.1, eps=1e-4
    )
    # Warmup of two, then a cosine from 1 to 0.1 that ends at step 5.
    factors = [0.5, 1.0] + [0.1 + 0.9 * (1 + math.cos(math.pi * k / 3)) / 2 for k in range(9)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[step])

    def update(_: int) -> float | None:
        norm = nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        optimizer.step()
        schedule.step()
        return norm.item()

    return update


def _assert_alike(planned: Trained, alone: Trained) -> None:
    assert planned.losses == pytest.approx(alone.losses, rel=1e-12)
    assert planned.norms == pytest.approx(alone.norms, rel=1e-11)
    assert worst_difference(planned.weights, alone.weights) < 1e-12


# Of each pair of options some case has both values; of each option those of `make test` have.
CASES = [
    (Case(samples=12, k=2, dp=1, tp=1, pp=2), 0, False),
    (Case(samples=12, k=2, dp=2, tp=1, feature="regression"), 1, True),
    (Case(samples=12, k=2, dp=3, tp=1, feature="frozen-range"), 1, False),
    (Case(samples=12, k=2, dp=1, tp=2, feature="frozen-tower"), 1, True),
    (Case(samples=12, k=2, dp=2, tp=2, feature="dropout"), 0, True),
    (Case(samples=12, k=2, dp=3, tp=2, feature="regression"), 1, False),
    (Case(samples=12, k=2, dp=3, tp=1, feature="tied"), 0, True),
    (Case(samples=12, k=2, dp=2, tp=1, pp=2, feature="tied"), 1, False),
    (Case(samples=12, k=2, dp=2, tp=2, feature="shared"), 1, True),
    (Case(samples=12, k=2, dp=2, tp=1, feature="chain", kind="1f1b"), 1, False),
]


@pytest.mark.parametrize(("case", "zero", "recompute"), some(CASES, 0, 3, 6), ids=str)
def test_three_steps_equal_torch_in_one_process(case: Case, zero: int, recompute: bool) -> None:
    workload = case.workload()
    frozen = {name for name, module in workload.modules.items() if module.frozen is True}
    groups = TRAIN["groups"][:1] if {"t"} <= frozen else TRAIN["groups"]
    if case.feature == "shared":  # the parameters of t are those of v
        groups = TRAIN["groups"][:1]
    workload = _with(workload, recompute, zero=zero, groups=groups)
    planned = train_planned(case.plan(), workload, 3)
    alone = train_alone(case.plan(), workload, 3, _by_hand)
    assert max(norm or 0.0 for norm in alone.norms) > CLIP, "nothing was clipped"
    _assert_alike(planned, alone)


PROJECTORS = [
    # The encoder frozen but for its last block, which projects; the model whole, or frozen.
    ({"v": ((0, 2),)}, ("t", "v.2")),
    ({"v": ((0, 2),), "t": True}, ("v.2",)),
    ({"v": True, "t": ((1, 3),)}, ("t.0",)),
    ({}, ("t", "v")),
]


@pytest.mark.parametrize(("frozen", "trained"), PROJECTORS, ids=str)
@pytest.mark.parametrize(
    ("dp", "tp", "zero"), [(2, 1, 1), pytest.param(3, 2, 0, marks=pytest.mark.slow)]
)
def test_frozen_blocks_stay_and_projectors_train(
    frozen: dict[str, Any], trained: tuple[str, ...], dp: int, tp: int, zero: int
) -> None:
    units = [
        unit(
            "v", "a", blocks=3, pp=3, dp=dp, tp=1, k=2, kind="1f1b", frozen=frozen.get("v", False)
        ),
        unit("t", "v", blocks=3, dp=1, tp=tp, k=2, kind="1f1b", frozen=frozen.get("t", False)),
    ]
    losses = [loss("counted", "t", "mask")]
    plan = make_plan(*units, losses=losses, batch=12)
    workload = _with(make_workload(units, losses, batch=12), recompute=True, zero=zero, groups=[])
    began = train_planned(plan, workload, 0)
    planned = train_planned(plan, workload, 3)
    alone = train_alone(plan, workload, 3, _by_hand_without_groups)
    _assert_alike(planned, alone)
    moved = {
        name
        for name, value in planned.weights.items()
        if not torch.equal(value, began.weights[name])
    }
    assert {name for name in moved if not any(name.startswith(f"{t}.") for t in trained)} == set()
    assert all(any(name.startswith(f"{t}.") for name in moved) for t in trained)
    # Nothing runs backward before the first block that trains.
    stages = compile_plan(plan).stages
    first = min(i for i, s in enumerate(stages) if s.trainable)
    assert [s.has_backward for s in stages] == [i >= first for i in range(len(stages))]


def _by_hand_without_groups(parameters: dict[str, nn.Parameter]) -> Callable[[int], float | None]:
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.01, weight_decay=0.1, eps=1e-4)
    factors = [0.5, 1.0, 1.0]

    def update(step: int) -> float | None:
        norm = nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * factors[step]
        optimizer.step()
        return norm.item()

    return update


@pytest.mark.parametrize("how", some([{}, {"fused": True}], 1))
def test_the_schedule_goes_on_where_a_checkpoint_was_saved(
    how: dict[str, bool], tmp_path: Path
) -> None:
    case = Case(samples=12, k=2, dp=2)
    arguments = {**TRAIN["optimizer_args"], **how}
    workload = _with(case.workload(), zero=1, optimizer_args=arguments)
    unbroken = train_planned(case.plan(), workload, 4)
    paths: list[Path] = []
    train_planned(case.plan(), workload, 2, after=lambda s: paths.append(s.save(tmp_path)))
    resumed = train_planned(case.plan(), workload, 4, before=lambda s: s.load(paths[0]))
    assert resumed.losses == unbroken.losses[2:]
    assert resumed.norms == unbroken.norms[2:]
    assert worst_difference(resumed.weights, unbroken.weights) == 0.0


@pytest.mark.parametrize(
    ("device", "how", "gaps", "expected"),
    [
        ("cuda", {}, False, (True, None)),
        ("cuda", {"fused": False}, False, (False, None)),
        ("cuda", {"foreach": True}, False, (None, True)),
        ("cuda", {}, True, (None, None)),
        ("cpu", {}, False, (None, None)),
    ],
)
def test_adam_is_fused_on_cuda_where_nothing_speaks_against_it(
    device: str, how: dict[str, bool], gaps: bool, expected: tuple[bool | None, bool | None]
) -> None:
    train = TrainSpec(optimizer="AdamW", optimizer_args={"lr": 0.1, **how})
    with FakeTensorMode():
        strides = (4, 1) if gaps else (2, 1)
        parameter = nn.Parameter(torch.empty_strided((2, 2), strides, device=device))
        optimizer = build_optimizer(train, [("a", parameter)], sharded=False)
    assert optimizer is not None
    (group,) = optimizer.param_groups
    assert (group["fused"], group["foreach"]) == expected


def test_small_gradients_are_left_alone_and_their_norm_is_told() -> None:
    case = Case(samples=12, k=2, dp=2)
    free = train_planned(case.plan(), _with(case.workload(), clip_grad_norm=None), 2)
    wide = train_planned(case.plan(), _with(case.workload(), clip_grad_norm=1e6), 2)
    assert free.norms == [None, None]
    assert all(norm is not None and norm > 0 for norm in wide.norms)
    assert worst_difference(free.weights, wide.weights) == 0.0


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"kind": "linear", "total_steps": 4}, [1, 0.75, 0.5, 0.25, 0, 0]),
        ({"kind": "linear", "final_ratio": 0.5}, [1, 0.9, 0.8, 0.7, 0.6, 0.5]),
        ({"kind": "cosine", "total_steps": 4}, [1, 0.85355339, 0.5, 0.14644661, 0, 0]),
        ({"kind": "linear", "warmup_steps": 2, "total_steps": 2}, [0.5, 1, 0, 0, 0, 0]),
    ],
)
def test_the_factor_of_each_step(schedule: dict[str, Any], expected: list[float]) -> None:
    train = TrainSpec.model_validate({"schedule": schedule, "steps": 5})
    assert [rate_factor(train, step) for step in range(6)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"clip_grad_norm": 0.0}, "clip_grad_norm"),
        ({"clip_grad_norm": "1"}, "clip_grad_norm"),
        ({"schedule": {"kind": "exponential"}}, "schedule.kind"),
        ({"schedule": {"warmup_steps": -1}}, "warmup_steps"),
        ({"schedule": {"warmup_steps": 9, "total_steps": 3}}, "less than the 9 of warmup_steps"),
        ({"schedule": {"final_ratio": -0.1}}, "final_ratio"),
        ({"groups": [{"match": "*"}]}, "optimizer_args"),
        ({"groups": [{"match": "", "optimizer_args": {"lr": 1.0}}]}, "match"),
        ({"groups": [{"match": "*", "lr": 1.0, "optimizer_args": {"lr": 1.0}}]}, "lr"),
    ],
)
def test_wrong_fields_are_named(train: dict[str, Any], says: str) -> None:
    data = Case().workload().model_dump()
    data["train"] |= train
    with pytest.raises(InvalidInputError, match=says):
        parse_document(Workload, data, source="workload.yaml")


@pytest.mark.parametrize(
    ("group", "says"),
    [
        ({"match": "*.wieght", "optimizer_args": {"lr": 0.1}}, r"groups\[0\].match: '\*.wieght'"),
        ({"match": "*", "optimizer_args": {"wieght_decay": 0.1}}, r"groups\[0\].*wieght_decay"),
        ({"match": "*", "optimizer_args": {"lr": -1.0}}, r"groups\[0\].*learning rate"),
    ],
)
def test_wrong_groups_are_named(group: dict[str, Any], says: str) -> None:
    case = Case(samples=12, dp=2)
    workload = _with(case.workload(), groups=[group])
    with pytest.raises(InvalidInputError, match=says):
        InProcessWorld(case.plan().devices).run(
            lambda transport: Session(
                plan=trained_as(case.plan(), workload),
                workload=workload,
                folder=HERE,
                transport=transport,
            )
        )
