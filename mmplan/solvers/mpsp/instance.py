"""The malleable project scheduling problem (MPSP): chains of blocks that share N devices.

A chain is a MetaOp: one task's use of one module. Its blocks run one after another. A segment of
them runs on one of the chain's valid device counts; the next segment may run on another count.
All forwards end before any backward starts. Both phases run the same segments on the same devices;
the backward is the mirror image of the forward.

Indices in this package: m = chain, k = position in the chain's valid counts, c = scaling class.
Shape suffixes: K = valid counts of a chain, L = its blocks.

Source: Spindle, arXiv:2409.03365, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mmplan.arrays import Floats
from mmplan.errors import InfeasibleError, InvalidInputError
from mmplan.solvers.problem import NotApplicableError
from mmplan.wording import counted

# Blocks are of one scaling class where their shares agree to so many digits. Chosen by hand.
_SHARE_DIGITS = 9
# The same as a difference, for the quick test of chains whose blocks are all of one class.
_SHARE_TOLERANCE = 1e-10
# Beyond this ratio of two times a sum loses the smaller one: a double has 16 digits.
_MAX_TIME_RATIO = 1e12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """A MetaOp as the scheduler sees it: a malleable task of L blocks.

    Attributes:
        counts: valid numbers of devices, ascending, K of them.
        forward_s: ``[K, L]`` seconds of each block's forward on each count.
        backward_s: ``[K, L]`` likewise; zero where no gradient passes.
        after: indices of the chains that must end before this one starts.
        level: MetaLevel, the number of chains on the longest path before this one.
        task: index of the chain's task.
        cut_s: ``[L]`` estimated seconds that a segment which begins at each block waits for its
            input from the segment before; None for no wait.
    """

    name: str
    counts: tuple[int, ...]
    forward_s: Floats
    backward_s: Floats
    after: tuple[int, ...] = ()
    level: int = 0
    task: int = 0
    cut_s: Floats | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks, L."""
        return self.forward_s.shape[1]

    @property
    def both_s(self) -> Floats:
        """``[K, L]`` seconds of forward and backward together."""
        return self.forward_s + self.backward_s

    def with_useful_counts(self, devices: int) -> Chain:
        """The chain without counts above ``devices`` and without counts that speed up no phase.

        Raises:
            InfeasibleError: the smallest count is above ``devices``.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientSum:
    """The sum of a module's gradients, after the backwards of all chains that run it.

    Attributes:
        chains: their indices.
        seconds: of the sum, by the number of devices that hold the module.
    """

    chains: tuple[int, ...]
    seconds: Callable[[int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """Chains, producers before consumers, and the number of devices that they share.

    Chains lose their useless counts here and get their levels.

    Attributes:
        sums: of gradients; no bound knows them.

    Raises:
        InvalidInputError: a table has a wrong shape or a time that is negative or not finite, or
            ``counts`` do not ascend, or a chain stands before its producer.
        NotApplicableError: a forward takes no time, or two times are too far apart to add up.
        InfeasibleError: the smallest count of a chain is above the number of devices.
    """

    chains: tuple[Chain, ...]
    devices: int
    sums: tuple[GradientSum, ...] = ()
    levels: int = field(init=False)

    def __post_init__(self) -> None:
        for index, chain in enumerate(self.chains):
            _check(index, chain)
        shortest = min(chain.forward_s.sum(axis=1).min() for chain in self.chains)
        longest = max(t.sum(axis=1).max() for c in self.chains for t in (c.forward_s, c.backward_s))
        if longest > _MAX_TIME_RATIO * shortest:
            raise NotApplicableError(
                f"mpsp adds up times: {shortest:.3g} and {longest:.3g} s are too far apart",
                hint="look for a time in the profile that is out of range",
            )
        levels: list[int] = []
        chains: list[Chain] = []
        for chain in self.chains:
            levels.append(1 + max((levels[i] for i in chain.after), default=-1))
            chains.append(replace(chain.with_useful_counts(self.devices), level=levels[-1]))
        object.__setattr__(self, "chains", tuple(chains))
        object.__setattr__(self, "levels", 1 + max(levels))

    def of_level(self, level: int) -> list[int]:
        """Indices of the chains on a level."""
        return [i for i, chain in enumerate(self.chains) if chain.level == level]

    def successors(self) -> list[list[int]]:
        """For each chain, the chains that come directly after it."""
        found: list[list[int]] = [[] for _ in self.chains]
        for m, chain in enumerate(self.chains):
            for other in set(chain.after):
                found[other].append(m)
        return found


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


def scaling_classes(table_s: Floats) -> list[Floats]:
    """Blocks whose times keep one proportion on every device count, taken together.

    Args:
        table_s: ``[K, L]`` seconds of a chain's blocks.

    Returns:
        ``[K]`` seconds of each class. Blocks that take no time belong to none.
    """
    blocks_s = table_s.sum(axis=0)
    if (blocks_s > 0).all():
        columns = table_s / blocks_s
        if np.abs(columns - columns[:, :1]).max() < _SHARE_TOLERANCE:
            return [table_s.sum(axis=1)]
    members: dict[tuple[float, ...], list[int]] = {}
    for block, column in enumerate(table_s.T):
        total = column.sum()
        if total > 0:
            key = tuple(np.round(column / total, _SHARE_DIGITS).tolist())
            members.setdefault(key, []).append(block)
    return [table_s[:, blocks].sum(axis=1) for blocks in members.values()]


def backward_ratio(chains: Sequence[Chain]) -> float | None:
    """Backward seconds over forward seconds where all blocks have one ratio, else None."""
    first = chains[0]
    ratio = float(first.backward_s[0].sum() / first.forward_s[0].sum())
    is_one = all(np.allclose(c.backward_s, ratio * c.forward_s, rtol=1e-9, atol=0) for c in chains)
    return ratio if is_one else None


def faster_counts(total_s: Floats) -> list[int]:
    """Positions of the counts that are faster than all smaller counts.

    Args:
        total_s: ``[K]`` seconds of a chain on each count.
    """
    kept = [0]
    for k in range(1, len(total_s)):
        if total_s[k] < total_s[kept[-1]]:
            kept.append(k)
    return kept
