"""Costs and memory of modules that several tasks share, under several tp degrees."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.execute.blocks import StageBlocks
from mmlaunch.session.reference import Reference
from mmlaunch.session.session import Session
from mmplan.costs.program_costs import CostModel, ProgramCosts
from mmplan.profiling.analytic import analytic_profile
from mmplan.program.compile import compile_plan
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from mmplan.simulation.step import simulate
from tests.mixed_tp_cases import MIXED
from tests.programs import loss, make_cluster, make_plan, trained_as, unit
from tests.solving import module_profile, profile
from tests.test_held_bytes import Accountant
from tests.verification import HERE

TP_3_AND_2 = "5 ranks: tp 3 and tp 2"


def test_costs_of_the_parts_by_hand() -> None:
    plan = (
        MIXED[TP_3_AND_2]
        .plan()
        .model_copy(
            update={"training": MIXED[TP_3_AND_2].plan().training.model_copy(update={"zero": 1})}
        )
    )
    bandwidth = 1000.0
    given = profile(
        {
            name: module_profile(blocks=blocks, parameters=600.0, tp={1: 1.0, 2: 1.0, 3: 1.0})
            for name, blocks in (("v", 2), ("t", 1), ("u", 1))
        },
        5,
        intra={"latency_s": 0.25, "bandwidth_bytes_per_s": bandwidth},
    )
    program = compile_plan(plan)
    costs = ProgramCosts(program, CostModel(given, training=plan.training), plan)
    mine = [r for r in program.block_reductions if r.owner == "v"]
    assert [costs.reduced_bytes(r) for r in mine] == [800.0, 400.0, 400.0, 800.0, 0.0]
    # Two ranks, half of the bytes each way; two sums may share the link.
    one = next(r for r in mine if r.parameters == "cut")
    alone = costs.costs.all_reduce_s(ranks=one.ranks, num_bytes=800.0, sharers=2)
    assert costs.reduce_s(one) == alone
    assert costs.reduce_s(mine[-1]) == costs.costs.all_reduce_s(ranks=(0, 1, 2, 3, 4), num_bytes=0)
    # Every part has two holders, so that half of Adam's state is left to each.
    assert costs.static_bytes(1) == pytest.approx(200 * (4 + 4 + 8 / 2))
    assert costs.static_bytes(3) == pytest.approx(300 * (4 + 4 + 8 / 2) + 0)


def test_a_rank_that_runs_two_shards_of_a_block_is_charged_all_of_it() -> None:
    plan = MIXED["2 ranks: tp 2 and dp 2"].plan()
    given = profile(
        {
            name: module_profile(blocks=blocks, parameters=600.0, tp={1: 1.0, 2: 1.0})
            for name, blocks in (("v", 2), ("t", 1), ("u", 1))
        },
        2,
    )
    costs = ProgramCosts(compile_plan(plan), CostModel(given), plan)
    assert [costs.static_bytes(rank) for rank in (0, 1)] == [2 * 600 * 16, 2 * 600 * 16]
    (one,) = (r for r in costs.program.reductions if r.owner == "v")
    assert costs.reduced_bytes(one) == 600 * 4


BATCHES = {"A": 32, "B": 16}


def _towers() -> tuple[Plan, Workload]:
    """Two tasks over two towers: vision cut on ranks 0 and 1 in A, whole on rank 3 in B."""
    units = [
        unit("vision", "image", task="A", blocks=2, tp=2, ranks=[[[0, 1]]], k=2, kind="wave"),
        unit("text", "tokens", task="A", blocks=2, cuts=[(0, 1)], ranks=[[[2]]], kind="wave"),
        unit(
            "text",
            "tokens",
            name="A.text.1",
            task="A",
            blocks=2,
            cuts=[(1, 2)],
            dp=2,
            ranks=[[[2]], [[4]]],
            kind="wave",
        ),
        unit("vision", "image", task="B", blocks=2, ranks=[[[3]]], kind="wave"),
        unit("text", "tokens", task="B", blocks=2, ranks=[[[2]]], k=2, kind="wave"),
    ]
    losses = [
        loss("one", "vision", "text", sync_batch=32, task="A"),
        loss("two", "vision", "text", sync_batch=16, task="B"),
    ]
    clip = {
        "factory": "mmplan.zoo.losses:clip",
        "inputs": ["vision", "text"],
        "cross_sample": True,
    }
    workload = Workload.model_validate(
        {
            "name": "towers",
            "batch": 32,
            "modules": {
                "vision": {
                    "factory": "mmplan.zoo.towers:vision",
                    "args": {"blocks": 2, "width": 64},
                    "inputs": ["image"],
                },
                "text": {
                    "factory": "mmplan.zoo.towers:text",
                    "args": {"blocks": 2, "width": 48},
                    "inputs": ["tokens"],
                },
            },
            "losses": {"one": clip, "two": clip},
            "tasks": {
                name: {"modules": ["vision", "text"], "losses": [term], "batch": BATCHES[name]}
                for name, term in (("A", "one"), ("B", "two"))
            },
            "data": {"factory": "mmplan.zoo.digits:captioned"},
            "train": {"optimizer": "AdamW"},
        }
    )
    return make_plan(*units, losses=losses, batch=BATCHES), workload


def _parameter_bytes(session: Session) -> float:
    """Weights, their gradients and what AdamW keeps of each."""
    weights = sum(p.nbytes for _, p in session.model.named_parameters())
    state = session.optimizer.state if session.optimizer is not None else {}
    kept = sum(
        value.nbytes for values in state.values() for key, value in values.items() if key != "step"
    )
    # All of them train, so a backward holds a gradient of each.
    return 2 * weights + kept


@pytest.mark.slow
def test_a_rank_holds_what_is_predicted_and_nothing_that_it_does_not_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, workload = _towers()
    program = compile_plan(plan)
    accountant = Accountant(StageBlocks.run)
    monkeypatch.setattr(StageBlocks, "run", lambda *args: accountant(*args))

    def entry(transport: Any) -> tuple[dict[str, int], float]:
        session = Session(
            plan=trained_as(plan, workload), workload=workload, folder=HERE, transport=transport
        )
        session.step()
        names = {
            name: p.numel()
            for name, p in session.model.named_parameters()
            if not name.startswith("losses.")
        }
        return names, _parameter_bytes(session) + accountant.ledgers[threading.get_ident()].most

    found = InProcessWorld(plan.devices).run(entry)
    whole = Reference(workload=workload, folder=HERE, program=program).named_parameters()
    numbers = {
        owner: {n: p.numel() for n, p in whole.items() if n.split(".")[0] == owner}
        for owner in ("vision", "text")
    }
    cut = {n for n in numbers["vision"] if found[0][0][n] < numbers["vision"][n]}
    assert sum(numbers["vision"][n] for n in cut) > 0.8 * sum(numbers["vision"].values())
    halves = {n: size // 2 if n in cut else size for n, size in numbers["vision"].items()}
    last = {n: size for n, size in numbers["text"].items() if n.startswith("text.1.")}
    held = [names for names, _ in found]
    assert held == [halves, halves, numbers["text"], numbers["vision"], last]

    costs = CostModel(
        analytic_profile(workload, HERE, make_cluster(5, devices_per_node=2)),
        training=plan.training,
    )
    predicted = simulate(program, ProgramCosts(program, costs, plan)).peak_bytes
    for rank, (_, measured) in enumerate(found):
        assert measured == pytest.approx(predicted[rank], rel=0.1), rank
