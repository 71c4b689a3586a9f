"""What holds for every test file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a set as a test's parameter: its text differs between processes.

    The test's name would, too, and pytest-xdist stops when its workers collect different names.
    """
    for item in items:
        callspec = getattr(item, "callspec", None)
        for name, value in callspec.params.items() if callspec else ():
            if isinstance(value, set | frozenset) and len(value) > 1:
                raise pytest.UsageError(f"{item.nodeid}: {name} is a set; make it a tuple")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that outnumber the free cores wait for one another at every matrix product."""
    import torch  # seconds, which files that need no torch do not wait for

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
