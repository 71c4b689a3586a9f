"""``run.json`` and the copy of the plan, for the report and for people."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from mmlaunch.run.segments import Segment
from mmplan.schema.base import file_sha256, write_text

RECORD = "run.json"


class RunRecord:
    """The record of a run folder: at any time the segment that runs and those before it.

    Args:
        run_dir: the run's folder.
        workload_path: the workload's file.
        emulated: whether computes are waits, so that times are no measurement of computing.
    """

    def __init__(self, run_dir: Path, workload_path: Path, *, emulated: bool = False) -> None:
        self._emulated = emulated
        self._run_dir, self._workload_path = run_dir, workload_path
        self._started_at = time.strftime("%Y-%m-%dT%H:%M:%S%z")

    def write(self, segment: Segment, *, step: int | None = None) -> None:
        """Say that a segment's plan trains from a step on.

        Args:
            segment: that runs.
            step: where it began; None before that is known.
        """
        prediction = segment.plan.predicted
        sha256 = file_sha256(segment.path)
        history = self._history()
        if step is not None:
            history = [entry for entry in history if entry["from_step"] < step]
            if not history or history[-1]["plan_sha256"] != sha256:
                history.append(
                    {
                        "from_step": step,
                        "tasks": list(segment.plan.tasks),
                        "devices": segment.plan.devices,
                        "plan_sha256": sha256,
                        "predicted_iteration_s": prediction.iteration_s,
                        "predicted_samples_per_s": prediction.samples_per_s,
                    }
                )
        record = {
            "plan": os.path.relpath(segment.path, self._run_dir),
            "plan_sha256": sha256,
            "workload": os.path.relpath(self._workload_path, self._run_dir),
            "devices": segment.plan.devices,
            "started_at": self._started_at,
            "cores": os.cpu_count(),
            **({"emulated": True} if self._emulated else {}),
            "predicted_iteration_s": prediction.iteration_s,
            "segments": history,
        }
        write_text(self._run_dir / RECORD, json.dumps(record, indent=1) + "\n")
        write_text(self._run_dir / "plan.json", segment.path.read_text(encoding="utf-8"))

    def finish(self, memory_bytes: Mapping[int, int]) -> None:
        """Add the peak memory of the last segment's steps, by rank."""
        path = self._run_dir / RECORD
        record = json.loads(path.read_text(encoding="utf-8"))
        record["memory_bytes"] = {str(rank): held for rank, held in sorted(memory_bytes.items())}
        write_text(path, json.dumps(record, indent=1) + "\n")

    def _history(self) -> list[dict[str, Any]]:
        """Segments that the folder's record has; none where it cannot be read."""
        try:
            found = json.loads((self._run_dir / RECORD).read_text(encoding="utf-8"))["segments"]
            entries = [cast("dict[str, Any]", dict(entry)) for entry in found]
            return [e for e in entries if isinstance(e["from_step"], int) and e["plan_sha256"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []
