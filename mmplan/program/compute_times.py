"""Seconds of a program's computes, for emulated runs, which wait instead of computing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mmplan.program.instructions import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds of a program's computes.

    Attributes:
        computes: (stage, op, samples of the micro-batch) to seconds, hosted losses included.
        losses: cross-sample losses to seconds after their gather.
    """

    computes: Mapping[tuple[int, Op, int], float]
    losses: Mapping[str, float]
