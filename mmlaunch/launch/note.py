"""What a launcher says of itself beside its board, for whoever asks from another shell."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from mmlaunch.process.heartbeat import Board, Snapshot
from mmlaunch.process.process_tree import ProcessId
from mmplan.schema.base import write_text

if TYPE_CHECKING:
    from mmlaunch.launch.worker_main import Job

_NAME = "launcher.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherNote:
    """A launch on one machine, as its folder has it.

    Attributes:
        host: name of the machine.
        launcher: the process, by that machine's numbers.
        base_rank: global rank of its first worker.
        num_local: its workers.
    """

    host: str
    launcher: ProcessId
    base_rank: int
    num_local: int

    @property
    def is_here(self) -> bool:
        """Whether this is its machine, so that its processes and its clock can be asked."""
        return self.host == socket.gethostname()


def write_note(job: Job) -> None:
    """Say who launches; the launch's folder has it until the launch ends in order.

    Raises:
        UnfitEnvironmentError: the disk is full.
    """
    note = LauncherNote(
        host=socket.gethostname(),
        launcher=job.launcher,
        base_rank=job.base_rank,
        num_local=job.num_local,
    )
    write_text(job.control_dir / _NAME, json.dumps(asdict(note)) + "\n")


def read_launches(run_dir: Path) -> list[tuple[LauncherNote, list[Snapshot]]]:
    """Launches that go on or were killed, by rank, and their workers' slots.

    A launch that ends, begins or is broken meanwhile is left out; one of another machine comes
    without slots: its board is in that machine's memory.
    """
    found: list[tuple[LauncherNote, list[Snapshot]]] = []
    for path in run_dir.glob(f"launch-node*/{_NAME}"):
        try:
            note = TypeAdapter(LauncherNote).validate_json(path.read_bytes())
            board = path.with_name("board")
            shots = Board(board, num_slots=note.num_local).snapshots() if note.is_here else []
        except (OSError, ValueError, ValidationError):
            continue
        found.append((note, shots))
    return sorted(found, key=lambda launch: launch[0].base_rank)
