"""Numbers of things, one of which is not several, and sizes with their units."""

from __future__ import annotations

import pytest

from mmplan.reporting.numbers import seconds
from mmplan.wording import counted, missing, size


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


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [
        (0, "0 B"),
        (999.4, "999 B"),
        (999.6, "1 kB"),
        (9.69e10, "96.9 GB"),
        (-1.5e6, "-1.5 MB"),
        (9.999e11, "1 TB"),
        (1.25e15, "1,250 TB"),
    ],
)
def test_size(num_bytes: float, said: str) -> None:
    assert size(num_bytes) == said


def test_missing() -> None:
    assert missing(9.69e10, 8e10) == "a device has 80 GB: 16.9 GB missing"


@pytest.mark.parametrize(
    ("value", "said"),
    [(2.66e-23, "0 us"), (-1e-18, "0 us"), (2.5e-9, "0.0025 us"), (0.5, "500 ms")],
)
def test_seconds(value: float, said: str) -> None:
    assert seconds(value) == said
