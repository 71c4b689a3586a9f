"""Workloads of several tasks, solved, checked, and run against one process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.waves import plain, transfers
from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.planning.candidate_plans import placed_losses, planned_tasks
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Compute, Op
from mmplan.schema.base import save_document
from mmplan.schema.faults import plan_faults
from mmplan.schema.plan import Plan, PlannedTraining
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload, resolve_tasks
from mmplan.simulation.step import simulate
from mmplan.solvers.mpsp.solver import solve_mpsp
from mmplan.solvers.problem import Candidate, Request
from tests.commands import call
from tests.programs import loss, unit
from tests.selection import some
from tests.solving import module_profile, profile, run_solve, workload
from tests.verification import verify_in_process, verify_units

MODELS = "tests.matrix_models"
BUDGET_S = 0.2


def job(modules: Mapping[str, Any], tasks: Mapping[str, Any], **more: Any) -> Workload:
    """Towers by name with their blocks and inputs; each task with a loss of its own."""
    losses: dict[str, Any] = {}
    for name, task in tasks.items():
        kind, *inputs = task["loss"]
        factory = {"contrastive": "Contrastive", "regression": "Regression"}[kind]
        losses[f"{name}_loss"] = {
            "factory": f"{MODELS}:{factory}",
            "inputs": inputs,
            "cross_sample": kind == "contrastive",
            "sync_batch": task.get("sync_batch"),
        }
    return Workload.model_validate(
        {
            "name": "tasks",
            "batch": 24,
            "modules": {
                name: {
                    "factory": f"{MODELS}:tower",
                    "args": {"blocks": blocks},
                    "inputs": inputs,
                    **own[0],
                }
                for name, (blocks, inputs, *own) in (
                    (key, (*value, {}) if len(value) == 2 else value)
                    for key, value in modules.items()
                )
            },
            "losses": losses,
            "tasks": {
                name: {
                    "losses": [f"{name}_loss"],
                    **{k: v for k, v in task.items() if k not in ("loss", "sync_batch")},
                }
                for name, task in tasks.items()
            },
            "data": {"factory": f"{MODELS}:Samples", "args": {"length": 48}},
            "train": {"precision": "fp64", "seed": 3},
            **more,
        }
    )


def costs(
    work: Mapping[str, tuple[float, float, int]],
    devices: int,
    tp: Mapping[int, float] | None = None,
    **more: Any,
) -> Profile:
    """Modules' seconds a sample and blocks."""
    return profile(
        {
            name: module_profile(
                seconds, 2 * seconds, fixed_s=fixed, blocks=blocks, tp=tp or {1: 1.0, 2: 1.7}
            )
            for name, (seconds, fixed, blocks) in work.items()
        },
        devices,
        **more,
    )


# With less, the first larger room has other placements, which lack a little too.
@pytest.mark.parametrize("memory_bytes", [990.0, 964.0])
def test_a_placement_that_a_simulation_finds_room_for_is_planned(
    tmp_path: Path, memory_bytes: float
) -> None:
    """Bytes of placements are an estimate: what lacks a little of the memory may fit."""
    # Of each module seconds forward and backward, blocks, and bytes: of parameters, of
    # activations, outputs and boundaries.
    modules = {
        "a": (2.0, 9.0, 2, 28.0, (59.0, 8.0, 2.0)),
        "b": (5.0, 1.0, 4, 21.0, (36.0, 4.0, 4.0)),
        "c": (4.0, 9.0, 4, 30.0, (41.0, 3.0, 4.0)),
    }
    given = profile(
        {
            name: module_profile(
                forward_s,
                backward_s,
                blocks=blocks,
                parameters=parameters,
                activation_bytes=kept,
                output_bytes_per_sample=output,
                boundary_bytes_per_sample=boundary,
                tp={1: 1.0, 2: 1.2},
            )
            for name, (forward_s, backward_s, blocks, parameters, (kept, output, boundary)) in (
                modules.items()
            )
        },
        4,
        memory_bytes=memory_bytes,
    )
    clip = {"factory": "mmplan.zoo.losses:clip", "cross_sample": True}
    several = workload(
        {name: {} for name in modules},
        batch=8,
        losses={
            "ab": {**clip, "inputs": ["a", "b"]},
            "bc": {**clip, "inputs": ["b", "c"]},
            "own": {"factory": "mmplan.zoo.losses:mse", "inputs": ["c", "y"]},
        },
        tasks={
            "AB": {"modules": ["a", "b"], "losses": ["ab"]},
            "BC": {"modules": ["b", "c"], "losses": ["bc"]},
            "C": {"modules": ["c"], "losses": ["own"], "batch": 4},
        },
    )
    plan = run_solve(tmp_path, several, given, solver="mpsp")
    assert max(plan.predicted.memory_bytes) <= memory_bytes


