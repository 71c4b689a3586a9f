"""A round's samples cut into replicas' shares and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmplan.arrays import Ints
from mmplan.schema.workload import Pins


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """``total`` as ``parts`` numbers that differ by at most one, larger ones first."""
    least, larger = divmod(total, parts)
    return (least + 1,) * larger + (least,) * (parts - larger)


def cut(share: int, size: int, *, pinned: bool, largest_share: int = 0) -> tuple[int, ...]:
    """Micro-batches of at most ``size`` samples, as equal as possible.

    There are as many as the largest share has, so that replicas keep step. A pinned size is kept
    as it is, and a smaller micro-batch may come last.
    """
    if pinned:
        return (size,) * (share // size) + ((share % size,) if share % size else ())
    return split_evenly(share, min(share, -(-max(share, largest_share) // size)))


def fewest_replicas(samples: int, most: int) -> int:
    """The fewest replicas whose largest share is that of the most."""
    share = -(-samples // most)
    return -(-samples // share)


def replica_counts(samples: int, most: int, *, uneven: bool, pins: Pins) -> list[int]:
    """Numbers of replicas worth trying: at least one sample each.

    Of counts with the same share of the slowest replica only the smallest is kept, unless the
    counts are pinned.
    """
    counts = [n for n in range(1, min(most, samples) + 1) if pins.allows("dp", n)]
    if not uneven:
        counts = [n for n in counts if samples % n == 0]
    if pins.dp is not None:
        return counts
    return sorted({-(-samples // n): n for n in reversed(counts)}.values())


def microbatch_sizes(share: int, pins: Pins) -> Iterator[int]:
    """Micro-batch sizes worth trying for a share: whole, in 2 to 8 parts, powers of two."""
    if pins.microbatch is not None:
        candidates = {pins.microbatch} if isinstance(pins.microbatch, int) else set(pins.microbatch)
        yield from sorted(size for size in candidates if size <= share)
        return
    sizes = {-(-share // parts) for parts in range(1, 9)}
    sizes |= {2**i for i in range(share.bit_length()) if 2**i <= share}
    # The largest micro-batch of the cut: several candidates may give one cut.
    yield from sorted({-(-share // -(-share // size)) for size in sizes})


def smallest_divisors(samples: int) -> Ints:
    """Numbers of replicas n, ascending, each the smallest with its ceil(samples / n)."""
    root = int(samples**0.5) + 1
    few = np.arange(1, root + 1, dtype=np.int64)
    size = np.concatenate([-(-samples // few), few])
    return np.unique(-(-samples // size[size <= samples]))
