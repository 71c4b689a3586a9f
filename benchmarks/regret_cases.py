"""The workloads of bench_regret.py: towers, chains, trees and tasks on 4 to 1,296 devices.

Random ones have made-up profiles: affine times of micro-batches, sublinear tensor parallelism,
nodes of 4 or 8, memory that is often short. Some have batches that the devices do not divide, and
any stage of ZeRO. The others are those of examples/ on analytic profiles.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mmplan.planning import planner
from mmplan.profiling.analytic import analytic_profile
from mmplan.schema.cluster import load_cluster
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload, load_workload

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.solving import module_profile, profile, workload

EXAMPLES = Path(__file__).parent.parent / "examples"
SHAPES = ("towers", "chain", "tree", "tasks")
# Of random workloads, by turns: with batches that the devices divide, and with others.
DEVICES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
UNEVEN_DEVICES = (8, 24, 64)
EVEN = len(SHAPES) * len(DEVICES)
RANDOM = EVEN + len(SHAPES) * len(UNEVEN_DEVICES)
# Workloads with more devices take minutes each.
QUICK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """A workload of examples/ and some of a cluster's devices.

    Attributes:
        batch: samples of a step, in place of the workload's.
    """

    shape: str
    path: str
    cluster: str
    devices: int
    batch: int | None = None

    @property
    def name(self) -> str:
        return f"{Path(self.path).stem if 'papers' in self.path else Path(self.path).parent.name}"


SHIPPED = (
    *(
        Shipped(shape=shape, path=f"{name}/workload.yaml", cluster="cpu", devices=devices)
        for shape, name in (
            ("towers", "clip-digits"),
            ("chain", "mllm-digits"),
            ("tasks", "multitask-digits"),
            ("tasks", "val-digits"),
        )
        for devices in (4, 8)
    ),
    *(
        Shipped(shape=shape, path=f"papers/{name}.yaml", cluster="p3-8", devices=devices)
        for shape, name, devices in (
            ("towers", "clip-760m", 8),
            ("towers", "clip-760m", 32),
            ("towers", "lit-350m", 16),
            ("tree", "coca-760m", 16),
        )
    ),
    *(
        Shipped(
            shape="tree",
            path=f"papers/{name}.yaml",
            cluster="a800-162",
            devices=devices,
            batch=batch,
        )
        for name, devices, batch in (
            ("mllm-9b", 16, 64),
            ("mllm-9b", 96, 240),
            ("mllm-15b", 96, 240),
            ("mllm-9b", 1296, 1920),
            ("mllm-15b", 1296, 1920),
            ("mllm-72b", 1296, 1920),
        )
    ),
    *(
        Shipped(shape="tasks", path=f"papers/{name}.yaml", cluster="a800-8x8", devices=devices)
        for name, devices in (
            ("multitask-clip", 16),
            ("multitask-clip", 64),
            ("ofasys", 16),
            ("qwen-val-9b", 16),
        )
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload and what it costs.

    Attributes:
        shape: one of :data:`SHAPES`.
    """

    name: str
    shape: str
    devices: int
    job: Workload
    profile: Profile


def solved(case: Case, **options: Any) -> Plan:
    """The plan of a case, as ``mmplan solve`` makes it.

    Raises:
        InfeasibleError: none fits.
    """
    return planner.solve(
        case.job,
        workload_path=None,
        profile=case.profile,
        profile_path=None,
        plan_path=Path(tempfile.gettempdir()) / "plan.json",
        devices=case.devices,
        **options,
    )


def names() -> list[str]:
    """Of all cases, mixed, so that a part of them is a sample; those that take long come last."""
    own = [(_devices(seed), random_name(seed)) for seed in range(RANDOM)]
    own += [(item.devices, shipped_name(item)) for item in SHIPPED]
    random.Random(0).shuffle(own)
    return [name for _, name in sorted(own, key=lambda pair: pair[0] > QUICK)]


def random_name(seed: int) -> str:
    """Of a random workload."""
    return f"{SHAPES[seed % len(SHAPES)]}-{seed}, {_devices(seed)}"


def shipped_name(item: Shipped) -> str:
    """Of a shipped workload."""
    return f"{item.name}, {item.devices}"


def case(name: str) -> Case:
    """The case of a name."""
    for item in SHIPPED:
        if shipped_name(item) == name:
            return shipped(item)
    return random_case(next(seed for seed in range(RANDOM) if random_name(seed) == name))


def shipped(item: Shipped) -> Case:
    """The case of a workload of examples/."""
    path = EXAMPLES / item.path
    job = load_workload(path)
    costs = analytic_profile(job, path.parent, load_cluster(item.cluster))
    if item.batch is not None:
        job = job.model_copy(update={"batch": item.batch})
    return Case(
        name=shipped_name(item), shape=item.shape, devices=item.devices, job=job, profile=costs
    )


