"""Transient bytes of a forward and of a backward, and the bytes that stay between them.

One pass of each, apart from the timed ones, with every allocation recorded: on a CPU by torch's
profiler, on CUDA by the caching allocator's own peak.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.profiler import profile, record_function

from mmlaunch.comm.batches import Tree, tensors_of
from mmlaunch.measure.inputs import float_outputs
from mmlaunch.measure.timing import HeldTensors

# As kineto names an allocation (a release has a negative size).
_ALLOCATION = "[memory]"
_PART = "mmlaunch.measure.memory"
# Else kineto tells stderr about each start; read when it is first used.
_QUIET = "KINETO_LOG_LEVEL", "99"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Bytes allocated since the first part began.

    Attributes:
        most: at once, during a part.
        left: at its end.
    """

    most: int
    left: int


class _Meter(Protocol):
    """Records the allocations of parts of a program."""

    def part(self) -> Any:
        """A context around the next part."""
        ...

    def levels(self) -> list[Level]:
        """Levels of every part; asked when the last one is over."""
        ...


class _OnCuda:
    """The allocator's own counts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = torch.cuda.memory_allocated(device)
        self._levels: list[Level] = []

    @contextmanager
    def part(self) -> Generator[None]:
        """See :class:`_Meter`."""
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        most = torch.cuda.max_memory_allocated(self._device) - self._start
        left = torch.cuda.memory_allocated(self._device) - self._start
        self._levels.append(Level(most=most, left=left))

    def levels(self) -> list[Level]:
        """See :class:`_Meter`."""
        return self._levels


class _OnCpu:
    """Every allocation and release that torch's allocator reports to the profiler.

    Args:
        running: the profiler, entered.
    """

    def __init__(self, running: profile) -> None:
        self._running = running
        self._num_parts = 0

    def part(self) -> Any:
        """See :class:`_Meter`."""
        self._num_parts += 1
        return record_function(f"{_PART}.{self._num_parts - 1}")

    def levels(self) -> list[Level]:
        """See :class:`_Meter`."""
        results: Any = self._running.kineto_results
        events = sorted(results.events(), key=lambda event: event.start_ns())
        starts = {e.name(): e.start_ns() for e in events if e.name().startswith(_PART)}
        edges = [starts[f"{_PART}.{k}"] for k in range(self._num_parts)]
        found: list[Level] = []
        left = 0
        for first, end in zip(edges, [*edges[1:], float("inf")], strict=True):
            sizes = (
                e.nbytes()
                for e in events
                if e.name() == _ALLOCATION and first <= e.start_ns() < end
            )
            totals = list(accumulate(sizes, initial=left))
            left = totals[-1]
            found.append(Level(most=max(totals), left=left))
        return found


def kept_bytes(
    call: Callable[[], Tree], known: Sequence[Tensor], device: torch.device, twice: bool
) -> float:
    """Bytes held from a forward to its backward, outputs included.

    Args:
        call: the forward.
        known: tensors that are not counted: parameters, buffers, inputs.
        device: where it computes.
        twice: count a second forward: narrow copies of weights are none of a micro-batch's, and
            autocast, which this is called in, keeps those of a first one.
    """
    with HeldTensors(known) as first:
        out = call() if twice else None
    if device.type == "cuda":
        del out
        first.kept.clear()
        before = torch.cuda.memory_allocated(device)
        out = call()
        return max(0.0, float(torch.cuda.memory_allocated(device) - before))
    with HeldTensors(first.kept) as counted:
        return float(counted.add(tensors_of(call())))


def transient_bytes(call: Callable[[], Tree], device: torch.device) -> dict[str, int]:
    """Bytes that a module's forward and backward hold only while they run.

    Parameters must have their gradients before: a new one is added to it and freed, as in
    every micro-batch of a step but the first.

    Args:
        call: a forward; its output gets gradients of ones.
        device: where it computes.

    Returns:
        Fields of a profile's point (:class:`mmplan.schema.profile.Point`); none where this
        torch cannot tell.
    """
    if device.type == "cuda":
        meter = _OnCuda(device)
        _run(call, meter)
        return _fields(meter.levels())
    if not torch.profiler.kineto_available():
        return {}
    os.environ.setdefault(*_QUIET)
    running = profile(use_kineto=True, profile_memory=True)
    noted = _OnCpu(running)
    with running:
        _run(call, noted)
    return _fields(noted.levels())


def _run(call: Callable[[], Tree], meter: _Meter) -> None:
    """The parts: a forward that keeps nothing, one that does, its backward."""
    with meter.part(), torch.no_grad():
        call()
    with meter.part():
        out = call()
    with meter.part():
        outs = float_outputs(out)
        if outs:
            torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])


def _fields(levels: list[Level]) -> dict[str, int]:
    alone, forward, backward = levels
    return {
        "forward_only_bytes": alone.most,
        "forward_extra_bytes": forward.most - forward.left,
        "backward_extra_bytes": max(0, backward.most - forward.left),
    }
