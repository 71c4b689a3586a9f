"""The malleable project scheduling problem: chains of blocks that share N devices.

A chain is one task's use of one module (a MetaOp). Its blocks run one after another; a slice
of them runs on a number of devices among those that are valid for the chain, which may differ
from slice to slice. Forward and backward are two phases: all forwards end before any backward
starts, and both run the same slices on the same devices, the backward in mirror image.

Shape suffixes: K = valid counts of a chain, L = its blocks, P = its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mmplan.arrays import Floats
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.solvers.problem import NotApplicableError
from mmplan.wording import counted

# Shares of blocks that differ by less are one share.
_DIGITS = 9
_SAME = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """Blocks that run one after another, on more or fewer devices.

    Attributes:
        counts: valid numbers of devices, ascending, K of them.
        forward_s: ``[K, L]`` seconds of each block's forward on so many devices.
        backward_s: ``[K, L]`` likewise; zero where no gradient passes.
        after: chains that end before this one starts.
        level: chains on the longest path before it.
        group: chains of one group run together where tasks run one after another.
        cut_s: ``[L]`` seconds that a slice which begins there waits for what comes from the slice
            before it, an estimate for the search; none by default.
    """

    name: str
    counts: tuple[int, ...]
    forward_s: Floats
    backward_s: Floats
    after: tuple[int, ...] = ()
    level: int = 0
    group: int = 0
    cut_s: Floats | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks, L."""
        return self.forward_s.shape[1]

    @property
    def both_s(self) -> Floats:
        """``[K, L]`` seconds of forward and backward together."""
        return self.forward_s + self.backward_s

    def useful(self, devices: int) -> Chain:
        """Without the counts that do not exist or that no phase gets faster with.

        Raises:
            InfeasibleError: the least count is more than there are devices.
        """
        if self.counts[0] > devices:
            raise InfeasibleError(
                f"{self.name} needs {counted(self.counts[0], 'device')} at least, there are "
                f"{devices}",
                hint="use more devices, or allow smaller degrees for its module",
            )
        kept: list[int] = []
        least = np.full(2, np.inf)
        for k, count in enumerate(self.counts):
            total = np.array([self.forward_s[k].sum(), self.backward_s[k].sum()])
            if count <= devices and (not kept or (total < least).any()):
                kept.append(k)
                least = np.minimum(least, total)
        return replace(
            self,
            counts=tuple(self.counts[k] for k in kept),
            forward_s=self.forward_s[kept],
            backward_s=self.backward_s[kept],
        )


# Beyond it the digits of a sum no longer hold the smaller of two times.
_SPAN = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """Chains, producers before consumers, and the devices that they share.

    Raises:
        InvalidInputError: a table is not positive and finite, or an order is not one.
        InfeasibleError: a chain fits no number of devices.
    """

    chains: tuple[Chain, ...]
    devices: int
    levels: int = field(init=False)

    def __post_init__(self) -> None:
        for index, chain in enumerate(self.chains):
            _check(index, chain)
        shortest = min(chain.forward_s.sum(axis=1).min() for chain in self.chains)
        longest = max(t.sum(axis=1).max() for c in self.chains for t in (c.forward_s, c.backward_s))
        if longest > _SPAN * shortest:
            raise NotApplicableError(
                f"mpsp adds up times: {shortest:.3g} and {longest:.3g} s are too far apart",
                hint="look for a time in the profile that is out of range",
            )
        useful = tuple(chain.useful(self.devices) for chain in self.chains)
        levels: list[int] = []
        for chain in useful:
            levels.append(1 + max((levels[i] for i in chain.after), default=-1))
        object.__setattr__(
            self,
            "chains",
            tuple(replace(c, level=level) for c, level in zip(useful, levels, strict=True)),
        )
        object.__setattr__(self, "levels", 1 + max(levels))

    def of_level(self, level: int) -> list[int]:
        """Indices of the chains on a level."""
        return [i for i, chain in enumerate(self.chains) if chain.level == level]


def _check(index: int, chain: Chain) -> None:
    shape = len(chain.counts), chain.forward_s.shape[-1]
    for table in (chain.forward_s, chain.backward_s):
        if table.shape != shape or 0 in shape:
            raise InvalidInputError(f"{chain.name}: tables must be {shape}, not {table.shape}")
        if not (np.isfinite(table).all() and (table >= 0).all()):
            raise InvalidInputError(f"{chain.name}: times must be finite and not negative")
    if not (chain.forward_s.sum(axis=1) > 0).all():
        raise NotApplicableError(
            f"mpsp cuts modules by their times: the forward of {chain.name} takes none",
            hint="use another solver, or profile the module again",
        )
    if list(chain.counts) != sorted(set(chain.counts)) or chain.counts[0] < 1:
        raise InvalidInputError(f"{chain.name}: counts {chain.counts} must ascend from 1 or more")
    if any(other >= index for other in chain.after):
        raise InvalidInputError(f"{chain.name} stands before a chain that it comes after")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockRange:
    """Blocks of a chain whose times are in proportion, however many devices they run on.

    Attributes:
        time_s: ``[K]`` seconds of all of them.
        shares: ``[L]`` of the part that lies in each block; they add up to 1.
    """

    time_s: Floats
    shares: Floats


def parts(table_s: Floats) -> list[BlockRange]:
    """The parts of a chain's ``[K, L]`` table; blocks that take no time are in none."""
    blocks_s = table_s.sum(axis=0)
    if (blocks_s > 0).all():
        alike = table_s / blocks_s
        if np.abs(alike - alike[:, :1]).max() < _SAME:
            return [BlockRange(time_s=table_s.sum(axis=1), shares=blocks_s / blocks_s.sum())]
    groups: dict[tuple[float, ...], list[int]] = {}
    for block in range(table_s.shape[1]):
        column = table_s[:, block]
        total = column.sum()
        if total > 0:
            key = tuple(np.round(column / total, _DIGITS).tolist())
            groups.setdefault(key, []).append(block)
    found: list[BlockRange] = []
    for blocks in groups.values():
        time_s = table_s[:, blocks].sum(axis=1)
        shares = np.zeros(table_s.shape[1])
        shares[blocks] = table_s[:, blocks].sum(axis=0) / time_s.sum()
        found.append(BlockRange(time_s=time_s, shares=shares))
    return found


def in_proportion(chains: Sequence[Chain]) -> float | None:
    """Backward by forward seconds, where that is one number for all blocks; else None."""
    first = chains[0]
    ratio = float(first.backward_s[0].sum() / first.forward_s[0].sum())
    alike = all(np.allclose(c.backward_s, ratio * c.forward_s, rtol=1e-9, atol=0) for c in chains)
    return ratio if alike else None
