"""Recorded production jobs, replayed by the simulator: what a prediction has to know.

    python benchmarks/bench_traces.py [--traces FOLDER] [--write-docs]

The recorded computes go through the program that the plan's own compiler makes for such a pipeline.
Models of their durations are learnt on the first half of the steps and judged on the second half.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from page import conditions, table, write_section

from mmplan.reordering.replica_assignment import assign_groups

# Durations [steps, forward and backward, replicas, stages, micro-batches].
Computes = NDArray[np.float64]
# From the first half's durations and the second half's to the second half's as predicted; a model
# reads of the second half only what it says.
Model = Callable[[Computes, Computes], Computes]

# Attention's work grows with the square of a sequence's length, all else with the length.
_DEGREE = 2
# The job whose durations belong to its micro-batches, which another replica may take; AR's belong
# to its workers.
_UNEVEN = "SE"


def own_durations(_: Computes, judged: Computes) -> Computes:
    """Each compute as it was recorded: what is left is the structure's error."""
    return judged


def one_constant(learnt: Computes, judged: Computes) -> Computes:
    """One for each stage and direction; reads nothing."""
    return np.broadcast_to(learnt.mean(axis=(0, 2, 4), keepdims=True), judged.shape)


def first_forward(learnt: Computes, judged: Computes) -> Computes:
    """Reads the first stage's forward of each micro-batch, and infers the others from it."""
    predicted = judged.copy()
    read = judged[:, 0, :, 0]
    for kind in range(judged.shape[1]):
        for stage in range(judged.shape[3]):
            if (kind, stage) != (0, 0):
                curve = _curve(learnt, learnt[:, kind, :, stage])
                predicted[:, kind, :, stage] = np.polyval(curve, read)
    return predicted


def worker_factors(learnt: Computes, judged: Computes) -> Computes:
    """One constant for each stage and direction times one factor of each worker; reads nothing."""
    of_peers = learnt.mean(axis=2, keepdims=True)
    rest = (0, 1, 4)
    factor = learnt.sum(axis=rest, keepdims=True) / of_peers.sum(axis=rest, keepdims=True)
    return one_constant(learnt / factor, judged) * factor


def _curve(learnt: Computes, seconds: Computes) -> NDArray[np.float64]:
    """Seconds of a micro-batch as a polynomial of its first forward."""
    return np.polyfit(learnt[:, 0, :, 0].ravel(), seconds.ravel(), _DEGREE)


MODELS: dict[str, Model] = {
    "own durations": own_durations,
    "one constant a stage and direction": one_constant,
    "one factor a worker": worker_factors,
    "first forward read, others inferred": first_forward,
}


def reassigned(computes: Computes, work: NDArray[np.float64]) -> Computes:
    """A step's computes with its micro-batches given to replicas anew.

    Args:
        computes: [2, replicas, stages, micro-batches].
        work: of each micro-batch [replicas, micro-batches].
    """
    _, replicas, stages, microbatches = computes.shape
    group = assign_groups(work.ravel(), replicas)
    flat = computes.transpose(1, 3, 0, 2).reshape(-1, 2, stages)
    chosen = flat[np.argsort(group, kind="stable")]
    return chosen.reshape(replicas, microbatches, 2, stages).transpose(2, 0, 3, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="FOLDER",
        help="of trace-ST.parquet, trace-SE.parquet and trace-AR.parquet as published; default: "
        "the durations of theirs in tests/data",
    )
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.recorded import JOBS, RecordedPipeline, read_trace, recorded_computes

    rows: list[tuple[str, ...]] = []
    gains: list[tuple[str, ...]] = []
    for job in JOBS:
        if options.traces is None:
            computes, measured_s = recorded_computes(job)
        else:
            computes, measured_s = read_trace(options.traces / f"trace-{job}.parquet")
        _, _, replicas, stages, microbatches = computes.shape
        half = len(computes) // 2
        learnt, judged = computes[:half], computes[half:]
        pipeline = RecordedPipeline(replicas, stages, microbatches)
        workers = f"{replicas} x {stages} x {microbatches}"
        for name, model in MODELS.items():
            predicted_s = np.array([pipeline.simulated_s(x) for x in model(learnt, judged)])
            error = np.abs(predicted_s / measured_s[half:] - 1)
            rows.append((job, workers, name, f"{np.median(error):.1%}", f"{error.max():.1%}"))
        if job != _UNEVEN:
            continue
        known = judged.sum(axis=(1, 3))
        seen = np.polyval(_curve(learnt, learnt.sum(axis=(1, 3))), judged[:, 0, :, 0])
        as_recorded_s = np.array([pipeline.simulated_s(x) for x in judged])
        for name, work in (("all durations", known), ("the first forward", seen)):
            anew_s = [
                pipeline.simulated_s(reassigned(step, of_step))
                for step, of_step in zip(judged, work, strict=True)
            ]
            times = as_recorded_s / np.array(anew_s)
            gains.append((name, f"{times.mean():.2f}", f"{times.min():.2f}", f"{times.max():.2f}"))
    text = "\n\n".join(
        [
            f"`python benchmarks/bench_traces.py`. {conditions(load_before)} Recorded jobs of "
            "ByteDance-Seed/StragglerAnalysis (Apache-2.0): replicas x stages x micro-batches, "
            "1F1B. A step is measured from the start of its first compute to the end of its last; "
            "messages take no time in the replay. Models are learnt on the first half of the "
            "steps; errors are of the second.",
            table(("job", "workers", "durations of computes", "median error", "worst"), rows),
            f"{_UNEVEN}'s micro-batches given to replicas anew by our reorderer, in the second "
            "half of the steps; seconds of a step as recorded by those after it, both simulated "
            "with the recorded durations:",
            table(("the reorderer knows", "times faster on average", "least", "most"), gains),
        ]
    )
    print(text)
    if options.write_docs:
        write_section("traces", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
