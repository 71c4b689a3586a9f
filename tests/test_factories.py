"""Factories: the same objects everywhere, and errors that name the field and the line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from mmplan.errors import InvalidInputError, UnfitEnvironmentError
from mmplan.schema.factories import (
    build_dataset,
    build_loss,
    build_module,
    dtype_of,
    factory_seed,
    frozen_blocks,
    import_factory,
    tied_parameters,
)
from mmplan.schema.workload import DataSpec, Workload

USER_FILE = """
import torch
from torch import nn
from mmplan.errors import UnfitEnvironmentError


def tower(width, blocks=2):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))


def broken(width):
    helper = None
    return helper.missing  # line 13


def modest(width):
    raise UnfitEnvironmentError("no such library", hint="install it")


def empty(width):
    return nn.Sequential()


def not_sequential(width):
    return nn.Linear(width, width)


def without_parameters(width):
    return nn.Sequential(nn.ReLU())


def batch_norm(width):
    return nn.Sequential(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)))


def frozen_norm(width):
    return batch_norm(width).eval()


def tied(width):
    first, last = nn.Linear(width, width), nn.Linear(width, width)
    last.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), last)


def hollow(width):
    return nn.Sequential(nn.Linear(width, width, device="meta"))


class Loss(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x):
        return (self.scale * x).mean()


class Random(torch.utils.data.Dataset):
    def __init__(self, length=8, kind="dict"):
        self.x, self.kind = torch.randn(length, 3), kind

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if self.kind == "raise":
            raise KeyError("shard-3")
        return {"dict": {"x": self.x[index]}, "list": [1], "text": {"x": "a"}}[self.kind]


not_callable = 3


class Stream:
    pass


class Start(nn.Linear):
    def forward(self, x):
        return super().forward(x), x > 0


class Masked(nn.Linear):
    def forward(self, x, mask):
        return super().forward(x * mask), mask


class Whole(nn.Linear):
    def forward(self, state):
        return super().forward(state[0] * state[1])


def masked(width):
    return nn.Sequential(Start(width, width), Masked(width, width), Whole(width, width))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "user_model.py").write_text(USER_FILE)
    return tmp_path


def workload(factory: str = "user_model:tower", *, precision: str = "fp32", **change: Any):
    module = {"factory": factory, "args": {"width": 4}, "inputs": ["x"]}
    return Workload.model_validate(
        {
            "name": "w",
            "batch": 8,
            "modules": {
                "a": module | change,
                "b": module,
                "c": module | {"share": "a"} | change,
            },
            "losses": {"l": {"factory": "user_model:Loss", "inputs": ["a"]}},
            "data": {"factory": "user_model:Random"},
            "train": {"seed": 5, "precision": precision},
        }
    )


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_a_module_is_equal_every_time_and_differs_from_others(folder: Path) -> None:
    load = workload()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = weights(build_module(load, "a", folder))
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator moved"
    torch.manual_seed(2)
    assert torch.equal(weights(build_module(load, "a", folder)), first)
    assert torch.equal(weights(build_module(load, "c", folder)), first), "share: the owner's"
    assert not torch.equal(weights(build_module(load, "b", folder)), first)


