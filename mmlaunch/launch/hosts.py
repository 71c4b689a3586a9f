"""The machines of a run, as a user names them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from mmplan.errors import InvalidInputError
from mmplan.schema.base import read_text
from mmplan.schema.plan import Plan
from mmplan.wording import counted

# The variable of the run's secret; a worker's environment does not have it.
SECRET = "MMLAUNCH_SECRET"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What a user says of the machines of a run.

    Attributes:
        num_nodes: machines.
        node_rank: this one; machine 0 serves the store.
        endpoint: "HOST:PORT" of machine 0; None where there is no other.
        local_addr: by which the others reach this machine; None: its interface toward machine 0.
        secret: None: it lies in the run folder.
        join_s: how long the machines may take to come together, seconds.
        names: of the machines, by node; may be empty.
    """

    num_nodes: int = 1
    node_rank: int = 0
    endpoint: str | None = None
    local_addr: str | None = None
    secret: bytes | None = field(default=None, repr=False)
    join_s: float = 900.0
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A line of a hostfile.

    Attributes:
        name: for ssh, a user before it perhaps.
        slots: devices that may be used; None: as many as the plan asks for.
    """

    name: str
    slots: int | None = None


def read_hostfile(path: Path) -> list[Host]:
    """Hosts of a file with a ``host slots=N`` on each line, as DeepSpeed and Open MPI have it.

    Raises:
        InvalidInputError: a line is none; names it.
    """
    hosts: list[Host] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, *more = words
        slots = more[0].removeprefix("slots=") if more else "1"
        if name.startswith("-") or len(more) > 1 or not slots.isdecimal() or slots == "0":
            raise InvalidInputError(
                f"{path}, line {number}: {line.strip():.60}", hint="write HOST slots=N on each line"
            )
        hosts.append(Host(name=name, slots=int(slots) if more else None))
    if len({host.name for host in hosts}) < len(hosts) or not hosts:
        raise InvalidInputError(
            f"{path}: no host, or one that stands there twice", hint="write each host on one line"
        )
    return hosts


def hosts_of_plan(hosts: list[Host], plan: Plan) -> list[Host]:
    """The hosts that a plan's nodes are, in the file's order.

    Raises:
        InvalidInputError: there are too few, or one has too few slots.
    """
    per_node = plan.cluster.devices_per_node
    needed = -(-plan.devices // per_node)
    if len(hosts) < needed:
        raise InvalidInputError(
            f"the plan is for {counted(needed, 'node')}, and the hostfile has {len(hosts)}",
            hint="add hosts, or solve for fewer devices",
        )
    for host in hosts[:needed]:
        if host.slots is not None and host.slots < min(per_node, plan.devices):
            raise InvalidInputError(
                f"{host.name} has slots={host.slots}, and the plan puts {per_node} ranks on a node",
                hint="give it more slots, or solve for a --cluster of smaller nodes",
            )
    return hosts[:needed]


def given_secret(path: Path | None) -> bytes | None:
    """The secret that a user gives: in a file, as the first line of stdin ("-"), or a variable.

    Where it comes from stdin, somebody else has started this launcher, and the end of stdin is
    his: it asks this process to stop.

    Raises:
        InvalidInputError: there is nothing in it.
    """
    if path is None:
        return os.environ.get(SECRET, "").encode() or None
    if str(path) == "-":
        secret = sys.stdin.readline().strip()
        threading.Thread(target=_stop_at_its_end, name="mmlaunch-stdin", daemon=True).start()
    else:
        secret = read_text(path).strip()
    if not secret:
        raise InvalidInputError(f"--secret-file {path}: is empty", hint="write a secret into it")
    return secret.encode()


def _stop_at_its_end() -> None:
    # Not by sys.stdin, whose lock the interpreter wants when it ends.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
