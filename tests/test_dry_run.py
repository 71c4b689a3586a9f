"""Mistakes in a workload are found on two samples, before any worker or long work starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from mmplan.errors import InvalidInputError
from mmplan.profiling.analytic import analytic_profile
from mmplan.schema import dry_run as module
from mmplan.schema.cluster import load_cluster
from mmplan.schema.dry_run import dry_run
from mmplan.schema.workload import load_workload
from tests.birds import copy_workload, edited, two_rank_plan
from tests.commands import Done, call

ROOT = Path(__file__).parent.parent
# File of the model (or the workload), what stands there, and what stands there instead.
Edit = tuple[str, str, str]

SPECIES = "        return functional.cross_entropy(self.probe(sound), kind)"
POOLED = "        return self.out(x.mean(1))"
WORDS = "def words(layers: int, width: int) -> nn.Sequential:\n"
MISTAKES: dict[str, tuple[Edit, Sequence[str], str]] = {
    "optimizer": (
        ("workload", "optimizer: SGD", "optimizer: Adamw"),
        ("train.optimizer", "'Adamw'"),
        "did you mean AdamW?",
    ),
    "argument": (
        ("workload", "lr: 5.0e-2", "learning_rate: 5.0e-2"),
        ("train.optimizer_args", "SGD takes no 'learning_rate'"),
        "did you mean lr?",
    ),
    "value": (
        ("workload", "lr: 5.0e-2", "lr: -1.0"),
        ("train.optimizer_args", "Invalid learning rate: -1.0"),
        "torch.optim.SGD",
    ),
    "field": (
        ("workload", "[sound, kind]", "[sound, knid]"),
        ("losses.species.inputs", "'knid'", "no field that data gives"),
        "did you mean kind? a sample has description, kind, spectrogram",
    ),
    "element": (
        ("workload", "[sound, kind]", "[sound.1, kind]"),
        ("losses.species.inputs", "sound.1 is asked for", "[2, 12] float32"),
        "correct the element's number",
    ),
    "widths of two modules": (
        ("workload", "{layers: 1, width: 12}", "{layers: 1, width: 16}"),
        ("losses.match", "losses.py:19", "sound [2, 12] float32, words [2, 16] float32"),
        "inputs",
    ),
    "width of a loss": (
        ("workload", "{width: 12, kinds: 5}", "{width: 16, kinds: 5}"),
        ("losses.species", "(2x12 and 16x5)", "losses.py:33", "sound [2, 12] float32"),
        "correct the loss, or its inputs",
    ),
    "loss of two": (
        ("losses", SPECIES, f"{SPECIES}, kind"),
        ("losses.species (Species) returned a tuple of 2 ([] float32, [2] int64), not a scalar",),
        "return a tensor of one number alone",
    ),
    "loss of each sample": (
        ("losses", SPECIES, SPECIES[:-1] + ", reduction='none')"),
        ("losses.species (Species) returned [2] float32, not a scalar",),
        "the mean over the samples",
    ),
    "loss without gradient": (
        ("losses", SPECIES, f"{SPECIES}.detach()"),
        ("losses.species", "no gradient leads back"),
        "detach()",
    ),
    "change in place": (
        ("losses", SPECIES, f"        sound.add_(1)\n{SPECIES}"),
        ("backward raised RuntimeError", "inplace"),
        "in place",
    ),
    "shape inside": (
        ("towers", "nn.Linear(10, width)", "nn.Linear(9, width)"),
        ("modules.sound: block 0 (Frames)", "towers.py:17", "spectrogram [2, 6, 10] float32"),
        "a block takes what the one before it returns",
    ),
    "dict": (
        ("towers", POOLED, "        return {'x': self.out(x.mean(1))}"),
        ("modules.sound: block 3 (MeanOverTime) returned a dict",),
        "a tuple of tensors",
    ),
    "factory": (
        ("towers", WORDS, f"{WORDS}    raise ValueError('odd')\n"),
        ("modules.words.factory", "ValueError: odd", "towers.py:"),
        "mend that line",
    ),
    "data": (
        ("data", '"kind": self._kinds[index],', '"kind": self._kinds[:index],'),
        ("data: reading 2 samples raised", "stack expects each tensor to be equal size"),
        "mend the data set",
    ),
}


EVALUATION = """eval:
    data: {factory: "birds.data:Recordings", args: {count: 40}}
    metrics:
      found: {factory: "mmplan.zoo.metrics:retrieval", inputs: [sound, words], cross_sample: true}
