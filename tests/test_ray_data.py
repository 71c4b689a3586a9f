"""Steps of data from other machines: the same samples, whatever happens to those that load them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mmlaunch.data.loader import Reader, StepData, StepLoader
from mmlaunch.data.producers import (
    DataSource,
    NoProducersError,
    Producers,
    RemoteLoader,
    pack,
    recipe_of,
    unpack,
)
from mmlaunch.data.ray_node import arguments, joined, take_settings
from mmlaunch.launch.addresses import parse_endpoint
from mmplan.errors import InvalidInputError, RunFailedError, UnfitEnvironmentError
from mmplan.ragged import Ragged
from mmplan.schema.factories import build_dataset
from mmplan.schema.workload import DataSpec
from tests.birds import copy_workload, edited, two_rank_plan
from tests.commands import call, environment, run, start
from tests.ray_nodes import Node, Nodes, ray_nodes

TYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int64,
    torch.uint8,
    torch.complex64,
]
BATCH = 8
FIELDS = ("half", "flag", "rows", "drawn")
SAMPLES = """
import os, random, time
from pathlib import Path
import torch
from mmplan.ragged import Ragged

class Samples:
    def __init__(self, slow_s=0.0, bad=-1, fatal=-1, log=None):
        self.slow_s, self.bad, self.fatal, self.log = slow_s, bad, fatal, log
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(self.slow_s)
        if self.log and os.environ.get("RAY_JOB_ID"):
            with Path(self.log).open("a") as file:
                print(index, file=file)
        if index == self.bad:
            raise ValueError("no such picture")
        if index == self.fatal and os.environ.get("RAY_JOB_ID"):
            os._exit(9)
        rows = torch.full((index % 3, 2), index)
        return {
            "half": torch.full((3,), index, dtype=torch.bfloat16),
            "flag": torch.tensor(index % 2 == 0),
            "rows": Ragged(rows, torch.tensor([len(rows)])),
            "drawn": torch.rand(2) + random.random(),
        }
"""


# ---- without Ray ----


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(4, 3), (0, 5), ()])
def test_tensors_of_every_type_are_the_same_after_a_way_as_bytes(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.rand(shape) * 3).to(dtype)
    (packed,) = pack(tensor)
    assert packed[0].dtype == np.uint8
    packed[0].flags.writeable = False
    found = unpack((packed,))
    assert isinstance(found, torch.Tensor)
    assert (found.dtype, found.shape) == (dtype, shape)
    assert found.reshape(-1).view(torch.uint8).tolist() == packed[0].tolist()
    assert torch.equal(found.to(torch.complex128), tensor.to(torch.complex128))


def test_views_and_ragged_rows_too() -> None:
    rows = Ragged(torch.arange(12.0).reshape(6, 2)[::2], torch.tensor([1, 0, 2]))
    found = unpack(pack(rows))
    assert isinstance(found, Ragged)
    assert torch.equal(found.values, rows.values)
    assert torch.equal(found.lengths, rows.lengths)


def test_a_recipe_has_no_dataset() -> None:
    """However large it is; where the reader's order has it too it is that of the producer."""
    dataset = bytearray(b"large" * 10_000)
    source = DataSource(data=DataSpec(factory="a:b"), folder=Path("/"), seed=0, field="data")
    reader = Reader(dataset, ("x",), 0, [(0, 2)], None)
    assert len(recipe_of(source, 2, reader)[2]) < 1000


@pytest.mark.parametrize("wrong", ["node0", "node0:", "node0:x", ":6379", "node0:70000"])
def test_what_is_no_address_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidInputError, match="no HOST:PORT"):
        parse_endpoint(wrong, "--data-address")


def test_a_node_s_options_are_ray_s() -> None:
    head = arguments(address="node0:7", head=True, cpus=3, store_bytes=10**9, folder=Path("/f"))
    assert head[head.index("--port") + 1] == "7"
    assert json.loads(head[head.index("--resources") + 1]) == {"mmlaunch_producer": 3}
    spills = json.loads(head[head.index("--system-config") + 1])
    assert spills["automatic_object_spilling_enabled"] is False
    ranks = arguments(address="node0:7", head=False, cpus=0, store_bytes=None, folder=Path("/f"))
    assert json.loads(ranks[ranks.index("--resources") + 1]) == {}
    assert "--object-store-memory" not in ranks


def test_a_missing_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    done = call("mmlaunch", "data", "--head")
    assert (done.code, done.message) == (
        4,
        "mmlaunch data needs the package ray, which is not installed",
    )
    assert "[ray]" in done.hint


def test_data_begins_a_cluster_or_joins_one() -> None:
    done = call("mmlaunch", "data")
    assert (done.code, done.message) == (2, "mmlaunch data begins a cluster or joins one")


def test_a_wait_beyond_the_time_of_other_ranks_is_refused(tmp_path: Path) -> None:
    done = call(
        "mmlaunch", "run", tmp_path / "p", "--data-address", "a:1", "--data-wait", 9, "--timeout", 9
    )
    assert done.code == 2
    assert "--data-wait 9" in done.message


