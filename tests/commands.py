"""The two programs as a user meets them: in this process, or as processes of their own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import cli
from tests.processes import sockets, tree

ROOT = Path(__file__).parent.parent
Program = Literal["mmplan", "mmlaunch"]


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Stdout as one JSON document; fails where there is anything else."""
        return json.loads(self.out)

    @property
    def message(self) -> str:
        """The one error line."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        return lines[0].removeprefix("error: ")

    @property
    def hint(self) -> str:
        lines = [line for line in self.err.splitlines() if line.startswith("hint: ")]
        return lines[-1].removeprefix("hint: ") if lines else ""


def call(program: Program, *args: object) -> Done:
    """Run a command in this process, through the same entry as the installed script."""
    out, err = io.StringIO(), io.StringIO()
    entry = cli.mmplan_main if program == "mmplan" else cli.mmlaunch_main
    code = 0
    with (
        mock.patch.object(sys, "argv", [program, *map(str, args)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            entry()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    done = Done(code=code, out=out.getvalue(), err=err.getvalue())
    assert "Traceback" not in done.out + done.err, done.err
    return done


def command(program: Program, *args: object) -> list[str]:
    """The command line that starts a program, wherever the caller stands."""
    start = f"import sys; sys.argv[0] = {program!r}; import cli; cli.{program}_main()"
    return [sys.executable, "-c", start, *map(str, args)]


def environment(**more: str) -> dict[str, str]:
    """This process's environment, with the checkout importable and one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def run(program: Program, *args: object, cwd: Path, timeout_s: float = 110, **env: str) -> Done:
    """Run a command in a process of its own."""
    done = subprocess.run(
        command(program, *args),
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Done(code=done.returncode, out=done.stdout, err=done.stderr)


def start(program: Program, *args: object, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """Start a command and come back at once."""
    return subprocess.Popen(
        command(program, *args),
        cwd=cwd,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background makes its children ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def kill_all(launcher: subprocess.Popen[str]) -> None:
    """SIGKILL a launcher and everything that it started, all in the same moment.

    Python's own processes that clear semaphores away live until they have done so. Of the
    processes that would remove the sockets none is left: they are removed here.
    """
    processes = tree(launcher.pid)
    folders = sockets(processes)
    for pid in processes:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if b"multiprocessing.resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    launcher.communicate(timeout=20)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
