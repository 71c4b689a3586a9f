"""The store of a run: small values under keys, for those who know the run's secret.

torch's TCPStore asks nobody who he is: a stranger may list, change and delete its keys. This one
serves torch's backends in its place. A connection begins with a number of each side, used once;
every message carries an HMAC-SHA256 under a key made from these and the secret, over its direction
and its place in the conversation. So nothing can be forged or played back. Messages are JSON.

What a stranger can do is bounded: he may send 64 bytes, within seconds, on one of a few
connections. The secret protects values from change, it does not hide them.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Address = tuple[str, int]

# Connections that have not proved that they know the secret, and how long they may be so. More
# wait in the kernel's queue.
_STRANGERS = 256
_PROOF_S = 5.0
# A message's body: gloo's addresses and results of ranks are far smaller.
_MOST_BYTES = 16 << 20
_NONCE_BYTES = 32
_TAG_BYTES = 32
_LENGTH_BYTES = 4
_SWEEP_S = 1.0
_CHUNK = 1 << 16


class RefusedError(ConnectionError):
    """The other side does not know the secret, or says so of this one."""


@dataclass(slots=True)
class _Conversation:
    """Frames of one conversation, as one side writes and reads them.

    Attributes:
        key: of this conversation alone.
        serves: whether this is the server's side.
    """

    key: bytes
    serves: bool
    num_sent: int = 0
    num_read: int = 0

    def frame(self, body: bytes) -> bytes:
        """A message's bytes: length, tag, body."""
        tag = self._tag(self.serves, self.num_sent, body)
        self.num_sent += 1
        return len(body).to_bytes(_LENGTH_BYTES, "big") + tag + body

    def check(self, tag: bytes, body: bytes) -> None:
        """Raises RefusedError unless the tag is that of the next message."""
        if not hmac.compare_digest(tag, self._tag(not self.serves, self.num_read, body)):
            raise RefusedError("a message that nobody with the secret has written")
        self.num_read += 1

    def _tag(self, from_server: bool, number: int, body: bytes) -> bytes:
        head = bytes([from_server]) + number.to_bytes(8, "big")
        return hmac.digest(self.key, head + body, hashlib.sha256)


def _conversation(secret: bytes, server: bytes, client: bytes, *, serves: bool) -> _Conversation:
    key = hmac.digest(secret, b"mmlaunch store" + server + client, hashlib.sha256)
    return _Conversation(key=key, serves=serves)


def _length(head: bytes) -> int:
    length = int.from_bytes(head, "big")
    if length > _MOST_BYTES:
        raise RefusedError(f"a message of {length} bytes")
    return length


class StoreServer:
    """Serves a store from a thread of this process until it is closed.

    Args:
        address: to listen on, port 0 for a free one.
        secret: of the run.

    Attributes:
        address: where it listens.
        refused: the host of the last one who came without the secret; None: nobody.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, address: Address, secret: bytes) -> None:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server(address, family=family, backlog=1024)
        self._listener.setblocking(False)
        self.address: Address = address[0], self._listener.getsockname()[1]
        self.refused: str | None = None
        self._secret = secret
        self._values: dict[str, str] = {}
        self._waiting: dict[str, list[_Client]] = defaultdict(list)
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._accepts = False
        self._thread = threading.Thread(target=self._serve, name="mmlaunch-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving; connections are closed."""
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        self._thread.join()

    def _serve(self) -> None:
        while True:
            self._sweep()
            for key, _ in self._selector.select(_SWEEP_S):
                if key.fileobj is self._woken:
                    self._end()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data in self._clients:
                    self._attend(key.data)

    def _end(self) -> None:
        for client in self._clients:
            client.socket.close()
        for one in (self._selector, self._listener, self._wake, self._woken):
            one.close()

    def _sweep(self) -> None:
        """Let go of strangers who are late, and take new connections where there is room."""
        now_s = time.monotonic()
        strangers = [client for client in self._clients if client.channel is None]
        for client in strangers:
            if now_s > client.proof_until_s:
                self._drop(client)
        room = len(strangers) < _STRANGERS
        if room and not self._accepts:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._accepts and not room:
            self._selector.unregister(self._listener)
        self._accepts = room

    def _accept(self) -> None:
        try:
            accepted, (host, *_) = self._listener.accept()
        except OSError:  # it is gone again, or this process has no descriptor left
            time.sleep(0.01)
            return
        accepted.setblocking(False)
        _set_options(accepted)
        client = _Client(accepted, host, time.monotonic() + _PROOF_S)
        client.outbox += client.nonce
        self._clients.add(client)
        self._selector.register(accepted, selectors.EVENT_READ, client)
        self._attend(client)

    def _attend(self, client: _Client) -> None:
        """Read, answer and write as much as can be done now; whoever breaks a rule is let go."""
        try:
            if not client.receive():
                self._drop(client)
                return
            self._answer(client)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            if isinstance(error, RefusedError):
                self.refused = client.host
            self._drop(client)

    def _answer(self, client: _Client) -> None:
        if client.channel is None:
            client.prove(self._secret)
        # One request at a time: answers that nobody reads do not pile up.
        while client.flush() and client.request is None:
            client.request = client.next_request()
            if client.request is None:
                break
            self._act(client)
        self._look_at(client)

    def _look_at(self, client: _Client) -> None:
        """Before an answer is written nothing more is read: it stays with the kernel."""
        events = selectors.EVENT_WRITE if client.outbox else selectors.EVENT_READ
        self._selector.modify(client.socket, events, client)

    def _act(self, client: _Client) -> None:
        """Carry out a request; one for keys that are absent waits for the first of them."""
        request, values = client.request, self._values
        assert request is not None
        assert client.channel is not None
        answer: Any = None
        match request["do"]:
            case "set":
                for key, value in request["items"].items():
                    values[str(key)] = str(value)
            case "get" | "wait":
                absent = next((key for key in request["keys"] if key not in values), None)
                if absent is not None:
                    self._waiting[absent].append(client)
                    return
                wanted = request["do"] == "get"
                answer = [values[key] for key in request["keys"]] if wanted else None
            case "check":
                answer = all(key in values for key in request["keys"])
            case "add":
                total = int(values.get(request["key"], "0")) + int(request["amount"])
                answer = total
                values[str(request["key"])] = str(total)
            case "swap":
                key = str(request["key"])
                # As torch's: an absent key is taken for an empty value.
                if values.get(key, "") == request["old"]:
                    values[key] = str(request["new"])
                answer = values.get(key, request["old"])
            case "append":
                key = str(request["key"])
                values[key] = values.get(key, "") + str(request["value"])
            case "delete":
                answer = values.pop(request["key"], None) is not None
            case "count":
                answer = len(values)
            case _:
                raise ValueError("no such request")
        client.request = None
        client.outbox += client.channel.frame(json.dumps(answer).encode())
        for key in _written(request):
            for waiter in self._waiting.pop(key, ()):
                if waiter in self._clients:
                    self._act(waiter)
                    self._look_at(waiter)

    def _drop(self, client: _Client) -> None:
        self._clients.discard(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.socket)
        client.socket.close()


