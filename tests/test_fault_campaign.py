"""A hundred faults, drawn by seeds: every run ends as if nothing had happened."""

from __future__ import annotations

import logging
import random
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.namespaces import Host, network
from tests import commands
from tests.fault_campaign import ANYWHERE, BETWEEN_HOSTS, Broken, meet
from tests.fault_jobs import STEPS, WORKLOADS, expected, write_job
from tests.streams import LOG, Seen, recorded
from tests.test_checkpoint import tiny_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RUNS, FAULTS = 25, 4


@dataclass(frozen=True, kw_only=True)
class Unbroken:
    """A job's plans, and what it gives without a fault."""

    plans: dict[str, Path]
    weights: dict[str, Tensor]
    stream: dict[str, list[Seen]]


@pytest.fixture(scope="module")
def hosts() -> Generator[list[Host]]:
    with network(2) as made:
        yield made


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Unbroken]:
    """By job and number of hosts."""
    found: dict[tuple[str, int], Unbroken] = {}
    for job in WORKLOADS:
        for nodes in (1, 2):
            folder = tmp_path_factory.mktemp(f"{job}-{nodes}")
            plans = write_job(folder, job, nodes=nodes)
            command = ("run", plans["two"], "--run-dir", folder / "run")
            done = commands.run(
                "mmlaunch", *command, cwd=folder, timeout_s=110, **{LOG: str(folder / "log")}
            )
            assert done.code == 0, done.err
            stream = expected(job, folder)
            assert recorded(sorted(folder.glob("log-*")), STEPS) == stream
            weights = load_file(folder / "run" / "final.safetensors")
            found[job, nodes] = Unbroken(plans=plans, weights=weights, stream=stream)
    return found


@pytest.mark.parametrize("seed", range(RUNS))
def test_weights_and_samples_are_those_of_an_unbroken_run(
    unbroken: dict[tuple[str, int], Unbroken], hosts: list[Host], tmp_path: Path, seed: int
) -> None:
    """Every third run changes its plan at each launch, every fourth is on two hosts."""
    draw = random.Random(seed)
    nodes = 2 if seed % 4 == 3 else 1
    own = unbroken[list(WORKLOADS)[seed // 4 % 3 if nodes == 2 else seed % 3], nodes]
    changes = nodes == 1 and seed % 3 == seed // 3 % 3
    names = ("two", "three") if changes else ("two",)
    kinds = ANYWHERE + (BETWEEN_HOSTS if nodes == 2 else ())
    steps = sorted(draw.sample(range(3, STEPS - 3), FAULTS))
    faults = list(zip(steps, draw.sample(kinds, FAULTS), strict=True))
    told = [(step, kind.__name__) for step, kind in faults]
    logging.getLogger(__name__).warning("%d hosts, plans %s: %s", nodes, names, told)
    with tiny_disk(tmp_path / "disk", "8m"):
        run = Broken(
            folder=tmp_path,
            disk=tmp_path / "disk",
            plans=[own.plans[name] for name in names],
            draw=draw,
            hosts=hosts[: nodes if nodes > 1 else 0],
        )
        try:
            meet(run, faults)
        finally:
            run.kill_all()
        weights = load_file(run.run_dir / "final.safetensors")
    assert recorded(sorted(tmp_path.glob("log-*")), STEPS) == own.stream
    assert weights.keys() == own.weights.keys()
    for name, tensor in own.weights.items():
        if changes:
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-10)
        else:
            assert torch.equal(weights[name], tensor), name
