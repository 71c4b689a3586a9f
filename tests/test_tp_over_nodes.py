"""Tensor-parallel groups on several whole nodes, where the cluster lets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from mmlaunch.comm.strict import StrictWorld
from mmlaunch.session.session import _GroupSum
from mmlaunch.session.verify import compare
from mmplan.costs.links import collective_s
from mmplan.costs.program_costs import check_cluster
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.profiling.analytic import analytic_profile
from mmplan.profiling.sums_between_nodes import SumsBetweenNodes
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.proof.rows import hash_graph, hash_row
from mmplan.schema.cluster import Cluster
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload
from mmplan.solvers.cost_table import reduction_s
from mmplan.solvers.placement import place_modules
from tests.gloo_entries import gradients
from tests.launching import launched
from tests.matrix_cases import small_case
from tests.proofs import certified, faults_of
from tests.solving import cluster, module_profile, profile, run_solve, workload
from tests.verification import HERE, verify_in_process

SLOW = {"latency_s": 1e-3, "bandwidth_bytes_per_s": 1e5}


def nodes(tensor_parallel_nodes: int, **options: Any) -> Cluster:
    """Four nodes of two devices."""
    fields = cluster(8, per_node=2, **options)
    return Cluster.model_validate(fields | {"tensor_parallel_nodes": tensor_parallel_nodes})


def test_groups_are_inside_a_node_or_on_whole_nodes() -> None:
    one, two = nodes(1), nodes(2)
    assert [tp for tp in range(1, 9) if two.spans_nodes(tp)] == [4]
    assert not any(map(one.spans_nodes, range(1, 9)))
    groups = [range(2, 4), range(2, 6), range(1, 5), range(0, 8), range(1, 3)]
    assert [two.keeps_together(group) for group in groups] == [True, True, False, False, False]
    assert [one.keeps_together(group) for group in groups] == [True, False, False, False, False]
    shapes = {"a": (1, 1, 2), "b": (1, 1, 4)}
    grids = place_modules(shapes, cluster=two, devices=8)
    assert grids is not None
    assert [grids[name].members for name in "ab"] == [(4, 5), (0, 1, 2, 3)]
    assert place_modules(shapes, cluster=one, devices=8) is None


# --- planning --------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["distmm", "convex", "mpsp", "megatron", "colocated"])
def test_solvers_use_a_degree_over_nodes_where_the_cluster_lets_them(
    solver: str, tmp_path: Path
) -> None:
    modules = {"vision": {"inputs": ["image"]}, "llm": {"inputs": ["vision"]}}
    job = workload(modules, batch=8, losses={"lm": {"factory": "m:lm", "inputs": ["llm"]}})
    tp = {1: 1.0, 2: 1.9, 4: 3.0}
    costs = profile(
        {
            "vision": module_profile(parameters=10.0, tp=tp, blocks=1),
            "llm": module_profile(parameters=100.0, tp=tp, blocks=1),
        },
        8,
        per_node=2,
        memory_bytes=500.0,
    )
    # 16 bytes of each of 100 parameters fit four devices, not two.
    with pytest.raises(InfeasibleError):
        run_solve(tmp_path, job, costs, solver=solver)
    free = costs.model_copy(update={"cluster": nodes(2, memory_bytes=500.0)})
    plan = run_solve(tmp_path, job, free, solver=solver)
    (llm,) = (unit for unit in plan.units if unit.module == "llm")
    assert llm.tp == 4
    assert all(plan.cluster.keeps_together(ranks) for _, _, ranks in llm.grid.groups())
    assert check_program(compile_plan(plan)) == []


@pytest.mark.parametrize(("dp", "pp"), [(1, 2), (2, 1), (2, 2)])
def test_sums_of_gradients_of_groups_over_nodes_share_each_node_with_its_own_ranks(
    dp: int, pp: int
) -> None:
    tp, many = 4, nodes(2, inter=SLOW)
    many = many.model_copy(update={"nodes": 8})
    got = reduction_s(many, tp=tp, pp=pp, dp=dp, num_bytes=1e4, backward_s=7.0)
    firsts = [d * tp * pp for d in range(dp)]
    want = collective_s(many, "all_reduce", firsts, 1e4, sharers=2) if dp > 1 else 0.0
    assert float(got) == pytest.approx(want)


# --- profiles --------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(
        """
import torch
from torch import nn


class MLP(nn.Module):
    tp_plan = {"up": "colwise", "down": "rowwise"}

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(nn.functional.relu(self.up(x)))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"x": torch.zeros(5, 16)}


def stack():
    return nn.Sequential(MLP(), MLP())
