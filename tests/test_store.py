"""The store of a run: its operations, and what strangers can do to it."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Generator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from mmlaunch.launch import store as stores
from mmlaunch.launch.store import RefusedError, Store, StoreServer

SECRET = b"known to the run alone"


@pytest.fixture
def server() -> Generator[StoreServer]:
    made = StoreServer(("127.0.0.1", 0), SECRET)
    yield made
    made.close()


@pytest.fixture
def store(server: StoreServer) -> Generator[Store]:
    with Store(server.address, SECRET, timedelta(seconds=10)) as made:
        yield made


def prefixed(store: Store) -> Any:
    """As torch's backends see it: through torch's own prefix, which is C++."""
    return dist.PrefixStore("run", store)  # pyright: ignore[reportPrivateImportUsage]


def test_torch_finds_all_that_its_backends_ask_for(store: Store) -> None:
    seen = prefixed(store)
    seen.set("bytes", bytes(range(256)))
    assert seen.get("bytes") == bytes(range(256))
    assert store.get("run/bytes") == bytes(range(256))
    assert [seen.add("sum", 2), seen.add("sum", 0), seen.add("sum", -3)] == [2, 2, -1]
    assert seen.check(["bytes", "sum"])
    assert not seen.check(["bytes", "none"])
    assert seen.compare_set("first", "", "a") == b"a"
    assert seen.compare_set("first", "", "b") == b"a"
    assert seen.compare_set("first", "a", "c") == b"c"
    seen.append("first", "d")
    seen.multi_set(["x", "y"], ["1", "2"])
    assert seen.multi_get(["first", "y", "x"]) == [b"cd", b"2", b"1"]
    assert seen.num_keys() == 5
    assert seen.delete_key("x")
    assert not seen.delete_key("x")
    assert seen.has_extended_api()


def test_who_waits_is_answered_when_the_last_key_comes(store: Store) -> None:
    """Another thread sets the keys through the same store meanwhile."""
    seen, found = prefixed(store), list[Any]()
    waiter = threading.Thread(target=lambda: found.append(seen.multi_get(["a", "b"])))
    waiter.start()
    seen.set("a", "1")
    time.sleep(0.05)
    assert not found
    seen.set("b", "2")
    waiter.join(5)
    assert found == [[b"1", b"2"]]


def test_a_key_that_never_comes_is_named(store: Store) -> None:
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0.1 s .*run/never"):
        prefixed(store).wait(["never"], timedelta(seconds=0.1))
    assert store.num_keys() == 0  # and the next request has an answer


def test_a_server_that_ends_is_an_error_of_the_network(server: StoreServer) -> None:
    store = Store(server.address, SECRET, timedelta(seconds=10))
    server.close()
    with pytest.raises(dist.DistNetworkError, match="connection closed"):
        store.get("key")


def test_another_secret_gets_nothing(server: StoreServer, store: Store) -> None:
    with pytest.raises(RefusedError, match="does not know the secret"):
        Store(server.address, SECRET + b"!", timedelta(seconds=5))
    assert store.num_keys() == 0


class Recorder:
    """A client's socket that keeps what it sends."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped, self.sent = wrapped, b""

    def sendall(self, data: bytes) -> None:
        self.sent += data
        self.wrapped.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)


def test_what_was_recorded_cannot_be_played_back(
    server: StoreServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on another connection nor a second time on its own."""
    recorders: list[Recorder] = []
    really = socket.create_connection

    def connect(*args: Any, **more: Any) -> Any:
        recorders.append(Recorder(really(*args, **more)))
        return recorders[-1]

    with monkeypatch.context() as patched:
        patched.setattr(stores.socket, "create_connection", connect)
        spied = Store(server.address, SECRET, timedelta(seconds=5))
    spied.add("count", 1)
    (spy,) = recorders
    with socket.create_connection(server.address, timeout=5) as stranger:
        stranger.recv(64)
        stranger.sendall(spy.sent)
        assert ended(stranger)
    proof = 64
    spy.wrapped.sendall(spy.sent[proof:])  # the very message, on its own connection
    assert ended(spy.wrapped)
    assert store.add("count", 0) == 1


def ended(connection: socket.socket) -> bool:
    """Whether the server lets go of a connection, after at most some bytes."""
    connection.settimeout(8)
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass
    return True


def crafted(dice: random.Random) -> bytes:
    """What somebody without the secret may send: noise, long lengths, pickles, requests."""
    nonce = dice.randbytes(32)
    request = json.dumps({"do": "set", "items": {"key": "value"}}).encode()
    tag = stores.hmac.digest(b"guess", request, "sha256")
    return dice.choice(
        [
            b"",
            dice.randbytes(dice.randrange(1, 200)),
            nonce,
            nonce + tag,
            nonce + tag + len(request).to_bytes(4, "big") + tag + request,
            b"\xff" * dice.randrange(1, 4000),
            b"\0" * 64 + request,
            b"GET / HTTP/1.0\r\n\r\n",
            b"\x80\x04cposix\nsystem\n(S'true'\ntR.",
        ]
    )


def pester(address: tuple[str, int], messages: int, seed: int = 0) -> None:
    """Send messages to a port, each on a connection of its own, some left open half-way."""
    dice = random.Random(seed)
    kept: list[socket.socket] = []
    for _ in range(messages):
        stranger = socket.create_connection(address, timeout=20)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(crafted(dice))
        if dice.random() < 0.05 and len(kept) < 20:
            kept.append(stranger)
        else:
            stranger.close()
    for stranger in kept:
        stranger.close()


def test_strangers_change_nothing(server: StoreServer, store: Store) -> None:
    store.set("key", "mine")
    pester(server.address, 400)
    assert store.get("key") == b"mine"
    assert store.num_keys() == 1


def test_a_stranger_who_says_nothing_is_let_go(
    monkeypatch: pytest.MonkeyPatch, server: StoreServer, store: Store
) -> None:
    monkeypatch.setattr(stores, "_PROOF_S", 0.1)
    monkeypatch.setattr(stores, "_SWEEP_S", 0.05)
    store.set("key", "value")  # it has swept since
    with socket.create_connection(server.address) as stranger:
        assert ended(stranger)
    assert store.get("key") == b"value"


def test_strangers_who_stay_do_not_keep_others_out(
    monkeypatch: pytest.MonkeyPatch, server: StoreServer
) -> None:
    """More than are let in wait in the kernel's queue until the first ones are let go."""
    monkeypatch.setattr(stores, "_STRANGERS", 4)
    monkeypatch.setattr(stores, "_PROOF_S", 0.3)
    monkeypatch.setattr(stores, "_SWEEP_S", 0.05)
    strangers = [socket.create_connection(server.address) for _ in range(10)]
    with Store(server.address, SECRET, timedelta(seconds=20)) as store:
        store.set("key", "value")
        assert store.get("key") == b"value"
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    "request_",
    [{"do": "no such"}, {}, [], 3, {"do": "get", "keys": 3}, {"do": "add", "key": "text"}],
)
def test_a_wrong_request_of_a_friend_ends_his_connection_only(
    store: Store, request_: Any, server: StoreServer
) -> None:
    store.set("text", "no number")
    with (
        Store(server.address, SECRET, timedelta(seconds=5)) as wrong,
        pytest.raises(dist.DistNetworkError),
    ):
        wrong._ask(request_)  # pyright: ignore[reportPrivateUsage]
    assert store.get("text") == b"no number"
