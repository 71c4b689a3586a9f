"""Emulated devices: each compute is one wait of the profile's time, the rest is real."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.session.session import Session
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Compute, Op, Sync
from mmplan.program.model import Program, Timings
from mmplan.reporting.report_page import render
from mmplan.reporting.source import load_source
from mmplan.schema.load import load_plan
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from mmplan.simulation.predict import compute_timings, plan_costs
from tests.birds import copy_workload, given_profile, two_rank_plan
from tests.commands import call, run
from tests.matrix_cases import Case
from tests.mllm_cases import MllmCase
from tests.programs import trained_as
from tests.verification import HERE

CASES: dict[str, Any] = {
    "towers": Case(pp=2, dp=2, tp=2, k=2, syncs=2, samples=12, per_node=2),
    "split": Case(pp=3, dp=1, k=4, samples=12, backward="split"),
    "per sample": Case(pp=2, k=2, samples=12, feature="counted"),
    "tied": Case(dp=3, samples=12, feature="tied"),
    "ragged": MllmCase(dp=2, encoder_dp=1, pp=2, vpp=2),
    "frozen": MllmCase(dp=1, encoder_dp=2, freeze="all"),
}


def distinct(program: Program) -> Timings:
    """A different time for every compute and loss."""
    return Timings(
        computes={
            (stage.index, op, stop - start): 1.0 + stage.index + number / 8 + (stop - start) / 1024
            for stage in program.stages
            for number, op in enumerate(Op)
            for row in stage.microbatches
            for start, stop in row
        },
        losses={loss.name: 1e3 + loss.index for loss in program.cross_sample_losses},
    )


def expected(program: Program, timings: Timings, rank: int) -> list[float]:
    """What a rank waits for, by its program; in order."""
    waits: list[float] = []
    for item in program.instructions[rank]:
        if isinstance(item, Compute):
            stage = program.stages[item.stage]
            d, _ = stage.place(rank)
            start, stop = stage.microbatches[d][item.mb]
            waits.append(timings.computes[stage.index, item.op, stop - start])
        elif isinstance(item, Sync) and item.op is Op.SYNC_WAIT:
            waits.append(timings.losses[program.losses[item.loss].name])
    return waits


def emulated(
    plan: Plan, workload: Workload, timings: Timings
) -> tuple[dict[int, list[float]], list[tuple[float, float]]]:
    """Waits of each rank in one step; per rank the loss and the largest change of a weight."""
    waits: defaultdict[int, list[float]] = defaultdict(list)
    rank_of = threading.local()

    def entry(transport: Any) -> tuple[float, float]:
        session = Session(
            plan=trained_as(plan, workload),
            workload=workload,
            folder=HERE,
            transport=transport,
            emulation=timings,
        )
        rank_of.rank = transport.rank
        before = {name: p.detach().clone() for name, p in session.model.trained()}
        loss = session.step().loss
        changes = [float((p.detach() - before[n]).abs().max()) for n, p in session.model.trained()]
        for name, parameter in session.model.trained():
            assert parameter.grad is not None, name
            assert not parameter.grad.any()
        return loss, max(changes, default=0.0)

    def spend(seconds: float, _: float) -> None:
        if seconds:
            waits[rank_of.rank].append(seconds)

    with patch("mmlaunch.execute.emulate._spend", spend):
        results = InProcessWorld(plan.devices).run(entry)
    return waits, results


@pytest.mark.parametrize("name", list(CASES))
def test_every_compute_waits_once_for_its_time_and_nothing_is_trained(name: str) -> None:
    case = CASES[name]
    plan, workload = case.plan(), case.workload()
    program = compile_plan(plan)
    timings = distinct(program)
    waits, results = emulated(plan, workload, timings)
    for rank in range(plan.devices):
        assert waits[rank] == expected(program, timings, rank), f"rank {rank}"
    assert results == [(0.0, 0.0)] * plan.devices


def planned(folder: Path) -> Path:
    (folder / "plans").mkdir()
    return two_rank_plan(copy_workload(folder), folder / "plans" / "plan.json")


def test_timings_are_those_of_the_simulator(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    profile = given_profile(tmp_path / "profile.json")
    costs = plan_costs(load_plan(plan), plan, profile)
    timings = compute_timings(costs)
    stages = {stage.index for stage in costs.program.stages}
    assert {stage for stage, _, _ in timings.computes} == stages
    for (stage, op, samples), seconds in timings.computes.items():
        assert seconds == costs.compute_s(costs.program.stages[stage], op, samples) > 0
    (loss,) = costs.program.cross_sample_losses
    assert timings.losses == {loss.name: costs.sync_s(loss) - costs.gather_s(loss)}


@pytest.mark.slow
def test_an_emulated_run_is_labelled_and_leaves_no_weights(tmp_path: Path) -> None:
    workload = copy_workload(tmp_path)
    given_profile(tmp_path / "p.json")
    solve = ("solve", workload, "--profile", "p.json", "--devices", "2", "--solver", "distmm")
    assert run("mmplan", *solve, "-o", "plan.json", cwd=tmp_path).code == 0
    done = run(
        *("mmlaunch", "run", "plan.json", "--emulate", "--steps", "4", "--run-dir", "run"),
        cwd=tmp_path,
    )
    assert done.code == 0, done.err
    assert "EMULATED" in done.out
    folder = tmp_path / "run"
    assert json.loads((folder / "run.json").read_text())["emulated"] is True
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    # It has no loss, and says none.
    assert [line["loss"] for line in lines] == [None] * 4
    assert lines[0].keys() >= {"step", "iteration_s", "samples_per_s"}
    assert "loss " not in done.out + done.err
    assert "4 steps emulated, nothing was trained; see run" in done.out
    assert not (folder / "final.safetensors").exists()
    page = render(load_source(folder))
    assert "Emulated devices." in page
    assert "emulated iteration" in page
    assert "measured iteration" not in page
    assert "An emulated run trains nothing: it has no loss." in page
    assert "Loss by step" not in page
    assert "no finite number" not in page


@pytest.mark.parametrize("option", ["--resume", "--save-every=2", "--tasks=x"])
def test_what_makes_no_sense_without_training_is_refused(tmp_path: Path, option: str) -> None:
    path = planned(tmp_path)
    done = call("mmlaunch", "run", path, "--emulate", option)
    assert done.code == 2
    assert "--emulate" in done.message


def test_zeros_travel_as_the_types_of_the_model() -> None:
    case = Case(pp=2, k=2, samples=12, precision="fp32")
    plan, workload = case.plan(), case.workload()
    timings = distinct(compile_plan(plan))
    assert workload.train.precision == "fp32"
    waits, _ = emulated(plan, workload, timings)
    assert sum(map(len, waits.values())) > 0
    assert torch.get_default_dtype() == torch.float32
