"""Who updates what: the facts of programs, what is wrong with others, and a runtime on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.session.session import Session
from mmplan.errors import InvalidInputError
from mmplan.program.checks.check import check_program
from mmplan.program.checks.update_faults import update_faults
from mmplan.program.compile import compile_plan
from mmplan.program.lower import lower
from mmplan.program.model import (
    BlockUpdate,
    Graph,
    LossReduction,
    LossUpdate,
    ParameterUpdate,
    Program,
    TieReduction,
    TieUpdate,
)
from mmplan.schema.agreement import check_agrees
from mmplan.schema.faults import plan_faults
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.matrix_cases import Case, small_case
from tests.mixed_tp_cases import MIXED, MixedCase, random_case
from tests.programs import loss, make_plan, trained_as, unit
from tests.test_ties import tied
from tests.training import train_alone, train_planned, worst_difference
from tests.verification import HERE, make_workload, verify_in_process

CLIP = 0.5
TRAIN: dict[str, Any] = {
    "optimizer": "AdamW",
    "optimizer_args": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4},
    "clip_grad_norm": CLIP,
}


def given(case: Case | MixedCase, zero: int = 0, **train: Any) -> tuple[Plan, Workload]:
    """The plan of a case, with its ties and its ZeRO degree, and its workload."""
    workload = case.workload()
    fields = {**TRAIN, "zero": zero, **train}
    workload = workload.model_copy(update={"train": workload.train.model_copy(update=fields)})
    return trained_as(case.plan(), workload), workload


CROWDED = "2 ranks: tp 2 and dp 2"
CASES: dict[str, Case | MixedCase] = {
    "replicas, a loss with parameters": small_case(dp=3, feature="plain"),
    "tp 2 and dp 2": small_case(dp=2, tp=2, feature="regression"),
    "a tie over stages": small_case(dp=2, pp=2, feature="tied"),
    "a tie on one stage": small_case(dp=3, feature="tied"),
    "a tie over tp 2 and tp 1": tied("3 ranks: tp 2 and tp 1"),
    "one owner, two modules": small_case(dp=2, tp=2, feature="shared"),
    "both towers on the same ranks": small_case(dp=2, feature="colocated"),
    "some blocks frozen": small_case(dp=2, tp=2, feature="frozen-range"),
    "groups of 3 and of 2": MIXED["5 ranks: tp 3 and tp 2"],
    "crowded": MIXED[CROWDED],
    "crowded, every rank in other groups": MIXED["4 ranks: tp 4, tp 2 and dp 3"],
    "three tasks of one model": MIXED["one model, other inputs in each task"],
}
EACH = pytest.mark.parametrize("zero", [0, 1])


def faults(graph: Graph, index: int, *changed: ParameterUpdate) -> list[str]:
    """Those of a graph with other updates in place of one."""
    updates = [*graph.updates[:index], *changed, *graph.updates[index + 1 :]]
    return list(update_faults(replace(graph, updates=updates)))


@EACH
@pytest.mark.parametrize("name", CASES)
def test_facts_of_plans_have_no_faults(name: str, zero: int) -> None:
    graph = lower(given(CASES[name], zero)[0])
    assert list(update_faults(graph)) == []
    assert any(update.sharded for update in graph.updates) == bool(zero)


@EACH
def test_facts_of_random_groups_have_no_faults(zero: int) -> None:
    for seed in range(60):
        plan = random_case(seed, crowded=bool(seed % 2)).plan()
        training = plan.training.model_copy(update={"zero": zero})
        graph = lower(plan.model_copy(update={"training": training}))
        assert list(update_faults(graph)) == [], seed


def mutants(
    graph: Graph, update: ParameterUpdate
) -> Iterator[tuple[str, tuple[ParameterUpdate, ...]]]:
    """Changes of one field of an update, each of which makes another training."""
    world = {rank for stage in graph.stages for rank in stage.members}
    ranks, counted = update.ranks, update.counted
    yield "forgotten", ()
    yield "doubled", (update, update)
    yield "of another owner", (replace(update, owner="nobody"),)
    yield "sharded or not", (replace(update, sharded=not update.sharded),)
    for rank in ranks:
        yield f"without rank {rank}", (replace(update, ranks=tuple(r for r in ranks if r != rank)),)
    for rank in sorted(world - {*ranks}):
        more = tuple(sorted((*ranks, rank)))
        yield f"with rank {rank}", (replace(update, ranks=more),)
        yield f"counts rank {rank}", (replace(update, counted=tuple(sorted((*counted, rank)))),)
    for rank in sorted({*ranks} - {*counted}):
        yield f"counts rank {rank}", (replace(update, counted=tuple(sorted((*counted, rank)))),)
    for rank in counted:
        fewer = tuple(r for r in counted if r != rank)
        yield f"does not count rank {rank}", (replace(update, counted=fewer),)
    if isinstance(update, BlockUpdate | TieUpdate):
        first, end = update.shards
        yield "more shards", (replace(update, tp=2 * update.tp),)
        for shards in ((first, end + 1), (first + 1, end + 1), (first, first)):
            yield f"shards {shards}", (replace(update, shards=shards),)
        if update.tp > 1:
            other = "whole" if update.parameters == "cut" else "cut"
            yield f"of {other} parameters", (replace(update, parameters=other),)
    if isinstance(update, BlockUpdate):
        start, stop = update.blocks
        for blocks in ((start, stop + 1), (start + 1, stop), (stop, start)):
            yield f"blocks {blocks}", (replace(update, blocks=blocks),)
    elif isinstance(update, TieUpdate):
        yield "of other blocks", (replace(update, blocks=(*update.blocks, 99)),)


@EACH
@pytest.mark.parametrize("name", CASES)
def test_every_change_of_a_fact_is_a_fault(name: str, zero: int) -> None:
    graph = lower(given(CASES[name], zero)[0])
    tried = 0
    for index, update in enumerate(graph.updates):
        for change, changed in mutants(graph, update):
            tried += 1
            assert faults(graph, index, *changed), f"{update}: {change}"
    assert tried > 20


def test_faults_name_the_place() -> None:
    graph = lower(given(CASES["a tie over stages"])[0])
    index, tie = next((i, u) for i, u in enumerate(graph.updates) if isinstance(u, TieUpdate))
    twice = faults(graph, index, replace(tie, counted=tie.ranks[:2]))
    assert twice == ["what blocks 0 and 2 of v share: counts 2 times in the norm of all gradients"]
    index, own = next((i, u) for i, u in enumerate(graph.updates) if isinstance(u, LossUpdate))
    assert own.ranks == (1, 3, 8, 9)
    assert faults(graph, index, replace(own, ranks=(1, 3, 8))) == [
        "parameters of loss contrastive: no update is for rank 9",
        f"parameters of loss contrastive: update {index} is for rank 1,3,8, whose gradients are "
        "summed over rank 1,3,8-9",
    ]


def test_sums_that_do_not_fit_their_updates_are_faults() -> None:
    graph = lower(given(CASES["a tie over tp 2 and tp 1"])[0])
    ties = [r for r in graph.reductions if isinstance(r, TieReduction)]
    assert {r.blocks for r in ties} == {(0, 2)}
    assert [(r.parameters, r.shards, r.ranks, r.contributors) for r in ties] == [
        ("cut", (0, 1), (0, 2), (0, 2)),
        ("cut", (1, 2), (1, 2), (1, 2)),
        ("whole", (0, 2), (0, 1, 2), (0, 2)),
    ]
    own = next(r for r in graph.reductions if isinstance(r, LossReduction))
    changes = [replace(own, ranks=own.ranks[:-1]), replace(ties[2], contributors=ties[2].ranks)]
    changes += [replace(r, ranks=r.ranks[:-1]) for r in ties]
    changes += [replace(r, contributors=r.contributors[:-1]) for r in ties]
    changes += [replace(r, shards=(0, 1), tp=4) for r in ties[:2]]
    for wrong in changes:
        sums = [wrong if r.index == wrong.index else r for r in graph.reductions]
        assert list(update_faults(replace(graph, reductions=sums))), wrong
    for tie in ties:
        left = [r for r in graph.reductions if r is not tie]
        assert list(update_faults(replace(graph, reductions=left)))
    assert list(update_faults(replace(graph, ties={})))


def divided(program: Program) -> Program:
    """Updates of several blocks as one for each block, and the last holder counts."""
    updates: list[ParameterUpdate] = []
    for update in program.updates:
        last = update.ranks[-1:] if update.counted and not update.sharded else update.counted
        if not isinstance(update, BlockUpdate):
            updates.append(replace(update, counted=last))
            continue
        # Of parts of several sizes a rank counts all or none.
        last = last if update.tp == 1 else update.counted
        updates += [
            replace(update, blocks=(block, block + 1), counted=last)
            for block in range(*update.blocks)
        ]
    return replace(program, updates=tuple(updates))


def test_the_check_of_a_program_holds_its_updates() -> None:
    program = compile_plan(given(CASES["a tie over stages"])[0])
    assert check_program(program) == []
    assert check_program(divided(program)) == []
    wrong = replace(program, updates=program.updates[1:])
    assert any("no update is for rank" in fault for fault in check_program(wrong))


def test_a_tie_is_summed_after_the_backwards_of_all_its_blocks() -> None:
    program = compile_plan(given(CASES["a tie over stages"])[0])
    (tie,) = (r for r in program.reductions if isinstance(r, TieReduction))
    rank = tie.ranks[-1]
    row = [*program.instructions[rank]]
    reduce = next(item for item in row if str(item) == f"REDUCE:{tie.index}")
    early = [reduce, *(item for item in row if item is not reduce)]
    rows = [*program.instructions]
    rows[rank] = tuple(early)
    found = check_program(replace(program, instructions=tuple(rows)))
    assert any("adds to gradients already reduced" in fault for fault in found)


# ---- the runtime ----


def clipped(parameters: dict[str, nn.Parameter]) -> Callable[[int], float | None]:
    """The same in torch's own words."""
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.01, weight_decay=0.1, eps=1e-4)

    def update(_: int) -> float | None:
        norm = nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        optimizer.step()
        return norm.item()

    return update


