"""Batches of samples: what the host knows of ragged ones without asking their device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmlaunch.comm.batches import (
    cat_samples,
    float_rows,
    leaf_of,
    map_tensors,
    slice_samples,
    to_device,
)
from mmplan.ragged import Ragged, host_lengths


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Tensors whose numbers were read by the host."""
    found: list[Tensor] = []
    tolist = Tensor.tolist

    def read(tensor: Tensor) -> list[int]:
        found.append(tensor)
        return tolist(tensor)

    monkeypatch.setattr(Tensor, "tolist", read)
    return found


def _batch() -> Ragged:
    return Ragged(torch.arange(12.0).view(6, 2), torch.tensor([2, 0, 3, 1]))


def test_lengths_of_cut_moved_and_joined_batches_are_known_without_a_read(
    reads: list[Tensor],
) -> None:
    batch = _batch()
    parts = [slice_samples(batch, 0, 3), slice_samples(batch, 3, 4)]
    assert len(reads) == 1
    moved = [map_tensors(part, leaf_of) for part in parts]
    joined = cat_samples(moved)
    assert isinstance(joined, Ragged)
    again = slice_samples(joined, 2, 4)
    assert isinstance(again, Ragged)
    assert host_lengths(joined.lengths) == (2, 0, 3, 1)
    assert host_lengths(again.lengths) == (3, 1)
    assert [*float_rows(joined, 2)] == [2]
    assert torch.equal(again.values, batch.values[2:])
    assert len(reads) == 1


@pytest.mark.slow
def test_lengths_that_a_block_hands_on_are_known(reads: list[Tensor]) -> None:
    given = Ragged(torch.ones(3, 2), to_device(torch.tensor([1, 2]), torch.device("cpu")))

    @torch.compile(backend="eager")
    def block(rows: Ragged) -> tuple[Ragged, Ragged]:
        return Ragged(rows.values * 2, rows.lengths), Ragged(rows.values[:1], rows.lengths - 1)

    same, other = block(given)
    reads.clear()
    assert host_lengths(same.lengths) == (1, 2)
    assert not reads
    assert host_lengths(other.lengths) == host_lengths(other.lengths) == (0, 1)
    assert len(reads) == 1


def test_lengths_changed_in_place_are_read_again(reads: list[Tensor]) -> None:
    lengths = to_device(torch.tensor([1, 2]), torch.device("cpu"))
    lengths[0] = 5
    reads.clear()
    assert host_lengths(lengths) == (5, 2)
    assert len(reads) == 1
