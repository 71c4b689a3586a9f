"""A batch whose samples have different lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# Attribute of a tensor of lengths: its version, and its numbers.
_HOST_LENGTHS = "mmplan_host_lengths"


class Ragged(NamedTuple):
    """Rows of several samples, one after another; travels like a tensor.

    A whole micro-batch may have no row. Blocks take 0 rows and give 0 rows then.

    Attributes:
        values: [sum(lengths), ...], the rows of sample 0, then of sample 1, ...
        lengths: [batch], int64, rows of each sample; zero is allowed.
    """

    values: Tensor
    lengths: Tensor


def samples_of(rows: Ragged) -> Tensor:
    """The sample of each row, [rows] int64; the host does not wait for the numbers."""
    import torch

    row = torch.arange(len(rows.values), device=rows.values.device)
    return torch.searchsorted(rows.lengths.to(row.device).cumsum(0), row, right=True)


def positions_of(rows: Ragged) -> Tensor:
    """The place of each row in its own sample, [rows] int64; the host does not wait."""
    import torch

    row = torch.arange(len(rows.values), device=rows.values.device)
    lengths = rows.lengths.to(row.device)
    return row - (lengths.cumsum(0) - lengths)[samples_of(rows)]


def host_lengths(lengths: Tensor) -> tuple[int, ...]:
    """The lengths of a ``Ragged`` as numbers of the host.

    They are kept with the tensor, so that the host need not wait for the device. Only a tensor
    that a block made, or changed in place, is read, once.
    """
    known = known_lengths(lengths)
    if known is None:
        known = tuple(lengths.tolist())
        with_host_lengths(lengths, known)
    return known


def known_lengths(lengths: Tensor) -> tuple[int, ...] | None:
    """What the host knows of lengths; None of those that a block made or changed in place.

    Of lengths without values (on the meta device) they are those of some samples that stand for
    all others.
    """
    version, known = getattr(lengths, _HOST_LENGTHS, (None, None))
    return known if version == lengths._version else None


def as_known(lengths: Tensor, before: Tensor) -> Tensor:
    """Lengths of which the host knows what it knew of others with the same numbers."""
    known = known_lengths(before)
    return lengths if known is None else with_host_lengths(lengths, known)


def with_host_lengths(lengths: Tensor, known: Sequence[int]) -> Tensor:
    """The tensor of lengths, whose numbers the host knows from now on."""
    setattr(lengths, _HOST_LENGTHS, (lengths._version, tuple(known)))
    return lengths