def train(
    plan: Plan,
    workload: Workload,
    change: Callable[[Program], Program],
    *,
    steps: int = 3,
    after: Callable[[Session], object] = lambda _: None,
) -> Any:
    """Steps of a program whose updates are changed."""
    with patch("mmlaunch.session.session.compile_plan", lambda p: change(compile_plan(p))):
        return train_planned(plan, workload, steps, after=after)


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        ("a tie over tp 2 and tp 1", 1),
        pytest.param("a tie over tp 2 and tp 1", 0, marks=pytest.mark.slow),
        pytest.param("a tie over stages", 1, marks=pytest.mark.slow),
        pytest.param("groups of 3 and of 2", 0, marks=pytest.mark.slow),
        pytest.param("crowded", 0, marks=pytest.mark.slow),
        pytest.param("crowded", 1, marks=pytest.mark.slow),
        pytest.param("a tie on one stage", 0, marks=pytest.mark.slow),
        pytest.param("three tasks of one model", 1, marks=pytest.mark.slow),
    ],
)
def test_three_clipped_steps_equal_one_process(name: str, zero: int) -> None:
    plan, workload = given(CASES[name], zero)
    alone = train_alone(plan, workload, 3, clipped)
    assert max(norm or 0.0 for norm in alone.norms) > CLIP, "nothing was clipped"
    for change in (lambda program: program, divided):
        planned = train(plan, workload, change)
        assert planned.norms == pytest.approx(alone.norms, rel=1e-11)
        assert worst_difference(planned.weights, alone.weights) < 1e-11


