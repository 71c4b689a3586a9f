"""The process that writes a rank's checkpoints while the rank trains.

    python -m mmlaunch.checkpoint.writer MEMORY

MEMORY is the descriptor of a file in memory that holds a rank's file as it is to be. Each line on
stdin is a :class:`FileJob` as JSON, each line on stdout says that its file is written, or what went
wrong. The writer of rank 0 waits for the files of all others and gives the folder its name. It
imports no torch: it starts in a moment and takes some 15 MB.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmlaunch.checkpoint.folder import (
    FileDigest,
    drop_old,
    file_of,
    publish,
    sync_folder,
    write_synced,
)
from mmlaunch.process.process_tree import die_with_parent

_CHUNK = 1 << 24
# A tenth of a core against a rank that wants it whole.
_NICE = 10
# Between two looks for other ranks' files; chosen by hand.
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class FileJob:
    """One rank's file of one checkpoint.

    Attributes:
        root: folder of the checkpoints.
        step: of the checkpoint.
        rank: whose file it is.
        size_bytes: of the file.
        keep: how many checkpoints stay.
        keep_every_s: and of each so many seconds one.
        manifest: rank 0's: the manifest's fields but for the files' hashes.
    """

    root: str
    step: int
    rank: int
    size_bytes: int
    keep: int
    keep_every_s: float | None
    manifest: Mapping[str, Any] | None = None

    @property
    def temp(self) -> Path:
        """The folder until it is whole."""
        return temporary(Path(self.root), self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A rank's file, or why there is none.

    Attributes:
        error: in words; None where all went well.
        errno: of a failure of the file system.
    """

    file: FileDigest | None = None
    error: str | None = None
    errno: int | None = None


def temporary(root: Path, step: int) -> Path:
    """The folder of a checkpoint until it is whole."""
    return root / f".step-{step}.tmp"


def tell(job: FileJob, written: Written) -> None:
    """Leave word for rank 0 of how a rank's file went; without the folder there is nobody to tell.

    Raises:
        OSError: the file system failed.
    """
    path = _told(job.temp, job.rank)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(written)))
    part.replace(path)


def main(memory: int) -> int:
    """Carry out jobs until stdin ends."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        # They are the rank's, which saves before it ends.
        signal.signal(number, signal.SIG_IGN)
    # Where ranks need all cores, they come first.
    os.nice(_NICE)
    for line in sys.stdin:
        written = _carry_out(FileJob(**json.loads(line)), memory)
        sys.stdout.write(json.dumps(asdict(written)) + "\n")
        sys.stdout.flush()
    return 0


def _carry_out(job: FileJob, memory: int) -> Written:
    try:
        file = write_synced(job.temp / file_of(job.rank), _chunks(memory, job.size_bytes))
        sync_folder(job.temp)
        written = Written(file=file)
    except OSError as error:
        written = Written(error=error.strerror or str(error), errno=error.errno)
    try:
        tell(job, written)
        if job.manifest is not None:
            written = _finish(job, job.manifest)
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        written = Written(error=str(error), errno=number)
    if written.error and job.manifest is not None:
        shutil.rmtree(job.temp, ignore_errors=True)
    return written


def _chunks(memory: int, size_bytes: int) -> Iterator[bytes]:
    for start in range(0, size_bytes, _CHUNK):
        yield os.pread(memory, min(_CHUNK, size_bytes - start), start)


def _finish(job: FileJob, manifest: Mapping[str, Any]) -> Written:
    """Wait for all files, and publish; what another rank says of its file where that failed."""
    names = manifest["files"]
    told = [_told(job.temp, rank) for rank in range(len(names))]
    while not all(path.exists() for path in told):
        time.sleep(_POLL_S)
    files: dict[str, Any] = {}
    for rank, path in enumerate(told):
        said = json.loads(path.read_text())
        if said["error"] is not None:
            return Written(**said)
        files[file_of(rank)] = said["file"]
        path.unlink()
    final = Path(job.root) / f"step-{job.step}"
    publish(job.temp, final, {**manifest, "files": files})
    drop_old(Path(job.root), job.step, job.keep, job.keep_every_s)
    return Written()


def _told(temp: Path, rank: int) -> Path:
    return temp / f"rank-{rank}.written"


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
