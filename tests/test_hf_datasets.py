"""Datasets of Hugging Face on disk: what becomes a tensor, what is refused and with which mend."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmplan.errors import InvalidInputError, UnfitEnvironmentError
from mmplan.ragged import Ragged
from mmplan.schema.factories import build_dataset
from mmplan.schema.workload import DataSpec

hf: Any = pytest.importorskip("datasets")
hf.disable_progress_bars()

# By column: its type, three samples, and what of the second one's is read.
COLUMNS: dict[str, tuple[Any, list[Any], Any]] = {
    "number": (hf.Value("int32"), [1, 2, 3], torch.tensor(2, dtype=torch.int32)),
    "share": (hf.Value("float64"), [0.1, 0.2, 0.3], torch.tensor(0.2, dtype=torch.float64)),
    "flag": (hf.Value("bool"), [True, False, True], torch.tensor(False)),
    "kind": (hf.ClassLabel(names=["a", "b"]), [0, 1, 0], torch.tensor(1)),
    "point": (
        hf.List(hf.Value("float32"), length=2),
        [[1, 2], [3, 4], [5, 6]],
        torch.tensor([3.0, 4.0]),
    ),
    "image": (
        hf.Array2D((2, 2), "float32"),
        [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[0, 0], [0, 0]]],
        torch.tensor([[5.0, 6.0], [7.0, 8.0]]),
    ),
    "tokens": (hf.List(hf.Value("int64")), [[7], [8, 9], []], torch.tensor([8, 9])),
    "absent": (hf.LargeList(hf.Value("int8")), [[1], None, [2]], torch.zeros(0, dtype=torch.int8)),
    "boxes": (
        hf.List(hf.List(hf.Value("int64"), length=2)),
        [[], [[1, 2], [3, 4], [5, 6]], [[7, 8]]],
        torch.tensor([[1, 2], [3, 4], [5, 6]]),
    ),
    "frames": (
        hf.Array2D((None, 2), "int64"),
        [[[1, 2]], [[3, 4], [5, 6]], [[7, 8]]],
        torch.tensor([[3, 4], [5, 6]]),
    ),
}
RAGGED = {"tokens": [1, 2, 0], "absent": [1, 0, 1], "boxes": [0, 3, 1], "frames": [1, 2, 1]}


def opened(folder: Path, **args: Any) -> Any:
    spec = DataSpec(factory="mmplan.sources.hf_datasets:on_disk", args={"path": "data", **args})
    return build_dataset(spec, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hf")
    features = hf.Features({name: column[0] for name, column in COLUMNS.items()})
    whole = hf.Dataset.from_dict({n: column[1] for n, column in COLUMNS.items()}, features=features)
    whole.save_to_disk(place / "data", num_shards=2)
    odd = hf.Dataset.from_dict(
        {"text": ["a", "bb"], "nested": [[[1], [2, 3]], []], "gap": [[1, None], [2]]}
    )
    hf.DatasetDict(train=odd, test=odd.select([1])).save_to_disk(place / "splits")
    return place


def test_columns_become_tensors_by_their_types(folder: Path) -> None:
    data = opened(folder)
    assert len(data) == 3
    sample = data[1]
    assert list(sample) == list(COLUMNS)
    for name, (_, _, expected) in COLUMNS.items():
        value = sample[name]
        assert isinstance(value, Ragged) == (name in RAGGED)
        if isinstance(value, Ragged):
            assert value.lengths.tolist() == [len(expected)]
            value = value.values
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected), name
    for name, counts in RAGGED.items():
        assert data.lengths(name).tolist() == counts
        assert [len(data[index][name].values) for index in range(3)] == counts


def test_columns_are_chosen_and_named(folder: Path) -> None:
    assert list(opened(folder, columns=["kind", "flag"])[0]) == ["kind", "flag"]
    named = opened(folder, columns={"tokens": "ids", "number": "label"})
    assert named[2]["label"].item() == 3
    assert named.lengths("ids").tolist() == [1, 2, 0]


def test_a_copy_maps_the_same_files(folder: Path) -> None:
    """What travels to a loading process is where the data lie."""
    large = hf.Dataset.from_dict({"x": [[index] * 1000 for index in range(500)]})
    large.save_to_disk(folder / "large")
    data = opened(folder, path="large")
    sent = pickle.dumps(data)
    assert len(sent) < 10_000
    assert pickle.loads(sent)[499]["x"].values.tolist() == [499] * 1000


def spelled(sample: dict[str, Any]) -> dict[str, Tensor]:
    """What a user's decode does."""
    return {"letters": torch.tensor(len(sample["words"]))}


def test_decode_makes_what_the_types_do_not_say(folder: Path) -> None:
    args = {"path": "splits", "split": "train", "columns": {"text": "words"}}
    data = opened(folder, **args, decode="tests.test_hf_datasets:spelled")
    assert [data[index]["letters"].item() for index in range(2)] == [1, 2]
    with pytest.raises(InvalidInputError, match="the rows of 'words' are not known"):
        data.lengths("words")


@pytest.mark.parametrize(
    ("args", "said", "mend"),
    [
        ({"path": "none"}, "none: no dataset that save_to_disk wrote: a stream", "save_to_disk"),
        ({"columns": ["nothing"]}, "no column 'nothing'", "it has number, share"),
        ({"split": "train"}, "data: it has no splits", "leave out split"),
        ({"path": "splits"}, "splits: it has several splits", "one of train, test"),
        ({"path": "splits", "split": "dev"}, "no split 'dev'", "one of train, test"),
        ({"path": "splits", "split": "test"}, "'text' is Value('string')", "decode: module:"),
        (
            {"path": "splits", "split": "test", "columns": ["nested"]},
            "column 'nested' is List(List(Value('int64'))), which is no tensor",
            "decode: module:function",
        ),
        (
            {"path": "splits", "split": "train", "columns": ["gap"]},
            "sample 0: a number of column 'gap' is missing",
            "fill it in",
        ),
        ({"decode": "tests.test_hf_datasets:nothing"}, "has no 'nothing'", "correct the name"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    folder: Path, args: dict[str, Any], said: str, mend: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        opened(folder, **args)
    assert said in caught.value.message
    assert mend in str(caught.value.hint)


def stream() -> Any:
    return hf.Dataset.from_dict({"x": [1, 2]}).to_iterable_dataset()


def splits_of_streams() -> Any:
    return hf.IterableDatasetDict(train=stream())


@pytest.mark.parametrize("factory", ["stream", "splits_of_streams"])
def test_a_stream_is_refused_with_the_reason(tmp_path: Path, factory: str) -> None:
    with pytest.raises(InvalidInputError, match=r"returned an? Iterable") as caught:
        build_dataset(DataSpec(factory=f"tests.test_hf_datasets:{factory}"), tmp_path)
    assert "the order of a stream would change with ranks" in str(caught.value.hint)


def test_a_missing_package_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UnfitEnvironmentError, match="needs datasets, which is not") as caught:
        opened(folder)
    assert "datasets" in str(caught.value.hint)
