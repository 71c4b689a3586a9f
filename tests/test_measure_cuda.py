"""Measuring on CUDA, driven by an object that stands for torch.cuda."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmlaunch.measure import clocks, points
from mmlaunch.measure.clocks import CudaClock, Reading
from mmlaunch.measure.machine import FRAGMENTED, room_on_cuda
from mmlaunch.measure.timing import Peers, Stopwatch
from mmplan.profiling.measure import measured_cluster
from tests.test_measure import USER_FILE, measurer, module_point, workload_dict

CPU = torch.device("cpu")
L2_BYTES = 1 << 20


class FakeCuda:
    """A stream whose work is queued by a host that runs ahead.

    Attributes:
        host_s: the host's clock.
        done_s: when the queued work is over.
        waits: how often the host waited for the device.
    """

    def __init__(self) -> None:
        self.host_s = self.done_s = 0.0
        self.waits = 0
        self.free: list[int] = []

    def work(self, seconds: float) -> None:
        self.host_s += 1e-3
        self.done_s = max(self.done_s, self.host_s) + seconds

    def synchronize(self, _: Any = None) -> None:
        self.waits += 1
        self.host_s = max(self.host_s, self.done_s) + 0.05

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=0.0, synchronize=self.synchronize)
        event.record = lambda: setattr(event, "at", max(self.done_s, self.host_s))
        event.elapsed_time = lambda end: 1e3 * (end.at - event.at)
        return event

    def get_device_properties(self, _: Any) -> Any:
        return SimpleNamespace(L2_cache_size=L2_BYTES)

    def clock_rate(self, _: Any) -> int:
        return 1410

    def mem_get_info(self, _: Any) -> tuple[int, int]:
        return self.free.pop(0), 100

    def memory_reserved(self, _: Any) -> int:
        return 5


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Its host's clock is the clock; products that warm a device are small."""
    cuda = FakeCuda()
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: cuda.host_s))
    monkeypatch.setattr(clocks, "_WARM_SIZE", 4)
    return cuda


def test_parts_are_read_off_the_device_and_nothing_waits_between_them(fake: FakeCuda) -> None:
    clock = CudaClock(CPU, fake)
    waits: list[int] = []

    def step(_: int) -> list[Reading]:
        before = fake.waits
        clock.cool()
        readings: list[Reading] = []
        for seconds in (0.3, 0.7):
            started = clock.mark()
            fake.work(seconds)
            readings.append(clock.since(started))
        waits.append(fake.waits - before)
        return readings

    forward, backward = Stopwatch(clock=clock, peers=Peers(1, CPU), repeat_s=5.0).time(step)
    assert (forward.median_s, backward.median_s) == pytest.approx((0.3, 0.7), abs=2e-3)
    assert forward.repeats > 3
    assert not any(waits)


def test_clocks_are_steady_before_timing_and_the_profile_says_their_rate(fake: FakeCuda) -> None:
    clock = CudaClock(CPU, fake)
    clock.warm()
    assert clocks.WARM_S < fake.host_s < clocks.WARM_S + 0.5
    assert clock.sm_clock == "1410 MHz under load"
    before = fake.host_s
    clock.warm()
    assert clocks.AGAIN_S < fake.host_s - before < clocks.AGAIN_S + 0.5


def test_a_clock_rate_that_nobody_tells_is_said(fake: FakeCuda) -> None:
    def clock_rate(_: Any) -> int:
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed\nmore")

    clock = CudaClock(CPU, fake)
    fake.clock_rate = clock_rate
    clock.warm()
    assert clock.sm_clock == "not recorded: nvidia-ml-py does not seem to be installed"


def test_caches_are_flushed_by_more_than_the_l2(fake: FakeCuda) -> None:
    clock = CudaClock(CPU, fake)
    clock.cool()
    assert clock._other is not None
    assert clock._other.nbytes == 2 * L2_BYTES


def test_points_of_modules_and_losses_are_measured_by_events(
    fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block's forward takes 1 s of the device here, a backward no time."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "measured_model.py").write_text(USER_FILE)
    clock = CudaClock(CPU, fake)
    monkeypatch.setattr(points, "clock_of", lambda *_, **__: clock)
    cooled: list[float] = []
    monkeypatch.setattr(clock, "cool", lambda: cooled.append(time.perf_counter()))
    at = measurer(tmp_path, json.loads(json.dumps(workload_dict())))
    at._build("head", tp=1).register_forward_hook(lambda *_: fake.work(9.0))
    for block in at._build("head", tp=1):
        block.register_forward_hook(lambda *_: fake.work(1.0))
    found = at.measure(module_point("head"))
    assert found["forward_s"] == pytest.approx(2.0, abs=0.01)
    assert found["backward_s"] == pytest.approx(0.0, abs=0.01)
    assert len(cooled) >= found["repeats"], "caches are cold before each forward"
    loss = at.measure({"kind": "loss", "task": "default", "loss": "fit", "samples": 4})
    assert loss["forward_s"] >= 0


def test_memory_of_cuda_and_nccl_is_not_planned(fake: FakeCuda) -> None:
    def communicator() -> None:
        fake.host_s += 0.25

    fake.free = [70, 60, 57]
    room = room_on_cuda(CPU, communicator, now=lambda: fake.host_s, cuda=fake)
    assert room == {
        # 70 free and 5 kept by the allocator; the first communicator took 7 more than the next.
        "memory_bytes": pytest.approx((75 - 7) * (1 - FRAGMENTED)),
        "communicator_bytes": 3.0,
        "communicator_start_s": 0.25,
    }
    fake.free = [70]
    alone = room_on_cuda(CPU, None, now=lambda: fake.host_s, cuda=fake)
    assert alone["memory_bytes"] == pytest.approx(75 * (1 - FRAGMENTED))
    assert alone["communicator_bytes"] == 0


def test_a_measured_gpu_is_a_device_of_a_cluster(fake: FakeCuda) -> None:
    fake.free = [70, 60, 57]
    machine = room_on_cuda(CPU, partial(fake.work, 0.25), now=CudaClock(CPU, fake).now, cuda=fake)
    machine |= {"cores": 4, "name": "A GPU", "peak_flops": 1e14}
    links = [
        ({"kind": "link", "operation": operation, "bytes": size}, {"seconds": 1e-5 + size / 1e11})
        for operation in ("p2p", "all_reduce", "all_gather")
        for size in (1 << 10, 1 << 24)
    ]
    device = measured_cluster("cuda", 2, machine, links).device
    assert (device.name, device.type) == ("A GPU", "cuda")
    assert device.communicator_bytes == 3.0
    assert device.communicator_start_s == pytest.approx(0.3, abs=0.01)
