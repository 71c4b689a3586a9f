"""Checkpoints: any layout reads any other bit for bit; no kill, flip or full disk loses one."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmlaunch.checkpoint import restore
from mmlaunch.checkpoint.boxes import (
    Box,
    ShardStyle,
    check_no_hole,
    cover,
    flat_to_boxes,
    intersect,
    shard_boxes,
    whole,
)
from mmlaunch.checkpoint.folder import clean, drop_old, latest, step_folders
from mmlaunch.checkpoint.restore import open_checkpoint, prove
from mmlaunch.checkpoint.save import Content, Entry, Gather, save
from mmlaunch.comm import wire
from mmplan.errors import InvalidInputError, MMPlanError, RunFailedError, UnfitEnvironmentError
from tests.disk_kills import FORK, killed_at


class Ranks:
    """gather for threads that play the ranks of one run."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world, timeout=20)
        self._slots: list[Any] = [None] * world

    def gather(self, rank: int) -> Gather:
        def call(item: Any, kind: Any = Any, *, to: int | None = None) -> list[Any]:
            self._slots[rank] = wire.pack(item, kind)
            self._barrier.wait()
            got = [wire.unpack(data, kind) for data in self._slots if to in (None, rank)]
            self._barrier.wait()
            return got

        return call


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def save_all(root: Path, step: int, entries: Sequence[Sequence[Entry]], keep: int = 2) -> list[Any]:
    """Every rank saves, in threads; what each returned or raised."""
    ranks = Ranks(len(entries))

    def one(rank: int) -> Any:
        try:
            content = content_of(root, step, keep)
            return save(content, entries[rank], rank=rank, gather=ranks.gather(rank))
        except Exception as exc:
            return exc

    with ThreadPoolExecutor(len(entries)) as pool:
        return list(pool.map(one, range(len(entries))))


def content_of(root: Path, step: int, keep: int = 2) -> Content:
    state, meta = {"sampler": {"seed": 3, "step": step}}, {"plan": "abc"}
    return Content(root=root, step=step, state=state, meta=meta, keep=keep)


def parts(full: Tensor, boxes: Sequence[Box]) -> list[tuple[tuple[int, ...], Tensor]]:
    return [(box.offsets, full[box.slices]) for box in boxes]


def two_rank_entries(value: float, rows: int = 6) -> list[list[Entry]]:
    """A weight cut in rows with optimizer state as a flat slice, and a replicated scalar."""
    weight = torch.full((rows, 5), value)
    moment = torch.full((rows, 5), value + 0.5, dtype=torch.float64)
    half = weight.numel() // 2 + 1
    flat = [flat_to_boxes(weight.shape, 0, half), flat_to_boxes(weight.shape, half, rows * 5)]
    return [
        [
            Entry(
                name="vision.0.weight",
                kind="param",
                full_shape=(rows, 5),
                boxes=parts(weight, shard_boxes((rows, 5), "colwise", rank, 2)),
            ),
            Entry(
                name="vision.0.weight",
                kind="optim.exp_avg",
                full_shape=(rows, 5),
                boxes=parts(moment, flat[rank]),
            ),
            Entry(
                name="losses.clip.logit_scale",
                kind="param",
                full_shape=(),
                boxes=[((), torch.tensor(value + rank))],
            ),
        ]
        for rank in range(2)
    ]


def check_content(path: Path) -> None:
    """Everything in it is of its own step."""
    checkpoint = open_checkpoint(path)
    step = checkpoint.manifest.step
    assert path.name == f"step-{step}"
    assert checkpoint.manifest.state["sampler"]["step"] == step
    assert (checkpoint.load_whole("vision.0.weight") == step).all()
    assert (checkpoint.load_whole("vision.0.weight", "optim.exp_avg") == step + 0.5).all()
    assert checkpoint.load_whole("losses.clip.logit_scale").item() == step


# ---- boxes ----


shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[list[Box]]:
    """Boxes per rank: TP shards, plain or packed, or a flat slice each."""
    styles: list[tuple[ShardStyle | None, int, int]] = [(None, 1, 1)]
    cuts: list[tuple[ShardStyle, int, int]] = [
        ("colwise", 0, 1),
        ("rowwise", 1, 1),
        ("packed_colwise", 0, 2),
        ("packed_colwise", 0, 3),
    ]
    for style, dim, num_parts in cuts:
        size = shape[dim] if len(shape) > dim else 1
        counts = [n for n in range(2, size + 1) if size % (n * num_parts) == 0]
        styles.extend((style, count, num_parts) for count in counts)
    if draw(st.booleans()):
        style, count, num_parts = draw(st.sampled_from(styles))
        return [shard_boxes(shape, style, index, count, num_parts) for index in range(count)]
    numel = prod(shape)
    ends = [0, *sorted(draw(st.lists(st.integers(0, numel), max_size=4))), numel]
    return [flat_to_boxes(shape, lo, hi) for lo, hi in itertools.pairwise(ends)]


