"""Blocks that share a parameter: profiles name them, and plans keep their tp degrees together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmplan.errors import InvalidInputError
from mmplan.program.compile import compile_plan
from mmplan.program.ties import check_ties
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload
from tests.mixed_tp_cases import MIXED, MixedCase
from tests.solving import module_profile, profile, run_solve, workload
from tests.verification import verify_in_process

TIED = {"m": [[0, 3]]}


def tied(name: str) -> MixedCase:
    """A case whose module v shares a weight between its first and its last block."""
    case = MIXED[name]
    last = max(u.blocks for u in case.units if u.module == "v")
    units = [
        replace(u, blocks=max(3, last), cuts=None) if u.module == "v" else u for u in case.units
    ]
    return replace(case, units=units, factories={"v": "tied"})


@pytest.mark.parametrize(
    ("name", "can"), [("2 ranks: tp 2 and dp 2", False), ("3 ranks: tp 2 and tp 1", True)]
)
def test_what_is_refused_is_what_the_session_refuses(name: str, can: bool) -> None:
    case = tied(name)
    stages = compile_plan(case.plan()).stages
    blocks = max(stage.blocks[1] for stage in stages if stage.owner == "v")
    ties = {"v": [(0, blocks - 1)]}
    if can:
        check_ties(stages, ties)
        assert not verify_in_process(case.plan(), case.workload()).differences
        return
    with pytest.raises(InvalidInputError, match=rf"modules\.v: blocks 0, {blocks - 1} share a par"):
        check_ties(stages, ties)
    with pytest.raises(InvalidInputError, match="whose gradient units of different tp"):
        verify_in_process(case.plan(), case.workload())
    check_ties(stages, {"w": [(0, 1)]})


def two_tasks() -> Workload:
    losses = {"fit": {"factory": "mmplan.zoo.losses:mse", "inputs": ["m", "y"]}}
    task: dict[str, Any] = {"modules": ["m"], "losses": ["fit"], "batch": 2}
    return workload({"m": {}}, batch=2, losses=losses, tasks={"X": task, "Y": task})


def costs(tie: bool, tps_of_x: dict[int, float]) -> Profile:
    """Module m, which task Y runs with tp 2 only."""
    own = module_profile(tp=tps_of_x, blocks=4)
    only_2 = module_profile(tp={2: 1.9}, blocks=4)["points"]
    given = profile({"m": own | ({"tied_blocks": TIED["m"]} if tie else {})}, 2)
    document = given.model_dump(mode="json") | {"tasks": {"Y": {"m": {"points": only_2}}}}
    return Profile.model_validate(document)


def degrees(plan: Plan) -> set[int]:
    return {unit.tp for unit in plan.units}


def test_planning_avoids_two_degrees_of_tied_blocks(tmp_path: Path) -> None:
    # Alone, task X is faster with tp 1.
    both = {1: 1.0, 2: 1.1}
    assert degrees(run_solve(tmp_path, two_tasks(), costs(False, both))) == {1, 2}
    found = run_solve(tmp_path, two_tasks(), costs(True, both))
    assert degrees(found) == {2}
    assert any("dropped out: modules.m: blocks 0, 3 share" in note for note in found.solver.notes)


def test_planning_refuses_two_degrees_of_tied_blocks(tmp_path: Path) -> None:
    alone = {1: 1.0}
    assert degrees(run_solve(tmp_path, two_tasks(), costs(False, alone))) == {1, 2}
    with pytest.raises(InvalidInputError, match=r"modules\.m: blocks 0, 3 share a para") as refused:
        run_solve(tmp_path, two_tasks(), costs(True, alone))
    assert refused.value.hint == "give all of its units one tp: modules.m.plan: {tp: 1}, say"


@pytest.mark.parametrize("wrong", [[0], [1, 0], [2, 2], [0, 4]])
def test_wrong_ties_of_a_profile_are_refused(wrong: list[int]) -> None:
    with pytest.raises(
        ValueError, match=r"tied_blocks\.0: \[.*\] are not several of the blocks 0..3"
    ):
        profile({"m": module_profile(blocks=4, tied_blocks=[wrong])}, 1)
