"""Whatever is done to a valid file, reading and using it ends well or in one of our errors."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmplan.errors import MMPlanError
from mmplan.planning.planner import solve
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.schema.base import parse_document, parse_text
from mmplan.schema.cluster import Cluster, load_cluster
from mmplan.schema.faults import plan_faults
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload, resolve_tasks, unused_modules
from tests.birds import copy_workload, given_profile, two_rank_plan

Place = tuple[str | int, ...]

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 10**6, 10**30, 0.5, -0.5, 1e300, -1e300, 1e-30),
    *(float("nan"), float("inf"), "", "sound", "words", "words.1", "x" * 50, "\x00", "batch"),
    *([], [[]], [0], [[0, 1]], [[0]], [[[0]]], [None], {}, {"a": 1}, {"sound": ["words"]}),
]


def places(document: Any, here: Place = ()) -> Iterator[Place]:
    """Every field and every entry of a document, at any depth."""
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for key, value in items:
        yield (*here, key)
        yield from places(value, (*here, key))


def parent_of(document: Any, place: Place) -> Any:
    for key in place[:-1]:
        document = document[key]
    return document


def value_at(document: Any, place: Place) -> Any:
    return parent_of(document, place)[place[-1]]


@st.composite
def mutations(draw: st.DrawFn, original: dict[str, Any]) -> dict[str, Any]:
    """One to three fields dropped, replaced, doubled, swapped or renamed."""
    document = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        every = list(places(document))
        if not every:
            break
        numbers = [p for p in every if type(value_at(document, p)) in (int, float)]
        place = draw(st.sampled_from(every) | st.sampled_from(numbers or every))
        parent, key = parent_of(document, place), place[-1]
        match draw(
            st.sampled_from(["drop", "replace", "scale", "scale", "double", "copy", "rename"])
        ):
            case "drop":
                del parent[key]
            case "scale" if isinstance(parent[key], int | float):
                parent[key] *= draw(st.sampled_from([-1, 0, 2, 3, 0.5]))
            case "double" if isinstance(parent, list):
                index = int(key)
                parent.insert(index, copy.deepcopy(parent[index]))
            case "copy":
                other = draw(st.sampled_from(every))
                parent[key] = copy.deepcopy(parent_of(document, other)[other[-1]])
            case "rename" if isinstance(parent, dict):
                parent[draw(st.sampled_from(["sound", "kind", "losses", "colour"]))] = parent.pop(
                    key
                )
            case _:
                parent[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))
    return document


class Originals:
    """Valid documents, as parsed from their files."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            (root / "plans").mkdir()
            workload = copy_workload(root)
            plan = two_rank_plan(workload, root / "plans" / "plan.json")
            self.workload: Any = parse_text(workload.read_text(), workload)
            self.plan: Any = json.loads(plan.read_text())
            self.profile: Any = json.loads(given_profile(root / "profile.json").read_text())
            self.cluster: Any = load_cluster("p3-8").model_dump(mode="json", exclude_none=True)
        self.workload["tasks"] = {
            "both": {
                "modules": ["sound", "words"],
                "losses": ["match"],
                "inputs": {"words": ["description"]},
                "frozen": {"sound": [[0, 1]]},
            },
            "probe": {"modules": ["sound"], "losses": ["species"], "batch": 8},
        }
        self.profile["tasks"] = {"both": {"words": {"parameters": 700}}}
        self.one_task = {k: v for k, v in self.workload.items() if k != "tasks"}


ORIGINALS = Originals()
QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.data_too_large]
)


def assert_told(error: MMPlanError) -> None:
    """One line for people."""
    assert error.exit_code in (1, 2, 3, 4)
    assert error.message
    assert "\n" not in error.message
    assert "Value error" not in error.message


def read(model: Any, document: Any) -> Any:
    try:
        return parse_document(model, document, source="file")
    except MMPlanError as error:
        assert_told(error)
        return None


@QUICK
@given(mutations(ORIGINALS.workload))
def test_workloads(document: dict[str, Any]) -> None:
    workload = read(Workload, document)
    if workload is not None:
        assert resolve_tasks(workload)
        unused_modules(workload)


@QUICK
@given(mutations(ORIGINALS.cluster))
def test_clusters(document: dict[str, Any]) -> None:
    cluster = read(Cluster, document)
    if cluster is not None:
        assert cluster.num_devices >= 1
        assert cluster.link_between(0, cluster.num_devices - 1).bandwidth_bytes_per_s > 0


@QUICK
@given(mutations(ORIGINALS.plan))
def test_plans(document: dict[str, Any]) -> None:
    """A plan that passes the checks of its fields compiles, or says why not."""
    plan = read(Plan, document)
    if plan is None:
        return
    faults = plan_faults(plan)
    assert all("\n" not in fault for fault in faults)
    if faults or plan.devices > 64 or any(task.batch > 64 for task in plan.tasks.values()):
        return
    try:
        check_program(compile_plan(plan))
    except MMPlanError as error:
        assert_told(error)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mutations")
    for name in ("workload.yaml", "profile.json"):
        (root / name).write_text("any")
    return {
        "workload_path": root / "workload.yaml",
        "profile_path": root / "profile.json",
        "plan_path": root / "plan.json",
    }


@settings(QUICK, max_examples=40)
@given(mutations(ORIGINALS.profile))
def test_profiles(paths: dict[str, Path], document: dict[str, Any]) -> None:
    """A profile whose fields are right is solved, or says why not."""
    solve_told(paths, ORIGINALS.one_task, document)


@settings(QUICK, max_examples=30)
@given(mutations(ORIGINALS.one_task))
def test_workloads_are_solved_or_refused(paths: dict[str, Path], document: dict[str, Any]) -> None:
    solve_told(paths, document, ORIGINALS.profile)


def solve_told(paths: dict[str, Any], job: dict[str, Any], costs: dict[str, Any]) -> None:
    workload, profile = read(Workload, job), read(Profile, costs)
    if workload is None or profile is None:
        return
    if max(task.batch for task in resolve_tasks(workload).values()) > 1000:
        return  # long, and no other case
    try:
        plan = solve(workload, profile=profile, devices=2, top=1, budget_s=0.05, **paths)
    except MMPlanError as error:
        assert_told(error)
    else:
        assert plan_faults(plan) == []
