"""The machines of a run, as a user names them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
        secret_file: that holds the secret; None: the environment, else a file in the run folder.
        join_s: how long the machines may take to come together, seconds.
        names: of the machines, by node; may be empty.
    """

    num_nodes: int = 1
    node_rank: int = 0
    endpoint: str | None = None
    local_addr: str | None = None
    secret_file: Path | None = None
    join_s: float = 900.0
    names: tuple[str, ...] = ()
