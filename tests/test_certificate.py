"""Certificates: made of plans of many kinds, refused after any change, compared at a run."""

from __future__ import annotations

import ast
import copy
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.comm.transport import Transport
from mmlaunch.run import run as runs
from mmlaunch.run.options import RunOptions
from mmlaunch.session.session import Session
from mmplan.errors import MMPlanError, RunFailedError
from mmplan.program.compile import compile_plan
from mmplan.proof import checker
from mmplan.proof.certificate import certificate_path, rank_hashes, write_certificate
from mmplan.proof.checker import check_certificate
from mmplan.proof.rows import hash_graph, hash_row, row_hash
from mmplan.schema.load import load_plan
from mmplan.schema.plan import Plan
from mmplan.schema.workload import load_workload
from tests.birds import copy_workload, edited, two_rank_plan
from tests.commands import ROOT, call, run
from tests.mixed_tp_cases import MIXED
from tests.programs import loss, make_plan, plans, unit
from tests.proofs import Json, certified, faults_of, plan_document, workload_of
from tests.test_check import PLANS

CLIP = loss("clip", "v", "t", sync_batch=8)


def _kinds() -> dict[str, Plan]:
    found = dict(PLANS)
    found |= {name: case.plan() for name, case in MIXED.items()}
    found["replicas that do the same"] = make_plan(
        unit("v", dp=4, k=2, tp=2),
        unit("llm", "v", "tokens", dp=2, tp=4, pp=2, k=4, kind="1f1b"),
        losses=[loss("lm", "llm", "labels")],
        batch=16,
        devices=25,
    )
    found["a group that feeds one rank"] = make_plan(
        unit("llm", "tokens", dp=2, tp=4, k=2, kind="1f1b", split=True),
        unit("image", "llm.1", dp=2, k=2, kind="1f1b"),
        losses=[loss("lm", "llm.0", "labels"), loss("pixels", "image", "target", weight=0.3)],
        batch=8,
        task_weights={"default": 0.7},
    )
    # Rank 0 sends itself outputs of a and of b, and takes them in another order.
    both: list[list[list[int]]] = [[[0]], [[1]]]
    found["messages of a rank to itself"] = make_plan(
        unit("a", "x", kind="1f1b", ranks=both[:1]),
        unit("b", "a", k=2, kind="1f1b", ranks=both[:1]),
        unit("c", "b", k=2, dp=2, kind="1f1b", ranks=both),
        losses=[loss("lm", "c", "labels")],
        batch=16,
    )
    # From rank 1 to rank 0 go gradients of v and of a: they are taken in another order than sent.
    first, second = both[:1], both[1:]
    found["messages of two streams"] = make_plan(
        unit("v", dp=2, kind="1f1b", ranks=both),
        unit("w", "v", kind="1f1b", ranks=second),
        unit("a", kind="1f1b", ranks=first),
        unit("l", "w", "a", dp=2, kind="1f1b", ranks=both),
        unit("m", "l", kind="1f1b", ranks=first),
        losses=[loss("lm", "m", "labels")],
        batch=4,
    )
    found["contrastive with frozen blocks"] = make_plan(
        unit("v", pp=2, k=4, frozen=((0, 1),)), unit("t", dp=2, k=2), losses=[CLIP], batch=16
    )
    return found


KINDS = _kinds()


@cache
def _certificate(name: str) -> str:
    return json.dumps(certified(KINDS[name]))


def _check_all_rows(plan: Plan, certificate: Json) -> None:
    assert faults_of(plan, certificate) == []
    program = compile_plan(plan)
    for rank, own in enumerate(certificate["ranks"]):
        if own is None:
            assert program.instructions[rank] == ()
        else:
            row = certificate["rows"][certificate["classes"][own]["row"]]
            assert row["sha256"] == row_hash(program, rank), rank


@pytest.mark.parametrize("name", KINDS)
def test_every_rank_executes_the_row_that_was_proven(name: str) -> None:
    _check_all_rows(KINDS[name], json.loads(_certificate(name)))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_any_plan_is_certified(plan: Plan) -> None:
    _check_all_rows(plan, certified(plan))


def test_ranks_that_do_the_same_have_one_row() -> None:
    made = json.loads(_certificate("replicas that do the same"))
    # Two stages of the language model, and two ranks of the encoder's groups that feed it; of the
    # model's groups one rank receives for all. 24 ranks work and one idles.
    assert (len(made["rows"]), len(made["classes"])) == (4, 5)
    assert made["ranks"][24] is None


