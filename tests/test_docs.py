"""The pages: the reference is what the code says, commands parse, links lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

import cli
from tests.commands import ROOT, call
from tests.test_schemas import generator

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
APPS = {"mmplan": cli.mmplan_app, "mmlaunch": cli.mmlaunch_app}
# Named where the README says what is not there yet.
NOT_YET = {"data"}


@cache
def commands(program: str) -> dict[str, Any]:
    group: Any = typer.main.get_command(APPS[program])
    return group.commands


def test_golden_reference() -> None:
    assert (ROOT / "docs" / "reference.md").read_text() == generator().reference_text()


def spans(text: str) -> list[str]:
    """Commands as the page shows them: lines of code, and code inside sentences."""
    joined = text.replace("\\\n", " ")
    lines = re.findall(r"^(?:\$ |    )?((?:mmplan|mmlaunch) [a-z].*)$", joined, flags=re.MULTILINE)
    inline = re.findall(r"`((?:mmplan|mmlaunch) [^`\n]+)`", joined)
    return [part.strip() for line in lines + inline for part in line.split(";")]


def words(span: str) -> list[str]:
    return shlex.split(span.partition(" #")[0].replace("'", ""))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_named_on_a_page_exist(page: Path) -> None:
    for span in spans(page.read_text(encoding="utf-8")):
        program, name, *rest = words(span)
        if program not in APPS or name in NOT_YET or not re.fullmatch(r"[a-z]+", name):
            continue
        assert name in commands(program), span
        # What a job script hands on is for mmlaunch run.
        cut = rest.index("--") if "--" in rest else len(rest)
        for command, said in ((name, rest[:cut]), ("run", rest[cut:])):
            params = commands(program)[command].params if said else []
            known = {option for param in params for option in param.opts} | {"-h", "--help"}
            named = {word.partition("=")[0] for word in said if re.match(r"--?[a-z]", word)}
            assert named <= known, span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_to_type_parse_and_their_examples_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^\$ ((?:mmplan|mmlaunch) .*)$", text, flags=re.MULTILINE):
        program, name, *rest = words(line)
        if "[OPTIONS]" in rest or "..." in rest:
            continue
        commands(program)[name].make_context(name, rest)
        files = [word for word in rest if word.startswith("examples/")]
        assert all((ROOT / file).is_file() for file in files), line


@cache
def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {generator().anchor(title) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), target


@cache
def definitions(file: Path) -> set[str]:
    """Names that a module defines: ``name``, and ``Class.name`` of a class's members."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for item in body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + item.name)
                if isinstance(item, ast.ClassDef):
                    visit(item.body, f"{prefix}{item.name}.")
            targets = item.targets if isinstance(item, ast.Assign) else []
            targets = [item.target] if isinstance(item, ast.AnnAssign) else targets
            names = (name for target in targets for name in ast.walk(target))
            found.update(prefix + name.id for name in names if isinstance(name, ast.Name))

    visit(ast.parse(file.read_text(encoding="utf-8")).body, "")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_named_on_a_page_exists(page: Path) -> None:
    """Paths as ``folder/file.py``, what a module defines as ``folder/file.py::Class.name``."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    folders = "benchmarks|docs|examples|mmlaunch|mmplan|profiles|tests"
    for path, name in re.findall(rf"`((?:{folders})/[\w./-]*)(?:::([\w.]+))?`", text):
        file = ROOT / path
        assert file.exists(), path
        assert not name or name in definitions(file), f"{path}::{name}"


def examples() -> list[tuple[str, dict[str, str]]]:
    """Complete examples: under each heading the files that stand behind their names."""
    found: list[tuple[str, dict[str, str]]] = []
    for page in PAGES:
        for section in re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
            files = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", section, re.S | re.M))
            if "workload.yaml" in files:
                found.append((f"{page.name}: {section.partition(chr(10))[0]}", files))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("title", "files"), examples(), ids=[title for title, _ in examples()])
def test_examples_of_the_pages_plan_and_verify(
    title: str, files: dict[str, str], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    workload, profile, plan = (tmp_path / n for n in ("workload.yaml", "profile.json", "plan.json"))
    asked = ("--analytic", "--cluster", "cpu-3", "-o", profile)
    assert call("mmplan", "profile", workload, *asked).code == 0, title
    assert call("mmplan", "solve", workload, "--profile", profile, "-o", plan).code == 0
    done = call("mmlaunch", "verify", plan, "--in-process")
    assert done.code == 0, done.err


def test_there_are_examples_to_try() -> None:
    assert [title for title, _ in examples()] == [
        "README.md: Your own model",
        "your-own-model.md: A plain PyTorch model",
        "your-own-model.md: A Hugging Face model",
    ]
