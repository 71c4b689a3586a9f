"""Slow ranks: found in recorded steps and in a run, and nobody is named without a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmplan.report.report_page import render
from mmplan.report.source import load_source
from tests.birds import copy_workload, edited, two_rank_plan
from tests.commands import run

# ---- runs ----


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("rank", "kind"), [(0, "forward"), (1, "backward"), (None, None)])
def test_a_run_names_the_rank_that_is_slow(
    tmp_path: Path, rank: int | None, kind: str | None
) -> None:
    """All ranks sleep: beside it what they take from each other on few cores is little."""
    workload = copy_workload(tmp_path)
    towers = workload.parent / "birds" / "towers.py"
    usual = {"forward": 0.02, "backward": 0.02}
    more = {name: 0.015 * (name == kind) for name in usual}
    slept = {n: f'{usual[n]} + {more[n]} * (os.environ.get("RANK") == "{rank}")' for n in usual}
    edited(towers, "import torch\n", "import os\nimport time\n\nimport torch\n")
    edited(
        towers,
        "        return torch.tanh(self.lift(spectrogram))\n",
        f"        time.sleep({slept['forward']})\n"
        "        lifted = torch.tanh(self.lift(spectrogram))\n"
        f"        lifted.register_hook(lambda _: time.sleep({slept['backward']}))\n"
        "        return lifted\n",
    )
    (tmp_path / "plans").mkdir()
    plan = two_rank_plan(workload, tmp_path / "plans" / "plan.json", dp=True)
    folder = tmp_path / "run"
    done = run("mmlaunch", "run", plan, "--run-dir", folder, "--steps", 60, cwd=tmp_path)
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if " is slow: " in line]
    record = json.loads((folder / "run.json").read_text())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = [entry | {"step": step["step"]} for step in steps for entry in step.get("slow", [])]
    page = render(load_source(folder))
    if rank is None:
        assert (lines, told, record.get("slow_ranks")) == ([], [], None)
        assert " is slow" not in page
        return
    ((line,), (entry,)) = lines, told
    assert f": rank {rank} is slow: its {kind} takes 1." in line
    assert (entry["rank"], entry["instruction"]) == (rank, kind)
    assert 1.3 < entry["times"] < 2.0
    assert entry["step"] < 30
    ((recorded),) = record["slow_ranks"]
    assert {key: recorded[key] for key in entry} == entry
    assert line in page
