"""Checks that may crash or hang: each runs as ``python -m mmplan.doctor.probes NAME [ARG...]``.

A probe prints one JSON object. Whatever happens to it, the doctor lives on.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def probe_torch() -> dict[str, Any]:
    """What this torch can do."""
    import torch
    import torch.distributed as dist

    return {
        "version": str(torch.__version__),
        "cuda_build": torch.version.cuda,
        "cuda": torch.cuda.is_available(),
        "num_gpus": torch.cuda.device_count(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
    }


def probe_package(name: str) -> dict[str, Any]:
    """Versions of a package and of torch, what it asks of torch, and whether it imports."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return {"installed": False}
    wants = importlib.metadata.requires(name) or []
    found: dict[str, Any] = {
        "installed": True,
        "version": version,
        "torch": importlib.metadata.version("torch"),
        "wants": [want for want in wants if want.split("=")[0].strip(" (") == "torch"],
        "error": None,
    }
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken extension raises anything
        found["error"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return found


def probe_host_name() -> dict[str, Any]:
    """Whether this machine's own name has an address."""
    name = socket.gethostname()
    try:
        return {"name": name, "address": socket.gethostbyname(name)}
    except OSError as error:
        return {"name": name, "address": None, "error": str(error)}


def probe_fork_server() -> dict[str, Any]:
    """Start a process through the fork server and get a number back."""
    context = multiprocessing.get_context("forkserver")
    queue = context.SimpleQueue()
    process = context.Process(target=queue.put, args=(os.getpid(),))
    process.start()
    answer = queue.get()
    process.join()
    return {"ok": answer == os.getpid()}


def probe_all_reduce(rank: str, store: str) -> dict[str, Any]:
    """One of two ranks that add up 1 and 2 over gloo; ``store`` is a file that both see."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=2,
        timeout=timedelta(seconds=20),
    )
    try:
        total = torch.tensor([float(rank) + 1.0])
        dist.all_reduce(total)  # pyright: ignore[reportUnknownMemberType]
        return {"total": total.item()}
    finally:
        dist.destroy_process_group()


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "torch": probe_torch,
    "package": probe_package,
    "host-name": probe_host_name,
    "fork-server": probe_fork_server,
    "all-reduce": probe_all_reduce,
}


def main() -> None:
    """Run the probe that the command line names."""
    name, *args = sys.argv[1:]
    sys.stdout.write(json.dumps(PROBES[name](*args)))


if __name__ == "__main__":
    main()
