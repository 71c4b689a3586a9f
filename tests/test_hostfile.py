"""What a user says of the machines of a run: hostfiles, endpoints, secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmlaunch.launch import addresses
from mmlaunch.launch.hosts import SECRET, Host, given_secret, hosts_of_plan, read_hostfile
from mmplan.errors import InvalidInputError
from tests.programs import loss, make_plan, unit


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "hostfile"
    path.write_text(text)
    return path


def test_a_hostfile_has_a_host_on_each_line(tmp_path: Path) -> None:
    text = "# two boxes\nworker-1 slots=4\n\nme@10.0.0.2\t slots=2 # smaller\nthird\n"
    assert read_hostfile(hostfile(tmp_path, text)) == [
        Host(name="worker-1", slots=4),
        Host(name="me@10.0.0.2", slots=2),
        Host(name="third"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no host"),
        ("a slots=2\na slots=2\n", "stands there twice"),
        ("a\nb slots=two\n", "line 2: b slots=two"),
        ("a slots=0\n", "line 1: a slots=0"),
        ("a 2 3\n", "line 1: a 2 3"),
        ("-oProxyCommand=x\n", "line 1: -oProxyCommand=x"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        read_hostfile(hostfile(tmp_path, text))


def test_a_plan_takes_as_many_hosts_as_it_has_nodes() -> None:
    made = make_plan(unit("a", dp=2), unit("b", dp=2), losses=[loss("l", "a", "b")], devices=2)
    boxes = {"nodes": 2, "devices_per_node": 1}
    two = made.model_copy(update={"cluster": made.cluster.model_copy(update=boxes)})
    whole = {"nodes": 1, "devices_per_node": 2}
    one = made.model_copy(update={"cluster": made.cluster.model_copy(update=whole)})
    hosts = [Host(name=name, slots=1) for name in "abc"]
    assert hosts_of_plan(hosts, two) == hosts[:2]
    with pytest.raises(InvalidInputError, match="for 2 nodes, and the hostfile has 1"):
        hosts_of_plan(hosts[:1], two)
    with pytest.raises(InvalidInputError, match="a has slots=1, and the plan puts 2 ranks"):
        hosts_of_plan(hosts, one)


def test_the_secret_of_a_file_goes_before_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    assert given_secret(None) is None
    monkeypatch.setenv(SECRET, "of the environment")
    assert given_secret(None) == b"of the environment"
    path = tmp_path / "secret"
    path.write_text("of the file\n")
    assert given_secret(path) == b"of the file"
    path.write_text("\n")
    with pytest.raises(InvalidInputError, match="is empty"):
        given_secret(path)


def test_a_name_that_is_a_loopback_here_means_the_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(2, 1, 6, "", ("127.0.1.1", 5))]
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *_, **__: found)
    own = {"lo": "127.0.0.1", "eth0": "10.0.0.1"}
    monkeypatch.setattr(addresses, "interfaces", lambda: own)
    assert addresses.of_first_machine(("node0", 5), None) == "10.0.0.1"
    assert addresses.of_first_machine(("node0", 5), "10.0.0.9") == "10.0.0.9"
    assert addresses.of_first_machine(("127.0.1.1", 5), None) == "127.0.1.1"
    own["eth1"] = "10.1.0.1"
    with pytest.raises(InvalidInputError, match=r"node0 is 127.0.1.1 .* 10.0.0.1, 10.1.0.1"):
        addresses.of_first_machine(("node0", 5), None)
    assert addresses.interface_of("10.1.0.1") == "eth1"
    with pytest.raises(InvalidInputError, match=r"10\.2\.0\.1 is no address of this machine"):
        addresses.interface_of("10.2.0.1")