def shared_encoders() -> Workload:
    """Three contrastive tasks over three encoders, with other batches and sync batches."""
    return job(
        {"v": (6, ["a"]), "t": (4, ["b"]), "u": (3, ["c"])},
        {
            "VT": {"modules": ["v", "t"], "loss": ("contrastive", "v", "t")},
            "UT": {
                "modules": ["u", "t"],
                "loss": ("contrastive", "u", "t"),
                "batch": 16,
                "sync_batch": 8,
            },
            "VU": {"modules": ["v", "u"], "loss": ("contrastive", "v", "u"), "batch": 8},
        },
    )


def shared_encoder_costs(devices: int, **more: Any) -> Profile:
    times = {"v": (3.0, 2.0, 6), "t": (1.0, 0.5, 4), "u": (2.0, 1.0, 3)}
    return costs(times, devices, **more)


def one_llm() -> Workload:
    """VL, AL and VAL over one decoder, which takes other inputs in each."""
    llm = {"loss": ("regression", "l", "target")}
    return job(
        {"v": (3, ["a"]), "u": (2, ["b"]), "l": (5, ["v", "u", "c"])},
        {
            "VL": {"modules": ["v", "l"], "inputs": {"l": ["v", None, "c"]}, **llm},
            "AL": {"modules": ["u", "l"], "inputs": {"l": [None, "u", "c"]}, "batch": 12, **llm},
            "VAL": {"modules": ["v", "u", "l"], "batch": 8, **llm},
        },
    )


def one_llm_costs(devices: int, **more: Any) -> Profile:
    return costs({"v": (1.0, 1.0, 3), "u": (0.7, 0.5, 2), "l": (4.0, 1.0, 5)}, devices, **more)


def check_plan(plan: Plan) -> None:
    """No faults; waves that say what the units say, and use no rank twice at once."""
    assert not plan_faults(plan)
    assert not check_program(compile_plan(plan))
    slices = [item for wave in plan.waves for item in wave.slices]
    assert sorted(item.unit for item in slices) == sorted(unit.name for unit in plan.units)
    for item in slices:
        unit = plan.unit(item.unit)
        assert unit.schedule.kind == "wave"
        assert (item.blocks,) == unit.blocks
        assert item.ranks == unit.all_ranks
        assert item.devices == unit.tp * unit.dp
    for one, other in itertools.combinations(slices, 2):
        if set(one.ranks) & set(other.ranks):
            first, second = sorted((one, other), key=lambda x: x.start_s)
            assert first.start_s + first.duration_s <= second.start_s * (1 + 1e-9)
    assert plan.solver.objective_s >= plan.solver.formula_bound_s * (1 - 1e-9)


def check_equal(plan: Plan, workload: Workload) -> None:
    """Gradients of every parameter on every rank as in one process."""
    verdict = verify_in_process(plan, workload)
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= 1e-10
    # Holding because next to nothing was compared would be no success.
    assert verdict.compared > sum(unit.dp * unit.tp for unit in plan.units)


@pytest.mark.parametrize("method", ["search", "wavefront"])
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_plans_of_shared_encoders(tmp_path: Path, devices: int, method: str) -> None:
    plan = run_solve(
        tmp_path,
        shared_encoders(),
        shared_encoder_costs(devices),
        solver="mpsp",
        method=method,
        budget_s=BUDGET_S,
    )
    check_plan(plan)
    # Free links, nothing to reduce: the program takes what the formula says, or starts some
    # slice earlier.
    assert 0.9 <= plan.predicted.iteration_s / plan.solver.objective_s <= 1 + 1e-6


@pytest.mark.parametrize("work", ["encoders", "llm"])
@pytest.mark.parametrize("devices", [3, 8])
def test_with_free_links_programs_take_no_longer_than_the_formula(work: str, devices: int) -> None:
    """Syncs come between the forwards and the backwards of a round and hold up neither."""
    workload, profiled = {
        "encoders": (shared_encoders(), shared_encoder_costs(devices)),
        "llm": (one_llm(), one_llm_costs(devices)),
    }[work]
    training = PlannedTraining()
    costs_ = CostModel(profiled, profiled.cluster, training)
    request = Request(
        workload=workload,
        tasks=resolve_tasks(workload),
        costs=costs_,
        cluster=profiled.cluster,
        devices=devices,
        budget_s=BUDGET_S,
    )
    found = [solve_mpsp(replace(request, method=name)) for name in ("search", "wavefront")]
    for candidate in (c for solution in found for c in solution.candidates):
        drafted = draft_plan(request, candidate)
        program = compile_plan(drafted)
        simulated_s = simulate(program, ProgramCosts(program, costs_, drafted)).iteration_s
        assert simulated_s <= candidate.objective_s * (1 + 1e-9), candidate.kind


