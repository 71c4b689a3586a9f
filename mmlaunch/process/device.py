"""The one place that chooses a rank's device, its backend and the settings of its process.

Each setting has a default, which the environment changes, and is said in a run's notes; see
docs/training.md.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from mmlaunch.process import affinity, malloc
from mmplan.errors import InvalidInputError, UnfitEnvironmentError
from mmplan.wording import counted

Backend = Literal["nccl", "gloo"]

# Steps between two collections of garbage, the default of torchtitan.
_GARBAGE_STEPS = 50
# Read when CUDA starts. Kernels that are loaded when they are first called may wait for the
# device, which may wait for another rank's message: all are loaded at once. Activations of ragged
# data have sizes that never come again: the allocator grows segments instead of keeping pieces.
_CUDA = {"CUDA_MODULE_LOADING": "EAGER", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
# Torch's older name of the allocator's settings.
_OLDER = "PYTORCH_CUDA_ALLOC_CONF"
# Needed by cuBLAS for equal results (its documentation, "Results reproducibility").
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDevice:
    """A rank's device and the backend of its messages.

    Attributes:
        device: the torch device of this rank.
        backend: process group backend that fits it.
        num_threads: compute threads of this rank.
        reason: of the choice, for the user.
        cores: on which it runs; empty: on any.
        tunes_convolutions: whether cuDNN tries its kernels for every new shape.
    """

    device: torch.device
    backend: Backend
    num_threads: int
    reason: str
    cores: frozenset[int] = frozenset()
    tunes_convolutions: bool = False

    def apply(self, *, interface: str | None) -> None:
        """Make this process use the choice; call before any process group is created.

        Args:
            interface: of this machine, to which gloo and NCCL bind their sockets; None leaves
                it to them.
        """
        torch.set_num_threads(self.num_threads)
        # Without it gloo connects all pairs up front: 20 times dearer for 8 ranks.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        if interface is not None:
            # gloo would take the address of the host's name, which others may not reach.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # none that begins so
        affinity.bind(self.cores)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.backends.cudnn.benchmark = self.tunes_convolutions
        else:
            malloc.keep_freed()

    def settings(self) -> str:
        """One line on the settings of this process."""
        every = garbage_steps()
        parts = [
            f"{self.device.type} over {self.backend}",
            counted(self.num_threads, "thread"),
            f"bound to {counted(len(self.cores), 'core')} of a NUMA node"
            if self.cores
            else "on any core",
            f"garbage collected every {every} steps" if every else "garbage collected by Python",
        ]
        if self.device.type == "cuda":
            parts += [f"{name}={os.environ.get(name, '')}" for name in _CUDA]
            parts.append(f"cuDNN {'tunes' if self.tunes_convolutions else 'does not tune'}")
        else:
            parts.append(f"malloc {'as chosen' if malloc.is_chosen() else 'keeps freed memory'}")
        return f"settings: {', '.join(parts)}"

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
    if wish != "cpu" and torch.backends.cuda.is_built():
        _set_for_cuda()
    obstacle = "MMLAUNCH_DEVICE=cpu" if wish == "cpu" else _cuda_obstacle(num_ranks)
    if obstacle is None:
        index = torch.device("cuda", local_rank)
        properties = torch.cuda.get_device_properties(index) if _flag("BIND", True) else None
        return RankDevice(
            device=index,
            backend="nccl",
            num_threads=_num_threads(),
            reason="a GPU for each rank",
            cores=affinity.near_gpu(properties),
            tunes_convolutions=_flag("CUDNN_BENCHMARK", False),
        )
    if wish == "cuda":
        raise UnfitEnvironmentError(
            f"MMLAUNCH_DEVICE=cuda, but {obstacle}",
            hint="start as many ranks as a machine has GPUs, let each see all of them, or run on "
            "the CPU: MMLAUNCH_DEVICE=cpu",
        )
    return RankDevice(
        device=torch.device("cpu"),
        backend="gloo",
        num_threads=_num_threads(),
        reason=obstacle,
        # Ranks of one machine may be too many for a node's cores: only where it is asked for.
        cores=affinity.near_memory(local_rank, num_ranks) if _flag("BIND", False) else frozenset(),
    )


def set_numerics(*, deterministic: bool, tf32: bool, device: torch.device) -> str:
    """Set how torch computes in this process; before the first matrix product.

    What is not asked for on a CPU stays as it is.

    Args:
        deterministic: refuse operations whose results differ between two runs.
        tf32: compute float32 matrix products and convolutions in TF32 on CUDA.
        device: the rank's.

    Returns:
        One line on it.
    """
    if deterministic:
        os.environ.setdefault(*_CUBLAS)
        torch.use_deterministic_algorithms(True)
    parts = [f"deterministic algorithms {'on' if deterministic else 'off'}"]
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        parts.append(f"TF32 {'on' if tf32 else 'off'}")
    return f"numerics: {', '.join(parts)}"


def garbage_steps() -> int:
    """Steps between two collections of garbage; 0 leaves it to Python.

    Raises:
        InvalidInputError: ``MMLAUNCH_GC_STEPS`` is no number.
    """
    text = os.environ.get("MMLAUNCH_GC_STEPS", "")
    if text and not text.isdecimal():
        raise InvalidInputError(
            f"MMLAUNCH_GC_STEPS is {text!r}", hint="set it to a number of steps, or 0"
        )
    return int(text) if text else _GARBAGE_STEPS


def warms_up(device: torch.device, *, compiled: bool) -> bool:
    """Whether a session takes step 0 once before the first message.

    Args:
        device: the rank's. A CPU has nothing to warm up.
        compiled: whether blocks are compiled; that takes longer than a step may.

    Raises:
        InvalidInputError: ``MMLAUNCH_WARM_UP`` is neither 0 nor 1.
    """
    return _flag("WARM_UP", device.type == "cuda" or compiled)


def async_tp_note(device: torch.device) -> str:
    """One line on whether matmuls hide the messages of tensor parallelism, and why not.

    torch's fused operations (``torch.ops.symm_mem.fused_all_gather_matmul`` and
    ``fused_matmul_reduce_scatter``) are for activations that are cut along the sequence; a sum over
    activations that are whole on every rank has no fused form, and the gathers of sequence
    parallelism are not fused either.
    """
    if device.type != "cuda":
        reason = f"torch fuses matmuls and messages on CUDA only, this is {device.type}"
    elif not hasattr(torch.ops.symm_mem, "fused_matmul_reduce_scatter"):
        reason = "this torch has no symmetric memory"
    else:
        reason = "sums and gathers of a group are not fused with matmuls"
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


def _set_for_cuda() -> None:
    """Variables that CUDA and torch read when they start; a user's own stay."""
    if _OLDER in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", os.environ[_OLDER])
    for name, value in _CUDA.items():
        os.environ.setdefault(name, value)


def _flag(name: str, default: bool) -> bool:
    text = os.environ.get(f"MMLAUNCH_{name}", "")
    if text not in ("", "0", "1"):
        raise InvalidInputError(f"MMLAUNCH_{name} is {text!r}", hint="set it to 0 or 1")
    return default if not text else text == "1"


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
