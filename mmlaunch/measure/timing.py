"""Repeat a step until its time is known, with the other processes doing the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmlaunch.measure.clocks import Clock, Reading

# The least number that has quartiles apart from its ends.
MIN_REPEATS = 3
# Bounds the number of rows of a very short step; chosen by hand.
MAX_REPEATS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one part of a step.

    Attributes:
        median_s: median of the repeats.
        spread_s: half the width of the middle half of the repeats.
        repeats: how many there were.
    """

    median_s: float
    spread_s: float
    repeats: int


class Peers:
    """The processes that measure the same point at the same time.

    Args:
        count: how many; 1 needs no process group.
        device: of this process, for the tensors that NCCL wants there.
        group: of these processes; None: the first ones of all.
    """

    def __init__(self, count: int, device: torch.device, group: Any = None) -> None:
        self.count = count
        self._device = device
        some = group is None and count > 1 and dist.get_world_size() > count
        self._group = dist.new_group(list(range(count))) if some else group

    def largest(self, value: float) -> float:
        """The largest of all processes' values, on which they agree; everyone waits here."""
        return self._reduced([value], dist.ReduceOp.MAX)[0]

    def least(self, values: Sequence[float]) -> list[float]:
        """The least over the processes of each value."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def means(self, values: Sequence[float]) -> list[float]:
        """The mean over the processes of each value."""
        return [value / self.count for value in self._reduced(values, dist.ReduceOp.SUM)]

    def _reduced(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.count == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=operation, group=self._group)
        return tensor.tolist()


class Stopwatch:
    """Repeats steps and times their parts.

    Args:
        clock: of the device.
        peers: start together and repeat equally often.
        repeat_s: seconds to spend on the repeats of a step, about.
    """

    def __init__(self, *, clock: Clock, peers: Peers, repeat_s: float) -> None:
        self.clock, self.peers = clock, peers
        self._repeat_s = repeat_s

    def time(
        self, step: Callable[[int], Sequence[Reading]], *, together: bool = False
    ) -> list[Timing]:
        """Median and spread of each part of a step.

        Args:
            step: takes the repeat's number, returns readings of its parts.
            together: all processes do one thing. Then the time of who came last counts, who
                waited for nobody: the least of all. Else it is the mean over the processes.
        """
        self.clock.warm()
        # All processes repeat equally often, whatever their own clocks say: steps may hold
        # collectives.
        average_s = self._once(step, 0)
        if average_s < self._repeat_s:
            # The first run has allocations and kernel choices, the next ones do not.
            average_s = self._once(step, 1)
        rows: list[list[float]] = []
        spent_s = 0.0
        while len(rows) < MIN_REPEATS or (spent_s < self._repeat_s and len(rows) < MAX_REPEATS):
            started = self.clock.now()
            left = max(self._repeat_s - spent_s, 0.0)
            planned = int(left / max(average_s, 1e-9))
            # Read when all are over: the host must not wait between two repeats.
            readings = [
                step(len(rows) + k)
                for k in range(max(1, MIN_REPEATS - len(rows), min(planned, MAX_REPEATS)))
            ]
            rows += [[seconds() for seconds in row] for row in readings]
            spent_s += self.peers.largest(self.clock.now() - started)
            average_s = spent_s / len(rows)
        if together:
            width = len(rows[0])
            flat = self.peers.least([seconds for row in rows for seconds in row])
            rows = [flat[k : k + width] for k in range(0, len(flat), width)]
        parts = [_timing(column) for column in zip(*rows, strict=True)]
        medians = self.peers.means([part.median_s for part in parts])
        spreads = self.peers.means([part.spread_s for part in parts])
        return [
            Timing(median_s=median_s, spread_s=spread_s, repeats=len(rows))
            for median_s, spread_s in zip(medians, spreads, strict=True)
        ]

    def _once(self, step: Callable[[int], Sequence[Reading]], repeat: int) -> float:
        started = self.clock.now()
        step(repeat)
        return self.peers.largest(self.clock.now() - started)


def _timing(seconds: Sequence[float]) -> Timing:
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(
        median_s=statistics.median(seconds), spread_s=(high - low) / 2, repeats=len(seconds)
    )


class HeldTensors:
    """Bytes that autograd holds between forward and backward, each storage counted once.

    Used as a context around the forward. Tensors that are there anyway (parameters, inputs) are
    not counted. Source: ``torch.autograd.graph.saved_tensors_hooks``.

    Args:
        known: tensors that are not counted.

    Attributes:
        num_bytes: counted so far.
        kept: one tensor of every storage seen, the known ones first.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        # The tensors are kept: an address that is freed would be given to the next tensor.
        self.kept: list[Tensor] = list(known)
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in self.kept}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)
        self.num_bytes = 0

    def __enter__(self) -> HeldTensors:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._hooks.__exit__(*exc)

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors that are held besides; returns all bytes so far."""
        for tensor in tensors:
            self._pack(tensor)
        return self.num_bytes

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.kept.append(tensor)
            self.num_bytes += storage.nbytes()
        return tensor
