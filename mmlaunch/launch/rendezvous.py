"""The launchers of one run find each other, and agree on restarts and on its end.

One machine's launcher serves a store; the others look in. Its socket is bound to the one
address that is meant (a loopback address for a run of one machine), and all values are JSON:
whoever else reaches it can disturb a run, and can make nobody run code.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mmplan.errors import InvalidInputError, RunFailedError, UnfitEnvironmentError

# Between two looks at the store, and for a signal; chosen by hand.
_POLL_S = 0.05
# Longest wait for an answer of the store; chosen by hand.
_ANSWER_S = 30.0
# Time for the other machines to end after this one has; chosen by hand.
_LEAVE_S = 60.0

# Time for the other machines to read why this one has ended; chosen by hand.
_PART_S = 5.0

Address = tuple[str, int]
# torch's stubs do not export it.
TCPStore: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why an attempt ended on one machine, and whether all machines restart."""

    node: int
    line: str
    restart: bool


class Rendezvous:
    """One launcher's side. Every method polls, so that a signal is heard while it waits.

    Args:
        num_nodes: machines of the run.
        node_rank: this one; machine 0 serves the store.
        endpoint: "HOST:PORT" of machine 0; None where there is no other.
        join_s: how long the machines may take to come together, seconds.
        check_stop: called while waiting; raises to end the wait.

    Raises:
        InvalidInputError: the endpoint is no address of machine 0.
        UnfitEnvironmentError: machine 0 does not answer in time.
    """

    def __init__(
        self,
        *,
        num_nodes: int,
        node_rank: int,
        endpoint: str | None,
        join_s: float,
        check_stop: Callable[[], None],
    ) -> None:
        self._num_nodes, self._node_rank = num_nodes, node_rank
        self._join_s, self._check_stop = join_s, check_stop
        asked = ("127.0.0.1", 0) if endpoint is None else _parsed(endpoint)
        if node_rank == 0:
            self._store, self.address = _serve(asked)
        else:
            self._store, self.address = self._find(asked), asked

    def join(self, attempt: int, num_local: int) -> str:
        """Wait until every machine has come to an attempt.

        Args:
            attempt: 0, then one more for each restart.
            num_local: workers of this machine.

        Returns:
            A prefix for the attempt's keys: without one of its own it would read the
            addresses of the last attempt's dead workers.

        Raises:
            InvalidInputError: two machines say that they are the same one.
            UnfitEnvironmentError: a machine does not come in time; names it.
        """
        mine = json.dumps({"num_local": num_local, "id": uuid.uuid4().hex})
        key = f"attempt-{attempt}/node-{self._node_rank}"
        if self._store.compare_set(key, "", mine).decode() != mine:
            raise InvalidInputError(
                f"two machines say that they are node {self._node_rank}",
                hint=f"give each its own --node-rank, from 0 to {self._num_nodes - 1}",
            )
        deadline_s = time.monotonic() + self._join_s
        for node in range(self._num_nodes):
            while not self._store.check([f"attempt-{attempt}/node-{node}"]):
                if time.monotonic() > deadline_s:
                    raise UnfitEnvironmentError(
                        f"node {node} of {self._num_nodes} did not come within {self._join_s:g} s",
                        hint="start mmlaunch run with its --node-rank there",
                    )
                self._pause()
        return f"attempt-{attempt}/"

    def announce(self, attempt: int, trouble: Trouble) -> Trouble:
        """Say why an attempt has ended here; the first to say so decides for all."""
        mine = json.dumps(asdict(trouble))
        with contextlib.suppress(dist.DistError):
            said = self._store.compare_set(f"attempt-{attempt}/trouble", "", mine)
            return Trouble(**json.loads(said))
        return trouble

    def trouble(self, attempt: int) -> Trouble | None:
        """The trouble that another machine has announced.

        Raises:
            RunFailedError: machine 0 is gone.
        """
        key = f"attempt-{attempt}/trouble"
        try:
            announced = self._store.check([key])
            return Trouble(**json.loads(self._store.get(key))) if announced else None
        except dist.DistError as error:
            raise RunFailedError(
                "the launcher on machine 0 has ended", hint="its own message says why"
            ) from error

    def leave(self, attempt: int) -> Trouble | None:
        """Wait until all machines have finished; the trouble that one announced instead."""
        deadline_s = time.monotonic() + _LEAVE_S
        # Machine 0 takes the store with it: from then on there is nobody to wait for.
        with contextlib.suppress(dist.DistError, RunFailedError):
            self._store.add(f"attempt-{attempt}/finished", 1)
            while self._store.add(f"attempt-{attempt}/finished", 0) < self._num_nodes:
                found = self.trouble(attempt)
                if found is not None or time.monotonic() > deadline_s:
                    return found
                # Not a pause that a stop ends: the stop has been heeded, this is its last part.
                time.sleep(_POLL_S)
        return None

    def part(self, attempt: int) -> None:
        """End the run after a failure; machine 0 waits until all have read why, as it serves it."""
        key = f"attempt-{attempt}/parted"
        deadline_s = time.monotonic() + _PART_S
        with contextlib.suppress(dist.DistError):
            parted = self._store.add(key, 1)
            while self._node_rank == 0 and parted < self._num_nodes:
                if time.monotonic() > deadline_s:
                    return
                time.sleep(_POLL_S)
                parted = self._store.add(key, 0)

    def _pause(self) -> None:
        self._check_stop()
        time.sleep(_POLL_S)

    def _find(self, address: Address) -> Any:
        """Machine 0's store; it may be started after this machine."""
        deadline_s = time.monotonic() + self._join_s
        while True:
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=1.0):
                return connect(address, timedelta(seconds=_ANSWER_S))
            if time.monotonic() > deadline_s:
                raise UnfitEnvironmentError(
                    f"{address[0]}:{address[1]} did not answer within {self._join_s:g} s",
                    hint="start machine 0, and see that --rdzv-endpoint names it",
                )
            self._pause()


def connect(address: Address, timeout: timedelta) -> Any:
    """The store at an address, for a launcher or a worker."""
    return TCPStore(address[0], address[1], is_master=False, timeout=timeout)


def _serve(address: Address) -> tuple[Any, Address]:
    """A store on a socket of our own: torch's would listen on every address of the machine."""
    host, port = address
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server(address, family=family)
    except OSError as error:
        raise InvalidInputError(
            f"--rdzv-endpoint {host}:{port}: machine 0 cannot listen there: {error.strerror}",
            hint="name an address of machine 0 and a free port",
        ) from error
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_ANSWER_S),
        master_listen_fd=listener.detach(),
    )
    return store, (host, port)


def _parsed(endpoint: str) -> Address:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidInputError(
            f"--rdzv-endpoint {endpoint}: no HOST:PORT", hint="as in --rdzv-endpoint node0:29400"
        )
    return host.strip("[]"), int(port)
