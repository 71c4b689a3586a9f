"""A profile belongs to a model: what another one is, who notices, and what is not noticed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mmplan.errors import InvalidInputError
from mmplan.schema.base import document_text, file_sha256
from mmplan.schema.fingerprints import built_parts, check_model
from mmplan.schema.profile import load_profile
from mmplan.schema.workload import load_workload
from tests.commands import call, run
from tests.selection import some

MODEL = """
import random

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from mmplan import Ragged


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        hidden = functional.gelu(self.up(self.norm(x)))
        return x + self.down(hidden)


class Mix(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.left(x) * self.right(x).tanh()


def tower(features, width, hidden=8):
    blocks = [nn.Linear(features, width), Block(width, hidden), Block(width, hidden), Mix(width)]
    return nn.Sequential(*blocks)


class Mean(nn.Module):
    def forward(self, rows, other):
        values, lengths = rows
        places = torch.arange(len(lengths), device=values.device)
        places = torch.repeat_interleave(places, lengths, output_size=len(values))
        return torch.zeros_like(other).index_add(0, places, values) + 0 * other


def words(width):
    return nn.Sequential(Words(width), Block(width, 8))


class Words(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.mean = Mean()

    def forward(self, rows, other):
        return self.mean(Ragged(self.embed(rows.values), rows.lengths), other)


class Distance(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, a, b):
        return self.scale * (a - b).square().mean()


class Points(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        draws = torch.Generator().manual_seed(index)
        rows = torch.randn(1 + index % 3, 3, generator=draws)
        return {
            "x": torch.randn(6, generator=draws),
            "y": torch.randn(5, generator=draws),
            "rows": Ragged(rows, torch.tensor([len(rows)])),
        }
"""
WORKLOAD = """
name: fingers
modules:
  one: {factory: model:tower, args: {features: 6, width: 4}, inputs: [x]}
  two: {factory: model:tower, args: {features: 5, width: 4}, inputs: [y]}
  words: {factory: model:words, args: {width: 4}, inputs: [rows, two]}
losses:
  near: {factory: model:Distance, inputs: [one, words], cross_sample: true}
batch: 8
data: {factory: model:Points}
train: {optimizer: SGD, optimizer_args: {lr: 1.0e-2}, steps: 2}
"""
# Name to (old text, new text, what is said of it).
OTHERS = {
    "half as wide": (
        "hidden=8):",
        "hidden=4):",
        "modules.one: block 1 has up.weight of float32 (4, 4), the profile's has float32 (8, 4)",
    ),
    "another activation": (
        "functional.gelu",
        "functional.relu",
        "modules.one: block 1 computes 0 gelu, 1 relu, the profile's 1 gelu, 0 relu",
    ),
    "blocks swapped": (
        "Block(width, hidden), Mix(width)]",
        "Mix(width), Block(width, hidden)]",
        "modules.one: block 2 has left.weight of float32 (4, 4), the profile's has none",
    ),
    "a parameter tied": (
        "    return nn.Sequential(*blocks)",
        "    blocks[2].up = blocks[1].up\n    return nn.Sequential(*blocks)",
        "modules.one: up.bias of blocks 1 to 2 are one parameter, the profile's are not",
    ),
    "one block more": (
        "Mix(width)]",
        "Mix(width), Mix(width)]",
        "modules.one has 5 blocks, the profile's has 4",
    ),
    "a norm more": (
        "return x + self.down(hidden)",
        "return functional.layer_norm(x + self.down(hidden), x.shape[-1:])",
        "modules.one: block 1 computes 2 native_layer_norm, the profile's 1 native_layer_norm",
    ),
    "the norm behind": (
        "self.up(self.norm(x))",
        "self.up(x)) + 0 * self.norm(x).sum(-1, keepdim=True",
        "modules.one: block 1 computes",
    ),
    "inputs of a product exchanged": (
        "self.left(x) * self.right(x).tanh()",
        "self.right(x) * self.left(x).tanh()",
        "modules.one: block 3 has the operations of the profile's in another order",
    ),
    "another number": (
        "+ 0 * other",
        "+ 0.5 * other",
        "modules.words: block 0 has the operations of the profile's in another order, or of other "
        "shapes or numbers",
    ),
    "without a gradient": (
        "+ 0 * other",
        "+ 0 * other.detach()",
        "modules.words: block 0 computes 3 detach, the profile's 2 detach",
    ),
    "frozen by the factory": (
        "        self.embed = nn.Linear(3, width)",
        "        self.embed = nn.Linear(3, width).requires_grad_(False)",
        "modules.words: its factory freezes 0.embed.bias, the profile's does not",
    ),
    "another loss": (
        "(a - b).square()",
        "(a - b).abs()",
        "losses.near computes 1 abs, 0 pow, the profile's 0 abs, 1 pow",
    ),
    "a loss's parameter": (
        "nn.Parameter(torch.ones(()))",
        "nn.Parameter(torch.ones(1))",
        "losses.near has scale of float32 (1), the profile's has float32 ()",
    ),
}
SAME = {
    "a comment": ("class Block(nn.Module):", "# Blocks.\nclass Block(nn.Module):\n    # One."),
    "a renamed variable": (
        "        hidden = functional.gelu(self.up(self.norm(x)))\n"
        "        return x + self.down(hidden)",
        "        up = functional.gelu(self.up(self.norm(x)))\n        return x + self.down(up)",
    ),
    "other lines": (
        "        hidden = functional.gelu(self.up(self.norm(x)))\n"
        "        return x + self.down(hidden)",
        "        return x + self.down(\n"
        "            nn.functional.gelu(\n"
        "                self.up(self.norm(x)),\n"
        "            ),\n"
        "        )",
    ),
    "another class name": ("Mix(", "Mixed("),
    "more samples": ("        return 16", "        return 24"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workload with its model, its profile and a plan."""
    folder = tmp_path_factory.mktemp("fingerprints")
    (folder / "model.py").write_text(MODEL)
    (folder / "workload.yaml").write_text(WORKLOAD)
    given = folder / "workload.yaml", "--analytic", "--cluster", "cpu"
    done = call("mmplan", "profile", *given, "-o", folder / "profile.json")
    assert done.code == 0, done.err
    solved = folder / "workload.yaml", "--profile", folder / "profile.json", "--devices", 2
    done = call("mmplan", "solve", *solved, "--top", 1, "-o", folder / "plan.json")
    assert done.code == 0, done.err
    return folder


def changed(made: Path, folder: Path, old: str, new: str, file: str = "model.py") -> Path:
    """A copy in a folder of its own, so that its model is imported anew."""
    copy = folder / "copy"
    shutil.copytree(made, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / file).read_text()
    assert old in text
    (copy / file).write_text(text.replace(old, new))
    return copy


def refused(folder: Path) -> str:
    """What a session says of the model when it builds it."""
    done = call("mmlaunch", "verify", folder / "plan.json", "--in-process")
    assert done.code == 2, done.out + done.err
    assert done.message.startswith("profile fingers is of another model: ")
    assert done.hint == "profile this workload again: mmplan profile WORKLOAD -o PROFILE"
    return done.message


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_is_told_by_what_differs(made: Path, tmp_path: Path, name: str) -> None:
    old, new, said = OTHERS[name]
    folder = changed(made, tmp_path, old, new)
    profile, workload = (
        load_profile(folder / "profile.json"),
        load_workload(folder / "workload.yaml"),
    )
    with pytest.raises(InvalidInputError) as caught:
        check_model(profile, workload, folder, parts=built_parts(workload, folder))
    assert said in caught.value.message


@pytest.mark.parametrize("name", ["half as wide", "another activation", "a parameter tied"])
def test_verify_refuses_another_model(made: Path, tmp_path: Path, name: str) -> None:
    old, new, said = OTHERS[name]
    assert said in refused(changed(made, tmp_path, old, new))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["half as wide", "another activation", "blocks swapped", "a parameter tied"]
)
def test_run_refuses_another_model(made: Path, tmp_path: Path, name: str) -> None:
    old, new, said = OTHERS[name]
    folder = changed(made, tmp_path, old, new)
    for command in ("run", "verify"):
        more = ("--run-dir", tmp_path / "run") if command == "run" else ()
        done = run("mmlaunch", command, folder / "plan.json", *more, cwd=tmp_path)
        assert done.code == 2, done.out + done.err
        assert said in done.message
    measured = folder / "workload.yaml", "--profile", folder / "profile.json", "--measure", 1
    done = run(
        "mmplan", "solve", *measured, "--devices", 2, "-o", tmp_path / "p.json", cwd=tmp_path
    )
    assert done.code == 2, done.out + done.err
    assert said in done.message


@pytest.mark.parametrize("name", SAME)
def test_other_source_of_the_same_model_is_not_noticed(
    made: Path, tmp_path: Path, name: str
) -> None:
    folder = changed(made, tmp_path, *SAME[name])
    before = {
        where: item.built
        for where, item in _fingerprints(load_profile(made / "profile.json")).items()
    }
    assert built_parts(load_workload(folder / "workload.yaml"), folder) == before


def _fingerprints(profile: Any) -> dict[str, Any]:
    found = {f"modules.{name}": item.fingerprint for name, item in profile.modules.items()}
    return found | {f"losses.{name}": item.fingerprint for name, item in profile.losses.items()}


def test_the_same_model_is_verified(made: Path, tmp_path: Path) -> None:
    folder = changed(made, tmp_path, *SAME["a renamed variable"])
    done = call("mmlaunch", "verify", folder / "plan.json", "--in-process")
    assert done.code == 0, done.out + done.err
    assert "hint" not in done.err


def test_other_args_are_refused_by_every_command_that_reads_both(
    made: Path, tmp_path: Path
) -> None:
    folder = changed(
        made, tmp_path, "features: 5, width: 4", "features: 5, width: 6", "workload.yaml"
    )
    # Commands that import nothing find it too where there is no model at all.
    (folder / "model.py").unlink()
    plan, profile = folder / "plan.json", folder / "profile.json"
    said = "modules.two.args.width was 4, the workload has 6"
    both = folder / "workload.yaml", "--profile", profile
    for command, given in [
        ("solve", (*both, "-o", folder / "never.json")),
        ("compare", both),
        ("check", (plan,)),
        ("simulate", (plan,)),
        ("simulate", (plan, "--profile", profile)),
        ("show", (plan,)),
        ("explain", (plan,)),
        ("report", (plan, "-o", folder / "never.html")),
    ]:
        done = call("mmplan", command, *given)
        assert done.code == 2, (command, done.out, done.err)
        assert said in done.message, command
    for command in ("verify", "run"):
        assert call("mmlaunch", command, plan).code == 2
    assert not [*folder.glob("never*")]


def test_the_runtime_compares_args_with_the_plans_profile(made: Path, tmp_path: Path) -> None:
    folder = changed(made, tmp_path, '"width": 4', '"width": 2', "profile.json")
    _name_again(folder)
    for command in ("verify", "run"):
        done = call("mmlaunch", command, folder / "plan.json")
        assert done.code == 2
        assert "modules.one.args.width was 2, the workload has 4" in done.message


def _name_again(folder: Path) -> None:
    """Let the plan name the profile as it is now."""
    plan = json.loads((folder / "plan.json").read_text())
    plan["profile"]["sha256"] = file_sha256(folder / "profile.json")
    (folder / "plan.json").write_text(json.dumps(plan))


# ---- profiles that do not say it ----


@pytest.mark.parametrize(
    ("kept", "said"),
    some(
        [([], "does not say of which model it is"), (["factory", "args"], "not what they built")], 1
    ),
)
def test_a_profile_without_a_fingerprint_is_taken_with_one_note(
    made: Path, tmp_path: Path, kept: list[str], said: str
) -> None:
    folder = changed(made, tmp_path, "functional.gelu", "functional.relu")
    profile = json.loads((folder / "profile.json").read_text())
    for part in [*profile["modules"].values(), *profile["losses"].values()]:
        made_from = part.pop("fingerprint")
        if kept:
            part["fingerprint"] = {name: made_from[name] for name in kept if name in made_from}
    (folder / "profile.json").write_text(json.dumps(profile))
    _name_again(folder)
    plan, both = (
        folder / "plan.json",
        (folder / "workload.yaml", "--profile", folder / "profile.json"),
    )
    for done in [
        call("mmplan", "solve", *both, "-o", folder / "again.json"),
        call("mmplan", "simulate", plan),
        call("mmplan", "check", plan),
        call("mmplan", "explain", plan),
        call("mmplan", "report", plan, "-o", folder / "report.html"),
        call("mmlaunch", "verify", plan, "--in-process"),
    ]:
        assert done.code == 0, done.err
        assert done.err.count(said) == 1, done.err


def test_a_profile_that_is_gone_or_another_one_is_noted(made: Path, tmp_path: Path) -> None:
    folder = changed(made, tmp_path, "functional.gelu", "functional.relu")
    with (folder / "profile.json").open("a") as file:
        file.write("\n")
    done = call("mmlaunch", "verify", folder / "plan.json", "--in-process")
    assert done.code == 0, done.err
    assert "profile.json has changed since" in done.err
    (folder / "profile.json").unlink()
    done = call("mmlaunch", "verify", folder / "plan.json", "--in-process")
    assert done.code == 0, done.err
    assert "is not there: the model is not compared" in done.err


# ---- the file ----


def test_a_profiles_blocks_and_ties_are_those_of_its_fingerprint(
    made: Path, tmp_path: Path
) -> None:
    words = load_profile(made / "profile.json").modules["words"]
    assert (words.blocks, words.tied_blocks) == (2, None)
    for name, value, said in [
        ("blocks", 3, "blocks is 3, the fingerprint has 4"),
        ("tied_blocks", [[1, 2]], "tied_blocks is [[1, 2]], the fingerprint has []"),
    ]:
        data = json.loads((made / "profile.json").read_text())
        for key in [key for key in data["modules"]["one"] if key.startswith("block_")]:
            del data["modules"]["one"][key]
        data["modules"]["one"][name] = value
        path = tmp_path / "profile.json"
        path.write_text(json.dumps(data))
        with pytest.raises(InvalidInputError, match="one") as caught:
            load_profile(path)
        assert said in caught.value.message


MANY = """
from torch import nn


def stack(blocks):
    shared = nn.Linear(4, 4)
    made = []
    for _ in range(blocks - 1):
        made.append(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), shared))
    return nn.Sequential(nn.Linear(6, 4), *made)
"""


def test_the_size_is_that_of_what_differs(made: Path, tmp_path: Path) -> None:
    folder = changed(made, tmp_path, "", "")
    (folder / "many.py").write_text(MANY)
    text = (folder / "workload.yaml").read_text()
    one = "model:tower, args: {features: 6, width: 4}"
    (folder / "many.yaml").write_text(text.replace(one, "many:stack, args: {blocks: 200}"))
    built = built_parts(load_workload(folder / "many.yaml"), folder)["modules.one"]
    assert [run.count for run in built.blocks] == [1, 199]
    assert built.tied_blocks == (tuple(range(1, 200)),)
    assert len(built.model_dump_json()) < 2_000


# ---- models that cannot be traced ----

LOOKS = """
import random

import torch
from torch import nn


class Look(nn.Module):
    def __init__(self):
        super().__init__()
        self.map = nn.Linear(6, 4)

    def forward(self, x):
        return self.map(x) if float(x.sum()) > 0 else -self.map(x)


class Places(nn.Module):
    def forward(self, x):
        return x + torch.arange(x.shape[1])


class Drop(nn.Module):
    def forward(self, x):
        dropped = random.random() < 0.5, torch.rand(()).item() < 0.5
        x = 0 * x if dropped[0] else x.relu()
        return x if dropped[1] else x.tanh()


def looking():
    return nn.Sequential(Look())


def placed():
    return nn.Sequential(nn.Linear(6, 4), Places())


def dropped():
    return nn.Sequential(nn.Linear(6, 4), *[Drop() for _ in range(4)])
"""


def test_a_block_that_needs_values_is_known_by_its_parameters(made: Path, tmp_path: Path) -> None:
    folder = changed(made, tmp_path, "", "")
    (folder / "looks.py").write_text(LOOKS)
    text, one = (
        (folder / "workload.yaml").read_text(),
        "model:tower, args: {features: 6, width: 4}",
    )
    (folder / "look.yaml").write_text(text.replace(one, "looks:looking"))
    built = built_parts(load_workload(folder / "look.yaml"), folder)
    part = built["modules.one"]
    assert part.parameters == ({"map.weight": "float32 (4, 6)", "map.bias": "float32 (4)"},)
    assert part.operations == ()
    assert part.untraced is not None
    # What takes its output has no inputs to be traced on; what does not take it has.
    assert built["losses.near"].untraced == "InvalidInputError: modules.one could not be traced"
    assert built["modules.words"].untraced is None


@pytest.mark.parametrize("factory", ["placed", "dropped"])
def test_what_a_forward_makes_or_draws_is_the_same_each_time(
    made: Path, tmp_path: Path, factory: str
) -> None:
    folder = changed(made, tmp_path, "", "")
    (folder / "looks.py").write_text(LOOKS)
    text = (folder / "workload.yaml").read_text()
    one = "model:tower, args: {features: 6, width: 4}"
    (folder / "other.yaml").write_text(text.replace(one, f"looks:{factory}"))
    workload = load_workload(folder / "other.yaml")
    found = [built_parts(workload, folder)["modules.one"] for _ in range(4)]
    assert found[0].untraced is None
    assert found == [found[0]] * 4


# ---- measured profiles ----


@pytest.mark.slow
def test_measured_and_counted_profiles_have_the_same_fingerprint(
    made: Path, tmp_path: Path
) -> None:
    given = made / "workload.yaml", "--nproc", 1, "-o", tmp_path / "profile.json"
    done = run("mmplan", "profile", *given, cwd=tmp_path)
    assert done.code == 0, done.err
    measured, counted = (
        load_profile(tmp_path / "profile.json"),
        load_profile(made / "profile.json"),
    )
    assert _fingerprints(measured) == _fingerprints(counted)
    assert json.loads(document_text(measured))["modules"]["one"]["fingerprint"]["built"]
