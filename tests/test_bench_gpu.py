"""The script for a machine with one GPU, where there is none, and as a whole on a processor."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("MMLAUNCH_DEVICE", "cpu")  # which it changes
    return importlib.import_module("bench_gpu")


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found = map(json.loads, capsys.readouterr().out.splitlines())
    return {line.pop("part"): line for line in found}


def test_every_part_is_skipped_without_a_gpu(
    bench: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 0
    found = lines(capsys)
    assert set(found) == {*bench.PARTS, *bench.UNSHOWN}
    assert all(line == {"skipped": "no CUDA device"} for line in found.values())


def test_a_part_that_fails_is_said_and_the_others_go_on(
    bench: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("too hot")

    monkeypatch.setitem(bench.PARTS, "smoke", fails)
    assert bench.main(["--device", "cpu", "--tiny", "--parts", "smoke,ranks"]) == 1
    found = lines(capsys)
    assert found["smoke"]["failed"] == "ValueError: too hot"
    assert "two ranks on one GPU" in found["ranks"]["skipped"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_part_runs_on_a_processor(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--device", "cpu", "--tiny"]) == 0
    found = lines(capsys)
    assert found["smoke"]["resumes_bitwise"]
    assert len(found["smoke"]["losses"]) == bench.STEPS
    assert found["memory"]["held_bytes"] > 0
    (row,) = found["overhead"]["steps"]
    assert min(row["executor_s"], row["plain_s"], row["compiled_s"]) > 0
    assert len(found["heldout"]["forward"]) == len(found["heldout"]["sizes"]) > 2
    assert set(bench.UNSHOWN) <= set(found)
