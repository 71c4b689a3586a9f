"""This machine's part of a Ray cluster that prepares data: started, joined and ended in order.

Ray does the work and listens on the network; here stand the options with which it does so: a token
is always asked for, nothing is spilled to disk, and what a node leaves lies in one folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from mmlaunch.launch.addresses import parse_endpoint
from mmlaunch.process.process_tree import die_with_parent
from mmplan.errors import InvalidInputError, MMPlanError, RunFailedError, UnfitEnvironmentError

# What a node offers for each of its cores; tasks run nowhere else.
PRODUCER = "mmlaunch_producer"
# Ray's own default, as other nodes and `ray status` expect it.
DEFAULT_PORT = 6379
# Processes of Ray end where the head is silent for so long; its 60 s are long for a step.
_HEAD_SILENT_S = 15
_SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(_HEAD_SILENT_S),
    # Without spilling each full store is a line of a lower level, many a second.
    "RAY_BACKEND_LOG_LEVEL": "warning",
    "RAY_ROTATION_MAX_BYTES": str(10 << 20),
}
_OF_HEAD = {
    "automatic_object_spilling_enabled": False,
    "gcs_rpc_server_reconnect_timeout_s": _HEAD_SILENT_S,
}
# What Ray says.
_UP = "Ray runtime started."
_REFUSED = "InvalidAuthToken"
# Between two looks, for a node to end by itself, and until it is started again; chosen by hand.
_LOOK_S = 0.2
_END_S = 20.0
_AGAIN_S = 2.0


def take_settings(what: str, *, make_token: bool = False) -> str:
    """Set Ray's variables in this process and find the token; returns where that is.

    Args:
        what: needs it, for messages.
        make_token: where there is none.

    Raises:
        UnfitEnvironmentError: Ray is not installed.
        InvalidInputError: there is no token, or others can read it.
    """
    if importlib.util.find_spec("ray") is None:
        raise UnfitEnvironmentError(
            f"{what} needs the package ray, which is not installed",
            hint='pip install -e ".[ray]" has it, or pip install "ray>=2.52"',
        )
    os.environ.update(_SETTINGS)
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "the variable RAY_AUTH_TOKEN"
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        if make_token and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
        if path.stat().st_mode & 0o077:
            raise InvalidInputError(f"{path}: others can read it", hint=f"chmod 600 {path}")
    except OSError as error:
        raise InvalidInputError(
            f"{path}: no token for {what}: {error.strerror}",
            hint="put the head's token there (chmod 600), or into RAY_AUTH_TOKEN",
        ) from None
    return str(path)


def arguments(
    *, address: str | None, head: bool, cpus: int, store_bytes: int | None, folder: Path
) -> list[str]:
    """Of ``ray start``, for one node.

    Args:
        address: of the head; where this is it, what it listens on, or None.
        head: whether it begins a cluster.
        cpus: cores that it offers.
        store_bytes: of the object store; None for Ray's share of the memory.
        folder: of its logs and sockets.
    """
    parts = ["start", "--block", "--num-cpus", str(cpus), "--num-gpus", "0"]
    parts += ["--resources", json.dumps({PRODUCER: cpus} if cpus else {})]
    parts += ["--temp-dir", str(folder), "--include-log-monitor", "false"]
    if store_bytes is not None:
        parts += ["--object-store-memory", str(store_bytes)]
    if head:
        host, port = parse_endpoint(address, "--address") if address else (None, DEFAULT_PORT)
        parts += ["--head", "--port", str(port), "--include-dashboard", "false"]
        parts += ["--system-config", json.dumps(_OF_HEAD)]
        parts += ["--node-ip-address", host] if host else []
    else:
        parts += ["--address", str(address)]
    return parts


class RayNode:
    """Ray's processes of one node, below one that this process starts.

    Args:
        address: of the head; see :func:`arguments`.
        head: whether it begins a cluster.
        cpus: cores that it offers.
        store_bytes: of its object store.

    Attributes:
        folder: of its logs and sockets; gone at the end.
    """

    def __init__(
        self,
        *,
        address: str | None,
        head: bool = False,
        cpus: int = 0,
        store_bytes: int | None = None,
    ) -> None:
        # A socket's path has 107 bytes, of which Ray takes some seventy: no place but this.
        self.folder = Path(tempfile.mkdtemp(prefix="mmdata-", dir="/tmp"))
        self._address, self._head = address, head
        self._arguments = arguments(
            address=address, head=head, cpus=cpus, store_bytes=store_bytes, folder=self.folder
        )
        self._log = self.folder / "node.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start Ray's processes; returns at once."""
        with self._log.open("wb") as log:
            # A group of its own: Ctrl-C is for the process that ends it in order.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mmlaunch.data.ray_node", *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, go_on: Callable[[], bool] = lambda: True) -> None:
        """Wait until the node is in the cluster.

        Args:
            go_on: asked meanwhile.

        Raises:
            UnfitEnvironmentError: there is no head, its token is another one, or Ray says no.
        """
        if not self._head:
            self._find_head()
        while go_on() and _UP not in self._said():
            # Of another token Ray says so and tries again for minutes.
            if self.ended() or _REFUSED in self._said():
                raise self._refusal()
            time.sleep(_LOOK_S)

    def address(self) -> str:
        """HOST:PORT by which others join the cluster, once it is up."""
        found = re.search(r"ray start --address='([^']+)'", self._said())
        return found[1] if found else str(self._address)

    def ended(self) -> bool:
        """Whether its processes are gone."""
        return self._process is None or self._process.poll() is not None

    def close(self) -> None:
        """End its processes, and remove its folder."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                # The kernel ends Ray's processes with the one that started them.
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _find_head(self) -> None:
        try:
            with socket.create_connection(parse_endpoint(str(self._address), "--address"), 10):
                pass
        except OSError as error:
            raise UnfitEnvironmentError(
                f"no head of a cluster for data at {self._address}: {error.strerror or error}",
                hint="start it there: mmlaunch data --head",
            ) from None

    def _refusal(self) -> MMPlanError:
        said = self._said()
        if _REFUSED in said:
            return UnfitEnvironmentError(
                f"the head at {self._address} has another token",
                hint="put the head's token into ~/.ray/auth_token (chmod 600) or RAY_AUTH_TOKEN",
            )
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        last = lines[-1] if lines else "it ended without a word"
        return UnfitEnvironmentError(f"ray start: {last}", hint="ray's own message; see its docs")


def serve(node: RayNode, *, on_up: Callable[[], None]) -> None:
    """Be a node until SIGTERM or SIGINT.

    Args:
        node: not started yet.
        on_up: called once it is in the cluster.

    Raises:
        MMPlanError: from the start.
        RunFailedError: it ended by itself.
    """
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    try:
        node.start()
        node.wait(lambda: not stop.is_set())
        if not stop.is_set():
            on_up()
        while not stop.wait(_LOOK_S):
            if node.ended():
                raise RunFailedError(
                    "the node of the cluster for data has ended, or its head has",
                    hint="start the head first, then this node again",
                )
    finally:
        node.close()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def joined(address: str) -> Generator[Path]:
    """Make this machine a node that offers no cores, for the ranks on it; gives its folder.

    Where the node ends, as with the cluster's head, it is started anew until it comes up.

    Raises:
        MMPlanError: it does not join.
    """
    parse_endpoint(address, "--data-address")
    take_settings("--data-address")
    node, stop = RayNode(address=address), threading.Event()

    def keep() -> None:
        while not stop.wait(_AGAIN_S):
            if node.ended():
                with contextlib.suppress(OSError):
                    node.start()

    thread = threading.Thread(target=keep, name="mmlaunch-data", daemon=True)
    try:
        node.start()
        node.wait()
        thread.start()
        yield node.folder
    finally:
        stop.set()
        if thread.ident is not None:
            thread.join()
        node.close()


if __name__ == "__main__":
    die_with_parent()
    from ray.scripts.scripts import main

    main()
