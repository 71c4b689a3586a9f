"""Modules and data of workloads with several tasks, and the examples to train here."""

from __future__ import annotations

import math
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mmplan.errors import InvalidInputError
from mmplan.schema.factories import build_dataset, build_loss, build_module
from mmplan.schema.workload import Workload, load_workload, resolve_tasks
from mmplan.zoo import digits, towers
from mmplan.zoo.encoder import vit
from mmplan.zoo.patches import PatchEmbedding, join_neighbours
from mmplan.zoo.senses import zero_shot_accuracies
from mmplan.zoo.synthetic import noise
from tests.commands import Program, call
from tests.solving import module_profile, profile, run_solve
from tests.verification import verify_in_process

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.usefixtures("one_thread")


# --- patches of anything -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "patch", "stride", "convolution"),
    [
        (8, 4, None, nn.Conv2d(3, 6, 4, 4)),
        ([12, 20], 5, 3, nn.Conv2d(3, 6, 5, 3)),
        ([6, 8], [3, 2], None, nn.Conv2d(3, 6, (3, 2), (3, 2))),
        ([20], [5], None, nn.Conv1d(3, 6, 5, 5)),
        ([21], 5, [4], nn.Conv1d(3, 6, 5, 4)),
    ],
    ids=str,
)
def test_patches_are_those_of_a_convolution(
    image: Any, patch: Any, stride: Any, convolution: Any
) -> None:
    embedding = PatchEmbedding(width=6, patch=patch, image=image, channels=3, stride=stride)
    convolution.load_state_dict(
        {
            "weight": embedding.project.weight.view_as(convolution.weight),
            "bias": embedding.project.bias,
        }
    )
    x = torch.rand(2, *embedding.shape)
    want = convolution(x).flatten(2).transpose(1, 2) + embedding.position
    torch.testing.assert_close(embedding(x), want)


def test_neighbours_along_every_axis_are_joined() -> None:
    line = join_neighbours(torch.arange(6.0).view(1, 6, 1), (6,), 2)
    assert line[0].tolist() == [[0, 1], [2, 3], [4, 5]]
    square = join_neighbours(torch.arange(16.0).view(1, 16, 1), (4, 4), 2)
    assert square[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"image": [128, 204], "patch": 16}, "patch 16 does not divide image 204"),
        ({"image": [8], "patch": [4, 4]}, r"patch \[4, 4\] has 2 axes, image has 1"),
        ({"image": [8], "patch": 9, "stride": 1}, "patch 9 is larger than image 8"),
        ({"image": [8], "patch": 4, "stride": 0}, "stride is 0"),
        ({"image": [0], "patch": 4}, "image is 0"),
    ],
)
def test_patches_that_do_not_fit_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        towers.vision(1, 8, **sizes)
    with pytest.raises(InvalidInputError, match=message):
        vit(1, 8, heads=2, outputs=8, **sizes)


def test_signals_and_spectrograms_go_through_towers_and_encoders() -> None:
    audio = towers.vision(2, 16, image=[32, 51], patch=16, stride=10, channels=1, embed=5)
    embed: Any = audio[0].embed
    assert len(embed.position) == 2 * 4
    assert audio(torch.rand(3, 1, 32, 51)).shape == (3, 5)
    speech = vit(2, 16, heads=2, outputs=5, image=[24], patch=[2], channels=7, merge=2)
    assert speech(torch.rand(3, 7, 24)).shape == (3, 6, 5)


# --- noise ---------------------------------------------------------------------------------


def test_noise_has_the_shapes_placeholders_and_ids_that_are_asked_for() -> None:
    data = noise(
        {
            "image": {"shape": [3, 4]},
            "tokens": {"shape": [9], "vocab": 20, "rows": {19: 2, 18: 3}},
            "labels": {"shape": [9], "vocab": 18, "ignored": 5},
            "mask": {"shape": [2, 6], "mask": True},
        },
        samples=40,
    )
    samples: list[dict[str, Any]] = [data[index] for index in range(len(data))]
    tokens = torch.stack([sample["tokens"] for sample in samples])
    assert tokens[:, :5].eq(torch.tensor([19, 19, 18, 18, 18])).all()
    assert tokens[:, 5:].min() == 1
    assert tokens[:, 5:].max() == 17
    labels = torch.stack([sample["labels"] for sample in samples])
    assert ((labels == -100).sum(dim=1) == 5).all()
    assert samples[0]["image"].shape == (3, 4)
    masks = torch.stack([sample["mask"] for sample in samples])
    assert (masks.dtype, masks.shape) == (torch.bool, (40, 2, 6))
    assert set(masks.sum(-1).flatten().tolist()) == {1, 2, 3, 4, 5}
    assert torch.equal(masks.sort(-1, descending=True).values, masks)
    again: dict[str, Any] = data[7]
    assert torch.equal(again["tokens"], samples[7]["tokens"])
    assert not torch.equal(samples[0]["image"], samples[1]["image"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"vocab": 3}, "field x has no shape"),
        ({"shape": [2], "classes": 3}, "field x does not know 'classes'"),
        ({"shape": [2, 0]}, "x.shape is 0"),
        ({"shape": [4], "vocab": 9, "rows": {8: 5}}, "4 places for 5 placeholders"),
    ],
)
def test_noise_without_meaning_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        noise({"x": spec})


