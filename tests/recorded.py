"""Recorded steps of three production jobs: data/README.md says whose and of what form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmlaunch.run.slow_ranks import SlowRank, SlowRanks, Timed

KINDS = ("forward", "backward")
JOBS = ("ST", "SE", "AR")

Steps = NDArray[np.float64]


def recorded(job: str) -> Steps:
    """Seconds [steps, forward and backward, replicas, stages]."""
    with np.load(Path(__file__).parent / "data" / "recorded_steps.npz") as jobs:
        return jobs[job].astype(np.float64)


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
