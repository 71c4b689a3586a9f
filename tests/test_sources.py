"""Datasets of files, mixtures, and the order of their samples."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import multiprocessing
import runpy
import shutil
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmlaunch.data.loader import StepLoader, step_indices
from mmlaunch.session.reference import _Samples
from mmplan.errors import InvalidInputError
from mmplan.schema.factories import build_dataset
from mmplan.schema.workload import DataSpec, load_workload
from mmplan.sources.mixture import Mixture
from mmplan.sources.orders import epoch_length, epoch_order, shuffled, shuffled_nearby
from mmplan.sources.tar_shards import TarShards
from mmplan.zoo.digits import captioned

EXAMPLE = Path(__file__).parent.parent / "examples" / "clip-shards"
SIZES = (5, 1, 7)


def write_shards(folder: Path, sizes: tuple[int, ...] = SIZES) -> list[Path]:
    """Sample i has the fields ``x``, three times i, and ``label``, i."""
    numbers = itertools.count()
    paths: list[Path] = []
    for shard, size in enumerate(sizes):
        paths.append(folder / f"part-{shard}.tar")
        with tarfile.open(paths[-1], "w", format=tarfile.PAX_FORMAT) as tar:
            for index in itertools.islice(numbers, size):
                array = io.BytesIO()
                np.save(array, np.full(3, index))
                # Names that tar puts into a header of their own.
                name = f"{'deep/' * (40 * (index % 2))}{index:04d}"
                add(tar, f"{name}.x.npy", array.getvalue())
                add(tar, f"{name}.label.cls", str(index).encode())
    return paths


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def open_shards(folder: Path, **args: Any) -> TarShards:
    data = DataSpec(
        factory="mmplan.sources.tar_shards:tar_shards",
        args={"shards": f"part-{{0..{len(SIZES) - 1}}}.tar", **args},
    )
    return build_dataset(data, folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(tmp_path)
    return tmp_path


# ---- shards ----


def test_every_sample_is_read_at_its_place(folder: Path) -> None:
    made, read = open_shards(folder), open_shards(folder)
    assert len(made) == len(read) == sum(SIZES)
    for index in (12, 0, 5, 6, 11, 4):
        for data in (made, read):
            sample = data[index]
            assert sample["x"].tolist() == [index] * 3
            assert sample["label"].item() == index


def test_an_index_of_other_shards_is_made_anew(folder: Path) -> None:
    index = (folder / "part-0.index").read_bytes() if open_shards(folder) else b""
    write_shards(folder, (5, 2, 7))
    assert open_shards(folder)[6]["label"].item() == 6
    assert (folder / "part-0.index").read_bytes() != index


def test_a_million_samples_open_with_the_work_of_a_few(folder: Path) -> None:
    """By calls: nothing is read or made for each sample; benchmarks/bench_data.py has the time."""
    assert len(open_shards(folder)) == sum(SIZES)
    _, few = _calls(lambda: open_shards(folder))
    path = folder / "part-0.index"
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps({**json.loads(content[8:start]), "samples": 10**6}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + content[start:])
        file.truncate(8 + len(header) + 16 * 10**6)
    data, many = _calls(lambda: open_shards(folder))
    assert len(data) == 10**6
    assert many < few + 100
    assert few < 20_000


def _calls(run: Callable[[], TarShards]) -> tuple[TarShards, int]:
    counts = Counter[str]()
    sys.setprofile(lambda _, event, __: counts.update([event]))
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return result, counts["call"] + counts["c_call"]


def test_processes_that_start_together_make_one_index(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        assert pool.map(_open_and_read, [folder] * 4) == [12] * 4
    assert not list(folder.glob("*.part"))


def _open_and_read(folder: Path) -> int:
    return int(open_shards(folder)[12]["label"])


def _compressed(folder: Path) -> None:
    path = folder / "part-1.tar"
    path.write_bytes(gzip.compress(path.read_bytes()))


def _missing(folder: Path) -> None:
    (folder / "part-2.tar").unlink()


def _with_a_link(folder: Path) -> None:
    with tarfile.open(folder / "part-1.tar", "a") as tar:
        link = tarfile.TarInfo("0099.x.npy")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)


def _field_twice(folder: Path) -> None:
    with tarfile.open(folder / "part-2.tar", "a") as tar:
        add(tar, "deep/9.cls", b"1")
        add(tar, "deep/9.cls", b"2")


def _odd_index(folder: Path) -> None:
    (folder / "part-0.index").write_bytes(b"\xff" * 100)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_compressed, "part-1.tar: not an uncompressed tar file"),
        (_missing, "part-2.tar: No such file or directory"),
        (_with_a_link, "part-1.tar: 0099.x.npy is no file"),
        (_field_twice, "part-2.tar: sample deep/9 has a field twice"),
        (_odd_index, "part-0.index: not an index of tar files"),
    ],
)
def test_shards_that_cannot_be_read_are_refused(
    folder: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(folder)
    with pytest.raises(InvalidInputError) as caught:
        open_shards(folder)
    assert said in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"window": 0}, "window is 0"),
        ({"shards": "part-{2..1}.tar"}, "no shards from 2 to 1"),
        ({"index": "not/there.index"}, "the index of the shards cannot be written"),
        ({"decode": "tests.test_sources:nothing"}, "has no 'nothing'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    folder: Path, args: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidInputError, match=r"data\.factory") as caught:
        open_shards(folder, **args)
    assert said in caught.value.message


def test_a_shard_that_changed_is_named(folder: Path) -> None:
    data = open_shards(folder)
    path = folder / "part-2.tar"
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"part-2.tar: sample 6 is not at byte 0"):
        data[6]


def test_a_field_that_nothing_decodes_is_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "part-0.tar", "w") as tar:
        add(tar, "7.txt", b"seven")
    with pytest.raises(InvalidInputError, match=r"sample 7: nothing decodes 'txt'"):
        open_shards(tmp_path, shards="part-0.tar")


def test_the_example_s_shards_hold_the_demo_s_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same order: what is trained on them has the same weights."""
    shutil.copytree(EXAMPLE, tmp_path / "clip")
    monkeypatch.setattr("sys.argv", ["make_shards.py", str(tmp_path / "clip")])
    runpy.run_path(str(tmp_path / "clip" / "make_shards.py"), run_name="__main__")
    workload = load_workload(tmp_path / "clip" / "workload.yaml")
    assert workload.data is not None
    data, whole = build_dataset(workload.data, tmp_path / "clip"), captioned("train")
    assert len(data) == len(whole)
    for index in range(len(data)):
        found, expected = data[index], whole[index]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert step_indices(data, 256, 0, 7) == step_indices(whole, 256, 0, 7)


