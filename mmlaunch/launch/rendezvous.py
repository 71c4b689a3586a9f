"""The launchers of one run find each other, and agree on restarts and on its end.

Machine 0 serves the run's store; the others look in. Before anything is started, each machine
says what it is and where it is reached, and tries to reach every other there: what would be a wait
without a word between ranks is one line that names both ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmlaunch.launch import addresses
from mmlaunch.launch.hosts import SECRET, Meeting
from mmlaunch.launch.store import Address, RefusedError, Store, StoreServer
from mmplan.errors import InvalidInputError, MMPlanError, RunFailedError, UnfitEnvironmentError
from mmplan.wording import counted

# Between two looks at the store, and for a signal; chosen by hand.
_POLL_S = 0.05
# Between two looks for what other machines announce: they go over the network; chosen by hand.
_PEERS_POLL_S = 0.5
# Longest wait for an answer of the store in a meeting; chosen by hand.
_ANSWER_S = 30.0
# For a file of machine 0 to be seen elsewhere: file systems on the network look rarely; by hand.
_SEEN_S = 20.0
# For one machine to answer another; chosen by hand.
_REACH_S = 5.0
# Time for the other machines to end after this one has; chosen by hand.
_LEAVE_S = 60.0
# Time for the other machines to read why this one has ended; chosen by hand.
_PART_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why an attempt ended on one machine, and whether all machines restart."""

    node: int
    line: str
    restart: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    """What a machine says of itself.

    Attributes:
        name: as its system calls it.
        port: of the address, where it answers the others.
        token: of the run folder; machine 0's is written there.
    """

    node: int
    name: str
    address: str
    port: int
    num_local: int
    versions: str
    token: str


