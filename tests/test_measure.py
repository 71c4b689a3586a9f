"""Measured profiles: tiny modules, real processes, exact counts where counts can be exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmlaunch.measure.clocks import CpuClock, Reading
from mmlaunch.measure.inputs import block_flops
from mmlaunch.measure.points import Measurer
from mmlaunch.measure.timing import HeldTensors, Peers, Stopwatch
from mmplan.errors import InvalidInputError, RunFailedError
from mmplan.profiling.measure import (
    _block_work,
    _point,
    in_rounds,
    measure_profile,
    measured_cluster,
)
from mmplan.profiling.worker import Json, ProfileSetting, ProfileState, Worker, measure_points
from mmplan.schema.cluster import Cluster
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload, load_workload
from mmplan.zoo import towers

USER_FILE = """
import os
import signal
import torch
from torch import nn
from torch.utils.data import Dataset


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.weight * x


class Raise(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.weight, self.what = nn.Parameter(torch.ones(())), what

    def forward(self, x):
        if self.what == "memory" and len(x) > 2:
            raise torch.OutOfMemoryError("too much")
        if self.what == "value":
            raise ValueError("wrong shape\\nand more")
        if self.what == "kill" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.weight * x if self.what != "none" else None


def head(width=16, out=4):
    print("factories may print")
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, out))


def counting():
    return nn.Sequential(nn.Linear(8, 8), Counting())


def raising(what):
    return nn.Sequential(nn.Flatten(), Raise(what))


class Data(Dataset):
    def __init__(self, size=40):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        x = torch.arange(64.0).view(1, 8, 8) + index
        return {"image": x, "target": torch.full((4,), float(index))}
"""


def workload_dict(factory: str | None = None, **args: Any) -> Json:
    module = {"factory": "mmplan.zoo.towers:vision", "inputs": ["image"]}
    module |= {"args": {"blocks": 2, "width": 16, "embed": 16, "patch": 2}}
    if factory is not None:
        module |= {"factory": factory, "args": args}
    return {
        "name": "tiny",
        "batch": 8,
        "modules": {
            "vision": module,
            "head": {"factory": "measured_model:head", "inputs": ["vision"]},
        },
        "losses": {
            "contrast": {
                "factory": "mmplan.zoo.losses:clip",
                "inputs": ["vision", "vision"],
                "cross_sample": True,
            },
            "fit": {"factory": "mmplan.zoo.losses:mse", "inputs": ["head", "target"]},
        },
        "data": {"factory": "measured_model:Data"},
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "measured_model.py").write_text(USER_FILE)
    (tmp_path / "workload.yaml").write_text(json.dumps(workload_dict()))
    return tmp_path


def cpu_cluster(name: str = "cpu-2") -> Cluster:
    link = {"latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9}
    device = {"name": name, "memory_bytes": 1e9, "peak_flops": 1e10}
    return Cluster.model_validate(
        {
            "name": name,
            "nodes": 1,
            "devices_per_node": 2,
            "device": device,
            "links": {"intra_node": link},
        }
    )


def measurer(folder: Path, data: Json | None = None, **change: Any) -> Measurer:
    job = {
        "workload": data or workload_dict(),
        "folder": str(folder),
        "processes": 1,
        "links": False,
        "repeat_s": 0.0,
        "max_point_s": 5.0,
        "pool": 8,
    }
    return Measurer(job | change, rank=0, device=torch.device("cpu"))


def module_point(module: str, microbatch: int = 2, blocks: int = 2) -> Json:
    place = {"kind": "module", "task": "default", "module": module, "tp": 1}
    return place | {"microbatch": microbatch, "blocks": blocks}


# --- the whole way, with processes -------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_interrupted_profile_goes_on_and_is_complete(folder: Path) -> None:
    state_path = folder / ".profile.json.partial"
    seen: list[tuple[int, int, float | None, str]] = []

    def measure(stop_after: int | None = None) -> Profile:
        def progress(*now: Any) -> None:
            seen.append(now)
            if len(seen) == stop_after:
                raise KeyboardInterrupt

        return measure_profile(
            folder / "workload.yaml",
            device="cpu",
            num_processes=2,
            progress=progress,
            state_path=state_path,
        )

    with pytest.raises(KeyboardInterrupt):
        measure(stop_after=4)
    assert not _workers(), "the interrupted processes are still there"
    assert [entry[0] for entry in seen] == [1, 2, 3, 4]
    with state_path.open("a") as file:
        file.write('{"key": "cut o')  # as a kill leaves it
    seen.clear()
    profile = measure()
    assert seen[0][0] == 5, "finished points are not measured again"
    assert seen[-1][:3] == (seen[-1][1], seen[-1][1], 0.0)
    assert not _workers()
    _check_profile(profile)

    # Only what the model is, is looked at again: points of another one would be of no use.
    seen.clear()
    again = measure()
    assert not seen
    assert again.modules == profile.modules
    assert again.cluster == profile.cluster


def _workers() -> list[str]:
    """Command lines of measuring processes that this test's process has."""
    out = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True
    ).stdout
    return [line for line in out.splitlines() if "mmlaunch.measure" in line]


