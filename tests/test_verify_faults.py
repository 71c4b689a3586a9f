"""``verify`` finds faults planted in the runtime: in samples, gradients, updates, over steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.session.session import Session
from mmlaunch.session.verify import compare, planned_step
from mmplan.errors import RunFailedError
from mmplan.program.compile import compile_plan
from mmplan.schema.workload import load_workload
from tests.programs import loss, make_plan, trained_as, unit
from tests.runtime_faults import FAULTS
from tests.verification import verify_steps

DIGITS = Path(__file__).parents[1] / "examples" / "clip-digits"
QUICK = ("zero_not_gathered", "count_of_step_0", "norm_counts_copies")
# What goes wrong from the second step on is seen in it.
STEPS = 2


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAULTS],
)
def test_planted_faults_are_found(name: str) -> None:
    fault = FAULTS[name]
    plan, workload = fault.setup.made()
    with fault.plant():
        try:
            verdict = verify_steps(plan, workload, steps=STEPS)
        except RunFailedError as error:
            # Copies that differ end a run before its weights are saved.
            if "hold different bits of" not in error.message:
                raise
            return
    assert {d.what for d in verdict.differences} & fault.seen_in, (name, verdict)


@pytest.mark.slow
@pytest.mark.parametrize("setup", dict.fromkeys(str(fault.setup) for fault in FAULTS.values()))
def test_without_a_fault_there_is_none(setup: str) -> None:
    every = {str(fault.setup): fault.setup for fault in FAULTS.values()}
    plan, workload = every[setup].made()
    verdict = verify_steps(plan, workload)
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.steps == 4
    assert verdict.updates > verdict.compared > 50
    assert verdict.share < 0.5


@pytest.mark.slow
def test_in_bf16_a_gradient_that_is_a_tenth_off_is_found() -> None:
    """Every gradient of the digits' CLIP is one tenth too large; each is judged by its own."""
    # As ``verify --in-process`` does.
    torch.set_num_threads(1)
    workload = load_workload(DIGITS / "workload.yaml")
    train = workload.train.model_copy(update={"precision": "bf16"})
    # A smaller batch has more noise, not less.
    losses = {n: x.model_copy(update={"sync_batch": 64}) for n, x in workload.losses.items()}
    update = {"train": train, "batch": 64, "losses": losses}
    workload = workload.model_copy(update=update)
    plan = trained_as(
        make_plan(
            unit("vision", "image", blocks=6, dp=2, k=1),
            unit("text", "tokens", blocks=5, dp=2, k=1),
            losses=[loss("contrastive", "vision", "text", sync_batch=64)],
            batch=64,
        ),
        workload,
    )

    found = InProcessWorld(plan.devices).run(
        lambda transport: planned_step(
            Session(plan=plan, workload=workload, folder=DIGITS, transport=transport)
        )
    )
    program = compile_plan(plan)
    assert not compare(workload, DIGITS, program, found).differences
    scaled = [
        replace(rank, gradients={n: 1.1 * g for n, g in rank.gradients.items()}) for rank in found
    ]
    names = {n for rank in found for n in rank.gradients}
    caught = {d.name for d in compare(workload, DIGITS, program, scaled).differences}
    assert len(names) == 144
    assert len(caught & names) >= 120, sorted(names - caught)
