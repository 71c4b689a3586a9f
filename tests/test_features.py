"""A rank receives the features that its own rows are compared with, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.comm.transport import DistTransport, Transport
from mmlaunch.launch.launch import WorkerContext
from mmlaunch.session.session import Session
from mmlaunch.session.verify import LocalGradients, compare, planned_step
from mmplan.costs.cost_model import CostModel
from mmplan.costs.program_costs import ProgramCosts
from mmplan.program.compile import compile_plan
from mmplan.schema.plan import Plan
from mmplan.schema.profile import LossPoint, LossProfile
from tests.launching import launched
from tests.matrix_models import WIDTH
from tests.programs import UnitSpec, loss, make_plan, trained_as, unit
from tests.solving import module_profile, profile
from tests.verification import HERE, make_workload

SAMPLES, SYNCS = 16, 2
ROW_BYTES = 8 * WIDTH

# Towers, and whether every rank has even shares and reads what it receives without padding.
CASES: dict[str, tuple[list[UnitSpec], bool]] = {
    "apart": ([unit("v", "a", dp=2, k=2), unit("t", "b", dp=2)], True),
    "of three and one": ([unit("v", "a", dp=3), unit("t", "b", k=4)], False),
    "tensor parallel": ([unit("v", "a", tp=2), unit("t", "b", dp=2, k=2)], True),
    "three modalities": ([unit("v", "a", dp=2), unit("t", "b"), unit("u", "c", k=2)], False),
    "together": (
        [unit("v", "a", dp=2, ranks=[[[0]], [[1]]]), unit("t", "b", dp=2, ranks=[[[0]], [[1]]])],
        True,
    ),
    "two together, one apart": (
        [unit("v", "a", ranks=[[[0]]]), unit("t", "b", ranks=[[[0]]]), unit("u", "c")],
        False,
    ),
}


def counted(plan: Plan, workload: Any, transport: Transport) -> tuple[LocalGradients, int]:
    """A step's gradients, and the bytes of features that this rank received."""
    total = [0]
    gather, exchange = transport.all_gather, transport.exchange

    def all_gather(tensor: Any, ranks: tuple[int, ...], channel: int = 0) -> Any:
        total[0] += tensor.nbytes * (len(ranks) - 1) * (channel > 0)
        return gather(tensor, ranks, channel)

    def exchanged(received: Any, sent: Any, ranks: tuple[int, ...], channel: int = 0) -> Any:
        total[0] += received[0].nbytes * (channel > 0)
        return exchange(received, sent, ranks, channel)

    transport.all_gather, transport.exchange = all_gather, exchanged
    session = Session(plan=plan, workload=workload, folder=HERE, transport=transport)
    return planned_step(session), total[0]


def over_gloo(ctx: WorkerContext, plan: Plan, workload: Any) -> tuple[LocalGradients, int]:
    return counted(plan, workload, DistTransport(ctx.device.device, ctx.heartbeat))


def made(units: Sequence[UnitSpec]) -> tuple[Plan, Any]:
    losses = [loss("clip", *(u.module for u in units), sync_batch=SAMPLES)]
    plan = make_plan(*units, losses=losses, batch=SAMPLES * SYNCS)
    factories = {"clip": "mmplan.zoo.losses:clip"}
    workload = make_workload([*units], losses, batch=SAMPLES * SYNCS, factories=factories)
    return trained_as(plan, workload), workload


def check(plan: Plan, workload: Any, found: list[Any]) -> list[int]:
    """Gradients equal one process; the bytes that each rank received."""
    verdict = compare(workload, HERE, compile_plan(plan), [gradients for gradients, _ in found])
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= 1e-12
    return [number for _, number in found]


@pytest.mark.parametrize("name", CASES)
def test_gradients_and_bytes(name: str) -> None:
    units, even = CASES[name]
    plan, workload = made(units)
    found = InProcessWorld(plan.devices).run(lambda t: counted(plan, workload, t))
    received = check(plan, workload, found)
    costs = costs_of(plan)
    simulated = SAMPLES * SYNCS * costs.gathered_bytes(costs.program.cross_sample(0))
    if even:
        assert sum(received) == simulated
    if name == "apart":
        # The other tower's rows alone; all features would be twice as many.
        assert received == [SAMPLES * SYNCS * ROW_BYTES] * 4


def test_a_tower_on_its_own_devices_holds_half_of_the_features() -> None:
    found: list[list[float]] = []
    for others_only in (True, False):
        costs = costs_of(made(CASES["apart"][0])[0], others_only=others_only)
        whole = costs.program.cross_sample(0)
        found.append([costs.feature_bytes(whole, 0), costs.gather_s(whole)])
    (half, quick_s), (all_of_them, slow_s) = found
    assert half == all_of_them / 2
    assert quick_s < slow_s


@pytest.mark.slow
def test_the_other_towers_rows_alone_over_gloo(tmp_path: Path) -> None:
    plan, workload = made(CASES["apart"][0])
    found = launched(over_gloo, (plan, workload), num_ranks=4, run_dir=tmp_path, timeout_s=90.0)
    assert check(plan, workload, found) == [SAMPLES * SYNCS * ROW_BYTES] * 4


def costs_of(plan: Plan, *, others_only: bool = True) -> ProgramCosts:
    tower = module_profile(blocks=1, output_bytes_per_sample=float(ROW_BYTES), tp={1: 1.0, 2: 1.0})
    given = profile(
        {unit.module: tower for unit in plan.units},
        plan.devices,
        intra={"latency_s": 0.0, "bandwidth_bytes_per_s": 1000.0},
    )
    point = LossPoint(samples=SAMPLES, forward_s=0, backward_s=0)
    known = {"clip": LossProfile(others_only=others_only, points=(point,))}
    model = CostModel(given.model_copy(update={"losses": known}))
    return ProgramCosts(compile_plan(plan), model, plan)
