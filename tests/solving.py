"""Small workloads and given profiles for tests of solvers and planner."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmplan.planning.planner import solve
from mmplan.schema.base import document_text
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.workload import Workload

FREE = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e300}
FACTORY = "mmplan.zoo.towers:text"


def cluster(
    devices: int,
    *,
    per_node: int | None = None,
    memory_bytes: float = 1e12,
    inter: Mapping[str, float] = FREE,
    intra: Mapping[str, float] = FREE,
) -> dict[str, Any]:
    per_node = per_node or devices
    return {
        "name": "test",
        "nodes": -(-devices // per_node),
        "devices_per_node": per_node,
        "device": {"name": "device", "memory_bytes": memory_bytes, "peak_flops": 1e12},
        "links": {"intra_node": dict(intra), "inter_node": dict(inter)},
    }


def module_profile(
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    *,
    fixed_s: float = 0.0,
    blocks: int = 4,
    tp: Mapping[int, float] | None = None,
    parameters: float = 0.0,
    activation_bytes: float = 0.0,
    **more: Any,
) -> dict[str, Any]:
    """Seconds and bytes per sample; ``tp`` maps degrees to their speed-up."""
    points = [
        {
            "tp": degree,
            "microbatch": size,
            "forward_s": fixed_s + size * forward_s / speed,
            "backward_s": fixed_s + size * backward_s / speed,
            "backward_input_s": (fixed_s + size * backward_s / speed) / 2,
            "activation_bytes": size * activation_bytes / degree,
        }
        for degree, speed in (tp or {1: 1.0}).items()
        for size in (1, 2)
    ]
    return {"blocks": blocks, "parameters": parameters, "points": points, **more}


def profile(
    modules: Mapping[str, Mapping[str, Any]],
    devices: int,
    *,
    losses: Mapping[str, Any] | None = None,
    **cluster_options: Any,
) -> Profile:
    return Profile.model_validate(
        {
            "name": "test",
            "source": "given",
            "cluster": cluster(devices, **cluster_options),
            "modules": dict(modules),
            "losses": dict(losses or {}),
        }
    )


def workload(
    modules: Mapping[str, Mapping[str, Any]],
    *,
    batch: int,
    sync_batch: int | None = None,
    losses: Mapping[str, Any] | None = None,
    **more: Any,
) -> Workload:
    """Modules by name, each with what differs from a module that takes its own data field.

    Without ``losses`` one cross-sample loss takes all modules.
    """
    contrastive = {
        "factory": "mmplan.zoo.losses:clip",
        "inputs": list(modules),
        "cross_sample": True,
        "sync_batch": sync_batch or batch,
    }
    return Workload.model_validate(
        {
            "name": "test",
            "batch": batch,
            "modules": {
                name: {"factory": FACTORY, "inputs": [f"{name}_data"], **spec}
                for name, spec in modules.items()
            },
            "losses": losses or {"contrastive": contrastive},
            **more,
        }
    )


def run_solve(folder: Path, job: Workload, costs: Profile, **options: Any) -> Plan:
    """Solve with the files really written."""
    for name, document in (("w.json", job), ("p.json", costs)):
        (folder / name).write_text(document_text(document))
    return solve(
        job,
        workload_path=folder / "w.json",
        profile=costs,
        profile_path=folder / "p.json",
        plan_path=folder / "plan.json",
        **options,
    )
