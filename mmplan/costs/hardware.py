"""devices.yaml: what is assumed of devices, each constant with its source.

The times of analytic profiles follow from it (:mod:`mmplan.profiling.roofline`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from mmplan.schema.base import Count, Document, Positive, Record, Size, Str, load_document
from mmplan.schema.cluster import Device

Share = Positive
RatedPrecision = Literal["bf16", "fp32", "fp64"]


class ByKind(Record):
    """A constant of each kind of kernels."""

    pointwise: Positive
    product: Positive
    attention: Positive
    norm: Positive
    softmax: Positive
    activation: Positive


class KernelConstants(Record):
    """What kernels of a class of devices have in common.

    Attributes:
        memory_efficiency: part of the memory bandwidth that kernels reach.
        start_s: of a kernel, on the device.
        host_s: from one kernel's start to the next's where the host starts them one by one.
        tiles: shapes of a product's output tiles.
        splits: numbers of parts in which sums may be cut.
        attention_tile: queries and keys of a tile of attention.
        compute_slowdown: times that computes take beside a collective, which uses some of the
            multiprocessors and of the memory bandwidth.
    """

    memory_efficiency: ByKind
    start_s: ByKind
    host_s: Size
    tiles: tuple[tuple[Count, Count], ...]
    splits: tuple[Count, ...]
    attention_tile: tuple[Count, Count]
    compute_slowdown: float = Field(ge=1)


class Known(Record):
    """Devices of one kind.

    Attributes:
        names: what their names contain.
        rates: part of the cluster's ``peak_flops`` that a precision has.
        multiprocessors: over which tiles are spread; None where shapes do not matter.
        memory_bytes_per_s: of the data sheet; None where it follows from ``flops_per_byte``.
        l2_bytes_per_s: of the cache that feeds the tiles.
        flops_per_byte: peak over memory bandwidth.
        matmul_efficiency: part of the peak that products of the best shapes reach.
        attention_efficiency: the same of attention, and of what else is not a product.
        kernels: its own; None where they are the accelerators'.
    """

    names: tuple[Str, ...] = ()
    rates: dict[RatedPrecision, Share]
    multiprocessors: Count | None = None
    memory_bytes_per_s: Positive | None = None
    l2_bytes_per_s: Positive | None = None
    flops_per_byte: Positive | None = None
    matmul_efficiency: Share = Field(le=1)
    attention_efficiency: Share = Field(le=1)
    kernels: KernelConstants | None = None

    def memory_of(self, device: Device) -> float:
        """Bytes per second of a device's memory, by its data sheet."""
        return self.memory_bytes_per_s or device.peak_flops / (self.flops_per_byte or 1.0)


class Hardware(Document):
    """The whole file.

    Attributes:
        kernels: of accelerators.
    """

    kind: ClassVar[str] = "devices"

    devices: tuple[Known, ...]
    other: Known
    kernels: KernelConstants

    def known(self, device: Device) -> Known:
        """What is assumed of a device; a process is a CPU whatever it is called."""
        name = "cpu" if device.is_cpu else device.name.lower()
        fitting = (d for d in self.devices if any(n.lower() in name for n in d.names))
        return next(fitting, self.other)

    def compute_slowdown(self, device: Device) -> float:
        """Times that a device's computes take beside a collective: as measured, or by its kind."""
        return device.compute_slowdown or (
            (self.known(device).kernels or self.kernels).compute_slowdown
        )


@cache
def load_hardware() -> Hardware:
    """The shipped constants."""
    import profiles

    return load_document(Hardware, Path(profiles.__file__).parent / "devices.yaml")