"""
    )
    return tmp_path


JOB = {
    "name": "w",
    "batch": 8,
    "modules": {"m": {"factory": "model:stack", "inputs": ["x"]}},
    "losses": {"mean": {"factory": "model:Mean", "inputs": ["m"]}},
    "data": {"factory": "model:Data"},
}


def test_sums_over_nodes_take_the_links_between_them(folder: Path) -> None:
    job, two = Workload.model_validate(JOB), nodes(2, inter=SLOW)
    module = analytic_profile(job, folder, two).modules["m"]
    assert {point.tp for point in module.points} == {1, 2, 4}
    assert {p.tp for p in analytic_profile(job, folder, nodes(1)).modules["m"].points} == {1, 2}
    one_node = two.model_copy(update={"nodes": 1, "devices_per_node": 4})
    inside = analytic_profile(job, folder, one_node).modules["m"]
    # What is measured on one machine, with what the links between nodes take more.
    added = SumsBetweenNodes(job, folder, two).added(inside, "default", "m")
    seconds = {
        name: np.array(
            [[p.forward_s, p.backward_s, p.backward_input_s] for p in own.points if p.tp == 4]
        )
        for name, own in (("over", module), ("inside", inside), ("added", added))
    }
    np.testing.assert_allclose(seconds["added"], seconds["over"])
    for i, point in enumerate(p for p in module.points if p.tp == 4):
        size = point.microbatch * 5 * 16 * 4
        each = [collective_s(c, "all_reduce", range(4), size) for c in (two, one_node)]
        more_s = seconds["over"][i] - seconds["inside"][i]
        np.testing.assert_allclose(more_s, 2 * (each[0] - each[1]), rtol=1e-6)
        assert more_s.min() > 0
    smaller = [p for p in inside.points if p.tp < 4]
    assert [p for p in added.points if p.tp < 4] == smaller


def test_points_of_groups_inside_larger_nodes_are_refused() -> None:
    costs = profile({"m": module_profile(tp={1: 1.0, 4: 3.0})}, 4)
    measured = costs.model_copy(update={"source": "measured"})
    check_cluster(measured, nodes(1))
    check_cluster(measured.model_copy(update={"cluster": nodes(2)}), nodes(2))
    with pytest.raises(InvalidInputError, match="over nodes of 2 devices, profile test is for"):
        check_cluster(measured, nodes(2))
    assert isinstance(costs, Profile)
    check_cluster(costs, nodes(2))


# --- training --------------------------------------------------------------------------

CASE = small_case(tp=2, dp=2, pp=2, k=2, others="same", feature="chain", kind="1f1b", per_node=1)


def test_gradients_of_groups_over_nodes_equal_one_process() -> None:
    plan = CASE.plan()
    groups = [ranks for unit in plan.units for _, _, ranks in unit.grid.groups()]
    assert all(len({plan.cluster.node_of(rank) for rank in group}) == 2 for group in groups)
    assert faults_of(plan, certified(plan)) == []
    world = StrictWorld(plan.devices)
    verdict = verify_in_process(plan, CASE.workload(), world=world)
    assert world.faults == []
    assert not verdict.differences, verdict.differences[:5]


def test_sums_that_stay_on_their_node_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two nodes sums what its own two ranks of a group of four have."""
    case = small_case(tp=4, dp=1, others="same", feature="chain", per_node=2)
    plan = case.plan()
    assert not verify_in_process(plan, case.workload()).differences
    node_of = plan.cluster.node_of

    def on_node(self: Any, tensor: Tensor) -> None:
        own = node_of(self._transport.rank)
        near = tuple(rank for rank in self._ranks if node_of(rank) == own)
        self._transport.all_reduce(tensor, near)

    monkeypatch.setattr(_GroupSum, "all_reduce", on_node)
    differences = verify_in_process(plan, case.workload()).differences
    assert "gradient" in {difference.what for difference in differences}


def test_a_rank_of_another_group_is_seen_by_the_checker() -> None:
    plan = CASE.plan()
    wrong = certified(plan)
    for stage in wrong["graph"]["stages"]:
        first, second = stage["ranks"][:2]
        first[1], second[1] = second[1], first[1]
    for row in wrong["rows"]:
        row["sha256"] = hash_row(hash_graph(wrong["graph"]), row["instructions"])
    assert any("ranks" in fault for fault in faults_of(plan, wrong))


@pytest.mark.slow
def test_gradients_over_gloo(tmp_path: Path) -> None:
    plan, job = CASE.plan(), CASE.workload()
    found = launched(
        gradients,
        ([(plan, job)],),
        num_ranks=plan.devices,
        run_dir=tmp_path / "run",
        timeout_s=90.0,
    )
    verdict = compare(job, HERE, compile_plan(plan), [own[0] for own in found])
    assert not verdict.differences, verdict.differences[:5]
