"""A device's name, memory and speed while all processes are busy."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmlaunch.measure.timing import Peers, Stopwatch, Timing
from mmplan.processes import num_cores


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
    processor = _processor(device)
    return {
        "name": processor if device.type == "cuda" else "cpu",
        "memory_bytes": memory_bytes(device, processes),
        "peak_flops": _peak_flops(device, precision, watch),
        "cores": num_cores(),
        "processor": processor,
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


def memory_bytes(device: torch.device, processes: int) -> float:
    """Memory of a device for each of so many processes."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    # A container's limit, where there is one.
    for place in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (Path("/sys/fs/cgroup") / place).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            return min(total, float(text)) / processes
    return total / processes


def measure_link(
    operation: str, num_bytes: int, *, device: torch.device, repeat_s: float
) -> Timing:
    """Time one size of an operation over all processes of the job, with cold caches.

    Args:
        operation: "p2p" (process 0 to 1, half of there and back), "all_reduce" (of
            ``num_bytes`` on each, brought together first as gradients are), "all_gather"
            (leaves ``num_bytes`` on each), or "copy" (on the one device of a job without
            links).
        num_bytes: the size.
        device: where the tensors lie.
        repeat_s: seconds to spend, about.
    """
    world = 1 if operation == "copy" else dist.get_world_size()
    watch = Stopwatch(device=device, peers=Peers(world, device), repeat_s=repeat_s)
    tensor = torch.zeros(max(1, num_bytes // 4), device=device)
    part = torch.zeros(max(1, num_bytes // 4 // world), device=device)
    parts = [torch.zeros_like(part) for _ in range(world)]

    def step(_: int) -> Sequence[float]:
        watch.cool()
        if operation == "p2p":
            return (_there_and_back(tensor, watch) / 2,)
        started = watch.now()
        if operation == "copy":
            tensor.clone()
        elif operation == "all_reduce":
            dist.all_reduce(tensor.clone())
        else:
            dist.all_gather(parts, part)
        return (watch.now() - started,)

    return watch.time(step, together=True)[0]


def _there_and_back(tensor: Tensor, watch: Stopwatch) -> float:
    """Seconds of it on process 0, from when process 1 is ready; infinite on all others."""
    rank = dist.get_rank()
    token = torch.zeros(1, device=tensor.device)
    if rank == 1:
        dist.send(token, 0)
        dist.recv(tensor, 0)
        dist.send(tensor, 0)
    elif rank == 0:
        dist.recv(token, 1)
        watch.cool()
        started = watch.now()
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
        return watch.now() - started
    return math.inf


class GroupComm:
    """Sums tensors over the processes of one tensor-parallel group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor by the group's sum."""
        dist.all_reduce(tensor, group=self._group)


class NoComm:
    """For shapes on the meta device, which need no sums."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Nothing to sum."""


def tensor_parallel_groups(processes: int, rank: int) -> dict[int, GroupComm]:
    """This rank's group of each degree that divides the processes; made in one order by all."""
    mine: dict[int, GroupComm] = {}
    for tp in range(2, processes + 1):
        if processes % tp:
            continue
        for first in range(0, processes, tp):
            group = dist.new_group(list(range(first, first + tp)))
            if first <= rank < first + tp:
                mine[tp] = GroupComm(group)
    return mine
