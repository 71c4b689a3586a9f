"""Data: the contract's order, each needed sample once, any cut of it the same; weights too."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from mmlaunch.checkpoint.boxes import Box, whole
from mmlaunch.checkpoint.exported_weights import WeightSource, weights_order, write_weights
from mmlaunch.checkpoint.tensorfile import TensorSpec
from mmlaunch.comm.batches import cat_samples, num_samples, slice_samples
from mmlaunch.data.loader import (
    StepData,
    StepLoader,
    check_dataset,
    check_fields,
    merge_ranges,
    step_indices,
)
from mmplan.errors import InvalidInputError, RunFailedError, UnfitEnvironmentError
from mmplan.ragged import Ragged
from tests.disk_kills import killed_at


class Numbers(Dataset[dict[str, Any]]):
    """Sample i: image [2] full of i, ids a scalar i, patches Ragged with i % 3 rows of i."""

    def __init__(self, num: int = 10) -> None:
        self.num = num
        self.loaded: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.loaded[index] += 1
        rows = torch.full((index % 3, 4), float(index))
        return {
            "image": torch.full((2,), float(index)),
            "ids": torch.tensor(index),
            "patches": Ragged(rows, torch.tensor([len(rows)])),
        }


def loader(dataset: Any, **changes: Any) -> StepLoader:
    given_: dict[str, Any] = {"batch": 4, "seed": 5, "ranges": [(0, 4)], "fields": ["ids"]}
    return StepLoader(dataset, **{**given_, **changes})


@pytest.fixture
def closing() -> Iterator[Callable[..., StepLoader]]:
    """A ``loader`` that is closed at the end, whatever happens."""
    opened: list[StepLoader] = []

    def make(dataset: Any, **changes: Any) -> StepLoader:
        opened.append(loader(dataset, **changes))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


# ---- order ----


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 2**31), st.integers(0, 30))
def test_order_is_the_contract_s(num: int, batch: int, seed: int, step: int) -> None:
    if num < batch:
        with pytest.raises(InvalidInputError, match=f"has {num} samples?, one batch takes {batch}"):
            step_indices(range(num), batch, seed, step)
        return
    per_epoch = num // batch
    generator = torch.Generator().manual_seed(seed + step // per_epoch)
    batches = torch.randperm(num, generator=generator).split(batch)[:per_epoch]
    assert step_indices(range(num), batch, seed, step) == batches[step % per_epoch].tolist()


def test_every_sample_at_most_once_per_epoch_and_epochs_differ() -> None:
    epochs = [
        [i for s in range(3) for i in step_indices(range(10), 3, 0, 3 * e + s)] for e in range(2)
    ]
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert epochs[0] != epochs[1]


# ---- ranges ----


def tensor_of(data: StepData, field: str, start: int, stop: int) -> Tensor:
    """Samples of a field that is not ragged."""
    values = data.get(field, start, stop)
    assert isinstance(values, Tensor)
    return values


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=6))
def test_merged_ranges_are_the_union(ranges: list[tuple[int, int]]) -> None:
    merged = merge_ranges(ranges)
    union = {i for low, high in ranges for i in range(low, high)}
    assert [i for low, high in merged for i in range(low, high)] == sorted(union)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_part_equals_the_same_part_of_the_whole_batch(
    num_workers: int, closing: Callable[..., StepLoader]
) -> None:
    fields = ["image", "ids", "patches"]
    full = closing(Numbers(), batch=8, ranges=[(0, 8)], fields=fields)
    part = closing(
        Numbers(), batch=8, ranges=[(5, 8), (1, 3), (2, 3)], fields=fields, num_workers=num_workers
    )
    for step in range(3):
        want, got = next(full), next(part)
        assert got.step == step
        assert tensor_of(want, "ids", 0, 8).tolist() == step_indices(range(10), 8, 5, step)
        for field in fields:
            for start, stop in ((1, 3), (2, 3), (5, 8), (6, 7)):
                left, right = want.get(field, start, stop), got.get(field, start, stop)
                assert num_samples(left) == stop - start
                torch.testing.assert_close(left, right, rtol=0, atol=0)
        with pytest.raises(KeyError, match=r"\[2, 6\)"):
            got.get("ids", 2, 6)


def test_each_needed_sample_is_loaded_once_and_no_other() -> None:
    dataset = Numbers(40)
    next(loader(dataset, batch=16, ranges=[(2, 6), (4, 9), (12, 13)]))
    order = step_indices(range(40), 16, 5, 0)
    assert dataset.loaded == Counter(order[2:9] + order[12:13])


def test_a_rank_that_needs_nothing_loads_nothing() -> None:
    dataset = Numbers()
    assert next(loader(dataset, ranges=[], fields=[])).fields == {}
    assert not dataset.loaded


def test_start_step_goes_on_where_the_unbroken_run_would_be() -> None:
    unbroken = loader(Numbers())
    for _ in range(7):
        next(unbroken)
    resumed = next(loader(Numbers(), start_step=7))
    assert resumed.step == 7
    assert torch.equal(tensor_of(resumed, "ids", 0, 4), tensor_of(next(unbroken), "ids", 0, 4))


class Augmented(Numbers):
    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002
        return {"image": torch.tensor(noise)}


def test_augmentation_depends_on_the_sample_only(closing: Callable[..., StepLoader]) -> None:
    full = closing(Augmented(), fields=["image"])
    part = closing(Augmented(), fields=["image"], ranges=[(2, 4)], num_workers=1)
    first = [tensor_of(next(full), "image", 2, 4) for _ in range(4)]
    for want in first:
        torch.testing.assert_close(next(part).get("image", 2, 4), want, rtol=0, atol=0)
    assert len({value.item() for image in first for value in image.view(-1)}) == 24


def test_loading_leaves_the_model_s_random_numbers_alone() -> None:
    torch.manual_seed(1)
    random.seed(1)
    want = torch.rand(3), random.random()
    torch.manual_seed(1)
    random.seed(1)
    next(loader(Augmented(), fields=["image"]))
    assert torch.equal(torch.rand(3), want[0])
    assert random.random() == want[1]


class Padded(Numbers):
    @staticmethod
    def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {"double": torch.stack([2 * sample["ids"] for sample in samples])}


def test_a_dataset_s_own_collate_is_used() -> None:
    got = tensor_of(next(loader(Padded(), fields=["double"])), "double", 1, 3)
    assert got.tolist() == [2 * i for i in step_indices(range(10), 4, 5, 0)[1:3]]


# ---- wrong data ----


class Odd(Numbers):
    """Sample 3 is changed by a function."""

    def __init__(self, change: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__()
        self.change = change

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return self.change(sample) if index == 3 else sample


def boom(_: Any) -> Any:
    raise ValueError("bad jpeg")


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda s: s["ids"], InvalidInputError, r"dataset\[3\] is a Tensor, not a dict"),
        (lambda s: {**s, "ids": 3}, InvalidInputError, r"dataset\[3\]\['ids'\] is a int"),
        (
            lambda s: {**s, "ids": torch.zeros(5).long()},
            InvalidInputError,
            r"'ids' differs within a batch: dataset\[\d\] has .*, dataset\[\d\] has ",
        ),
        (
            lambda s: {**s, "ids": torch.tensor(0.5)},
            InvalidInputError,
            r"'ids' differs.*torch\.(float32|int64).*torch\.(float32|int64)",
        ),
        (
            lambda s: {"image": s["image"]},
            InvalidInputError,
            r"dataset\[3\] has no field 'ids'; it has image",
        ),
        (
            lambda s: {**s, "patches": Ragged(torch.zeros(2, 4), torch.tensor([1, 1]))},
            InvalidInputError,
            r"Ragged with 2 rows and lengths \[1, 1\]",
        ),
        (boom, RunFailedError, r"^dataset\[3\] raised ValueError: bad jpeg$"),
    ],
)
def test_a_wrong_sample_is_one_clear_error(
    change: Callable[[Any], Any],
    error: type[Exception],
    match: str,
    num_workers: int,
    closing: Callable[..., StepLoader],
) -> None:
    data = closing(Odd(change), batch=10, ranges=[(0, 10)], num_workers=num_workers)
    with pytest.raises(error, match=match) as caught:
        next(data)
    if error is RunFailedError:
        assert "in boom" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: {"ids": s["ids"]}, r"^dataset\[3\] has no field 'patches'; it has ids$"),
        (lambda s: {**s, "patches": None}, r"^dataset\[3\]\['patches'\] is a NoneType"),
        (
            lambda s: {**s, "patches": Ragged(torch.zeros(0), torch.tensor([0]))},
            r"^field 'patches' differs within a batch: dataset\[\d\] has Ragged rows \[4?\]",
        ),
    ],
)
def test_a_sample_without_a_modality_is_told_how_to_say_so(
    change: Callable[[Any], Any], match: str
) -> None:
    with pytest.raises(InvalidInputError, match=match) as caught:
        next(loader(Odd(change), batch=10, ranges=[(0, 10)], fields=["patches"]))
    assert "mmplan.Ragged(rows, torch.tensor([0]))" in str(caught.value.hint)


def test_a_field_that_nothing_has_is_named_with_those_that_exist() -> None:
    with pytest.raises(InvalidInputError, match="no field 'text'; it has ids, image, patches"):
        next(loader(Numbers(), fields=["text"]))


class Dying(Numbers):
    def __getitem__(self, index: int) -> dict[str, Any]:
        os._exit(9)


def test_a_loading_process_that_dies_is_one_clear_error(closing: Callable[..., StepLoader]) -> None:
    with pytest.raises(RunFailedError, match="step 0: DataLoader worker"):
        next(closing(Dying(), num_workers=1))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


@pytest.mark.parametrize("wrong", [Stream(), {"a": 1}, 5, "text", torch.zeros(9)])
def test_what_is_no_dataset_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"returned a {type(wrong).__name__}, not a map-"):
        check_dataset(wrong, 4)


def test_too_few_samples_and_a_field_like_a_module_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="has 3 samples, one batch takes 4"):
        loader(Numbers(3))
    with pytest.raises(InvalidInputError, match="data field 'image' has the name of a module"):
        check_fields(Numbers()[0], ["text", "image"])


class Short(Numbers):
    @staticmethod
    def collate(samples: list[dict[str, Any]]) -> Any:
        return {"ids": torch.stack([sample["ids"] for sample in samples[1:]])}


def test_a_collate_that_loses_a_sample_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="gave field 'ids' 3 samples of 4"):
        next(loader(Short()))


def test_close_ends_the_loading_processes() -> None:
    data = loader(Pids(), fields=["pid"], num_workers=2)
    pids = {int(tensor_of(next(data), "pid", 0, 1)) for _ in range(4)}
    assert len(pids) == 2
    data.close()
    end_s = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(StopIteration):
        next(data)


class Pids(Numbers):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pid": torch.tensor(os.getpid())}


# ---- batches ----


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, Any]:
    num = draw(st.integers(1, 6))

    def leaf(kind: str) -> Any:
        if kind == "none":
            return None
        if kind == "ragged":
            lengths = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=num, max_size=num)))
            return Ragged(torch.arange(int(lengths.sum()) * 2).reshape(-1, 2), lengths)
        return torch.arange(num * 3).reshape(num, 3)

    kinds = draw(st.lists(st.sampled_from(["none", "ragged", "tensor"]), min_size=1, max_size=3))
    return num, (torch.arange(num), (leaf(kinds[0]),), *map(leaf, kinds[1:]))


@settings(deadline=None)
@given(trees(), st.data())
def test_cut_and_joined_a_batch_is_itself(case: tuple[int, Any], data: st.DataObject) -> None:
    num, tree = case
    cuts = sorted(data.draw(st.sets(st.integers(1, num), max_size=3)))
    ends = [0, *(cut for cut in cuts if cut < num), num]
    pieces = [slice_samples(tree, a, b) for a, b in itertools.pairwise(ends)]
    assert [num_samples(piece) for piece in pieces] == [b - a for a, b in itertools.pairwise(ends)]
    joined = cat_samples(pieces)
    assert equal(joined, tree)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return a is b if a is None else torch.equal(a, b)


def test_batches_of_another_build_are_refused() -> None:
    with pytest.raises(RunFailedError, match=r"\['Tensor', 'NoneType'\]"):
        cat_samples([torch.zeros(1), None])
    with pytest.raises(RunFailedError, match="a batch holds a list"):
        slice_samples([1], 0, 1)  # pyright: ignore[reportArgumentType]


# ---- weights ----


WEIGHTS = {
    "vision.0.weight": torch.arange(24.0).reshape(4, 6),
    "vision.0.mask": torch.tensor([True, False, True]),
    "losses.clip.logit_scale": torch.tensor(2.5, dtype=torch.float64),
    "text.0.weight": torch.arange(30).reshape(5, 6).to(torch.bfloat16),
}
SPECS = [TensorSpec(name=k, dtype=v.dtype, shape=tuple(v.shape)) for k, v in WEIGHTS.items()]


def test_one_file_is_read_by_safetensors_and_by_us(tmp_path: Path) -> None:
    path = tmp_path / "final.safetensors"
    assert write_weights(path, SPECS, WEIGHTS.__getitem__) == [path]
    got = load_file(path)
    assert got.keys() == WEIGHTS.keys()
    assert all(torch.equal(got[name], value) for name, value in WEIGHTS.items())
    for name, (start, header) in data_starts(path).items():
        assert start % WEIGHTS[name].itemsize == 0, header
    source = WeightSource(tmp_path)
    assert source.names() == sorted(WEIGHTS)
    part = Box(offsets=(1, 2), sizes=(2, 3))
    assert torch.equal(
        source.get("vision.0.weight", [part])[0], WEIGHTS["vision.0.weight"][1:3, 2:5]
    )
    (scalar,) = source.get("losses.clip.logit_scale", [whole(())], torch.float32)
    assert scalar.item() == 2.5
    assert scalar.dtype == torch.float32


def test_a_tied_weight_is_found_under_its_other_name(tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "a.safetensors", {"text.9.weight": "text.0.weight"})
    source = WeightSource(tmp_path)
    assert source.names() == sorted([*WEIGHTS, "text.9.weight"])
    assert torch.equal(source.get("text.9.weight")[0], WEIGHTS["text.0.weight"])


def data_starts(path: Path) -> dict[str, tuple[int, Any]]:
    """Position in the file of every tensor's first byte, and its header."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]
    return {name: (8 + length + item["data_offsets"][0], item) for name, item in header.items()}


