"""A few real steps of a plan, for their time alone: nothing of them is kept."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median

from mmlaunch.run.options import RunOptions
from mmlaunch.run.run import prepare, run
from mmplan.program.model import Timings
from mmplan.schema.base import save_document
from mmplan.schema.plan import Plan

# Allocators, caches and connections warm up in the first steps.
WARM_UP_STEPS = 3
# An odd number has a median step; more would lengthen each trial.
MEASURED_STEPS = 5


def step_seconds(
    plan: Plan,
    beside: Path,
    *,
    workload: Path,
    timeout_s: float = 300.0,
    emulation: Timings | None = None,
) -> float:
    """Median seconds of a step without its update, as ``metrics.jsonl`` has them.

    Args:
        plan: to run, on as many processes as it has devices.
        beside: a file in whose folder the plan's relative paths hold.
        workload: its file.
        timeout_s: after which a rank that hangs ends the trial.
        emulation: wait such times instead of computing.

    Raises:
        RunFailedError: a worker died or hung.
        InvalidInputError: there are too few devices.
    """
    with (
        tempfile.TemporaryDirectory(prefix="mmlaunch-trial-") as run_dir,
        tempfile.NamedTemporaryFile(
            dir=beside.absolute().parent, prefix=".trial-", suffix=".json"
        ) as file,
    ):
        path = Path(file.name)
        save_document(plan, path)
        options = RunOptions(
            plan=path,
            steps=WARM_UP_STEPS + MEASURED_STEPS,
            run_dir=Path(run_dir) / "run",
            workload=workload,
            timeout_s=timeout_s,
            emulation=emulation,
            tasks=tuple(plan.tasks),
        )
        # It trains the plan's own tasks: no other plan is asked for.
        run(options, prepare(options), lambda event: None, lambda tasks, output: plan)
        lines = (Path(run_dir) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    times = [float(json.loads(line)["iteration_s"]) for line in lines]
    return median(times[WARM_UP_STEPS:])
