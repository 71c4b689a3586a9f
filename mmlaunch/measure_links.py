"""This job's processes among each other: groups, and seconds of messages and collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmlaunch.measure_timing import Peers, Stopwatch, Timing


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
