"""A device's name, memory and speed while all processes are busy."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mmlaunch.comm.row_exchange import RowExchange
from mmlaunch.comm.transport import Pieces, Work
from mmlaunch.measure.clocks import Clock, CudaClock, Reading, clock_of
from mmlaunch.measure.timing import Peers, Stopwatch, Timing
from mmplan.processes import num_cores
from mmplan.schema.factories import compute_dtype

# Share of a GPU's memory in pieces that no tensor fits into; chosen by hand within the 5 to 8% that
# users of large models leave free.
FRAGMENTED = 0.05
# Of the sums beside which computes are timed: a few buckets of a usual size.
_SUM_BYTES = 4 << 20
_SUMS = 4
# Seconds of timing computes beside sums; a single repeat is decided by who else runs.
_SLOWDOWN_S = 1.0
# Largest part of a sum's seconds that is taken for lost: a slow-down stays finite.
_MOST_LOST = 0.95


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
    room = _room(device, processes, watch)
    return room | {
        "name": processor if device.type == "cuda" else "cpu",
        "peak_flops": _peak_flops(device, precision, watch),
        "cores": num_cores(),
        "processor": processor,
        "torch": torch.__version__,
        "clock": watch.clock.kind,
        "threads": torch.get_num_threads(),
        **({"sm_clock": watch.clock.sm_clock} if isinstance(watch.clock, CudaClock) else {}),
        **({"compute_slowdown": _compute_slowdown(device)} if processes > 1 else {}),
    }


def _room(device: torch.device, processes: int, watch: Stopwatch) -> dict[str, Any]:
    """Bytes that a plan may fill, and what a communicator costs."""
    if device.type != "cuda":
        return {"memory_bytes": memory_bytes(processes)}

    def communicator() -> None:
        dist.all_reduce(torch.zeros(1, device=device), group=dist.new_group())

    torch.mm(*torch.ones(2, 64, 64, device=device))  # with cuBLAS's own memory
    return room_on_cuda(
        device, communicator if processes > 1 else None, now=watch.clock.now, cuda=torch.cuda
    )


def room_on_cuda(
    device: torch.device,
    communicator: Callable[[], None] | None,
    *,
    now: Callable[[], float],
    cuda: Any,
) -> dict[str, Any]:
    """Bytes of a GPU that tensors may fill, and bytes and start-up seconds of a communicator.

    CUDA's context and modules and NCCL's own buffers are taken off, and a share for
    fragmentation. A second communicator is what every further one costs; what the first takes
    beyond that is NCCL's own.

    Args:
        device: already in use.
        communicator: makes one and uses it, with all processes; None where there is one process.
        now: seconds of a clock, when everything queued on the device is done.
        cuda: ``torch.cuda``, or what has its functions.
    """

    def free_bytes() -> int:
        # What torch's allocator keeps is free for tensors.
        return cuda.mem_get_info(device)[0] + cuda.memory_reserved(device)

    now()
    levels, seconds = [free_bytes()], 0.0
    for make in (communicator, communicator) if communicator is not None else ():
        started = now()
        make()
        seconds = now() - started
        levels.append(free_bytes())
    first, second = (before - after for before, after in pairwise(levels)) if seconds else (0, 0)
    return {
        "memory_bytes": float(levels[0] - max(0, first - second)) * (1 - FRAGMENTED),
        "communicator_bytes": float(max(0, second)),
        "communicator_start_s": seconds,
    }


def _peak_flops(device: torch.device, precision: str, watch: Stopwatch) -> float:
    """FLOP per second of a large matrix product."""
    size = 8192 if device.type == "cuda" else 1024
    dtype = compute_dtype(precision)
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)

    def step(_: int) -> Sequence[Reading]:
        started = watch.clock.mark()
        torch.mm(a, b, out=out)
        return (watch.clock.since(started),)

    return 2 * size**3 / watch.time(step)[0].median_s


def _compute_slowdown(device: torch.device) -> float:
    """Times that computes take beside sums of gradients, of all processes of the job.

    Computes alone, sums alone and both together are timed one after another. What both take
    beyond the computes is the part of the sums' seconds that the computes lose.
    """
    peers, clock = Peers(dist.get_world_size(), device), clock_of(device)
    size = 4096 if device.type == "cuda" else 512
    a, out = (torch.ones(size, size, device=device) for _ in range(2))
    buckets = [torch.zeros(_SUM_BYTES // 4, device=device) for _ in range(_SUMS)]

    def computes(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a, out=out)

    def sums(count: int) -> None:
        works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
        computes(count)
        for work in works:
            cast(dist.Work, work).wait()

    def timed(run: Callable[[int], None], count: int) -> Reading:
        dist.barrier()
        started = clock.mark()
        run(count)
        return clock.since(started)

    clock.warm()
    sums(1)
    one_s, sums_s = timed(computes, 1)(), timed(sums, 0)()
    # More computes than sums, so that none of these outlasts them.
    count = math.ceil(2 * peers.largest(sums_s / one_s))

    def step(_: int) -> Sequence[Reading]:
        alone, apart, both = timed(computes, count), timed(sums, 0), timed(sums, count)
        return (lambda: (both() - alone()) / apart(),)

    lost = Stopwatch(clock=clock, peers=peers, repeat_s=_SLOWDOWN_S).time(step)[0].median_s
    return 1 / (1 - min(max(lost, 0.0), _MOST_LOST))


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


def memory_bytes(processes: int) -> float:
    """Memory of a CPU for each of so many processes."""
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
    operation: str, num_bytes: int, *, device: torch.device, repeat_s: float, group: Any = None
) -> Timing:
    """Time one size of an operation over all processes of the job or a group, with cold caches.

    Args:
        operation: "p2p" (process 0 to 1, half of there and back), "all_reduce" (of
            ``num_bytes`` on each, brought together first as gradients are), "all_gather"
            (leaves ``num_bytes`` on each), or "copy" (on the one device of a job without
            links).
        num_bytes: the size.
        device: where the tensors lie.
        repeat_s: seconds to spend, about.
        group: of the processes that call this; None: all.
    """
    world = 1 if operation == "copy" else dist.get_world_size(group)
    clock = clock_of(device)
    watch = Stopwatch(clock=clock, peers=Peers(world, device, group), repeat_s=repeat_s)
    tensor = torch.zeros(max(1, num_bytes // 4), device=device)
    part = torch.zeros(max(1, num_bytes // 4 // world), device=device)
    parts = [torch.zeros_like(part) for _ in range(world)]

    def step(_: int) -> Sequence[Reading]:
        clock.cool()
        if operation == "p2p":
            both = _there_and_back(tensor, clock, group)
            return (lambda: both() / 2,)
        started = clock.mark()
        if operation == "copy":
            tensor.clone()
        elif operation == "all_reduce":
            dist.all_reduce(tensor.clone(), group=group)
        else:
            dist.all_gather(parts, part, group=group)
        return (clock.since(started),)

    return watch.time(step, together=True)[0]


def _there_and_back(tensor: Tensor, clock: Clock, group: Any) -> Reading:
    """Seconds of it on process 0, from when process 1 is ready; infinite on all others."""
    rank = dist.get_rank(group)
    token = torch.zeros(1, device=tensor.device)
    if rank == 1:
        dist.send(token, group=group, group_dst=0)
        dist.recv(tensor, group=group, group_src=0)
        dist.send(tensor, group=group, group_dst=0)
    elif rank == 0:
        dist.recv(token, group=group, group_src=1)
        clock.cool()
        started = clock.mark()
        dist.send(tensor, group=group, group_dst=1)
        dist.recv(tensor, group=group, group_src=1)
        return clock.since(started)
    return lambda: math.inf


class GroupComm(RowExchange):
    """A tensor-parallel group by a process group."""

    def __init__(self, group: Any) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = group

    def all_reduce_large(self, tensor: Tensor) -> None:
        """See :class:`mmlaunch.comm.row_exchange.RowExchange`."""
        dist.all_reduce(tensor, group=self._group)

    def start_gather_flat(self, full: Tensor, mine: Tensor) -> Work:
        """See :class:`mmlaunch.comm.row_exchange.RowExchange`."""
        # Newer torch has other names for these two, and keeps the old ones.
        start = cast(Any, dist).all_gather_into_tensor
        return start(full, mine, group=self._group, async_op=True)

    def reduce_scatter_flat(self, mine: Tensor, full: Tensor) -> None:
        """See :class:`mmlaunch.comm.row_exchange.RowExchange`."""
        cast(Any, dist).reduce_scatter_tensor(mine, full, group=self._group)

    def start_exchange(self, received: Pieces, sent: Pieces) -> Work:
        """See :class:`mmlaunch.comm.row_exchange.RowExchange`."""
        (into, lengths), (given, sizes) = received, sent
        start = cast(Any, dist).all_to_all_single
        return start(into, given, lengths, sizes, group=self._group, async_op=True)


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
