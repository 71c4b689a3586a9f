"""How often the host waits for its device in a step: never while it computes, then for a few."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmlaunch.comm.inprocess import InProcessTransport, InProcessWorld
from mmlaunch.session.session import Session
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.matrix_cases import Case
from tests.missing_cases import MissingCase
from tests.programs import trained_as
from tests.verification import HERE

MOST = 4
_aten = torch.ops.aten
READING = {
    _aten._local_scalar_dense.default,  # item, and a tensor as a number or truth value
    _aten.equal.default,
    _aten.masked_select.default,
    _aten.nonzero.default,
    _aten.repeat_interleave.Tensor,
}
# What reads tensors of the host: data before they move, and what comes beside messages.
ON_HOST = {
    ("task_data.py", "step"),
    ("loader.py", "get"),
    ("reductions.py", "count"),
    ("batches.py", "to_device"),
    ("messages.py", "_shapes"),
    ("messages.py", "wait"),
    ("messages.py", "message_lengths"),
}
_here = threading.local()


class _Reads(TorchDispatchMode):
    """The runtime's reads of tensors on this thread: the functions in which they are."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func is _aten.index.Tensor and any(
            isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1]
        )
        if func in READING or masked:
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        """A tensor is read."""
        frames = traceback.extract_stack()
        places = [(Path(frame.filename), frame.name) for frame in frames]
        ours = [(path.name, name) for path, name in places if "mmlaunch" in path.parts]
        # A block of this test's model may read what it likes. Torch's optimizers keep their
        # counts of steps on the host.
        last = next(path for path, _ in reversed(places) if {"mmlaunch", "tests"} & {*path.parts})
        if "tests" in last.parts and last != Path(__file__):
            return
        if not ON_HOST & {*ours} and not any(path.parent.name == "optim" for path, _ in places):
            self.found.append([f"{file}:{name}" for file, name in ours])


@pytest.fixture
def _lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """``tolist`` reads without an operation of its own."""
    tolist = Tensor.tolist

    def read(tensor: Tensor) -> Any:
        reads = getattr(_here, "reads", None)
        if reads is not None:
            reads.note()
        return tolist(tensor)

    monkeypatch.setattr(Tensor, "tolist", read)


@contextmanager
def _reads(transport: InProcessTransport) -> Generator[list[list[str]]]:
    """The reads of this rank, and its waits for marks."""
    seconds_of: Callable[..., Any] = transport.seconds_of
    with _Reads() as reads:
        _here.reads = reads

        def waited(marks: Any) -> Any:
            reads.note()
            return seconds_of(marks)

        transport.seconds_of = waited
        yield reads.found
        transport.seconds_of = seconds_of
        _here.reads = None


def _of_second_step(
    plan: Plan, workload: Workload, *, timed: bool = False
) -> list[list[list[str]]]:
    """The reads of each rank."""

    def entry(transport: InProcessTransport) -> list[list[str]]:
        session = Session(plan=plan, workload=workload, folder=HERE, transport=transport)
        session.step()
        with _reads(transport) as found:
            session.step(timed=timed)
        session.close()
        return found

    return InProcessWorld(plan.devices).run(entry)


CASES = {
    "chain": Case(pp=2, dp=2, k=2, syncs=2, samples=8, feature="chain"),
    "tensor-parallel": Case(pp=2, tp=2, k=2, samples=24, others="same", backward="split"),
    "counted": Case(pp=2, dp=2, k=2, samples=8, feature="counted", backward="split"),
    "ragged": Case(pp=2, dp=2, k=4, syncs=2, samples=8, feature="ragged"),
}


@pytest.mark.usefixtures("_lists")
@pytest.mark.parametrize(("name", "zero"), [*zip(CASES, (1, 0, 1, 0), strict=True)])
def test_the_host_waits_at_the_end_of_a_step_alone(name: str, zero: int) -> None:
    case = CASES[name]
    plan, workload = case.plan(), case.workload()
    train = workload.train.model_copy(update={"clip_grad_norm": 1e-3, "zero": zero})
    workload = workload.model_copy(update={"train": train})
    _check(trained_as(plan, workload), workload, timed=name == "chain")


@pytest.mark.usefixtures("_lists")
def test_so_it_does_where_modalities_are_missing() -> None:
    case = MissingCase(where="both", kind="interleaved", joins="skips", split=True)
    workload = case.workload()
    _check(trained_as(case.plan(), workload), workload)


def _check(plan: Plan, workload: Workload, *, timed: bool = False) -> None:
    for found in _of_second_step(plan, workload, timed=timed):
        computing = [trail for trail in found if "executor.py:_compute" in trail]
        assert not computing, computing[:3]
        assert 1 <= len(found) <= MOST, found
