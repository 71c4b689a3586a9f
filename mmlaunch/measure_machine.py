"""What a device is: its name, memory and speed while all processes are busy."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mmlaunch.measure_timing import Stopwatch


def measure_machine(
    *, device: torch.device, processes: int, precision: str, watch: Stopwatch
) -> dict[str, Any]:
    """Describe one device.

    Args:
        device: of this process.
        processes: that share a CPU's memory and cores.
        precision: of the training, in which the speed is measured.
        watch: measures with all processes at the same time.
    """
    return {
        "name": _device_name(device),
        "memory_bytes": _memory_bytes(device, processes),
        "peak_flops": _peak_flops(device, precision, watch),
        "cores": num_cores(),
        "processor": _processor(device),
        "torch": torch.__version__,
        "clock": "processor time" if watch.compute_clock is not watch.now else "wall time",
        "threads": torch.get_num_threads(),
    }


def _peak_flops(device: torch.device, precision: str, watch: Stopwatch) -> float:
    """FLOP per second of a large matrix product."""
    size = 8192 if device.type == "cuda" else 1024
    dtype = {"fp64": torch.float64, "bf16": torch.bfloat16}.get(precision, torch.float32)
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)

    clock = watch.compute_clock

    def step(_: int) -> Sequence[float]:
        started = clock()
        torch.mm(a, b, out=out)
        return (clock() - started,)

    return 2 * size**3 / watch.time(step)[0].median_s


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _processor(device: torch.device) -> str:
    """The processor's model, as Linux tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def num_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def _memory_bytes(device: torch.device, processes: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(total, _control_group_limit(total)) / processes


def _control_group_limit(otherwise: float) -> float:
    """The container's memory limit, where there is one."""
    if platform.system() != "Linux":
        return otherwise
    for place in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (Path("/sys/fs/cgroup") / place).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            return float(text)
    return otherwise
