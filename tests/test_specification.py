"""A program computes what its workload asks for, and a change of what it computes is a fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.program.model import Loss, PerSampleLoss, Program
from mmplan.proof.prove import prove
from mmplan.proof.specification import specification_faults, specify
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.programs import loss, make_plan, plans, unit


def workload_of(plan: Plan) -> Workload:
    """A workload that asks for what a plan's tasks say."""
    modules: dict[str, Any] = {}
    losses: dict[str, Any] = {}
    tasks: dict[str, Any] = {}
    for name, task in plan.tasks.items():
        for module, own in task.modules.items():
            modules[module] = {"factory": "m:f", "inputs": own.inputs, "share": own.share}
        for term, own in task.losses.items():
            losses[term] = {
                "factory": "m:f",
                "inputs": own.inputs,
                "weight": own.weight,
                "cross_sample": own.sync_batch is not None,
                "sync_batch": own.sync_batch,
            }
        tasks[name] = {
            "modules": list(task.modules),
            "losses": list(task.losses),
            "batch": task.batch,
            "weight": task.weight,
            "inputs": {m: own.inputs for m, own in (task.modules | task.losses).items()},
            "frozen": {m: own.frozen for m, own in task.modules.items()},
        }
    return Workload.model_validate(
        {"name": plan.name, "batch": 1, "modules": modules, "losses": losses, "tasks": tasks}
    )


def faults_of(plan: Plan, program: Program) -> list[str]:
    blocks = {n: m.blocks for task in plan.tasks.values() for n, m in task.modules.items()}
    return list(specification_faults(program, specify(workload_of(plan), blocks)))


PLAN = make_plan(
    unit("e", "image", dp=2, k=2, blocks=3, frozen=((0, 1),)),
    unit("a", "e.0", "text", k=4),
    unit("b", "e.1", "a", pp=2, k=2, blocks=4),
    losses=[
        loss("x", "b", "a", "label", weight=0.3),
        loss("y", "a", "b", sync_batch=4),
        loss("z", "e", "b"),
    ],
    batch=8,
)
PROGRAM = compile_plan(PLAN)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_compiled_programs_compute_what_is_asked(plan: Plan) -> None:
    assert faults_of(plan, compile_plan(plan)) == []
    assert not prove(plan, workload_of(plan)).faults


def _stage(index: int, **changes: Any) -> Program:
    stages = list(PROGRAM.stages)
    stages[index] = replace(stages[index], **changes)
    return replace(PROGRAM, stages=tuple(stages))


def _edge(index: int, **changes: Any) -> Program:
    edges = list(PROGRAM.edges)
    edges[index] = replace(edges[index], **changes)
    return replace(PROGRAM, edges=tuple(edges))


def _loss(index: int, **changes: Any) -> Program:
    losses = list(PROGRAM.losses)
    losses[index] = replace(losses[index], **changes)
    return replace(PROGRAM, losses=tuple(losses))


E, A, B0, B1 = range(4)
CHANGES: dict[str, Callable[[], Program]] = {
    "another weight": lambda: _loss(0, weight=Fraction(1)),
    "a mean by replica": lambda: _loss(0, divisor=PROGRAM.losses[0].divisor * 2),
    "another sync batch": lambda: _loss(1, sync_batch=8, divisor=1),
    "a batch that is another": lambda: replace(PROGRAM, batches={"default": 16}),
    "loss inputs swapped": lambda: _loss(1, inputs=PROGRAM.losses[1].inputs[::-1]),
    "a loss input left out": lambda: _loss(1, inputs=PROGRAM.losses[1].inputs[:1]),
    "a loss left out": lambda: replace(PROGRAM, losses=PROGRAM.losses[:2]),
    "another field": lambda: _stage(E, inputs=(replace(PROGRAM.stages[E].inputs[0], field="o"),)),
    "inputs swapped": lambda: _stage(B0, inputs=PROGRAM.stages[B0].inputs[::-1]),
    "another element": lambda: _edge(PROGRAM.stages[A].inputs[0].edge or 0, element=1),
    "a block left out": lambda: _stage(B1, blocks=(3, 4)),
    "a frozen block trained": lambda: _stage(E, trainable=((0, 3),)),
    "a trained block frozen": lambda: _stage(E, trainable=((2, 3),)),
    "a module of another": lambda: _stage(A, owner="b"),
    "a hosted loss forgotten": lambda: _stage(B1, hosted=PROGRAM.stages[B1].hosted[:-1]),
    "a sync forgotten": lambda: _stage(A, syncs=()),
    "no backward": lambda: _stage(E, has_backward=False),
    "no gradient": lambda: _edge(PROGRAM.stages[B0].inputs[0].edge or 0, carries_gradient=False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_program_of_something_else_is_a_fault(change: str) -> None:
    assert check_program(PROGRAM) == faults_of(PLAN, PROGRAM) == []
    found = faults_of(PLAN, CHANGES[change]())
    assert found
    assert all("\n" not in fault for fault in found)


def test_faults_name_the_place_and_both_values() -> None:
    blocks = {n: m.blocks for n, m in PLAN.tasks["default"].modules.items()}
    assert next(iter(faults_of(PLAN, CHANGES["another weight"]()))) == (
        "loss 0 (x): its factor is 1/8, the workload's is 3/10/8"
    )
    assert faults_of(PLAN, CHANGES["a block left out"]())[0] == (
        "loss 0 (x): argument 0 is b[3,4)(b[0,2)(e[1,3)(frozen e[0,1)(image)).1, a[0,1)("
        "e[1,3)(frozen e[0,1)(image)).0, text))), in the workload b[0,4)(e[1,3)(frozen e[0,1)("
        "image)).1, a[0,1)(e[1,3)(frozen e[0,1)(image)).0, text))"
    )
    longer = specification_faults(PROGRAM, specify(workload_of(PLAN), blocks | {"b": 5}))
    assert any("in the workload b[0,5)" in fault for fault in longer)
    tied = specify(workload_of(PLAN), blocks, ties={"b": ((0, 3),), "other": ((0, 1),)})
    assert list(specification_faults(PROGRAM, tied)) == [
        "module b: blocks that share a parameter: [], in its profile [(0, 3)]"
    ]


def test_two_stages_may_swap_the_numbers_that_nobody_sees() -> None:
    """Stages numbered in another order compute the same."""
    order = [B1, B0, A, E]
    number = {old: new for new, old in enumerate(order)}
    stages = tuple(replace(PROGRAM.stages[old], index=new) for new, old in enumerate(order))
    edges = tuple(
        replace(e, producer=number[e.producer], consumer=number[e.consumer]) for e in PROGRAM.edges
    )
    losses: list[Loss] = []
    for item in PROGRAM.losses:
        if isinstance(item, PerSampleLoss):
            losses.append(replace(item, host=number[item.host]))
        else:
            inputs = [
                replace(i, stage=None if i.stage is None else number[i.stage]) for i in item.inputs
            ]
            losses.append(replace(item, inputs=tuple(inputs)))
    assert faults_of(PLAN, replace(PROGRAM, stages=stages, edges=edges, losses=tuple(losses))) == []
