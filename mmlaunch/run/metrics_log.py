"""``metrics.jsonl`` and ``evaluations.jsonl`` of a run folder, and what is told of each line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from mmlaunch.launch.worker_main import WorkerContext
from mmlaunch.run.callbacks import Callbacks
from mmlaunch.run.loss_jumps import LossJumps
from mmlaunch.run.slow_ranks import SlowRanks
from mmlaunch.session.session import Session, StepResult
from mmplan.errors import UnfitEnvironmentError
from mmplan.schema.base import write_text

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
# First steps that are no measure.
_WARM_UP = 2
# Ranks in a step's line whose waiting for data is told.
_LISTED = 8


class MetricsLog:
    """One line per step, and one per evaluation; lines of what is done again are dropped.

    Args:
        ctx: of rank 0.
        first_step: that is done next.
        jumps: looks for losses that jump.
        callbacks: hear of every line.
        emulated: steps have no loss: theirs is null.
    """

    def __init__(
        self,
        ctx: WorkerContext,
        first_step: int,
        jumps: LossJumps,
        callbacks: Callbacks,
        *,
        emulated: bool,
    ) -> None:
        self._ctx, self._jumps, self._emulated = ctx, jumps, emulated
        self._callbacks = callbacks
        # Whether the last step's loss had jumped.
        self._high = False
        self._steps = _opened(ctx.run_dir / METRICS, first_step)
        # An evaluation stands behind the steps that it comes after.
        self._evaluations = _opened(ctx.run_dir / EVALUATIONS, first_step + 1)

    def watch(self, ranks: SlowRanks, step: int) -> None:
        """Look for slow ranks from a step on."""
        self._ranks, self._watched_from = ranks, step + _WARM_UP

    def add(self, session: Session, result: StepResult) -> None:
        """Append a step and tell the launcher."""
        samples = sum(session.program.batches.values())
        entry: dict[str, Any] = {
            "step": result.step,
            "loss": None if self._emulated else result.loss,
            "iteration_s": result.iteration_s,
            "samples_per_s": samples / result.iteration_s,
            "update_s": result.update_s,
            "data_s": result.data_s,
            "data_s_by_rank": longest_waits(result.data_s_by_rank),
        }
        if len(result.losses) > 1 and not self._emulated:
            entry["losses"] = result.losses
        rates = session.optimizer.param_groups if session.optimizer is not None else []
        if rates and not self._emulated:
            entry["lr"] = float(rates[0]["lr"])
        if result.grad_norm is not None:
            entry["grad_norm"] = result.grad_norm
        if result.loss_scale is not None and not self._emulated:
            entry["loss_scale"] = result.loss_scale
        if not (result.finite or self._emulated):
            entry["skipped"] = True
        elif not self._emulated:
            self._look_at(result, entry)
        # Times are those of the step before.
        if result.last_own_s and result.step > self._watched_from:
            self._name_slow(result, entry)
        self._ctx.report({"kind": "step", **_write(self._steps, entry)})
        self._callbacks.on_step(result.step + 1, entry)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Append an evaluation after so many steps and tell the launcher."""
        _write(self._evaluations, {"step": step, **values})
        said = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        note = f"evaluation after step {step}: {said}"
        self._ctx.report({"kind": "note", "message": note})
        self._callbacks.on_evaluation(step, values)

    def _name_slow(self, result: StepResult, entry: dict[str, Any]) -> None:
        for slow in self._ranks.add(result.last_own_s):
            told = {"rank": slow.rank, "instruction": slow.kind, "times": round(slow.times, 2)}
            entry.setdefault("slow", []).append(told)
            self._ctx.report({"kind": "slow", "step": result.step, **told})

    def _look_at(self, result: StepResult, entry: dict[str, Any]) -> None:
        """Name a loss that jumps: each in the metrics, the first of several in the log."""
        usual = self._jumps.add(result.loss)
        if usual is not None:
            entry["jumped_from"] = usual
            if not self._high:
                said = f"step {result.step}: the loss jumps from about {usual:.4g} to"
                self._ctx.report({"kind": "note", "message": f"{said} {result.loss:.4g}"})
        self._high = usual is not None


def longest_waits(waits_s: Sequence[float]) -> dict[str, float]:
    """The longest of the ranks' waits, in microseconds' precision: a line is short at any size."""
    ranks = sorted(range(len(waits_s)), key=lambda rank: -waits_s[rank])
    return {str(rank): round(waits_s[rank], 6) for rank in ranks[:_LISTED]}


def _opened(path: Path, step: int) -> TextIO:
    """A file of lines, without those from a step on."""
    write_text(path, "".join(_lines_before(path, step)))
    return path.open("a", encoding="utf-8")


def _write(file: TextIO, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Append a line; JSON has no NaN: such a number is written as null.

    Returns:
        The entry as it is written.
    """
    finite = {key: _finite(value) for key, value in entry.items()}
    try:
        file.write(json.dumps(finite) + "\n")
        file.flush()
    except OSError as error:
        raise UnfitEnvironmentError(
            f"{file.name}: cannot be written: {error.strerror}",
            hint="make room, then run again with --resume",
        ) from None
    return finite


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines_before(path: Path, step: int) -> list[str]:
    if not path.exists() or step == 0:
        return []
    kept: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["step"] < step:
                kept.append(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # the last line of a killed run may be cut off
    return kept
