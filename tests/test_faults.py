"""Planted faults: ``check`` sees them in the data, ``verify`` in the gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from mmlaunch.execute.executor import ExecutionError, Executor
from mmlaunch.execute.reductions import Reductions
from mmlaunch.session.verify import Verdict
from mmplan.errors import RunFailedError
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Collective, Compute, Message, Op
from mmplan.program.model import Program, Stage
from tests.plants import PLANTS, with_rows, without
from tests.programs import UnitSpec, loss, make_plan, unit
from tests.selection import some
from tests.verification import make_workload, verify_in_process

BATCH = 24
UNITS = [
    unit("v", "a", pp=2, dp=3, k=2),
    unit("t", "v", "b", dp=2, k=2),
    unit("u", "c", dp=2, k=3),
]
LOSSES = [
    loss("contrastive", "t", "u", sync_batch=12),
    loss("regression", "u", "target"),
]
Change = Callable[[Program], Program]


def trained_by(reductions: Reductions, index: int) -> list[nn.Parameter]:
    """The parameters of one sum."""
    return [part.parameter for sums in reductions._sums[index] for part in sums.slices]


def planted(change: Change, units: list[UnitSpec] = UNITS) -> tuple[list[str], Verdict]:
    """What ``check`` says of the changed program, and what ``verify`` does."""
    plan = make_plan(*units, losses=LOSSES, batch=BATCH)
    verdict = verify_in_process(plan, make_workload(units, LOSSES, batch=BATCH), change=change)
    return check_program(change(compile_plan(plan))), verdict


def modules_of(verdict: Verdict) -> set[str]:
    return {difference.name.split(".")[0] for difference in verdict.differences}


def stage_of(program: Program, module: str) -> Stage:
    """The module's last stage."""
    return [stage for stage in program.stages if stage.module == module][-1]


def test_without_a_fault_both_are_content() -> None:
    faults, verdict = planted(lambda program: program)
    assert faults == []
    assert verdict.differences == ()


def test_a_dropped_gradient_message() -> None:
    def drop(program: Program) -> Program:
        last = stage_of(program, "v")
        sent = next(
            x
            for row in program.instructions
            for x in row
            if isinstance(x, Message) and x.op is Op.RECV_B and x.stage == last.index
        )
        samples = sent.edge, sent.start, sent.stop
        return without(
            program,
            lambda _, x: (
                isinstance(x, Message)
                and x.op in (Op.SEND_B, Op.RECV_B)
                and (x.edge, x.start, x.stop) == samples
            ),
        )

    faults, verdict = planted(drop)
    assert any("the messages of edge" in fault for fault in faults)
    assert modules_of(verdict) == {"v"}


def test_two_micro_batches_swapped() -> None:
    """Stage t takes each sample range for the other micro-batch of its replica."""

    def swap(program: Program) -> Program:
        stage = stage_of(program, "t")
        rank = stage.ranks[0][0]
        row = program.instructions[rank]
        received = [x for x in row if isinstance(x, Message) and x.op is Op.RECV_F]
        groups = {mb: [x for x in received if x.mb == mb] for mb in (0, 1)}
        assert [len(group) for group in groups.values()] == [2, 2]
        other = {
            a: replace(b, mb=a.mb, start=b.start, stop=b.stop)
            for a, b in [
                *zip(groups[0], groups[1], strict=True),
                *zip(groups[1], groups[0], strict=True),
            ]
        }
        items = [other.get(x, x) if isinstance(x, Message) else x for x in row]
        return with_rows(program, {rank: tuple(items)})

    # Micro-batches of one size: shapes say nothing, and every message still has its pair.
    units = [unit("v", "a", pp=2, dp=2, k=2), unit("t", "v", "b", k=2), unit("u", "c", dp=2, k=3)]
    faults, verdict = planted(swap, units)
    assert faults
    assert {"v", "t", "u"} <= modules_of(verdict)


def test_a_stage_run_twice() -> None:
    def twice(program: Program) -> Program:
        stage = stage_of(program, "u")
        rank = stage.ranks[1][0]
        row = program.instructions[rank]
        first = row.index(Compute(Op.BACKWARD, stage.index, 0)) + 1
        again = (Compute(Op.FORWARD, stage.index, 0), Compute(Op.BACKWARD, stage.index, 0))
        return with_rows(program, {rank: (*row[:first], *again, *row[first:])})

    faults, verdict = planted(twice)
    assert "rank 9, instruction 7 (3F0): stands 2 times, first at 1" in faults
    assert {"u", "loss", "losses"} == modules_of(verdict)