def _check_profile(profile: Profile) -> None:
    vision, head = profile.modules["vision"], profile.modules["head"]
    whole = towers.vision(2, 16, embed=16, patch=2)
    assert vision.parameters == sum(p.numel() for p in whole.parameters())
    assert vision.block_parameters == tuple(sum(p.numel() for p in b.parameters()) for b in whole)
    assert vision.block_boundary_bytes == (16 * 16 * 4, 16 * 4)
    assert {(p.tp, p.microbatch) for p in vision.points} == {
        (tp, size) for tp, sizes in ((1, (1, 2, 4, 8)), (2, (1, 4, 8))) for size in sizes
    }
    assert {p.tp for p in head.points} == {1}, "it has no tp_plan"
    assert "no block has a tp_plan" in profile.provenance["tp_left_out"]["head tp 2"]
    assert all(p.forward_s > 0 and p.backward_s > 0 for p in (*vision.points, *head.points))
    held = {(p.tp, p.microbatch): p.activation_bytes for p in vision.points}
    assert held[1, 8] == 8 * held[1, 1]
    assert held[1, 8] / 2 < held[2, 8] < held[1, 8], "sharded in part"
    assert head.flops_per_sample == 2 * (16 * 16 + 16 * 4)
    assert profile.losses["contrast"].sharded
    assert not profile.losses["fit"].sharded
    assert [p.samples for p in profile.losses["contrast"].points] == [1, 2, 4, 8]
    cluster = profile.cluster
    assert (cluster.nodes, cluster.devices_per_node, cluster.device.type) == (1, 2, "cpu")
    assert 1e6 < cluster.links.intra_node.bandwidth_bytes_per_s < 1e12
    collectives = cluster.links.intra_node_collectives
    assert collectives is not None
    assert collectives.all_reduce is not None
    assert collectives.all_reduce.latency_s > 0
    assert profile.provenance["processes"] == 2
    assert profile.fits is not None
    assert profile.fits.modules["vision"]["2"].forward.at(8) > 0


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_a_process_that_is_killed_is_told_with_its_signal(folder: Path) -> None:
    path = folder / "workload.yaml"
    path.write_text(json.dumps(workload_dict("measured_model:raising", what="kill")))
    with pytest.raises(RunFailedError, match="process 1 was killed by signal 9") as caught:
        measure_profile(
            path, cluster=cpu_cluster(), num_processes=2, device="cpu", state_path=folder / "s"
        )
    assert "memory" in str(caught.value.hint)


@pytest.mark.timeout(400)
def test_a_faulty_factory_is_invalid_input_from_the_worker_too(folder: Path) -> None:
    path = folder / "workload.yaml"
    path.write_text(json.dumps(workload_dict("measured_model:missing")))
    with pytest.raises(InvalidInputError, match=r"modules\.vision\.factory.*'missing'") as caught:
        measure_profile(path, device="cpu", num_processes=1, state_path=folder / "s")
    assert caught.value.hint


def test_a_cluster_of_other_devices_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match="V100") as caught:
        measure_profile(
            folder / "workload.yaml",
            cluster=cpu_cluster("V100"),
            device="cpu",
            state_path=folder / "s",
        )
    assert "--analytic" in str(caught.value.hint)


def test_no_process_at_all_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match="--nproc 0"):
        measure_profile(folder / "workload.yaml", num_processes=0, state_path=folder / "s")


# --- one process's part -------------------------------------------------------------------


