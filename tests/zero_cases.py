"""Plans of the runtime's matrix under a stage of ZeRO."""

from __future__ import annotations

from typing import Any

from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.matrix_cases import Case, small_case
from tests.programs import trained_as

ADAMW = {"optimizer": "AdamW", "optimizer_args": {"lr": 0.01, "weight_decay": 0.1}}
PIPELINE = small_case(dp=2, pp=2, k=4, others="same", feature="chain", kind="1f1b")
CONTRASTIVE = small_case(dp=3, k=2, others="same", feature="colocated")
TENSOR = small_case(dp=2, tp=2, k=2, others="same", feature="regression")
# Small enough that sums and gathers of these models take many buckets.
BUCKET_BYTES = 200


def under_zero(case: Case, zero: int, **train: Any) -> tuple[Plan, Workload]:
    """The case's plan and workload, with fields of ``train``."""
    workload = case.workload()
    fields = {**ADAMW, "zero": zero, **train}
    workload = workload.model_copy(update={"train": workload.train.model_copy(update=fields)})
    return trained_as(case.plan(), workload), workload