@st.composite
def reshardings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Box]], list[list[Box]]]:
    shape = draw(shapes)
    return shape, draw(layouts(shape)), draw(layouts(shape))


@settings(deadline=None)
@given(reshardings())
def test_any_layout_becomes_any_other_bit_for_bit(
    case: tuple[tuple[int, ...], list[list[Box]], list[list[Box]]],
) -> None:
    shape, old, new = case
    full = torch.arange(prod(shape), dtype=torch.float64).reshape(shape)
    stored = [(box, full[box.slices].clone()) for boxes in old for box in boxes]
    assert sum(box.num_elements for box, _ in stored) == full.numel()
    for boxes in new:
        for box in boxes:
            got = torch.full(box.sizes, torch.nan, dtype=torch.float64)
            for index, part in cover(box, [held for held, _ in stored]).pieces:
                there, value = stored[index]
                got[part.slices_in(box)] = value[part.slices_in(there)]
            assert torch.equal(got, full[box.slices])


@settings(deadline=None)
@given(shapes.flatmap(lambda s: st.tuples(st.just(s), st.integers(0, prod(s)))), st.data())
def test_flat_slice_is_its_boxes_one_after_another(
    case: tuple[tuple[int, ...], int], data: st.DataObject
) -> None:
    shape, lo = case
    hi = data.draw(st.integers(lo, prod(shape)))
    full = torch.arange(prod(shape)).reshape(shape)
    boxes = flat_to_boxes(shape, lo, hi)
    flat = [full[box.slices].reshape(-1) for box in boxes]
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.int64), *flat]), torch.arange(lo, hi))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@settings(deadline=None)
@given(reshardings(), st.data())
def test_a_missing_part_is_a_hole_and_named(
    case: tuple[tuple[int, ...], list[list[Box]], list[list[Box]]], data: st.DataObject
) -> None:
    shape, old, _ = case
    boxes = [box for rank in old for box in rank]
    lost = data.draw(st.integers(0, len(boxes) - 1))
    kept = boxes[:lost] + boxes[lost + 1 :]
    holes = cover(whole(shape), kept).holes
    assert sum(hole.num_elements for hole in holes) == boxes[lost].num_elements
    with pytest.raises(InvalidInputError, match=r"text\.1\.bias: \d+ of the wanted elements"):
        check_no_hole("text.1.bias", cover(whole(shape), kept))


def test_where_stored_boxes_overlap_the_first_serves_and_the_rest_is_filled() -> None:
    middle = Box(offsets=(1, 1), sizes=(2, 2))
    filled = cover(whole((4, 4)), [middle, whole((4, 4))])
    assert filled.holes == ()
    assert [part for index, part in filled.pieces if index == 0] == [middle]
    assert sum(part.num_elements for _, part in filled.pieces) == 16


def test_boxes_that_only_touch_have_nothing_in_common() -> None:
    left, right = Box(offsets=(0, 0), sizes=(4, 2)), Box(offsets=(0, 2), sizes=(4, 2))
    assert intersect(left, right) is None
    assert intersect(left, Box(offsets=(3, 1), sizes=(9, 9))) == Box(offsets=(3, 1), sizes=(1, 1))


def test_packed_shards_take_their_part_of_each_third() -> None:
    boxes = shard_boxes((12, 4), "packed_colwise", 1, 2, 3)
    assert [str(box) for box in boxes] == ["[2:4, 0:4]", "[6:8, 0:4]", "[10:12, 0:4]"]


def test_rowwise_bias_is_whole_and_odd_sizes_are_refused() -> None:
    assert shard_boxes((7,), "rowwise", 1, 2) == [whole((7,))]
    with pytest.raises(InvalidInputError, match=r"\[7, 3\] cannot be cut colwise in 2"):
        shard_boxes((7, 3), "colwise", 0, 2)


# ---- save and restore ----


@settings(max_examples=12, deadline=None)
@given(reshardings(), st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]))
def test_saved_under_one_layout_loads_under_another(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[tuple[int, ...], list[list[Box]], list[list[Box]]],
    dtype: torch.dtype,
) -> None:
    shape, old, new = case
    root = tmp_path_factory.mktemp("run") / "checkpoints"
    full = torch.randint(0, 2, shape).to(dtype)
    entries = [
        [Entry(name="m.0.w", kind="param", full_shape=shape, boxes=parts(full, boxes))]
        for boxes in old
    ]
    assert save_all(root, 4, entries) == [root / "step-4"] * len(old)
    checkpoint = open_checkpoint(root / "step-4")
    for boxes in new:
        for box, got in zip(boxes, checkpoint.load("m.0.w", "param", boxes), strict=True):
            assert got.dtype == dtype
            assert torch.equal(got, full[box.slices])


