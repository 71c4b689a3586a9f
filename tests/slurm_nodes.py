"""Slurm with two nodes on this machine: Debian's slurm-wlm, its daemons and munge in one folder."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare")

_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=5
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=60
SchedulerParameters=bf_interval=1,sched_interval=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True, slots=True)
class Slurm:
    """A cluster that runs.

    Attributes:
        environment: in which Slurm's commands find it.
    """

    environment: dict[str, str]

    def call(self, *command: object) -> str:
        """Standard output of a command of Slurm."""
        done = subprocess.run(
            [str(word) for word in command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def field(self, job: str, name: str) -> str:
        """A field of ``scontrol show job``."""
        words = self.call("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))


def wait_until(happened: Callable[[], bool], within_s: float, told: Callable[[], str]) -> None:
    """Look until something has happened; fails with what is told then."""
    deadline_s = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline_s, told()
        time.sleep(0.2)


@contextmanager
def two_nodes() -> Generator[Slurm]:
    """Start nodes n1 and n2, whose names are known to their jobs only."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    assert not missing, f"no {', '.join(missing)}: apt-get install slurm-wlm munge util-linux"
    assert os.geteuid() == 0, "Slurm's daemons and their mounts need root"
    # Slurm's sockets lie there, whose paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    (folder / "state").mkdir()
    configuration, hosts, key = folder / "slurm.conf", folder / "hosts", folder / "munge.key"
    host = socket.gethostname()
    text = _CONFIGURATION.format(folder=folder, host=host, ports=_free_ports(3))
    configuration.write_text(text)
    hosts.write_text(f"{Path('/etc/hosts').read_text()}\n{_own_address()} n1 n2\n")
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    slurm = Slurm({**os.environ, "SLURM_CONF": str(configuration)})
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)

        def start(*command: object) -> None:
            log = stack.enter_context((folder / f"{command[0]}.log").open("a"))
            process = subprocess.Popen(
                [str(word) for word in command], env=slurm.environment, stdout=log, stderr=log
            )
            stack.callback(process.wait, timeout=30)
            stack.callback(process.terminate)

        files = [f"--{name}-file={folder / name}" for name in ("pid", "log", "seed")]
        start("munged", "-F", "--force", f"--key-file={key}", f"--socket={folder}/munge", *files)
        wait_until((folder / "munge").exists, 20, (folder / "munged.log").read_text)
        start("slurmctld", "-D", "-f", configuration)
        for node in ("n1", "n2"):
            mounted = f"mount --bind {hosts} /etc/hosts && exec slurmd -D -N {node}"
            start("unshare", "--mount", "bash", "-c", mounted)
        wait_until(lambda: _idle(slurm) == 2, 60, lambda: _logs(folder))
        stack.callback(wait_until, lambda: not slurm.call("squeue", "-h"), 90, lambda: "jobs left")
        stack.callback(slurm.call, "scancel", "--user=root")
        yield slurm


def _idle(slurm: Slurm) -> int:
    try:
        return slurm.call("sinfo", "-h", "-N", "-o", "%t").split().count("idle")
    except AssertionError:
        return 0  # the controller does not answer yet


def _logs(folder: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()}" for path in folder.glob("*.log"))


def _own_address() -> str:
    """By which other machines would reach this one, as the routing table has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in found]
