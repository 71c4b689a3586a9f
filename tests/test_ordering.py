"""Batches put in order by their samples' work: the steps stay what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.data.loader import StepLoader, step_indices
from mmlaunch.data.task_data import StepOrder, step_order
from mmlaunch.session.session import Session
from mmplan.errors import InvalidInputError, RunFailedError
from mmplan.program.compile import compile_plan
from mmplan.reordering.batch_order import BatchOrder
from mmplan.schema.plan import Plan, Prediction
from mmplan.schema.workload import DataSpec, Workload
from tests.matrix_models import Samples
from tests.programs import loss, make_plan, trained_as, unit
from tests.verification import make_workload, verify_in_process

HERE = Path(__file__).parent
BATCH = 12


class Told(Samples):
    """Tells its samples' work; the encoder's follows from the rows of the sample."""

    def work(self, index: int) -> dict[str, Any]:
        return {"encoder": float(len(self.rows[index])), "llm": 1.0 + index % 7}


class Indices(Told):
    """Samples that say which they are."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": torch.tensor(index)}


class Wrong(Samples):
    """Tells nonsense."""

    def __init__(self, length: int, answer: Any = None) -> None:
        super().__init__(length)
        self.answer = answer

    def work(self, index: int) -> Any:
        if self.answer is None:
            raise OSError("no such table")
        return self.answer


def chain(sync: bool = False) -> tuple[Plan, Workload]:
    """Encoder before LLM with dp 3 and 2, a per-sample and a counted loss."""
    units = [
        unit("encoder", "a", dp=3, k=2, blocks=2, kind="1f1b"),
        unit("llm", "encoder", dp=2, pp=2, k=6, blocks=2, kind="1f1b"),
    ]
    losses = [loss("regression", "llm", "target"), loss("counted", "llm", "mask", weight=0.5)]
    if sync:
        units = [
            unit("encoder", "a", dp=2, k=1, blocks=2),
            unit("llm", "b", dp=1, pp=2, k=4, blocks=2),
        ]
        losses = [loss("contrastive", "encoder", "llm", sync_batch=4)]
    workload = make_workload(units, losses, batch=BATCH)
    # Of a step so short that little is searched: the test runs many of them.
    predicted = Prediction(iteration_s=0.02, samples_per_s=0)
    plan = make_plan(*units, losses=losses, batch=BATCH)
    return plan.model_copy(update={"predicted": predicted}), with_data(workload, "Told")


def with_data(workload: Workload, name: str, reorder: bool = True, **args: Any) -> Workload:
    data = DataSpec(factory=f"tests.test_ordering:{name}", args={"length": 2 * BATCH, **args})
    train = workload.train.model_copy(update={"reorder": reorder})
    return workload.model_copy(update={"data": data, "train": train})


def losses_of(plan: Plan, workload: Workload, steps: int) -> list[float]:
    def entry(transport: Any) -> list[float]:
        with Session(
            plan=trained_as(plan, workload), workload=workload, folder=HERE, transport=transport
        ) as session:
            return [result.loss for result in session.steps(steps)]

    return InProcessWorld(plan.devices).run(entry)[0]


@pytest.mark.parametrize("sync", [pytest.param(False, marks=pytest.mark.slow), True])
def test_twenty_steps_have_the_same_losses_in_any_order(sync: bool) -> None:
    plan, workload = chain(sync)
    reordered = losses_of(plan, workload, 20)
    given = losses_of(plan, with_data(workload, "Told", reorder=False), 20)
    assert reordered == pytest.approx(given, rel=1e-9)
    # Rounding differs, since the batches do stand in another order.
    assert reordered != given


@pytest.mark.parametrize("sync", [False, True])
def test_one_process_takes_the_same_order(sync: bool) -> None:
    verdict = verify_in_process(*chain(sync))
    assert not verdict.differences, verdict


def loaded(order: StepOrder | None, workers: int, ranges: list[tuple[int, int]]) -> list[list[int]]:
    loader = StepLoader(
        Indices(2 * BATCH),
        batch=BATCH,
        seed=3,
        ranges=ranges,
        fields={"index"},
        order=order,
        num_workers=workers,
    )
    try:
        indices = [next(loader).fields["index"] for _ in range(4)]
        return [index.tolist() for index in indices if isinstance(index, torch.Tensor)]
    finally:
        loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_keeps_its_samples_and_every_rank_sees_one_order(workers: int) -> None:
    plan, workload = chain()
    order = step_order(compile_plan(plan), "default", Indices(2 * BATCH), workload)
    assert order is not None
    whole = loaded(order, workers, [(0, BATCH)])
    again = step_order(compile_plan(plan), "default", Indices(2 * BATCH), workload)
    part = loaded(again, workers, [(3, 7)])
    for step, indices in enumerate(whole):
        drawn = step_indices(range(2 * BATCH), BATCH, 3, step)
        assert sorted(indices) == sorted(drawn)
        assert indices != drawn
        assert part[step] == indices[3:7]


def test_the_order_follows_the_work() -> None:
    """Two samples of four are everything: one for each replica of the LLM."""
    plan = make_plan(
        unit("llm", "a", dp=2, k=2, kind="1f1b"), losses=[loss("regression", "llm")], batch=4
    )
    program = compile_plan(plan)
    spans = program.stages[0].microbatches
    costs = [9.0, 1.0, 9.0, 1.0]
    data = type("Costs", (), {"work": staticmethod(lambda index: {"llm": costs[index]})})()
    order = StepOrder(BatchOrder(program, "default"), data, ["llm"], -1)
    for given in ([0, 2, 1, 3], [0, 1, 2, 3], [3, 1, 2, 0]):
        got = order(given, 0)
        for row in spans:
            assert sum(costs[got[start]] for start, _ in row) == 10


def test_data_without_work_and_plans_that_say_no_are_left_alone() -> None:
    plan, workload = chain()
    program = compile_plan(plan)
    assert step_order(program, "default", Samples(24), workload) is None
    off = with_data(workload, "Told", reorder=False)
    assert step_order(program, "default", Told(24), off) is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], r"work\(\d+\) is a list, not a dict"),
        ({"lm": 1.0}, r"work\(\d+\) names 'lm', which is not a module"),
        ({"llm": -1.0}, r"work\(\d+\) gives llm -1.0, not a finite number"),
        ({"llm": float("nan")}, r"gives llm nan, not a finite number"),
        ({"llm": "much"}, r"gives llm 'much', not a finite number"),
    ],
)
def test_work_that_is_none_is_refused(answer: Any, message: str) -> None:
    plan, workload = chain()
    with pytest.raises(InvalidInputError, match=message):
        losses_of(plan, with_data(workload, "Wrong", answer=answer), 1)


def test_work_that_raises_is_one_clear_error() -> None:
    plan, workload = chain()
    with pytest.raises(RunFailedError, match=r"work\(\d+\) raised OSError: no such table"):
        losses_of(plan, with_data(workload, "Wrong"), 1)
