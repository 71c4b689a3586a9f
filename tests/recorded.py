"""Recorded steps of three production jobs: data/README.md says whose and of what form.

    python -m tests.recorded FOLDER

writes data/recorded_computes.npz anew, of the trace-JOB.parquet in a folder.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmlaunch.run.slow_ranks import SlowRank, SlowRanks, Timed
from mmplan.program.clocks import no_durations, replay
from mmplan.program.compile import compile_plan
from mmplan.program.dependencies import find_dependencies
from mmplan.program.instructions import Compute
from tests.programs import loss, make_plan, unit

KINDS = ("forward", "backward")
JOBS = ("ST", "SE", "AR")
_FILE = Path(__file__).parent / "data" / "recorded_computes.npz"

Steps = NDArray[np.float64]
Computes = NDArray[np.float64]


def recorded_computes(job: str) -> tuple[Computes, NDArray[np.float64]]:
    """Seconds of a job's computes and of its steps.

    Returns:
        Of each compute [steps, forward and backward, replicas, stages, micro-batches]; and per
        step, from the start of its first compute to the end of its last.
    """
    with np.load(_FILE) as jobs:
        return jobs[job].astype(np.float64), jobs[f"{job}_steps"].astype(np.float64)


def recorded(job: str) -> Steps:
    """Seconds of a worker's computes of a step [steps, forward and backward, replicas, stages]."""
    return recorded_computes(job)[0].sum(axis=-1)


def read_trace(path: Path) -> tuple[Computes, NDArray[np.float64]]:
    """What :func:`recorded_computes` gives, of a trace as it was published."""
    import pandas as pd

    trace = pd.read_parquet(path)
    trace = trace[trace["optype"].isin([f"{kind}-compute" for kind in KINDS])]
    _, step = np.unique(trace["step"], return_inverse=True)
    kind = (trace["optype"] == "backward-compute").to_numpy(np.intp)
    places = (step, kind, *(trace[name].to_numpy() for name in ("dp_rank", "stage", "mb_id")))
    start, seconds = (np.full([int(place.max()) + 1 for place in places], np.nan) for _ in range(2))
    start[places], seconds[places] = trace["start_ts"], trace["duration"]
    if np.isnan(seconds).any():
        raise ValueError(f"{path}: a compute is missing")
    rest = (1, 2, 3, 4)
    return seconds, (start + seconds).max(axis=rest) - start.min(axis=rest)


class RecordedPipeline:
    """The program of such a job: 1F1B in every replica, by the plan's own compiler."""

    def __init__(self, replicas: int, stages: int, microbatches: int) -> None:
        pipeline = unit("model", pp=stages, dp=replicas, k=microbatches, kind="1f1b")
        batch = replicas * microbatches
        program = compile_plan(make_plan(pipeline, losses=[loss("loss", "model")], batch=batch))
        self._dependencies = find_dependencies(program)
        self._places = [
            [
                (position, int(item.is_backward), rank // stages, rank % stages, item.mb)
                for position, item in enumerate(row)
                if isinstance(item, Compute)
            ]
            for rank, row in enumerate(program.instructions)
        ]

    def simulated_s(self, computes: Computes) -> float:
        """A step of computes [2, replicas, stages, micro-batches], by the simulator's clocks.

        Messages and reductions take no time: their recorded seconds are mostly waits.
        """
        durations = no_durations(self._dependencies)
        seconds = [list(row) for row in durations.instruction]
        for row, places in zip(seconds, self._places, strict=True):
            for position, *at in places:
                row[position] = float(computes[tuple(at)])
        clocks = replay(self._dependencies, replace(durations, instruction=seconds))
        assert not clocks.stuck
        return max(row[-1] for row in clocks.end)


def slowed(steps: Steps, rank: int, times: float, first: int) -> Steps:
    """All computes of a rank longer from a step on."""
    changed = steps.copy()
    changed[first:, :, rank // steps.shape[3], rank % steps.shape[3]] *= times
    return changed


def named(steps: Steps) -> list[tuple[int, SlowRank]]:
    """The ranks that are named, each with the step's index; ranks of a replica are neighbours."""
    _, kinds, replicas, stages = steps.shape
    ranks = SlowRanks(
        [
            Timed(
                rank=replica * stages + stage,
                kind=KINDS[kind],
                peers=(kind, stage),
                samples=(kind, replica),
            )
            for kind in range(kinds)
            for replica in range(replicas)
            for stage in range(stages)
        ]
    )
    return [(at, slow) for at, step in enumerate(steps) for slow in ranks.add(step.ravel())]


def main() -> None:
    jobs: dict[str, NDArray[np.float32]] = {}
    for job in JOBS:
        computes, steps = read_trace(Path(sys.argv[1]) / f"trace-{job}.parquet")
        jobs[job], jobs[f"{job}_steps"] = computes.astype(np.float32), steps.astype(np.float32)
    np.savez_compressed(_FILE, allow_pickle=False, **jobs)


if __name__ == "__main__":
    main()
