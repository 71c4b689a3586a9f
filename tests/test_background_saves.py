"""Checkpoints that are written while training goes on: whole, and of their step."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mmlaunch.checkpoint.background import BackgroundSaves, Saved
from mmlaunch.checkpoint.folder import file_of, latest
from mmlaunch.checkpoint.save import Entry
from mmplan.errors import UnfitEnvironmentError
from tests.birds import copy_workload, two_rank_plan
from tests.commands import run
from tests.test_checkpoint import (
    Ranks,
    check_content,
    content_of,
    save_all,
    sha256,
    tiny_disk,
    two_rank_entries,
)


class Savers:
    """The saves of two ranks, which are threads."""

    def __init__(self) -> None:
        ranks = Ranks(2)
        # A writer ends with the thread that started it.
        self.pool = ThreadPoolExecutor(2)
        self.of = [
            BackgroundSaves(
                cast(
                    Any,
                    SimpleNamespace(
                        rank=rank,
                        gather_objects=ranks.gather(rank),
                        device=torch.device("cpu"),
                        synchronize=lambda: None,
                    ),
                )
            )
            for rank in range(2)
        ]

    def begin(self, root: Path, step: int, entries: Sequence[Sequence[Entry]]) -> None:
        self._all(lambda rank: self.of[rank].begin(content_of(root, step), entries[rank]))

    def ended(self) -> list[Saved | None]:
        return self._all(lambda rank: self.of[rank].ended(wait=True))

    def _all(self, call: Callable[[int], Any]) -> list[Any]:
        return list(self.pool.map(call, range(2)))


@contextmanager
def savers() -> Generator[Savers]:
    made = Savers()
    try:
        yield made
    finally:
        for saves in made.of:
            saves.close()
        made.pool.shutdown()


def test_a_save_is_that_of_its_step_whatever_comes_after(tmp_path: Path) -> None:

    with savers() as made:
        assert made.of[0].ended() is None
        entries = two_rank_entries(1.0)
        made.begin(tmp_path / "saves", 1, entries)
        for entry in (entry for one in entries for entry in one):
            for _, value in entry.boxes:
                value.zero_()
        path = tmp_path / "saves" / "step-1"
        assert made.ended() == [Saved(step=1, path=path)] * 2
        assert [saves.ended(wait=True) for saves in made.of] == [None, None]
        for step in (2, 3):
            made.begin(tmp_path / "saves", step, two_rank_entries(float(step), rows=6 * step))
            made.ended()
    check_content(tmp_path / "saves" / "step-3")
    assert sorted(path.name for path in (tmp_path / "saves").iterdir()) == ["step-2", "step-3"]


def test_bytes_are_those_of_a_save_that_is_waited_for(tmp_path: Path) -> None:
    save_all(tmp_path / "waited", 1, two_rank_entries(1.0))
    with savers() as made:
        made.begin(tmp_path / "begun", 1, two_rank_entries(1.0))
        made.ended()
    for name in (file_of(0), file_of(1), "manifest.json"):
        assert sha256(tmp_path / "begun" / "step-1" / name) == sha256(
            tmp_path / "waited" / "step-1" / name
        )


@pytest.mark.parametrize("victim", [0, 1])
def test_a_writer_that_dies_is_named_and_the_next_save_is_whole(
    tmp_path: Path, victim: int
) -> None:
    with savers() as made:
        made.begin(tmp_path, 1, two_rank_entries(1.0))
        made.ended()
        writer = made.of[victim]._writer
        assert writer is not None
        os.kill(writer.pid, signal.SIGSTOP)
        made.begin(tmp_path, 2, two_rank_entries(2.0))
        os.kill(writer.pid, signal.SIGKILL)
        made.of[1].ended(wait=True)
        saved = made.of[0].ended(wait=True)
        assert saved is not None
        assert saved.error is not None
        assert saved.error.message == (
            f"rank {victim}: the process that writes checkpoints was killed by signal 9"
        )
        assert latest(tmp_path) == tmp_path / "step-1"
        made.begin(tmp_path, 3, two_rank_entries(3.0))
        assert made.ended() == [Saved(step=3, path=tmp_path / "step-3")] * 2
        writer = made.of[victim]._writer
        assert writer is not None
        # Between two saves nobody misses it.
        writer.kill()
        writer.wait()
        made.begin(tmp_path, 4, two_rank_entries(4.0))
        assert made.ended() == [Saved(step=4, path=tmp_path / "step-4")] * 2
    check_content(tmp_path / "step-4")


def test_room_is_looked_for_before_and_lost_room_is_said(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with tiny_disk(disk, "256k"), savers() as made:
        root = disk / "checkpoints"
        made.begin(root, 1, two_rank_entries(1.0, rows=100))
        made.ended()
        with pytest.raises(UnfitEnvironmentError, match=r"step 2 needs 60\d kB .* are free"):
            made.begin(root, 2, two_rank_entries(2.0, rows=10_000))
        assert [path.name for path in root.iterdir()] == ["step-1"]
        entries = two_rank_entries(3.0, rows=1000)
        free_bytes = shutil.disk_usage(disk).free
        stopped = [saves._writer for saves in made.of]
        for writer in stopped:
            assert writer is not None
            os.kill(writer.pid, signal.SIGSTOP)
        made.begin(root, 3, entries)
        (disk / "filler").write_bytes(bytes(free_bytes - 8192))
        for writer in stopped:
            assert writer is not None
            os.kill(writer.pid, signal.SIGCONT)
        failed = made.ended()[0]
        assert failed is not None
        assert failed.error is not None
        assert "disk full: the checkpoint of step 3" in failed.error.message
        (disk / "filler").unlink()
        made.begin(root, 4, two_rank_entries(4.0, rows=100))
        made.ended()
        check_content(root / "step-4")


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--async-save"]], ids=["waited", "async"])
def test_a_failed_save_is_said_and_training_goes_on(tmp_path: Path, more: list[str]) -> None:
    (tmp_path / "plans").mkdir()
    plan = two_rank_plan(copy_workload(tmp_path), tmp_path / "plans" / "plan.json")
    run_dir, disk = tmp_path / "run", tmp_path / "disk"
    run_dir.mkdir()
    with tiny_disk(disk, "16k"):
        (run_dir / "checkpoints").symlink_to(disk)
        arguments = ["--run-dir", run_dir, "--save-every", 3, "--timeout", 60, *more]
        done = run("mmlaunch", "run", plan, *arguments, cwd=tmp_path)
    for step in (3, 6):
        assert f"step {step} is not saved, training goes on: disk full: " in done.out
    # Nothing comes after the last step that could save it.
    assert done.code == 4
    assert done.message.startswith("disk full: the checkpoint of step 8 needs")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(8))