def test_the_runtime_counts_and_saves_as_the_program_says(tmp_path: Path) -> None:
    plan, workload = given(CASES["a tie on one stage"])

    def counting_twice(program: Program) -> Program:
        updates = [replace(update, counted=update.ranks) for update in program.updates]
        return replace(program, updates=tuple(updates))

    right = train(plan, workload, lambda program: program, steps=2)
    wrong = train(plan, workload, counting_twice, steps=1)
    assert wrong.norms[0] > 1.1 * right.norms[0]
    # State that another rank saves is as good.
    paths: list[Path] = []
    train(plan, workload, divided, steps=1, after=lambda s: paths.append(s.save(tmp_path)))
    went_on = train_planned(plan, workload, 2, before=lambda s: s.load(paths[0]))
    assert went_on.losses == right.losses[1:]
    assert worst_difference(went_on.weights, right.weights) == 0.0


def test_a_model_with_other_ties_than_the_plan_is_refused() -> None:
    plan, workload = given(CASES["a tie on one stage"])
    ties = plan.tasks["default"].modules["v"].ties
    assert ties == ((0, 2),)

    def refused(*wrong: tuple[int, ...]) -> InvalidInputError:
        modules = plan.tasks["default"].modules
        other = {**modules, "v": modules["v"].model_copy(update={"ties": wrong})}
        task = plan.tasks["default"].model_copy(update={"modules": other})
        with pytest.raises(InvalidInputError) as caught:
            InProcessWorld(plan.devices).run(
                lambda transport: Session(
                    plan=plan.model_copy(update={"tasks": {"default": task}}),
                    workload=workload,
                    folder=HERE,
                    transport=transport,
                )
            )
        assert caught.value.hint == "profile and solve the workload again"
        return caught.value

    assert refused().message == (
        "modules.v: blocks 0 and 2 share v.0.0.weight, the plan has no such tie"
    )
    assert refused((0, 2), (1, 2)).message == (
        "modules.v: the plan says that blocks 1 and 2 share a parameter, in the model they do not"
    )


