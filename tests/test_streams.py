"""The same samples in every step, under any plan, any number of loading processes, after any kill.

Real runs write down what their blocks are given; see tests/streams.py.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmplan.schema.base import document_text
from tests.commands import kill_all, run, start
from tests.ray_nodes import Nodes, ray_nodes
from tests.streams import (
    LOG,
    PAUSE,
    PLANS,
    Seen,
    expected,
    recorded,
    steps_of,
    workload,
    write_data,
    write_plan,
)

pytest.importorskip("datasets")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WORKERS = (0, 1, 3)
# Each rank has loading processes for each task: of all nine runs some, a kill has the others.
RUNS = [("one", 0), ("one", 3), ("replicas", 1), ("spread", 0), ("spread", 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("streams")
    write_data(place)
    (place / "workload.json").write_text(document_text(workload()))
    for name in PLANS:
        write_plan(place, name)
    return place


@pytest.fixture(scope="module")
def stream(folder: Path) -> dict[str, list[Seen]]:
    return expected(folder)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with ray_nodes(tmp_path_factory.mktemp("nodes")) as found:
        yield found


def arguments(folder: Path, run_dir: Path, plan: str, *loaders: object) -> list[object]:
    where = ["--run-dir", run_dir, "--save-every", 3, "--timeout", 120]
    return ["run", folder / f"{plan}.json", *where, *loaders]


@pytest.mark.parametrize(("plan", "workers"), RUNS)
def test_every_source_under_every_plan(
    folder: Path, stream: dict[str, list[Seen]], tmp_path: Path, plan: str, workers: int
) -> None:
    log = tmp_path / "log"
    done = run(
        "mmlaunch",
        *arguments(folder, tmp_path / "run", plan, "--num-workers", workers),
        cwd=folder,
        timeout_s=300,
        **{LOG: str(log)},
    )
    assert done.code == 0, done.err
    assert recorded([log]) == stream


@pytest.mark.parametrize(("plan", "producers"), [("one", 1), ("replicas", 2), ("spread", 4)])
def test_every_source_from_producers(
    folder: Path,
    stream: dict[str, list[Seen]],
    nodes: Nodes,
    tmp_path: Path,
    plan: str,
    producers: int,
) -> None:
    log = tmp_path / "log"
    done = run(
        "mmlaunch",
        *arguments(folder, tmp_path / "run", plan, *from_producers(nodes, producers)),
        cwd=folder,
        timeout_s=600,
        **{LOG: str(log)},
    )
    assert done.code == 0, done.err
    assert recorded([log]) == stream


def from_producers(nodes: Nodes, count: int) -> list[object]:
    """Options of a run; the head has no cores for data."""
    head = nodes.all[0] if nodes.all else nodes.head()
    while len(nodes.all) <= count:
        nodes.producer(head)
    return ["--data-address", head.address]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_at_any_step_and_resumed_under_other_plans(
    folder: Path, stream: dict[str, list[Seen]], nodes: Nodes, tmp_path: Path, seed: int
) -> None:
    """Twice; every attempt has a plan and loading processes of its own, one of them producers."""
    draw = random.Random(seed)
    loaders: list[list[object]] = [["--num-workers", draw.choice(WORKERS)] for _ in range(2)]
    loaders.insert(draw.randrange(3), from_producers(nodes, 2))
    plans = draw.sample(list(PLANS), 3)
    logs: list[Path] = []
    for attempt, plan in enumerate(plans):
        logs.append(tmp_path / f"log-{attempt}")
        more = ["--resume"] * (attempt > 0)
        command = arguments(folder, tmp_path / "run", plan, *loaders[attempt])
        process = start(
            "mmlaunch", *command, *more, cwd=folder, **{LOG: str(logs[-1]), PAUSE: "0.01"}
        )
        if attempt < 2:
            _kill_in_step(process, logs[-1], draw.randrange(*((4, 9), (12, 20))[attempt]))
        else:
            _, error = process.communicate(timeout=300)
            assert process.returncode == 0, error
    assert recorded(logs) == stream
    # The second and the third attempt began in mid-run.
    firsts = [min(steps_of(log)) for log in logs]
    assert 0 == firsts[0] < firsts[1] < firsts[2]


def _kill_in_step(process: subprocess.Popen[str], log: Path, step: int) -> None:
    """SIGKILL all processes of a run as soon as a block has begun a step."""
    deadline_s = time.monotonic() + 200
    try:
        while not log.exists() or max(steps_of(log), default=0) < step:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
    finally:
        kill_all(process)
