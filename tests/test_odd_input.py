"""Names, numbers and files that nobody means well with: one clear line, and an end in time."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mmplan.errors import MMPlanError
from mmplan.reporting.report_page import write_report
from mmplan.reporting.source import load_source
from mmplan.schema.base import write_text
from tests.birds import copy_workload, edited, given_profile, two_rank_plan
from tests.commands import call, run
from tests.test_schema_mutations import VALUES, parent_of, places

# A reader that does not end would take for ever, one that expands everything all the memory.
SOON_S = 5.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("odd")
    workload = edited(copy_workload(made), "steps: 8", "steps: 2")
    (made / "plans").mkdir()
    given_profile(made / "plans" / "profile.json")
    two_rank_plan(workload, made / "plans" / "plan.json")
    done = run("mmlaunch", "run", made / "plans" / "plan.json", "--run-dir", "run", cwd=made)
    assert done.code == 0, done.err
    return made


# ---- names ----


@pytest.mark.parametrize(
    "name", ["../../../elsewhere", "/tmp/x", "a/b", "a\\b", "..", ".", " ", "a\x00b", "a\x1b[2Jb"]
)
def test_a_name_that_leaves_its_folder_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = json.loads((folder / "plans" / "plan.json").read_text()) | {"name": name}
    path = folder / "plans" / "named.json"
    path.write_text(json.dumps(plan))
    done = call("mmlaunch", "run", path)
    assert done.code == 2
    assert "named.json: name: " in done.message
    assert list(tmp_path.iterdir()) == []
    workload = folder / "birds" / "named.json"
    workload.write_text(json.dumps({"version": 1, "name": name, "batch": 1}))
    assert call("mmplan", "show", workload).code == 2


def test_what_a_terminal_would_obey_is_shown(folder: Path) -> None:
    profile = json.loads((folder / "plans" / "profile.json").read_text())
    profile["name"] = profile["cluster"]["name"] = "\x1b]0;pwned\x07[bold]x[/bold]"
    path = folder / "plans" / "escapes.json"
    path.write_text(json.dumps(profile))
    shown = call("mmplan", "show", path)
    job = folder / "birds" / "workload.yaml", "--profile", path
    solved = call("mmplan", "solve", *job, "-o", path.with_name("solved.json"))
    assert shown.code == solved.code == 0
    said = shown.out + shown.err + solved.out + solved.err
    assert "\x1b" not in said
    assert "\x07" not in said
    assert "\\x1b]0;pwned\\x07[bold]x[/bold]" in said


# ---- documents ----

DOCUMENTS: dict[str, tuple[str, str, str]] = {
    "a number of many digits": ("x.json", '{"version": ' + "1" * 5000 + "}", "digits"),
    "a number of many digits in YAML": ("x.yaml", "version: " + "1" * 5000, "digit"),
    "an alias bomb": (
        "x.yaml",
        "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30)),
        "aliases",
    ),
    "a list that holds itself": ("x.yaml", "a: &a [*a]", "unknown field"),
    "many keys": (
        "x.json",
        "{" + ", ".join(f'"k{i}": 1' for i in range(1_000_000)) + "}",
        "fields and entries are more than such a file can have",
    ),
    "many empty lists": (
        "x.json",
        '{"version": 1, "units": [' + "[]," * 20_000_000 + "[]]}",
        "fields and entries are more than such a file can have",
    ),
    "many wrong modules": (
        "x.json",
        '{"version": 1, "name": "x", "batch": 1, "losses": {}, "modules": {'
        + ", ".join(f'"k{i}": 1' for i in range(150_000))
        + "}}",
        "modules.k0",
    ),
    "many wrong points": (
        "x.json",
        '{"version": 1, "units": [' + ", ".join(["1"] * 900_000) + '], "solver": {}}',
        "more faults",
    ),
    "deep brackets": ("x.yaml", "[" * 100_000, "YAML"),
    "deep brackets in JSON": ("x.json", "[" * 100_000, "nested"),
    "long YAML": ("x.yaml", "".join(f"k{i}: 1\n" for i in range(200_000)), "of YAML"),
    "half a character": ("x.json", '{"version": 1, "name": "\\ud800", "batch": 1}', "name"),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_without_end_is_refused_in_time(tmp_path: Path, name: str) -> None:
    file, text, said = DOCUMENTS[name]
    path = tmp_path / file
    path.write_text(text)
    began = time.process_time()
    done = call("mmplan", "show", path)
    assert time.process_time() - began < SOON_S
    assert done.code == 2
    assert said in done.message
    assert len(done.message) < 500 + len(str(path))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    sparse = tmp_path / "sparse.json"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    for path, said in [
        (tmp_path / "pipe", "is no file"),
        (Path("/dev/zero"), "is no file"),
        (tmp_path, "is a folder"),
        (sparse, "more than such a file can have"),
    ]:
        done = call("mmplan", "show", path)
        assert done.code == 2
        assert said in done.message


def test_the_users_umask_holds(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_text(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


# ---- run folders ----

ODD: list[Any] = [
    *VALUES,
    *("\ud800", "\x1b]0;x\x07", "a/../b", "../" * 30 + "etc", "y" * 5000),
    *(10**5000, 10**400, 1e308, -1e308, [1, 2], {"name": 3}, {"predicted": 1}),
]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_any_run_folder_is_reported_or_refused(folder: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    documents = {
        "run.json": [json.loads((folder / "run" / "run.json").read_text())],
        "trace.json": [json.loads((folder / "run" / "trace.json").read_text())],
        "metrics.jsonl": [
            json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
        ],
    }
    drawn = 0
    for _ in range(6 if seed == 0 else 1000):
        odd = tmp_path / "run"
        shutil.copytree(folder / "run", odd)
        for name, whole in documents.items():
            changed = copy.deepcopy(whole)
            for _ in range(draw.randrange(4)):
                document = draw.choice(changed)
                place = draw.choice(list(places(document)))
                parent_of(document, place)[place[-1]] = copy.deepcopy(draw.choice(ODD))
            (odd / name).write_text("\n".join(map(dumped, changed)) + "\n")
        try:
            write_report(load_source(odd), tmp_path / "report.html")
            drawn += 1
        except MMPlanError:
            pass
        shutil.rmtree(odd)
    assert drawn > 3


def dumped(document: Any) -> str:
    """JSON, whatever the length of its numbers."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(document)
    finally:
        sys.set_int_max_str_digits(before)


def test_a_page_of_a_terminals_escapes_is_written(folder: Path, tmp_path: Path) -> None:
    odd = tmp_path / "run"
    shutil.copytree(folder / "run", odd)
    record = json.loads((odd / "run.json").read_text())
    (odd / "run.json").write_text(
        json.dumps(record | {"plan": "\ud800", "started_at": "\ud800<b>"})
    )
    found = call("mmplan", "report", odd, "-o", tmp_path / "report.html")
    assert found.code == 0, found.err
    assert "<b>" not in (tmp_path / "report.html").read_text()
