"""The warm-up changes no number of a run, and sends nothing between devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmlaunch.comm.strict import StrictTransport, StrictWorld
from mmlaunch.execute.blocks import ExecutionError
from mmlaunch.process.device import warms_up
from mmlaunch.process.heartbeat import Heartbeat
from mmlaunch.session.session import Session
from mmplan.errors import InvalidInputError
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.matrix_cases import Case
from tests.matrix_models import WIDTH, IdReader, tower
from tests.missing_cases import MissingCase
from tests.programs import loss, make_plan, trained_as, unit
from tests.test_matrix import PAIRWISE
from tests.test_strict import MISSING
from tests.verification import HERE, make_workload

pytestmark = pytest.mark.usefixtures("one_thread")


class Stateful(nn.Module):
    """Has running sums, in place and not, and draws random numbers."""

    count: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("total", torch.zeros(WIDTH))
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.total += x.detach().sum(0)
        self.last = x.detach()
        return nn.functional.dropout(self.linear(x) + self.total.mean(), 0.3)


class Picky(Stateful):
    """Takes no zeros, but for the two samples of which shapes are inferred."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2 and not x.any():
            raise ValueError("only zeros")
        return super().forward(x)


class Numbered(nn.Module):
    """Gives each sample a 3."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.full((len(x),), 3)


class Reader(IdReader):
    """Takes no other number, but for the two samples of which shapes are inferred."""

    def forward(self, x: tuple[Tensor, Tensor], other: Tensor) -> Tensor:
        if len(other) > 2 and x[1].ne(3).any():
            raise ValueError("other numbers")
        return super().forward(x, other)


def stateful(blocks: int) -> nn.Sequential:
    return nn.Sequential(*(Stateful() for _ in range(blocks - 1)), Numbered())


def picky(blocks: int) -> nn.Sequential:
    return nn.Sequential(*(Picky() for _ in range(blocks - 1)), Numbered())


def reader(blocks: int) -> nn.Sequential:
    return nn.Sequential(Reader(), *tower(blocks - 1))


class Phases(Heartbeat):
    """Remembers the names of phases."""

    def __init__(self) -> None:
        super().__init__(Heartbeat.detached()._buffer, 0)
        self.names: list[str] = []

    def phase(self, name: str, step: int = -1, *, slow: bool = True) -> None:
        self.names.append(name)
        super().phase(name, step, slow=slow)


@dataclass(kw_only=True)
class Ran:
    """What a rank did and is after two steps.

    Attributes:
        sent: what it began on the device's communicators before the first step, sums of
            tensor-parallel groups left out.
        phases: of the start.
        drawn: a random number before the first step.
        tensors: gradients of the second step, parameters and buffers.
    """

    sent: list[str]
    phases: list[str]
    drawn: float
    losses: list[float]
    tensors: dict[str, Tensor]


def ran(
    plan: Plan, workload: Workload, monkeypatch: pytest.MonkeyPatch, *, warm: bool
) -> list[Ran]:
    """Two steps of each rank under NCCL's rules."""
    world, begun = StrictWorld(plan.devices), [list[str]() for _ in range(plan.devices)]
    groups = {tuple(sorted(group)) for u in plan.units for row in u.ranks for group in row}

    def noting(name: str) -> Callable[..., Any]:
        real = getattr(StrictTransport, name)

        def call(self: StrictTransport, *arguments: Any) -> Any:
            of_group = {"start_all_reduce": arguments[1:], "exchange": arguments[2:]}.get(name)
            if not of_group or of_group[0] not in groups:
                begun[self.rank].append(name)
            return real(self, *arguments)

        return call

    def entry(transport: Any) -> Ran:
        heartbeat = Phases()
        torch.manual_seed(4)
        session = Session(
            plan=trained_as(plan, workload),
            workload=workload,
            folder=HERE,
            transport=transport,
            heartbeat=heartbeat,
        )
        sent, drawn = [*begun[transport.rank]], float(torch.rand(()))
        assert not any(p.grad is not None for _, p in session.model.named_parameters())
        phases = [*heartbeat.names]
        losses = [session.step().loss, session.forward_backward().loss]
        state = [
            (f"{owner}.{index}.{name}", value)
            for (owner, index), block in session.model.blocks.items()
            for name, value in (*block.named_parameters(), *block.named_buffers())
        ]
        gradients = [(f"gradient of {k}", v) for k, v in session.gradients().items()]
        tensors = {name: value.detach().clone() for name, value in [*state, *gradients]}
        return Ran(sent=sent, phases=phases, drawn=drawn, losses=losses, tensors=tensors)

    with monkeypatch.context() as patch:
        patch.setenv("MMLAUNCH_WARM_UP", str(int(warm)))
        for name in ("post", "all_gather", "exchange", "start_all_reduce", "start_reduce_scatter"):
            patch.setattr(StrictTransport, name, noting(name))
        results = world.run(entry)
    assert world.faults == []
    return results


def check(plan: Plan, workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold two steps after a warm-up against two without."""
    cold = ran(plan, workload, monkeypatch, warm=False)
    warm = ran(plan, workload, monkeypatch, warm=True)
    for before, after in zip(cold, warm, strict=True):
        assert not after.sent
        extra = [name for name in after.phases if name not in before.phases]
        assert all(name.startswith("warming up ") for name in extra)
        assert "warming up STEP" in extra
        assert (after.drawn, after.losses) == (before.drawn, before.losses)
        assert after.tensors.keys() == before.tensors.keys()
        same = {n: torch.equal(after.tensors[n], value) for n, value in before.tensors.items()}
        assert all(same.values()), same


def test_states_of_blocks_and_random_numbers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    check(*with_module("stateful"), monkeypatch)


def with_module(factory: str) -> tuple[Plan, Workload]:
    """A pipeline of this file's modules, which passes whole numbers on."""
    units = [unit("v", "a", pp=2, k=2, blocks=4), unit("t", "v", "b", k=2, blocks=2)]
    losses = [loss("contrastive", "v.0", "t", sync_batch=12)]
    workload = make_workload(units, losses, batch=12)
    modules = {
        name: workload.modules[name].model_copy(update={"factory": f"{__name__}:{made}"})
        for name, made in (("v", factory), ("t", "reader"))
    }
    return make_plan(*units, losses=losses, batch=12), workload.model_copy(
        update={"modules": modules}
    )


def test_a_block_that_takes_no_zeros_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExecutionError, match=r"in the warm-up: rank 1, step 0, .*zeros") as found:
        ran(*with_module("picky"), monkeypatch, warm=True)
    assert found.value.hint == "MMLAUNCH_WARM_UP=0 runs without it"


def test_lengths_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(dp=2, k=2, samples=8, feature="ragged", per_node=2)
    check(case.plan(), case.workload(), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*PAIRWISE, *MISSING], ids=str)
def test_the_matrix(case: Case | MissingCase, monkeypatch: pytest.MonkeyPatch) -> None:
    check(case.plan(), case.workload(), monkeypatch)


def test_a_gpu_and_compiled_blocks_are_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMLAUNCH_WARM_UP", raising=False)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert not warms_up(cpu, compiled=False)
    assert warms_up(cpu, compiled=True)
    assert warms_up(gpu, compiled=False)
    monkeypatch.setenv("MMLAUNCH_WARM_UP", "yes")
    with pytest.raises(InvalidInputError, match="MMLAUNCH_WARM_UP is 'yes'"):
        warms_up(gpu, compiled=False)
