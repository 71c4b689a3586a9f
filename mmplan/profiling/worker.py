"""Points measured in processes of their own, and kept when they are finished.

The worker (``python -m mmlaunch.measure``) loads the user's code and the devices; this side sends
points and reads one JSON line for each result.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from mmplan.errors import InvalidInputError, MMPlanError, RunFailedError, UnfitEnvironmentError
from mmplan.schema.base import Json
from mmplan.wording import counted

MeasuredPoints = Sequence[tuple[Json, Json]]  # points and their results
# Points done, all points, seconds left (None before the first), what was done last.
ProgressCallback = Callable[[int, int, float | None, str], None]

_ERRORS: Mapping[int, type[MMPlanError]] = {
    kind.exit_code: kind for kind in (InvalidInputError, UnfitEnvironmentError)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSetting:
    """What all points of a profile have in common.

    Attributes:
        workload: the workload as plain data.
        folder: the workload file's folder.
        device: "cpu" or "cuda".
        processes: that measure at the same time.
        repeat_s: seconds to spend on each timing, about.
        max_point_s: points whose single run would take longer are left out.
        pool: samples to load.
        links: whether links between devices are measured, which have two ends.
        model: what the factories build; empty until that is known.
    """

    workload: Json
    folder: Path
    device: str
    processes: int
    repeat_s: float
    max_point_s: float
    pool: int
    links: bool = False
    model: Json = field(default_factory=lambda: {})

    def key(self, point: Json) -> str:
        """Name of a point in the state file: the same only for the same measurement."""
        same = (self.workload, str(self.folder), self.device, self.processes, self.repeat_s)
        text = json.dumps([*same, self.max_point_s, self.pool, self.model, point], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def job(self) -> Json:
        """The worker's input."""
        return {
            "workload": self.workload,
            "folder": str(self.folder),
            "device": self.device,
            "processes": self.processes,
            "links": self.links,
            "repeat_s": self.repeat_s,
            "max_point_s": self.max_point_s,
            "pool": self.pool,
        }


class ProfileState:
    """Finished points on disk, so that an interrupted profile goes on where it stopped.

    Args:
        path: JSON lines; a last line that is cut off is ignored.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._results = dict(_read_lines(path))

    def get(self, key: str) -> Json | None:
        """A finished point's result."""
        return self._results.get(key)

    def add(self, key: str, result: Json) -> None:
        """Write down a finished point.

        Raises:
            UnfitEnvironmentError: the file cannot be written.
        """
        self._results[key] = result
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                # The newline in front ends a line that a kill has cut off.
                file.write("\n" + json.dumps({"key": key, "result": result}) + "\n")
        except OSError as error:
            raise UnfitEnvironmentError(
                f"{self._path}: cannot be written: {error.strerror}",
                hint="free some space or choose another folder with -o",
            ) from None


def _read_lines(path: Path) -> Iterator[tuple[str, Json]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            yield entry["key"], entry["result"]
        except (json.JSONDecodeError, KeyError, TypeError):
            continue


def measure_points(
    setting: ProfileSetting,
    points: Sequence[Json],
    state: ProfileState,
    worker: Worker,
    *,
    progress: ProgressCallback | None = None,
    again: bool = False,
) -> list[Json]:
    """Results of all points, in order; those that the state has only where ``again`` says so.

    Raises:
        InvalidInputError: a factory, the data or a block is wrong.
        UnfitEnvironmentError: the device cannot be used.
        RunFailedError: a process died; finished points stay in the state.
    """
    keys = [setting.key(point) for point in points]
    todo = [index for index, key in enumerate(keys) if again or state.get(key) is None]
    started_s = time.monotonic()
    for count, index in enumerate(todo, start=1):
        state.add(keys[index], worker.measure(setting, points[index]))
        if progress is not None:
            left_s = (time.monotonic() - started_s) / count * (len(todo) - count)
            done = len(points) - len(todo) + count
            progress(done, len(points), left_s, point_text(points[index]))
    return [cast(Json, state.get(key)) for key in keys]


def point_text(point: Json) -> str:
    """A point in words, for progress."""
    match point["kind"]:
        case "module":
            tp = f", tp {point['tp']}" if point["tp"] > 1 else ""
            return f"{point['module']}: micro-batch {point['microbatch']}{tp}"
        case "loss":
            return f"{point['loss']}: {counted(point['samples'], 'sample')}"
        case "link":
            return f"{point['operation']}: {point['bytes']} bytes"
        case "machine":
            return "the devices"
        case "fingerprints":
            return "what the factories build"
        case "work":
            return f"work of {counted(point['samples'], 'sample')}"
        case _:
            return f"{point['module']}: its blocks"


class Worker:
    """Processes that measure one point after another, used as a context, whose end ends them.

    They start with the first point, or earlier where :meth:`start` is called; others start with
    the first point after the context's end.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._has_job = False
        self._stack = ExitStack()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process, self._has_job = None, False
        self._stack.close()

    def start(self) -> None:
        """Let the libraries be loaded, and go on meanwhile."""
        self._started()

    def measure(self, setting: ProfileSetting, point: Json) -> Json:
        """A point's result.

        Args:
            setting: the same for all points until the context's end.
            point: to be measured.

        Raises:
            InvalidInputError: a factory, the data or a block is wrong.
            UnfitEnvironmentError: the device cannot be used.
            RunFailedError: a process died.
        """
        process = self._started()
        asked = [point] if self._has_job else [setting.job(), point]
        self._has_job = True
        # Why a process no longer reads is what it wrote last.
        with suppress(BrokenPipeError):
            cast("IO[str]", process.stdin).writelines(json.dumps(each) + "\n" for each in asked)
            cast("IO[str]", process.stdin).flush()
        line = cast("IO[str]", process.stdout).readline()
        if not line:
            raise RunFailedError(
                f"the measuring process ended with code {process.wait()} before the point "
                f"{point_text(point)}",
                hint="run the command again: finished points are kept",
            )
        answer = cast(Json, json.loads(line))
        if "error" in answer:
            raise _as_error(answer["error"])
        return answer["result"]

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            folder = tempfile.TemporaryDirectory(prefix="mmplan-profile-")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mmlaunch.measure", self._stack.enter_context(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                # Ctrl-C is for this process, which then ends the whole group.
                start_new_session=True,
            )
            self._stack.callback(_end_group, self._process)
        return self._process


def _as_error(error: Json) -> MMPlanError:
    kind = _ERRORS.get(error["exit_code"], RunFailedError)
    if error.get("traceback"):
        hint = f"its traceback:\n{error['traceback'].rstrip()}"
    else:
        hint = error.get("hint")
    return kind(f"profiling: {error['message']}", hint=hint)


def _end_group(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        # What is left to write goes nowhere.
        with suppress(BrokenPipeError):
            cast("IO[str]", pipe).close()
