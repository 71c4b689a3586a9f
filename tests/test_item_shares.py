"""Items of one sample shared out among the ranks of a group."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmlaunch.comm.strict import StrictWorld
from mmlaunch.execute.item_shares import ItemShares
from mmlaunch.measure.memory import kept_bytes
from mmplan.errors import MMPlanError
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Op
from mmplan.proof.row_cuts import ROW_GROUPS, ShapeGroup
from mmplan.proof.rows import hash_graph, hash_row
from mmplan.ragged import Ragged
from mmplan.schema.agreement import plan_differences
from mmplan.schema.faults import plan_faults
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from mmplan.simulation.predict import costs_of
from tests.launching import check_over_gloo
from tests.matrix_models import WIDTH, rows
from tests.programs import UnitSpec, loss, make_plan, trained_as, unit
from tests.proofs import certified, faults_of
from tests.solving import module_profile, profile, run_solve
from tests.solving import workload as planned_workload
from tests.verification import make_workload, verify_in_process, verify_steps

ADAMW = {"optimizer": "AdamW", "optimizer_args": {"lr": 0.01, "weight_decay": 0.1}}


def made(
    units: list[UnitSpec],
    *,
    batch: int = 12,
    items: tuple[str, ...] = ("v",),
    mixes: bool = False,
    recompute: str = "none",
    **train: Any,
) -> tuple[Plan, Workload]:
    """A plan in which some modules' items are shared out, and its workload."""
    losses = [loss("regression", "t", "target")]
    factories = {unit.module: "rows" for unit in units} | {"t": "row_reader"}
    workload = make_workload(
        units,
        losses,
        batch=batch,
        factories=factories,
        args={name: {"mixes": mixes} for name in factories if name != "t"},
        recompute=recompute,
        train={**ADAMW, **train},
    )
    modules = {
        name: spec.model_copy(update={"items": name in items})
        for name, spec in workload.modules.items()
    }
    workload = workload.model_copy(update={"modules": modules})
    plan = trained_as(make_plan(*units, losses=losses, batch=batch), workload)
    shared = tuple(u.model_copy(update={"items": u.module in items}) for u in plan.units)
    return plan.model_copy(update={"units": shared}), workload


def pair(*, same: bool = False, **v: Any) -> list[UnitSpec]:
    """The module whose items are shared out, and one that reads them."""
    degrees: dict[str, Any] = {"tp": 2, "dp": 2, "k": 3, **v}
    first = unit("v", "rows", blocks=max(2, degrees.get("pp", 1)), **degrees)
    if not same:
        return [first, unit("t", "v", "b", blocks=2, k=2)]
    count = degrees["tp"] * degrees["dp"]
    ranks = [[[rank]] for rank in range(count)]
    return [first, unit("t", "v", "b", blocks=2, dp=count, k=3, ranks=ranks)]


CASES: dict[str, tuple[list[UnitSpec], dict[str, Any]]] = {
    "two replicas": (pair(), {"clip_grad_norm": 0.5}),
    "one sample": (pair(tp=4, dp=1, k=12), {}),
    "a pipeline": (pair(pp=2, dp=1, kind="1f1b"), {}),
    "the consumer on the same ranks": (pair(same=True), {"zero": 1}),
    "gradients cut": (pair(dp=2, k=2), {"zero": 2}),
    "weights cut": (pair(dp=1, k=2), {"zero": 3}),
    "recomputed": (pair(), {"recompute": "full"}),
    "split": (pair(dp=1, pp=2, kind="1f1b", split=True), {}),
    "some blocks frozen": (pair(frozen=((0, 1),)), {}),
    "narrow": (pair(), {"precision": "bf16", "zero": 1}),
    "gradients of the input": (
        [unit("w", "rows", blocks=1, k=2), unit("v", "w", blocks=2, tp=3, k=3), *pair()[1:]],
        {},
    ),
    "after cut blocks": (
        [unit("w", "rows", blocks=2, tp=2, k=2), unit("v", "w", blocks=2, tp=2, dp=2), *pair()[1:]],
        {},
    ),
}


# Some of the cases quickly; the rest come with `make test-all`.
_QUICK = ("one sample", "the consumer on the same ranks", "gradients of the input")


