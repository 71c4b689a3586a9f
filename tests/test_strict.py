"""Plans under NCCL's rules: gradients as in one process, and each rule catches what breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmlaunch.comm.messages import ForwardReceive, Mailbox, Way
from mmlaunch.comm.strict import Mode, StrictTransport, StrictWorld
from mmlaunch.comm.transport import CommGroup, Done, TransferEnd
from mmlaunch.execute.executor import Executor
from mmplan.errors import RunFailedError
from mmplan.program.communicators import most_held_blocks
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Message, Op
from mmplan.program.model import Program
from mmplan.simulation.peak_memory import ExpectedMemory
from mmplan.simulation.predict import costs_of
from mmplan.simulation.step import peak_bytes
from tests.matrix_cases import FEATURES, Case
from tests.matrix_models import WIDTH
from tests.missing_cases import MissingCase
from tests.pairwise import pairwise_rows
from tests.solving import module_profile, profile
from tests.test_matrix import PAIRWISE
from tests.verification import TOLERANCE, verify_in_process

MODES: tuple[Mode, ...] = ("channels", "pairs")
SMALL: dict[str, tuple[Any, ...]] = {
    "feature": ("plain", "ragged", "chain", "two-syncs"),
    "tp": (1, 2),
    "backward": ("whole", "split"),
    "per_node": (None, 2),
    "mode": MODES,
    "timed": (False, True),
}
# Nothing to see of a modality in the first step: for a replica, a micro-batch, everyone.
MISSING = [
    MissingCase(where="first-step", kind="waves", joins="skips", losses="none", zero=1),
    MissingCase(where="replica", kind="colocated", tp=2, nodes=True),
    MissingCase(where="first-microbatch", tasks=2, joins="skips", losses="matching", split=True),
]
pytestmark = pytest.mark.usefixtures("one_thread")


def check(
    case: Case | MissingCase, *, seed: int = 0, mode: Mode = "channels", timed: bool = False
) -> None:
    """One step of a case under the rules, held against one process."""
    plan = case.plan()
    world = StrictWorld(plan.devices, seed=seed, mode=mode)
    verdict = verify_in_process(plan, case.workload(), world=world, timed=timed)
    assert world.faults == []
    assert not verdict.differences
    assert verdict.worst <= TOLERANCE["fp64"]
    if mode == "channels":
        assert 0 < world.most_blocks <= most_held_blocks(compile_plan(plan))


@pytest.mark.parametrize("row", pairwise_rows(SMALL), ids=str)
def test_small_plans(row: dict[str, Any]) -> None:
    how = {key: row[key] for key in ("mode", "timed")}
    degrees = {key: value for key, value in row.items() if key not in how}
    check(Case(pp=2, k=2, samples=8, others="single", **degrees), **how)


@pytest.mark.parametrize("case", MISSING, ids=str)
def test_missing_modalities(case: MissingCase) -> None:
    check(case, timed=case.tp > 1)


@pytest.mark.slow
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", PAIRWISE, ids=str)
def test_the_matrix(case: Case, mode: Mode, timed: bool) -> None:
    check(case, mode=mode, timed=timed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [*PAIRWISE[::6], *MISSING], ids=str)
def test_twenty_orders_of_ranks(case: Case | MissingCase) -> None:
    for seed in range(20):
        check(case, seed=seed, mode=MODES[seed % 2], timed=seed % 4 > 1)


def test_a_seed_is_one_order_of_ranks() -> None:
    def order(seed: int) -> list[int]:
        seen: list[int] = []

        def entry(transport: Any) -> None:
            for position in range(8):
                transport.heartbeat.beat(0, position, "")
                seen.append(transport.rank)

        StrictWorld(3, seed=seed).run(entry)
        return seen

    orders = [order(seed) for seed in range(6)]
    assert orders == [order(seed) for seed in range(6)]
    assert len(set(map(tuple, orders))) > 3


UNDER_WAY = [
    *(
        Case(pp=3, k=4, samples=24, others=others, feature="regression", kind=kind)
        for others in ("single", "rotated")
        for kind in ("1f1b", "gpipe")
    ),
    # Replicas of 9, 8 and 8 samples, and micro-batches of 3 and 2.
    Case(pp=2, dp=3, k=4, samples=25, others="single", feature="regression", kind="1f1b"),
    pytest.param(
        Case(pp=3, k=60, samples=60, others="single", feature="regression", kind="1f1b"),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("case", UNDER_WAY, ids=str)
def test_messages_under_way_are_what_memory_is_expected_for(case: Case) -> None:
    plan = case.plan()
    world = StrictWorld(plan.devices)
    verify_in_process(plan, case.workload(), world=world)
    # As float64 are wide.
    sample_bytes = 8 * WIDTH
    made = {
        unit.module: module_profile(
            blocks=unit.blocks,
            tp={1: 1.0, 2: 2.0},
            boundary_bytes_per_sample=sample_bytes,
            output_bytes_per_sample=sample_bytes,
        )
        for unit in FEATURES[case.feature](case).units
    }
    given = profile(made, plan.devices)
    costs = costs_of(plan.model_copy(update={"cluster": given.cluster}), given)
    expected, ranks = ExpectedMemory(costs), range(plan.devices)
    found = [expected.message_bytes(rank) for rank in ranks]
    assert found == pytest.approx(world.most_bytes, rel=0.05)
    assert max(found) > 0
    # Nothing else but weights is held.
    planned = zip(peak_bytes(costs.program, costs), map(costs.static_bytes, ranks), strict=True)
    assert [peak - static for peak, static in planned] == pytest.approx(found)


# --- planted faults of the runtime ---------------------------------------------------------

PIPELINE = Case(pp=3, k=4, samples=8, others="single", kind="1f1b")


def faults_of(
    change: Callable[[Program], Program] | None = None, *, multiprocessors: int = 100
) -> list[str]:
    """What a step of a pipeline breaks."""
    plan = PIPELINE.plan()
    world = StrictWorld(plan.devices, multiprocessors=multiprocessors)
    verify_in_process(plan, PIPELINE.workload(), world=world, change=change)
    return world.faults


def test_the_pipeline_itself_breaks_no_rule() -> None:
    assert faults_of() == []


def test_receives_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(program: Program) -> Program:
        row = list(program.instructions[1])
        first, second = (
            n
            for n, item in enumerate(row)
            if isinstance(item, Message) and item.op is Op.RECV_F and item.mb in (0, 1)
        )
        row[first], row[second] = row[second], row[first]
        rows = [*program.instructions]
        rows[1] = tuple(row)
        return replace(program, instructions=tuple(rows))

    found = faults_of(swapped)
    assert found[0].startswith("rank 1, step 0, instruction ")
    assert "(1RECV_F1:e" in found[0]
    assert "tensor 0 gets tensor 0 of another message: that of rank 0, step 0" in found[0]


def test_a_compute_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def received(self: ForwardReceive) -> object:
        return self._buffers

    monkeypatch.setattr(ForwardReceive, "_received", received)
    found = faults_of()
    assert any("nothing waits for tensor 0 of this message" in text for text in found)


def test_a_send_that_changes_before_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    message = Executor._message

    def changed(self: Executor, way: Way) -> None:
        message(self, way)
        item = way.message
        if item.op is Op.SEND_F:
            live = self._live[item.stage, item.mb].output
            assert isinstance(live, Tensor)
            live.data.mul_(2)

    monkeypatch.setattr(Executor, "_message", changed)
    assert any("tensor 0 changes while it is sent" in text for text in faults_of())


def test_a_communicator_that_a_step_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StrictTransport, "prepare", lambda *_: None)
    found = faults_of()
    assert any("a message makes the communicator -1 of ranks [0, 1]" in text for text in found)
    assert any("a sum makes the communicator 0 of ranks" in text for text in found)


def test_a_wait_for_the_device_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Executor._forward

    def patient(self: Executor, *arguments: Any) -> None:
        forward(self, *arguments)
        self._transport.synchronize()

    monkeypatch.setattr(Executor, "_forward", patient)
    with pytest.raises(RunFailedError, match=r"rank 0, step 0, instruction \d+ \(0F") as caught:
        faults_of()
    assert "for all that is in flight on its device" in str(caught.value)


def test_a_gpu_whose_multiprocessors_messages_hold() -> None:
    assert faults_of(multiprocessors=20) == []
    with pytest.raises(RunFailedError, match="for one of 4 multiprocessors: messages and coll"):
        faults_of(multiprocessors=4)


def test_sends_are_not_held_longer_than_the_mailbox_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait of a release blocks: what it lets go is over."""
    release, wait = Mailbox.release, StrictWorld.wait_until
    inside: list[Mailbox] = []

    def released(self: Mailbox, position: int) -> None:
        inside.append(self)
        release(self, position)
        inside.pop()

    def waited(self: StrictWorld, rank: int, condition: Callable[[], bool], what: str) -> None:
        assert not inside or condition(), what
        wait(self, rank, condition, what)

    monkeypatch.setattr(Mailbox, "release", released)
    monkeypatch.setattr(StrictWorld, "wait_until", waited)
    assert faults_of() == []