def test_a_token_is_made_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    monkeypatch.setattr("os.environ", dict(os.environ))
    os.environ.pop("RAY_AUTH_TOKEN", None)
    path = tmp_path / "deep" / "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
    with pytest.raises(InvalidInputError, match="no token for it"):
        take_settings("it")
    assert take_settings("it", make_token=True) == str(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_text()) == 64
    assert take_settings("it", make_token=True) == str(path)
    assert os.environ["RAY_AUTH_MODE"] == "token"
    path.chmod(0o640)
    with pytest.raises(InvalidInputError, match="others can read it"):
        take_settings("it")


# ---- with Ray ----


class Stream:
    """A rank's steps from producers, beside those of a loading process."""

    def __init__(self, folder: Path, address: str, node: Path, wait_s: float, args: Any) -> None:
        (folder / "samples.py").write_text(SAMPLES)
        data = DataSpec(factory="samples:Samples", args=args)
        self.notes: list[str] = []
        self.arguments: dict[str, Any] = {
            "batch": BATCH,
            "seed": 5,
            "ranges": [(0, 3), (5, 8)],
            "fields": FIELDS,
            "start_step": 3,
        }
        self.dataset = build_dataset(data, folder, seed=5)
        self.remote = RemoteLoader(
            self.dataset,
            source=DataSource(data=data, folder=folder, seed=5, field="data"),
            producers=Producers(
                address=address, folder=node, wait_s=wait_s, tell=self.notes.append
            ),
            **self.arguments,
        )
        self.local = StepLoader(self.dataset, **self.arguments)

    def same(self, steps: int) -> None:
        for _ in range(steps):
            assert_same(next(self.remote), next(self.local))

    def same_until(self, text: str, times: int) -> None:
        """Steps until so many notes have a text."""
        while sum(text in note for note in self.notes) < times:
            self.same(4)

    def close(self) -> None:
        self.remote.close()
        self.local.close()


