"""Parts of a plan that do the same are simulated once: nothing changes but the time it takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmplan.costs import CostModel, ProgramCosts
from mmplan.errors import InfeasibleError
from mmplan.program.compile import compile_plan
from mmplan.program.lower import lower
from mmplan.schema.plan import Plan, Prediction
from mmplan.schema.profile import Profile
from mmplan.simulate import prediction, simulate
from mmplan.symmetry import Excerpt, excerpt, predict
from tests.solving import module_profile, profile, run_solve, workload

CHAIN = {
    "vision": {},
    "llm": {"inputs": ["vision"], "backbone": True},
    "image": {"inputs": ["llm"]},
}
LOSSES = {
    "text": {"factory": "mmplan.zoo.losses:mse", "inputs": ["llm", "y"]},
    "pixels": {"factory": "mmplan.zoo.losses:mse", "inputs": ["image", "z"]},
}
SOLVERS = ("convex", "megatron", "megatron-rigid", "ratio")


def costs_of(rng: np.random.Generator, devices: int) -> Profile:
    modules = {
        name: module_profile(
            float(rng.integers(1, 9)),
            float(rng.integers(1, 9)),
            blocks=int(rng.integers(2, 7)),
            tp={1: 1.0, 2: 1.7},
            parameters=float(rng.integers(1, 60)),
            activation_bytes=float(rng.integers(0, 60)),
            output_bytes_per_sample=float(rng.integers(0, 9)),
            boundary_bytes_per_sample=float(rng.integers(0, 9)),
        )
        for name in CHAIN
    }
    given = profile(
        modules,
        devices,
        per_node=int(rng.choice([2, 4, 8])),
        memory_bytes=float(rng.choice([900, 2000, 1e9])),
        inter={"latency_s": 0.25, "bandwidth_bytes_per_s": 16.0},
        intra={"latency_s": 0.0, "bandwidth_bytes_per_s": 64.0},
        losses={"text": {"points": [{"samples": 1, "forward_s": 0.25, "backward_s": 0.5}]}},
    )
    size = float(rng.choice([0.0, 7.0]))  # what costs no memory lets groups be folded
    device = given.cluster.device.model_copy(update={"communicator_bytes": size})
    return given.model_copy(update={"cluster": given.cluster.model_copy(update={"device": device})})


def plans(folder: Path, seed: int) -> list[tuple[Plan, CostModel]]:
    """What every solver makes of a random chain on more devices than it has modules."""
    rng = np.random.default_rng(seed)
    devices = int(rng.integers(6, 25))
    pins = {"llm": {"pp": int(rng.integers(1, 4))}} if rng.random() < 0.7 else {}
    task = workload(
        {name: {**spec, "plan": pins.get(name, {})} for name, spec in CHAIN.items()},
        batch=int(rng.choice([12, 24, 30])),
        losses=LOSSES,
        train={"zero": int(rng.integers(0, 2))},
    )
    given = costs_of(rng, devices)
    found: list[tuple[Plan, CostModel]] = []
    for solver in SOLVERS:
        try:
            plan = run_solve(folder, task, given, solver=solver, top=1)
        except InfeasibleError:
            continue
        found.append((plan, CostModel(given, given.cluster, plan.training)))
    return found


def simulated_whole(plan: Plan, costs: CostModel) -> Prediction:
    program = compile_plan(plan)
    return prediction(simulate(program, ProgramCosts(program, costs, plan)), plan)


def excerpt_of(plan: Plan) -> Excerpt | None:
    return excerpt(plan, lower(plan))


@pytest.mark.parametrize("seed", range(12))
def test_predicts_what_simulating_everything_gives(tmp_path: Path, seed: int) -> None:
    for plan, costs in plans(tmp_path, seed):
        expected, got = simulated_whole(plan, costs), predict(plan, costs)
        for name in Prediction.model_fields:
            assert getattr(got, name) == pytest.approx(getattr(expected, name), rel=1e-12), name


@pytest.mark.slow
def test_predicts_what_simulating_everything_gives_often(tmp_path: Path) -> None:
    less = 0
    for seed in range(100, 300):
        for plan, costs in plans(tmp_path, seed):
            expected, got = simulated_whole(plan, costs), predict(plan, costs)
            less += excerpt_of(plan) is not None
            for name in Prediction.model_fields:
                wanted = getattr(expected, name)
                assert getattr(got, name) == pytest.approx(wanted, rel=1e-12), (seed, name)
    assert less > 50


def one_grid(folder: Path, *, devices: int, per_node: int, batch: int) -> Plan:
    """All modules on every device."""
    pins = {"plan": {"tp": 1, "pp": 1, "dp": devices, "microbatch": 1}}
    task = workload({n: {**s, **pins} for n, s in CHAIN.items()}, batch=batch, losses=LOSSES)
    given = profile({n: module_profile() for n in CHAIN}, devices, per_node=per_node)
    return run_solve(folder, task, given, solver="megatron", top=1)


def test_of_equal_parts_two_are_left(tmp_path: Path) -> None:
    found = excerpt_of(one_grid(tmp_path, devices=8, per_node=4, batch=16))
    assert found is not None
    assert [unit.ranks for unit in found.plan.units] == [(((0,),), ((1,),))] * 3
    assert found.plan.tasks["default"].batch == 4
    assert found.twin == dict.fromkeys(range(8), 0)
    assert {loss.ranks for loss in found.plan.losses} == {(0, 1)}


def test_parts_that_hold_less_are_another_kind(tmp_path: Path) -> None:
    # 18 samples on 8 devices: two of them have three.
    found = excerpt_of(one_grid(tmp_path, devices=8, per_node=8, batch=18))
    assert found is not None
    assert [unit.samples for unit in found.plan.units] == [(3, 2)] * 3
    assert found.twin == {0: 0, 1: 0, **dict.fromkeys(range(2, 8), 2)}


def test_parts_that_lie_across_nodes_are_another_kind(tmp_path: Path) -> None:
    pins = {"plan": {"tp": 1, "dp": 4, "microbatch": 1}}
    task = workload({n: {**s, **pins} for n, s in CHAIN.items()}, batch=12, losses=LOSSES)
    given = profile({n: module_profile() for n in CHAIN}, 12, per_node=5)
    plan = run_solve(tmp_path, task, given, solver="megatron-rigid", top=1)
    assert [u.ranks[d][0][0] for d in range(4) for u in plan.units] == list(range(12))
    found = excerpt_of(plan)
    # Ranks 0-2, 3-5, 6-8 and 9-11 on nodes of 5: a cut after two, and one after one.
    assert found is not None
    assert [found.twin[rank] for rank in range(12)] == [0, 1, 2, 3, 4, 5, 0, 1, 2, 9, 10, 11]


def test_a_sync_makes_all_replicas_one_part(tmp_path: Path) -> None:
    task = workload({"a": {}, "b": {}}, batch=16, sync_batch=8)
    given = profile({n: module_profile() for n in ("a", "b")}, 4)
    plan = run_solve(tmp_path, task, given, solver="colocated")
    assert excerpt_of(plan) is None


def test_one_replica_leaves_nothing_out(tmp_path: Path) -> None:
    plan = one_grid(tmp_path, devices=1, per_node=1, batch=3)
    assert excerpt_of(plan) is None
    assert excerpt_of(plan.model_copy(update={"waves": (None,)})) is None