def draft_plan(request: Request, candidate: Candidate) -> Plan:
    nothing = {"path": "x", "sha256": "0"}
    return Plan.model_validate(
        {
            "name": "draft",
            "workload": nothing,
            "profile": nothing,
            "cluster": request.cluster,
            "devices": request.devices,
            "tasks": planned_tasks(request),
            "solver": {
                "name": "mpsp",
                "method": "search",
                "seconds": 0,
                "objective_s": candidate.objective_s,
                "formula_bound_s": 0,
                "formula_gap": 0,
            },
            "units": candidate.units,
            "losses": placed_losses(request, candidate.units),
            "waves": candidate.waves,
            "predicted": {"iteration_s": 0, "samples_per_s": 0},
        }
    )


def test_waves_decide_the_order_on_every_rank(tmp_path: Path) -> None:
    plan = run_solve(
        tmp_path, shared_encoders(), shared_encoder_costs(3), solver="mpsp", budget_s=BUDGET_S
    )
    starts = {item.unit: item.start_s for wave in plan.waves for item in wave.slices}
    program = compile_plan(plan)
    for row in program.instructions:
        computes = [item for item in row if isinstance(item, Compute)]
        units = [program.stages[item.stage].unit for item in computes]
        planned = [starts[name] for name in units]
        forwards = [s for s, item in zip(planned, computes, strict=True) if item.op is Op.FORWARD]
        assert forwards == sorted(forwards)
        assert [c.op for c in computes] == sorted(
            (c.op for c in computes), key=lambda op: op != Op.FORWARD
        )


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_shared_encoders_equal_one_process(tmp_path: Path, devices: int) -> None:
    workload = shared_encoders()
    plan = run_solve(
        tmp_path, workload, shared_encoder_costs(devices), solver="mpsp", budget_s=BUDGET_S
    )
    assert len({unit.task for unit in plan.units}) == 3
    check_equal(plan, workload)


@pytest.mark.parametrize("devices", [2, 4])
def test_one_llm_with_other_inputs_in_each_task(tmp_path: Path, devices: int) -> None:
    workload = one_llm()
    plan = run_solve(tmp_path, workload, one_llm_costs(devices), solver="mpsp", budget_s=BUDGET_S)
    check_plan(plan)
    check_equal(plan, workload)


def test_tp_in_one_slice_and_dp_in_another() -> None:
    """Of one module; a rank may hold slices of both kinds."""
    units = [
        unit("v", "a", name="v.0", tp=2, cuts=[(0, 3)], blocks=6, ranks=[[[0, 1]]], kind="wave"),
        unit("v", "a", name="v.1", dp=3, cuts=[(3, 6)], ranks=[[[1]], [[2]], [[3]]], kind="wave"),
        unit("t", "b", dp=2, ranks=[[[2]], [[3]]], kind="wave"),
    ]
    losses = [loss("contrastive", "v", "t", sync_batch=24)]
    verdict = verify_units(units, losses, batch=24)
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.compared > 8


@pytest.mark.parametrize("devices", [3, 4])
def test_slices_of_a_shared_module_take_several_tp_degrees_where_it_gains(
    tmp_path: Path, devices: int
) -> None:
    """Task B has one costly sample, which only tp divides; A has many cheap ones."""
    workload = job(
        {"t": (2, ["b"])},
        {
            "A": {"modules": ["t"], "loss": ("regression", "t", "target"), "batch": 16},
            "B": {"modules": ["t"], "loss": ("regression", "t", "target"), "batch": 1},
        },
    )
    profiled = costs({"t": (1.0, 0.0, 2)}, devices, tp={1: 1.0, 2: 1.6}).model_dump(
        exclude_none=True
    )
    costly = costs({"t": (12.0, 0.0, 2)}, devices, tp={1: 1.0, 2: 1.6})
    profiled["tasks"] = {"B": {"t": costly.model_dump(exclude_none=True)["modules"]["t"]}}
    plan = run_solve(
        tmp_path, workload, Profile.model_validate(profiled), solver="mpsp", budget_s=BUDGET_S
    )
    check_plan(plan)
    if devices == 4:
        # One degree alone takes 36 (B on one device) or 30 (A at tp 2).
        assert {unit.task: unit.tp for unit in plan.units} == {"A": 1, "B": 2}
        assert plan.predicted.iteration_s == pytest.approx(24.0)
    check_equal(plan, workload)


