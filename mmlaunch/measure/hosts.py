"""The devices of several machines and the links between them, timed by workers on all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from mmlaunch.launch.worker_main import WorkerContext
from mmlaunch.measure.clocks import clock_of
from mmlaunch.measure.machine import measure_link, measure_machine
from mmlaunch.measure.timing import Peers, Stopwatch
from mmplan.processes import num_cores

# Of each timing, about; chosen by hand.
_REPEAT_S = 0.5
# Longest single transfer: a slow link is known from its smaller ones; chosen by hand.
_MOST_S = 5.0


def measure_hosts(
    ctx: WorkerContext, sizes: Sequence[int], per_node: int, precision: str
) -> list[Mapping[str, Any]]:
    """A device of machine 0, the links inside it, and those between the machines.

    The entry of a launch with ``per_node`` ranks on each machine. The first rank of each
    machine measures the links between machines, so an operation's bytes are a whole machine's.

    Args:
        ctx: the worker's.
        sizes: bytes of the transfers, ascending; those that would take longer than 5 s are left
            out.
        per_node: ranks of a machine.
        precision: of the device's speed.

    Returns:
        Points with their results: ``{"kind": "machine" | "link", "between": "devices" | "nodes",
        "operation", "bytes", "result"}``.
    """
    device = ctx.device.device
    inside, between = range(per_node), range(0, ctx.world_size, per_node)
    ctx.heartbeat.phase("measuring the device")
    is_alone = per_node <= num_cores()
    watch = Stopwatch(
        clock=clock_of(device, is_alone=is_alone),
        peers=Peers(ctx.world_size, device),
        repeat_s=_REPEAT_S,
    )
    machine = measure_machine(device=device, processes=per_node, precision=precision, watch=watch)
    found: list[Mapping[str, Any]] = [{"kind": "machine", "result": machine}]
    for name, ranks in (("devices", inside), ("nodes", between)):
        if len(ranks) < 2:
            continue
        group = dist.new_group(list(ranks))
        for operation in ("p2p", "all_reduce", "all_gather"):
            expected_s = 0.0
            for size in sizes if ctx.rank in ranks else ():
                if expected_s > _MOST_S:
                    break
                ctx.heartbeat.phase(f"measuring {operation} of {size} bytes between {name}")
                timing = measure_link(
                    operation, size, device=device, repeat_s=_REPEAT_S, group=group
                )
                point = {"kind": "link", "between": name, "operation": operation, "bytes": size}
                found.append(point | {"result": {"seconds": timing.median_s}})
                # Alike on all ranks: the median is theirs together.
                expected_s = timing.median_s * (sizes[sizes.index(size) + 1 :] or [0])[0] / size
        # Who had no part waits here, not in the next group's first operation.
        dist.barrier()
    return found
