"""Machines of one network as namespaces of this one: own names, addresses and hosts files."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_NETWORK = "10.213.77"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One machine; its name is also that of its namespace.

    Attributes:
        link: this end of its cable, outside the namespace.
    """

    name: str
    address: str
    link: str

    def start(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """Start a command there; killing the process kills the command."""
        named = ["sh", "-c", f'hostname {self.name}; exec "$@"', "-", *command]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, "unshare", "--uts", *named],
            cwd=cwd,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def throttle(self, megabits: float) -> None:
        """What leaves it, and what reaches it, goes at most so fast."""
        rate = ["root", "tbf", "rate", f"{megabits:g}mbit", "burst", "64kb", "latency", "200ms"]
        _run("tc", "-n", self.name, "qdisc", "replace", "dev", f"i{self.name}", *rate)
        _run("tc", "qdisc", "replace", "dev", self.link, *rate)

    def free(self) -> None:
        """Undo :meth:`throttle`."""
        _run("tc", "-n", self.name, "qdisc", "del", "dev", f"i{self.name}", "root")
        _run("tc", "qdisc", "del", "dev", self.link, "root")

    def cut(self) -> None:
        """Take its cable out."""
        _ip("link", "set", self.link, "down")

    def mend(self) -> None:
        """Put its cable in again."""
        _ip("link", "set", self.link, "up")


@contextlib.contextmanager
def network(count: int) -> Generator[list[Host]]:
    """Some machines that reach each other; each maps its own name to 127.0.1.1, as Debian does.

    Needs root and Debian's iproute2 and bridges in the kernel.
    """
    mark = f"{os.getpid() % 100_000}"
    bridge = f"br{mark}"
    hosts = [
        Host(name=f"{letter}{mark}", address=f"{_NETWORK}.{i + 1}", link=f"v{letter}{mark}")
        for i, letter in enumerate("abc"[:count])
    ]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for host in hosts:
            folder = Path("/etc/netns") / host.name
            folder.mkdir(parents=True)
            lines = [f"{one.address} {one.name}" for one in hosts if one is not host]
            own = ["127.0.0.1 localhost", f"127.0.1.1 {host.name}", *lines]
            (folder / "hosts").write_text("\n".join(own) + "\n")
            _ip("netns", "add", host.name)
            inside = f"i{host.name}"
            _ip("link", "add", host.link, "type", "veth", "peer", "name", inside)
            _ip("link", "set", inside, "netns", host.name)
            _ip("link", "set", host.link, "master", bridge, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", inside)
            _ip("-n", host.name, "link", "set", inside, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            for words in (("netns", "del", host.name), ("link", "del", host.link)):
                with contextlib.suppress(subprocess.CalledProcessError):
                    _ip(*words)
            shutil.rmtree(Path("/etc/netns") / host.name, ignore_errors=True)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", bridge)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