def test_held_bytes_are_those_of_a_closed_form() -> None:
    linears = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(5, 8)
    with HeldTensors([*linears.parameters(), x]) as held:
        out = linears(x)
    # Of ReLU only its result is kept; Linear keeps its input, which that result is.
    assert held.num_bytes == 5 * 16 * 4
    assert held.add([out]) == 5 * (16 + 4) * 4
    assert held.add([out, out.view(-1)]) == 5 * (16 + 4) * 4, "each storage once"


def test_flops_count_attention_on_the_cpu() -> None:
    block = towers.vision(3, 16, heads=4)[1]
    tokens, width = 16, 16
    matrices = 2 * tokens * 12 * width**2
    attention = 2 * 2 * tokens**2 * width
    assert block_flops(block, (torch.randn(2, tokens, width),)) == 2 * (matrices + attention)


def test_the_whole_modules_bytes_are_the_sum_of_its_blocks(folder: Path) -> None:
    at = measurer(folder)
    place = {"task": "default", "module": "vision", "microbatch": 4}
    blocks = at.measure({"kind": "shape", **place})["blocks"]
    whole = at.measure(module_point("vision", 4))
    assert sum(b["activation_bytes"] for b in blocks) * 4 == whole["activation_bytes"]


def test_gradients_stop_at_inputs_and_parameters_train_again(folder: Path) -> None:
    at = measurer(folder)
    fed_by_data = at.measure(module_point("vision"))
    fed_by_module = at.measure(module_point("head"))
    assert fed_by_data["backward_input"]["first_block"] == 1
    assert fed_by_module["backward_input"]["first_block"] == 0
    assert at.measure(module_point("vision", blocks=1))["backward_input"] is None
    assert all(p.requires_grad for p in at._build("vision", tp=1).parameters())