@pytest.mark.parametrize("module", some(["v", "t", "u"], 0, 2))
@pytest.mark.parametrize("factor", some([1.5, 1 + 1e-9], 1))
def test_one_module_s_gradient_scaled(
    module: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No program shows this fault; verify names the module and no other."""
    whole = Reductions.reduce

    def scaled(self: Reductions, index: int) -> None:
        whole(self, index)
        if self._program.reductions[index].owner == module:
            for parameter in trained_by(self, index):
                assert parameter.grad is not None
                parameter.grad *= factor

    monkeypatch.setattr(Reductions, "reduce", scaled)
    faults, verdict = planted(lambda program: program)
    assert faults == []
    assert modules_of(verdict) == {module}
    if factor == 1.5:
        blocks = {u.module: u.blocks for u in UNITS}[module]
        assert {d.name.split(".")[1] for d in verdict.differences} == set(map(str, range(blocks)))


def test_gradients_of_one_replica_left_out_of_the_sum() -> None:
    faults, verdict = planted(
        lambda program: without(
            program,
            lambda _, x: (
                isinstance(x, Collective)
                and x.op is Op.REDUCE
                and program.reductions[x.index].owner == "t"
            ),
        )
    )
    assert any("REDUCE" in fault for fault in faults)
    assert modules_of(verdict) == {"t"}
    assert {d.rank for d in verdict.differences} == {6, 7}


def test_means_instead_of_sums_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What DDP does: gradients averaged over replicas."""
    whole = Reductions.reduce

    def mean(self: Reductions, index: int) -> None:
        whole(self, index)
        for parameter in trained_by(self, index):
            assert parameter.grad is not None
            parameter.grad /= len(self._program.reductions[index].ranks)

    monkeypatch.setattr(Reductions, "reduce", mean)
    _, verdict = planted(lambda program: program)
    assert modules_of(verdict) == {"v", "t", "u", "losses"}


def test_a_rank_that_waits_for_ever_is_reported_and_not_hung() -> None:
    """The send is gone, the receive is not."""

    def silence(program: Program) -> Program:
        stage = program.stages[0]
        return without(
            program,
            lambda rank, x: (
                rank == stage.ranks[0][0]
                and isinstance(x, Message)
                and (x.op, x.mb) == (Op.SEND_F, 1)
            ),
        )

    plan = make_plan(*UNITS, losses=LOSSES, batch=BATCH)
    workload = make_workload(UNITS, LOSSES, batch=BATCH)
    with pytest.raises(RunFailedError, match="wait for each other") as caught:
        verify_in_process(plan, workload, change=silence)
    assert caught.value.hint == "mmplan check PLAN says where"
    assert any("waits for ever" in f for f in check_program(silence(compile_plan(plan))))


def test_an_instruction_that_fails_is_shown_between_its_neighbours() -> None:
    def backward_first(program: Program) -> Program:
        row = program.instructions[0]
        first = row.index(Compute(Op.FORWARD, 0, 0))
        items = (*row[:first], Compute(Op.BACKWARD, 0, 0), *row[first:])
        return with_rows(program, {0: items})

    with pytest.raises(
        ExecutionError, match=r"^rank 0, step 0, instruction 0 of \d+: >0B0< 0F0 0SEND_F0"
    ) as caught:
        planted(backward_first)
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_executor_that_swaps_feature_rows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples out of step between modules: "silently training on garbage"."""
    whole = Executor._field

    def shifted(self: Executor, task: str, name: str, start: int, stop: int) -> torch.Tensor:
        field = whole(self, task, name, start, stop)
        assert isinstance(field, torch.Tensor)
        return field.roll(int(name == "c"), dims=0)

    monkeypatch.setattr(Executor, "_field", shifted)
    _, verdict = planted(lambda program: program)
    assert {"v", "t", "u", "loss"} <= modules_of(verdict)


SYNCED = [
    unit("v", "a", pp=2, dp=3, k=2),
    unit("t", "b", dp=2, k=2, pp=2),
]


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("seed", some(range(2), 0))
def test_what_check_lets_pass_equals_one_process(kind: str, seed: int) -> None:
    """Random faults of every kind: check sees them all, verify all that change the step."""
    losses = [loss("contrastive", "v", "t", sync_batch=12)]
    chance = random.Random(seed)
    plan = make_plan(*SYNCED, losses=losses, batch=BATCH)
    workload = make_workload(SYNCED, losses, batch=BATCH)
    changed = PLANTS[kind](compile_plan(plan), chance.randrange)
    assert changed is not None
    assert check_program(changed), kind
    try:
        verdict = verify_in_process(plan, workload, change=lambda _: changed)
    except RunFailedError:
        return
    # A second forward without a second backward costs time and leaves the sums as they are.
    assert verdict.differences or kind == "stage run twice"