# --- what can be trained here --------------------------------------------------------------


def small(name: str, **batches: int) -> Workload:
    """An example's workload in fp64 with other batches; sync batches become half of them."""
    document = load_workload(EXAMPLES / name / "workload.yaml").model_dump()
    document["train"] |= {"precision": "fp64", "steps": 1}
    for task, batch in batches.items():
        document["tasks"][task]["batch"] = batch
        for loss in document["tasks"][task]["losses"]:
            if document["losses"][loss]["cross_sample"]:
                document["losses"][loss]["sync_batch"] = batch // 2
    return Workload.model_validate(document)


def costs(workload: Workload, devices: int) -> Any:
    """Seconds that differ between modules, so that slices have several degrees."""
    return profile(
        {
            name: module_profile(
                1.0 + index,
                2.0 + index,
                fixed_s=0.5,
                blocks=len(build_module(workload, name, EXAMPLES, device="meta")),
                tp={1: 1.0, 2: 1.7},
            )
            for index, name in enumerate(workload.modules)
        },
        devices,
    )


def check_equal(tmp_path: Path, workload: Workload, devices: int) -> None:
    """A plan of ``mpsp`` gives one process's gradients for every parameter."""
    plan = run_solve(tmp_path, workload, costs(workload, devices), solver="mpsp", budget_s=0.2)
    assert {unit.task for unit in plan.units} == set(workload.tasks)
    verdict = verify_in_process(plan, workload)
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= 1e-10
    assert verdict.compared > 40


@pytest.mark.slow
def test_multitask_digits_equal_one_process(tmp_path: Path) -> None:
    check_equal(tmp_path, small("multitask-digits", VT=16, VA=8, DT=8, VH=12, MT=4), devices=4)


@pytest.mark.parametrize("devices", [2, 3])
def test_val_digits_equal_one_process(tmp_path: Path, devices: int) -> None:
    check_equal(tmp_path, small("val-digits", VL=8, AL=6, VAL=4), devices=devices)


@pytest.mark.slow
def test_encoder_decoder_with_light_adaptors_equals_one_process(tmp_path: Path) -> None:
    """OFASys in small: what the encoder joins differs in every task, one has no text at all."""
    vision = {"layers": 2, "width": 16, "heads": 2, "outputs": 16, "patch": 4}
    sizes = {"blocks": 2, "width": 16, "heads": 4, "vocab": 30, "length": 8}
    target = {"shape": [5], "vocab": 30}

    def task(modules: list[str], inputs: list[str | None], batch: int, **fields: Any) -> Any:
        return {
            "modules": [*modules, "encoder", "decoder"],
            "losses": ["words"],
            "inputs": {"encoder": inputs},
            "batch": batch,
            "data": {
                "factory": "mmplan.zoo.synthetic:noise",
                "args": {"samples": 24, "fields": {"target": target, **fields}},
            },
        }

    image = {"shape": [3, 8, 8]}
    workload = Workload.model_validate(
        {
            "name": "ofasys",
            "batch": 8,
            "modules": {
                "vision": {
                    "factory": "mmplan.zoo.encoder:vit",
                    "args": {**vision, "image": 8},
                    "inputs": ["image"],
                },
                "audio": {
                    "factory": "mmplan.zoo.encoder:vit",
                    "args": {**vision, "image": [12], "channels": 2},
                    "inputs": ["speech"],
                },
                "encoder": {
                    "factory": "mmplan.zoo.seq2seq:encoder",
                    "args": sizes,
                    "inputs": ["source", "vision", "audio"],
                },
                "decoder": {
                    "factory": "mmplan.zoo.seq2seq:decoder",
                    "args": sizes,
                    "inputs": ["target", "encoder.0", "encoder.1"],
                },
            },
            "losses": {
                "words": {
                    "factory": "mmplan.zoo.losses:token_cross_entropy",
                    "args": {"ignore_index": 0},
                    "inputs": ["decoder", "target"],
                }
            },
            "tasks": {
                "caption": task(["vision"], [None, "vision", None], 8, image=image),
                "asr": task(["audio"], [None, None, "audio"], 4, speech={"shape": [2, 12]}),
                "vqa": task(
                    ["vision"],
                    ["source", "vision", None],
                    6,
                    image=image,
                    source={"shape": [7], "vocab": 30},
                ),
            },
            "train": {"precision": "fp64"},
        }
    )
    check_equal(tmp_path, workload, devices=3)


