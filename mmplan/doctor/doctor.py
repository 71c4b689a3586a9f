"""Is this machine fit, and what is wrong.

Nothing heavy is imported here: what may crash or hang (torch, its companions, process
groups) runs in processes of its own (see ``mmplan.doctor.probes``).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GIB = 2**30
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what it is.
        ok: True fit, False unfit, None worth knowing.
        detail: what was found, with the numbers.
        hint: what to do; None when there is nothing to do.
    """

    name: str
    ok: bool | None
    detail: str
    hint: str | None = None


def examine(folder: Path | None = None, *, timeout_s: float = 60.0) -> list[Finding]:
    """Look at this machine.

    Args:
        folder: where runs would write; default the current folder.
        timeout_s: longest time for one probe, seconds.

    Returns:
        Findings in a fixed order. Any with ``ok`` False makes the machine unfit.
    """
    where = folder or Path.cwd()
    checks: list[Callable[[], list[Finding]]] = [
        _python,
        _packages,
        lambda: _torch(timeout_s),
        lambda: [_companion("torchvision", timeout_s), _companion("torchaudio", timeout_s)],
        lambda: [_loopback(), _host_name(timeout_s)],
        lambda: [_fork_server(timeout_s)],
        lambda: [_all_reduce(timeout_s)],
        lambda: [_threads(), _memory(), _shared_memory(), _open_files()],
        lambda: [_disk("disk", where), _disk("temporary files", Path(tempfile.gettempdir()))],
    ]
    with ThreadPoolExecutor(max_workers=len(checks)) as pool:
        groups = [pool.submit(check) for check in checks]
        return [finding for group in groups for finding in group.result()]


def _probe(timeout_s: float, *args: str) -> tuple[dict[str, Any], str | None]:
    """The probe's answer, and what went wrong (then the answer is empty)."""
    # -P: what lies in the current folder is not among the modules.
    command = [sys.executable, "-P", "-m", "mmplan.doctor.probes", *args]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {timeout_s:g} s"
    except OSError as error:
        return {}, f"cannot start a process: {error}"
    if done.returncode < 0:
        return {}, f"crashed with {_signal_name(-done.returncode)}"
    try:
        # A package may print while it is imported; the answer is the last line.
        return json.loads(done.stdout.rpartition("\n")[2]), None
    except ValueError:
        last_line = done.stderr.strip().rpartition("\n")[2]
        return {}, last_line or f"exit code {done.returncode}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _python() -> list[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    fit = sys.version_info >= (3, 11)
    hint = None if fit else "use Python 3.11 or newer"
    found = [Finding(name="python", ok=fit, detail=version, hint=hint)]
    if sys.platform != "linux":
        detail = f"{sys.platform}: mmplan plans here; measuring and mmlaunch need Linux"
        found.append(Finding(name="system", ok=None, detail=detail))
    return found


def _packages() -> list[Finding]:
    """What mmplan needs, by name; extras are not needed."""
    try:
        wanted = importlib.metadata.requires("mmplan") or []
    except importlib.metadata.PackageNotFoundError:
        hint = "pip install mmplan"
        return [Finding(name="packages", ok=None, detail="mmplan is not installed", hint=hint)]
    names = [re.split(r"[^\w.-]", want)[0] for want in wanted if "extra ==" not in want]
    missing = [name for name in names if not _installed(name)]
    if missing:
        detail = f"missing: {', '.join(missing)}"
        hint = f"pip install {' '.join(missing)}"
        return [Finding(name="packages", ok=False, detail=detail, hint=hint)]
    return [Finding(name="packages", ok=True, detail=f"all {len(names)} installed")]


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _torch(timeout_s: float) -> list[Finding]:
    found, error = _probe(timeout_s, "torch")
    if error is not None:
        hint = "install torch again, and see that nothing shadows it"
        return [Finding(name="torch", ok=False, detail=error, hint=hint)]
    gloo = Finding(name="gloo", ok=True, detail="available")
    if not found["gloo"]:
        hint = "install a torch that was built with distributed and gloo"
        gloo = Finding(name="gloo", ok=False, detail="this torch has no gloo", hint=hint)
    return [
        Finding(name="torch", ok=True, detail=str(found["version"])),
        gloo,
        _cuda(found, has_driver=Path("/proc/driver/nvidia/version").exists()),
    ]


