"""Points are measured in several rounds: a machine's speed changes within seconds.

Repeats of a point right after each other may all fall into one slow moment. Each round measures
all points, in new processes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, cast

from mmplan.profiling.worker import (
    Json,
    ProfileSetting,
    ProfileState,
    ProgressCallback,
    measure_points,
)

# The least number with a median that one slow round does not decide.
ROUNDS = 3
# Longer points are means over slow and fast moments already.
_LONG_S = 5.0
_TIMES = ("forward_s", "backward_s", "seconds", "forward_spread_s", "backward_spread_s", "spread_s")


def in_rounds(
    setting: ProfileSetting,
    points: Sequence[Json],
    state: ProfileState,
    *,
    progress: ProgressCallback | None = None,
    rounds: int = ROUNDS,
) -> list[Json]:
    """Results of all points, in order, with the median over the rounds of each time.

    Long points, and points of some blocks or of each block, are measured once: these only divide
    times among blocks.

    Raises:
        InvalidInputError: a factory, the data or a block is wrong.
        UnfitEnvironmentError: the device cannot be used.
        RunFailedError: a process died; finished points stay in the state.
    """
    results_of: list[list[Json]] = []
    again = list(range(len(points)))
    for number in range(rounds):
        todo = [points[k] | ({"round": number} if number else {}) for k in again]
        shown = _shown(progress, number, rounds)
        results = measure_points(setting, todo, state, progress=shown)
        if not number:
            results_of = [[result] for result in results]
            again = [k for k in again if _repeats(points[k], points, results[k])]
            continue
        for k, result in zip(again, results, strict=True):
            if "skipped" not in result:
                results_of[k].append(result)
    return [cast(Json, _median(rounds_of_point)) for rounds_of_point in results_of]


def _shown(progress: ProgressCallback | None, number: int, rounds: int) -> ProgressCallback | None:
    """ProgressCallback with the number of the round."""
    if progress is None:
        return None

    def show(done: int, total: int, left_s: float | None, text: str) -> None:
        progress(done, total, left_s, f"{text} (round {number + 1} of {rounds})")

    return show if rounds > 1 else progress


def _repeats(point: Json, points: Sequence[Json], result: Json) -> bool:
    """Whether further rounds measure a point again."""
    if "skipped" in result or result.get("wall_s", 0.0) > _LONG_S:
        return False
    if point["kind"] != "module":
        return point["kind"] in ("loss", "link")
    same = (p for p in points if p["kind"] == "module" and p["module"] == point["module"])
    return point["blocks"] == max(p["blocks"] for p in same)


def _median(results_of: Sequence[Any]) -> Any:
    """The first result, its times replaced by the medians of all results."""
    first = results_of[0]
    if len(results_of) == 1 or not isinstance(first, dict):
        return first
    merged: Json = {}
    for key in cast(Json, first):
        values = [visit[key] for visit in results_of]
        if key in _TIMES:
            merged[key] = statistics.median(values)
        else:
            merged[key] = sum(values) if key == "repeats" else _median(values)
    return merged
