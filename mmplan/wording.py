"""Counts, sizes and ranks in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable

# Hears sentences that a user should know and that are no error.
Hint = Callable[[str], None]

SIZE_UNITS = ("B", "kB", "MB", "GB", "TB")


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """``1 device``, ``1,296 devices``.

    Args:
        count: how many.
        noun: what one is called.
        plural: what several are called, default with an s.
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def size(num_bytes: float) -> str:
    """Bytes with the unit that fits, powers of 1000: ``16 GB``."""
    for unit in SIZE_UNITS[:-1]:
        # What three digits would round to 1,000 has the next unit.
        if abs(num_bytes) < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB" if abs(num_bytes) < 999.5 else f"{num_bytes:,.0f} TB"


def missing(needed_bytes: float, memory_bytes: float) -> str:
    """``a device has 16 GB: 2.1 GB missing``."""
    return f"a device has {size(memory_bytes)}: {size(needed_bytes - memory_bytes)} missing"


def slow_rank(step: int, rank: int, instruction: str, times: float) -> str:
    """A rank that was found to be slow, in a line."""
    takes = f"its {instruction} takes {times:.2f} times as long as it should"
    return f"step {step}: rank {rank} is slow: {takes}"


def rank_ranges(ranks: Iterable[int], separator: str = ",") -> str:
    """Ranks with runs joined: ``0-3,8``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return separator.join("-".join(map(str, run)) for run in runs)