# ---- changed certificates ----


def _row(number: int, change: Callable[[list[str]], list[str]]) -> Callable[[Json], None]:
    """A row changed, with a hash that is right for it."""

    def edit(made: Json) -> None:
        row = made["rows"][number]
        row["instructions"] = " ".join(change(row["instructions"].split(" ")))
        row["sha256"] = hash_row(hash_graph(made["graph"]), row["instructions"])

    return edit


def _graph(change: Callable[[Json], object]) -> Callable[[Json], None]:
    """The graph changed, with hashes that are right for it."""

    def edit(made: Json) -> None:
        change(made["graph"])
        for row in made["rows"]:
            row["sha256"] = hash_row(hash_graph(made["graph"]), row["instructions"])

    return edit


def _first(tokens: list[str], op: str) -> int:
    return next(n for n, token in enumerate(tokens) if token.startswith(f"{op}:"))


def _swap(one: str, other: str) -> Callable[[list[str]], list[str]]:
    def change(tokens: list[str]) -> list[str]:
        a, b = _first(tokens, one), _first(tokens, other)
        tokens[a], tokens[b] = tokens[b], tokens[a]
        return tokens

    return change


def _without(op: str) -> Callable[[list[str]], list[str]]:
    return lambda tokens: [t for n, t in enumerate(tokens) if n != _first(tokens, op)]


def _with_op(made: Json, op: str) -> int:
    return next(n for n, row in enumerate(made["rows"]) if f" {op}:" in f" {row['instructions']}")


def _in_row_with(op: str, change: Callable[[list[str]], list[str]]) -> Callable[[Json], None]:
    return lambda made: _row(_with_op(made, op), change)(made)


def _other_samples(tokens: list[str]) -> list[str]:
    position = _first(tokens, "RECV_F")
    *start, low, high = tokens[position].split(".")
    tokens[position] = ".".join([*start, str(int(low) + 1), str(int(high) + 1)])
    return tokens


def _fall(made: Json) -> None:
    own = made["classes"][0]
    levels = own["levels"].split(" ")
    own["levels"] = " ".join([levels[1], levels[0], *levels[2:]])


def _rise(made: Json) -> None:
    """One class alone on other levels than those with which it exchanges."""
    own = made["classes"][0]
    own["levels"] = " ".join(str(int(level) + 1000) for level in own["levels"].split(" "))


def _merge_classes(made: Json) -> None:
    made["ranks"] = [None if own is None else 0 for own in made["ranks"]]


def _exchange_first(made: Json) -> None:
    working = [n for n, own in enumerate(made["ranks"]) if own is not None]
    a = working[0]
    b = next(n for n in working if made["ranks"][n] != made["ranks"][a])
    made["ranks"][a], made["ranks"][b] = made["ranks"][b], made["ranks"][a]


def _no_shards(graph: Json) -> None:
    """A sum of cut parameters over several ranks that sums nothing of them."""
    parts = [
        part for own in graph["sums"] if own.get("parameters") != "whole" for part in own["parts"]
    ]
    next(part for part in parts if len(part["ranks"]) > 1 and "shards" in part)["shards"] = [0, 0]


