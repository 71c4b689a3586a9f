"""This machine as a cluster of one node, and the provenance of its measurements."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mmplan.costs.fit import fit_curve
from mmplan.profiling.worker import Json, MeasuredPoints, ProfileSetting
from mmplan.schema.cluster import Cluster, CollectiveLinks, Device, Link, Links


def measured_cluster(setting: ProfileSetting, machine: Json, measured: MeasuredPoints) -> Cluster:
    """This machine as a cluster of one node."""
    cpu = setting.device == "cpu"
    is_lone_gpu = any(p["kind"] == "link" and p["operation"] == "copy" for p, _ in measured)
    world = max(2, setting.processes)
    ring = {"all_reduce": 2 * (world - 1) / world, "all_gather": (world - 1) / world}
    collectives = CollectiveLinks(
        **{name: _link(measured, name, share) for name, share in ring.items() if not is_lone_gpu}
    )
    return Cluster(
        name=f"cpu-{machine['cores']}" if cpu else f"this-machine-{setting.processes}",
        nodes=1,
        devices_per_node=setting.processes,
        device=Device(
            name=machine["name"],
            memory_bytes=machine["memory_bytes"],
            peak_flops=machine["peak_flops"],
            type="cpu" if cpu else "cuda",
        ),
        links=Links(
            intra_node=_link(measured, "copy" if is_lone_gpu else "p2p", 1.0),
            intra_node_collectives=None if is_lone_gpu else collectives,
        ),
    )


def _link(measured: MeasuredPoints, operation: str, share: float) -> Link:
    """Latency and bandwidth through the sizes; ``share`` of the bytes crosses each link."""
    sizes = [
        (p["bytes"] * share, r["seconds"])
        for p, r in measured
        if p["kind"] == "link" and p["operation"] == operation
    ]
    curve = fit_curve([b for b, _ in sizes], [s for _, s in sizes], knots_max=0)
    # Noise can hide the slope: then the largest transfer bounds the bandwidth.
    largest_bytes, largest_s = max(sizes)
    slope = curve.slopes[0] if curve.slopes[0] > 0 else largest_s / largest_bytes
    return Link(latency_s=curve.alpha, bandwidth_bytes_per_s=1.0 / slope)


def provenance(
    setting: ProfileSetting,
    machine: Json,
    described: Mapping[str, Json],
    measured: MeasuredPoints,
) -> dict[str, Any]:
    """Place, conditions and versions of the measurements, and the points left out."""
    oversubscribed = setting.device == "cpu" and setting.processes > machine["cores"]
    busy = "more processes than cores" if oversubscribed else "every process with a core of its own"
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": setting.device,
        "processor": machine["processor"],
        "cores": machine["cores"],
        "processes": setting.processes,
        "threads": machine["threads"],
        "conditions": f"all processes busy at the same time, {busy}",
        "precision": setting.workload["train"]["precision"],
        "torch": machine["torch"],
        "clock": machine["clock"],
        "repeat_s": setting.repeat_s,
        "samples": setting.pool,
        "tp_left_out": {
            f"{name} tp {tp}": reason
            for name, module in described.items()
            for tp, reason in module["refused"].items()
        },
        "points_left_out": [
            {key: value for key, value in point.items() if key != "kind"} | result
            for point, result in measured
            if "skipped" in result
        ],
    }
