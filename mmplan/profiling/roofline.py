"""Seconds of counted kernels on a device, from its data sheet and stated efficiencies.

    kernel_s = max(launch_s, FLOPs / (0.7 * peak), bytes / (0.8 * memory bandwidth))

Kernels run one after another; a sum over a tensor-parallel group is an all-reduce on the
node's link and hides behind nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mmplan.links import collective_s
from mmplan.profiling.counting import Array
from mmplan.schema.cluster import Cluster

# Large GEMMs reach 70-80% of the data sheet's peak on V100, A100 and H100 (cuBLAS);
# Megatron-LM reports 44-52% end to end, memory-bound kernels and communication included.
MATMUL_EFFICIENCY = 0.7
# STREAM-like kernels reach 80-90% of the data sheet's memory bandwidth.
MEMORY_EFFICIENCY = 0.8
# A kernel of eager PyTorch takes the host about this long to issue.
LAUNCH_S = 4e-6
# peak_flops is a cluster's bf16/fp16 peak. TF32 runs at half of it on A100 and H100, fp64
# tensor cores at a sixteenth; a CPU has no faster half precision.
PRECISION_RATE = {"bf16": 1.0, "fp32": 0.5, "fp64": 1 / 16}
CPU_PRECISION_RATE = {"bf16": 1.0, "fp32": 1.0, "fp64": 0.5}
# Bytes per second of device memory, from data sheets; the first name that fits counts.
MEMORY_BYTES_PER_S = {
    "V100": 9.0e11,
    "A800": 2.0e12,
    "A100": 2.0e12,
    "H100": 3.35e12,
    "H800": 3.35e12,
    "H200": 4.8e12,
    "CPU": 1.0e10,  # one core's share of a desktop's memory
}
# For other devices: FLOPs per byte of an A100 (312e12 / 2.0e12).
FLOPS_PER_BYTE = 156.0


class Roofline:
    """Turns tables of kernels into seconds.

    Args:
        cluster: its device's peak and its links.
        precision: of the training.
    """

    def __init__(self, cluster: Cluster, precision: str) -> None:
        device = cluster.device
        rates = CPU_PRECISION_RATE if device.is_cpu else PRECISION_RATE
        known = (v for k, v in MEMORY_BYTES_PER_S.items() if k.lower() in device.name.lower())
        memory = next(known, device.peak_flops / FLOPS_PER_BYTE)
        self._cluster = cluster
        self.flops_per_s = device.peak_flops * rates[precision] * MATMUL_EFFICIENCY
        self.bytes_per_s = memory * MEMORY_EFFICIENCY

    def seconds(self, table: Array, *, tp: int = 1) -> float:
        """Seconds of kernels [kernels, 3]: FLOPs, bytes moved, bytes summed over the group."""
        if not len(table):
            return 0.0
        flops, moved, summed = table.T
        busy = np.maximum(flops / self.flops_per_s, moved / self.bytes_per_s)
        compute_s = float(np.maximum(busy, LAUNCH_S)[summed == 0].sum())
        ranks = range(tp)
        return compute_s + sum(
            collective_s(self._cluster, "all_reduce", ranks, float(b)) for b in summed if b
        )

    def provenance(self) -> dict[str, Any]:
        """What the times stand on, for the profile."""
        return {
            "model": "roofline of each kernel; see mmplan.profiling.roofline",
            "matmul_efficiency": MATMUL_EFFICIENCY,
            "memory_efficiency": MEMORY_EFFICIENCY,
            "flops_per_s": self.flops_per_s,
            "memory_bytes_per_s": self.bytes_per_s,
            "launch_s": LAUNCH_S,
        }
