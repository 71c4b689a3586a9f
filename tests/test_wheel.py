"""The wheel holds all that planning needs, and planning needs nothing of Linux."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.commands import ROOT

# Another system has none of these; imports come first, because libraries load files by system.
_ELSEWHERE = """
import os, sys
import cvxpy, matplotlib.pyplot, numpy, scipy.optimize, torch
sys.platform = "darwin"
for name in ("sched_getaffinity", "memfd_create", "pidfd_open", "setns", "unshare"):
    if hasattr(os, name):
        delattr(os, name)
import cli, mmplan
assert mmplan.__file__.startswith(sys.prefix), mmplan.__file__
sys.argv = ["mmplan", *sys.argv[1:]]
cli.mmplan_main()
"""


def _run(*command: object, folder: Path) -> str:
    # Nothing of this checkout: neither its folder nor PYTHONPATH.
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_plans_in_an_environment_of_its_own(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("mmplan", "mmlaunch", "profiles"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("cli.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    shutil.copy(ROOT / "examples" / "clip-digits" / "workload.yaml", tmp_path)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    offline = ("--no-deps", "--no-index")
    _run(*pip, "wheel", *offline, "--no-build-isolation", "-w", tmp_path, source, folder=tmp_path)
    (wheel,) = tmp_path.glob("mmplan-*.whl")

    _run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", folder=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    # Dependencies are this environment's; its own .pth files, and so this checkout, are not read.
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    _run(*pip, "--python", python, "install", *offline, wheel, folder=tmp_path)

    program = tmp_path / "venv" / "bin" / "mmplan"
    asked = ("--analytic", "--cluster", "p3-8")
    _run(program, "profile", "workload.yaml", *asked, folder=tmp_path)
    solve = ("solve", "workload.yaml", "--profile", "profile.json", "--solver", "distmm")
    assert "distmm" in _run(program, *solve, "--devices", 4, folder=tmp_path)
    for command in (
        (*solve, "--devices", 8),
        ("check", "plan.json"),
        ("report", "plan.json"),
        ("compare", *solve[1:-2], "--solvers", "distmm,megatron"),
        ("doctor",),
    ):
        _run(python, "-c", _ELSEWHERE, *command, folder=tmp_path)
    assert "<svg" in (tmp_path / "report.html").read_text()
