"""Predicted steps of Megatron-LM's GPT-3s against the steps that its authors measured on A100s.

    python benchmarks/bench_published.py [--models 22b,175b,530b,1t] [--write-docs]

Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models,
arXiv:2205.05198, tables 3 and 5: four models with tensor parallelism in a node and a pipeline over
nodes, no data parallelism; seconds of an iteration with all activations recomputed, and with
sequence parallelism and selective recomputation. Configurations are theirs; analytic profiles
on the nodes of profiles/clusters/a100.yaml. Nothing is fitted to them.

Attention that keeps no scores stands for selective recomputation. Memory is not looked at. Llama's
blocks with an MLP of 8/3 of the width have the FLOPs of GPT's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from page import conditions, table, write_section

from mmplan.planning import planner
from mmplan.profiling.analytic import analytic_profile
from mmplan.schema.base import parse_document, save_document
from mmplan.schema.cluster import Cluster, load_cluster
from mmplan.schema.plan import Plan
from mmplan.schema.profile import load_profile
from mmplan.schema.workload import Workload

TOKENS, VOCAB, TP = 2048, 51200, 8
# More than any plan needs: see above.
MEMORY_BYTES = 1e12


@dataclass(frozen=True, slots=True)
class Published:
    """A row of the tables; seconds with full recomputation and without."""

    layers: int
    width: int
    heads: int
    pp: int
    vpp: int
    batch: int
    microbatch: int
    full_s: float
    none_s: float


MODELS = {
    "22b": Published(48, 6144, 64, 1, 1, 4, 4, full_s=1.42, none_s=1.10),
    "175b": Published(96, 12288, 96, 8, 3, 64, 1, full_s=18.13, none_s=13.75),
    "530b": Published(105, 20480, 128, 35, 3, 280, 1, full_s=49.05, none_s=37.83),
    "1t": Published(128, 25600, 160, 64, 1, 512, 1, full_s=94.42, none_s=71.49),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    rows: list[tuple[str, ...]] = []
    ratios: list[float] = []
    with tempfile.TemporaryDirectory(prefix="mmplan-bench-") as folder:
        for name in options.models.split(","):
            for recompute in ("full", "none"):
                row, ratio = _row(name, recompute, Path(folder))
                print(" ".join(row), file=sys.stderr)
                rows.append(row)
                ratios.append(ratio)
    header = ("model", "A100s", "recomputed", "predicted s", "published s", "predicted / published")
    text = (
        f"{table(header, rows)}\n\nPredicted / published is {min(ratios):.2f} to "
        f"{max(ratios):.2f}, {statistics.median(ratios):.2f} in the median. The published steps "
        "have the optimizer's update in them, dropout, and kernels of 2022 without fused attention."
    )
    where = conditions(load_before)
    print(f"\n{text}\n\n{where}")
    if options.write_docs:
        command = f"`python benchmarks/bench_published.py --models {options.models}`"
        write_section("published", f"{command}. {where}\n\n{text}")
    return 0


def _row(name: str, recompute: str, folder: Path) -> tuple[tuple[str, ...], float]:
    known = MODELS[name]
    published_s = known.full_s if recompute == "full" else known.none_s
    predicted_s = _plan(name, recompute, folder).predicted.iteration_s
    ratio = predicted_s / published_s
    return (
        f"GPT-3 {name.upper()}",
        str(TP * known.pp),
        "everything" if recompute == "full" else "attention only, rows cut",
        f"{predicted_s:.2f}",
        f"{published_s:.2f}",
        f"{ratio:.2f}",
    ), ratio


def _plan(name: str, recompute: str, folder: Path) -> Plan:
    """The published degrees, solved and simulated as ``mmplan solve`` does."""
    document = _workload(MODELS[name], recompute)
    workload = parse_document(Workload, document, source=name)
    workload_path, profile_path = folder / f"{name}.yaml", folder / f"{name}.json"
    save_document(workload, workload_path)
    save_document(analytic_profile(workload, folder, _cluster(MODELS[name].pp)), profile_path)
    return planner.solve(
        workload,
        workload_path=workload_path,
        profile=load_profile(profile_path),
        profile_path=profile_path,
        plan_path=folder / f"{name}.plan.json",
        solver="convex",
        top=1,
    )


def _workload(known: Published, recompute: str) -> dict[str, Any]:
    noise = {"shape": [TOKENS], "vocab": VOCAB}
    return {
        "version": 1,
        "name": "gpt-3",
        "batch": known.batch,
        "modules": {
            "gpt": {
                "factory": "mmplan.zoo.decoder:llama",
                "args": {
                    "blocks": known.layers,
                    "width": known.width,
                    "heads": known.heads,
                    "vocab": VOCAB,
                    "ffn": 8 * known.width // 3 // 64 * 64,
                },
                "inputs": ["tokens"],
                "recompute": recompute,
                "plan": {
                    "tp": TP,
                    "pp": known.pp,
                    "vpp": known.vpp,
                    "dp": 1,
                    "microbatch": known.microbatch,
                },
            }
        },
        "losses": {
            "lm": {
                "factory": "mmplan.zoo.losses:token_cross_entropy",
                "inputs": ["gpt", "labels"],
            }
        },
        "data": {
            "factory": "mmplan.zoo.synthetic:noise",
            "args": {"samples": 4096, "fields": {"tokens": noise, "labels": noise}},
        },
        "train": {"precision": "bf16", "sequence_parallel": recompute == "none"},
    }


def _cluster(nodes: int) -> Cluster:
    """DGX A100s with memory for every plan."""
    a100 = load_cluster(f"a100-{nodes}")
    device = a100.device.model_copy(update={"memory_bytes": MEMORY_BYTES})
    return a100.model_copy(update={"device": device})


if __name__ == "__main__":
    sys.exit(main())
