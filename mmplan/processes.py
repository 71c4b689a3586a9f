"""A function of many items, each in one of a few processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TypeVar

from mmplan.errors import RunFailedError

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_processes(
    function: Callable[[Item], Result], items: Sequence[Item], *, processes: int | None = None
) -> Iterator[Result]:
    """Results as they are found, in any order.

    Whoever stops listening, or is interrupted, ends the processes at once. One process is this
    one.

    Args:
        function: and what it returns travel between processes.
        items: begun in this order.
        processes: at most so many, default one per core that this process may use.

    Raises:
        RunFailedError: a process was killed.
    """
    count = min(processes or num_cores(), len(items))
    if count <= 1:
        yield from map(function, items)
        return
    others = set(multiprocessing.active_children())
    # A fork needs nothing imported again; elsewhere it is not safe.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_ends_with_its_parent)
    try:
        for future in as_completed([pool.submit(function, item) for item in items]):
            yield future.result()
    except BrokenProcessPool:
        raise RunFailedError(
            "a process was killed, by lack of memory perhaps",
            hint="free memory, or compare fewer solvers with --solvers",
        ) from None
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def num_cores() -> int:
    """Cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ends_with_its_parent() -> None:
    """Ctrl-C ends a worker without a word, and so does the end of its parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


# New objects before the youngest are looked through; Python's default is 700.
_RARELY = 200_000


@contextmanager
def rare_collections() -> Generator[None]:
    """Look for garbage rarely inside, and among new objects only; as before afterwards."""
    before = gc.get_threshold()
    if not 0 < before[0] < _RARELY:
        yield
        return
    freezes = not gc.get_freeze_count()
    gc.set_threshold(_RARELY, *before[1:])
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if freezes:
            gc.unfreeze()
