"""Runs over two and three machines, which are namespaces: who comes when, and who is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.namespaces import Host, network
from mmplan.schema.cluster import load_cluster
from mmplan.schema.profile import load_profile
from tests import commands
from tests.birds import copy_workload, given_profile, two_rank_plan
from tests.processes import named, tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PORT = 29411


@pytest.fixture(scope="module")
def machines() -> Generator[list[Host]]:
    """Three machines."""
    with network(3) as made:
        yield made


@pytest.fixture
def hosts(machines: list[Host]) -> list[Host]:
    """Two of them."""
    return machines[:2]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank on each of two nodes."""
    folder = tmp_path_factory.mktemp("hosts")
    workload = copy_workload(folder)
    (folder / "plans").mkdir()
    path = two_rank_plan(workload, folder / "plans" / "plan.json")
    document = json.loads(path.read_text())
    document["cluster"] |= {"nodes": 2, "devices_per_node": 1}
    path.write_text(json.dumps(document))
    return path


@pytest.fixture(scope="module")
def one_machine(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after the same run on one machine."""
    folder = tmp_path_factory.mktemp("one") / "run"
    done = commands.run("mmlaunch", "run", plan, "--run-dir", folder, cwd=folder.parent)
    assert done.code == 0, done.err
    return load_file(folder / "final.safetensors")


Started = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(plan: Path, tmp_path: Path) -> Generator[Started]:
    """Starts a machine's launcher, in one shared folder; all are ended after the test."""
    started: list[subprocess.Popen[str]] = []

    def on(
        host: Host, first: Host, node: int, *more: object, nodes: int = 2, plan: Path = plan
    ) -> Any:
        where = ["--nnodes", nodes, "--node-rank", node, "--rdzv-endpoint", f"{first.name}:{PORT}"]
        arguments = ["run", plan, "--run-dir", tmp_path / "run", *where, *more]
        command = commands.command("mmlaunch", *arguments)
        process = host.start(command, cwd=tmp_path, env=commands.environment())
        started.append(process)
        return process

    yield on
    for process in started:
        if process.poll() is None:
            for pid in tree(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate(timeout=20)


def ends(processes: Sequence[subprocess.Popen[str]], *, within_s: float = 200) -> list[str]:
    """What each wrote to its standard error."""
    deadline_s = time.monotonic() + within_s
    said = [one.communicate(timeout=max(1, deadline_s - time.monotonic()))[1] for one in processes]
    for text in said:
        assert "Traceback" not in text, text
    return said


def errors(said: str) -> str:
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


@pytest.mark.parametrize("late", [0, 1])
def test_any_order_gives_the_weights_of_one_machine(
    start: Started,
    hosts: list[Host],
    tmp_path: Path,
    one_machine: dict[str, torch.Tensor],
    late: int,
) -> None:
    """Each machine maps its own name, which is the endpoint's on machine 0, to 127.0.1.1."""
    first = start(hosts[1 - late], hosts[0], 1 - late)
    time.sleep(15)
    processes = [first, start(hosts[late], hosts[0], late)]
    said = ends(processes)
    assert [one.returncode for one in processes] == [0, 0], said
    weights = load_file(tmp_path / "run" / "final.safetensors")
    assert weights.keys() == one_machine.keys()
    assert all(torch.equal(weights[name], one_machine[name]) for name in weights)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert set(record["memory_bytes"]) == {"0", "1"}
    # Nothing of the launch is left, its secret least of all.
    assert not list((tmp_path / "run").glob("launch-*"))


def test_three_machines_of_which_one_comes_a_minute_late(
    start: Started, machines: list[Host], tmp_path: Path
) -> None:
    workload, plan = copy_workload(tmp_path), tmp_path / "plan.json"
    profile = given_profile(tmp_path / "profile.json", three_nodes)
    solve = ["solve", workload, "--profile", profile, "--solver", "distmm", "-o", plan]
    done = commands.call("mmplan", *solve)
    assert done.code == 0, done.err
    alone = commands.run("mmlaunch", "run", plan, "--run-dir", "alone", cwd=tmp_path)
    assert alone.code == 0, alone.err
    processes = [start(machines[n], machines[0], n, nodes=3, plan=plan) for n in (2, 0)]
    time.sleep(60)
    processes.append(start(machines[1], machines[0], 1, nodes=3, plan=plan))
    said = ends(processes)
    assert [one.returncode for one in processes] == [0, 0, 0], said
    expected = load_file(tmp_path / "alone" / "final.safetensors")
    weights = load_file(tmp_path / "run" / "final.safetensors")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def three_nodes(profile: dict[str, Any]) -> None:
    cluster = profile["cluster"]
    cluster |= {"name": "cpu-3", "nodes": 3, "devices_per_node": 1}
    cluster["links"]["inter_node"] = cluster["links"]["intra_node"]


@pytest.mark.parametrize("absent", [0, 1])
def test_a_machine_that_never_comes_is_named(
    start: Started, hosts: list[Host], absent: int
) -> None:
    alone = start(hosts[1 - absent], hosts[0], 1 - absent, "--join-timeout", 6)
    (said,) = ends([alone], within_s=90)
    assert alone.returncode == 4
    if absent == 0:
        line = f"machine 0 did not answer at {hosts[0].name}:{PORT} within 6 s"
    else:
        line = "machine 1 of 2 did not come within 6 s"
    assert errors(said) == line


def test_a_machine_that_gives_its_loopback_is_named_with_who_looked(
    start: Started, hosts: list[Host]
) -> None:
    processes = [
        start(hosts[0], hosts[0], 0),
        start(hosts[1], hosts[0], 1, "--local-addr", "127.0.1.1"),
    ]
    said = ends(processes)
    assert [one.returncode for one in processes] == [4, 4]
    a, b = (host.name for host in hosts)
    for text in said:
        assert errors(text).startswith(f"{a} cannot reach {b}'s 127.0.1.1:"), text
        assert "Connection refused" in text
    assert f"give {b} --local-addr" in said[0]


def test_a_folder_that_is_not_shared_is_refused(
    start: Started, hosts: list[Host], tmp_path: Path
) -> None:
    processes = [
        start(hosts[0], hosts[0], 0),
        start(hosts[1], hosts[0], 1, "--run-dir", tmp_path / "elsewhere"),
    ]
    started_s = time.monotonic()
    (said,) = ends(processes[1:])
    assert time.monotonic() - started_s < 90
    assert processes[1].returncode == 2
    assert "does not see in" in errors(said)
    assert "elsewhere" in errors(said)


def test_another_secret_is_refused(start: Started, hosts: list[Host], tmp_path: Path) -> None:
    for node in range(2):
        (tmp_path / f"secret-{node}").write_text(f"the secret of {node}\n")
    more = ("--join-timeout", 30)
    processes = [
        start(hosts[n], hosts[0], n, "--secret-file", tmp_path / f"secret-{n}", *more)
        for n in range(2)
    ]
    said = ends(processes)
    assert [one.returncode for one in processes] == [4, 2]
    line = f"machine 1 of 2 did not come within 30 s; {hosts[1].address} was refused"
    assert errors(said[0]).startswith(line)
    assert "has another secret than" in errors(said[1])


def _steps(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def _train(start: Started, hosts: list[Host], folder: Path) -> list[subprocess.Popen[str]]:
    """A run that has done some steps and has very many before it."""
    long = ("--steps", 100_000, "--timeout", 25)
    processes = [start(hosts[node], hosts[0], node, *long) for node in range(2)]
    deadline_s = time.monotonic() + 120
    while _steps(folder) < 3:
        assert all(one.poll() is None for one in processes), ends(processes)
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    return processes


def test_a_link_that_is_cut_for_ten_seconds_ends_nothing(
    start: Started, hosts: list[Host], tmp_path: Path
) -> None:
    processes = _train(start, hosts, tmp_path)
    hosts[1].cut()
    try:
        time.sleep(10)
    finally:
        hosts[1].mend()
    before, deadline_s = _steps(tmp_path), time.monotonic() + 60
    while _steps(tmp_path) < before + 5:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    processes[0].send_signal(signal.SIGTERM)
    said = ends(processes)
    assert [one.returncode for one in processes] == [75, 75], said


def test_a_link_that_stays_cut_is_named_with_both_ends(
    start: Started, hosts: list[Host], tmp_path: Path
) -> None:
    processes = _train(start, hosts, tmp_path)
    hosts[1].cut()
    try:
        said = ends(processes, within_s=25 + 40)
    finally:
        hosts[1].mend()
    assert [one.returncode for one in processes] == [1, 1], said
    a, b = hosts
    assert (
        f"{a.name} at {a.address} has heard nothing of {b.name} at {b.address} for 25 s"
        in errors(said[0])
    )
    assert f"machine 1 ({b.name}) has heard nothing of machine 0 ({a.name})" in errors(said[1])


@pytest.fixture
def over_ssh(hosts: list[Host], plan: Path, tmp_path: Path) -> list[object]:
    """A command for both machines; what stands for ssh enters their namespaces."""
    (tmp_path / "hostfile").write_text("".join(f"{host.name} slots=1\n" for host in hosts))
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nexec ip netns exec $1 unshare --uts sh -c "hostname $1; $2"\n')
    ssh.chmod(0o755)
    more = ["--run-dir", tmp_path / "run", "--hostfile", tmp_path / "hostfile", "--ssh", ssh]
    return ["run", plan, *more]


def test_a_hostfile_starts_all_from_one_machine(
    over_ssh: list[object], tmp_path: Path, one_machine: dict[str, torch.Tensor]
) -> None:
    done = commands.run("mmlaunch", *over_ssh, "--json", cwd=tmp_path, timeout_s=200)
    assert done.code == 0, done.err
    assert done.document["steps"] == 8
    weights = load_file(tmp_path / "run" / "final.safetensors")
    assert all(torch.equal(weights[name], one_machine[name]) for name in weights)


def test_a_cluster_file_has_the_link_between_hosts(
    hosts: list[Host], over_ssh: list[object], tmp_path: Path
) -> None:
    for host in hosts:
        host.throttle(80)
    try:
        _, _, *more = over_ssh
        made = tmp_path / "cluster.json"
        done = commands.run(
            "mmlaunch", "cluster", "--nproc", 1, "-o", made, *more, cwd=tmp_path, timeout_s=300
        )
    finally:
        for host in hosts:
            host.free()
    assert done.code == 0, done.err
    cluster = load_cluster(made)
    assert (cluster.nodes, cluster.devices_per_node) == (2, 1)
    assert cluster.links.inter_node is not None
    # 80 Mbit/s; the queue before the link takes a burst at once.
    assert 0.7e7 < cluster.links.inter_node.bandwidth_bytes_per_s < 1.3e7
    profile = tmp_path / "profile.json"
    workload = copy_workload(tmp_path)
    done = commands.run(
        "mmplan", "profile", workload, "--cluster", made, "-o", profile, cwd=tmp_path, timeout_s=300
    )
    assert done.code == 0, done.err
    assert load_profile(profile).cluster == cluster


def test_a_host_of_the_file_that_does_not_come_is_named(
    over_ssh: list[object], hosts: list[Host], tmp_path: Path
) -> None:
    wrong = (tmp_path / "hostfile").read_text().replace(hosts[1].name, "nowhere")
    (tmp_path / "hostfile").write_text(wrong)
    limit = ("--join-timeout", 8)
    done = commands.run("mmlaunch", *over_ssh, *limit, cwd=tmp_path, timeout_s=200)
    assert done.code != 0
    assert "machine 1 (nowhere) of 2 did not come within 8 s" in done.err
    assert "nowhere: " in done.err  # what ssh said


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_all_machines_end_with_who_started_them(
    over_ssh: list[object], tmp_path: Path, signum: signal.Signals
) -> None:
    started = commands.start(
        "mmlaunch", *over_ssh, "--steps", 100_000, cwd=tmp_path, MARK=str(tmp_path)
    )
    deadline_s = time.monotonic() + 150
    while _steps(tmp_path) < 3:
        assert started.poll() is None, started.communicate()[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    started.send_signal(signum)
    _, said = started.communicate(timeout=90)
    assert started.returncode == (75 if signum == signal.SIGTERM else -signum), said
    deadline_s = time.monotonic() + 60
    while named(f"MARK={tmp_path}"):
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1