def test_double_precision_reaches_the_data(folder: Path) -> None:
    data = workload_dict() | {"train": {"precision": "fp64"}}
    twice = measurer(folder, data).measure(module_point("head"))["activation_bytes"]
    assert twice == 2 * measurer(folder).measure(module_point("head"))["activation_bytes"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_types_run_under_autocast(folder: Path, precision: str) -> None:
    data = workload_dict() | {"train": {"precision": precision}}
    at = measurer(folder, data)
    assert at.measure(module_point("head"))["forward_s"] > 0
    blocks = at.measure({"kind": "shape", "task": "default", "module": "head", "microbatch": 2})
    assert blocks["blocks"][-1]["output_bytes"] == 4 * 2


@pytest.mark.parametrize(
    ("factory", "args", "part"),
    [
        ("measured_model:counting", {}, r"block 1 \(Counting\) changes its buffer 'calls'"),
        ("measured_model:raising", {"what": "value"}, r"block 1 .* ValueError: wrong shape \(/"),
        ("measured_model:raising", {"what": "none"}, r"block 1 .* returned a NoneType"),
    ],
)
def test_a_faulty_block_is_named(
    folder: Path, factory: str, args: dict[str, Any], part: str
) -> None:
    data = workload_dict(factory, **args)
    shape = {"kind": "shape", "task": "default", "module": "vision", "microbatch": 2}
    with pytest.raises(InvalidInputError, match=rf"modules\.vision: {part}"):
        measurer(folder, data).measure(shape)


def test_what_does_not_fit_or_takes_too_long_is_left_out(folder: Path) -> None:
    data = workload_dict("measured_model:raising", what="memory")
    at = measurer(folder, data)
    assert "forward_s" in at.measure(module_point("vision", 2))
    assert at.measure(module_point("vision", 4)) == {"skipped": "out of memory"}
    slow = measurer(folder, max_point_s=1e-9)
    assert "forward_s" in slow.measure(module_point("head", 1)), "the first is always tried"
    assert "micro-batch of 8 would take" in slow.measure(module_point("head", 8))["skipped"]


def test_samples_change_between_repeats_and_repeat_beyond_the_pool(folder: Path) -> None:
    inputs: Any = measurer(folder)._inputs
    first, second, third = (inputs.of_module("default", "vision", 4, r)[0] for r in range(3))
    assert not torch.equal(first, second)
    assert torch.equal(first, third)
    beyond = inputs.of_module("default", "vision", 20)[0]
    assert torch.equal(beyond, torch.cat([first, second, first, second, first]))
    assert inputs.of_module("default", "head", 4)[0].requires_grad
    assert not first.requires_grad


@pytest.mark.parametrize(("rule", "degrees"), [("colwise", [1, 2]), ("rowwise", [1])])
def test_tied_blocks_are_measured_where_they_are_cut_alike(
    folder: Path, rule: str, degrees: list[int]
) -> None:
    (folder / "measured_model.py").write_text(
        USER_FILE
        + f"""

class Ends(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.tp_plan = {{"up": "colwise", "down": "rowwise"}}

    def forward(self, x):
        return self.down(self.up(x))


def tied():
    a, b = Ends(), Ends()
    (b.up if {rule!r} == "colwise" else b.down).weight = a.up.weight
    return nn.Sequential(a, b)
"""
    )
    at = measurer(folder, workload_dict("measured_model:tied"))
    found = at.measure({"kind": "describe", "module": "vision", "tps": [2]})
    assert found["tps"] == degrees, found["refused"]
    obstacle = "tp_plan cuts 1.down.weight (rowwise), which is tied to 0.up.weight (colwise)"
    assert [obstacle in text for text in found["refused"].values()] == [True] * (2 - len(degrees))
    assert found["block_parameters"] == [136, 72], "a tied parameter counts once"
    assert found["tied_blocks"] == ((0, 1),)


def test_a_step_is_repeated_until_its_time_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    watch = Stopwatch(clock=CpuClock(), peers=Peers(1, cpu), repeat_s=1.0)
    clock = [0.0]
    monkeypatch.setattr(watch.clock, "now", lambda: clock[0])

    def step(repeat: int) -> list[Reading]:
        seconds = 0.5 if repeat == 5 else 0.1  # one that was disturbed
        clock[0] += seconds
        return [lambda: seconds, lambda: 2 * seconds]

    one, two = watch.time(step)
    assert one.median_s == pytest.approx(0.1)
    assert two.median_s == pytest.approx(0.2)
    assert one.spread_s == pytest.approx(0.0)
    assert 6 <= one.repeats <= 11


# --- what is made of the results -----------------------------------------------------------


def block(seconds: float, *, spread: float = 0.0, flops: float = 1.0, same_as: int = 0) -> Json:
    return {"seconds": seconds, "spread_s": spread, "flops": flops, "same_as": same_as}


def test_equal_blocks_get_equal_work_and_noise_gives_way_to_flops() -> None:
    quiet = [block(1.0), block(3.0), block(5.0, same_as=2)]
    assert _block_work(quiet) == [2.0, 2.0, 5.0]
    noisy = [block(1.0, spread=0.5, flops=7.0), block(3.0, spread=1.5, flops=8.0)]
    assert _block_work(noisy) == [7.0, 8.0]
    uncounted = [block(1.0, spread=0.5, flops=0.0), block(3.0, spread=1.5, flops=8.0)]
    assert _block_work(uncounted) == [1.0, 3.0]


def test_input_gradients_are_scaled_to_all_blocks() -> None:
    result = {
        "forward_s": 1.0,
        "backward_s": 4.0,
        "activation_bytes": 10.0,
        "forward_spread_s": 0.0,
        "backward_spread_s": 0.0,
        "repeats": 3,
        "backward_input": {"seconds": 1.2, "first_block": 1},
    }
    point = module_point("vision", 4, blocks=3)
    assert _point(point, result, [1.0, 2.0, 1.0, 9.0]).backward_input_s == pytest.approx(1.6)
    result["backward_input"] = {"seconds": 9.0, "first_block": 0}
    assert _point(point, result, [1.0, 2.0, 1.0]).backward_input_s == 4.0, "never above the whole"


def test_links_are_read_off_exact_times() -> None:
    machine = {"cores": 4, "name": "cpu", "memory_bytes": 1e9, "peak_flops": 1e9}
    share = {"p2p": 1.0, "all_reduce": 1.5, "all_gather": 0.75}
    found = [
        (
            {"kind": "link", "operation": operation, "bytes": size},
            {"seconds": 1e-4 + size * part / 1e9},
        )
        for operation, part in share.items()
        for size in (1 << 10, 1 << 16, 1 << 20)
    ]
    links = measured_cluster("cpu", 4, machine, found).links
    collectives = links.intra_node_collectives
    assert collectives is not None
    for link in (links.intra_node, collectives.all_reduce, collectives.all_gather):
        assert link is not None
        assert link.latency_s == pytest.approx(1e-4)
        assert link.bandwidth_bytes_per_s == pytest.approx(1e9)


def _setting(processes: int = 1, **change: Any) -> ProfileSetting:
    values: Json = {
        "workload": Workload.model_validate(workload_dict()).model_dump(mode="json"),
        "folder": Path("here"),
        "device": "cpu",
        "processes": processes,
        "repeat_s": 0.1,
        "max_point_s": 1.0,
        "pool": 8,
    }
    return ProfileSetting(**(values | change))


def test_only_the_same_measurement_is_taken_from_the_state(tmp_path: Path) -> None:
    setting, point = _setting(), module_point("vision")
    ProfileState(tmp_path / "state").add(setting.key(point), {"forward_s": 1.0})
    state = ProfileState(tmp_path / "state")
    assert measure_points(setting, [point], state, Worker()) == [{"forward_s": 1.0}]
    for other in (
        _setting(processes=2),
        _setting(device="cuda"),
        _setting(folder=Path("there")),
        _setting(model={"modules.vision": {}}),
    ):
        assert state.get(other.key(point)) is None
    assert state.get(setting.key(module_point("vision", 4))) is None


def test_a_bad_moment_is_outvoted_by_later_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Json] = []

    def measured(_: ProfileSetting, points: list[Json], *__: Any, **___: Any) -> list[Json]:
        asked.extend(points)
        return [result(point) for point in points]

    def result(point: Json) -> Json:
        if point.get("microbatch") == 64:
            return {"skipped": "out of memory"}
        seconds = [9.0, 1.0, 2.0][point.get("round", 0)]
        if point["kind"] == "link":
            return {"seconds": seconds, "repeats": 3}
        inputs = {"seconds": seconds / 2, "first_block": 1}
        wall_s = 60.0 if point["microbatch"] == 32 else 1.0
        return {"forward_s": seconds, "backward_input": inputs, "repeats": 3, "wall_s": wall_s}

    monkeypatch.setattr("mmplan.profiling.measure.measure_points", measured)
    points = [
        module_point("vision", 1),
        module_point("vision", 32),
        module_point("vision", 64),
        module_point("vision", 1, blocks=1),
        {"kind": "link", "operation": "p2p", "bytes": 8},
    ]
    state = ProfileState(tmp_path / "state")
    short, long, skipped, half, link = in_rounds(_setting(), points, state, Worker())
    assert (short["forward_s"], short["repeats"]) == (2.0, 9)
    assert short["backward_input"] == {"seconds": 1.0, "first_block": 1}
    assert link == {"seconds": 2.0, "repeats": 9}
    assert long["forward_s"] == half["forward_s"] == 9.0
    assert skipped == {"skipped": "out of memory"}
    assert len(asked) == len(points) + 2 * 2
    assert in_rounds(_setting(), points, state, Worker(), rounds=1)[0]["forward_s"] == 9.0


def test_what_processes_do_together_takes_as_long_as_for_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    watch = Stopwatch(clock=CpuClock(), peers=Peers(1, cpu), repeat_s=0.0)
    monkeypatch.setattr(watch.peers, "least", lambda values: [min(v, 0.25) for v in values])
    one, two = watch.time(lambda _: (lambda: 1.0, lambda: 0.125), together=True)
    assert (one.median_s, two.median_s) == (0.25, 0.125)


def test_tasks_that_feed_a_module_otherwise_are_measured_apart(folder: Path) -> None:
    from mmplan.profiling.measure import _uses

    data = workload_dict()
    data["tasks"] = {
        "A": {"modules": ["vision", "head"], "losses": ["fit"]},
        "same": {"modules": ["vision"], "losses": ["contrast"]},
        "B": {"modules": ["vision", "head"], "losses": ["fit"], "batch": 4},
    }
    (folder / "workload.yaml").write_text(json.dumps(data))
    uses = list(_uses(load_workload(folder / "workload.yaml")))
    assert [(use.task, use.module, use.first) for use in uses] == [
        ("A", "vision", True),
        ("A", "head", True),
        ("B", "vision", False),
        ("B", "head", False),
    ]
