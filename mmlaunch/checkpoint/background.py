"""Checkpoints that are written while training goes on.

A save copies the rank's tensors into memory that a process of its own writes to the disk
(:mod:`mmlaunch.checkpoint.writer`); the tensors themselves change with the next step. One save is
under way at a time.
"""

from __future__ import annotations

import contextlib
import json
import select
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mmlaunch.checkpoint.folder import FileDigest
from mmlaunch.checkpoint.save import Content, Entry, Report, for_user, together
from mmlaunch.checkpoint.tensorfile import TensorSpec, layout
from mmlaunch.checkpoint.writer import FileJob, Written, tell
from mmlaunch.comm.transport import Transport
from mmlaunch.process.host_memory import HostMemory
from mmplan.errors import MMPlanError, RunFailedError, UnfitEnvironmentError
from mmplan.wording import size


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """How a save ended.

    Attributes:
        step: of the checkpoint.
        path: its folder; None where it failed.
        error: why.
    """

    step: int
    path: Path | None = None
    error: MMPlanError | None = None


class BackgroundSaves:
    """The saves of one rank; every rank has one and calls :meth:`begin` at the same steps.

    Args:
        transport: of the rank.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport, self._rank = transport, transport.rank
        self._memory = HostMemory(transport.device)
        self._writer: subprocess.Popen[str] | None = None
        self._under_way: tuple[Content, FileJob] | None = None

    def begin(self, content: Content, entries: Sequence[Entry]) -> None:
        """Copy the tensors and have them written; the last save must have ended.

        Raises:
            UnfitEnvironmentError: the folder cannot be written, or has no room.
            NotFiniteError: something trained is not finite.
            RunFailedError: the parts do not make up whole tensors, or another rank failed.
        """
        assert self._under_way is None
        job = FileJob(
            root=str(content.root),
            step=content.step,
            rank=self._rank,
            size_bytes=0,
            keep=content.keep,
            keep_every_s=content.keep_every_s,
        )

        def put(specs: Sequence[TensorSpec], values: dict[str, Tensor]) -> FileDigest:
            nonlocal job
            job = replace(job, size_bytes=self._copy(specs, values))
            return FileDigest(size_bytes=job.size_bytes, sha256="")

        def finish(reports: Sequence[Report]) -> None:
            nonlocal job
            _check_room(content, reports)
            job = replace(job, manifest=content.manifest(reports).model_dump())

        gather = self._transport.gather_objects
        together(content, entries, rank=self._rank, gather=gather, put=put, finish=finish)
        if self._writer is None or self._writer.poll() is not None:
            self._writer = self._start()
        assert self._writer.stdin is not None
        # Of one that dies now the end of its output tells.
        with contextlib.suppress(BrokenPipeError):
            self._writer.stdin.write(json.dumps(asdict(job)) + "\n")
            self._writer.stdin.flush()
        self._under_way = content, job

    def ended(self, *, wait: bool = False) -> Saved | None:
        """How the save under way has ended, once; None where none has.

        On rank 0 a save has ended when its folder is there, elsewhere when this rank's file is.

        Args:
            wait: until it has.
        """
        if self._under_way is None or self._writer is None:
            return None
        content, job = self._under_way
        pipe = self._writer.stdout
        assert pipe is not None
        if not wait and not select.select([pipe], [], [], 0)[0]:
            return None
        line = pipe.readline()
        self._under_way = None
        if not line:
            written = self._bury(job)
        else:
            said = json.loads(line)
            file = said.pop("file")
            written = Written(**said, file=FileDigest(**file) if file else None)
        if written.error is None:
            return Saved(step=content.step, path=content.final)
        failure: Exception = RunFailedError(written.error)
        if written.errno is not None:
            failure = for_user(OSError(written.errno, written.error), content, job.size_bytes)
        assert isinstance(failure, MMPlanError)
        return Saved(step=content.step, error=failure)

    def close(self, *, failed: bool = False) -> None:
        """End the writer.

        Args:
            failed: without a wait for the save that is under way.
        """
        if not failed:
            self.ended(wait=True)
        if self._writer is not None:
            if failed:
                self._writer.kill()
            self._writer.communicate()
            self._writer = None
        self._memory.close()

    def _copy(self, specs: Sequence[TensorSpec], values: dict[str, Tensor]) -> int:
        """Lay the file out in memory; its size."""
        head, places, size_bytes = layout(specs)
        memory = self._memory.tensor(size_bytes)
        memory[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for spec, start in places:
            part = memory[start : start + spec.size_bytes].view(spec.dtype)
            part.view(spec.shape).copy_(values[spec.name].detach(), non_blocking=True)
        self._transport.synchronize()
        return size_bytes

    def _start(self) -> subprocess.Popen[str]:
        descriptor = self._memory.descriptor
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "mmlaunch.checkpoint.writer", str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[descriptor],
        )

    def _bury(self, job: FileJob) -> Written:
        """What became of a writer that died, said to rank 0 in its place."""
        assert self._writer is not None
        # Without what it had still to read, which there is nobody to read.
        with self._writer as writer, contextlib.suppress(BrokenPipeError):
            assert writer.stdin is not None
            writer.stdin.close()
        code, self._writer = writer.returncode, None
        why = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        written = Written(error=f"rank {self._rank}: the process that writes checkpoints {why}")
        if job.manifest is None:
            tell(job, written)
        else:
            shutil.rmtree(job.temp, ignore_errors=True)
        return written


def _check_room(content: Content, reports: Sequence[Report]) -> None:
    needed = sum(report.file.size_bytes for report in reports if report.file)
    free = shutil.disk_usage(content.root).free
    if needed > free:
        raise UnfitEnvironmentError(
            f"disk full: the checkpoint of step {content.step} needs {size(needed)} in "
            f"{content.root}, {size(free)} are free",
            hint="make room, or choose another --run-dir",
        )