@dataclass(eq=False, slots=True)
class _Client:
    """A connection, as the server sees it.

    Attributes:
        host: from where it comes.
        proof_until_s: when it must have shown that it knows the secret.
        channel: None before it has.
        request: under way; None between two.
    """

    socket: socket.socket
    host: str
    proof_until_s: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(_NONCE_BYTES))
    channel: _Conversation | None = None
    request: Mapping[str, Any] | None = None
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)

    def receive(self) -> bool:
        """Take what has come, a stranger's proof or at most one long message; false at the end."""
        most = _LENGTH_BYTES + _TAG_BYTES + _MOST_BYTES
        if self.channel is None:
            most = _NONCE_BYTES + _TAG_BYTES
        if len(self.inbox) >= most:
            raise RefusedError("more than a message in one go")
        try:
            found = self.socket.recv(min(_CHUNK, most - len(self.inbox)))
        except BlockingIOError:
            return True
        self.inbox += found
        return bool(found)

    def prove(self, secret: bytes) -> None:
        """Check the stranger's proof once it is there, and answer with the server's own."""
        if len(self.inbox) < _NONCE_BYTES + _TAG_BYTES:
            return
        nonce, tag = bytes(self.inbox[:_NONCE_BYTES]), bytes(self.inbox[_NONCE_BYTES:])
        channel = _conversation(secret, self.nonce, nonce, serves=True)
        channel.check(tag, b"")
        self.channel = channel
        self.inbox.clear()
        self.outbox += channel.frame(b"")

    def next_request(self) -> Mapping[str, Any] | None:
        """The next message, once it is there as a whole."""
        start = _LENGTH_BYTES + _TAG_BYTES
        if self.channel is None or len(self.inbox) < start:
            return None
        end = start + _length(bytes(self.inbox[:_LENGTH_BYTES]))
        if len(self.inbox) < end:
            return None
        tag, body = bytes(self.inbox[_LENGTH_BYTES:start]), bytes(self.inbox[start:end])
        del self.inbox[:end]
        self.channel.check(tag, body)
        return json.loads(body)

    def flush(self) -> bool:
        """Write what can be written now; whether that was all."""
        with contextlib.suppress(BlockingIOError):
            del self.outbox[: self.socket.send(self.outbox)]
        return not self.outbox


