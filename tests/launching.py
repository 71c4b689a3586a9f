"""Launches whose ranks return objects of these tests, which no launch carries: files do."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from mmlaunch.launch.launch import WorkerContext, WorkerEntry, launch


def launched(
    entry: WorkerEntry, args: tuple[Any, ...], *, num_ranks: int, run_dir: Path, timeout_s: float
) -> list[Any]:
    """What an entry returned on each rank, tensors among it."""
    paths = launch(
        entry=_kept, args=(entry, args), num_ranks=num_ranks, run_dir=run_dir, timeout_s=timeout_s
    )
    return [pickle.loads(Path(path).read_bytes()) for path in paths]


def _kept(ctx: WorkerContext, entry: WorkerEntry, args: tuple[Any, ...]) -> str:
    path = ctx.run_dir / f"returned-{ctx.rank}"
    path.write_bytes(pickle.dumps(entry(ctx, *args)))
    return str(path)
