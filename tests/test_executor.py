"""What the executor holds, where it fails and what it says."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.comm.messages import Outbox
from mmlaunch.execute.executor import ExecutionError, Executor
from mmlaunch.process.heartbeat import Heartbeat
from mmlaunch.session.session import Session
from mmplan.errors import RunFailedError
from mmplan.program.model import Stage
from tests.matrix_cases import FEATURES, Case
from tests.programs import in_flight, loss, make_plan, trained_as, unit
from tests.verification import HERE, make_workload


class _Unsure:
    """A send as gloo's: it says that it is over after a wait only, and a second wait hangs."""

    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        assert not self.waited
        self.waited = True

    def is_completed(self) -> bool:
        return self.waited


def test_what_was_sent_goes_when_its_gradient_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(pp=2, k=4, samples=8, others="same")
    held: list[int] = []
    send, arrived = Outbox.send, Outbox.received

    def unsure(self: Outbox, *arguments: Any, **named: Any) -> None:
        send(self, *arguments, **named)
        self._sent[-1] = (_Unsure(), self._sent[-1][1])
        if named["name"] is not None:
            self._by_name[named["name"]] = [self._sent[-1][0]]

    def watched(self: Outbox, name: Any) -> None:
        before = len(self._sent)
        arrived(self, name)
        held.append(len(self._sent) - before)

    monkeypatch.setattr(Outbox, "send", unsure)
    monkeypatch.setattr(Outbox, "received", watched)
    InProcessWorld(case.plan().devices).run(lambda t: _session(case, t).forward_backward().loss)
    assert held
    assert set(held) == {-1}


@pytest.mark.parametrize("feature", FEATURES)
def test_no_activation_is_held_after_a_step(feature: str) -> None:
    case = Case(feature=feature, pp=2, dp=3, tp=2, k=2, syncs=2, samples=12, lead=2, sync_lead=1)

    def entry(transport: Any) -> None:
        session = _session(case, transport)
        session.forward_backward()
        executor = session.executor
        assert executor._live == {}
        assert executor._mailbox._forward == {}
        assert executor._mailbox._backward == {}
        assert not executor._mailbox._outbox._sent
        assert executor._sync._features == {}
        assert executor._sync._uses == {}
        assert executor._sync._gradients == {}
        assert executor._sync._pending == {}

    world = InProcessWorld(case.plan().devices)
    world.run(entry)
    # No message was left over, and no collective was half done.
    assert not any(world._mailbox.values())
    assert world._deposits == {}


@pytest.mark.parametrize("feature", ["plain", "chain", "frozen-tower", "frozen-range"])
def test_micro_batches_are_held_as_the_program_says(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(feature=feature, pp=3, dp=2, k=4, syncs=2, samples=12)
    most: Counter[tuple[int, int]] = Counter()
    forward = Executor._forward

    def counted(self: Executor, stage: Stage, mb: int) -> None:
        forward(self, stage, mb)
        held = [
            k for k, live in self._live.items() if k[0] == stage.index and live.output is not None
        ]
        key = self._transport.rank, stage.index
        most[key] = max(most[key], len(held))

    monkeypatch.setattr(Executor, "_forward", counted)
    programs = InProcessWorld(case.plan().devices).run(
        lambda transport: _run_once(_session(case, transport))
    )
    program = programs[0]
    expected = in_flight(program)
    for (rank, stage), number in most.items():
        if program.stages[stage].has_backward:
            assert number == expected[rank, stage], (rank, stage)
    assert max(most.values()) > 1


def test_every_instruction_beats_with_its_text_and_unit() -> None:
    case = Case(pp=2, k=2, others="single")

    def entry(transport: Any) -> None:
        beats: list[tuple[int, int, str, str | None]] = []

        class Recorder(Heartbeat):
            def beat(
                self,
                step: int,
                instruction_index: int,
                instruction: str,
                module: str | None = None,
            ) -> None:
                beats.append((step, instruction_index, instruction, module))
                super().beat(step, instruction_index, instruction, module)

        session = Session(
            plan=trained_as(case.plan(), case.workload()),
            workload=case.workload(),
            folder=HERE,
            transport=transport,
            heartbeat=Recorder(bytearray(1 << 12), 0),
        )
        session.step()
        session.step()
        row = session.program.instructions[transport.rank]
        assert [b[2] for b in beats] == [str(i) for i in row] * 2
        assert [b[:2] for b in beats] == [(s, i) for s in (0, 1) for i in range(len(row))]
        units = {b[3] for b in beats if "F" in b[2]}
        assert units == {"v" if transport.rank < 2 else "t"}

    InProcessWorld(case.plan().devices).run(entry)


def test_a_block_that_fails_in_a_step_is_placed_and_its_error_kept() -> None:
    with pytest.raises(ExecutionError) as caught:
        _run_with("fails_on_three_samples")
    text = str(caught.value)
    assert text.startswith("rank 1, step 0, instruction ")
    assert ">1F0<" in text
    assert "ValueError: three samples are too many" in text
    assert isinstance(caught.value.__cause__, ValueError)
    assert 'raise ValueError("three samples are too many")' in caught.value.detail


def test_an_error_of_a_device_that_runs_behind_may_be_of_an_earlier_instruction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(pp=2, k=2, others="single")

    class Mark:
        def query(self) -> bool:
            return False

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def entry(transport: Any) -> None:
        heartbeat = Heartbeat.detached()
        session = Session(
            plan=trained_as(case.plan(), case.workload()),
            workload=case.workload(),
            folder=HERE,
            transport=transport,
            heartbeat=heartbeat,
        )
        heartbeat.follow(Mark)
        session.step()

    monkeypatch.setattr(Executor, "_compute", fail)
    with pytest.raises(ExecutionError) as caught:
        InProcessWorld(case.plan().devices).run(entry)
    assert re.match(
        r"rank \d, step 0, at or before instruction \d of \d+ \(the device had completed no "
        r"instruction\): .*: RuntimeError: CUDA error",
        str(caught.value),
    )


def test_a_block_that_always_fails_is_named_before_the_first_step() -> None:
    with pytest.raises(
        RunFailedError, match=r"v blocks \[1, 2\]: ValueError: never works"
    ) as caught:
        _run_with("never_works")
    assert caught.value.hint == "run the blocks on a batch of two samples to see where"


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("returns_a_list", "a block returned a list"),
        ("returns_a_scalar", "a block returned a tensor without a batch dimension"),
    ],
)
def test_what_cannot_travel_is_refused(factory: str, message: str) -> None:
    with pytest.raises(RunFailedError, match=message):
        _run_with(factory)


def _run_with(factory: str) -> None:
    """One step with v's second block, on rank 1, being another one."""
    units = [unit("v", "a", pp=2, k=2), unit("t", "b", dp=2, k=2)]
    losses = [loss("contrastive", "v", "t", sync_batch=8)]
    plan = make_plan(*units, losses=losses, batch=8)
    workload = make_workload(units, losses, batch=8, factories={"v": factory})
    InProcessWorld(plan.devices).run(
        lambda transport: _run_once(
            Session(
                plan=trained_as(plan, workload), workload=workload, folder=HERE, transport=transport
            )
        )
    )


def _run_once(session: Session) -> Any:
    session.step()
    return session.program


def _session(case: Case, transport: Any) -> Session:
    return Session(
        plan=trained_as(case.plan(), case.workload()),
        workload=case.workload(),
        folder=HERE,
        transport=transport,
    )
