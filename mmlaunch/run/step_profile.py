"""``mmlaunch run --profile A:B``: torch.profiler over some steps, a trace file of each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

FOLDER = "profile"


class StepProfile:
    """Profiles steps from A on, before B; counted from 0.

    Args:
        steps: (A, B); None profiles nothing.
        folder: where ``rank-N.json`` is written, for chrome://tracing or Perfetto.
        rank: of this process.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int) -> None:
        self._steps, self._path = steps or (0, 0), folder / f"rank-{rank}.json"
        self._running: Any = None

    def before_step(self, step: int) -> None:
        """Begin, where this is the first profiled step."""
        first, end = self._steps
        if first <= step < end and self._running is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._running = torch.profiler.profile(activities=activities)
            self._running.start()

    def after_step(self, done: int) -> Path | None:
        """End, where the last profiled step is done.

        Returns:
            The file, once it is written.
        """
        return self.end() if self._running is not None and done >= self._steps[1] else None

    def end(self) -> Path | None:
        """Write what has been profiled, if anything."""
        if self._running is None:
            return None
        self._running.stop()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._running.export_chrome_trace(str(self._path))
        self._running = None
        return self._path
