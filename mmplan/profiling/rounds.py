"""Points are measured in several rounds: machines get slower and faster within seconds.

A few repeats of a point right after each other all fall into one bad moment. Rounds lie a
profile's length apart, each in processes of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, cast

from mmplan.profiling.worker import Json, ProfileSetting, ProfileState, Progress, measure_points

ROUNDS = 3
# What takes longer than this is a mean over moments already.
_LONG_S = 5.0
_TIMES = ("forward_s", "backward_s", "seconds", "forward_spread_s", "backward_spread_s", "spread_s")


def in_rounds(
    setting: ProfileSetting,
    points: Sequence[Json],
    state: ProfileState,
    *,
    progress: Progress | None = None,
    rounds: int = ROUNDS,
) -> list[Json]:
    """Results of all points, in order, with the median over the rounds of each time.

    Long points and those that only show how times are shared out (of some blocks, of each
    block) are measured once.

    Raises:
        InvalidInputError: a factory, the data or a block is wrong.
        UnfitEnvironmentError: the device cannot be used.
        RunFailedError: a process died; finished points stay in the state.
    """
    visits: list[list[Json]] = []
    again = list(range(len(points)))
    for number in range(rounds):
        todo = [points[k] | ({"round": number} if number else {}) for k in again]
        shown = _shown(progress, number, rounds)
        results = measure_points(setting, todo, state, progress=shown)
        if not number:
            visits = [[result] for result in results]
            again = [k for k in again if _counts(points[k], points, results[k])]
            continue
        for k, result in zip(again, results, strict=True):
            if "skipped" not in result:
                visits[k].append(result)
    return [cast(Json, _middle(found)) for found in visits]


def _shown(progress: Progress | None, number: int, rounds: int) -> Progress | None:
    """Progress that says which round it is of."""
    if progress is None:
        return None

    def show(done: int, total: int, left_s: float | None, text: str) -> None:
        progress(done, total, left_s, f"{text} (round {number + 1} of {rounds})")

    return show if rounds > 1 else progress


def _counts(point: Json, points: Sequence[Json], result: Json) -> bool:
    """Whether a point's times are worth further rounds."""
    if "skipped" in result or result.get("wall_s", 0.0) > _LONG_S:
        return False
    if point["kind"] != "module":
        return point["kind"] in ("loss", "link")
    mine = (p for p in points if p["kind"] == "module" and p["module"] == point["module"])
    return point["blocks"] == max(p["blocks"] for p in mine)


def _middle(visits: Sequence[Any]) -> Any:
    """The first visit with the medians of all in the place of its times."""
    first = visits[0]
    if len(visits) == 1 or not isinstance(first, dict):
        return first
    merged: Json = {}
    for key in cast(Json, first):
        values = [visit[key] for visit in visits]
        if key in _TIMES:
            merged[key] = statistics.median(values)
        else:
            merged[key] = sum(values) if key == "repeats" else _middle(values)
    return merged