# --- planted faults of small programs ------------------------------------------------------

CHANNEL: CommGroup = (0, 1), -1
BOTH: CommGroup = (0, 1), 0


def run_two(
    entry: Callable[[StrictTransport], object], *, mode: Mode = "channels"
) -> tuple[StrictWorld, list[Any]]:
    """A program of two ranks, whose communicators are there."""

    def prepared(transport: Any) -> object:
        transport.prepare([BOTH, ((0, 1), 1)], {CHANNEL: [(0, 1), (1, 0)]})
        return entry(transport)

    world = StrictWorld(2, mode=mode)
    return world, world.run(prepared)


def transfer(
    transport: StrictTransport, tensor: Tensor, *, sends: bool, tag: int = 1
) -> TransferEnd:
    """To or from the other rank."""
    return TransferEnd(tensor=tensor, peer=1 - transport.rank, tag=tag, is_send=sends)


def test_ranks_that_both_receive_first() -> None:
    def entry(transport: StrictTransport) -> float:
        buffer, mine = torch.zeros(1), torch.full((1,), float(transport.rank))
        received = transport.post([transfer(transport, buffer, sends=False)], CHANNEL)
        sent = transport.post([transfer(transport, mine, sends=True)], CHANNEL)
        assert buffer.isnan().all()
        received.wait()
        sent.wait()
        return float(buffer)

    with pytest.raises(RunFailedError, match="rank 0, for messages to and from rank 1; rank 1, "):
        run_two(entry)
    assert run_two(entry, mode="pairs")[1] == [1.0, 0.0]


