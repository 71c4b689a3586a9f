"""What a run is expected to hold: hand-worked, beside the plan's own number, and measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from mmlaunch.measure.memory import kept_bytes, transient_bytes
from mmplan.costs.program_costs import ProgramCosts
from mmplan.planning.planner import solve
from mmplan.profiling.measure import measure_profile
from mmplan.program.instructions import Compute, Op
from mmplan.reporting.explain import explain
from mmplan.reporting.source import load_source
from mmplan.schema.base import save_document
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import load_workload
from mmplan.simulation.peak_memory import ExpectedMemory, MemoryUse
from mmplan.simulation.predict import costs_of, plan_costs
from mmplan.simulation.step import simulate
from tests.plants import not_started
from tests.programs import loss, make_plan, plans, unit
from tests.solving import module_profile, profile

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
EXTRAS = {"forward_only_bytes": 6, "forward_extra_bytes": 2, "backward_extra_bytes": 8}


def given_profile(parameters: float, blocks: int, *, known: bool, names: str = "v") -> Profile:
    """A block holds 50 bytes a sample, cuts carry 5 and the output 3; extras a sample."""
    module = module_profile(
        blocks=blocks,
        parameters=parameters,
        activation_bytes=50.0 * blocks,
        boundary_bytes_per_sample=5,
        output_bytes_per_sample=3,
        tp={1: 1.0, 2: 1.0},
    )
    for point in module["points"] if known else ():
        point |= {name: size * point["microbatch"] for name, size in EXTRAS.items()}
    return profile(dict.fromkeys(names, module), 16)


def held_bytes(plan: Plan, costs: Profile) -> ExpectedMemory:
    return ExpectedMemory(costs_of(plan.model_copy(update={"cluster": costs.cluster}), costs))


def in_computes(held: ExpectedMemory, rank: int) -> dict[str, tuple[float, float]]:
    """(most during it, bytes after it) of every compute."""
    row = held.costs.program.instructions[rank]
    return {
        str(row[moment.position]): (moment.during.total, moment.after_bytes)
        for moment in held.by_instruction(rank)
        if isinstance(row[moment.position], Compute)
    }


def test_one_micro_batch_has_no_gradients_when_its_activations_are_most() -> None:
    # 40 parameters: 480 bytes of weight and state, 40 of gradient a block; 100 a block of two
    # samples.
    plan = make_plan(unit("v", blocks=4), losses=[loss("l", "v")], batch=2)
    held = held_bytes(plan, given_profile(40, 4, known=True))
    assert in_computes(held, 0) == {
        "0F0": (480 + 400 + 4, 480 + 400),
        "0B0": (480 + 400 + 16, 480 + 160),
    }
    assert held.peak(0) == MemoryUse(
        fixed=480, gradients=0, activations=400, workspace=16, buffers=0
    )
    step = simulate(held.costs.program, held.costs)
    assert step.peak_bytes[0] == 480 + 160 + 400
    curve = list(dict.fromkeys(held.over_time(step, 0)))
    assert curve[:5] == [(0, 480), (0, 884), (2, 880), (2, 896), (6, 640)]


def test_large_gradients_are_most_at_the_end_of_the_backward() -> None:
    # 400 of gradient a block come as 100 of activations go.
    plan = make_plan(unit("v", blocks=4), losses=[loss("l", "v")], batch=2)
    held = held_bytes(plan, given_profile(400, 4, known=True))
    peak = held.peak(0)
    assert (peak.gradients, peak.activations, peak.workspace) == (1600, 0, 0)


def test_a_pipeline_keeps_its_gradients_from_the_first_backward() -> None:
    # A block on each rank: 120 fixed, 40 of gradient; two micro-batches of 50 in flight on rank 0.
    plan = make_plan(unit("v", pp=2, k=3, kind="1f1b", blocks=2), losses=[loss("l", "v")], batch=3)
    held = held_bytes(plan, given_profile(20, 2, known=True))
    row = [str(item) for item in held.costs.program.instructions[0] if isinstance(item, Compute)]
    assert row == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    found = in_computes(held, 0)
    # The gradient of the next micro-batch's output has been posted (5) before a backward, which
    # takes its own among its 8; an output that was sent goes with its activations.
    assert found["0F1"][0] == 120 + 100 + 2 + 5
    assert found["0B0"] == (120 + 100 + 8 + 5, 120 + 40 + 50 + 5)
    assert found["0B1"][1] == 120 + 40 + 50 + 5
    assert found["0B2"] == (120 + 40 + 50 + 8, 120 + 40)
    last = list(held.by_instruction(0))[-1]
    assert last.after_bytes == 120


@pytest.mark.parametrize(
    ("zero", "fixed", "copied", "left"), [(0, 480, 160, 160), (1, 320, 400, 80)]
)
def test_a_sum_copies_gradients_and_of_zero_leaves_a_slice(
    zero: Literal[0, 1], fixed: float, copied: float, left: float
) -> None:
    # 160 bytes of gradient on each of two replicas; ZeRO-1 has 80 of its own sum, and gloo copies.
    plan = make_plan(unit("v", dp=2, blocks=4), losses=[loss("l", "v")], batch=2, zero=zero)
    costs = given_profile(40, 4, known=True)
    device = costs.cluster.device.model_copy(update={"name": "cpu"})
    cluster = costs.cluster.model_copy(update={"device": device})
    profiled = costs.model_copy(update={"cluster": cluster})
    held = held_bytes(plan, profiled)
    row = held.costs.program.instructions[0]
    # The first one is of the loss's parameters, which are none.
    empty, full = (m for m in held.by_instruction(0) if row[m.position].op is Op.REDUCE)
    own = left if zero else 0
    assert empty.during.total == empty.after_bytes == fixed + 160 + own
    assert full.during.total == fixed + 160 + own
    assert full.after_bytes == fixed + left
    # The sum begins in the backward, and the gradients have been let go of when that ends.
    assert in_computes(held, 0)["0B0"][1] == fixed + 160 + own
    assert in_computes(held, 0)["0B0"][0] >= fixed + 160 + copied
    late = ExpectedMemory(
        ProgramCosts(
            not_started(held.costs.program),
            held.costs.costs,
            plan.model_copy(update={"cluster": cluster}),
        )
    )
    full = next(m for m in late.by_instruction(0) if m.position == len(row) - 3)
    assert full.during.total == fixed + 160 + copied
    assert full.after_bytes == fixed + left


def test_a_sum_inside_a_backward_copies_when_its_gradients_are_there() -> None:
    # Four samples on each replica: 200 of activations a block are gone when the last of 160
    # bytes of gradient comes, which make one bucket.
    plan = make_plan(unit("v", dp=2, blocks=4), losses=[loss("l", "v")], batch=8)
    held = held_bytes(plan, given_profile(40, 4, known=True))
    assert held.peak(0) == MemoryUse(
        fixed=480, gradients=0, activations=800, workspace=32, buffers=0
    )


def test_a_forward_without_a_backward_holds_what_passes_only() -> None:
    plan = make_plan(
        unit("v", blocks=2, k=2, frozen=True),
        unit("w", blocks=2),
        losses=[loss("l", "v", "w", sync_batch=4)],
        batch=4,
    )
    held = held_bytes(plan, given_profile(10, 2, known=True, names="vw"))
    peak = held.peak(0)
    # Weights only; the first output (2 samples) waits for the loss while the second is made.
    assert (peak.fixed, peak.activations, peak.gradients) == (40, 0, 0)
    assert found_most(held, 0) == 40 + 2 * 6 + 2 * 3


def found_most(held: ExpectedMemory, rank: int) -> float:
    return max(during for during, _ in in_computes(held, rank).values())


@settings(deadline=None, max_examples=20)
@given(plans())
def test_what_the_plan_counts_is_never_less_than_the_same_of_a_run(plan: Plan) -> None:
    held = held_bytes(plan, given_profile(30, 9, known=False, names="abc"))
    counted = simulate(held.costs.program, held.costs).peak_bytes
    for rank, peak in enumerate(held.peaks()):
        assert peak.workspace == 0
        assert peak.fixed + peak.gradients + peak.activations <= counted[rank] * (1 + 1e-9)
        *_, last = [peak.fixed, *(moment.after_bytes for moment in held.by_instruction(rank))]
        assert last == pytest.approx(peak.fixed)


def test_a_plan_that_fits_by_its_own_number_only_is_told() -> None:
    plan = make_plan(unit("v", blocks=4), losses=[loss("l", "v")], batch=2)
    # The plan counts 4160 for 260 parameters in 4 blocks and 400 for the activations.
    for extra, capacity, told in ((8, 4600.0, False), (2000, 4600.0, True)):
        known = given_profile(260, 4, known=True)
        points = [
            p.model_copy(update={"backward_extra_bytes": extra * p.microbatch})
            for p in known.modules["v"].points
        ]
        module = known.modules["v"].model_copy(update={"points": tuple(points)})
        costs = known.model_copy(update={"modules": {"v": module}})
        device = costs.cluster.device.model_copy(update={"memory_bytes": capacity})
        cluster = costs.cluster.model_copy(update={"device": device})
        fitting = plan.model_copy(update={"cluster": cluster})
        found = costs_of(fitting, costs)
        step = simulate(found.program, found)
        reasons = explain(fitting, costs, step, (), run_memory=ExpectedMemory(found))
        text = next(reason.text for reason in reasons if reason.topic == "run's memory")
        assert ("may run out of memory" in text) is told


def test_transient_bytes_are_those_of_the_tensors() -> None:
    rows, width = 64, 1024
    x = torch.randn(rows, width)
    module = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found = transient_bytes(lambda: module(x), torch.device("cpu"))
    small, large = 4 * rows * width, 16 * rows * width
    assert found["forward_only_bytes"] == 2 * large
    # The ReLU's input goes when the last layer has begun.
    assert found["forward_extra_bytes"] == large - small
    # Gradients of the output and of what is before the last layer, and that layer's weight's.
    assert found["backward_extra_bytes"] == pytest.approx(small + large + 16 * width**2, rel=0.01)


def test_copies_of_weights_are_none_of_a_micro_batchs() -> None:
    x = torch.randn(2, 1000)
    module = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000))
    known = [*module.parameters(), x]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        held = kept_bytes(lambda: module(x), known, torch.device("cpu"), twice=True)
    # The narrow input, and what both layers give.
    assert held == 3 * 2 * 2 * 1000


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts the peak")
@pytest.mark.parametrize("solver", ["distmm", "colocated"])
def test_two_processes_hold_what_is_expected(tmp_path: Path, solver: str) -> None:
    workload = BENCHMARKS / "frozen.yaml"
    measured = measure_profile(
        workload, device="cpu", num_processes=2, state_path=tmp_path / "state"
    )
    save_document(measured, tmp_path / "profile.json")
    plan_path, run_dir = tmp_path / "plan.json", tmp_path / "run"
    plan = solve(
        load_workload(workload),
        workload_path=workload,
        profile=measured,
        profile_path=tmp_path / "profile.json",
        plan_path=plan_path,
        devices=2,
        solver=solver,
    )
    save_document(plan, plan_path)
    _run(plan_path, run_dir)
    data = load_source(run_dir)
    expected = ExpectedMemory(plan_costs(plan, plan_path)).peaks()
    assert data.run is not None
    for rank, held in data.run.memory_bytes.items():
        assert expected[rank].total == pytest.approx(held, rel=0.1)


def _run(plan: Path, run_dir: Path) -> None:
    code = "from cli import mmlaunch_main; mmlaunch_main()"
    arguments: list[Any] = ["run", plan, "--steps", "3", "--run-dir", run_dir, "--json"]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment,
        cwd=BENCHMARKS.parent,
    )
    assert not done.returncode, done.stderr
