"""The one place that chooses a rank's device and the backend that its messages take."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from mmlaunch.process.malloc import keep_freed
from mmplan.errors import InvalidInputError, UnfitEnvironmentError

Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDevice:
    """A rank's device and the backend of its messages.

    Attributes:
        device: the torch device of this rank.
        backend: process group backend that fits it.
        num_threads: compute threads of this rank.
        reason: of the choice, for the user.
    """

    device: torch.device
    backend: Backend
    num_threads: int
    reason: str

    def apply(self, *, single_node: bool) -> None:
        """Make this process use the choice; call before any process group is created."""
        torch.set_num_threads(self.num_threads)
        # Without it gloo connects all pairs up front: 20 times dearer for 8 ranks.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        if single_node:
            # A host name that does not resolve must not stop a run that never leaves the machine.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            keep_freed()

    def note(self) -> str:
        """The choice, which all ranks share, and its reason, for the user."""
        return f"ranks compute on {self.device.type} with {self.backend}: {self.reason}"

    def mark(self) -> torch.cuda.Event:
        """The end of the work that the device has been given by now."""
        event = torch.cuda.Event()
        event.record()
        return event


def pick(local_rank: int = 0, *, local_world_size: int | None = None) -> RankDevice:
    """Choose device and backend of one rank.

    NCCL on CUDA when every local rank has a GPU of its own (NCCL refuses two ranks on
    one), else gloo on CPU. ``MMLAUNCH_DEVICE=cpu|cuda`` overrides; ``MMLAUNCH_THREADS``,
    then ``OMP_NUM_THREADS``, set the threads (default 1: ranks share the cores).

    Args:
        local_rank: position of this rank on its machine, from 0.
        local_world_size: ranks on this machine; default ``LOCAL_WORLD_SIZE``, else 1.

    Raises:
        InvalidInputError: an environment variable holds nonsense.
        UnfitEnvironmentError: CUDA was asked for and cannot serve every local rank.
    """
    wish = os.environ.get("MMLAUNCH_DEVICE", "auto").lower()
    if wish not in ("auto", "cpu", "cuda"):
        raise InvalidInputError(
            f"MMLAUNCH_DEVICE is {wish!r}", hint="set it to cpu or cuda, or unset it"
        )
    num_ranks = local_world_size or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    obstacle = "MMLAUNCH_DEVICE=cpu" if wish == "cpu" else _cuda_obstacle(num_ranks)
    if obstacle is None:
        return RankDevice(
            device=torch.device("cuda", local_rank),
            backend="nccl",
            num_threads=_num_threads(),
            reason="a GPU for each rank",
        )
    if wish == "cuda":
        raise UnfitEnvironmentError(
            f"MMLAUNCH_DEVICE=cuda, but {obstacle}",
            hint="start fewer ranks on this machine, or set MMLAUNCH_DEVICE=cpu",
        )
    return RankDevice(
        device=torch.device("cpu"), backend="gloo", num_threads=_num_threads(), reason=obstacle
    )


def async_tp_note(device: torch.device) -> str:
    """One line on whether matmuls hide the messages of tensor parallelism, and why not.

    torch's fused operations (``torch.ops.symm_mem.fused_all_gather_matmul`` and
    ``fused_matmul_reduce_scatter``) are for activations that are cut along the sequence;
    here they are whole on every rank of a group, so a sum has no fused form.
    """
    if device.type != "cuda":
        reason = f"torch fuses matmuls and messages on CUDA only, this is {device.type}"
    elif not hasattr(torch.ops.symm_mem, "fused_matmul_reduce_scatter"):
        reason = "this torch has no symmetric memory"
    else:
        reason = (
            "torch's fused matmuls need activations cut along the sequence, and here every rank "
            "of a group holds them whole"
        )
    return f"async TP off: {reason}"


def _cuda_obstacle(num_ranks: int) -> str | None:
    """The reason why NCCL on CUDA cannot serve ``num_ranks`` local ranks; None when it can."""
    if not torch.cuda.is_available():
        return "CUDA is not available"
    if torch.cuda.device_count() < num_ranks:
        return f"{num_ranks} local ranks share {torch.cuda.device_count()} GPUs"
    if not dist.is_nccl_available():
        return "this torch has CUDA without NCCL"
    return None


def _num_threads() -> int:
    for name in ("MMLAUNCH_THREADS", "OMP_NUM_THREADS"):
        text = os.environ.get(name, "")
        if not text:
            continue
        first = text.split(",")[0]  # OMP_NUM_THREADS may list one count per nesting level
        if not first.isdecimal() or int(first) < 1:
            raise InvalidInputError(f"{name} is {text!r}", hint="set it to a positive integer")
        return int(first)
    return 1