@pytest.mark.parametrize(
    "name",
    [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_steps_and_a_reload_equal_one_process(name: str) -> None:
    units, options = CASES[name]
    plan, workload = made(units, **options)
    program = compile_plan(plan)
    assert check_program(program) == []
    assert any(stage.items for stage in program.stages)
    verdict = verify_steps(plan, workload, steps=2)
    assert not verdict.differences, verdict.differences[:5]


def test_each_rank_runs_its_own_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a micro-batch of one sample, and the rules of GPUs are kept."""
    plan, workload = made(pair(tp=4, dp=1, k=12))
    seen: dict[int, list[int]] = defaultdict(list)
    own = ItemShares.own

    def noted(self: ItemShares, arguments: Any) -> Any:
        found: Any = own(self, arguments)
        seen[self.index].append(len(found[0].values))
        return found

    monkeypatch.setattr(ItemShares, "own", noted)
    world = StrictWorld(plan.devices)
    verdict = verify_in_process(plan, workload, world=world)
    assert world.faults == []
    assert not verdict.differences, verdict.differences[:5]
    rows = [sum(counts) for counts in zip(*(seen[rank] for rank in range(4)), strict=True)]
    assert max(rows) == 4
    assert {max(counts) - min(counts) for counts in zip(*seen.values(), strict=True)} <= {0, 1}


@pytest.mark.slow
def test_gradients_and_a_resumed_run_over_gloo(tmp_path: Path) -> None:
    check_over_gloo([made(pair(same=True), zero=1)], tmp_path)


# --- faults ----------------------------------------------------------------------------


def test_blocks_that_mix_the_items_of_a_sample_are_found() -> None:
    verdict = verify_in_process(*made(pair(tp=4, dp=1, k=12), mixes=True))
    assert verdict.differences


@pytest.mark.parametrize("name", ["two replicas", "a pipeline", "after cut blocks"])
def test_a_certificate_is_made_and_one_without_a_rank_is_refused(name: str) -> None:
    units, options = CASES[name]
    plan, _ = made(units, **options)
    certificate = certified(plan)
    assert faults_of(plan, certificate) == []
    total = next(own for own in certificate["graph"]["sums"] if own.get("owner") == "v")
    (part,) = total["parts"]
    part["ranks"] = part["contributors"] = part["ranks"][::2]
    sha256 = hash_graph(certificate["graph"])
    for row in certificate["rows"]:
        row["sha256"] = hash_row(sha256, row["instructions"])
    faults = faults_of(plan, certificate)
    assert any("v[0," in fault for fault in faults), faults[:5]


def test_a_sum_that_leaves_out_a_rank_s_items_is_found() -> None:
    program = compile_plan(made(pair())[0])
    (total,) = (r for r in program.block_reductions if r.owner == "v")
    assert total.ranks == (0, 1, 2, 3)
    fewer = replace(total, ranks=total.ranks[::2], contributors=total.ranks[::2])
    sums = tuple(fewer if r is total else r for r in program.reductions)
    found = check_program(replace(program, reductions=sums))
    assert any("counts 0 times instead of once" in fault for fault in found), found[:5]


def test_only_what_the_workload_says_is_shared_out() -> None:
    plan, workload = made(pair())
    assert plan_faults(plan) == plan_differences(plan, workload) == []
    modules = {**workload.modules, "v": workload.modules["v"].model_copy(update={"items": False})}
    other = workload.model_copy(update={"modules": modules})
    assert plan_differences(plan, other) == [
        "tasks.default.modules.v.items: the plan has true, the workload false"
    ]
    (fault,) = plan_faults(trained_as(plan, other))
    assert fault == "units.v.items: the blocks of v may not treat items apart"


@pytest.mark.parametrize(
    ("factory", "reader", "said"),
    [
        ("ragged", "reader", "its output is not ragged"),
        ("dropout", "row_reader", "block 0 has dropout"),
        ("joined", "row_reader", "rows its blocks made 1"),
    ],
)
def test_modules_that_have_no_items_are_refused(factory: str, reader: str, said: str) -> None:
    plan, workload = made(pair(tp=2, dp=1, k=1), batch=4)
    modules = {
        name: workload.modules[name].model_copy(
            update={"factory": f"tests.matrix_models:{own}", "args": {"blocks": 2}}
        )
        for name, own in (("v", factory), ("t", reader))
    }
    workload = workload.model_copy(update={"modules": modules})
    with pytest.raises(MMPlanError, match=said):
        verify_in_process(trained_as(plan, workload), workload)


# --- seconds and bytes -----------------------------------------------------------------


def test_a_share_takes_its_part_of_the_time_and_of_the_activations() -> None:
    plan, _ = made(pair(tp=2, dp=1, k=12))
    module = module_profile(
        2.0,
        4.0,
        fixed_s=1.0,
        blocks=2,
        parameters=10.0,
        activation_bytes=8.0,
        output_bytes_per_sample=6.0,
    )
    slow = {"latency_s": 0.25, "bandwidth_bytes_per_s": 12.0}
    costs = profile({"v": module, "t": module_profile(blocks=2)}, plan.devices, intra=slow)
    found = costs_of(plan.model_copy(update={"cluster": costs.cluster}), costs)
    (stage,) = (s for s in found.program.stages if s.module == "v")
    gather_s = 0.25 + 6 / 2 / 12
    assert found.alone_s(stage, Op.FORWARD, 1) == pytest.approx(1 + 2 / 2 + gather_s)
    # Of the input no gradient is wanted.
    assert found.alone_s(stage, Op.BACKWARD, 1) == pytest.approx(1 + 4 / 2)
    assert found.activation_bytes(stage, 1) == pytest.approx(8 / 2)
    assert found.static_bytes(0) == found.static_bytes(1) == 10 * 32
    assert [found.reduced_bytes(r) for r in found.program.block_reductions] == [80.0]


def test_a_rank_keeps_the_activations_of_its_share_and_the_whole_output() -> None:
    blocks, group = rows(3), ShapeGroup(index=1, count=4)
    ROW_GROUPS["a group of four"] = group
    values = torch.randn(32, WIDTH)
    given = Ragged(values, torch.tensor([0, 30, 2]))
    held = [*blocks.parameters(), *given]

    def shared() -> Any:
        shares = ItemShares("a group of four", "modules.v")
        (own,) = shares.own([given])
        return shares.whole(blocks(own))

    alone, found = (
        kept_bytes(run, held, torch.device("cpu"), False) for run in (lambda: blocks(given), shared)
    )
    assert found == pytest.approx(alone / 4 + values.nbytes * 3 / 4, rel=0.05)


# --- planning --------------------------------------------------------------------------


def test_auto_shares_out_the_items_of_few_samples(tmp_path: Path) -> None:
    modules: dict[str, Any] = {
        "vision": {"inputs": ["image"], "items": True, "plan": {"pp": 1}},
        "llm": {"inputs": ["vision"], "plan": {"pp": 1}},
    }
    losses = {"lm": {"factory": "m:lm", "inputs": ["llm"]}}
    tp = {1: 1.0, 2: 1.9, 4: 3.6}
    costs = profile(
        {"vision": module_profile(8.0, 16.0), "llm": module_profile(1.0, 2.0, tp=tp)}, 4
    )
    plans: list[Plan] = []
    for items in (True, False):
        modules["vision"]["items"] = items
        job = planned_workload(modules, batch=2, losses=losses)
        plans.append(run_solve(tmp_path, job, costs, solver="auto"))
    shared, alone = plans
    (vision,) = (unit for unit in shared.units if unit.module == "vision")
    assert (vision.items, vision.tp * vision.dp) == (True, 4)
    assert check_program(compile_plan(shared)) == []
    assert not any(unit.items for unit in alone.units)
    # Two devices have one sample each, or four half of one.
    assert shared.predicted.iteration_s < 0.6 * alone.predicted.iteration_s
    assert shared.solver.lower_bound_s is not None
    assert shared.solver.lower_bound_s <= shared.predicted.iteration_s * (1 + 1e-9)
    assert alone.solver.lower_bound_s is not None
    assert shared.predicted.iteration_s < alone.solver.lower_bound_s


def test_rigid_shares_out_the_items_inside_a_tp_group(tmp_path: Path) -> None:
    """At micro-batch 1 one rank of four would run a module that is whole."""
    pins = {"plan": {"microbatch": 1}}
    link = {"latency_s": 0.0, "bandwidth_bytes_per_s": 60.0}
    costs = profile(
        {
            "vision": module_profile(4.0, 8.0, output_bytes_per_sample=6.0),
            "llm": module_profile(1.0, 2.0, tp={4: 4.0}),
        },
        8,
        intra=link,
        inter=link,
    )
    steps: list[float] = []
    for items in (False, True):
        modules: dict[str, Any] = {
            "vision": {"inputs": ["image"], "items": items, **pins},
            "llm": {"inputs": ["vision"], "backbone": True, **pins},
        }
        losses = {"lm": {"factory": "m:lm", "inputs": ["llm"]}}
        job = planned_workload(modules, batch=6, losses=losses)
        plan = run_solve(tmp_path, job, costs, solver="megatron-rigid")
        steps.append(plan.predicted.iteration_s)
        assert check_program(compile_plan(plan)) == []
        vision = plan.units[0]
        shape = vision.items, vision.tp, vision.dp, vision.microbatches
        assert shape == (items, *((4, 1) if items else (1, 1)), ((1,) * 6,))
    # A quarter of 12 s for each sample, and the gather of 6 bytes.
    assert steps[0] == pytest.approx(6 * 12, rel=0.2)
    assert steps[1] == pytest.approx(6 * (12 / 4 + 6 / 60 * 3 / 4), rel=0.2)
