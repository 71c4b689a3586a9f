"""malloc of a rank that computes on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")

# Sizes of a step, again and again, of which none is held from one to the next.
_STEPS = """
import resource, torch
from mmlaunch.process import malloc
print(malloc.keep_freed())
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(250_000 * size) for size in (1, 7, 3, 40)]
    del held
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
_PAGES = 51 * 1_000_000 // 4096


def _steps(**environment: str) -> tuple[bool, int]:
    """Whether malloc keeps what is freed, and page faults of the last step."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", _STEPS],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[1],
        env=kept | environment,
    )
    keeps, faults = done.stdout.split()
    return keeps == "True", int(faults)


def test_freed_memory_is_kept_for_the_next_step() -> None:
    keeps, faults = _steps()
    assert keeps
    assert faults < _PAGES / 20


def test_a_choice_in_the_environment_stands() -> None:
    keeps, faults = _steps(MALLOC_MMAP_THRESHOLD_="131072")
    assert not keeps
    assert faults > _PAGES / 2
