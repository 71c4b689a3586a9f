"""Parts of a plan that do the same are simulated once: nothing changes but the time it takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.program.compile import compile_plan
from mmplan.program.lower import lower
from mmplan.program.model import Stage, replica_pairs
from mmplan.program.samples import intersect, number_samples
from mmplan.program.symmetry_classes import Quotient, find_quotient
from mmplan.schema.plan import Plan, Prediction
from mmplan.schema.profile import Profile
from mmplan.simulation.step import prediction, simulate
from mmplan.simulation.symmetry import predict
from tests.selection import some
from tests.solving import module_profile, profile, run_solve, workload

LOSS_POINTS = {"points": [{"samples": 1, "forward_s": 0.25, "backward_s": 0.5}]}
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
# Tasks over a, b and c: contrastive ones, chains, one loss of every sample and one of a pair.
PAIR = {"factory": "mmplan.zoo.losses:clip", "cross_sample": True}
TASK_LOSSES = {
    "ab": {**PAIR, "inputs": ["a", "b"]},
    "bc": {**PAIR, "inputs": ["b", "c"]},
    "fit": {"factory": "mmplan.zoo.losses:mse", "inputs": ["c", "y"]},
}
TASKS = {
    "AB": {"modules": ["a", "b"], "losses": ["ab"]},
    "C": {"modules": ["c"], "losses": ["fit"]},
    "BC": {"modules": ["b", "c"], "losses": ["bc"]},
    "AC": {"modules": ["a", "c"], "losses": ["fit"], "inputs": {"c": ["a"]}},
    "ABC": {"modules": ["a", "b", "c"], "losses": ["ab", "bc"], "inputs": {"c": ["a", "b"]}},
    "both": {"modules": ["a", "b", "c"], "losses": ["ab", "fit"], "inputs": {"c": ["b"]}},
}
TASK_SOLVERS = (
    *("mpsp", "megatron", "deepspeed", "spindle-seq", "spindle-optimus", "distmm-mt"),
    *("distmm", "colocated"),
)


def costs_of(
    rng: np.random.Generator, devices: int, names: Iterable[str] = tuple(CHAIN)
) -> Profile:
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
        for name in names
    }
    given = profile(
        modules,
        devices,
        per_node=int(rng.choice([2, 4, 8])),
        memory_bytes=float(rng.choice([900, 2000, 1e9])),
        inter={"latency_s": 0.25, "bandwidth_bytes_per_s": 16.0},
        intra={"latency_s": 0.0, "bandwidth_bytes_per_s": 64.0},
        losses={"text": LOSS_POINTS, "ab": LOSS_POINTS},
    )
    size = float(rng.choice([0.0, 7.0]))  # what costs no memory lets groups be folded
    device = given.cluster.device.model_copy(update={"communicator_bytes": size})
    adapter = 6.0 if rng.integers(2) else None
    links = given.cluster.links.model_copy(update={"adapter_bytes_per_s": adapter})
    cluster = given.cluster.model_copy(update={"device": device, "links": links})
    return given.model_copy(update={"cluster": cluster})


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


def plans_of_tasks(folder: Path, seed: int) -> list[tuple[Plan, CostModel]]:
    """What solvers make of random tasks over shared modules, with syncs, in turn or in waves."""
    rng = np.random.default_rng(seed)
    devices = int(rng.integers(2, 21))
    chosen = [str(name) for name in rng.permutation(list(TASKS))[: rng.integers(1, 4)]]
    batches = {name: int(rng.choice([8, 16, 24])) for name in chosen}
    losses = {
        name: {**spec, "sync_batch": int(rng.choice([4, 8])) if rng.random() < 0.5 else None}
        if spec.get("cross_sample")
        else spec
        for name, spec in TASK_LOSSES.items()
    }
    pins = [
        {"tp": 2} if rng.random() < 0.2 else {"microbatch": 1} if rng.random() < 0.3 else {}
        for _ in "abc"
    ]
    task = workload(
        {name: {"plan": pin} for name, pin in zip("abc", pins, strict=True)},
        batch=24,
        losses=losses,
        tasks={name: {**TASKS[name], "batch": batches[name]} for name in chosen},
        train={"zero": int(rng.integers(0, 2))},
    )
    given = costs_of(rng, devices, "abc")
    found: list[tuple[Plan, CostModel]] = []
    for solver in TASK_SOLVERS:
        try:
            plan = run_solve(folder, task, given, solver=solver, top=1, budget_s=0.05)
        except (InfeasibleError, InvalidInputError):
            continue
        found.append((plan, CostModel(given, given.cluster, plan.training)))
    return found


def simulated_whole(plan: Plan, costs: CostModel) -> Prediction:
    program = compile_plan(plan)
    return prediction(simulate(program, ProgramCosts(program, costs, plan)), plan)


def quotient_of(plan: Plan) -> Quotient | None:
    return find_quotient(plan, lower(plan))


def of_first_ranks(plan: Plan, memory_bytes: Sequence[float]) -> list[float]:
    """What is said of a group is what its first rank holds: the others have fewer messages."""
    found = quotient_of(plan)
    if found is None or not found.merges_tp:
        return list(memory_bytes)
    first = {
        r: group[0] for unit in plan.units for _, _, group in unit.grid.groups() for r in group
    }
    wanted = [memory_bytes[first.get(rank, rank)] for rank in range(plan.devices)]
    pairs = zip(memory_bytes, wanted, strict=True)
    assert all(own <= most * (1 + 1e-12) for own, most in pairs)
    return wanted


def check_predictions(found: Sequence[tuple[Plan, CostModel]]) -> int:
    """Everything that a prediction says; how many plans were not simulated whole."""
    for plan, costs in found:
        expected, got = simulated_whole(plan, costs), predict(plan, costs)
        for name in Prediction.model_fields:
            wanted = getattr(expected, name)
            if name == "memory_bytes":
                wanted = of_first_ranks(plan, wanted)
            assert getattr(got, name) == pytest.approx(wanted, rel=1e-12), (plan.solver.name, name)
    return sum(quotient_of(plan) is not None for plan, _ in found)


@pytest.mark.parametrize("seed", some(range(8), 0, 3, 5, 6))
def test_predicts_what_simulating_everything_gives(tmp_path: Path, seed: int) -> None:
    check_predictions(plans(tmp_path, seed))


@pytest.mark.parametrize("seed", some(range(4), 0, 2))
def test_predicts_what_simulating_all_tasks_gives(tmp_path: Path, seed: int) -> None:
    check_predictions(plans_of_tasks(tmp_path, seed))


@pytest.mark.slow
@pytest.mark.parametrize("make", [plans, plans_of_tasks])
@pytest.mark.parametrize("first", [100, 150, 200])
def test_predicts_what_simulating_everything_gives_often(
    tmp_path: Path, make: Callable[[Path, int], list[tuple[Plan, CostModel]]], first: int
) -> None:
    less = sum(check_predictions(make(tmp_path, seed)) for seed in range(first, first + 50))
    assert less > 15


def one_grid(folder: Path, *, devices: int, per_node: int, batch: int) -> Plan:
    """All modules on every device."""
    pins = {"plan": {"tp": 1, "pp": 1, "dp": devices, "microbatch": 1}}
    task = workload({n: {**s, **pins} for n, s in CHAIN.items()}, batch=batch, losses=LOSSES)
    given = profile({n: module_profile() for n in CHAIN}, devices, per_node=per_node)
    return run_solve(folder, task, given, solver="megatron", top=1)


def ranks_kept(found: Quotient) -> list[tuple[tuple[int, ...], ...]]:
    """``[dp][tp]`` of every stage."""
    return [stage.ranks for stage in found.graph.stages]


def test_of_equal_parts_one_is_left(tmp_path: Path) -> None:
    found = quotient_of(one_grid(tmp_path, devices=8, per_node=4, batch=16))
    assert found is not None
    assert ranks_kept(found) == [((0,),)] * 3
    assert found.representative == dict.fromkeys(range(8), 0)
    assert {loss.ranks for loss in found.graph.losses} == {(0,)}
    assert {reduction.ranks for reduction in found.graph.reductions} == {(0,)}


def test_parts_that_hold_less_are_another_kind(tmp_path: Path) -> None:
    # 18 samples on 8 devices: two of them have three.
    found = quotient_of(one_grid(tmp_path, devices=8, per_node=8, batch=18))
    assert found is not None
    assert ranks_kept(found) == [((0,), (2,))] * 3
    assert [len(own) for own in found.graph.stages[0].microbatches] == [3, 2]
    assert found.representative == {0: 0, 1: 0, **dict.fromkeys(range(2, 8), 2)}


def test_parts_that_lie_across_nodes_are_another_kind(tmp_path: Path) -> None:
    pins = {"plan": {"tp": 1, "dp": 4, "microbatch": 1}}
    task = workload({n: {**s, **pins} for n, s in CHAIN.items()}, batch=12, losses=LOSSES)
    given = profile({n: module_profile() for n in CHAIN}, 12, per_node=5)
    plan = run_solve(tmp_path, task, given, solver="megatron-rigid", top=1)
    assert [u.ranks[d][0][0] for d in range(4) for u in plan.units] == list(range(12))
    found = quotient_of(plan)
    # Ranks 0-2, 3-5, 6-8 and 9-11 on nodes of 5: a cut after two, and one after one.
    assert found is not None
    assert [found.representative[rank] for rank in range(12)] == [
        0,
        1,
        2,
        3,
        4,
        5,
        0,
        1,
        2,
        9,
        10,
        11,
    ]


@pytest.mark.parametrize(("sync_batch", "kinds"), [(8, 1), (4, 1), (2, 2)])
def test_replicas_meet_in_syncs(tmp_path: Path, sync_batch: int, kinds: int) -> None:
    """With another loss of two samples half of the replicas are in the first of its syncs."""
    pair = {"factory": "mmplan.zoo.losses:clip", "inputs": ["a", "b"], "cross_sample": True}
    losses = {"all": {**pair, "sync_batch": 8}, "some": {**pair, "sync_batch": sync_batch}}
    pins = {"plan": {"tp": 1, "dp": 4, "microbatch": 1}}
    task = workload({"a": pins, "b": pins}, batch=16, losses=losses)
    given = profile({n: module_profile() for n in ("a", "b")}, 4)
    found = quotient_of(run_solve(tmp_path, task, given, solver="colocated", top=1))
    assert found is not None
    assert len(set(found.representative.values())) == kinds


def test_one_replica_leaves_nothing_out(tmp_path: Path) -> None:
    assert quotient_of(one_grid(tmp_path, devices=1, per_node=1, batch=3)) is None


def test_replicas_are_paired_whose_samples_meet(tmp_path: Path) -> None:
    """In any round, also where a round of one stage is longer than one of the other."""
    job = workload(
        {"a": {}, "b": {"inputs": ["a"]}},
        batch=24,
        losses={"loss": {"factory": "mmplan.zoo.losses:mse", "inputs": ["b", "y"]}},
    )
    plan = run_solve(tmp_path, job, profile({n: module_profile() for n in "ab"}, 2))
    stage = lower(plan).stages[0]
    rng = random.Random(0)

    def drawn(unit: str) -> Stage:
        round_samples = rng.choice([4, 6, 12, 24])
        sizes: list[list[int]] = [[] for _ in range(rng.randint(1, 4))]
        while round_samples:
            size = rng.randint(1, round_samples)
            rng.choice(sizes).append(size)
            round_samples -= size
        filled = [own for own in sizes if own]
        return replace(
            stage,
            unit=unit,
            ranks=tuple((d,) for d in range(len(filled))),
            microbatches=number_samples(filled, 24),
            rounds=tuple(map(len, filled)),
        )

    for _ in range(200):
        one, other = drawn("a"), drawn("b")
        assert replica_pairs(one, other) == {
            (d, d2)
            for d, spans in enumerate(one.microbatches)
            for d2, others in enumerate(other.microbatches)
            if any(intersect(a, b) for a in spans for b in others)
        }
