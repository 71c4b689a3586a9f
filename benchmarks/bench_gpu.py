"""What one GPU can show, in parts of at most ten minutes: one line of JSON for each part.

    python benchmarks/bench_gpu.py [--parts smoke,memory,overhead,heldout] [--device cpu --tiny]

A part that this machine cannot show says so: ``{"part": ..., "skipped": reason}``. With
``--device cpu --tiny`` the same code runs on a processor, which shows that it works and no more.

- smoke: a profile, a plan, its run and its verification; a run that is resumed under fused AdamW
  must end with the loss of one that was not.
- memory: a pipeline of two modules on one rank with eight micro-batches; expected and planned peaks
  over the one that was held.
- overhead: the same pipeline with forwards of 2, 5 and 20 ms, by the executor, by a plain loop and
  by a compiled loop; seconds of a step.
- heldout: seconds that the profile's curves say for micro-batches that were not measured, over
  measured ones; a matrix product before and after the clocks are steady.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from planning import planned
from torch import Tensor, nn

from mmlaunch.measure.clocks import clock_of
from mmlaunch.model.precision import TrainingPrecision
from mmlaunch.session.session import Session
from mmplan.profiling.measure import measure_profile
from mmplan.profiling.worker import ProfileSetting, ProfileState, Worker, measure_points
from mmplan.schema.base import save_document
from mmplan.schema.factories import build_module
from mmplan.schema.plan import Plan
from mmplan.schema.workload import load_workload
from mmplan.simulation.peak_memory import ExpectedMemory
from mmplan.simulation.predict import plan_costs

MODULES = ("front", "back")
MICROBATCHES = 8
STEPS, SAVED_AT = 6, 3
REPEATS, WARM_UP = 12, 4
# Malloc gives back at once what is larger (mallopt(3)), so that the peak is the tensors'.
EAGER_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072"}
# What one GPU cannot show, and why.
UNSHOWN = {
    "communicator": "a communicator of one rank moves nothing: bytes and multiprocessors that "
    "communicators take need two GPUs",
    "ranks": "NCCL refuses two ranks on one GPU, from 2.30 on unless NCCL_MULTI_RANK_GPU_ENABLE "
    "is set; and mmlaunch gives every rank a GPU of its own",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all parts have in common.

    Attributes:
        blocks: of each of the two modules.
        forwards_s: of one micro-batch through one module, about.
    """

    device: Literal["cpu", "cuda"]
    blocks: int
    width: int
    tokens: int
    microbatch: int
    forwards_s: tuple[float, ...]

    @property
    def precision(self) -> str:
        """bf16, which CPUs compute slowly."""
        return "bf16" if self.device == "cuda" else "fp32"

    @property
    def torch_device(self) -> torch.device:
        """The one device."""
        return torch.device(self.device, 0) if self.device == "cuda" else torch.device("cpu")


FULL = {"blocks": 6, "width": 2048, "tokens": 512, "microbatch": 8}
TINY = {"blocks": 2, "width": 16, "tokens": 8, "microbatch": 2}


def smoke(setting: Setting, folder: Path) -> dict[str, Any]:
    """A profile, a plan, a run, a verification; a resumed run beside an unbroken one."""
    path, _ = _planned(setting, folder)
    _mmlaunch("verify", str(path))
    same = "--set", "train.deterministic=true"
    whole = _run(path, folder / "whole", STEPS, *same)
    _run(path, folder / "resumed", SAVED_AT, *same)
    resumed = _run(path, folder / "resumed", STEPS, "--resume")
    return {
        "losses": [line["loss"] for line in whole],
        "resumes_bitwise": whole[-1]["loss"] == resumed[-1]["loss"],
    }


def memory(setting: Setting, folder: Path) -> dict[str, Any]:
    """Expected and planned peak over the held one."""
    path, plan = _planned(setting, folder)
    _run(path, folder / "run", STEPS, environment=EAGER_MALLOC)
    record = json.loads((folder / "run" / "run.json").read_text(encoding="utf-8"))
    held = record["memory_bytes"]["0"]
    expected = ExpectedMemory(plan_costs(plan, path)).peak(0).total
    return {
        "held_bytes": held,
        "expected_over_held": expected / held,
        "planned_over_held": plan.predicted.memory_bytes[0] / held,
    }


