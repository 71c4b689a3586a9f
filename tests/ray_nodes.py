"""Nodes of a Ray cluster, as ``mmlaunch data`` starts them."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands import command, environment


class Node:
    """``mmlaunch data`` as a process of its own."""

    def __init__(self, folder: Path, *args: object) -> None:
        name = f"node-{time.monotonic_ns()}"
        said, errors = folder / f"{name}.json", folder / f"{name}.err"
        with said.open("w") as out, errors.open("w") as err:
            self.process = subprocess.Popen(
                command("mmlaunch", "data", *args, "--json"),
                stdout=out,
                stderr=err,
                env=environment(),
            )
        until_s = time.monotonic() + 90
        while not said.read_text().endswith("}\n"):
            assert self.process.poll() is None, errors.read_text()
            assert time.monotonic() < until_s, errors.read_text()
            time.sleep(0.2)
        self.address: str = json.loads(said.read_text())["address"]
        own = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        words = Path(f"/proc/{own.split()[0]}/cmdline").read_text().split("\0")
        self.folder = Path(words[words.index("--temp-dir") + 1])

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


class Nodes:
    """Those of one test, which end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[Node] = []

    def head(self, cpus: int = 0, port: int | None = None) -> Node:
        address = f"127.0.0.1:{port or free_port()}"
        return self._add("--head", "--address", address, "--cpus", cpus)

    def producer(self, head: Node, cpus: int = 1) -> Node:
        return self._add("--address", head.address, "--cpus", cpus)

    def _add(self, *args: object) -> Node:
        node = Node(self.folder, *args, "--object-store-memory", 100_000_000)
        self.all.append(node)
        return node


@contextmanager
def ray_nodes(folder: Path) -> Generator[Nodes]:
    """None yet; those that are started have a token of their own and end here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(folder / "token"))
        patch.delenv("RAY_AUTH_TOKEN", raising=False)
        for name in ("RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED"):
            patch.setenv(name, "")
        found = Nodes(folder)
        try:
            yield found
        finally:
            for node in found.all:
                if node.process.poll() is None:
                    node.end()
                # A killed one has left its logs.
                shutil.rmtree(node.folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
