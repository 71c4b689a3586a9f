"""A small decoder on noise, and its one plan: for two ways to train it in turns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmplan.planning.planner import solve
from mmplan.profiling.analytic import analytic_profile
from mmplan.schema.cluster import Cluster, Device, Link, Links
from mmplan.schema.workload import Workload

BLOCKS = 6
WIDTH = 512
VOCAB = 512


def noise_decoder(
    *, batch: int, length: int, pins: Mapping[str, int], train: Mapping[str, Any]
) -> Workload:
    """The workload: texts of ``length`` tokens, and the degrees that are its plan."""
    field = {"shape": [length], "vocab": VOCAB}
    return Workload.model_validate(
        {
            "name": "noise",
            "batch": batch,
            "modules": {
                "llm": {
                    "factory": "mmplan.zoo.decoder:llama",
                    "args": {"blocks": BLOCKS, "width": WIDTH, "heads": 8, "vocab": VOCAB},
                    "inputs": ["tokens"],
                    "plan": pins,
                }
            },
            "losses": {
                "next": {
                    "factory": "mmplan.zoo.losses:token_cross_entropy",
                    "args": {"shift": True},
                    "inputs": ["llm", "labels"],
                }
            },
            "data": {
                "factory": "mmplan.zoo.synthetic:noise",
                "args": {"fields": {"tokens": field, "labels": field}, "samples": 64},
            },
            "train": train,
        }
    )


def planned(job: Workload, *, ranks: int, solver: str = "auto") -> dict[str, Any]:
    """The plan for processes of this machine, which the pins leave no choice."""
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e9)
    # Its figures choose nothing here.
    cluster = Cluster(
        name="processes",
        nodes=1,
        devices_per_node=ranks,
        device=Device(name="cpu", memory_bytes=8e9, peak_flops=1e11),
        links=Links(intra_node=link, inter_node=link),
    )
    plan = solve(
        job,
        workload_path=None,
        profile=analytic_profile(job, Path(), cluster),
        profile_path=None,
        plan_path="plan.json",
        devices=ranks,
        solver=solver,
    )
    return plan.model_dump(mode="json", exclude_none=True)