CHANGES: dict[str, Callable[[Json], None]] = {
    "term": _graph(lambda graph: graph["stages"][0].update(inputs=["field:other"])),
    "term of an edge": _graph(lambda graph: graph["edges"][0].update(term="t.7")),
    "blocks": _graph(lambda graph: graph["stages"][0].update(blocks=[0, 2])),
    "frozen": _graph(lambda graph: graph["stages"][0].update(trained=[])),
    "owner": _graph(lambda graph: graph["stages"][0].update(owner="other")),
    "ranks of a stage": _graph(lambda graph: graph["stages"][0]["ranks"].reverse()),
    "samples": _graph(lambda graph: next(iter(graph["microbatches"].values()))[0].reverse()),
    "weight": _graph(lambda graph: graph["losses"][0].update(weight=3.0)),
    "inputs of a loss": _graph(lambda graph: graph["losses"][0]["inputs"].reverse()),
    "sync batch": _graph(lambda graph: graph["losses"][0].update(sync_batch=4)),
    "no gradient": _graph(lambda graph: graph["edges"][0].update(gradient=False)),
    "a sum less": _graph(lambda graph: graph["sums"].pop()),
    "a rank less in a sum": _graph(lambda graph: graph["sums"][0]["parts"][0]["ranks"].pop()),
    "a rank twice in a sum": _graph(
        lambda graph: graph["sums"][0]["parts"][0]["ranks"].append(
            graph["sums"][0]["parts"][0]["ranks"][0]
        )
    ),
    "a contributor less": _graph(lambda graph: graph["sums"][0]["parts"][0]["contributors"].pop()),
    "shards": _graph(_no_shards),
    "interval": _in_row_with("RECV_F", _other_samples),
    "forward left out": _in_row_with("F", _without("F")),
    "forward twice": _in_row_with("F", lambda tokens: [tokens[_first(tokens, "F")], *tokens]),
    "receive left out": _in_row_with("RECV_F", _without("RECV_F")),
    "send left out": _in_row_with("SEND_F", _without("SEND_F")),
    "sum left out": _in_row_with("REDUCE", _without("REDUCE")),
    "start left out": _in_row_with("SYNC_START", _without("SYNC_START")),
    "count left out": _in_row_with("COUNT", _without("COUNT")),
    "no step": _in_row_with("F", lambda tokens: tokens[:-1]),
    "backward before forward": _in_row_with("B", _swap("F", "B")),
    "sum before backward": _in_row_with("REDUCE", _swap("B", "REDUCE")),
    "wait before start": _in_row_with("SYNC_WAIT", _swap("SYNC_START", "SYNC_WAIT")),
    "send before forward": _in_row_with("SEND_F", _swap("F", "SEND_F")),
    "levels that fall": _fall,
    "levels of one class alone": _rise,
    "one class for all": _merge_classes,
    "ranks of other classes": _exchange_first,
    "representative": lambda made: made["classes"][0].update(
        representative=made["classes"][-1]["representative"]
    ),
    "idle": lambda made: made["ranks"].__setitem__(0, None),
    "row": lambda made: made["rows"][0].update(instructions="STEP"),
    "hash of a row": lambda made: made["rows"][0].update(sha256="0" * 64),
    "hash of the plan": lambda made: made.update(plan_sha256="0" * 64),
    "version": lambda made: made.update(version=2),
    "specification": lambda made: made["specification"]["tasks"].clear(),
    "nothing": lambda made: made.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_certificate_is_refused(change: str) -> None:
    tried = 0
    for name, plan in KINDS.items():
        made = json.loads(_certificate(name))
        before = copy.deepcopy(made)
        try:
            CHANGES[change](made)
        except (StopIteration, IndexError, KeyError):
            continue  # this plan has nothing of the kind
        if made != before:
            tried += 1
            assert faults_of(plan, made), name
    assert tried


def test_receives_in_another_order_are_refused() -> None:
    """Without tags the n-th receive takes what was sent n-th."""
    plan = KINDS["two towers, tp and dp"]
    made = json.loads(_certificate("two towers, tp and dp"))
    number = _with_op(made, "RECV_B")
    tokens = made["rows"][number]["instructions"].split(" ")
    a, b = [n for n, token in enumerate(tokens) if token.startswith("RECV_B")][:2]
    # Both are posted before the computes that need them, the later one first.
    tokens[a], tokens[a:a] = tokens[a], [tokens.pop(b)]
    _row(number, lambda _: tokens)(made)
    assert any("another order" in fault for fault in faults_of(plan, made))


# ---- other plans and workloads ----


def _changed(document: Json, *path: str | int, value: object) -> Json:
    changed = copy.deepcopy(document)
    place: Any = changed
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return changed


TASK = ("tasks", "default")
PLAN_EDITS: dict[str, tuple[str | int, ...]] = {
    "frozen tower": (*TASK, "modules", "t", "frozen"),
    "loss weight": (*TASK, "losses", "clip", "weight"),
    "task weight": (*TASK, "weight"),
    "vision with vision": (*TASK, "losses", "clip", "inputs"),
    "swapped inputs": (*TASK, "losses", "clip", "inputs"),
    "sync batch": (*TASK, "losses", "clip", "sync_batch"),
    "ranks": ("units", 1, "ranks"),
    "samples": ("units", 1, "microbatches"),
    "schedule": ("units", 0, "schedule", "kind"),
}
VALUES: dict[str, object] = {
    "frozen tower": True,
    "loss weight": 3.0,
    "task weight": 0.5,
    "vision with vision": ["v", "v"],
    "swapped inputs": ["t", "v"],
    "sync batch": 16,
    "ranks": [[[3]], [[2]]],
    "samples": [[1, 3], [2, 2]],
    "schedule": "gpipe",
}
TRAINS_THE_SAME = {"ranks", "samples", "schedule"}


@pytest.mark.parametrize("edit", PLAN_EDITS)
def test_an_edited_plan_is_not_proven(edit: str) -> None:
    plan = KINDS["contrastive with frozen blocks"]
    workload, document = workload_of(plan), plan_document(plan)
    made = json.loads(_certificate("contrastive with frozen blocks"))
    changed = _changed(document, *PLAN_EDITS[edit], value=VALUES[edit])
    assert [f.split(":")[0] for f in check_certificate(workload, changed, made)] == ["plan_sha256"]
    # A certificate of the edited plan itself: it proves what the workload does not say.
    if edit == "vision with vision":
        changed["losses"][0]["ranks"] = changed["units"][0]["ranks"][0][1]
    again = certified(Plan.model_validate(changed), workload)
    assert bool(check_certificate(workload, changed, again)) == (edit not in TRAINS_THE_SAME)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("losses", "clip", "weight"), 2.0),
        (("losses", "clip", "inputs"), ["t", "v"]),
        (("tasks", "default", "inputs", "clip"), ["t", "v"]),
        (("tasks", "default", "frozen", "v"), []),
        (("tasks", "default", "batch"), 32),
        (("modules", "v", "args"), {"width": 8}),
        (("modules", "v", "factory"), "f:other"),
    ],
)
def test_another_workload_is_refused(path: tuple[str, ...], value: object) -> None:
    plan = KINDS["contrastive with frozen blocks"]
    made = json.loads(_certificate("contrastive with frozen blocks"))
    workload = workload_of(plan)
    changed = _changed(workload, *path, value=value)
    found = check_certificate(changed, plan_document(plan), made)
    # The task's own inputs go before the loss's.
    assert bool(found) == (path != ("losses", "clip", "inputs"))
    assert check_certificate(workload | {"train": {"lr": 1}}, plan_document(plan), made) == []