def overhead(setting: Setting, folder: Path) -> dict[str, Any]:
    """Seconds of a step by the executor, a plain loop and a compiled loop."""
    rows: list[dict[str, Any]] = []
    _planned(setting, folder)
    for forward_s in setting.forwards_s:
        microbatch = _microbatch_of(setting, forward_s, folder)
        workload = _workload(setting, folder, microbatch)
        path, _ = planned(workload, folder / "profile.json", devices=1, solver="colocated")
        with Session.from_plan(path) as session:
            # It ends when the loss is known; its data's loading is none of the executor's.
            executor_s = _median_s(setting, lambda: session.forward_backward().iteration_s)
        loop, compiled = (
            _loop(setting, folder, microbatch, prepare) for prepare in (_as_it_is, torch.compile)
        )
        plain_s, compiled_s = _median_s(setting, loop), _median_s(setting, compiled)
        rows.append(
            {
                "forward_s": forward_s,
                "microbatch": microbatch,
                "executor_s": executor_s,
                "plain_s": plain_s,
                "compiled_s": compiled_s,
                "executor_over_plain": executor_s / plain_s,
                "executor_over_compiled": executor_s / compiled_s,
            }
        )
    return {"steps": rows}


def heldout(setting: Setting, folder: Path) -> dict[str, Any]:
    """Curves at sizes that were not measured, and clocks before and after they are steady."""
    path = _workload(setting, folder, setting.microbatch)
    state = folder / "state"
    profile = measure_profile(path, device=setting.device, num_processes=1, state_path=state)
    assert profile.fits is not None
    batch = MICROBATCHES * setting.microbatch
    sizes = [size for size in range(3, batch) if size & (size - 1)][:: max(1, batch // 8)]
    job = ProfileSetting(
        workload=load_workload(path).model_dump(mode="json", exclude_none=True),
        folder=folder,
        device=setting.device,
        processes=1,
        repeat_s=0.1,
        max_point_s=20.0,
        pool=batch,
    )
    points = [
        {"kind": "module", "task": "default", "module": "front", "tp": 1}
        | {"microbatch": size, "blocks": setting.blocks}
        for size in sizes
    ]
    with Worker() as worker:
        found = measure_points(job, points, ProfileState(folder / "heldout"), worker)
    fit = profile.fits.modules["front"]["1"]
    return {
        "sizes": sizes,
        "forward": [fit.forward.at(s) / r["forward_s"] for s, r in zip(sizes, found, strict=True)],
        "backward": [
            fit.backward.at(s) / r["backward_s"] for s, r in zip(sizes, found, strict=True)
        ],
        "cold_over_steady_clocks": _cold_over_steady(setting),
        "sm_clock": profile.provenance.get("sm_clock", "none on a CPU"),
    }


PARTS: dict[str, Callable[[Setting, Path], dict[str, Any]]] = {
    "smoke": smoke,
    "memory": memory,
    "overhead": overhead,
    "heldout": heldout,
}


# --- what the parts are made of ---


def _workload(setting: Setting, folder: Path, microbatch: int) -> Path:
    """The pipeline's file."""
    pins = {"tp": 1, "microbatch": microbatch}
    args = {"blocks": setting.blocks, "width": setting.width}
    of = {"front": ("x", args | {"tokens": setting.tokens}), "back": ("front", args)}
    batch = MICROBATCHES * microbatch
    document = {
        "version": 1,
        "name": "layers",
        "batch": batch,
        "modules": {
            name: {"factory": f"layers:{name}", "args": own, "inputs": [source], "plan": pins}
            for name, (source, own) in of.items()
        },
        "losses": {"fit": {"factory": "mmplan.zoo.losses:mse", "inputs": ["back", "y"]}},
        "data": {"factory": "layers:Noise", "args": {"samples": 2 * batch, "width": setting.width}},
        "train": {
            "precision": setting.precision,
            "optimizer": "AdamW",
            "optimizer_args": {"lr": 1e-3, "fused": True},
        },
    }
    (folder / "layers.py").write_text((Path(__file__).parent / "layers.py").read_text())
    path = folder / "layers.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def _planned(setting: Setting, folder: Path) -> tuple[Path, Plan]:
    """Both modules on the one device, from a quick profile of it."""
    path = _workload(setting, folder, setting.microbatch)
    profile = measure_profile(
        path, device=setting.device, num_processes=1, state_path=folder / "state"
    )
    save_document(profile, folder / "profile.json")
    return planned(path, folder / "profile.json", devices=1, solver="colocated")


def _run(
    plan: Path, run_dir: Path, steps: int, *more: str, environment: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Train; the lines of its metrics."""
    save = ("--steps", str(steps), "--save-every", str(SAVED_AT), "--run-dir", str(run_dir))
    _mmlaunch("run", str(plan), *save, *more, environment=environment)
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _mmlaunch(*command: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from cli import mmlaunch_main as m; m()", *command],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | (environment or {}),
    )
    if done.returncode:
        raise RuntimeError(f"mmlaunch {command[0]} ended with {done.returncode}: {done.stderr}")


def _as_it_is(module: nn.Module) -> nn.Module:
    return module


def _loop(
    setting: Setting, folder: Path, microbatch: int, prepare: Callable[[nn.Module], Any]
) -> Callable[[], float]:
    """Seconds of a step of the same modules without an executor."""
    workload = load_workload(folder / "layers.yaml")
    device = setting.torch_device
    built = [build_module(workload, name, folder).to(device) for name in MODULES]
    front, back = (prepare(module) for module in built)
    x, y = torch.randn(2, MICROBATCHES, microbatch, setting.width, device=device)
    precision = TrainingPrecision(workload.train, device)
    scale = 1 / MICROBATCHES

    def step() -> None:
        for module in built:
            module.zero_grad()
        for rows, target in zip(x, y, strict=True):
            with precision.compute(keep_casts=True):
                out: Tensor = back(front(rows))
                loss = nn.functional.mse_loss(out.float(), target)
            (scale * loss).backward()

    return _timed(setting, step)


def _microbatch_of(setting: Setting, forward_s: float, folder: Path) -> int:
    """Samples whose forward through one module takes about so long."""
    workload = load_workload(_workload(setting, folder, setting.microbatch))
    module = build_module(workload, "front", folder).to(setting.torch_device)
    x = torch.randn(setting.microbatch, setting.width, device=setting.torch_device)
    precision = TrainingPrecision(workload.train, setting.torch_device)

    def forward() -> None:
        with torch.no_grad(), precision.compute(keep_casts=True):
            module(x)

    return max(
        1, round(setting.microbatch * forward_s / _median_s(setting, _timed(setting, forward)))
    )


def _timed(setting: Setting, step: Callable[[], object]) -> Callable[[], float]:
    """Seconds of a step, from the moment that the device is free to when it is again."""
    clock = clock_of(setting.torch_device)

    def seconds() -> float:
        started = clock.now()
        step()
        return clock.now() - started

    return seconds


def _median_s(setting: Setting, seconds: Callable[[], float]) -> float:
    """The median of a step's seconds, on a warm device."""
    clock_of(setting.torch_device).warm()
    return statistics.median([seconds() for _ in range(WARM_UP + REPEATS)][WARM_UP:])


def _cold_over_steady(setting: Setting) -> float:
    """Seconds of a matrix product of a device that was idle, over those after warming it."""
    size = 4096 if setting.device == "cuda" else 64
    a = torch.randn(size, size, device=setting.torch_device)
    clock = clock_of(setting.torch_device)

    def once() -> float:
        took: list[float] = []
        for _ in range(REPEATS):
            started = clock.mark()
            torch.mm(a, a)
            took.append(clock.since(started)())
        return statistics.median(took)

    once()  # kernels are chosen
    time.sleep(1.0)
    cold_s = once()
    clock.warm()
    return cold_s / once()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join([*PARTS, *UNSHOWN]))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a test")
    options = parser.parse_args(arguments)
    unknown = set(options.parts.split(",")) - {*PARTS, *UNSHOWN}
    if unknown:
        parser.error(f"--parts: there is no {', '.join(sorted(unknown))}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    sizes = TINY if options.tiny else FULL
    forwards_s = (1e-4,) if options.tiny else (2e-3, 5e-3, 20e-3)
    setting = Setting(device=options.device, forwards_s=forwards_s, **sizes)
    there = options.device == "cpu" or torch.cuda.is_available()
    os.environ["MMLAUNCH_DEVICE"] = options.device
    failed = False
    for name in options.parts.split(","):
        skipped = UNSHOWN.get(name) if there else "no CUDA device"
        line = {"skipped": skipped} if skipped else _part(name, setting)
        failed |= "failed" in line
        print(json.dumps({"part": name, **line}), flush=True)
    return int(failed)


def _part(name: str, setting: Setting) -> dict[str, Any]:
    started, before = time.perf_counter(), dict(os.environ)
    on_cuda = setting.device == "cuda"
    where = torch.cuda.get_device_name() if on_cuda else "a processor"
    with tempfile.TemporaryDirectory(prefix="mmplan-bench-") as folder:
        try:
            found = PARTS[name](setting, Path(folder))
        except Exception as error:
            found = {"failed": f"{type(error).__name__}: {error}"}
        finally:
            # A session makes its process a rank, which those of other parts must not be.
            os.environ.clear()
            os.environ.update(before)
    return {"device": where, "wall_s": round(time.perf_counter() - started, 1), **found}


if __name__ == "__main__":
    sys.exit(main())
