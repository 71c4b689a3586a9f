"""Messages to tensor-parallel groups on other nodes: a share for each rank, gathered there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from mmlaunch.comm.messages import Mailbox
from mmlaunch.comm.scatter_gather import PaddedShare, TensorShare, gather_shares
from mmlaunch.session.verify import Verdict, compare
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Message, Op
from mmplan.program.lower import lower
from mmplan.program.model import Program
from mmplan.program.text import format_program
from mmplan.ragged import Ragged
from mmplan.reporting.sections import topology as traffic
from mmplan.schema.cluster import Cluster
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from mmplan.simulation.predict import compute_timings, plan_costs
from mmplan.simulation.step import simulate
from mmplan.solvers.mpsp.placement import transfer_s
from tests.gloo_entries import gradients
from tests.launching import launched
from tests.plants import with_rows
from tests.programs import LossSpec, UnitSpec, loss, make_plan, unit
from tests.solving import cluster, module_profile, profile, run_solve, workload
from tests.verification import HERE, make_workload, verify_in_process

FORWARD, BACK = "forward", "back"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Units on nodes of so many ranks, and which edges come in shares."""

    units: list[UnitSpec]
    losses: list[LossSpec]
    per_node: int
    batch: int = 12
    shares: tuple[str, ...] = (FORWARD, BACK)
    factories: dict[str, str] = field(default_factory=dict)
    args: dict[str, dict[str, Any]] = field(default_factory=dict)

    def plan(self, devices: int | None = None) -> Plan:
        return make_plan(
            *self.units,
            losses=self.losses,
            batch=self.batch,
            per_node=self.per_node,
            devices=devices,
        )

    def workload(self) -> Workload:
        return make_workload(
            self.units, self.losses, batch=self.batch, factories=self.factories, args=self.args
        )

    def verify(self) -> None:
        self.check(verify_in_process(self.plan(), self.workload()))

    def check(self, verdict: Verdict) -> None:
        assert not verdict.differences, verdict.differences[:5]
        assert verdict.worst <= 1e-12
        assert verdict.compared > len(self.units)


def two(one: int, other: int, **more: Any) -> list[UnitSpec]:
    """v into t, with these tp degrees, each on a node of four."""
    ranks = list(range(one)), list(range(4, 4 + other))
    return [
        unit("v", "a", tp=one, ranks=[[ranks[0]]], k=2, **more),
        unit("t", "v", "b", tp=other, ranks=[[ranks[1]]], k=3, **more),
    ]


def regression(module: str = "t") -> list[LossSpec]:
    return [loss("regression", module, "target")]