# ---- orders ----


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(1, 30),
    st.integers(-5, 2**40),
    st.integers(0, 5),
)
def test_nearby_orders_move_samples_by_less_than_the_window(
    sizes: list[int], window: int, seed: int, epoch: int
) -> None:
    starts = [0, *itertools.accumulate(sizes)]
    order = shuffled_nearby(starts, seed, epoch, window=window).tolist()
    assert sorted(order) == list(range(sum(sizes)))
    still = shuffled_nearby(starts, seed, epoch, window=1).tolist()
    # Groups are whole, their samples in order.
    groups = [k for k, _ in itertools.groupby(np.searchsorted(starts, still, "right").tolist())]
    assert len(groups) == sum(size > 0 for size in sizes)
    assert all(abs(order.index(x) - place) < window for place, x in enumerate(still))


# ---- mixtures ----


class Numbers:
    """Samples of one number."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.tensor(self.first + index)}


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 7), st.floats(0.05, 5.0)), min_size=1, max_size=4),
    st.integers(1, 25),
    st.integers(0, 2**40),
)
def test_a_mixture_takes_its_shares_and_every_sample_in_turn(
    parts: list[tuple[int, float]], length: int, seed: int
) -> None:
    datasets = [Numbers(100 * k, n) for k, (n, _) in enumerate(parts)]
    data = Mixture(datasets, [weight for _, weight in parts], length)
    total = sum(weight for _, weight in parts)
    seen: list[Counter[int]] = [Counter() for _ in parts]
    for epoch in range(4):
        order = data.epoch_order(seed, epoch)
        assert len(order) == data.epoch_length == length
        taken = [int(data[index]["x"]) for index in order]
        by_part = Counter(x // 100 for x in taken)
        for k, (count, weight) in enumerate(parts):
            assert abs(by_part[k] - length * weight / total) < 1
            seen[k].update(x for x in taken if x // 100 == k)
            times = [seen[k][100 * k + i] for i in range(count)]
            assert max(times) - min(times) <= 1


def test_an_epoch_sees_every_sample_by_default() -> None:
    data = Mixture([Numbers(0, 10), Numbers(100, 3)], [1, 1])
    assert data.epoch_length == 20
    taken = Counter(data.epoch_order(3, 0).tolist())
    assert set(taken) == set(range(13))
    assert sum(taken[i] for i in range(10)) == 10


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([], "a mixture has no parts"),
        ([{"weight": 1}], r"parts\[0\]: no factory"),
        ([{"factory": "a:b", "wieght": 1}], r"parts\[0\]: unknown field 'wieght'"),
        ([{"factory": "tests.test_sources:Numbers", "weight": 0}], r"parts\[0\].weight is 0"),
        ([{"factory": "nowhere:b"}], r"parts\[0\].factory: nowhere:b: there is no module"),
    ],
)
def test_parts_that_are_wrong_are_named(
    tmp_path: Path, parts: list[Mapping[str, Any]], said: str
) -> None:
    data = DataSpec(factory="mmplan.sources.mixture:mixture", args={"parts": parts})
    with pytest.raises(InvalidInputError, match=said):
        build_dataset(data, tmp_path)


class Told(Numbers):
    """Numbers whose work is known."""

    def work(self, index: int) -> dict[str, float]:
        return {"v": float(self.first + index)}


class Named:
    """Samples of another field."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"y": torch.tensor(index)}


