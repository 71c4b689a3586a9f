"""Tensor parallelism by hand: a block's Linears replaced by shards that stay in one process.

The other tensor-parallel ranks' partial sums are needed at every row-parallel
Linear, in the middle of a block. So the ranks run as threads and meet at a
barrier there, as they would in an all-reduce.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn


class Meeting:
    """An all-reduce between threads."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=20)
        self._slots: list[Any] = [None] * num_ranks

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        self._slots[rank] = value
        self._barrier.wait()
        gathered = list(self._slots)
        self._barrier.wait()
        return gathered

    def abort(self) -> None:
        self._barrier.abort()


class SumOverRanks(nn.Module):
    """A row-parallel Linear: partial product, sum over ranks, then the bias once."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rank: int, meeting: Meeting) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), bias
        self._rank, self._meeting = rank, meeting

    def forward(self, x: Tensor) -> Tensor:
        partial = nn.functional.linear(x, self.weight)
        total = torch.stack(self._meeting.all_gather(self._rank, partial)).sum(0)
        return total if self.bias is None else total + self.bias


def run_ranks(num_ranks: int, run: Callable[[int, Meeting], Any]) -> list[Any]:
    """Run one function per rank in threads; the first failure is raised."""
    meeting = Meeting(num_ranks)

    def guarded(rank: int) -> Any:
        try:
            return run(rank, meeting)
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(num_ranks)]
    failures = [error for f in futures if (error := f.exception()) is not None]
    for failure in sorted(failures, key=lambda f: isinstance(f, threading.BrokenBarrierError)):
        raise failure
    return [future.result() for future in futures]


def gradients_by_name(block: nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient; each has one."""
    gradients: dict[str, Tensor] = {}
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad
    return gradients


def run_split_block(block: nn.Module, state: tuple[Tensor, ...], tp: int) -> Any:
    """Output of the block on ``tp`` ranks, the same on all of them (checked)."""

    def run(rank: int, meeting: Meeting) -> Any:
        with torch.no_grad():
            return shard(block, rank, tp, meeting)(*state)

    outputs = run_ranks(tp, run)
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=0)
    return outputs[0]


def shard(block: nn.Module, rank: int, tp: int, meeting: Meeting) -> nn.Module:
    """A copy of the block that holds one rank's slices, by its ``tp_plan``."""
    local = copy.deepcopy(block)
    rules: Any = block.tp_plan
    for name, rule in rules.items():
        linear: Any = local.get_submodule(name)
        if rule == "rowwise":
            weight = linear.weight.detach().chunk(tp, dim=1)[rank]
            local.set_submodule(name, SumOverRanks(weight, linear.bias, rank, meeting))
            continue
        parts = linear.packed_parts if rule == "packed_colwise" else 1
        for key, tensor in list(linear.named_parameters()):
            pieces = [part.chunk(tp)[rank] for part in tensor.detach().chunk(parts)]
            setattr(linear, key, nn.Parameter(torch.cat(pieces)))
    return local