def test_state_meta_and_kinds_come_back_and_replicas_are_the_lowest_rank_s(tmp_path: Path) -> None:
    save_all(tmp_path, 7, two_rank_entries(7.0))
    check_content(tmp_path / "step-7")
    checkpoint = open_checkpoint(tmp_path / "step-7")
    assert checkpoint.manifest.meta == {"plan": "abc"}
    assert checkpoint.kinds("vision.0.weight") == ["param", "optim.exp_avg"]
    assert checkpoint.names() == ["vision.0.weight", "losses.clip.logit_scale"]
    (half,) = checkpoint.load("vision.0.weight", "param", [whole((6, 5))], torch.bfloat16)
    assert half.dtype == torch.bfloat16


def test_only_the_newest_stay_and_the_saved_one_always_does(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_all(tmp_path, step, two_rank_entries(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-20", "step-30"]
    save_all(tmp_path, 20, two_rank_entries(20), keep=1)  # went on from an earlier one
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-20", "step-30"]
    check_content(tmp_path / "step-20")


def test_one_of_each_so_many_hours_stays_and_the_newest_two_do(tmp_path: Path) -> None:
    def hours_left() -> list[float]:
        return [
            (path / "manifest.json").stat().st_mtime / 3600 for _, path in step_folders(tmp_path)
        ]

    hours = [0.0, 0.5, 1.0, 1.5, 2.25, 2.5, 3.0, 3.25, 3.5]
    seen: list[list[float]] = []
    for step, hour in enumerate(hours):
        manifest = tmp_path / f"step-{step}" / "manifest.json"
        manifest.parent.mkdir()
        manifest.touch()
        os.utime(manifest, (0, 3600 * hour))
        drop_old(tmp_path, step, 2, 3600.0)
        seen.append(hours_left())
    assert seen[3] == [0.0, 1.0, 1.5]
    assert seen[-1] == [0.0, 1.0, 2.25, 3.25, 3.5]
    drop_old(tmp_path, 8, 2, 10 * 3600.0)
    assert hours_left() == [0.0, 3.25, 3.5]
    # One of a later step, which is done again, stays; the newest does, whatever is asked.
    drop_old(tmp_path, 7, 0)
    assert hours_left() == [3.25, 3.5]


def test_other_model_is_refused_by_name_and_shape(tmp_path: Path) -> None:
    save_all(tmp_path, 1, two_rank_entries(1.0))
    checkpoint = open_checkpoint(tmp_path / "step-1")
    with pytest.raises(InvalidInputError, match=r"no vision\.0\.weights .*but vision\.0\.weight"):
        checkpoint.load("vision.0.weights", "param", [])
    with pytest.raises(InvalidInputError, match=r"has shape \(6, 4\), .* holds \(6, 5\)"):
        checkpoint.load("vision.0.weight", "param", [], full_shape=(6, 4))


def test_parts_that_are_not_a_whole_tensor_are_refused_before_anything_is_lost(
    tmp_path: Path,
) -> None:
    save_all(tmp_path, 1, two_rank_entries(1.0))
    broken = two_rank_entries(2.0)
    broken[1] = broken[1][1:]
    first, second = save_all(tmp_path, 2, broken)
    assert isinstance(first, RunFailedError)
    assert "vision.0.weight (param): no rank saves its part [3:6, 0:5]" in first.message
    assert isinstance(second, RunFailedError)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    for error in save_all(tmp_path, 1, broken):  # the same step again: nobody takes it for saved
        assert isinstance(error, RunFailedError)
    check_content(tmp_path / "step-1")


def test_a_rank_that_fails_leaves_nobody_waiting(tmp_path: Path) -> None:
    entries = two_rank_entries(1.0)
    bad = torch.zeros(6, 5, dtype=torch.complex64)
    entries[1].append(Entry(name="x", kind="param", full_shape=(6, 5), boxes=[((0, 0), bad)]))
    first, second = save_all(tmp_path, 1, entries)
    assert isinstance(first, MMPlanError)
    assert isinstance(second, MMPlanError)
    assert "complex64" in first.message
    assert list(tmp_path.iterdir()) == []


# ---- damage ----


def flip(path: Path, position: int, bit: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def test_any_flipped_bit_of_the_manifest_is_refused(tmp_path: Path) -> None:
    save_all(tmp_path, 1, two_rank_entries(1.0))
    path = tmp_path / "step-1" / "manifest.json"
    for position, bit in itertools.product(range(path.stat().st_size), range(8)):
        flip(path, position, bit)
        with pytest.raises(InvalidInputError, match=r"manifest\.json is damaged"):
            open_checkpoint(tmp_path / "step-1")
        flip(path, position, bit)
    check_content(tmp_path / "step-1")


@pytest.mark.parametrize("name", ["rank-0.safetensors", "rank-1.safetensors"])
def test_any_flipped_bit_of_a_file_is_refused_and_the_mend_named(tmp_path: Path, name: str) -> None:
    save_all(tmp_path, 1, two_rank_entries(1.0))
    save_all(tmp_path, 2, two_rank_entries(2.0))
    path = tmp_path / "step-2" / name
    size = path.stat().st_size
    for position, bit in itertools.product(range(0, size, 7), range(8)):
        flip(path, position, bit)
        with pytest.raises(InvalidInputError, match=f"{name} is damaged") as caught:
            check_content(tmp_path / "step-2")
        assert f"resume from the one before, {tmp_path / 'step-1'}" in (caught.value.hint or "")
        flip(path, position, bit)
    check_content(tmp_path / "step-2")


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_job_hashes_each_file_once_and_all_ranks_hear_of_damage(
    tmp_path: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(tmp_path, 1, two_rank_entries(1.0))
    ranks, path, hashed = Ranks(num_ranks), tmp_path / "step-1", list[str]()
    monkeypatch.setattr(restore, "_sha256", lambda file: hashed.append(file.name) or sha256(file))

    def one(rank: int) -> str:
        try:
            prove(path, rank=rank, num_ranks=num_ranks, gather=ranks.gather(rank))
        except InvalidInputError as error:
            return error.message
        opened = open_checkpoint(path, proven=True)
        assert opened.load_whole("vision.0.weight")[0, 0] == 1.0
        return ""

    with ThreadPoolExecutor(num_ranks) as pool:
        assert {*pool.map(one, range(num_ranks))} == {""}
        assert sorted(hashed) == ["rank-0.safetensors", "rank-1.safetensors"]
        flip(path / "rank-1.safetensors", 200, 3)
        (said,) = {*pool.map(one, range(num_ranks))}
    assert "rank-1.safetensors is damaged" in said


def test_a_short_a_missing_and_a_newer_file_are_refused(tmp_path: Path) -> None:
    save_all(tmp_path, 1, two_rank_entries(1.0))
    path = tmp_path / "step-1" / "rank-1.safetensors"
    whole_file = path.read_bytes()
    path.write_bytes(whole_file[:-1])
    with pytest.raises(InvalidInputError, match="the manifest says"):
        open_checkpoint(tmp_path / "step-1")
    path.unlink()
    with pytest.raises(InvalidInputError, match=r"rank-1\.safetensors is missing") as caught:
        open_checkpoint(tmp_path / "step-1")
    assert "no earlier checkpoint" in (caught.value.hint or "")


# ---- kills ----


def save_forever(root: Path, rows: int) -> None:
    torch.set_num_threads(1)
    newest = latest(root)
    step = open_checkpoint(newest).manifest.step if newest else 0
    while True:
        step += 1
        save_all(root, step, two_rank_entries(float(step), rows))


def wait_for(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end_s, "the saving process did not get going"
        time.sleep(0.001)


def kill_while_saving(root: Path, num_kills: int) -> None:
    """Kill a saving process until so many kills have left a half-written folder behind."""
    pick, num_cut_short = random.Random(0), 0
    while num_cut_short < num_kills:
        before = latest(root)
        child = FORK.Process(target=save_forever, args=(root, 20_000), daemon=True)
        child.start()
        wait_for(lambda before=before: latest(root) != before)
        time.sleep(pick.uniform(0, 0.06))
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        num_cut_short += any(path.name.startswith(".") for path in root.iterdir())
        clean(root)
        newest = latest(root)
        assert newest is not None
        check_content(newest)
        assert all(path.name.startswith("step-") for path in root.iterdir())


def test_ten_kills_during_the_save_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, 10)


@pytest.mark.slow
def test_fifty_kills_during_the_save_leave_a_whole_checkpoint(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, 50)


@pytest.mark.parametrize("step", [2, 3], ids=["the same step again", "a new step"])
def test_a_kill_before_every_single_change_of_the_disk(tmp_path: Path, step: int) -> None:
    outcomes: list[str] = []
    for call in itertools.count():
        root = tmp_path / str(call)
        for earlier in (1, 2):
            save_all(root, earlier, two_rank_entries(float(earlier)))
        entries = two_rank_entries(float(step))
        killed = killed_at(call, lambda root=root, entries=entries: save_all(root, step, entries))
        clean(root)
        newest = latest(root)
        assert newest is not None
        for path in root.iterdir():
            check_content(path)
        outcomes.append(newest.name)
        if not killed:
            break
    assert len(outcomes) > 15
    assert outcomes[0] == "step-2"
    assert outcomes[-1] == f"step-{step}"


def test_everything_is_on_the_disk_before_its_name_and_names_before_old_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(tmp_path, 1, two_rank_entries(1.0))
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        events.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def noted_rename(self: Path, target: Path) -> Path:
        events.append(f"rename {self.name} {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    save_all(tmp_path, 2, two_rank_entries(2.0), keep=1)
    published = events.index("rename .step-2.tmp step-2")
    before, after = events[:published], events[published + 1 :]
    for name in ("rank-0.safetensors", "rank-1.safetensors", "manifest.json"):
        assert f"sync {name}" in before
    assert before[-1] == "sync .step-2.tmp"
    assert after == [f"sync {tmp_path.name}", "rename step-1 .step-1.drop"]


# ---- full disks ----


@contextlib.contextmanager
def tiny_disk(path: Path, size: str) -> Generator[None]:
    libc = ctypes.CDLL(None, use_errno=True)
    path.mkdir()
    options = f"size={size}".encode()
    if libc.mount(b"tmpfs", bytes(path), b"tmpfs", 0, options) != 0:
        pytest.skip(f"mounting a tmpfs is not permitted: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.umount2(bytes(path), 2)


def test_full_disk_is_one_clear_error_and_the_earlier_checkpoint_stays(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with tiny_disk(disk, "256k"):
        root = disk / "checkpoints"
        save_all(root, 1, two_rank_entries(1.0, rows=100))
        for error in save_all(root, 2, two_rank_entries(2.0, rows=10_000)):
            assert isinstance(error, MMPlanError)
        error = save_all(root, 2, two_rank_entries(2.0, rows=10_000))[0]
        assert isinstance(error, UnfitEnvironmentError)
        assert f"needs 600 kB in {root}, " in error.message
        assert "are free" in error.message
        assert "goes on from step-1" in (error.hint or "")
        assert [path.name for path in root.iterdir()] == ["step-1"]
        check_content(root / "step-1")


def test_a_disk_that_is_full_at_any_point_of_the_save(tmp_path: Path) -> None:
    disk, page_bytes = tmp_path / "disk", os.sysconf("SC_PAGE_SIZE")
    with tiny_disk(disk, "128k"):
        root, filler = disk / "checkpoints", disk / "filler"
        save_all(root, 1, two_rank_entries(1.0))
        saved: list[bool] = []
        for num_free in range(12):
            free_bytes = os.statvfs(disk).f_bavail * page_bytes
            filler.write_bytes(bytes(free_bytes - num_free * page_bytes))
            outcomes = save_all(root, 2, two_rank_entries(2.0, rows=60), keep=2)
            filler.unlink()
            saved.append(outcomes == [root / "step-2"] * 2)
            if not saved[-1]:
                assert all(isinstance(error, MMPlanError) for error in outcomes)
                assert "disk full" in outcomes[0].message
                assert [path.name for path in root.iterdir()] == ["step-1"]
            check_content(root / "step-1")
        assert not saved[0]
        assert saved[-1]


def save_under_a_limit(root: Path, answer: Any) -> None:
    torch.set_num_threads(1)  # the parent's thread pool is not in a forked child
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    outcomes = save_all(root, 2, two_rank_entries(2.0, rows=10_000))
    answer.send([(type(o).__name__, o.message, o.exit_code) for o in outcomes])


def test_a_file_that_may_not_grow_is_one_clear_error(tmp_path: Path) -> None:
    save_all(tmp_path, 1, two_rank_entries(1.0))
    receiver, sender = FORK.Pipe(duplex=False)
    child = FORK.Process(target=save_under_a_limit, args=(tmp_path, sender), daemon=True)
    child.start()
    assert receiver.poll(20)
    for name, message, exit_code in receiver.recv():
        assert (name, exit_code) == ("UnfitEnvironmentError", 4)
        assert "File too large" in message
    child.join()
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    check_content(tmp_path / "step-1")


def test_root_that_is_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    for error in save_all(tmp_path / "checkpoints", 2, two_rank_entries(2.0)):
        assert isinstance(error, UnfitEnvironmentError)
