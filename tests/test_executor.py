"""What the executor holds, where it fails and what it says."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given, settings

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.comm.messages import Way
from mmlaunch.execute.executor import ComputePart, ExecutionError, Executor
from mmlaunch.process.heartbeat import Heartbeat
from mmlaunch.session.session import Session
from mmplan.errors import RunFailedError
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Compute, Message, MessageKey, Op, Step
from mmplan.program.sent_messages import MessagesUnderWay
from mmplan.schema.plan import Plan
from tests.matrix_cases import SOME_FEATURES, Case
from tests.programs import in_flight, loss, make_plan, plans, trained_as, unit
from tests.verification import HERE, make_workload, verify_in_process


def test_a_middle_stage_holds_what_it_sends_as_long_as_the_program_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    units, losses = [unit("v", "a", pp=3, k=30, kind="1f1b")], [loss("regression", "v", "target")]
    plan = make_plan(*units, losses=losses, batch=30)
    last = MessagesUnderWay(compile_plan(plan)).last_positions(1)
    most = 0
    message, finish = Executor._message, Executor._finish

    def sent(self: Executor, way: Way) -> None:
        nonlocal most
        message(self, way)
        if self._transport.rank == 1:
            held = set(self._mailbox._sent)
            assert held == {s for s, end in last.items() if s <= self._position < end}
            most = max(most, len(held))

    def finished(self: Executor) -> None:
        finish(self)
        assert not self._mailbox.held_bytes

    monkeypatch.setattr(Executor, "_message", sent)
    monkeypatch.setattr(Executor, "_finish", finished)
    verify_in_process(plan, make_workload(units, losses, batch=30))
    # Of 60.
    assert 0 < most <= 5


@settings(max_examples=20, deadline=None, derandomize=True)
@given(plans())
def test_a_send_that_is_let_go_has_come(plan: Plan) -> None:
    """The compute that takes the message comes before the wait that shows it, in any order."""
    program = compile_plan(plan)
    rows = program.instructions
    sends = {
        item.key(rank): (rank, position)
        for rank, row in enumerate(rows)
        for position, item in enumerate(row)
        if isinstance(item, Message) and item.is_send
    }
    # What each instruction comes after, beside the one before it in its row.
    after: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    takes: dict[MessageKey, tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        posted: dict[MessageKey, Message] = {}
        for position, item in enumerate(row):
            if isinstance(item, Message) and not item.is_send:
                posted[item.key(rank)] = item
            elif isinstance(item, Compute) and item.op is not Op.WEIGHT:
                for key, m in list(posted.items()):
                    if (m.stage, m.mb, m.op is Op.RECV_B) == (
                        item.stage,
                        item.mb,
                        item.is_backward,
                    ):
                        del posted[key]
                        takes[key] = rank, position
                        after[rank, position].append(sends[key])
    # The ranks of a tensor-parallel group compute together.
    computes = {
        (rank, item): position
        for rank, row in enumerate(rows)
        for position, item in enumerate(row)
        if isinstance(item, Compute)
    }
    for (rank, item), position in computes.items():
        stage = program.stages[item.stage]
        group = stage.ranks[stage.place(rank)[0]]
        after[rank, position] += [(other, computes[other, item]) for other in group]

    def comes_before(one: tuple[int, int], other: tuple[int, int]) -> bool:
        seen: dict[int, int] = {}
        left = [other]
        while left:
            rank, position = left.pop()
            # Up to here the rank's row has been walked.
            walked = seen.get(rank, -1)
            seen[rank] = max(walked, position)
            for place in range(walked + 1, position + 1):
                left += after[rank, place]
        return seen.get(one[0], -1) >= one[1]

    under_way = MessagesUnderWay(program)
    for rank, row in enumerate(rows):
        for position, shown in under_way.last_positions(rank).items():
            item = row[position]
            assert isinstance(item, Message)
            assert position < shown
            if not isinstance(row[shown], Step):
                assert comes_before(takes[item.key(rank)], (rank, shown))


@pytest.mark.parametrize("feature", SOME_FEATURES)
def test_no_activation_is_held_after_a_step(feature: str) -> None:
    case = Case(feature=feature, pp=2, dp=3, tp=2, k=2, syncs=2, samples=12, lead=2, sync_lead=1)

    def entry(transport: Any) -> None:
        session = _session(case, transport)
        session.forward_backward()
        executor = session.executor
        assert executor._live == {}
        assert executor._mailbox._forward == {}
        assert executor._mailbox._backward == {}
        assert not executor._mailbox._sent
        assert not any(executor._mailbox._unposted.values())
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

    def counted(self: Executor, part: ComputePart) -> None:
        forward(self, part)
        stage = part.stage
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
