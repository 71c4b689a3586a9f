"""One launcher on each host, started over ssh from one machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mmlaunch.launch.hosts import Host
from mmplan.errors import UnfitEnvironmentError

# Below the ports that systems give to clients.
_FIRST_PORT = 20_000
_PORTS = 10_000
_POLL_S = 0.1
# For the other launchers to end after one has: they tell each other why; chosen by hand.
_GRACE_S = 60.0

# A line, and whether it is the first launcher's own on stdout.
OnLine = Callable[[str, bool], None]


def run_on_hosts(
    hosts: Sequence[Host],
    arguments: Sequence[str],
    *,
    ssh: str,
    endpoint: str | None,
    secret: bytes | None,
    on_line: OnLine,
) -> int:
    """Start ``mmlaunch`` on every host, and wait for all.

    The current folder and the program have the same paths everywhere. The secret goes through
    ssh's stdin, whose end asks a launcher to stop: none outlives this process. The first signal
    does so too, the second ends all at once.

    Args:
        hosts: by node.
        arguments: of the command, without those of hosts.
        ssh: a command line, to which host and command are added.
        endpoint: of machine 0; None: a random port of the first host.
        secret: of the run; None makes one.
        on_line: gets what the launchers write, those of other hosts than the first named.

    Returns:
        The exit code of the first launcher that failed; 0 where none did.

    Raises:
        UnfitEnvironmentError: there is no such ssh.
    """
    first = hosts[0].name.rpartition("@")[2]
    endpoint = endpoint or f"{first}:{_FIRST_PORT + secrets.randbelow(_PORTS)}"
    names = ",".join(host.name for host in hosts)
    key = secret or secrets.token_hex(32).encode()
    program = Path(sys.executable).with_name("mmlaunch")
    agents: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    with _signals(agents) as stop:
        for node, host in enumerate(hosts):
            numbers = ["--nnodes", str(len(hosts)), "--node-rank", str(node)]
            where = [*numbers, "--rdzv-endpoint", endpoint, "--host-names", names]
            words = [str(program), *arguments, *where, "--secret-file", "-"]
            line = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
            agent = _start([*shlex.split(ssh), host.name, line], key)
            agents.append(agent)
            for pipe in (agent.stdout, agent.stderr):
                is_result = node == 0 and pipe is agent.stdout
                mark = f"{host.name}: " if node else ""
                readers.append(
                    threading.Thread(target=_copy, args=(pipe, mark, is_result, on_line))
                )
                readers[-1].start()
        code = _wait(agents, stop)
    for reader in readers:
        reader.join()
    return code


def _start(command: Sequence[str], secret: bytes) -> subprocess.Popen[str]:
    try:
        agent = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for this process, which asks for a stop
        )
    except OSError as error:
        raise UnfitEnvironmentError(
            f"--ssh {command[0]}: cannot be started: {error.strerror}", hint="install ssh"
        ) from error
    assert agent.stdin is not None
    with contextlib.suppress(OSError):  # it has ended; its exit code says so
        agent.stdin.write(secret.decode() + "\n")
        agent.stdin.flush()
    return agent


def _wait(agents: Sequence[subprocess.Popen[str]], stop: threading.Event) -> int:
    """The exit code of the first that failed, once all have ended."""
    code, failed_s = 0, 0.0
    while any(agent.poll() is None for agent in agents):
        time.sleep(_POLL_S)
        codes = [agent.returncode for agent in agents if agent.returncode]
        if codes and not code:
            code, failed_s = codes[0], time.monotonic()
        if stop.is_set() or (code and time.monotonic() > failed_s + _GRACE_S):
            _ask_to_stop(agents)
    return code or next((agent.returncode for agent in agents if agent.returncode), 0)


def _ask_to_stop(agents: Sequence[subprocess.Popen[str]]) -> None:
    for agent in agents:
        with contextlib.suppress(OSError):
            if agent.stdin is not None:
                agent.stdin.close()


def _copy(pipe: IO[str], mark: str, is_result: bool, on_line: OnLine) -> None:
    for line in pipe:
        on_line(mark + line.rstrip("\n"), is_result)


@contextmanager
def _signals(agents: Sequence[subprocess.Popen[str]]) -> Generator[threading.Event]:
    """The event is set by the first signal."""
    stop = threading.Event()

    def handle(_signum: int, _frame: object) -> None:
        if stop.is_set():
            for agent in agents:
                agent.kill()
        stop.set()

    ours = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {sig: signal.signal(sig, handle) for sig in ours}
    try:
        yield stop
    finally:
        _ask_to_stop(agents)
        for sig, handler in before.items():
            signal.signal(sig, handler)