"""
# What stands in the evaluation, and what stands there instead.
MISTAKES_OF_EVALUATION: dict[str, tuple[str, str, Sequence[str], str]] = {
    "field": ("[sound, words]", "[sound, wrods]", ["metrics.found.inputs: 'wrods'"], "words?"),
    "factory": ("retrieval", "retreival", ["metrics.found.factory", "retreival"], ""),
    "shape": ("[sound, words]", "[sound, kind]", ["metrics.found (", "kind [2]"], ""),
    "data": ("Recordings", "Records", ["train.eval.data.factory"], ""),
}


@pytest.mark.parametrize("name", MISTAKES_OF_EVALUATION)
def test_a_mistake_of_the_evaluation_is_found_before_it(tmp_path: Path, name: str) -> None:
    old, new, parts, hint = MISTAKES_OF_EVALUATION[name]
    workload = copy_workload(tmp_path)
    for text in (EVALUATION, EVALUATION.replace(old, new)):
        changed = f"train:\n  {text}  seed: 3\n  steps: 2\n"
        before, _, _ = workload.read_text().partition("train:")
        workload.write_text(before + changed)
        if text == EVALUATION:
            assert dry_run(load_workload(workload), workload.parent) == []
    with pytest.raises(InvalidInputError) as caught:
        dry_run(load_workload(workload), workload.parent)
    for part in parts:
        assert part in caught.value.message
    assert hint in str(caught.value.hint)


def made(root: Path, edit: Edit | None) -> tuple[Path, Path]:
    """The workload with one mistake, and a plan for it."""
    workload = copy_workload(root)
    if edit is not None:
        file, old, new = edit
        path = workload if file == "workload" else workload.parent / "birds" / f"{file}.py"
        edited(path, old, new)
    (root / "plans").mkdir()
    return workload, two_rank_plan(workload, root / "plans" / "plan.json")


def refused(done: Done, parts: Sequence[str], hint: str) -> None:
    assert done.code == 2, done.err
    for part in parts:
        assert part in done.message
    assert hint in done.hint


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mmlaunch.launch.launch.launch")
    monkeypatch.delattr("mmplan.profiling.measure.measure_points")


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_mend(tmp_path: Path, name: str) -> None:
    edit, parts, hint = MISTAKES[name]
    workload, _ = made(tmp_path, edit)
    with pytest.raises(InvalidInputError) as caught:
        dry_run(load_workload(workload), workload.parent)
    for part in parts:
        assert part in caught.value.message
    assert "\n" not in caught.value.message
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("program", "args"),
    [
        ("mmplan", ("profile", "WORKLOAD", "-o", "OUT")),
        ("mmplan", ("profile", "WORKLOAD", "--analytic", "--cluster", "cpu-2", "-o", "OUT")),
        ("mmplan", ("check", "PLAN", "--try")),
        ("mmlaunch", ("verify", "PLAN")),
        ("mmlaunch", ("verify", "PLAN", "--in-process")),
        ("mmlaunch", ("run", "PLAN", "--run-dir", "OUT")),
    ],
)
def test_before_anything_starts(tmp_path: Path, program: str, args: tuple[str, ...]) -> None:
    edit, parts, hint = MISTAKES["loss of two"]
    workload, plan = made(tmp_path, edit)
    named = {"WORKLOAD": workload, "PLAN": plan, "OUT": tmp_path / "out"}
    command = [named.get(word, word) for word in args]
    refused(call("mmplan" if program == "mmplan" else "mmlaunch", *command), parts, hint)
    assert not (tmp_path / "out").exists()


def test_what_is_right_is_tried_without_a_word_on_stdout(tmp_path: Path) -> None:
    edit = ("towers", POOLED, f"        print('loud')\n{POOLED}")
    _, plan = made(tmp_path, edit)
    done = call("mmplan", "check", plan, "--try", "--json")
    assert done.code == 0, done.err
    assert done.document["faults"] == []
    assert "loud" in done.err
    assert "tried" in call("mmplan", "check", plan, "--try").out
    # Without the option no code of the workload is imported.
    edited(tmp_path / "birds" / "birds" / "towers.py", "import torch\n", "raise OSError\n")
    assert call("mmplan", "check", plan).code == 0


def test_without_memory_the_same_mistakes_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_REAL", 0)
    for name in ("loss of two", "shape inside", "loss without gradient"):
        edit, parts, hint = MISTAKES[name]
        (tmp_path / name).mkdir()
        workload, _ = made(tmp_path / name, edit)
        with pytest.raises(InvalidInputError) as caught:
            dry_run(load_workload(workload), workload.parent)
        assert parts[0] in caught.value.message
        assert hint in str(caught.value.hint)


@pytest.mark.slow
def test_a_large_model_is_tried_without_memory() -> None:
    workload = load_workload(ROOT / "examples" / "papers" / "lit-350m.yaml")
    assert dry_run(workload, ROOT / "examples" / "papers") == []


def test_blocks_that_look_at_values_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit = ("towers", POOLED, "        x = x[x.sum((1, 2)) > -1e9]\n" + POOLED)
    workload, _ = made(tmp_path, edit)
    assert dry_run(load_workload(workload), workload.parent) == []
    monkeypatch.setattr(module, "_MOST_REAL", 0)
    (note,) = dry_run(load_workload(workload), workload.parent)
    assert note.startswith("modules.sound: block 3 (MeanOverTime) looks at values")


# ---- --analytic, which has no values either ----

PRETRAINED = """class Loaded(nn.Module):
    @classmethod
    def from_pretrained(cls) -> nn.Module:
        return nn.Linear(12, 12).requires_grad_(bool(torch.ones(1).any()))