def test_one_group_of_both_ways() -> None:
    def entry(transport: StrictTransport) -> float:
        buffer, mine = torch.zeros(1), torch.full((1,), float(transport.rank))
        both = [transfer(transport, t, sends=s) for t, s in ((buffer, False), (mine, True))]
        transport.post(both, CHANNEL).wait()
        return float(buffer)

    world, values = run_two(entry)
    assert (world.faults, values) == ([], [1.0, 0.0])
    # A receive of 4 bytes and a send of 4.
    assert world.most_bytes == [8, 8]


@pytest.mark.parametrize(
    ("sent", "expected"), [(torch.zeros(2), "(2,)"), (torch.zeros(1).double(), "(1,)")]
)
def test_a_message_of_another_size_or_type(sent: Tensor, expected: str) -> None:
    def entry(transport: StrictTransport) -> None:
        sends = transport.rank == 0
        tensor = sent if sends else torch.zeros(1)
        transport.post([transfer(transport, tensor, sends=sends)], CHANNEL).wait()

    [fault] = run_two(entry)[0].faults
    assert fault == f"rank 1: tensor 0 is (1,) torch.float32, and {expected} {sent.dtype} at rank 0"


def test_a_buffer_that_is_read_before_its_wait_is_changed() -> None:
    def entry(transport: StrictTransport) -> None:
        sends = transport.rank == 0
        buffer = torch.zeros(1)
        work = transport.post([transfer(transport, buffer, sends=sends)], CHANNEL)
        if not sends:
            buffer.zero_()
        work.wait()

    assert run_two(entry)[0].faults == ["rank 1: tensor 0 changes while it is received"]


@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_of_its_own_that_nothing_waits_for(waits: bool) -> None:
    def entry(transport: StrictTransport) -> float:
        total = torch.ones(1)
        gathered, parts = transport.all_gather(torch.ones(1), (0, 1), 1)

        def then() -> Done:
            total.copy_(torch.stack(parts).sum(0))
            return Done()

        work = transport.after(gathered, then)
        if waits:
            work.wait()
        return float(total)

    world, values = run_two(entry)
    text = "nothing waits for what goes on in a stream of its own"
    assert sorted(world.faults) == ([] if waits else [f"rank {n}: {text}" for n in (0, 1)])
    assert values == [1.0 + waits] * 2


def test_collectives_of_two_sizes() -> None:
    def entry(transport: StrictTransport) -> None:
        transport.all_reduce(torch.zeros(1 + transport.rank), (0, 1))

    with pytest.raises(RunFailedError, match=r"meet in one collective with different tensors"):
        run_two(entry)


def test_a_sum_that_meets_a_gather() -> None:
    def entry(transport: StrictTransport) -> None:
        if transport.rank:
            transport.all_reduce(torch.zeros(2), (0, 1))
        else:
            transport.gather_flat(torch.zeros(4), torch.zeros(2), (0, 1))

    with pytest.raises(RunFailedError, match=r"gather of slices.*sum"):
        run_two(entry)


def test_collectives_of_two_communicators_in_two_orders() -> None:
    def entry(transport: StrictTransport) -> None:
        work = Done()
        for operation in ("gather", "sum") if transport.rank else ("sum", "gather"):
            if operation == "gather":
                work, _ = transport.all_gather(torch.zeros(1), (0, 1), 1)
            else:
                transport.all_reduce(torch.zeros(1), (0, 1))
        work.wait()

    [fault] = run_two(entry)[0].faults
    assert "comes before" in fault
