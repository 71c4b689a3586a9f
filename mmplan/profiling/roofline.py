"""Seconds of counted kernels on a device, from its data sheet and published efficiencies.

A matrix product, or an attention, takes its start and then the longer of its bytes and its FLOPs.
They are done in tiles of the result, spread over the device's multiprocessors in rounds:

    FLOP seconds = min over tiles and splits of
        rounds * tile FLOPs / (rate of one multiprocessor * what the tile reaches)
    rounds = ceil(batch * splits * ceil(m / tile_m) * ceil(n / tile_n) / multiprocessors)

so that small products, tiles at the edges and a last round that is not full leave the device
idle in part. Small tiles load more bytes for each FLOP and are bound by the cache that feeds
them; a sum cut in ``splits`` writes and reads its parts. Of a large product every round is
full, and it reaches the device's ``matmul_efficiency``. Attention has tiles of one shape and an
efficiency of its own; products whose shape is not known run at it whatever their size.

All other kernels stream their bytes:

    seconds = sqrt(start^2 + (bytes / (memory rate * part that the kind reaches * multiprocessors
    in use / all))^2)

Of a norm or a softmax a multiprocessor has a row, so that few rows use few of them.

Kernels run one after another, and no faster than the host starts them, one by one where blocks
are not compiled; a sum over a tensor-parallel group is an all-reduce on the node's link, with cut
rows an all-gather or a reduce-scatter, and hides behind nothing. All constants are in
``profiles/devices.yaml``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats
from mmplan.costs.hardware import ByKind, load_hardware
from mmplan.costs.links import CollectiveKind, collective_s
from mmplan.profiling.counting import (
    ACTIVATION,
    ATTENTION,
    BATCH,
    FLOPS,
    GATHERED,
    KIND,
    MOVED,
    NORM,
    POINTWISE,
    PRODUCT,
    ROWS,
    SOFTMAX,
    SUMMED,
    K,
    M,
    N,
)
from mmplan.schema.cluster import Cluster

_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
_PARTIAL_SUM_BYTES = 4


class Roofline:
    """Turns tables of kernels into seconds.

    Args:
        cluster: its device's peak and its links.
        precision: of the training.
        compiled: whether the host starts a block's kernels together.
    """

    def __init__(self, cluster: Cluster, precision: str, *, compiled: bool = False) -> None:
        hardware = load_hardware()
        self._cluster = cluster
        self._known = known = hardware.known(cluster.device)
        self._kernels = kernels = known.kernels or hardware.kernels
        self._host_s = 0.0 if compiled else kernels.host_s
        # Devices with both multiply in bf16 and fp16 at one rate; constants are called after bf16.
        rate = "bf16" if precision == "fp16" else precision
        peak = cluster.device.peak_flops * {str(k): v for k, v in known.rates.items()}[rate]
        self._element_bytes = _ELEMENT_BYTES[precision]
        self._seconds: dict[tuple[bytes, int], float] = {}
        self.flops_per_s = peak * known.matmul_efficiency
        self.attention_flops_per_s = peak * known.attention_efficiency
        self._bytes_per_s = known.memory_of(cluster.device) * _by_kind(kernels.memory_efficiency)
        self._start_s = _by_kind(kernels.start_s)

    def seconds(self, table: Floats, *, tp: int = 1) -> float:
        """Seconds of kernels, a table as :mod:`mmplan.profiling.counting` makes it."""
        if not len(table):
            return 0.0
        # A module's blocks are mostly alike.
        key = table.tobytes(), tp
        if key not in self._seconds:
            summed, gathered = table[:, SUMMED], table[:, GATHERED]
            computes = (summed == 0) & (gathered == 0)
            compute_s = float(self.kernel_s(table)[computes].sum())
            compute_s = max(compute_s, self._host_s * int(computes.sum()))
            self._seconds[key] = compute_s + sums_s(self._cluster, table, tp=tp)
        return self._seconds[key]

    def kernel_s(self, table: Floats) -> NDArray[np.float64]:
        """Seconds of each kernel on the device, what is summed over a group left out."""
        kind = table[:, KIND].astype(np.intp)
        processors, rows = self._known.multiprocessors, table[:, ROWS]
        in_use = np.where(rows > 0, np.minimum(rows / (processors or 1), 1.0), 1.0)
        moved_s = table[:, MOVED] / (self._bytes_per_s[kind] * in_use)
        flops_s = table[:, FLOPS] / np.where(
            kind == PRODUCT, self.flops_per_s, self.attention_flops_per_s
        )
        if processors is not None:
            for of_kind, tiled_s in ((PRODUCT, self._product_s), (ATTENTION, self._attention_s)):
                if (chosen := kind == of_kind).any():
                    flops_s[chosen] = tiled_s(table[chosen], processors)
        busy_s = np.maximum(flops_s, moved_s)
        start_s = self._start_s[kind]
        return np.where(
            (kind == PRODUCT) | (kind == ATTENTION), start_s + busy_s, np.hypot(start_s, busy_s)
        )

    def _attention_s(self, table: Floats, processors: int) -> NDArray[np.float64]:
        """Seconds of attentions in tiles of queries and keys; never less than at full rate."""
        m, n, batch = (table[:, column] for column in (M, N, BATCH))
        tile_m, tile_n = self._kernels.attention_tile
        rows = np.ceil(m / tile_m)
        padded = rows * tile_m * np.ceil(n / tile_n) * tile_n / np.maximum(m * n, 1)
        tiles = batch * rows
        idle = np.ceil(tiles / processors) * processors / np.maximum(tiles, 1)
        return table[:, FLOPS] * padded * idle / self.attention_flops_per_s

    def _product_s(self, table: Floats, processors: int) -> NDArray[np.float64]:
        """Seconds of matrix products by their fastest tiling; never less than at full rate."""
        m, n, k, batch = (table[:, column] for column in (M, N, K, BATCH))
        bytes_per_s = self._bytes_per_s[PRODUCT]
        options: list[NDArray[np.float64]] = []
        for tile_m, tile_n in self._kernels.tiles:
            tiles = batch * np.ceil(m / tile_m) * np.ceil(n / tile_n)
            # A rate at tiles of a shape: no more than the cache can feed them.
            flops_per_byte = 2 * tile_m * tile_n / ((tile_m + tile_n) * self._element_bytes)
            fed = (self._known.l2_bytes_per_s or np.inf) * flops_per_byte
            per_flop_s = processors / min(self.flops_per_s, fed)
            for splits in self._kernels.splits:
                rounds = np.ceil(tiles * splits / processors)
                busy_s = rounds * 2 * tile_m * tile_n * np.ceil(k / splits) * per_flop_s
                parts = 0 if splits == 1 else 2 * splits
                partial_s = parts * _PARTIAL_SUM_BYTES * batch * m * n / bytes_per_s
                options.append(busy_s + partial_s)
        return np.maximum(np.min(options, axis=0), table[:, FLOPS] / self.flops_per_s)

    def provenance(self) -> dict[str, Any]:
        """What the times stand on, for the profile."""
        return {
            "model": "roofline of each kernel; see docs/simulator.md",
            "constants": "profiles/devices.yaml",
            "device": ", ".join(self._known.names) or "other",
            "matmul_efficiency": self._known.matmul_efficiency,
            "attention_efficiency": self._known.attention_efficiency,
            "memory_efficiency": self._kernels.memory_efficiency.model_dump(),
            "flops_per_s": self.flops_per_s,
            "memory_bytes_per_s": float(self._bytes_per_s[POINTWISE]),
            "start_s": self._kernels.start_s.model_dump(),
            "host_s": self._host_s,
        }


def sums_s(cluster: Cluster, table: Floats, *, tp: int) -> float:
    """Seconds of the sums and gathers of a tensor-parallel group among a table's kernels."""
    kinds: list[tuple[CollectiveKind, Floats]] = [
        ("all_reduce", table[:, SUMMED]),
        # A reduce-scatter carries as many bytes as an all-gather.
        ("all_gather", table[:, GATHERED]),
    ]
    return sum(
        collective_s(cluster, kind, range(tp), float(b))
        for kind, column in kinds
        for b in column
        if b
    )


def _by_kind(constants: ByKind) -> Floats:
    """In the order of a table's kinds."""
    of = {
        POINTWISE: constants.pointwise,
        PRODUCT: constants.product,
        ATTENTION: constants.attention,
        NORM: constants.norm,
        SOFTMAX: constants.softmax,
        ACTIVATION: constants.activation,
    }
    return np.array([of[kind] for kind in sorted(of)])
