"""Kernels and sums as analytic profiles predict them, by the times that others measured.

    python benchmarks/bench_kernels.py --facts FILE [--json] [--write-docs]

FILE is a JSON list of rows, each with ``kind``, ``device``, ``source`` and the fields of its kind:
sizes, and ``seconds`` or a rate. Rows alike but for their time are averaged. Constants of
profiles/devices.yaml were fitted to the rows of Llama-2-7B, which are shown and not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from page import conditions, table, write_section
from torch import Tensor, nn
from torch.nn import functional

from mmplan.costs.hardware import load_hardware
from mmplan.costs.links import collective_s, message
from mmplan.profiling.counting import ROWS, Counter
from mmplan.profiling.roofline import Roofline
from mmplan.schema.cluster import Cluster, load_cluster
from mmplan.zoo.decoder import llama

Row = Mapping[str, Any]

# Hidden and MLP widths of models by the last part of their names.
_WIDTHS = {
    "Llama-2-7b-hf": (4096, 11008),
    "Llama-2-13b-hf": (5120, 13824),
    "Llama-2-70b-hf": (8192, 28672),
}
_FITTED = "Llama-2-7b-hf"
_CLUSTERS = {"A100": "a100", "A800": "a800-8x8", "H100": "h100", "V100": "p3-8"}
_MEASURED = ("seconds", "seconds_per_sample", "busbw_bytes_per_s", "bandwidth_bytes_per_s")
_DTYPES = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
_UNDER_COMMUNICATION = "slow-down of compute under communication"


class _SkippedError(Exception):
    """A row of which the model says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A row's seconds, or its factor, measured and predicted."""

    kind: str
    device: str
    sizes: str
    fitted: bool
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


