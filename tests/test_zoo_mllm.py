"""Encoder, decoder and generator as one pipeline against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmplan.schema.factories import build_dataset
from tests import mllm
from tests.selection import some
from tests.verification import HERE, TOLERANCE, verify_in_process

BATCH = 12
PLANS: dict[str, dict[str, dict[str, Any]]] = {
    "one rank": {
        "vision": {"k": 2},
        "llm": {"k": 4, "ranks": [[[0]]]},
        "generator": {"k": 3, "ranks": [[[0]]]},
    },
    "encoder dp 2, llm pp 2 x tp 2": {
        "vision": {"dp": 2, "k": 3},
        "llm": {"pp": 2, "tp": 2, "k": 4},
        "generator": {"pp": 2, "k": 2},
    },
    "dp 3 into dp 2 into dp 3": {
        "vision": {"dp": 3, "k": 2},
        "llm": {"dp": 2, "k": 6},
        "generator": {"dp": 3, "k": 2},
    },
    "tp of encoder and generator, chunks of the llm": {
        "vision": {"pp": 2, "tp": 2, "k": 12},
        "llm": {"pp": 2, "vpp": 2, "k": 6, "kind": "interleaved"},
        "generator": {"tp": 2, "k": 12},
    },
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", some(PLANS, 0, 3))
def test_gradients_equal_one_process(name: str) -> None:
    _verify(PLANS[name])


@pytest.mark.parametrize(
    "frozen",
    some(
        [
            {"vision": [[0, 2]]},
            {"vision": [[0, 2]], "llm": True},
            {"vision": True, "generator": True},
            {"llm": True, "generator": True},
        ],
        1,
    ),
    ids=str,
)
def test_frozen_parts_under_a_projector_that_trains(frozen: dict[str, Any]) -> None:
    plan = {name: dict(part) for name, part in PLANS["encoder dp 2, llm pp 2 x tp 2"].items()}
    for name, value in frozen.items():
        plan[name]["frozen"] = value if value is True else tuple(map(tuple, value))
    _verify(plan, **frozen)


def test_batches_hold_samples_and_micro_batches_without_images() -> None:
    """What the verified batch is: otherwise the tests above would prove less than they say."""
    workload = mllm.workload(batch=BATCH)
    assert workload.data is not None
    data = build_dataset(workload.data, HERE, seed=workload.train.seed)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(5))[:BATCH]
    images = [len(data[i]["images"].values) for i in order.tolist()]
    targets = [len(data[i]["targets"].values) for i in order.tolist()]
    assert 0 in images
    assert 0 in targets
    assert max(images) > 1
    assert sum(targets) < sum(images)


def _verify(plan: dict[str, dict[str, Any]], **frozen: Any) -> None:
    verdict = verify_in_process(
        mllm.plan(batch=BATCH, **plan), mllm.workload(batch=BATCH, **frozen)
    )
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= TOLERANCE["fp64"]
    assert verdict.compared > 40
    assert verdict.loss > 0
