"""MFU of Llamas by tensor-parallel degree, and where the rest of the step goes.

    python benchmarks/bench_mfu.py [--models 7b,13b,70b] [--degrees 1,2,4,8] [--write-docs]

Each model is planned by ``convex`` on 64 A800 under one tensor-parallel degree, everything else
free, and simulated. Its computes are split by the kernels that the analytic profile counted.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from page import conditions, table, write_section

from mmplan.errors import InfeasibleError
from mmplan.planning import planner
from mmplan.profiling.analytic import analytic_profile
from mmplan.profiling.counting import ATTENTION, FLOPS, GATHERED, KIND, PRODUCT, SUMMED
from mmplan.profiling.flow import TaskFlow
from mmplan.profiling.roofline import Roofline, sums_s
from mmplan.schema.base import parse_document, save_document
from mmplan.schema.cluster import load_cluster
from mmplan.schema.load import load_plan
from mmplan.schema.profile import load_profile
from mmplan.schema.workload import Workload, resolve_tasks
from mmplan.simulation.predict import simulate_plan

TOKENS, VOCAB, BATCH = 4096, 32000, 256
CLUSTER = "a800-8x8"
# Llama 2: layers, width, heads, heads of keys and values, width of the MLP.
MODELS = {
    "7b": (32, 4096, 32, 32, 11008),
    "13b": (40, 5120, 40, 40, 13824),
    "70b": (80, 8192, 64, 8, 28672),
}
HEADER = (
    "model",
    "tp",
    "dp×pp×vpp, micro-batch",
    "MFU",
    "products",
    "attention",
    "other kernels",
    "sums of tp",
    "rest",
    "exposed",
    "waits",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Seconds of a micro-batch's forward and backward in one group, by what they go to.

    Attributes:
        ideal_s: model FLOPs at the peak of the group's devices.
        product_s: matrix products; ``attention_s``, ``other_s`` (norms, activations, additions)
            and ``sums_s`` (of the group) beside them.
    """

    ideal_s: float
    product_s: float
    attention_s: float
    other_s: float
    sums_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--degrees", default="1,2,4,8")
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    degrees = [int(degree) for degree in options.degrees.split(",")]
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(prefix="mmplan-bench-") as folder:
        for name in options.models.split(","):
            for row in _rows(name, degrees, Path(folder)):
                print(*row, file=sys.stderr)
                rows.append(row)
    text = (
        f"{table(HEADER, rows)}\n\n"
        "Shares of all devices' time; those behind MFU make up the whole. Products and attention "
        "at the data sheet's peak would take MFU. Rows cut: with sequence parallelism. Other "
        "kernels: norms, activations, additions. Rest: forwards recomputed, computes slowed beside "
        "sums, the loss, and the pace of the host. Exposed: messages between stages and sums of "
        "gradients that nothing hides. Waits: the pipeline's ramp, stages that differ, devices "
        "left over."
    )
    print(f"\n{text}\n\n{conditions(load_before)}")
    if options.write_docs:
        command = f"`python benchmarks/bench_mfu.py --models {options.models}`"
        write_section("mfu", f"{command}. {conditions(load_before)}\n\n{text}")
    return 0


def _rows(name: str, degrees: list[int], folder: Path) -> Iterator[tuple[str, ...]]:
    cluster = load_cluster(CLUSTER)
    for tp, cut in ((each, cut) for each in degrees for cut in (False, True)[: 1 + (each > 1)]):
        degree = f"{tp}, rows cut" if cut else str(tp)
        workload = parse_document(Workload, _workload(name, tp, cut), source=name)
        path, plan_path = folder / f"{name}-{tp}.yaml", folder / f"{name}-{tp}.plan.json"
        profile = folder / f"{name}-{cut}.json"
        save_document(workload, path)
        if not profile.exists():
            save_document(analytic_profile(workload, folder, cluster), profile)
        try:
            made = planner.solve(
                workload,
                workload_path=path,
                profile=load_profile(profile),
                profile_path=profile,
                plan_path=plan_path,
                solver="convex",
            )
        except InfeasibleError as error:
            yield (name, degree, f"does not fit: {error.message}", *[""] * (len(HEADER) - 3))
            continue
        save_document(made, plan_path)
        simulation = simulate_plan(load_plan(plan_path), plan_path)
        unit = made.unit("llm")
        samples = max(unit.microbatches[0])
        parts = _parts(workload, folder, tp, samples)
        used = simulation.devices_used / cluster.num_devices
        exposed = used * simulation.communication_fraction
        waits = 1 - used + used * simulation.bubble_fraction
        device_s = made.predicted.iteration_s * cluster.num_devices
        share = BATCH / samples * tp / device_s
        kinds = (parts.product_s, parts.attention_s, parts.other_s, parts.sums_s)
        rest = 1 - exposed - waits - share * sum(kinds)
        yield (
            name,
            degree,
            f"{unit.dp}×{unit.pp}×{unit.vpp}, {samples}",
            f"{share * parts.ideal_s:.1%}",
            *(f"{share * seconds:.1%}" for seconds in kinds),
            f"{rest:.1%}",
            f"{exposed:.1%}",
            f"{waits:.1%}",
        )


def _parts(workload: Workload, folder: Path, tp: int, samples: int) -> Parts:
    task = next(iter(resolve_tasks(workload).values()))
    cluster = load_cluster(CLUSTER)
    flow, roofline = TaskFlow(workload, folder, task), Roofline(cluster, workload.train.precision)
    counts = flow.count_module("llm", tp=tp, samples=samples)
    kernels = np.concatenate([x.table for c in counts for x in (c.forward, c.backward)])
    computes = (kernels[:, SUMMED] == 0) & (kernels[:, GATHERED] == 0)
    seconds = np.where(computes, roofline.kernel_s(kernels), 0.0)
    whole = flow.count_module("llm", tp=1, samples=samples)
    flops = 3 * sum(float(count.forward.table[:, FLOPS].sum()) for count in whole)
    product, attention = (kernels[:, KIND] == kind for kind in (PRODUCT, ATTENTION))
    return Parts(
        ideal_s=flops / (tp * cluster.device.peak_flops),
        product_s=float(seconds[product].sum()),
        attention_s=float(seconds[attention].sum()),
        other_s=float(seconds[~product & ~attention].sum()),
        sums_s=sums_s(cluster, kernels, tp=tp),
    )


def _workload(name: str, tp: int, cut: bool) -> dict[str, Any]:
    layers, width, heads, kv_heads, ffn = MODELS[name]
    noise = {"shape": [TOKENS], "vocab": VOCAB}
    sizes = {"blocks": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    llama = {
        "factory": "mmplan.zoo.decoder:llama",
        "args": {**sizes, "vocab": VOCAB},
        "inputs": ["tokens"],
        "plan": {"tp": tp},
        "recompute": "auto",
    }
    loss = {
        "factory": "mmplan.zoo.losses:token_cross_entropy",
        "inputs": ["llm", "labels"],
    }
    return {
        "version": 1,
        "name": f"llama-{name}",
        "batch": BATCH,
        "modules": {"llm": llama},
        "losses": {"lm": loss},
        "data": {
            "factory": "mmplan.zoo.synthetic:noise",
            "args": {"samples": 4096, "fields": {"tokens": noise, "labels": noise}},
        },
        "train": {"precision": "bf16", "zero": 1, "sequence_parallel": cut},
    }


if __name__ == "__main__":
    sys.exit(main())
