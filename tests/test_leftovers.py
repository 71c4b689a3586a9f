"""What tests leave behind fails their session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.commands import environment
from tests.processes import named

LEAVES = """
import multiprocessing.shared_memory as memory
import multiprocessing.resource_tracker as tracker
import subprocess
import sys
import tempfile

def test_that_leaves_three():
    tempfile.mkdtemp(prefix="forgotten-")
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)  # forgotten"])
    block = memory.SharedMemory("forgotten-{mark}", create=True, size=8)
    tracker.unregister(block._name, "shared_memory")
    block.close()
"""


def test_a_session_names_what_its_tests_left(tmp_path: Path) -> None:
    mark = tmp_path.parent.name + tmp_path.name
    tmp_path.joinpath("test_leaves.py").write_text(LEAVES.replace("{mark}", mark))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "test_leaves.py"]
    try:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment(MMPLAN_TEST_PATIENCE_S="0"),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        Path("/dev/shm", f"forgotten-{mark}").unlink(missing_ok=True)
        for process in named("# forgotten"):
            os.kill(process, signal.SIGKILL)
    assert "1 passed" in done.stdout
    assert done.returncode
    assert "the tests left 3 behind" in done.stderr
    for left in ("/forgotten-", f"/dev/shm/forgotten-{mark}", "# forgotten"):
        assert left in done.stderr