def test_wrong_ties_of_a_plan_are_named() -> None:
    plan, _ = given(CASES["one owner, two modules"])

    def found(**ties: Any) -> list[str]:
        modules = plan.tasks["default"].modules
        changed = {
            name: module.model_copy(update={"ties": ties.get(name, ())})
            for name, module in modules.items()
        }
        task = plan.tasks["default"].model_copy(update={"modules": changed})
        return plan_faults(plan.model_copy(update={"tasks": {"default": task}}))

    assert found() == []
    last = plan.tasks["default"].modules["v"].blocks - 1
    assert found(v=((0, last),), t=((0, last),)) == []
    (only,) = found(v=((0, last),))
    assert "t.ties: the parameters are those of tasks.default.modules.v.ties" in only
    (wrong,) = found(v=((last, 0),), t=())[:1]
    assert f"v.ties.0: [{last}, 0] are not several of the blocks 0..{last}, ascending" in wrong


def test_a_plan_without_the_workloads_zero_is_refused() -> None:
    units = [unit("v", "a", dp=2)]
    losses = [loss("regression", "v", "target")]
    workload = make_workload(units, losses, batch=8, train={"zero": 1})
    plan = trained_as(make_plan(*units, losses=losses, batch=8), workload)
    check_agrees(plan, workload)
    training = plan.training.model_copy(update={"zero": 0})
    with pytest.raises(InvalidInputError, match=r"training\.zero: the plan has 0, the workload 1"):
        check_agrees(plan.model_copy(update={"training": training}), workload)
    # A solver may use it where the workload does not ask.
    asked = workload.model_copy(update={"train": workload.train.model_copy(update={"zero": 0})})
    check_agrees(plan, asked)
    assert not verify_in_process(plan, workload).differences