def assert_same(found: StepData, expected: StepData) -> None:
    assert (found.step, found.indices) == (expected.step, expected.indices)
    assert found.fields.keys() == expected.fields.keys()
    for name, value in expected.fields.items():
        got = found.fields[name]
        parts = [(p if isinstance(p, Ragged) else (p,)) for p in (got, value)]
        for one, other in zip(*parts, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ray_nodes(tmp_path) as found:
        yield found


@contextlib.contextmanager
def stream(folder: Path, head: Node, *, wait_s: float = 120.0, **args: Any) -> Generator[Stream]:
    with joined(head.address) as node:
        found = Stream(folder, head.address, node, wait_s, args)
        try:
            yield found
        finally:
            found.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_stream_is_that_of_loading_processes(nodes: Nodes, tmp_path: Path) -> None:
    """From one, two and four producers, while they come and one is killed."""
    head = nodes.head()
    first = nodes.producer(head)
    with stream(tmp_path, head, slow_s=0.01) as found:
        found.same(12)
        nodes.producer(head)
        found.same_until("has come", 1)
        nodes.producer(head)
        nodes.producer(head)
        found.same_until("has come", 3)
        first.end(signal.SIGKILL)
        found.same_until("is gone, 3 producers left", 1)
        assert len(found.notes) == 4


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_producers_gone_and_one_comes_back(nodes: Nodes, tmp_path: Path) -> None:
    head = nodes.head()
    first = nodes.producer(head)
    with stream(tmp_path, head) as found:
        found.same(3)
        first.end(signal.SIGKILL)

        def come() -> None:
            while not any("waits 120 s" in note for note in found.notes):
                time.sleep(0.1)
            nodes.producer(head)

        late = threading.Thread(target=come, daemon=True)
        late.start()
        # Actors may outlive their node by some seconds.
        found.same_until("go on", 1)
        late.join()
        assert "is gone, 0 producers left" in found.notes[0]
        assert found.notes[1].startswith(f"no producer at {head.address}: step ")
        assert any("has come" in note for note in found.notes[2:])
        assert f"producers at {head.address} go on" in found.notes[2:]
    with stream(tmp_path, head, wait_s=3.0) as found:
        found.same(3)
        nodes.all[-1].end()
        with pytest.raises(NoProducersError, match="no producer at"):
            found.same(50)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_head_gone_and_back(nodes: Nodes, tmp_path: Path) -> None:
    head = nodes.head(cpus=1)
    with stream(tmp_path, head) as found:
        found.same(3)
        head.end(signal.SIGKILL)
        port = int(head.address.rpartition(":")[2])
        again = nodes.head(cpus=1, port=port)
        assert again.address == head.address
        found.same_until("go on", 1)
        assert found.notes[0].startswith(f"no producer at {head.address}: step ")
        assert found.notes[1] == f"producers at {head.address} go on"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_errors_of_the_data_are_told_as_by_a_loading_process(nodes: Nodes, tmp_path: Path) -> None:
    head = nodes.head(cpus=1)
    with stream(tmp_path, head, bad=17) as found:
        with pytest.raises(RunFailedError) as far:
            found.same(60)
        with pytest.raises(RunFailedError) as near:
            list(found.local)
        assert far.value.message == near.value.message
        assert far.value.message == "dataset[17] raised ValueError: no such picture"
    with (
        stream(tmp_path, head, fatal=17) as found,
        pytest.raises(RunFailedError, match=r"step \d+: a producer's process died over it 4 times"),
    ):
        found.same(60)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_who_takes_no_step_asks_for_no_more(nodes: Nodes, tmp_path: Path) -> None:
    """However fast producers are; and nothing but logs is on the disk."""
    head, log = nodes.head(cpus=1), tmp_path / "log"
    with stream(tmp_path, head, log=str(log)) as found:
        found.same(2)
        time.sleep(4)
        read = log.read_text().split()
        # Two used, one taken ahead, two at the rank, two ready or in work; the first of each was
        # loaded twice, as it draws.
        assert len(read) <= 7 * (6 + 1)
        time.sleep(3)
        assert log.read_text().split() == read
        kept = [p for p in head.folder.rglob("*") if p.is_file() and not p.is_symlink()]
        assert sum(p.stat().st_size for p in kept) < 2 << 20
        found.same(30)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_who_has_no_token_gets_nothing_and_nothing_is_left(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("plasma")}
    head = nodes.head(cpus=1)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    with pytest.raises(UnfitEnvironmentError, match="has another token"), joined(head.address):
        pass
    host, port = parse_endpoint(head.address, "")
    ask = (
        "import ray._raylet as r; "
        f"print(len(r.GcsClient(address='{host}:{port}').get_all_node_info(timeout=5)))"
    )
    for more in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "another"}):
        asked = subprocess.run(
            [sys.executable, "-c", ask], env=environment(**more), capture_output=True, text=True
        )
        assert asked.returncode, asked.stdout
        assert "uthent" in asked.stderr
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    with stream(tmp_path, head) as found:
        found.same(2)
        used = [head.folder, found.remote._producers.folder]
    assert head.end() == 0
    for folder in used:
        assert not folder.exists()
        assert not processes_with(str(folder))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), 5)
    left = {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("plasma")}
    assert left <= shared


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_ends_in_order_without_producers_and_goes_on_with_them(
    nodes: Nodes, tmp_path: Path
) -> None:
    """With 75 and a checkpoint; at the end the weights are those of a run that loads itself."""
    workload, plan = copy_workload(tmp_path), tmp_path / "plans" / "plan.json"
    plan.parent.mkdir()
    source = workload.parent / "birds" / "data.py"
    slower = "__getitem__(self, index: int) -> dict[str, Tensor]:\n"
    edited(source, slower, f"{slower}        __import__('time').sleep(0.01)\n")
    two_rank_plan(workload, plan)
    steps, far = 30, tmp_path / "far"
    alone = run(
        "mmlaunch", "run", plan, "--steps", steps, "--run-dir", tmp_path / "n", cwd=tmp_path
    )
    assert alone.code == 0, alone.err
    head = nodes.head()
    first = nodes.producer(head)
    options = ["--steps", steps, "--data-address", head.address, "--run-dir", far]
    started = start("mmlaunch", "run", plan, *options, "--data-wait", 3, cwd=tmp_path)
    while len(lines_of(far)) < 5:
        assert started.poll() is None, started.communicate()
        time.sleep(0.1)
    first.end(signal.SIGKILL)
    out, err = started.communicate(timeout=120)
    assert started.returncode == 75, out + err
    done = len(lines_of(far))
    assert 5 <= done < steps
    assert f"stopped without a producer at {head.address} after step {done}, saved in {far}" in err
    assert (far / "checkpoints" / f"step-{done}").is_dir()
    nodes.producer(head)
    again = run("mmlaunch", "run", plan, *options, "--resume", cwd=tmp_path)
    assert again.code == 0, again.err
    for folder in (tmp_path / "n", far):
        assert [line["step"] for line in lines_of(folder)] == list(range(steps))
    losses = [[line["loss"] for line in lines_of(folder)] for folder in (tmp_path / "n", far)]
    assert losses[0] == losses[1]
    weights = [load_file(folder / "final.safetensors") for folder in (tmp_path / "n", far)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    edited(source, f"{slower}        ", f"{slower}        assert index != 17, 'torn'\n        ")
    wrong = run(
        "mmlaunch", "run", plan, *options[:4], "--run-dir", tmp_path / "wrong", cwd=tmp_path
    )
    assert wrong.code == 1
    # Both ranks ask for it, and both say so.
    said = ": dataset[17] raised AssertionError: torn"
    assert wrong.message in (f"rank 0{said}", f"rank 1{said}")


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """What a run has written of its steps by now."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def processes_with(text: str) -> list[str]:
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_text(errors="replace")
            if text in line:
                found.append(line)
    return found
