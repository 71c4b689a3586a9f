"""The process group of a run: made on one kind of device, left in order or at once.

Ranks that chose their devices apart must not meet in one group: NCCL and gloo would wait for each
other. So each says what it found through the run's store, and all refuse together.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from mmlaunch.process.device import RankDevice
from mmplan.errors import UnfitEnvironmentError
from mmplan.program.shards import Ranks

# torch's stubs do not export its stores.
_store: Any = dist
_MEND = "mend that machine, or run all ranks on their CPUs: MMLAUNCH_DEVICE=cpu"
# Collectives and messages that the flight recorder keeps, of all groups of a rank.
_FLIGHTS = 2000


def join_from_environment(device: RankDevice, timeout: timedelta) -> None:
    """:func:`join` as torchrun's variables say; a process without them is a world of its own."""
    if "MASTER_ADDR" in os.environ:
        rank = int(os.environ.get("RANK", "0"))
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        found = rendezvous("env://", rank=rank, world_size=world_size, timeout=timeout)
        store = _store.PrefixStore("mmlaunch", next(found)[0])
    else:
        store, rank, world_size = _store.HashStore(), 0, 1
    join(device, store=store, rank=rank, world_size=world_size, timeout=timeout)


def join(device: RankDevice, *, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
    """Make this process's group, once all ranks have chosen the same kind of device.

    Args:
        device: this rank's.
        store: of the run, with a prefix of its own.
        rank: of the world of ``world_size`` ranks; all call this.
        timeout: longest wait for another rank.

    Raises:
        UnfitEnvironmentError: one rank has a GPU and another has none; names both.
    """
    if world_size > 1:
        _agree(device, store, rank, world_size)
    backend = "gloo"
    if device.backend == "nccl":
        # Lengths and objects are on the host.
        backend = "cpu:gloo,cuda:nccl"
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(_FLIGHTS))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


# The backends that this process has made beside its group.
_made: list[Any] = []


def new_backend(
    name: str, ranks: Ranks, *, cuda: bool, timeout: timedelta, max_ctas: int | None = None
) -> Any:
    """NCCL's or gloo's backend of some ranks, made by these alone.

    ``dist.new_group`` asks all ranks to come, or, with ``use_local_synchronization``, names a group
    by how many its maker has made, which differs between the members of overlapping groups.

    Args:
        name: the same on its ranks, and no other backend's.
        ranks: of the default group, this one among them.
        cuda: whether it is for tensors on a GPU.
        timeout: longest wait for one of its ranks.
        max_ctas: most thread blocks that one of its kernels takes.
    """
    store = _store.PrefixStore(f"mmlaunch/{name}", cast(Any, distributed_c10d)._get_default_store())
    place = ranks.index(dist.get_rank())
    if not cuda:
        backend: Any = dist.ProcessGroupGloo(store, place, len(ranks), timeout=timeout)
    else:
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.group_name = name
        options.global_ranks_in_group = list(ranks)
        if max_ctas is not None:
            options.config.max_ctas = max_ctas
        backend = dist.ProcessGroupNCCL(store, place, len(ranks), options)
    _made.append(backend)
    return backend


def drop_backend(backend: Any) -> None:
    """End a backend of :func:`new_backend`; all of its ranks call this."""
    _made.remove(backend)
    backend.shutdown()


def leave(*, failed: bool) -> None:
    """Leave all groups: in order, or after a failure at once.

    The end in order waits for posted receives, whose sends never come after a failure.
    """
    if not dist.is_initialized():
        return
    if not failed:
        for backend in _made:
            drop_backend(backend)
        dist.destroy_process_group()
        return
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    for group in groups:
        with contextlib.suppress(RuntimeError):  # it has no such backend
            _made.append(group._get_backend(torch.device("cpu")))
    for backend in _made:
        # gloo cannot abort, and its destructor joins threads that wait for the peers.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
        with contextlib.suppress(RuntimeError):
            backend.abort()
    _made.clear()
    distributed_c10d._abort_process_group()


def dump_flights(folder: Path, rank: int) -> None:
    """Write the collectives and messages that NCCL recorded, for torch's ``torchfrtrace``."""
    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    with contextlib.suppress(OSError):
        if dump is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"nccl_trace_rank_{rank}").write_bytes(dump())


def check_planned(device: RankDevice, planned: str) -> None:
    """Refuse to compute on a CPU what is planned for GPUs, unless the user insists.

    Raises:
        UnfitEnvironmentError: this rank has none; names it and the reason.
    """
    insists = os.environ.get("MMLAUNCH_DEVICE", "").lower() == "cpu"
    if device.device.type == "cpu" and not insists:
        who = f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}"
        raise UnfitEnvironmentError(
            f"{who} has no GPU ({device.reason}), and the plan is for {planned}", hint=_MEND
        )


def _agree(device: RankDevice, store: Any, rank: int, world_size: int) -> None:
    """Rank 0 compares, as every rank reading every other's would be a million reads."""
    mine = {"kind": device.device.type, "why": device.reason, "host": socket.gethostname()}
    store.set(f"device-{rank}", json.dumps(mine))
    if rank == 0:
        said = store.multi_get([f"device-{peer}" for peer in range(world_size)])
        store.set("device-fault", _disagreement([json.loads(text) for text in said]))
    fault = store.get("device-fault").decode()
    if fault:
        raise UnfitEnvironmentError(fault, hint=_MEND)


def _disagreement(found: Sequence[Mapping[str, str]]) -> str:
    """What is wrong with the devices of all ranks; empty where they are of one kind."""
    lost = next((rank for rank, one in enumerate(found) if one["kind"] == "cpu"), None)
    has = next((rank for rank, one in enumerate(found) if one["kind"] != "cpu"), None)
    if lost is None or has is None:
        return ""
    return (
        f"rank {lost} on {found[lost]['host']} has no GPU ({found[lost]['why']}), and rank {has} "
        f"on {found[has]['host']} has one"
    )