"""


@pytest.mark.parametrize(
    ("edit", "said", "hint"),
    [
        (
            (WORDS, PRETRAINED + WORDS + "    Loaded.from_pretrained()\n"),
            ("modules.words.factory", "--analytic builds models without values"),
            "name the weights with modules.words.init",
        ),
        (
            (WORDS, WORDS + "    float(torch.ones(1).sum())\n"),
            ("modules.words.factory", "towers.py:", "--analytic builds models without values"),
            "leave --analytic out",
        ),
        (
            (WORDS, WORDS + "    raise ValueError('odd')\n"),
            ("modules.words.factory", "ValueError: odd"),
            "mend that line",
        ),
        (
            ("nn.Linear(10, width)", "nn.Linear(9, width)"),
            ("modules.sound: block 0",),
            "a block takes what the one before it returns",
        ),
        (
            (POOLED, "        x = x[x.sum((1, 2)) > -1e9]\n" + POOLED),
            ("modules.sound: block 3 cannot run on shapes alone",),
            "leave --analytic out",
        ),
    ],
)
def test_leaving_analytic_out_is_the_hint_where_it_helps(
    tmp_path: Path, edit: tuple[str, str], said: Sequence[str], hint: str
) -> None:
    workload, _ = made(tmp_path, ("towers", *edit))
    given = ("--analytic", "--cluster", "cpu-2", "-o", tmp_path / "profile.json")
    done = call("mmplan", "profile", workload, *given)
    refused(done, said, hint)
    if hint != "leave --analytic out":
        assert "--analytic" not in done.hint


def test_counting_blames_no_option_for_a_wrong_shape(tmp_path: Path) -> None:
    workload, _ = made(tmp_path, ("towers", "nn.Linear(10, width)", "nn.Linear(9, width)"))
    with pytest.raises(InvalidInputError, match=r"modules\.sound: block 0 raised") as caught:
        analytic_profile(load_workload(workload), workload.parent, load_cluster("cpu-2"))
    assert "--analytic" not in str(caught.value.hint)


def test_only_the_tasks_of_a_plan_are_tried(tmp_path: Path) -> None:
    workload, _ = made(tmp_path, ("losses", SPECIES, f"{SPECIES}, kind"))
    loaded = load_workload(workload)
    tasks = json.loads('{"hear": {"modules": ["sound", "words"], "losses": ["match"]}}')
    tasks["tell"] = {"modules": ["sound"], "losses": ["species"]}
    changed = type(loaded).model_validate(
        loaded.model_dump(mode="json", exclude_unset=True) | {"tasks": tasks}
    )
    assert dry_run(changed, workload.parent, tasks=["hear"]) == []
    with pytest.raises(InvalidInputError, match=r"task tell: losses\.species"):
        dry_run(changed, workload.parent)
