"""Launches whose ranks return objects of these tests, which no launch carries: files do."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from mmlaunch.launch.launch import WorkerContext, WorkerEntry, launch
from mmlaunch.session.verify import compare
from mmplan.program.compile import compile_plan
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.gloo_entries import gradients_and_resume
from tests.verification import HERE


def launched(
    entry: WorkerEntry, args: tuple[Any, ...], *, num_ranks: int, run_dir: Path, timeout_s: float
) -> list[Any]:
    """What an entry returned on each rank, tensors among it."""
    paths = launch(
        entry=_kept, args=(entry, args), num_ranks=num_ranks, run_dir=run_dir, timeout_s=timeout_s
    )
    return [pickle.loads(Path(path).read_bytes()) for path in paths]


def check_over_gloo(
    cases: list[tuple[Plan, Workload]], folder: Path, *, timeout_s: float = 90.0
) -> None:
    """Gradients of plans on as many ranks equal one process; the first resumes bit for bit."""
    found = launched(
        gradients_and_resume,
        (cases, folder / "checkpoints"),
        num_ranks=cases[0][0].devices,
        run_dir=folder / "run",
        timeout_s=timeout_s,
    )
    for number, (plan, workload) in enumerate(cases):
        ranks = [gradients[number] for gradients, _ in found]
        verdict = compare(workload, HERE, compile_plan(plan), ranks)
        assert not verdict.differences, verdict.differences[:5]
    for _, resumed in found:
        assert resumed["losses"][0] == resumed["losses"][1]


def _kept(ctx: WorkerContext, entry: WorkerEntry, args: tuple[Any, ...]) -> str:
    path = ctx.run_dir / f"returned-{ctx.rank}"
    path.write_bytes(pickle.dumps(entry(ctx, *args)))
    return str(path)
