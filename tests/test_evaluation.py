"""Evaluation while training: values of one process, and nothing of training changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmlaunch.comm.strict import StrictWorld
from mmlaunch.data.loader import step_indices
from mmlaunch.session.early_stop import EarlyStop
from mmlaunch.session.session import Session
from mmplan.errors import InvalidInputError
from mmplan.program.compile import compile_plan
from mmplan.program.evaluation import evaluation_program, forward_only
from mmplan.program.instructions import Compute, Op
from mmplan.schema.base import parse_document
from mmplan.schema.evaluation import EarlyStopSpec
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload, evaluated_values
from mmplan.zoo import metrics
from tests.matrix_models import Samples
from tests.programs import trained_as
from tests.selection import some
from tests.test_session import BATCH, FACTORIES, LOSSES, PLANS, plan_of, run_ranks, weights_of
from tests.verification import HERE, make_workload

SAMPLES = 3 * BATCH
METRICS = {
    "apart": {"factory": "mmplan.zoo.losses:mse", "inputs": ["u", "t"]},
    "together": {
        "factory": "mmplan.zoo.metrics:retrieval",
        "inputs": ["u", "t"],
        "cross_sample": True,
        "sync_batch": 8,
    },
    "tokens": {"factory": "tests.matrix_models:Counted", "inputs": ["t", "mask"]},
}
EVAL = {
    "data": {"factory": "tests.matrix_models:Samples", "args": {"length": SAMPLES + 5}},
    "every": 1,
    "metrics": METRICS,
}


def workload_with(**train: Any) -> Workload:
    """Modules of ``v`` drop some of their activations, which evaluation must not."""
    return make_workload(
        PLANS["one rank"],
        LOSSES,
        batch=BATCH,
        factories=FACTORIES,
        args={"v": {"dropout": 0.5}},
        train={"optimizer_args": {"lr": 0.01}, **train},
    )


def by_hand(workload: Workload, modules: dict[str, nn.Module]) -> dict[str, float]:
    """The same values with plain torch, batch by batch, by whole modules."""
    data = Samples(SAMPLES + 5)
    found: dict[str, list[float]] = {}
    for batch in range(3):
        rows = step_indices(data, BATCH, workload.train.seed, batch)
        field = {name: torch.stack([data[i][name] for i in rows]) for name in "abc"}
        target, mask = (torch.stack([data[i][name] for i in rows]) for name in ("target", "mask"))
        v, t, u = (modules[m](field[f]) for m, f in zip("vtu", "abc", strict=True))
        contrastive = modules["losses.contrastive"]
        parts = [contrastive(*(x[k : k + 12] for x in (v, t, u))) for k in (0, 12)]
        pairs = [metrics.retrieval()(u[k : k + 8], t[k : k + 8]) for k in (0, 8, 16)]
        regression = modules["losses.regression"]
        for name, value in {
            "contrastive": torch.stack(parts).mean(),
            "regression": regression(v, target),
            "apart": (u - t).square().mean(),
            "together": torch.stack(pairs).mean(),
            "tokens": (t.square() * mask).sum() / mask.sum(),
        }.items():
            found.setdefault(name, []).append(value.item())
    means = {name: sum(values) / 3 for name, values in found.items()}
    return {"loss": means["contrastive"] + 0.5 * means["regression"], **means}


@pytest.mark.parametrize("name", some(PLANS, 1, 3))
def test_values_are_those_of_one_process(name: str) -> None:
    workload = workload_with(eval=EVAL)

    def body(session: Session) -> tuple[dict[str, float], dict[str, float]]:
        list(session.steps(2))
        values = session.run_evaluation()
        return values, session.evaluate(lambda modules: by_hand(workload, modules))

    for values, expected in run_ranks(plan_of(name), workload, body):
        assert list(values) == evaluated_values(workload)
        assert values == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", some(["pipeline and replicas", "tensor parallel"], 1))
def test_weights_are_the_same_bit_for_bit_without_evaluation(name: str) -> None:
    def body(session: Session, *, evaluates: bool) -> dict[str, Tensor]:
        for _ in session.steps(3):
            if evaluates:
                session.run_evaluation()
        return session.evaluate(weights_of)

    def weights(workload: Workload, evaluates: bool) -> dict[str, Tensor]:
        plan = plan_of(name)
        return run_ranks(plan, workload, lambda s: body(s, evaluates=evaluates))[0]

    alone = weights(workload_with(), False)
    evaluated = weights(workload_with(eval=EVAL), True)
    assert alone.keys() == evaluated.keys()
    assert all(torch.equal(alone[key], evaluated[key]) for key in alone)


@pytest.mark.parametrize(
    "name", [n if n.startswith("pipe") else pytest.param(n, marks=pytest.mark.slow) for n in PLANS]
)
def test_ranks_never_wait_for_ever_under_the_rules_of_nccl(name: str) -> None:
    plan, workload = plan_of(name), workload_with(eval=EVAL)

    def entry(transport: Any) -> dict[str, float]:
        with Session(
            plan=trained_as(plan, workload), workload=workload, folder=HERE, transport=transport
        ) as session:
            session.step()
            first = session.run_evaluation()
            session.step()
            session.run_evaluation()
            return first

    found = StrictWorld(plan.devices, seed=1).run(entry)
    assert all(values == found[0] for values in found)


@pytest.mark.parametrize("name", list(PLANS))
def test_the_program_has_every_forward_once_and_nothing_backward(name: str) -> None:
    plan = plan_of(name)
    program = evaluation_program(plan, {})
    training = compile_plan(plan)
    assert program.instructions == forward_only(training).instructions
    for row, trained in zip(program.instructions, training.instructions, strict=True):
        forwards = [i for i in row if isinstance(i, Compute)]
        assert forwards == [i for i in trained if isinstance(i, Compute) and i.op is Op.FORWARD]
        assert not {i.op for i in row} & {Op.SEND_B, Op.RECV_B, Op.REDUCE, Op.REDUCE_START}
    assert (program.reductions, program.updates) == ((), ())


@pytest.mark.parametrize(
    ("values", "mode", "patience", "over_after"),
    [
        ([3.0, 2.0, 2.5, 2.4], "min", 2, 4),
        ([3.0, 2.95], "min", 1, 2),
        ([0.1, 0.5, 0.3, 0.7, 0.2, float("nan"), 0.2], "max", 3, 7),
        ([float("nan"), 1.0, 0.5], "min", 2, None),
    ],
)
def test_a_run_ends_after_so_many_evaluations_that_are_not_better(
    values: list[float], mode: Any, patience: int, over_after: int | None
) -> None:
    spec = EarlyStopSpec(mode=mode, patience=patience, min_delta=0.1)
    stop = EarlyStop(spec)
    for count, value in enumerate(values, 1):
        again = EarlyStop(spec)
        again.load(stop.state())
        for each in (stop, again):
            each.add(count, {"loss": value})
        assert again.state() == stop.state()
        assert stop.is_over == (count == over_after)
    best = values.index((min if mode == "min" else max)(v for v in values if v == v))
    if over_after is not None and mode == "max":
        assert f"at best, after step {best + 1})" in stop.reason()


def changed(**train: Any) -> Callable[[], Workload]:
    def build() -> Workload:
        document = workload_with().model_dump(mode="json", exclude_unset=True)
        document["train"] |= train
        return parse_document(Workload, document, source="workload.yaml")

    return build


DATA = {"data": EVAL["data"]}


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"early_stop": {}}, "train.early_stop needs train.eval"),
        ({"eval": {}}, "train.eval: data are missing"),
        ({"eval": {**DATA, "every": 0}}, "train.eval.every"),
        ({"eval": DATA, "early_stop": {"metric": "contrastiv"}}, "did you mean contrastive?"),
        ({"eval": {**DATA, "metrics": {"loss": METRICS["apart"]}}}, "rename the metric"),
        (
            {"eval": {**DATA, "metrics": {"m": {**METRICS["apart"], "inputs": ["a"]}}}},
            "names no module",
        ),
        (
            {"eval": {**DATA, "metrics": {"m": {**METRICS["together"], "sync_batch": 7}}}},
            "7 does not divide the batch of 24",
        ),
        ({"eval": {**DATA, "data_by_task": {"x": EVAL["data"]}}}, "there is no task 'x'"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(train: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=r"workload\.yaml") as refused:
        changed(**train)()
    assert said in str(refused.value) + str(refused.value.hint)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"data": {"factory": "tests.matrix_models:Samples", "args": {"length": 5}}}, "5 samples"),
        ({"data": {"factory": "tests.matrix_models:Sample"}}, "train.eval.data.factory"),
        (
            {**DATA, "metrics": {"m": {"factory": "os:getcwd", "inputs": ["u"]}}},
            "train.eval.metrics.m.factory",
        ),
    ],
)
def test_factories_that_do_not_fit_are_named(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        run_ranks(plan_of("one rank"), workload_with(eval=spec), lambda _: None)


def test_plans_do_not_depend_on_evaluation() -> None:
    plan: Plan = trained_as(plan_of("one rank"), workload_with())
    assert plan == trained_as(plan_of("one rank"), workload_with(eval=EVAL))