CASES: dict[str, Case] = {
    "2 to 2": Case(units=two(2, 2), losses=regression(), per_node=4),
    "2 to 1": Case(units=two(2, 1), losses=regression(), per_node=4, shares=(BACK,)),
    "1 to 2": Case(units=two(1, 2), losses=regression(), per_node=4, shares=(FORWARD,)),
    "4 to 2": Case(units=two(4, 2), losses=regression(), per_node=4),
    "2 to 4": Case(units=two(2, 4), losses=regression(), per_node=4),
    "split": Case(units=two(2, 4, split=True), losses=regression(), per_node=4),
    "stages, batch-sync": Case(
        units=[
            unit("v", "a", pp=3, tp=2, k=2, blocks=4, lead=2),
            unit("t", "b", dp=2, k=2),
        ],
        losses=[loss("contrastive", "v", "t", sync_batch=6)],
        per_node=2,
    ),
    "stages, interleaved": Case(
        units=[unit("v", "a", pp=2, vpp=2, tp=2, k=4, kind="interleaved")],
        losses=regression("v"),
        per_node=2,
    ),
    "three replicas to two, of other groups": Case(
        units=[
            unit("v", "a", dp=3, tp=2, k=2, ranks=[[[1, 0]], [[4, 5]], [[2, 3]]]),
            unit("t", "v", "b", dp=2, tp=2, k=1, ranks=[[[3, 2]], [[7, 6]]]),
        ],
        losses=[loss("contrastive", "t", "v", sync_batch=12)],
        per_node=2,
    ),
    "a group in another order": Case(
        units=[
            unit("v", "a", tp=4, ranks=[[[2, 0, 3, 1]]], k=2),
            unit("t", "v", tp=4, ranks=[[[7, 4, 6, 5]]]),
        ],
        losses=regression(),
        per_node=4,
    ),
    "ragged": Case(
        units=[
            unit("v", "rows", tp=2, pp=2, k=3, ranks=[[[0, 1], [4, 5]]]),
            unit("t", "v", "b", tp=4, k=2, ranks=[[[8, 9, 10, 11]]]),
        ],
        losses=regression(),
        per_node=4,
        factories={"v": "ragged", "t": "reader"},
    ),
    "integers, fewer than shares": Case(
        units=[
            unit("v", "a", tp=2, k=6, blocks=3),
            unit("t", "v", "b", tp=4, k=12, blocks=2, ranks=[[[4, 5, 6, 7]]]),
        ],
        losses=regression(),
        per_node=4,
        factories={"v": "with_ids", "t": "id_reader"},
    ),
    "one element, to a block and to a loss": Case(
        units=[
            unit("v", "a", tp=2, ranks=[[[0, 1]]], blocks=2),
            unit("t", "v.1", "b", tp=2, ranks=[[[2, 3]]], k=2),
        ],
        losses=[loss("mse", "v.0", "t")],
        per_node=2,
        args={"v": {"tuple_output": True}},
        factories={"mse": "mmplan.zoo.losses:mse"},
    ),
    "frozen": Case(
        units=[unit("v", "a", tp=2, k=2, frozen=True), unit("t", "v", tp=2, k=3)],
        losses=regression(),
        per_node=2,
        shares=(FORWARD,),
    ),
}
# Nothing leaves its node, or the group that would gather is on two.
WHOLE: dict[str, Case] = {
    "one node": Case(units=two(2, 4), losses=regression(), per_node=8),
    "replicas in a node each": Case(
        units=[
            unit("v", "a", dp=2, tp=2, ranks=[[[0, 1]], [[4, 5]]]),
            unit("t", "v", dp=2, tp=2, ranks=[[[2, 3]], [[6, 7]]]),
        ],
        losses=regression(),
        per_node=4,
    ),
    "groups over two nodes": Case(
        units=[unit("v", "a", tp=2, ranks=[[[0, 2]]]), unit("t", "v", tp=2, ranks=[[[1, 3]]])],
        losses=regression(),
        per_node=2,
    ),
    "no tensor parallelism": Case(units=two(1, 1), losses=regression(), per_node=4),
}


@pytest.mark.parametrize("name", list(CASES))
def test_gradients_equal_one_process(name: str) -> None:
    case = CASES[name]
    program = compile_plan(case.plan())
    assert check_program(program) == []
    assert any(e.scattered for e in program.edges) == (FORWARD in case.shares)
    assert any(e.scattered_back for e in program.edges) == (BACK in case.shares)
    assert ("in shares" in format_program(program)) == bool(case.shares)
    case.verify()


@pytest.mark.slow
def test_gradients_equal_one_process_over_gloo(tmp_path: Path) -> None:
    """All cases on twelve processes: groups of other sizes, and ranks that idle."""
    cases = [(case.plan(devices=12), case.workload()) for case in CASES.values()]
    found = launched(gradients, (cases,), num_ranks=12, run_dir=tmp_path / "run", timeout_s=200.0)
    for index, case in enumerate(CASES.values()):
        program = compile_plan(case.plan(devices=12))
        case.check(compare(case.workload(), HERE, program, [rank[index] for rank in found]))


@pytest.mark.parametrize("name", list(WHOLE))
def test_what_stays_in_its_node_comes_whole(name: str) -> None:
    edges = lower(WHOLE[name].plan()).edges
    assert edges
    assert not any(e.scattered or e.scattered_back for e in edges)
    WHOLE[name].verify()


def sent_bytes(case: Case) -> Counter[tuple[int, int, bool]]:
    """Bytes of a step's messages between two ranks, each direction."""
    sent: Counter[tuple[int, int, bool]] = Counter()
    send = Mailbox._send

    def counted(
        self: Mailbox, way: Any, position: int, tensors: Sequence[Tensor], beside: Any
    ) -> None:
        message = self._program.instructions[self._transport.rank][position]
        assert isinstance(message, Message)
        key = self._transport.rank, message.peer, message.op is Op.SEND_B
        sent[key] += sum(tensor.nbytes for tensor in tensors)
        send(self, way, position, tensors, beside)

    with patch.object(Mailbox, "_send", counted):
        case.verify()
    return sent


