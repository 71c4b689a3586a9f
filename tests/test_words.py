"""Numbers of things: one of them is not several."""

from __future__ import annotations

import pytest

from mmplan.words import counted


@pytest.mark.parametrize(
    ("count", "words", "said"),
    [
        (0, ("device",), "0 devices"),
        (1, ("device",), "1 device"),
        (1296, ("device",), "1,296 devices"),
        (1, ("batch", "batches"), "1 batch"),
        (2, ("batch", "batches"), "2 batches"),
    ],
)
def test_counted(count: int, words: tuple[str, ...], said: str) -> None:
    assert counted(count, *words) == said