def test_weights_are_equal_in_another_process(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.test_factories import *;"
        "torch.set_num_threads(1);"
        "print(weights(build_module(workload(), 'a', Path(sys.argv[1]))).tolist())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert out.strip() == str(weights(build_module(workload(), "a", folder)).tolist())


def test_the_seed_is_the_documented_hash() -> None:
    import hashlib

    digest = hashlib.sha256(b"5:vision").digest()
    assert factory_seed(5, "vision") == int.from_bytes(digest[:8], "big") // 2


def test_precision_casts_what_the_optimizer_updates(folder: Path) -> None:
    assert weights(build_module(workload(precision="fp64"), "a", folder)).dtype == torch.float64
    assert weights(build_module(workload(precision="bf16"), "a", folder)).dtype == torch.float32
    assert build_loss(workload(precision="fp64"), "l", folder).scale.dtype == torch.float64
    assert dtype_of("fp32") == torch.float32


def test_meta_device_builds_without_memory(folder: Path) -> None:
    module = build_module(workload(args={"width": 200_000}), "a", folder, device="meta")
    assert all(p.is_meta for p in module.parameters())
    assert sum(p.numel() for p in module.parameters()) == 2 * (200_000**2 + 200_000)


@pytest.mark.parametrize(
    ("factory", "part"),
    [
        ("user_modell:tower", "there is no module 'user_modell'"),
        ("user_model.x:tower", "user_model.x"),
        ("user_model:towr", "user_model has no 'towr'"),
        ("user_model:not_callable", "not callable, it is of type int"),
        ("user_model:broken", "AttributeError: 'NoneType' object has no attribute 'missing'"),
        ("user_model:broken", "user_model.py:13"),
        ("user_model:empty", "empty nn.Sequential"),
        ("user_model:not_sequential", "returned a Linear, not an nn.Sequential"),
        ("user_model:without_parameters", "without parameters"),
        ("user_model:batch_norm", "'0.1.running_mean'"),
        ("user_model:hollow", "0.weight is on the meta device"),
        ("bad_syntax:f", "bad_syntax.py:2"),
        ("bad_import:f", "ModuleNotFoundError: No module named 'nowhere'"),
        ("bad_exit:f", "SystemExit: 3"),
    ],
)
def test_a_faulty_factory_is_an_error_that_names_field_and_fault(
    folder: Path, factory: str, part: str
) -> None:
    (folder / "bad_syntax.py").write_text("x = 1\ndef f(:\n")
    (folder / "bad_import.py").write_text("\nimport nowhere\n")
    (folder / "bad_exit.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(InvalidInputError) as caught:
        build_module(workload(factory), "a", folder)
    assert part in caught.value.message
    assert "modules.a" in caught.value.message
    assert caught.value.hint


def test_wrong_args_are_named(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"args: width, depth: .*'depth'"):
        build_module(workload(args={"width": 4, "depth": 1}), "a", folder)


def test_an_error_of_ours_keeps_its_kind(folder: Path) -> None:
    with pytest.raises(UnfitEnvironmentError, match=r"modules\.a\.factory: no such library"):
        build_module(workload("user_model:modest"), "a", folder)


def test_norms_that_no_longer_change_are_allowed(folder: Path) -> None:
    assert build_module(workload("user_model:frozen_norm"), "a", folder)


def test_the_workloads_folder_comes_first_and_each_gets_its_own_file(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "user_model.py").write_text("def tower():\n    return 'other'\n")
    assert import_factory("user_model:tower", folder).__code__.co_argcount == 2
    assert import_factory("user_model:tower", other)() == "other"
    assert import_factory("user_model:tower", folder).__code__.co_argcount == 2
    assert sys.path[0] == str(folder)
    assert sys.path.count(str(folder)) == 1


def test_tied_parameters_are_found_under_their_first_name(folder: Path) -> None:
    module = build_module(workload("user_model:tied", precision="fp64"), "a", folder)
    assert tied_parameters(module) == {"2.weight": "0.weight"}
    assert tied_parameters(build_module(workload(), "a", folder)) == {}


def test_frozen_ranges() -> None:
    assert frozen_blocks(True, 2) == (True, True)
    assert frozen_blocks(False, 2) == (False, False)
    assert frozen_blocks([(0, 1), (3, 4)], 4) == (True, False, False, True)
    for bad in [(0, 5), (2, 2), (3, 1)]:
        with pytest.raises(InvalidInputError, match=r"modules\.a\.frozen: \["):
            frozen_blocks([bad], 4, field="modules.a.frozen")


def test_losses_and_data_are_the_same_in_every_process(folder: Path) -> None:
    load = workload()
    assert load.data is not None
    torch.manual_seed(1)
    loss: Any = build_loss(load, "l", folder)
    data = build_dataset(load.data, folder, seed=5)
    torch.manual_seed(2)
    again: Any = build_loss(load, "l", folder)
    assert torch.equal(again.scale, loss.scale)
    assert torch.equal(build_dataset(load.data, folder, seed=5).x, data.x)
    assert not torch.equal(build_dataset(load.data, folder, seed=6).x, data.x)


@pytest.mark.parametrize(
    ("factory", "args", "part"),
    [
        ("user_model:Stream", {}, "a Stream without __len__"),
        ("user_model:Random", {"length": 0}, "without samples"),
        ("user_model:Random", {"kind": "list"}, "is a list, not a dict"),
        ("user_model:Random", {"kind": "text"}, "'x' is a str, not a tensor"),
        ("user_model:Random", {"kind": "raise"}, "reading sample 0 of user_model:Random"),
    ],
)
def test_faulty_data_is_named(folder: Path, factory: str, args: dict[str, Any], part: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        build_dataset(DataSpec(factory=factory, args=args), folder)
    assert part in caught.value.message
    assert caught.value.message.startswith("data")


def test_a_tuple_is_several_arguments_or_one(folder: Path) -> None:
    module = build_module(workload(factory="user_model:masked", args={"width": 4}), "a", folder)
    x = torch.randn(3, 4)
    start, middle, end = (cast(nn.Linear, block) for block in module)
    inner = nn.functional.linear(
        nn.functional.linear(x, start.weight, start.bias) * (x > 0), middle.weight, middle.bias
    )
    expected = nn.functional.linear(inner * (x > 0), end.weight, end.bias)
    torch.testing.assert_close(module(x), expected)


def test_a_loss_that_is_no_module_is_named(folder: Path) -> None:
    load = workload()
    broken = load.losses["l"].model_copy(update={"factory": "builtins:dict"})
    load = load.model_copy(update={"losses": {"l": broken}})
    with pytest.raises(
        InvalidInputError, match=r"losses\.l\.factory: builtins:dict returned a dict"
    ):
        build_loss(load, "l", folder)
