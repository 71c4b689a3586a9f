"""Transient bytes of a forward and of a backward, and the bytes that stay between them.

One pass of each, apart from the timed ones, with every allocation recorded: on a CPU by torch's
profiler, on CUDA by the caching allocator's own peak.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

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


def _levels_on_cuda(parts: Sequence[Callable[[], None]], device: torch.device) -> list[Level]:
    """Levels of every part, by the allocator's own counts."""
    start = torch.cuda.memory_allocated(device)
    found: list[Level] = []
    for part in parts:
        torch.cuda.reset_peak_memory_stats(device)
        part()
        most = torch.cuda.max_memory_allocated(device) - start
        found.append(Level(most=most, left=torch.cuda.memory_allocated(device) - start))
    return found


def _levels_on_cpu(parts: Sequence[Callable[[], None]]) -> list[Level]:
    """Levels of every part, by what torch's allocator reports to the profiler."""
    running = profile(use_kineto=True, profile_memory=True)
    with running:
        for index, part in enumerate(parts):
            with record_function(f"{_PART}.{index}"):
                part()
    results: Any = running.kineto_results
    events = sorted(results.events(), key=lambda event: event.start_ns())
    starts = {e.name(): e.start_ns() for e in events if e.name().startswith(_PART)}
    edges = [starts[f"{_PART}.{k}"] for k in range(len(parts))]
    found: list[Level] = []
    left = 0
    for first, end in zip(edges, [*edges[1:], float("inf")], strict=True):
        sizes = (
            e.nbytes() for e in events if e.name() == _ALLOCATION and first <= e.start_ns() < end
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
    outputs: list[Tree] = []

    def forward_only() -> None:
        with torch.no_grad():
            call()

    def forward() -> None:
        outputs.append(call())

    def backward() -> None:
        outs = float_outputs(outputs[0])
        if outs:
            torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])

    parts = (forward_only, forward, backward)
    if device.type == "cuda":
        levels = _levels_on_cuda(parts, device)
    elif torch.profiler.kineto_available():
        os.environ.setdefault(*_QUIET)
        levels = _levels_on_cpu(parts)
    else:
        return {}
    alone, first, second = levels
    return {
        "forward_only_bytes": alone.most,
        "forward_extra_bytes": first.most - first.left,
        "backward_extra_bytes": max(0, second.most - first.left),
    }
