"""Plans of the runtime's matrix under a stage of ZeRO."""

from __future__ import annotations

from typing import Any, cast

import torch

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.execute.gradient_buckets import FlatShards
from mmlaunch.session.session import Session
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.matrix_cases import Case, small_case
from tests.programs import trained_as
from tests.verification import HERE

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


def held_bytes(plan: Plan, workload: Workload) -> tuple[list[int], list[int]]:
    """Of each rank, what it holds between two steps, and when gathered blocks are let go.

    It counts parameters, gradients, the optimizer's values and its state.
    """
    most = [0] * plan.devices
    release = FlatShards.release

    def held(session: Session) -> int:
        parameters = [p for _, p in session.model.named_parameters()]
        slices = [item.tensor for item in session.update.slices]
        state = [] if session.optimizer is None else session.optimizer.state.values()
        tensors = [
            *parameters,
            *slices,
            *(x.grad for x in (*parameters, *slices) if x.grad is not None),
            *(x for own in state for x in own.values() if torch.is_tensor(x) and x.dim()),
        ]
        storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
        return sum(storages.values())

    def entry(transport: Any) -> int:
        session = Session(plan=plan, workload=workload, folder=HERE, transport=transport)
        session.step()

        def noted(self: FlatShards) -> None:
            most[transport.rank] = max(most[transport.rank], held(session))
            release(self)

        for item in cast("Any", session)._reductions._all_sums:
            if isinstance(item, FlatShards):
                item.release = noted.__get__(item)
        session.step()
        return held(session)

    return InProcessWorld(plan.devices).run(entry), most
