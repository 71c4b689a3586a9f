"""Objects of the user's that hear of a run: loggers, say (``train.callbacks``).

They are made and called on rank 0, between steps, in the order in which the workload names them.
What they do, training waits for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmplan.errors import InvalidInputError, MMPlanError, RunFailedError, UnfitEnvironmentError
from mmplan.schema.factories import build_callback
from mmplan.schema.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a callback may want to know of a run when it begins.

    Attributes:
        name: of the workload.
        run_dir: the run's folder.
        step: steps that are done already, of a resumed run.
        workload: as a document.
    """

    name: str
    run_dir: Path
    step: int
    workload: Mapping[str, Any]


class Callback:
    """A base for callbacks; any object with some of these methods is one.

    Steps are counted from 1: step N is the state after N updates.
    """

    def on_begin(self, run: RunInfo) -> None:
        """Before the first step; once more where a run goes on after a failure."""

    def on_step(self, step: int, values: Mapping[str, Any]) -> None:
        """After a step, with its line of ``metrics.jsonl``: loss, lr, iteration_s, ..."""

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """After an evaluation, with its losses and metrics by name."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """After a checkpoint is complete."""

    def on_end(self, step: int, reason: str) -> None:
        """At an end in order: done, stopped on request, or early, and why."""


class TensorBoard(Callback):
    """Scalars for TensorBoard, in the run folder's ``tensorboard``.

    Raises:
        UnfitEnvironmentError: the package tensorboard is missing.
    """

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise UnfitEnvironmentError(
                "train.callbacks: tensorboard is not installed",
                hint='pip install "mmplan[tensorboard]", or leave it out',
            ) from error
        self._open: Any = SummaryWriter

    def on_begin(self, run: RunInfo) -> None:
        """Open the log; what an earlier try wrote of later steps is hidden."""
        self._writer = self._open(run.run_dir / "tensorboard", purge_step=run.step + 1)

    def on_step(self, step: int, values: Mapping[str, Any]) -> None:
        """Every number of the step."""
        self._write("train", step, values)

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Every loss and metric; the files can be read from now on."""
        self._write("eval", step, values)
        self._writer.flush()

    def on_end(self, step: int, reason: str) -> None:
        """Close the log."""
        self._writer.close()

    def _write(self, group: str, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                if name == "losses":
                    self._write(f"{group}/{name}", step, value)
            elif name != "step" and isinstance(value, int | float) and math.isfinite(value):
                self._writer.add_scalar(f"{group}/{name}", value, step)


class Callbacks:
    """The callbacks of a workload.

    Args:
        workload: names them.
        folder: the workload file's folder.

    Raises:
        InvalidInputError: a factory cannot be imported, raises, or makes nothing that hears.
        UnfitEnvironmentError: a package is missing.
    """

    def __init__(self, workload: Workload, folder: Path) -> None:
        self._made: list[tuple[str, Any]] = []
        for index, spec in enumerate(workload.train.callbacks):
            if isinstance(spec, str):
                self._made.append((spec, TensorBoard()))
                continue
            field = f"train.callbacks[{index}]"
            made = build_callback(spec, folder, field=field)
            events = [name for name in vars(Callback) if name.startswith("on_")]
            if not any(callable(getattr(made, name, None)) for name in events):
                raise InvalidInputError(
                    f"{field}.factory: {spec.factory} returned a {type(made).__name__} without "
                    f"{', '.join(events[:-1])} and {events[-1]}",
                    hint="return an object with one of these methods",
                )
            self._made.append((f"{field} ({spec.factory})", made))

    def on_begin(self, run: RunInfo) -> None:
        """See :class:`Callback`."""
        self._call("on_begin", run)

    def on_step(self, step: int, values: Mapping[str, Any]) -> None:
        """See :class:`Callback`."""
        self._call("on_step", step, values)

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See :class:`Callback`."""
        self._call("on_evaluation", step, values)

    def on_checkpoint(self, step: int, path: Path) -> None:
        """See :class:`Callback`."""
        self._call("on_checkpoint", step, path)

    def on_end(self, step: int, reason: str) -> None:
        """See :class:`Callback`."""
        self._call("on_end", step, reason)

    def _call(self, event: str, *arguments: Any) -> None:
        for name, made in self._made:
            function: Callable[..., Any] | None = getattr(made, event, None)
            if function is None:
                continue
            try:
                function(*arguments)
            except MMPlanError:
                raise
            except Exception as error:
                raise RunFailedError(
                    f"{name}: {event} raised {type(error).__name__}: {_first_line(error)}",
                    hint="mend it, then go on with --resume",
                ) from error


def _first_line(error: Exception) -> str:
    lines: Sequence[str] = str(error).splitlines()
    return lines[0] if lines else "without a message"