def test_parts_offer_the_same() -> None:
    both: Any = Mixture([Told(0, 4), Told(100, 4)], [1, 1])
    assert both.work(5) == {"v": 101.0}
    with pytest.raises(InvalidInputError, match=r"parts\[1\] has no work\(\), others have"):
        Mixture([Told(0, 4), Numbers(0, 4)], [1, 1])
    with pytest.raises(InvalidInputError, match=r"parts\[0\] has the fields x, parts\[1\] has y"):
        Mixture([Numbers(0, 4), Named()], [1, 1])


# ---- the stream ----


def sources(folder: Path) -> dict[str, Any]:
    """One dataset of every kind."""
    shards = {"shards": f"part-{{0..{len(SIZES) - 1}}}.tar"}
    parts = [
        {"factory": "mmplan.sources.tar_shards:tar_shards", "args": shards, "weight": 2},
        {
            "factory": "mmplan.sources.tar_shards:tar_shards",
            "args": {**shards, "window": 3},
            "weight": 1.5,
        },
    ]
    mixed = DataSpec(factory="mmplan.sources.mixture:mixture", args={"parts": parts, "epoch": 17})
    return {
        "numbers": Numbers(0, 20),
        "shards": open_shards(folder),
        "nearby": open_shards(folder, window=4),
        "mixture": build_dataset(mixed, folder),
    }


KINDS = ("numbers", "shards", "nearby", "mixture")


@pytest.mark.parametrize("workers", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
@pytest.mark.parametrize("kind", KINDS)
def test_the_stream_follows_from_seed_and_step(folder: Path, kind: str, workers: int) -> None:
    """Whoever loads it, in how many processes, in which parts, from which step on."""
    data, batch = sources(folder)[kind], 6
    expected = {
        step: [data[i]["x"].flatten()[0].item() for i in step_indices(data, batch, 3, step)]
        for step in range(9)
    }
    for start, ranges in ((0, [(0, 6)]), (4, [(1, 3), (5, 6)])):
        loader = StepLoader(
            data,
            batch=batch,
            seed=3,
            ranges=ranges,
            fields=["x"],
            start_step=start,
            num_workers=workers,
        )
        try:
            for step in range(start, 9):
                given = next(loader)
                for low, high in ranges:
                    values = given.get("x", low, high)
                    assert isinstance(values, Tensor)
                    assert values.reshape(high - low, -1)[:, 0].tolist() == expected[step][low:high]
        finally:
            loader.close()


@pytest.mark.parametrize("kind", KINDS)
def test_verification_takes_the_same_samples(folder: Path, kind: str) -> None:
    data = sources(folder)[kind]
    reference = object.__new__(_Samples)
    reference.dataset, reference._batch, reference._seed = data, 6, 3
    steps = range(9)
    assert [reference.indices(s) for s in steps] == [step_indices(data, 6, 3, s) for s in steps]


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_differ_and_come_again(folder: Path, kind: str) -> None:
    data, other = sources(folder)[kind], sources(folder)[kind]
    orders = [epoch_order(data, 5, epoch).tolist() for epoch in (0, 1, 1_000_000)]
    assert all(len(order) == epoch_length(data) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert orders == [epoch_order(other, 5, epoch).tolist() for epoch in (0, 1, 1_000_000)]
    assert shuffled(7, 5, 0).tolist() != shuffled(7, 6, 0).tolist()
