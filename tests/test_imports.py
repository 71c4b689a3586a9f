"""What is loaded: a command line that answers at once, a launcher without the planner."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.birds import copy_workload, given_profile
from tests.commands import ROOT, environment

HEAVY = {"torch", "cvxpy", "scipy", "matplotlib", "transformers", "sklearn", "pandas"}


def loaded_by(code: str, *args: object, cwd: Path = ROOT) -> set[str]:
    """Names in ``sys.modules`` after some code has run in a process of its own."""
    ending = "import sys, json; print(); print(json.dumps(sorted(sys.modules)))"
    script = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit as e:\n    assert not e.code, e\n{ending}"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, args)],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("program", ["mmplan", "mmlaunch"])
def test_help_loads_nothing_heavy(program: str) -> None:
    loaded = loaded_by(f"import cli; cli.{program}_main()", "--help")
    assert not loaded & (HEAVY | {"numpy", "pydantic", "ruamel.yaml"})


def test_solving_loads_neither_torch_nor_a_modelling_tool_nor_the_factories(
    tmp_path: Path,
) -> None:
    workload, profile = copy_workload(tmp_path), given_profile(tmp_path / "profile.json")
    loaded = loaded_by(
        "import cli; cli.mmplan_main()",
        *("solve", workload, "--profile", profile, "-o", tmp_path / "plan.json"),
        cwd=tmp_path,
    )
    assert "mmplan.planning.planner" in loaded
    assert not loaded & (HEAVY - {"scipy"})
    assert not any(name.startswith(("mmlaunch", "birds")) for name in loaded)


def test_the_launcher_loads_no_planner() -> None:
    loaded = loaded_by(
        "import mmlaunch.session.session, mmlaunch.session.verify, mmlaunch.run.run, "
        "mmlaunch.run.training_worker"
    )
    planner = ("costs", "solvers", "simulation", "planning", "profiling", "reporting")
    assert not {f"mmplan.{name}" for name in planner} & loaded
    assert not loaded & (HEAVY - {"torch"})


def test_importing_the_packages_costs_nothing() -> None:
    loaded = loaded_by("import mmplan, mmlaunch")
    ours = {name for name in loaded if name.partition(".")[0] in {"mmplan", "mmlaunch"}}
    assert ours == {"mmplan", "mmlaunch"}
    assert not loaded & (HEAVY | {"numpy", "pydantic"})


def test_public_names() -> None:
    loaded = loaded_by("from mmplan import Workload, Ragged; from mmlaunch import Session")
    assert {"mmplan.schema.workload", "mmlaunch.session.session"} <= loaded


def test_import_contracts_hold() -> None:
    script = Path(sys.executable).with_name("lint-imports")
    if not script.exists():
        pytest.skip("import-linter is not installed (extra: dev)")
    done = subprocess.run(
        [script, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