def test_every_sense_of_the_toy_is_an_encoder_of_its_own() -> None:
    workload = load_workload(EXAMPLES / "multitask-digits" / "workload.yaml")
    tasks = resolve_tasks(workload)
    assert len(workload.modules) == 6
    assert len(tasks) >= 4
    batches = {task.batch for task in tasks.values()}
    syncs = {sync for task in tasks.values() for sync in task.sync_batches.values()}
    assert len(batches) > 1
    assert len(syncs) > 1
    assert any(math.lcm(*task.sync_batches.values()) < task.batch for task in tasks.values())


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "multitask-digits",
            r"(\w+ +zero-shot accuracy: \d+\.\d%.*\n){5}mean of 5 senses: \d+\.\d% .*\n",
        ),
        ("val-digits", r"(\w+: digits told: \d+\.\d% .*\n){3}"),
    ],
    ids=["multitask-digits", "val-digits"],
)
def test_examples_evaluate_the_weights_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, lines: str
) -> None:
    """Of step 0: what is printed, not how good it is."""
    pytest.importorskip("sklearn")
    workload = load_workload(EXAMPLES / name / "workload.yaml")
    weights = {
        f"{module}.{key}": value.contiguous()
        for module in workload.modules
        for key, value in build_module(workload, module, EXAMPLES).state_dict().items()
    }
    save_file(weights, tmp_path / "final.safetensors")
    runpy.run_path(str(EXAMPLES / name / "evaluate.py"))["main"](tmp_path)
    assert re.fullmatch(lines, capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_senses_are_learned_also_those_never_paired_with_text() -> None:
    """Fifty steps of one process; ``make demo-multitask`` trains 200 and reaches 71 to 96%."""
    pytest.importorskip("sklearn")
    workload = load_workload(EXAMPLES / "multitask-digits" / "workload.yaml")
    assert workload.data is not None
    towers = {m: build_module(workload, m, EXAMPLES) for m in workload.modules}
    losses = {name: build_loss(workload, name, EXAMPLES) for name in workload.losses}
    fields = build_dataset(workload.data, EXAMPLES).fields
    taken = {name: str(spec.inputs[0]) for name, spec in workload.modules.items()}
    trained = [*towers.values(), *losses.values()]
    optimizer = torch.optim.AdamW([p for m in trained for p in m.parameters()], lr=5e-4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        optimizer.zero_grad()
        for task in resolve_tasks(workload).values():
            batch = torch.randperm(len(fields["label"]), generator=generator)[: task.batch]
            ((loss, sources),) = task.loss_inputs.items()
            names = [source.module or "" for source in sources]
            losses[loss](*(towers[m](fields[taken[m]][batch]) for m in names)).backward()
        optimizer.step()
    accuracy = zero_shot_accuracies(towers, taken)
    assert accuracy["vision"] > 0.6
    assert min(accuracy.values()) > 0.25


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_val_digits_from_profile_to_weights(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    workload, plan = EXAMPLES / "val-digits" / "workload.yaml", tmp_path / "plan.json"
    given = tmp_path / "p.json"
    commands: list[tuple[Program, list[object]]] = [
        ("mmplan", ["profile", workload, "-o", given]),
        (
            "mmplan",
            ["solve", workload, "--profile", given, "--devices", 3, "--solver", "mpsp", "-o", plan],
        ),
        ("mmplan", ["check", plan]),
        ("mmlaunch", ["verify", plan]),
        ("mmlaunch", ["run", plan, "--run-dir", tmp_path / "run", "--steps", 4]),
    ]
    for program, args in commands:
        done = call(program, *args)
        assert done.code == 0, done.err
    assert (tmp_path / "run" / "final.safetensors").is_file()


def test_digits_named_by_captions_are_the_words_in_which_they_differ() -> None:
    first = digits.prompts()[:, 0]
    assert (
        first[:, (first != first[0]).any(dim=0)].flatten().tolist() == digits.digit_ids().tolist()
    )
