"""``mmlaunch status``: what a run's folder tells of its processes and checkpoints, from any shell.

Nothing is asked of the run itself: what a killed one has left is read in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mmlaunch.checkpoint.folder import step_folders, written_s
from mmlaunch.launch.note import LauncherNote, read_launches
from mmlaunch.process.heartbeat import Snapshot, WorkerState

CHECKPOINTS = "checkpoints"
_STATES = {
    WorkerState.NOT_STARTED: "starting",
    WorkerState.COMPUTING: "running",
    WorkerState.WAITING: "waiting",
    WorkerState.DONE: "done",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """A rank now, or when its launcher was killed.

    Attributes:
        host: its machine's name.
        state: starting, running, waiting (for a message or a collective), done; stopped by a
            signal or a debugger; dead.
        step: that it is in; None before the first.
        place: its instruction, or what it does between steps, with the module.
        waits_for: ranks; none where it does not say.
        silent_s: seconds since its last sign; None of a dead one, whose clock may be another.
    """

    rank: int
    host: str
    state: str
    step: int | None
    place: str
    waits_for: tuple[int, ...]
    silent_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchStatus:
    """The part of a run's state that is not in its record and metrics.

    Attributes:
        state: running; done, stopped (on request, after saving) or failed; killed, where its
            launcher has ended without a word; elsewhere, where only another machine can tell;
            unknown, where the folder has no word of how it ended.
        hosts: of launchers that this machine cannot ask.
        ranks: of this machine, by rank; none after an end in order.
        checkpoint_step: of the last good checkpoint; None without one.
        checkpoint_s: its age in seconds.
    """

    state: str
    hosts: tuple[str, ...]
    ranks: tuple[RankStatus, ...]
    checkpoint_step: int | None
    checkpoint_s: float | None


def launch_status(run_dir: Path, record: Mapping[str, Any]) -> LaunchStatus:
    """Look at a run's folder.

    Args:
        run_dir: the folder.
        record: its ``run.json``.
    """
    launches = read_launches(run_dir)
    here = [(note, shots) for note, shots in launches if note.is_here]
    elsewhere = tuple(dict.fromkeys(note.host for note, _ in launches if not note.is_here))
    ended = record.get("ended")
    how = cast("dict[str, Any]", ended).get("how") if isinstance(ended, dict) else None
    if any(note.launcher.alive() for note, _ in here):
        state = "running"
    elif isinstance(how, str):
        state = how
    elif elsewhere:
        state = "elsewhere"
    else:
        state = "killed" if here else "unknown"
    step, age_s = _last_good(run_dir / CHECKPOINTS, record.get("last_good"))
    return LaunchStatus(
        state=state,
        hosts=elsewhere,
        ranks=tuple(_rank(note, shot) for note, shots in here for shot in shots),
        checkpoint_step=step,
        checkpoint_s=age_s,
    )


def _rank(note: LauncherNote, shot: Snapshot) -> RankStatus:
    process, where = shot.process, shot.where
    alive = process is None or process.alive()
    if process is not None and alive and process.stopped():
        state = "stopped"
    elif not note.launcher.alive() or not (alive or shot.state is WorkerState.DONE):
        state, alive = "dead", False
    else:
        state = _STATES[shot.state]
    place = " ".join(part for part in (where.instruction, where.module) if part)
    return RankStatus(
        rank=note.base_rank + shot.local_rank,
        host=note.host,
        state=state,
        step=where.step if where.step >= 0 else None,
        place=place,
        waits_for=shot.peers if shot.state is WorkerState.WAITING else (),
        silent_s=max(0.0, time.monotonic() - shot.progress_s) if alive and process else None,
    )


def _last_good(folder: Path, marked: object) -> tuple[int | None, float | None]:
    """Step and age of the checkpoint that the record marks, else of the newest one.

    Restarts may have passed over newer ones. A folder without a manifest is no checkpoint.
    """
    for step, path in sorted(step_folders(folder), key=lambda f: (f[0] == marked, f), reverse=True):
        written = written_s(path)
        if written is not None:
            return step, max(0.0, time.time() - written)
    return None, None
