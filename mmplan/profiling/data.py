"""The work of samples in a profile, from a random subset of every task's data.

The subset is the start of the first epoch's order, so the samples on which points are measured
are its first ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mmplan.errors import InvalidInputError
from mmplan.profiling.grid import RAGGED_SAMPLES
from mmplan.profiling.measure import MOST_SAMPLES
from mmplan.profiling.worker import (
    Json,
    ProfileSetting,
    ProfileState,
    ProgressCallback,
    Worker,
    measure_points,
)
from mmplan.schema.profile import TIMED_STEPS, DataWork, Profile
from mmplan.schema.workload import TaskView, Workload, resolve_tasks

# Samples of the subset by default; chosen by hand.
SAMPLES = 512
# Samples of one message of the worker: an interruption loses no more.
_CHUNK = 64
# Digits of a sample's work in the file.
_DIGITS = 6


def profile_data(
    profile: Profile,
    workload: Workload,
    folder: Path,
    *,
    samples: int = SAMPLES,
    state_path: Path,
    progress: ProgressCallback | None = None,
) -> Profile:
    """A profile with the work of its data.

    The work is the dataset's ``work(index)``; without one, the lengths of the ragged fields that
    a module takes. Modules without either are left out: their samples count alike.

    Args:
        profile: of the workload.
        workload: of the profile.
        folder: the workload file's folder.
        samples: of the subset; the data set where that has less.
        state_path: file of finished points, until the profile is done.
        progress: called after every point.

    Raises:
        InvalidInputError: less than one sample, no data, or work that is no number from 0 on.
        RunFailedError: the data set raised; finished points stay in the state.
    """
    if samples < 1:
        raise InvalidInputError(f"--data-samples {samples}", hint="at least one sample")
    setting = ProfileSetting(
        workload=workload.model_dump(mode="json", exclude_none=True),
        folder=folder.resolve(),
        device="cpu",
        processes=1,
        repeat_s=0.0,
        max_point_s=0.0,
        pool=0,
    )
    tasks = resolve_tasks(workload)
    # Measured on the subset's first samples; counted for the shapes of samples spread over
    # the data, see TaskFlow.
    spread = profile.source == "analytic"
    points = [p for task in tasks.values() for p in _points(task, samples, spread)]
    with Worker() as worker:
        state = ProfileState(state_path)
        results = measure_points(setting, points, state, worker, progress=progress)
    measured = list(zip(points, results, strict=True))
    data: dict[str, DataWork] = {}
    for name, task in tasks.items():
        own = [(point, result) for point, result in measured if point["task"] == name]
        work = _joined([r for p, r in own if p["order"] == "random"], samples)
        at = _joined([r for p, r in own if p["order"] == "spread"], samples) if spread else work
        pool = RAGGED_SAMPLES if spread else min(MOST_SAMPLES, task.batch)
        if work:
            data[name] = DataWork(
                source=own[0][1]["source"],
                dataset=own[0][1]["dataset"],
                work=work,
                at=timed_means({m: at[m] for m in work if m in at}, pool, task.batch),
            )
    equal = [name for name in tasks if name not in data]
    provenance = profile.provenance | {"data": {"samples": samples, "equal": equal}}
    return profile.model_copy(update={"data": data, "provenance": provenance})


def _points(task: TaskView, samples: int, spread: bool) -> Iterator[Json]:
    base: Json = {"kind": "work", "task": task.name}
    size = min(_CHUNK, samples, task.batch)
    for chunk in range(-(-samples // size)):
        yield base | {"order": "random", "samples": size, "piece": chunk}
    if spread:
        yield base | {"order": "spread", "samples": RAGGED_SAMPLES}


def _joined(results: Sequence[Json], samples: int) -> dict[str, tuple[float, ...]]:
    """One column a module; modules without any work are left out."""
    columns: dict[str, list[float]] = {m: [] for result in results for m in result["work"]}
    for result in results:
        for module, values in columns.items():
            values += result["work"].get(module) or [0.0] * result["samples"]
    return {
        module: tuple(float(f"{value:.{_DIGITS}g}") for value in values[:samples])
        for module, values in columns.items()
        if any(values[:samples])
    }


def timed_means(columns: Mapping[str, Sequence[float]], pool: int, batch: int) -> dict[str, float]:
    """Mean work of the samples that were timed; modules without any are left out.

    Args:
        columns: work of samples in the first epoch's order.
        pool: samples that were timed, the first of a step.
        batch: samples of a step.
    """
    length = max(map(len, columns.values()), default=0)
    starts = range(0, length, batch)[:TIMED_STEPS]
    full = (s for s in starts if all(any(v[s : s + pool]) for v in columns.values()))
    start = next(full, 0)
    timed = {m: values[start : start + pool] for m, values in columns.items()}
    return {m: sum(values) / len(values) for m, values in timed.items() if any(values)}
