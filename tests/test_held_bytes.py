"""Bytes that the executor holds between forward and backward, against the simulation's."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.execute.blocks import StageBlocks
from mmlaunch.session.session import Session
from mmplan.program.compile import compile_plan
from mmplan.program.model import Stage
from mmplan.simulation.step import simulate
from tests.clocks import FixedCosts
from tests.programs import UnitSpec, loss, make_plan, trained_as, unit
from tests.verification import HERE, make_workload

BATCH = 24
PIPELINES: dict[str, list[UnitSpec]] = {
    "1f1b": [unit("v", "a", pp=4, k=8, kind="1f1b")],
    "gpipe": [unit("v", "a", pp=3, k=6, kind="gpipe")],
    "batch-sync": [unit("v", "a", pp=3, k=4)],
    "interleaved": [unit("v", "a", pp=2, vpp=3, k=8, kind="interleaved")],
    "dp 3 into interleaved dp 2 into pp 2": [
        unit("v", "a", dp=3, pp=2, k=4, kind="1f1b"),
        unit("t", "v", dp=2, pp=2, vpp=2, k=6, kind="interleaved"),
        unit("u", "t", pp=2, k=12, kind="1f1b"),
    ],
    "frozen before, tp": [
        unit("v", "a", pp=2, k=4, blocks=4, kind="1f1b", frozen=((0, 3),)),
        unit("t", "v", tp=2, pp=2, k=8, kind="1f1b"),
    ],
    "two modules on one rank": [
        unit("v", "a", pp=2, k=4, kind="1f1b", ranks=[[[0], [1]]]),
        unit("t", "v", dp=2, k=4, kind="1f1b", ranks=[[[0]], [[1]]]),
    ],
}


class Ledger:
    """Storages that saved tensors and outputs keep alive on one rank, each counted once."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.holders: Counter[int] = Counter()
        self.held = 0
        self.most = 0

    def take(self, tensor: Tensor) -> int | None:
        address = tensor.untyped_storage().data_ptr()
        if address in self.known:
            return None
        self.holders[address] += 1
        if self.holders[address] == 1:
            self.held += tensor.untyped_storage().nbytes()
            self.most = max(self.most, self.held)
        return address

    def give_back(self, address: int, num_bytes: int) -> None:
        self.holders[address] -= 1
        if self.holders[address] == 0:
            self.held -= num_bytes


class Saved:
    """What a hook packs a tensor into: it dies when the graph lets the tensor go."""

    def __init__(self, tensor: Tensor, ledger: Ledger) -> None:
        self.tensor, self._ledger = tensor, ledger
        self._address = ledger.take(tensor)

    def __del__(self) -> None:
        if self._address is not None:
            self._ledger.give_back(self._address, self.tensor.untyped_storage().nbytes())


class Accountant:
    """Wraps the blocks' forward on every rank's thread."""

    def __init__(self, blocks_run: Any) -> None:
        self._run = blocks_run
        self.ledgers: defaultdict[int, Ledger] = defaultdict(Ledger)
        self.per_sample: dict[int, float] = {}

    def __call__(self, runner: Any, stage: Stage, step: int, start: int, given: Any, later: Any):
        ledger = self.ledgers[threading.get_ident()]
        parameters = [p for b in runner._model.blocks.values() for p in b.parameters()]
        # What a stage takes is held by its producer, or is the batch's own.
        ledger.known = {t.untyped_storage().data_ptr() for t in (*parameters, *_tensors(given))}
        before = ledger.held
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: Saved(tensor, ledger), lambda saved: saved.tensor
        )
        with hooks:
            output = self._run(runner, stage, step, start, given, later)
        if stage.has_backward:
            for tensor in _tensors(output):
                address, size = ledger.take(tensor), tensor.untyped_storage().nbytes()
                if address is not None:
                    weakref.finalize(tensor, ledger.give_back, address, size)
        samples = len(next(_tensors(output)))
        self.per_sample[stage.index] = (ledger.held - before) / samples
        return output


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


class Measured(FixedCosts):
    """The costs that only knows what a micro-batch of each stage was seen to hold."""

    def __init__(self, per_sample: dict[int, float]) -> None:
        super().__init__()
        self._per_sample = per_sample

    def activation_bytes(self, stage: Stage, samples: float) -> float:
        return self._per_sample[stage.index] * samples if stage.has_backward else 0.0

    def communicators(self, rank: int) -> int:
        return 0


@pytest.mark.parametrize("name", PIPELINES)
def test_the_executor_holds_what_the_simulation_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = PIPELINES[name]
    batch_sync = name == "batch-sync"
    losses = [
        loss("contrastive", "v", "v", sync_batch=12)
        if batch_sync
        else loss("regression", units[-1].module, "target")
    ]
    plan = make_plan(*units, losses=losses, batch=BATCH)
    workload = make_workload(units, losses, batch=BATCH)
    accountant = Accountant(StageBlocks.run)
    monkeypatch.setattr(StageBlocks, "run", lambda *args: accountant(*args))

    def entry(transport: Any) -> tuple[int, int]:
        session = Session(
            plan=trained_as(plan, workload), workload=workload, folder=HERE, transport=transport
        )
        session.step()
        ledger = accountant.ledgers[threading.get_ident()]
        return ledger.most, ledger.held

    found = InProcessWorld(plan.devices).run(entry)
    expected = simulate(compile_plan(plan), Measured(accountant.per_sample)).peak_bytes
    assert max(expected) > 0
    assert [most for most, _ in found] == [round(peak) for peak in expected]
    assert [left for _, left in found] == [0] * plan.devices
