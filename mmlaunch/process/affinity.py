"""The cores of a rank: those near its GPU, whose memory and bus it then uses.

Linux tells the NUMA node of a PCI device and the cores of a node under ``/sys``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_SYSTEM = Path("/sys")


def near_gpu(properties: object, *, system: Path = _SYSTEM) -> frozenset[int]:
    """Cores of a GPU's NUMA node.

    Args:
        properties: of the GPU, as torch has them; not every release tells its address.
        system: where Linux describes the machine.

    Returns:
        No cores where the system does not tell.
    """
    parts = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in parts:
        return frozenset()
    domain, bus, slot = map(int, parts)  # pyright: ignore[reportArgumentType]
    path = system / f"bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/numa_node"
    node = _read(path)
    return _cores(system, int(node)) if node and int(node) >= 0 else frozenset()


def near_memory(local_rank: int, num_ranks: int, *, system: Path = _SYSTEM) -> frozenset[int]:
    """Cores of one NUMA node, to which ranks go in order and evenly; none where there is one."""
    nodes = _numbers(_read(system / "devices/system/node/has_cpu"))
    if len(nodes) < 2:
        return frozenset()
    return _cores(system, nodes[local_rank * len(nodes) // num_ranks])


def bind(cores: frozenset[int]) -> None:
    """Run this process, and those that it starts, on such of its cores; all, where it has none."""
    if sys.platform == "linux" and (own := cores & os.sched_getaffinity(0)):
        os.sched_setaffinity(0, own)


def _cores(system: Path, node: int) -> frozenset[int]:
    return frozenset(_numbers(_read(system / f"devices/system/node/node{node}/cpulist")))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _numbers(text: str) -> list[int]:
    """Linux's lists: ``0-3,8`` is 0, 1, 2, 3 and 8."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