def _devices(seed: int) -> int:
    """Of a random workload."""
    return (*DEVICES, *UNEVEN_DEVICES)[seed // len(SHAPES)]


def random_case(seed: int) -> Case:
    """A random workload: its shape and devices by turns, the rest by the seed."""
    rng = random.Random(seed)
    shape, devices = SHAPES[seed % len(SHAPES)], _devices(seed)
    modules = "abcdef"[: rng.randint(2, 3 if shape == "towers" else 5)]
    per_node = rng.choice([4, 8]) if devices >= 8 else devices
    batch = devices * rng.choice([2, 4, 8]) if devices < 64 else devices * rng.choice([1, 2])
    costs = profile(
        {name: _module(rng, per_node) for name in modules},
        devices,
        per_node=per_node,
        memory_bytes=rng.choice([24e9, 40e9, 80e9]),
        intra={"latency_s": 1e-5, "bandwidth_bytes_per_s": 2e11},
        inter={"latency_s": 2e-5, "bandwidth_bytes_per_s": rng.choice([3e9, 1.2e10, 2.5e10])},
    )
    train = {"zero": rng.choice([0, 0, 1])}
    if seed >= EVEN:
        batch += 2 * rng.randrange(1, devices // 2)
        train = {"zero": rng.choice([0, 1, 2, 3])}
    makers = {"towers": _towers, "chain": _chain, "tree": _tree, "tasks": _tasks}
    job = makers[shape](rng, modules, batch, train)
    return Case(name=random_name(seed), shape=shape, devices=devices, job=job, profile=costs)


def _module(rng: random.Random, per_node: int) -> dict[str, Any]:
    forward_s = 10 ** rng.uniform(-3, -1.3)
    tps = [1, *(t for t in (2, 4, 8) if t <= per_node)]
    loss = rng.uniform(0.05, 0.3)
    return module_profile(
        forward_s,
        forward_s * rng.choice([1.0, 2.0, 2.0]),
        fixed_s=forward_s * rng.choice([0.0, 0.1, 0.5, 1.0]),
        blocks=rng.choice([2, 6, 12, 24]),
        tp={t: t / (1 + loss * (t - 1)) for t in tps},
        parameters=10 ** rng.uniform(7.5, 9.6),
        activation_bytes=10 ** rng.uniform(8, 9.7),
        output_bytes_per_sample=10 ** rng.uniform(4, 6.5),
        boundary_bytes_per_sample=10 ** rng.uniform(5, 7),
    )


def mse(module: str) -> dict[str, Any]:
    """The loss of one module."""
    return {"factory": "mmplan.zoo.losses:mse", "inputs": [module, "y"]}


def clip(first: str, second: str, sync_batch: int) -> dict[str, Any]:
    """The contrastive loss of two modules."""
    return {
        "factory": "mmplan.zoo.losses:clip",
        "inputs": [first, second],
        "cross_sample": True,
        "sync_batch": sync_batch,
    }


def _towers(rng: random.Random, modules: str, batch: int, train: Mapping[str, Any]) -> Workload:
    sync_batch = batch // rng.choice([1, 1, 2])
    specs: dict[str, dict[str, Any]] = {name: {} for name in modules}
    return workload(specs, batch=batch, sync_batch=sync_batch, train=train)


def _chain(rng: random.Random, modules: str, batch: int, train: Mapping[str, Any]) -> Workload:
    specs: dict[str, dict[str, Any]] = {name: {} for name in modules}
    specs |= {then: {"inputs": [name]} for name, then in pairwise(modules)}
    if rng.random() < 0.3:
        specs[modules[0]] = {"frozen": True}
    return workload(specs, batch=batch, losses={"loss": mse(modules[-1])}, train=train)


def _tree(rng: random.Random, modules: str, batch: int, train: Mapping[str, Any]) -> Workload:
    """Encoders before a backbone, and perhaps a generator after it."""
    modules = modules if len(modules) > 2 else "abc"[: len(modules)]
    last = modules[-1]
    inputs = {name: [f"{name}_data"] for name in modules}
    inputs[last] = ["text", *modules[:-1]]
    if len(modules) > 3:
        inputs[last] = [modules[-2]]
        inputs[modules[-2]] = ["text", *modules[:-2]]
    specs = {name: {"inputs": own} for name, own in inputs.items()}
    if rng.random() < 0.3:
        specs[modules[0]]["frozen"] = True  # type: ignore[assignment]
    return workload(specs, batch=batch, losses={"loss": mse(last)}, train=train)


def _tasks(rng: random.Random, modules: str, batch: int, train: Mapping[str, Any]) -> Workload:
    """Pairs of towers, and one module on its own; modules are in several tasks."""
    pairs = list(pairwise(modules))[: rng.randint(1, 3)]
    losses = {f"{a}{b}": clip(a, b, batch) for a, b in pairs}
    tasks: dict[str, Any] = {
        f"T{a}{b}": {"modules": [a, b], "losses": [f"{a}{b}"]} for a, b in pairs
    }
    losses["own"] = mse(modules[-1])
    half = max(1, batch // rng.choice([1, 2]))
    tasks["Town"] = {"modules": [modules[-1]], "losses": ["own"], "batch": half}
    used = {name for spec in tasks.values() for name in spec["modules"]}
    specs = {name: {} for name in modules if name in used}
    return workload(specs, batch=batch, losses=losses, tasks=tasks, train=train)