@pytest.mark.parametrize(("one", "other"), [(2, 4), (4, 1)])
def test_between_nodes_every_byte_travels_once(one: int, other: int) -> None:
    # 12 samples of 8 numbers in float64.
    whole = 12 * 8 * 8
    units, losses = two(one, other), regression()
    apart = sent_bytes(Case(units=units, losses=losses, per_node=4))
    near = sent_bytes(Case(units=units, losses=losses, per_node=8))
    for back, takers in ((False, other), (True, one)):
        assert sum(n for (*_, b), n in apart.items() if b is back) == whole
        assert sum(n for (*_, b), n in near.items() if b is back) == takers * whole
        assert {n for (*_, b), n in near.items() if b is back} == {whole}
        assert {n for (*_, b), n in apart.items() if b is back} == {whole // takers}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(0,), (1,), (4, 3), (7,), (5, 1, 2)])
def test_shares_are_all_of_a_tensor(count: int, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, dtype=torch.float64)
    shares = [TensorShare(index, count) for index in range(count)]
    assert torch.equal(torch.cat([share.of(tensor) for share in shares]), tensor.reshape(-1))
    for share in shares:
        own = share.of(tensor)
        assert len(own) == share.numbers(tensor.numel()) <= share.padded(tensor.numel())


def test_one_gather_brings_tensors_of_all_types_together() -> None:
    """Odd numbers of bytes lie between numbers of eight: none may be read askew."""
    whole = [
        torch.tensor([True, False, True]),
        torch.randn(3, 3, dtype=torch.float64),
        torch.arange(5, dtype=torch.int64),
        torch.randn(7, dtype=torch.bfloat16),
    ]
    trees: list[Any] = [(whole[0], None, whole[1]), (Ragged(whole[2], torch.ones(5)), whole[3])]
    group, calls = (5, 3, 9), [0]

    def part(tensor: torch.Tensor, rank: int) -> PaddedShare:
        share = TensorShare(group.index(rank), len(group))
        own = share.of(tensor)
        padded = torch.zeros(share.padded(tensor.numel()), dtype=tensor.dtype)
        padded[: len(own)] = own
        return PaddedShare(padded, tuple(tensor.shape))

    def parts(rank: int) -> list[Any]:
        shares: list[Any] = [part(tensor, rank) for tensor in whole]
        one, two, three, four = shares
        return [(one, None, two), (Ragged(three, trees[1][0].lengths), four)]

    class Ranks:
        def gather_flat(self, full: torch.Tensor, mine: torch.Tensor, ranks: Any) -> None:
            assert ranks == (3, 5, 9)
            calls[0] += 1
            rows: list[torch.Tensor] = []
            bring: Any = Recorder(rows)
            for rank in ranks:
                gather_shares(parts(rank), bring, group)
            full.copy_(torch.cat(rows))

    class Recorder:
        def __init__(self, rows: list[torch.Tensor]) -> None:
            self.rows = rows

        def gather_flat(self, full: torch.Tensor, mine: torch.Tensor, ranks: Any) -> None:
            self.rows.append(mine.clone())

    transport: Any = Ranks()
    found: Any = gather_shares(parts(5), transport, group)
    assert calls == [1]
    assert torch.equal(found[0][0], whole[0])
    assert found[0][1] is None
    assert torch.equal(found[0][2], whole[1])
    assert isinstance(found[1][0], Ragged)
    assert torch.equal(found[1][0].values, whole[2])
    assert torch.equal(found[1][1], whole[3])


def test_a_rank_that_gathers_other_messages_than_its_group_is_a_fault() -> None:
    case = CASES["2 to 2"]
    program = compile_plan(case.plan())
    assert check_program(program) == []
    cut = _cut_in_two(program)
    # Whole messages may be cut otherwise for each rank of a group: nothing is gathered.
    near = Case(units=case.units, losses=case.losses, per_node=8)
    assert check_program(_cut_in_two(compile_plan(near.plan()))) == []
    faults = check_program(cut)
    assert faults
    assert all("gathers shares of other messages than its group" in fault for fault in faults)


def _cut_in_two(program: Program) -> Program:
    """Rank 0's first forward message to rank 4 becomes two."""
    first = next(
        item for item in program.instructions[0] if isinstance(item, Message) and item.is_send
    )
    assert first.peer == 4
    middle = first.start + 1

    def changed(rank: int) -> tuple[Any, ...]:
        row: list[Any] = []
        for item in program.instructions[rank]:
            ends = {(0, 4), (4, 0)}
            if (
                isinstance(item, Message)
                and (rank, item.peer) in ends
                and (item.edge, item.start, item.stop) == (first.edge, first.start, first.stop)
                and item.op.value.endswith("F")
            ):
                row += [
                    Message(item.op, item.stage, item.mb, item.edge, item.peer, a, b)
                    for a, b in ((item.start, middle), (middle, item.stop))
                ]
            else:
                row.append(item)
        return tuple(row)

    return with_rows(program, {rank: changed(rank) for rank in (0, 4)})


# --- what it costs ----------------------------------------------------------------------

# A node's network, and links inside nodes: seconds to begin, bytes a second.
BETWEEN = {"latency_s": 0.5, "bandwidth_bytes_per_s": 4.0}
INSIDE = {"latency_s": 0.25, "bandwidth_bytes_per_s": 64.0}
SIZE = 16.0  # bytes of a sample at the cut
HOP_S = 0.5 + SIZE / 4  # two ranks send a half each, over one interface
GATHER_S = 0.25 + SIZE / 2 / 64
SYNC_S = 0.25  # features of no bytes for the loss


def two_stages(folder: Path, *, samples: int, **more: Any) -> Plan:
    """One module, a stage of tp 2 on each of two nodes, micro-batches of one sample."""
    module = module_profile(
        20.0, 40.0, blocks=2, tp={2: 1.0}, boundary_bytes_per_sample=SIZE, output_bytes_per_sample=0
    )
    costs = profile({"v": module}, 4, per_node=2, inter=BETWEEN, intra=INSIDE)
    pins = {"plan": {"pp": 2, "dp": 1, "microbatch": 1, "split_backward": False}}
    return run_solve(folder, workload({"v": pins}, batch=samples), costs, **more)


def test_the_way_to_the_next_node_in_closed_form(tmp_path: Path) -> None:
    plan = two_stages(tmp_path, samples=1, solver="distmm")
    there_and_back = 20.0 + 40.0 + 2 * (HOP_S + GATHER_S) + SYNC_S
    assert plan.predicted.iteration_s == pytest.approx(there_and_back)


def test_distmms_formula_of_stages_on_two_nodes(tmp_path: Path) -> None:
    plan = two_stages(tmp_path, samples=3, solver="distmm")
    # Forwards on the second stage take a gather more, backwards on the first one.
    waits = 2 * HOP_S + 3 * 2 * GATHER_S + SYNC_S
    assert plan.predicted.iteration_s == pytest.approx((3 + 1) * (10 + 20) + waits)
    # The formula gives both stages the time of the slower one.
    assert plan.solver.objective_s == pytest.approx(plan.predicted.iteration_s + 2 * GATHER_S)


def test_emulated_computes_leave_out_the_gathers_that_such_a_run_does(tmp_path: Path) -> None:
    plan = two_stages(tmp_path, samples=3, solver="distmm")
    costs = plan_costs(plan, tmp_path / "plan.json")
    (edge,) = costs.program.edges
    assert costs.message_bytes(edge, 3, False) == costs.message_bytes(edge, 3, True) == 3 * SIZE / 2
    first, last = costs.program.stages
    timings = compute_timings(costs).computes
    own = {Op.FORWARD: 10.0, Op.BACKWARD: 20.0}
    for stage, gathers in ((first, Op.BACKWARD), (last, Op.FORWARD)):
        for op in (Op.FORWARD, Op.BACKWARD):
            assert timings[stage.index, op, 1] == pytest.approx(own[op])
            extra_s = costs.compute_s(stage, op, 1) - own[op]
            assert extra_s == pytest.approx(GATHER_S if op is gathers else 0.0)


def test_the_reports_traffic_counts_shares_and_what_gathers_hand_on(tmp_path: Path) -> None:
    costs = plan_costs(two_stages(tmp_path, samples=3, solver="distmm"), tmp_path / "plan.json")
    whole = 3 * SIZE
    (row,) = traffic._messages(simulate(costs.program, costs), costs)
    assert row == ("v, from stage to stage", 2 * whole, 2 * whole)


def test_slices_on_another_node_get_shares() -> None:
    where = Cluster.model_validate(cluster(8, per_node=4, inter=BETWEEN, intra=INSIDE))
    groups = [(0, 1), (2, 3)], [(4, 5, 6, 7)]
    # Six samples of 8 bytes into one node, gathered there: half of them from each producer.
    seconds = transfer_s(where, *groups, samples=6, sample_bytes=8.0)
    assert seconds == pytest.approx(max(6 * 8 / 4, 0.5 + 3 * 8 / 4 + 2 * 0.25 + 3 / 4 * 3 * 8 / 64))
    near = [(0,)], [(2, 3)]
    assert transfer_s(where, *near, samples=6, sample_bytes=8.0) == 0.25 + 6 * 8 / 64