def test_blocks_are_the_profiles() -> None:
    plan = KINDS["contrastive with frozen blocks"]
    made = json.loads(_certificate("contrastive with frozen blocks"))
    profile = {"modules": {"v": {"blocks": 2}, "t": {"blocks": 1}}}
    arguments = workload_of(plan), plan_document(plan), made
    assert check_certificate(*arguments, profile) == []
    profile["modules"]["t"]["blocks"] = 2
    assert "t does not run its 2 blocks" in check_certificate(*arguments, profile)[0]


# ---- the checker is independent ----


def _lines_of_code(text: str) -> Iterator[int]:
    """Lines with a token that is no comment; docstrings aside."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    documents: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            documents |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped and token.start[0] not in documents and token.string:
            yield from range(token.start[0], token.end[0] + 1)


def test_the_checker_imports_a_yaml_reader_and_nothing_of_the_project() -> None:
    text = Path(checker.__file__).read_text()
    modules = {
        name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else ["." * node.level + (node.module or "")]
        )
    }
    assert {name.split(".")[0] for name in modules} <= {*sys.stdlib_module_names, "ruamel"}
    assert len(set(_lines_of_code(text))) < 460


# ---- at a run ----


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    (tmp_path / "plans").mkdir()
    return two_rank_plan(copy_workload(tmp_path), tmp_path / "plans" / "plan.json")


def test_check_writes_the_certificate_and_the_checker_accepts_it(plan_path: Path) -> None:
    elsewhere = plan_path.parent / "other.json"
    assert call("mmplan", "check", plan_path, "--certificate", elsewhere).code == 0
    assert not certificate_path(plan_path).exists()
    assert call("mmplan", "check", plan_path).code == 0
    proof = certificate_path(plan_path)
    assert proof.name == "plan.proof.json"
    assert proof.read_text() == elsewhere.read_text()
    workload = plan_path.parent.parent / "birds" / "workload.yaml"
    start = [sys.executable, "-m", "mmplan.proof.checker", workload, plan_path]
    done = subprocess.run([*start, proof], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    proof.write_text(proof.read_text().replace("field:kind", "field:spectrogram"))
    done = subprocess.run([*start, proof], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "field:kind" in done.stderr


def test_a_run_refuses_a_certificate_that_does_not_hold(plan_path: Path) -> None:
    workload = plan_path.parent.parent / "birds" / "workload.yaml"
    proof = write_certificate(plan_path, workload)
    whole = json.loads(proof.read_text())
    for change in (
        CHANGES["weight"],
        CHANGES["hash of the plan"],
        CHANGES["levels that fall"],
        CHANGES["nothing"],
    ):
        edited = copy.deepcopy(whole)
        change(edited)
        proof.write_text(json.dumps(edited))
        done = call("mmlaunch", "run", plan_path, "--run-dir", plan_path.parent / "run")
        assert done.code == 2
        assert str(proof) in done.message
        assert f"mmplan check {plan_path}" in done.err
    # It is of another plan.
    proof.write_text(json.dumps(whole))
    document = json.loads(plan_path.read_text())
    document["units"][0]["schedule"]["kind"] = "gpipe"
    plan_path.write_text(json.dumps(document))
    done = call("mmlaunch", "run", plan_path, "--run-dir", plan_path.parent / "run")
    assert done.code == 2
    assert "plan_sha256" in done.message


def test_a_plan_that_the_run_made_itself_is_proven_anew(plan_path: Path) -> None:
    workload = plan_path.parent.parent / "birds" / "workload.yaml"
    proof = certificate_path(plan_path)
    expected = rank_hashes(plan_path, workload)
    assert not proof.exists()
    # It was left by an earlier start of the run, which planned otherwise.
    proof.write_text("{}")
    assert rank_hashes(plan_path, workload, is_own=True) == expected
    assert rank_hashes(plan_path, workload) == expected


def test_a_plan_that_cannot_be_proven_gets_no_certificate(plan_path: Path) -> None:
    workload = plan_path.parent.parent / "birds" / "workload.yaml"
    edited(workload, "weight: 0.5", "weight: 0.25")
    with pytest.raises(RunFailedError, match=r"losses\.1\.weight: is 0\.5 and should be 0\.25"):
        write_certificate(plan_path, workload)
    assert not certificate_path(plan_path).exists()


def test_a_rank_that_would_execute_another_row_is_refused(plan_path: Path) -> None:
    workload = plan_path.parent.parent / "birds" / "workload.yaml"
    plan, job = load_plan(plan_path), load_workload(workload)
    hashes = rank_hashes(plan_path, workload)

    def session(transport: Transport, order: int) -> None:
        own = hashes[::order][transport.rank]
        made = Session(
            plan=plan, workload=job, folder=workload.parent, transport=transport, row_sha256=own
        )
        made.close()

    InProcessWorld(2).run(lambda transport: session(transport, 1))
    with pytest.raises(RunFailedError, match=r"rank \d would execute another row"):
        InProcessWorld(2).run(lambda transport: session(transport, -1))


@pytest.mark.slow
def test_every_rank_of_a_run_compares_its_row(
    plan_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = plan_path.parent.parent / "birds" / "workload.yaml"
    write_certificate(plan_path, workload)
    folder = plan_path.parent
    done = run("mmlaunch", "run", plan_path, "--run-dir", folder / "a", "--steps", 2, cwd=folder)
    assert done.code == 0, done.err
    options = RunOptions(plan=plan_path, run_dir=folder / "b", steps=2, max_restarts=0)
    swapped = rank_hashes(plan_path, workload)[::-1]
    monkeypatch.setattr(runs, "rank_hashes", lambda *_, **__: swapped)
    with pytest.raises(MMPlanError) as caught:
        runs.run(
            options, runs.prepare(options), lambda event: None, lambda *_: load_plan(plan_path)
        )
    assert re.search(r"rank \d would execute another row", caught.value.message)


def test_what_blocks_share_is_summed_over_its_holders_once() -> None:
    plan = make_plan(
        unit("v", dp=2, pp=2, blocks=4, tp=2),
        unit("t", dp=2),
        losses=[loss("c", "v", "t", sync_batch=8)],
        batch=8,
    )
    tasks = plan.tasks["default"]
    module = tasks.modules["v"].model_copy(update={"ties": ((0, 3),)})
    task = tasks.model_copy(update={"modules": {**tasks.modules, "v": module}})
    tied = plan.model_copy(update={"tasks": {"default": task}})
    certificate = certified(tied)
    assert faults_of(tied, certificate) == []
    sums = [own for own in certificate["graph"]["sums"] if "tie" in own]
    assert [(own["tie"], own["blocks"], len(own["parts"])) for own in sums] == [("v", [0, 3], 2)]
    found = json.loads(json.dumps(certificate))
    for own in found["graph"]["sums"]:
        if "tie" in own:
            own["parts"][0]["ranks"].pop()
    for row in found["rows"]:
        row["sha256"] = hash_row(hash_graph(found["graph"]), row["instructions"])
    assert any("[0, 3]" in fault for fault in faults_of(tied, found))