def test_slices_in_plain_order_are_the_same_schedule(tmp_path: Path) -> None:
    """What the benchmark holds the placement against."""
    slow = {"latency_s": 0.5, "bandwidth_bytes_per_s": 100.0}
    profiled = shared_encoder_costs(8, per_node=4, inter=slow, intra=slow)
    placed = run_solve(
        tmp_path, shared_encoders(), profiled, solver="mpsp", method="wavefront", budget_s=BUDGET_S
    )
    moved = plain(placed)
    check_plan(moved)
    assert min(rank for unit in moved.units for rank in unit.all_ranks) == 0
    for plan in (placed, moved):
        share, step_s = transfers(plan, profiled) or (-1.0, 0.0)
        assert 0 < share < 1
        assert step_s > 0


def test_memory_decides_how_often_the_waves_run(tmp_path: Path) -> None:
    """All forwards come before all backwards: where that is too much, the batches are cut."""
    workload = one_llm()
    modules = {
        name: module_profile(1.0, 2.0, blocks=blocks, activation_bytes=100.0, parameters=10.0)
        for name, blocks in (("v", 3), ("u", 2), ("l", 5))
    }
    free = run_solve(tmp_path, workload, profile(modules, 2), solver="mpsp", budget_s=BUDGET_S)
    tight_bytes = 0.4 * max(free.predicted.memory_bytes)
    tight = run_solve(
        tmp_path,
        workload,
        profile(modules, 2, memory_bytes=tight_bytes),
        solver="mpsp",
        budget_s=BUDGET_S,
    )
    check_plan(tight)
    assert max(tight.predicted.memory_bytes) <= tight_bytes
    assert any("times a step" in note for note in tight.solver.notes)
    check_equal(tight, workload)


@pytest.mark.parametrize("devices", some([2, 4], 1))
def test_a_module_that_no_device_holds_is_divided_among_groups(
    tmp_path: Path, devices: int
) -> None:
    """Every task's slices pass from group to group, micro-batch by micro-batch."""
    workload = one_llm()
    modules = {
        name: module_profile(1.0, 2.0, blocks=blocks, parameters=size, activation_bytes=0.1)
        for name, blocks, size in (("v", 3, 0.5), ("u", 2, 0.5), ("l", 5, 10.0))
    }
    # fp64: 32 bytes a parameter, 320 of l alone.
    plan = run_solve(
        tmp_path,
        workload,
        profile(modules, devices, memory_bytes=250.0),
        solver="mpsp",
        budget_s=BUDGET_S,
    )
    check_plan(plan)
    assert max(plan.predicted.memory_bytes) <= 250.0
    where: dict[int, set[int]] = {}
    for own in plan.units:
        if own.module == "l":
            for block in range(*own.blocks[0]):
                where.setdefault(block, set()).update(own.all_ranks)
    # One place for each block, whichever task runs it.
    assert len({tuple(sorted(ranks)) for ranks in where.values()}) > 1
    assert all(len(ranks) <= devices // 2 for ranks in where.values())
    check_equal(plan, workload)


def test_no_memory_is_infeasible_and_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError, match=r"a device lacks [0-9.]+ k?B at best"):
        run_solve(
            tmp_path,
            shared_encoders(),
            profile(
                {
                    name: module_profile(blocks=blocks, parameters=1000.0)
                    for name, blocks in (("v", 6), ("t", 4), ("u", 3))
                },
                2,
                memory_bytes=100.0,
            ),
            solver="mpsp",
            budget_s=0.1,
        )


def test_one_task_is_planned_no_worse_than_by_distmm(tmp_path: Path) -> None:
    workload = Workload.model_validate(
        shared_encoders().model_dump()
        | {"tasks": {"VT": {"modules": ["v", "t"], "losses": ["VT_loss"]}}}
    )
    for devices in (2, 3, 8):
        profiled = shared_encoder_costs(devices)
        ours = run_solve(tmp_path, workload, profiled, solver="mpsp", budget_s=BUDGET_S)
        theirs = run_solve(tmp_path, workload, profiled, solver="distmm")
        assert ours.predicted.iteration_s <= theirs.predicted.iteration_s * (1 + 1e-9)


