"""A multimodal LLM small enough for tests: workloads and plans with any degrees."""

from __future__ import annotations

from typing import Any

from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.programs import UnitSpec, loss, make_plan, unit

LOSSES = (
    loss("captions", "llm.0", "labels"),
    loss("drawing", "generator.0", "generator.1", "targets", weight=0.5),
)


def workload(*, batch: int, precision: str = "fp64", sigma: float = 1.5, **frozen: Any) -> Workload:
    """Vision, llm and generator on interleaved digits; ``frozen`` by module."""
    modules: dict[str, dict[str, Any]] = {
        "vision": {
            "factory": "mmplan.zoo.encoder:vit",
            "args": {
                **{"layers": 2, "width": 16, "heads": 2, "outputs": 24},
                **{"image": 8, "patch": 2, "channels": 1, "merge": 2},
            },
            "inputs": ["images"],
        },
        "llm": {
            "factory": "mmplan.zoo.decoder:llama",
            "args": {
                **{"blocks": 4, "width": 24, "heads": 4, "kv_heads": 2, "ffn": 32},
                **{"vocab": 64, "placeholders": [63], "hidden": True},
            },
            "inputs": ["tokens", "vision"],
            "backbone": True,
        },
        "generator": {
            "factory": "mmplan.zoo.diffusion:generator",
            "args": {
                **{"blocks": 2, "width": 16, "heads": 2, "hidden": 24},
                **{"image": 8, "patch": 4, "channels": 1, "condition": 6},
            },
            "inputs": ["llm.1", "targets", "starts"],
        },
    }
    for name, value in frozen.items():
        modules[name]["frozen"] = value
    return Workload.model_validate(
        {
            "name": "mllm",
            "batch": batch,
            "modules": modules,
            "losses": {
                "captions": {
                    "factory": "mmplan.zoo.losses:token_cross_entropy",
                    "inputs": ["llm.0", "labels"],
                },
                "drawing": {
                    "factory": "mmplan.zoo.diffusion:denoising",
                    "inputs": ["generator.0", "generator.1", "targets"],
                    "weight": 0.5,
                },
            },
            "data": {
                "factory": "mmplan.zoo.interleaved:digits",
                "args": {"sequences": 2 * batch, "length": 32, "sigma": sigma},
            },
            "train": {"precision": precision, "seed": 5},
        }
    )


def plan(
    *,
    batch: int,
    vision: dict[str, Any],
    llm: dict[str, Any],
    generator: dict[str, Any],
) -> Plan:
    """A 1F1B plan; each dict holds arguments of :func:`tests.programs.unit`."""

    def part(name: str, *inputs: str, blocks: int, given: dict[str, Any]) -> UnitSpec:
        options: dict[str, Any] = {"blocks": blocks, "kind": "1f1b", **given}
        return unit(name, *inputs, **options)

    return make_plan(
        part("vision", "images", blocks=3, given=vision),
        part("llm", "tokens", "vision", blocks=4, given=llm),
        part("generator", "llm.1", "targets", "starts", blocks=2, given=generator),
        losses=LOSSES,
        batch=batch,
    )