def _cuda(found: dict[str, Any], *, has_driver: bool) -> Finding:
    if found["cuda"] and not found["nccl"]:
        detail = f"{found['num_gpus']} GPUs, but this torch has no NCCL"
        hint = "install torch's CUDA wheel for Linux, which brings NCCL, or set MMLAUNCH_DEVICE=cpu"
        return Finding(name="cuda", ok=False, detail=detail, hint=hint)
    if found["cuda"]:
        detail = f"{found['num_gpus']} GPUs, CUDA {found['cuda_build']}, NCCL"
        return Finding(name="cuda", ok=True, detail=detail)
    if has_driver:
        build = f"for CUDA {found['cuda_build']}" if found["cuda_build"] else "for CPU only"
        detail = f"an NVIDIA driver is loaded, but torch (built {build}) sees no GPU"
        hint = "install the torch build that fits the driver; runs use the CPU until then"
        return Finding(name="cuda", ok=None, detail=detail, hint=hint)
    return Finding(name="cuda", ok=None, detail="no GPU: runs use the CPU")


def _companion(name: str, timeout_s: float) -> Finding:
    """torchvision or torchaudio: transformers imports them wherever they are installed."""
    found, error = _probe(timeout_s, "package", name)
    if error is None and not found["installed"]:
        return Finding(name=name, ok=True, detail="not installed, not needed")
    fault = error or found["error"] or _torch_mismatch(found)
    if fault is None:
        return Finding(name=name, ok=True, detail=f"{found['version']}, fits torch")
    breaks = "every vision class" if name == "torchvision" else "every audio class"
    return Finding(
        name=name,
        ok=False,
        detail=f"broken beside this torch, which breaks {breaks} of transformers: {fault}",
        hint=f"pip uninstall {name}, or install the build that belongs to this torch",
    )


def _torch_mismatch(found: dict[str, Any]) -> str | None:
    """What the package asks of torch, when the installed one is another."""
    have = str(found["torch"]).partition("+")[0]
    for want in found["wants"]:
        pinned = re.search(r"==\s*([\w.]+)", want)
        if pinned and pinned[1] != have:
            return f"{found['version']} wants torch {pinned[1]}, and torch is {found['torch']}"
    return None


def _loopback() -> Finding:
    """Bind, connect and pass a byte over 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2.0)
            with socket.create_connection(server.getsockname(), timeout=2.0) as client:
                client.sendall(b"x")
                accepted, _ = server.accept()
                with accepted:
                    accepted.settimeout(2.0)
                    accepted.recv(1)
    except OSError as error:
        detail = f"127.0.0.1 does not work: {error}"
        hint = "bring the loopback interface up (ip link set lo up) and let the firewall pass it"
        return Finding(name="loopback", ok=False, detail=detail, hint=hint)
    return Finding(name="loopback", ok=True, detail="127.0.0.1 works")


def _host_name(timeout_s: float) -> Finding:
    found, error = _probe(min(timeout_s, 10.0), "host-name")
    if error is None and found["address"]:
        detail = f"{found['name']} is {found['address']}"
        return Finding(name="host name", ok=True, detail=detail)
    reason = error or f"{found['name']} has no address: {found['error']}"
    hint = "runs on several machines need it: add this machine to /etc/hosts or to the DNS"
    return Finding(name="host name", ok=None, detail=reason, hint=hint)


def _fork_server(timeout_s: float) -> Finding:
    _, error = _probe(timeout_s, "fork-server")
    if error is None:
        return Finding(name="fork server", ok=True, detail="starts processes")
    hint = "see that /dev/shm and the folder of temporary files can be written"
    return Finding(name="fork server", ok=False, detail=error, hint=hint)


def _all_reduce(timeout_s: float) -> Finding:
    """What every run does: two processes, one sum."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=2) as pool:
        store = str(Path(folder) / "store")
        ranks = [pool.submit(_probe, timeout_s, "all-reduce", rank, store) for rank in "01"]
        answers = [rank.result() for rank in ranks]
    error = next((error for _, error in answers if error is not None), None)
    if error is None and all(answer["total"] == 3.0 for answer, _ in answers):
        return Finding(name="all-reduce", ok=True, detail="two processes added up over gloo")
    detail = error or f"1 + 2 came out as {[answer['total'] for answer, _ in answers]}"
    hint = "see loopback above; unset GLOO_SOCKET_IFNAME where it names an interface that is gone"
    return Finding(name="all-reduce", ok=False, detail=detail, hint=hint)