class _Connection:
    """A client's side of one conversation: a request, then its answer.

    Raises:
        RefusedError: one of the two does not know the secret.
        OSError: nobody answers there in time.
    """

    def __init__(self, address: Address, secret: bytes, timeout_s: float) -> None:
        self._socket = socket.create_connection(address, timeout=timeout_s)
        try:
            _set_options(self._socket)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            server = self._read(_NONCE_BYTES)
            self._channel = _conversation(secret, server, nonce, serves=False)
            # Without the length: the proof is of one size.
            self._socket.sendall(nonce + self._channel.frame(b"")[_LENGTH_BYTES:])
            self._message()
        except ConnectionError as error:
            self.close()
            raise RefusedError(f"{address[0]}:{address[1]} does not know the secret") from error
        except BaseException:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> Any:
        """The answer; after an exception the connection is of no use."""
        self._socket.settimeout(timeout_s)
        self._socket.sendall(self._channel.frame(json.dumps(request).encode()))
        return json.loads(self._message())

    def close(self) -> None:
        """End the conversation."""
        self._socket.close()

    def _message(self) -> bytes:
        length = _length(self._read(_LENGTH_BYTES))
        tag, body = self._read(_TAG_BYTES), self._read(length)
        self._channel.check(tag, body)
        return body

    def _read(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            piece = self._socket.recv(min(_CHUNK, count - len(found)))
            if not piece:
                raise ConnectionResetError("the store has closed the connection")
            found += piece
        return bytes(found)


# torch's stubs do not export it.
_BaseStore: Any = dist.Store  # pyright: ignore[reportPrivateImportUsage]


class Store(_BaseStore):
    """A store that a :class:`StoreServer` holds, for this process and for torch's backends.

    Its threads do not wait for each other: each request has a connection to itself, which is kept
    for the next one.

    Args:
        address: the server's.
        secret: of the run.
        timeout: longest wait for keys that a caller does not limit, and for any answer.

    Raises:
        RefusedError: one of the two sides does not know the secret.
        OSError: nobody answers there.
    """

    def __init__(self, address: Address, secret: bytes, timeout: timedelta) -> None:
        super().__init__()
        self._address, self._secret = address, secret
        self._timeout = timeout
        self._idle: list[_Connection] = []
        self._idle.append(self._connect())

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that no request uses."""
        while self._idle:
            self._idle.pop().close()

    def clone(self) -> Store:
        """This store: any number of threads may use it."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Longest wait for keys and answers from now on."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Give a key a value."""
        self._ask({"do": "set", "items": {key: _text(value)}})

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Give several keys their values."""
        items = {key: _text(value) for key, value in zip(keys, values, strict=True)}
        self._ask({"do": "set", "items": items})

    def get(self, key: str) -> bytes:
        """A key's value, once there is one."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, once all are there."""
        return [value.encode("latin-1") for value in self._ask({"do": "get", "keys": [*keys]})]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys have a value."""
        self._ask({"do": "wait", "keys": [*keys]}, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have a value."""
        return self._ask({"do": "check", "keys": [*keys]})

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 where there is none; the sum."""
        return self._ask({"do": "add", "key": key, "amount": amount})

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key that has the expected value, or none where that is empty; its value then."""
        request = {"do": "swap", "key": key, "old": _text(expected), "new": _text(desired)}
        return self._ask(request).encode("latin-1")

    def append(self, key: str, value: str | bytes) -> None:
        """Write behind a key's value."""
        self._ask({"do": "append", "key": key, "value": _text(value)})

    def delete_key(self, key: str) -> bool:
        """Take a key away; whether there was one."""
        return self._ask({"do": "delete", "key": key})

    def num_keys(self) -> int:
        """Keys of the whole store."""
        return self._ask({"do": "count"})

    def has_extended_api(self) -> bool:
        """Whether it can append, and take and give several values at once."""
        return True

    # As torch's backends call them.
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815

    def _free(self) -> _Connection:
        try:
            return self._idle.pop()  # whole, whichever threads call it
        except IndexError:
            return self._connect()

    def _connect(self) -> _Connection:
        return _Connection(self._address, self._secret, self._timeout.total_seconds())

    def _ask(self, request: Mapping[str, Any], timeout: timedelta | None = None) -> Any:
        """Send a request; raises what torch's own store does, so that callers know it."""
        waits_s = (timeout or self._timeout).total_seconds()
        where = f"the store at {self._address[0]}:{self._address[1]}"
        connection = None
        try:
            connection = self._free()
            answer = connection.ask(request, waits_s)
        except OSError as error:
            if connection is not None:
                connection.close()
            if not isinstance(error, TimeoutError):
                message = f"connection closed by {where}: {error}"
                raise dist.DistNetworkError(message) from error
            about = request.get("keys") or request.get("key", "")
            raise dist.DistStoreError(
                f"wait timeout after {waits_s:g} s for {about} of {where}"
            ) from error
        self._idle.append(connection)
        return answer


def _written(request: Mapping[str, Any]) -> Sequence[str]:
    """Keys that may have a value since a request."""
    if request["do"] == "set":
        return [*request["items"]]
    return [str(request["key"])] if request["do"] in ("add", "swap", "append") else []


def _text(value: str | bytes) -> str:
    """Bytes as a text of as many characters, which JSON carries; a text as its bytes."""
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")


def _set_options(connected: socket.socket) -> None:
    # A request is one small packet, and its answer another.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