def test_many_files_with_an_index_replace_an_earlier_run_s(tmp_path: Path) -> None:
    path = tmp_path / "final.safetensors"
    write_weights(path, SPECS, WEIGHTS.__getitem__)
    for factor in (1, 2):
        read = [*(WEIGHTS[spec.name].mul(factor).to(spec.dtype) for spec in SPECS)]
        values = dict(zip(WEIGHTS, read, strict=True))
        asked: list[str] = []

        def note(name: str, values: Any = values, asked: list[str] = asked) -> Tensor:
            asked.append(name)
            return values[name]

        written = write_weights(path, SPECS, note, max_file_bytes=60)
        order = weights_order(SPECS, max_file_bytes=60)
        assert asked == [spec.name for file in order for spec in file]
        assert sorted(written) == sorted(tmp_path.iterdir())
        index = json.loads((tmp_path / "final.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == WEIGHTS.keys()
        assert index["metadata"]["total_size"] == 24 * 4 + 3 + 8 + 30 * 2
        assert len(set(index["weight_map"].values())) == 3
        for source in (WeightSource(tmp_path), WeightSource(written[-1])):
            assert all(torch.equal(source.get(name)[0], values[name]) for name in WEIGHTS)
    write_weights(path, SPECS, WEIGHTS.__getitem__)
    assert list(tmp_path.iterdir()) == [path]


def test_huggingface_loads_our_shards(tmp_path: Path) -> None:
    modeling = pytest.importorskip("transformers.modeling_utils")
    hub = pytest.importorskip("transformers.utils.hub")
    path = tmp_path / "model.safetensors"
    write_weights(path, SPECS, WEIGHTS.__getitem__, max_file_bytes=60)
    index = str(tmp_path / "model.safetensors.index.json")
    files, _ = hub.get_checkpoint_shard_files(str(tmp_path), index)
    got: dict[str, Tensor] = {}
    for file in files:
        got.update(modeling.load_state_dict(file))
    assert all(torch.equal(got[name], value) for name, value in WEIGHTS.items())


def test_a_failed_write_leaves_the_old_weights_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "final.safetensors"
    write_weights(path, SPECS, WEIGHTS.__getitem__)
    before = path.read_bytes()

    def failing(name: str) -> Tensor:
        if name == "vision.0.mask":
            raise OSError(28, "No space left on device")
        return WEIGHTS[name]

    with pytest.raises(UnfitEnvironmentError, match=r"disk full: final.safetensors needs 167 B"):
        write_weights(path, SPECS, failing)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_a_kill_at_any_point_leaves_the_old_or_the_new_weights(tmp_path: Path) -> None:
    new = {name: value.flip(0) if value.dim() else value + 1 for name, value in WEIGHTS.items()}
    seen: list[int] = []
    for call in itertools.count():
        path = tmp_path / str(call) / "final.safetensors"
        # One file, then several, then several others, then one file again.
        versions = [(WEIGHTS, 10**9), (new, 60), (WEIGHTS, 60), (new, 10**9)]
        old_values, old_limit = versions[call % 3]
        values, limit = versions[call % 3 + 1]
        write_weights(path, SPECS, old_values.__getitem__, max_file_bytes=old_limit)
        killed = killed_at(
            call // 3,
            lambda path=path, values=values, limit=limit: write_weights(
                path, SPECS, values.__getitem__, max_file_bytes=limit
            ),
        )
        source = WeightSource(path.parent)
        got = {name: source.get(name)[0] for name in source.names()}
        assert equal_values(got, old_values) or equal_values(got, values)
        seen.append(equal_values(got, values))
        if not killed and call % 3 == 2:
            break
    assert seen[:3] == [False] * 3
    assert seen[-3:] == [True] * 3


def equal_values(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_wrong_weights_to_start_from(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(WEIGHTS, path)
    source = WeightSource(path)
    with pytest.raises(InvalidInputError, match=r"no weight vision\.0\.wight, but vision\.0\.w"):
        source.get("vision.0.wight")
    with pytest.raises(InvalidInputError, match="24 of the wanted elements are stored nowhere"):
        source.get("vision.0.weight", [Box(offsets=(4, 0), sizes=(4, 6))])
    save_file(WEIGHTS, tmp_path / "b.safetensors")
    with pytest.raises(InvalidInputError, match="holds 2 whole safetensors files and 0 indexes"):
        WeightSource(tmp_path)
    with pytest.raises(InvalidInputError, match="does not exist"):
        WeightSource(tmp_path / "c.safetensors")
    (tmp_path / "model.bin").write_bytes(b"pickle")
    with pytest.raises(InvalidInputError, match="nothing that unpickles"):
        WeightSource(tmp_path / "model.bin")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidInputError, match="no readable safetensors file"):
        WeightSource(path)
    index = tmp_path / "m.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "../b.safetensors"}}')
    with pytest.raises(InvalidInputError, match=r"names \.\./b\.safetensors, which is not beside"):
        WeightSource(index)