class Rendezvous:
    """One launcher's side. Every method polls, so that a signal is heard while it waits.

    Args:
        meeting: who comes.
        folder: of the run, which all machines share.
        silent_s: longest silence of a machine while workers run, seconds.
        check_stop: called while waiting; raises to end the wait.

    Attributes:
        address: of the store, as workers of this machine reach it.
        secret: of the run.
        interface: of this machine, to which torch's and NCCL's sockets are bound.
        results: after :meth:`leave`, those of all ranks on machine 0, elsewhere of its own.

    Raises:
        InvalidInputError: the endpoint is no address of machine 0, or the folder is not shared.
        UnfitEnvironmentError: machine 0 does not answer in time.
    """

    def __init__(
        self, meeting: Meeting, *, folder: Path, silent_s: float, check_stop: Callable[[], None]
    ) -> None:
        self._meeting, self._folder, self.silent_s = meeting, folder, silent_s
        self.node, self.num_nodes = meeting.node_rank, meeting.num_nodes
        self._check_stop = check_stop
        self._machines: list[_Machine] = []
        self._look: _Look | None = None
        self.results: list[Any] = []
        self._server: StoreServer | None = None
        endpoint = (addresses.LOOPBACK, 0)
        if meeting.endpoint is not None:
            endpoint = addresses.parse_endpoint(meeting.endpoint)
        if self.node == 0:
            self._local = addresses.of_first_machine(endpoint, meeting.local_addr)
            self.secret = meeting.secret or self._new_secret()
            self._server = _serve((self._local, endpoint[1]), self.secret)
            self.address = self._server.address
            self._store = self._connect(_ANSWER_S)
        else:
            self.address = endpoint
            self._store = self._find()
            self._local = meeting.local_addr or addresses.toward(endpoint) or addresses.LOOPBACK
        self.interface = addresses.interface_of(self._local)

    def meet(self, num_local: int) -> None:
        """Learn of every machine, and make sure that all reach each other and share the folder.

        Args:
            num_local: workers of this machine.

        Raises:
            InvalidInputError: two machines say that they are the same one, or do not share the
                run folder.
            UnfitEnvironmentError: a machine does not come in time, cannot be reached by another,
                or has other versions; names them.
        """
        if self.num_nodes == 1:
            return
        token = secrets.token_hex(16)
        if self.node == 0:
            (self._first_folder() / "token").write_text(token)
        server = StoreServer((self._local, 0), self.secret)
        try:
            mine = _Machine(
                node=self.node,
                name=socket.gethostname(),
                address=self._local,
                port=server.address[1],
                num_local=num_local,
                versions=f"torch {torch.__version__}, Python {platform.python_version()}",
                token=token,
            )
            with Store(server.address, self.secret, timedelta(seconds=_ANSWER_S)) as own:
                own.set("node", str(self.node))
            self._machines = [_Machine(**one) for one in self._exchange("machine", asdict(mine))]
            fault = self._fault()
            faults = self._exchange("met", {"fault": fault and str(fault)})
        finally:
            server.close()
        told = next((one["fault"] for one in faults if one["fault"]), None)
        if told is not None:
            self._part_after("met")
            raise fault or UnfitEnvironmentError(told, hint="look at the launcher there")

    def join(self, attempt: int) -> str:
        """Wait until every machine has come to an attempt.

        Args:
            attempt: 0, then one more for each restart.

        Returns:
            A prefix for the attempt's keys: without one of its own it would read the
            addresses of the last attempt's dead workers.

        Raises:
            UnfitEnvironmentError: a machine does not come in time; names it.
        """
        if self._look is not None:
            self._look.end()
        self._exchange(f"attempt-{attempt}", {})
        self._look = _Look(self, attempt) if self.num_nodes > 1 else None
        return f"attempt-{attempt}/"

    def announce(self, attempt: int, trouble: Trouble) -> Trouble:
        """Say why an attempt has ended here; the first to say so decides for all."""
        mine = json.dumps(asdict(trouble))
        with contextlib.suppress(dist.DistError):
            said = self._store.compare_set(f"attempt-{attempt}/trouble", "", mine)
            return Trouble(**json.loads(said))
        return trouble

    def trouble(self) -> Trouble | None:
        """The trouble that another machine has announced, as far as is known by now.

        Raises:
            RunFailedError: a machine does not answer any more.
        """
        return None if self._look is None else self._look.found()

    def leave(self, attempt: int, results: Sequence[Any]) -> Trouble | None:
        """Wait until all machines have finished; the trouble that one announced instead.

        Args:
            attempt: that has ended.
            results: of this machine's workers, JSON.
        """
        deadline_s = time.monotonic() + _LEAVE_S
        self.results = [*results]
        # Machine 0 takes the store with it: from then on there is nobody to wait for.
        with contextlib.suppress(dist.DistError, RunFailedError):
            keys = [f"attempt-{attempt}/results-{node}" for node in range(self.num_nodes)]
            self._store.set(keys[self.node], json.dumps(self.results))
            while not self._store.check(keys):
                found = self.trouble()
                if found is not None or time.monotonic() > deadline_s:
                    return found
                # Not a pause that a stop ends: the stop has been heeded, this is its last part.
                time.sleep(_POLL_S)
            if self.node == 0:
                said = self._store.multi_get(keys)
                self.results = [one for text in said for one in json.loads(text)]
            self._part(f"attempt-{attempt}/left", _PART_S)
        return None

    def part(self, attempt: int) -> None:
        """End the run after a failure; machine 0 waits until all have read why, as it serves it."""
        self._part_after(f"attempt-{attempt}")

    def close(self) -> None:
        """Close the connections; on machine 0 the store ends."""
        if self._look is not None:
            self._look.end()
        self._store.close()
        if self._server is not None:
            self._server.close()

    def who(self, node: int) -> str:
        """What a machine is called in messages."""
        name = self._machines[node].name if self._machines else ""
        name = name or (self._meeting.names[node] if self._meeting.names else "")
        return f"machine {node} ({name})" if name else f"machine {node}"

    def silence_of(self, node: int) -> str:
        """What is said of a machine that has not been heard of for too long."""
        here, there = self._machines[self.node], self._machines[node]
        return (
            f"{here.name} at {here.address} has heard nothing of {there.name} at {there.address} "
            f"for {self.silent_s:g} s"
        )

    def store_for_looks(self) -> Store:
        """The store, on a connection that is silent for as long as a machine may be."""
        return self._connect(self.silent_s)

    def _part_after(self, what: str) -> None:
        with contextlib.suppress(dist.DistError):
            self._part(f"{what}/parted", _PART_S)

    def _part(self, key: str, patience_s: float) -> None:
        deadline_s = time.monotonic() + patience_s
        parted = self._store.add(key, 1)
        while self.node == 0 and parted < self.num_nodes:
            if time.monotonic() > deadline_s:
                return
            time.sleep(_POLL_S)
            parted = self._store.add(key, 0)

    def _exchange(self, key: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What each machine says, by node, once all have."""
        keys = [f"{key}/node-{node}" for node in range(self.num_nodes)]
        text = json.dumps(mine | {"id": secrets.token_hex(8)})
        try:
            if self._store.compare_set(keys[self.node], "", text).decode() != text:
                raise InvalidInputError(
                    f"two machines say that they are node {self.node}",
                    hint=f"give each its own --node-rank, from 0 to {self.num_nodes - 1}",
                )
            deadline_s = time.monotonic() + self._meeting.join_s
            while not self._store.check(keys):
                if time.monotonic() > deadline_s:
                    absent = [n for n, one in enumerate(keys) if not self._store.check([one])]
                    raise self._nobody_came(absent)
                self._pause()
            said = [json.loads(text) for text in self._store.multi_get(keys)]
        except dist.DistError as error:
            raise RunFailedError(
                f"{self.who(0)} has ended while the machines came together",
                hint="its own message says why",
            ) from error
        return [{name: value for name, value in one.items() if name != "id"} for one in said]

    def _nobody_came(self, absent: Sequence[int]) -> MMPlanError:
        few = ", ".join(self.who(node).removeprefix("machine ") for node in absent[:5])
        more = f" and {counted(len(absent) - 5, 'other')}" if len(absent) > 5 else ""
        what = "machine" if len(absent) == 1 else "machines"
        line = (
            f"{what} {few}{more} of {self.num_nodes} did not come within {self._meeting.join_s:g} s"
        )
        stranger = None if self._server is None else self._server.refused
        if stranger is not None:
            return UnfitEnvironmentError(
                f"{line}; {stranger} was refused: it did not know the run's secret",
                hint="the launcher there says why: --run-dir is not shared, or --secret-file is "
                "another one",
            )
        return UnfitEnvironmentError(
            line,
            hint="start mmlaunch run with its --node-rank there, or wait longer: --join-timeout",
        )

    def _fault(self) -> MMPlanError | None:
        """What this machine finds wrong with the others, as it sees them."""
        first, mine = self._machines[0], self._machines[self.node]
        if mine.versions != first.versions:
            return UnfitEnvironmentError(
                f"{first.name} has {first.versions}, and {mine.name} has {mine.versions}",
                hint="install the same on all machines",
            )
        if not self._sees(self._first_folder() / "token", first.token):
            return InvalidInputError(
                f"{mine.name} does not see in {self._folder} what {first.name} has written there",
                hint="all machines of a run share its folder: name one that they do, --run-dir",
            )
        others = [one for one in self._machines if one.node != self.node]
        with ThreadPoolExecutor(min(32, len(others))) as pool:
            reasons = list(pool.map(self._unreachable, others))
        for other, reason in zip(others, reasons, strict=True):
            if reason is not None:
                return UnfitEnvironmentError(
                    f"{mine.name} cannot reach {other.name}'s {other.address}:{other.port}: "
                    f"{reason}",
                    hint=f"give {other.name} --local-addr, or open its ports to {mine.name}",
                )
        return None

    def _unreachable(self, other: _Machine) -> str | None:
        """The reason why a machine is not reached where it says; None where it answers."""
        try:
            limit = timedelta(seconds=_REACH_S)
            with Store((other.address, other.port), self.secret, limit) as found:
                answer = found.get("node").decode()
        except (OSError, dist.DistError) as error:
            return getattr(error, "strerror", None) or str(error)
        return None if answer == str(other.node) else f"machine {answer} answers there"

    def _sees(self, path: Path, text: str) -> bool:
        deadline_s = time.monotonic() + _SEEN_S
        while _read(path) != text:
            if time.monotonic() > deadline_s:
                return False
            self._pause()
        return True

    def _first_folder(self) -> Path:
        return self._folder / "launch-node0"

    def _new_secret(self) -> bytes:
        """Of this run; with several machines it lies where only the user can read it."""
        secret = secrets.token_hex(32)
        if self.num_nodes > 1:
            path = self._first_folder() / "secret"
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secret)
        return secret.encode()

    def _pause(self) -> None:
        self._check_stop()
        time.sleep(_POLL_S)

    def _connect(self, timeout_s: float) -> Store:
        return Store(self.address, self.secret, timedelta(seconds=timeout_s))

    def _find(self) -> Store:
        """Machine 0's store; it may be started after this machine."""
        host, port = self.address
        given = self._meeting.secret
        deadline_s = time.monotonic() + self._meeting.join_s
        answered_s: float | None = None
        while True:
            # An earlier run, killed, may have left another secret there.
            secret = given or _read(self._first_folder() / "secret").encode()
            try:
                self.secret = secret or b"-"
                store = self._connect(_REACH_S)
                store.set_timeout(timedelta(seconds=_ANSWER_S))
                return store
            except RefusedError as error:
                answered_s = answered_s or time.monotonic()
                if given is not None or time.monotonic() > answered_s + _SEEN_S:
                    raise self._stranger(given is not None, secret) from error
            except OSError:
                answered_s = None
            if time.monotonic() > deadline_s:
                raise UnfitEnvironmentError(
                    f"machine 0 did not answer at {host}:{port} within {self._meeting.join_s:g} s",
                    hint="start machine 0, and see that --rdzv-endpoint names it",
                )
            self._pause()

    def _stranger(self, is_given: bool, secret: bytes) -> MMPlanError:
        host, port = self.address
        me = socket.gethostname()
        if is_given or secret:
            return InvalidInputError(
                f"machine 0 at {host}:{port} has another secret than {me}",
                hint=f"give all machines the same {SECRET} or --secret-file, or none",
            )
        return InvalidInputError(
            f"{me} does not see in {self._folder} what machine 0 at {host}:{port} wrote there",
            hint="all machines of a run share its folder: name one that they do, --run-dir",
        )


class _Look:
    """Looks in the store from a thread of its own: a link that is cut must not stop the launcher.

    Each machine counts; machine 0 sees who has stopped counting, and the others whether the store
    answers.
    """

    def __init__(self, rendezvous: Rendezvous, attempt: int) -> None:
        self._rendezvous, self._attempt = rendezvous, attempt
        self._trouble: Trouble | None = None
        self._lost: RunFailedError | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._go_on, name="mmlaunch-look", daemon=True).start()

    def found(self) -> Trouble | None:
        """What it has seen; raises RunFailedError where a machine is lost."""
        if self._trouble is None and self._lost is not None:
            raise self._lost
        return self._trouble

    def end(self) -> None:
        """Look no more."""
        self._ended.set()

    def _go_on(self) -> None:
        host, port = self._rendezvous.address
        first = self._rendezvous.who(0)
        try:
            with self._rendezvous.store_for_looks() as store:
                self._poll(store)
        except dist.DistNetworkError:
            self._lost = RunFailedError(f"{first} has ended", hint="its own message says why")
        except (dist.DistError, OSError) as error:
            self._lost = RunFailedError(
                f"{self._rendezvous.who(self._rendezvous.node)} has heard nothing of {first} at "
                f"{host}:{port} for {self._rendezvous.silent_s:g} s",
                hint=f"look at that machine and the link to it ({error})",
            )

    def _poll(self, store: Store) -> None:
        rendezvous, prefix = self._rendezvous, f"attempt-{self._attempt}"
        alive = [f"{prefix}/alive-{node}" for node in range(rendezvous.num_nodes)]
        heard = [(0, time.monotonic()) for _ in alive]
        while not self._ended.wait(_PEERS_POLL_S):
            store.add(alive[rendezvous.node], 1)
            if store.check([f"{prefix}/trouble"]):
                self._trouble = Trouble(**json.loads(store.get(f"{prefix}/trouble")))
                return
            for node, key in enumerate(alive if rendezvous.node == 0 else ()):
                count, now_s = store.add(key, 0), time.monotonic()
                if count != heard[node][0]:
                    heard[node] = count, now_s
                elif now_s - heard[node][1] > rendezvous.silent_s:
                    silent = Trouble(node=node, line=rendezvous.silence_of(node), restart=False)
                    rendezvous.announce(self._attempt, silent)


def _serve(address: Address, secret: bytes) -> StoreServer:
    try:
        return StoreServer(address, secret)
    except OSError as error:
        host, port = address
        raise InvalidInputError(
            f"--rdzv-endpoint: machine 0 cannot listen at {host}:{port}: {error.strerror}",
            hint="name an address of machine 0 and a free port",
        ) from error


def _read(path: Path) -> str:
    """A short file's text without its end of line; empty where there is none yet."""
    try:
        # Looking into the folder makes a file system on the network ask its server again.
        os.listdir(path.parent)
        with path.open(encoding="utf-8") as file:
            return file.read(4096).strip()
    except (OSError, UnicodeDecodeError):
        return ""
