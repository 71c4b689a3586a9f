"""What holds for every test file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.leftovers import Leftovers, empty_own_folder

_leftovers = pytest.StashKey[Leftovers]()


def pytest_configure(config: pytest.Config) -> None:
    """Watch the machine, once for all processes of pytest-xdist."""
    if not hasattr(config, "workerinput"):
        config.stash[_leftovers] = Leftovers.watch()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fail where a process, file, folder or namespace is left."""
    if hasattr(session.config, "workerinput"):
        empty_own_folder()  # before pytest-xdist is told that this process has finished
    yield
    watched = session.config.stash.get(_leftovers, None)
    if watched is not None and (found := watched.found()):
        lines = "\n".join(found)
        raise pytest.UsageError(f"the tests left {len(found)} behind:\n{lines}")


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


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums and gathers of this process take many buckets; those of a launch take one."""
    from mmlaunch.execute import gradient_buckets
    from tests.zero_cases import BUCKET_BYTES

    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", BUCKET_BYTES)
