"""What a test session leaves on the machine: nothing, or it fails."""

from __future__ import annotations

import atexit
import multiprocessing.process
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.processes import named, parent, pids

_SESSION = "MMPLAN_TEST_SESSION"
_SHARED = Path("/dev/shm")
# Processes that were killed are still being taken down.
_PATIENCE_S = float(os.environ.get("MMPLAN_TEST_PATIENCE_S", "10"))


@dataclass(frozen=True)
class Leftovers:
    """The session's own temporary folder, and what was on the machine before it."""

    folder: Path
    temporary: Path
    shared: frozenset[str]
    elsewhere: frozenset[str]
    namespaces: frozenset[str]

    @classmethod
    def watch(cls) -> Leftovers:
        """Begin: whatever this process starts puts its temporary files into one folder."""
        before = Path(tempfile.gettempdir())
        folder = Path(tempfile.mkdtemp(prefix="mmtest-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[_SESSION] = folder.name
        # Caches and the results of tests have owners who clean them.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(before))
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(before / "torchinductor_tests"))
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        return cls(folder, before, _shared(), _elsewhere(before), _namespaces())

    def found(self) -> list[str]:
        """End: each process, file, folder and network namespace that is still there."""
        until_s = time.monotonic() + _PATIENCE_S
        while (found := self._now()) and time.monotonic() < until_s:
            time.sleep(0.1)
        return found

    def _now(self) -> list[str]:
        found = [
            f"{path}: {_inside(path)}"
            for path in self.folder.iterdir()
            if str(path) != _own_folder() and not _is_nothing(path)
        ]
        found += [
            str(self.temporary / name) for name in _elsewhere(self.temporary) - self.elsewhere
        ]
        found += [f"namespace {name}" for name in _namespaces() - self.namespaces]
        for process in named(f"{_SESSION}={self.folder.name}"):
            line = _read(process, "cmdline").replace("\0", " ")
            # Python's own servants of this very process end with it.
            if "multiprocessing" not in line or parent(process) != os.getpid():
                found.append(f"process {process}: {line[:200]}")
        if new := _shared() - self.shared:
            # What a living process maps may be another session's.
            mapped = "".join(_read(process, "maps") for process in pids())
            found += [str(_SHARED / name) for name in new if name not in mapped]
        return found


def empty_own_folder() -> None:
    """Remove this process's sockets: pytest-xdist may end it before Python does."""
    if own := _own_folder():
        for path in Path(own).iterdir():
            path.unlink()


def _is_nothing(path: Path) -> bool:
    # torch keeps precompiled headers in a cache that TORCHINDUCTOR_CACHE_DIR does not move.
    is_cache = path.name.startswith("torchinductor_")
    return is_cache or (path.name.startswith("pymp-") and path.is_dir() and not os.listdir(path))


def _own_folder() -> str | None:
    """What Python removes when this very process ends."""
    config: dict[str, str] = getattr(multiprocessing.process.current_process(), "_config", {})
    return config.get("tempdir")


def _read(process: int, name: str) -> str:
    try:
        return Path(f"/proc/{process}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def _inside(path: Path) -> str:
    return ", ".join(sorted(os.listdir(path))[:5]) if path.is_dir() else "a file"


def _shared() -> frozenset[str]:
    return _names(_SHARED, lambda _name: True)


def _elsewhere(temporary: Path) -> frozenset[str]:
    """Folders of Ray's nodes: the names of sockets are short, so they are not in ``TMPDIR``."""
    return _names(temporary, lambda name: name.startswith(("mmdata-", "ray")))


def _names(folder: Path, wanted: Callable[[str], bool]) -> frozenset[str]:
    return frozenset(filter(wanted, os.listdir(folder))) if folder.is_dir() else frozenset()


def _namespaces() -> frozenset[str]:
    if shutil.which("ip") is None:
        return frozenset()
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=False)
    return frozenset(line.split()[0] for line in listed.stdout.splitlines() if line.strip())