def test_one_task_whose_module_must_be_a_pipeline_is_planned_by_distmm(tmp_path: Path) -> None:
    document = shared_encoders().model_dump()
    document["tasks"] = {"VT": {"modules": ["v", "t"], "losses": ["VT_loss"]}}
    document["modules"]["t"]["plan"] = {"pp": 2}
    workload, profiled = Workload.model_validate(document), shared_encoder_costs(4)
    ours = run_solve(tmp_path, workload, profiled, solver="mpsp", budget_s=BUDGET_S)
    theirs = run_solve(tmp_path, workload, profiled, solver="distmm")
    assert ours.solver.name == "mpsp"
    assert ours.unit("t").pp == 2
    assert ours.predicted.iteration_s == pytest.approx(theirs.predicted.iteration_s)
    with pytest.raises(InfeasibleError, match="no degrees that its plan and profile allow"):
        run_solve(tmp_path, workload, profiled, solver="mpsp", method="wavefront")


def test_auto_plans_several_tasks(tmp_path: Path) -> None:
    plan = run_solve(tmp_path, shared_encoders(), shared_encoder_costs(3), budget_s=BUDGET_S)
    assert plan.solver.name == "mpsp"
    check_plan(plan)


def test_some_of_the_tasks(tmp_path: Path) -> None:
    plan = run_solve(
        tmp_path,
        shared_encoders(),
        shared_encoder_costs(3),
        solver="mpsp",
        tasks=["UT", "VU"],
        budget_s=BUDGET_S,
    )
    assert list(plan.tasks) == ["UT", "VU"]
    check_plan(plan)


def test_tp_groups_stay_inside_nodes(tmp_path: Path) -> None:
    profiled = shared_encoder_costs(8, tp={2: 1.0, 4: 1.8}, per_node=4)
    plan = run_solve(tmp_path, shared_encoders(), profiled, solver="mpsp", budget_s=BUDGET_S)
    check_plan(plan)
    for own in plan.units:
        for replica in own.ranks:
            assert len({rank // 4 for rank in replica[0]}) == 1


def test_waves_that_contradict_the_units_are_faults(tmp_path: Path) -> None:
    plan = run_solve(
        tmp_path, shared_encoders(), shared_encoder_costs(2), solver="mpsp", budget_s=0.1
    )
    first = plan.waves[0].slices[0]
    for changes, fault in (
        ({"unit": "x"}, "waves: there is no unit 'x'"),
        ({"unit": plan.waves[-1].slices[-1].unit}, "stands there 2 times"),
        ({"blocks": (0, 99)}, "blocks [0, 99], the unit runs"),
        ({"ranks": (7,)}, "ranks [7]; the unit's are"),
        ({"devices": 9}, "9 devices, ranks"),
    ):
        slices = (first.model_copy(update=changes), *plan.waves[0].slices[1:])
        waves = (plan.waves[0].model_copy(update={"slices": slices}), *plan.waves[1:])
        found = plan_faults(plan.model_copy(update={"waves": waves}))
        assert any(fault in line for line in found), (fault, found)


def test_pins_that_leave_no_degrees_are_one_line(tmp_path: Path) -> None:
    document = shared_encoders().model_dump()
    document["modules"]["t"]["plan"] = {"pp": 2}
    with pytest.raises(InfeasibleError, match=r"VT\.t: no degrees that its plan and profile allow"):
        run_solve(
            tmp_path, Workload.model_validate(document), shared_encoder_costs(4), solver="mpsp"
        )


def test_an_unknown_method_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="--method fast: mpsp knows search and wavefront"):
        run_solve(
            tmp_path, shared_encoders(), shared_encoder_costs(2), solver="mpsp", method="fast"
        )


def test_a_shared_module_without_a_common_tp_is_refused(tmp_path: Path) -> None:
    profiled = shared_encoder_costs(4, tp={1: 1.0}).model_dump(exclude_none=True)
    other = shared_encoder_costs(4, tp={2: 1.0}).model_dump(exclude_none=True)
    profiled["tasks"] = {"UT": {"t": other["modules"]["t"]}}
    with pytest.raises(InfeasibleError, match="module t: the tasks that share it allow no tp"):
        run_solve(tmp_path, shared_encoders(), Profile.model_validate(profiled), solver="mpsp")


def test_show_draws_the_levels(tmp_path: Path) -> None:
    save_document(one_llm(), tmp_path / "w.json")
    done = call("mmplan", "show", tmp_path / "w.json")
    assert done.code == 0
    rows = [line.split() for line in done.out.splitlines()]
    assert ["1", "VAL.l", "8", "VAL.v,", "VAL.u", "VL.l,", "AL.l"] in rows
    assert ["0", "VL.v", "24", "-", "VAL.v"] in rows
