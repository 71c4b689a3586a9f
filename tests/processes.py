"""A launcher's processes and their sockets, as the kernel knows them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path

from mmlaunch.process.process_tree import SOCKETS

_LISTENS = "0A"


def tree(root: int) -> list[int]:
    """A process and all that descend from it; those that became nobody's are not among them."""
    children: dict[int, list[int]] = {}
    for pid in pids():
        children.setdefault(parent(pid), []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def parent(pid: int) -> int:
    """The process that a process is a child of; 0 where it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def named(text: str) -> list[int]:
    """Every live process with a text in its command line or its environment."""
    found: list[int] = []
    for pid in pids():
        try:
            folder = Path(f"/proc/{pid}")
            said = folder.joinpath("cmdline").read_bytes() + folder.joinpath("environ").read_bytes()
            dead = folder.joinpath("stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            continue
        if text.encode() in said and not dead and pid != os.getpid():
            found.append(pid)
    return found


def sockets(pids: list[int]) -> set[str]:
    """Folders in which processes of a launcher keep their sockets."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            values = (entry.partition(b"=") for entry in entries)
            found |= {os.fsdecode(value) for name, _, value in values if name == SOCKETS.encode()}
    return found


def listening(pids: list[int]) -> list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    """Address and port of every TCP socket on which one of the processes listens."""
    inodes = {inode for pid in pids for inode in _socket_inodes(pid)}
    found: list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]] = []
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.append((_address(address), int(port, 16)))
    return found


def pids() -> list[int]:
    """Every process that this one can see."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _socket_inodes(pid: int) -> Iterator[str]:
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for entry in entries:
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """As the kernel prints it: words of four bytes in the machine's order."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))