class _Call(nn.Module):
    """A function as a block."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def _forward_s(
    roofline: Roofline, block: nn.Module, *shapes: tuple[int, ...], dtype: Any, rows: int = 0
) -> float:
    """Seconds of a block's forward, counted on the meta device.

    ``rows``: of which a multiprocessor has one, where the kernel is cut so and torch's is not.
    """
    inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    count, _ = Counter(block).count(block, inputs)
    kernels = count.forward.table.copy()
    kernels[:, ROWS] = np.maximum(kernels[:, ROWS], rows)
    return roofline.seconds(kernels)


def _dtype(row: Row) -> Any:
    name = str(row.get("dtype", "fp16")).removeprefix("torch.")
    if name not in _DTYPES:
        raise _SkippedError(f"no dtype {name}")
    return _DTYPES[name]


def _roofline(row: Row, cluster: Cluster, *, compiled: bool) -> Roofline:
    precision = "fp32" if _dtype(row) is torch.float32 else "bf16"
    return Roofline(cluster, precision, compiled=compiled)


def _llama_kernel_s(row: Row, cluster: Cluster) -> float:
    """Kernels of a layer, whose times are the device's own."""
    name = row["model"].rpartition("/")[2]
    if name not in _WIDTHS:
        raise _SkippedError(f"no model {name}")
    width, ffn = _WIDTHS[name]
    tokens, tp = row["tokens"], row["tp"]
    ffn //= tp
    act = _Call(lambda gate, up: functional.silu(gate) * up)
    norm = _Call(lambda x, scale: functional.rms_norm(x, (width,), scale))
    kinds: dict[str, tuple[nn.Module, list[tuple[int, ...]]]] = {
        "attn_post_proj": (_Call(torch.mm), [(tokens, width // tp), (width // tp, width)]),
        "mlp_up_proj": (_Call(torch.mm), [(tokens, width), (width, 2 * ffn)]),
        "mlp_down_proj": (_Call(torch.mm), [(tokens, ffn), (ffn, width)]),
        "input_layernorm": (norm, [(tokens, width), (width,)]),
        "mlp_act": (act, [(tokens, ffn), (tokens, ffn)]),
        "add": (_Call(torch.add), [(tokens, width), (tokens, width)]),
    }
    block, shapes = kinds[row["kind"]]
    # vLLM's silu_and_mul, which was measured, starts a thread block for each token.
    rows = tokens if row["kind"] == "mlp_act" else 0
    roofline = _roofline(row, cluster, compiled=True)
    return _forward_s(roofline, block, *shapes, dtype=_dtype(row), rows=rows)


def _eager_kernel_s(row: Row, cluster: Cluster) -> float:
    """Kernels that Python starts one by one."""
    kind = row["kind"]
    if kind == "gemm":
        block, shapes = _Call(torch.mm), [(row["m"], row["k"]), (row["k"], row["n"])]
    elif kind == "gelu":
        block, shapes = _Call(functional.gelu), [(row["elements"],)]
    elif kind == "softmax":
        block, shapes = _Call(lambda x: functional.softmax(x, -1)), [(row["m"], row["n"])]
    else:
        width = row["n"]
        block = _Call(lambda x, w, b: functional.layer_norm(x, (width,), w, b))
        shapes = [(row["m"], width), (width,), (width,)]
    return _forward_s(_roofline(row, cluster, compiled=False), block, *shapes, dtype=_dtype(row))


def _llama_layer_s(row: Row, cluster: Cluster) -> float:
    """Seconds of a sample in a layer of Llama-7B."""
    samples = row["microbatch"]
    with torch.device("meta"):
        model = llama(3, 4096, heads=32, vocab=64, ffn=11008).to(torch.bfloat16)
    text = torch.zeros(samples, row["tokens_per_sample"], dtype=torch.long, device="meta")
    count, _ = Counter(model).count(model[1], [model[0](text)])
    return Roofline(cluster, "bf16").seconds(count.forward.table) / samples


def _sum_s(row: Row, cluster: Cluster) -> float:
    if "bytes" not in row:
        raise _SkippedError("the bytes are not given")
    gpus, nodes = row["gpus"], row["nodes"]
    cluster = _with_network(row, cluster)
    each, per_node = gpus // nodes, cluster.devices_per_node
    ranks = [node * per_node + i for node in range(nodes) for i in range(each)]
    return collective_s(cluster, "all_reduce", ranks, row["bytes"])


def _with_network(row: Row, cluster: Cluster) -> Cluster:
    """As many nodes as the row has, with the network that its device's name gives."""
    nodes, links = row["nodes"], cluster.links
    found = re.search(r"(\d+) (Gb|GB)/s", row["device"])
    if nodes > 1:
        if found is None or links.inter_node is None:
            raise _SkippedError("the network is not given")
        rate = float(found[1]) * (1e9 / 8 if found[2] == "Gb" else 1e9)
        link = links.inter_node.model_copy(update={"bandwidth_bytes_per_s": rate})
        links = links.model_copy(update={"inter_node": link, "adapter_bytes_per_s": None})
    return cluster.model_copy(update={"nodes": nodes, "links": links})


def _message_rate(row: Row, cluster: Cluster) -> float:
    cluster = _with_network(row, cluster)
    target = 1 if row["nodes"] == 1 else cluster.devices_per_node
    size = 2.0**30
    return size / message(cluster, 0, target, size).seconds


PREDICTED: dict[str, Callable[[Row, Cluster], float]] = {
    **dict.fromkeys(
        ("attn_post_proj", "mlp_up_proj", "mlp_down_proj", "input_layernorm", "mlp_act", "add"),
        _llama_kernel_s,
    ),
    **dict.fromkeys(("gemm", "layernorm", "softmax", "gelu"), _eager_kernel_s),
    "llama-7b layer forward": _llama_layer_s,
    "all_reduce": _sum_s,
    "p2p": _message_rate,
}


def _cluster(kind: str, device: str) -> Cluster:
    """The shipped cluster of a device. Of those named in turn, A100 and A800, links differ."""
    found = [name for name in _CLUSTERS if name in device]
    if not found or (len(found) > 1 and kind in ("all_reduce", "p2p")):
        raise _SkippedError(f"no device {device}")
    return load_cluster(_CLUSTERS[found[0]])


def _held(row: Row, measured: float) -> Held:
    kind, device = row["kind"], row["device"]
    sizes = {k: v for k, v in row.items() if k not in ("kind", "device", "source", *_MEASURED)}
    if kind == _UNDER_COMMUNICATION:
        predicted = load_hardware().compute_slowdown(load_cluster("a100").device)
    elif kind in PREDICTED:
        predicted = PREDICTED[kind](row, _cluster(kind, device))
    else:
        raise _SkippedError(f"no kind {kind}")
    if "busbw_bytes_per_s" in row:
        # Of an all-reduce's ring.
        measured = 2 * (row["gpus"] - 1) / row["gpus"] * row["bytes"] / measured
    return Held(
        kind=kind,
        device=device,
        sizes=", ".join(f"{k} {v}" for k, v in sizes.items()),
        fitted=str(row.get("model", "")).endswith(_FITTED),
        measured=measured,
        predicted=predicted,
    )


def held_rows(rows: list[Row]) -> tuple[list[Held], list[dict[str, Any]]]:
    """Each row held against its prediction, twins as one; and those of which nothing is said."""
    twins: dict[str, tuple[Row, list[float]]] = {}
    for row in rows:
        key = next((k for k in (*_MEASURED, "factor") if k in row), "")
        same = json.dumps({k: v for k, v in row.items() if k != key}, sort_keys=True)
        twins.setdefault(same, (row, []))[1].append(float(row.get(key, 0)))
    held: list[Held] = []
    skipped: list[dict[str, Any]] = []
    for row, measured in twins.values():
        try:
            held.append(_held(row, statistics.mean(measured)))
        except (_SkippedError, KeyError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            skipped.append({"kind": row["kind"], "device": row["device"], "reason": reason})
    return held, skipped


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--facts", type=Path, required=True, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument("--write-docs", action="store_true", help="renew docs/benchmarks.md")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    held, skipped = held_rows(json.loads(options.facts.read_text(encoding="utf-8")))
    judged = [abs(x.ratio - 1) for x in held if not x.fitted]
    median = statistics.median(judged) if judged else None
    within = sum(error <= 0.25 for error in judged) / len(judged) if judged else None
    if options.json:
        summary = {"median_error": median, "share_within_25_percent": within}
        print(json.dumps({"rows": [*map(asdict, held)], **summary, "skipped": skipped}))
        return 0
    groups: dict[tuple[str, str, bool], list[float]] = {}
    for x in held:
        groups.setdefault((x.kind, x.device, x.fitted), []).append(x.ratio)
    lines = [
        (
            kind,
            device,
            "fitted" if fitted else "judged",
            str(len(ratios)),
            f"{min(ratios):.2f}",
            f"{statistics.median(ratios):.2f}",
            f"{max(ratios):.2f}",
        )
        for (kind, device, fitted), ratios in groups.items()
    ]
    header = ("kind", "device", "rows", "number", "least", "median", "most")
    text = "\n\n".join(
        [
            f"`python benchmarks/bench_kernels.py --facts FILE`. {conditions(load_before)} "
            "Predicted over measured.",
            table(header, lines),
            f"Of {len(judged)} rows that were not fitted the median error is {median or 0:.1%}; "
            f"{within or 0:.0%} are within 25%.",
            *(f"Not predicted: {x['kind']} on {x['device']}: {x['reason']}." for x in skipped),
        ]
    )
    print(text)
    if options.write_docs:
        write_section("kernels", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