def _threads() -> Finding:
    """Threads per rank against the cores that this process may use."""
    is_linux = sys.platform == "linux"
    cores: float = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        cores = min(cores, int(quota[0]) / int(quota[1]))
    setting = os.environ.get("OMP_NUM_THREADS", "")
    said = f"{cores:g} {'core' if cores == 1 else 'cores'}"
    detail = f"{said}, OMP_NUM_THREADS is {setting or 'unset'} (one thread per rank)"
    if setting:
        detail = f"{said}, OMP_NUM_THREADS={setting} for each rank"
    first = setting.partition(",")[0]
    if first and (not first.isdecimal() or int(first) > cores):
        hint = "unset OMP_NUM_THREADS, or set it to cores / ranks"
        return Finding(name="threads", ok=None, detail=detail, hint=hint)
    return Finding(name="threads", ok=True, detail=detail)


def _memory() -> Finding:
    """What is free for this process, the container's limit included."""
    available = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    if available is None:
        return Finding(name="memory", ok=None, detail="unknown on this system")
    free_bytes = int(available[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max"), _read("/sys/fs/cgroup/memory.current")
    if limit.isdecimal() and used.isdecimal():
        free_bytes = min(free_bytes, int(limit) - int(used))
    hint = "each rank takes about 300 MB before its model: free some memory, or use fewer ranks"
    return _amount("memory", free_bytes, few=2 * _GIB, too_few=_GIB // 2, hint=hint)


def _shared_memory() -> Finding:
    """Where processes hand over batches; containers often have 64 MB."""
    hint = "give the container more (docker run --shm-size=1g)"
    if sys.platform != "linux":
        return Finding(name="/dev/shm", ok=None, detail="not used on this system")
    if not os.access("/dev/shm", os.W_OK):
        return Finding(name="/dev/shm", ok=False, detail="missing or not writable", hint=hint)
    free_bytes = shutil.disk_usage("/dev/shm").free
    return _amount("/dev/shm", free_bytes, few=256 * _MIB, too_few=8 * _MIB, hint=hint)


def _disk(name: str, folder: Path) -> Finding:
    if not os.access(folder, os.W_OK):
        hint = "work in a folder of your own, or set TMPDIR for temporary files"
        return Finding(name=name, ok=False, detail=f"{folder} is not writable", hint=hint)
    hint = f"make room in {folder}"
    free_bytes = shutil.disk_usage(folder).free
    return _amount(name, free_bytes, few=_GIB, too_few=100 * _MIB, hint=hint)


def _amount(name: str, free_bytes: int, *, few: int, too_few: int, hint: str) -> Finding:
    ok = True if free_bytes >= few else None if free_bytes >= too_few else False
    gib = free_bytes / _GIB
    detail = f"{gib:.1f} GiB free" if gib >= 1 else f"{free_bytes / _MIB:.0f} MiB free"
    return Finding(name=name, ok=ok, detail=detail, hint=None if ok else hint)


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= 1024:
        shown = "no limit" if soft == resource.RLIM_INFINITY else f"up to {soft}"
        return Finding(name="open files", ok=True, detail=shown)
    ok = None if soft >= 256 else False
    hint = "raise the limit: ulimit -n 4096"
    return Finding(name="open files", ok=ok, detail=f"only {soft}", hint=hint)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
