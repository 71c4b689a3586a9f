"""What several tasks' plans hold and sum together, where they share modules and devices.

A device holds a shard of a block once, whichever tasks use it; two different shards of one block
make it hold the whole block. Activations are those of the task that runs. Shape suffixes used in
this file: D = devices, L = blocks of a module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmplan.arrays import Floats
from mmplan.schema.grid import RankGrid
from mmplan.solvers.problem import Blocks, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Where one task's use of a module keeps its parameters.

    Attributes:
        owner: the module whose parameters they are.
        blocks: of each pipeline stage.
        grid: their ranks.
    """

    task: str
    module: str
    owner: str
    blocks: tuple[Blocks, ...]
    grid: RankGrid

    @property
    def place(self) -> tuple[tuple[Blocks, ...], RankGrid]:
        """Equal for holdings that share all that they hold."""
        return self.blocks, self.grid


class Ledger:
    """Bytes and reduction seconds of sets of holdings of one module; remembers what it was asked.

    Holdings are known by number, so that sets of them are cheap to compare.
    """

    def __init__(self, problems: Mapping[str, Problem]) -> None:
        self.problems = problems
        self.devices = next(iter(problems.values())).devices
        self._holdings: list[Holding] = []
        self._numbers: dict[Holding, int] = {}
        self._bytes: dict[frozenset[int], Floats] = {}
        self._reduce: dict[int, Floats] = {}
        self._blocks: dict[tuple[str, str, int], Floats] = {}
        self._parts: dict[int, tuple[Floats, NDArray[np.int64], Floats]] = {}

    def number(self, holding: Holding) -> int:
        """The holding's number."""
        if holding not in self._numbers:
            self._numbers[holding] = len(self._holdings)
            self._holdings.append(holding)
        return self._numbers[holding]

    def holding(self, number: int) -> Holding:
        """The holding of a number."""
        return self._holdings[number]

    def parameters_bytes(self, numbers: frozenset[int]) -> Floats:
        """[D] bytes of weights, gradients and state that holdings of one owner take together."""
        if numbers not in self._bytes:
            self._bytes[numbers] = self._together(sorted(numbers))
        return self._bytes[numbers]

    def _together(self, numbers: Sequence[int]) -> Floats:
        held_DL, shard_DL, whole_DL = self._part(numbers[0])
        for number in numbers[1:]:
            own_DL, other_DL, all_DL = self._part(number)
            differ = (shard_DL != other_DL) & (shard_DL > 0) & (other_DL > 0)
            whole_DL = np.maximum(whole_DL, all_DL)
            held_DL = np.where(differ, whole_DL, np.maximum(held_DL, own_DL))
            shard_DL = np.where(differ, 1, np.maximum(shard_DL, other_DL))
        return held_DL.sum(axis=1)

    def _part(self, number: int) -> tuple[Floats, NDArray[np.int64], Floats]:
        """[D, L]: bytes of the shard held, what shard it is (0 for none, 1 for all), bytes of all.

        Where it holds two shards the state is spread over no more ranks than each one's.
        """
        if number not in self._parts:
            item = self._holdings[number]
            tp, whole_L = item.grid.tp, self._block_bytes(item)
            shape = self.devices, len(whole_L)
            held_DL, whole_DL = np.zeros(shape), np.zeros(shape)
            shard_DL = np.zeros(shape, dtype=np.int64)
            for chunk, (first, end) in enumerate(item.blocks):
                own = slice(first, end)
                for group in map(list, item.grid.stage(chunk)):
                    held_DL[group, own] = whole_L[own] / tp
                    whole_DL[group, own] = whole_L[own]
                    shard_DL[group, own] = np.arange(tp, 2 * tp)[:, None]
            self._parts[number] = held_DL, shard_DL, whole_DL
        return self._parts[number]

    def _block_bytes(self, holding: Holding) -> Floats:
        """[L] bytes of every block, whole."""
        key = holding.task, holding.module, holding.grid.dp
        if key not in self._blocks:
            problem = self.problems[holding.task]
            blocks = range(problem.blocks(holding.module))
            self._blocks[key] = np.array(
                [problem.fixed_bytes(holding.module, (b, b + 1), 1, key[2]) for b in blocks]
            )
        return self._blocks[key]

    def reduce_s(self, number: int) -> Floats:
        """[D] seconds of one holding's gradient reduction."""
        if number not in self._reduce:
            item, total_D = self._holdings[number], np.zeros(self.devices)
            problem, tp = self.problems[item.task], item.grid.tp
            for chunk, blocks in enumerate(item.blocks if item.grid.dp > 1 else ()):
                if problem.stage(item.module, blocks).trainable:
                    groups = item.grid.stage(chunk)
                    total_D[[rank for group in groups for rank in group]] += (
                        problem.costs.all_reduce_s(
                            ranks=[group[0] for group in groups],
                            num_bytes=problem.gradient_bytes(item.module, blocks, tp),
                            sharers=tp,
                        )
                    )
            self._reduce[number] = total_D
        return self._reduce[number]
