"""A batch whose samples have different lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


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
