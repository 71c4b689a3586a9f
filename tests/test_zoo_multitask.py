"""Modules, data and workloads of several tasks: those of the papers, and those to train here."""

from __future__ import annotations

import math
import re
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mmplan.errors import InvalidInputError
from mmplan.profiling.flow import BASE, TaskFlow
from mmplan.schema.factories import build_dataset, build_loss, build_module
from mmplan.schema.workload import Source, Workload, load_workload, resolve_tasks
from mmplan.zoo import digits, towers
from mmplan.zoo.encoder import vit
from mmplan.zoo.patches import PatchEmbedding, join_neighbours
from mmplan.zoo.senses import zero_shot_accuracies
from mmplan.zoo.seq2seq import decoder, encoder
from mmplan.zoo.synthetic import noise
from tests.commands import call
from tests.solving import module_profile, profile, run_solve
from tests.verification import verify_in_process
from tests.zoo_tp import run_split_block

EXAMPLES = Path(__file__).parents[1] / "examples"
PAPERS = EXAMPLES / "papers"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def parameters(modules: Mapping[str, nn.Module]) -> dict[str, float]:
    """Of each module, in 1e9."""
    return {
        name: sum(p.numel() for p in module.parameters()) / 1e9 for name, module in modules.items()
    }


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
    assert len(audio[0].embed.position) == 2 * 4
    assert audio(torch.rand(3, 1, 32, 51)).shape == (3, 5)
    speech = vit(2, 16, heads=2, outputs=5, image=[24], patch=[2], channels=7, merge=2)
    assert speech(torch.rand(3, 7, 24)).shape == (3, 6, 5)


# --- the encoder-decoder -------------------------------------------------------------------

SIZES = {"heads": 4, "vocab": 30, "length": 8}


def words(*lengths: int) -> Tensor:
    ids = torch.randint(1, 30, (len(lengths), max(lengths)))
    return ids * (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])


def test_padding_changes_nothing() -> None:
    read, write = encoder(2, 16, **SIZES).double(), decoder(2, 16, **SIZES).double()
    short, answer = words(3, 3), words(4, 4)
    padded = torch.cat([short, short.new_zeros(2, 4)], dim=1)
    want = write((answer, *read(short)))
    torch.testing.assert_close(write((answer, *read(padded))), want)


def test_a_token_depends_on_those_before_it_and_on_everything_read() -> None:
    read, write = encoder(2, 16, **SIZES).double(), decoder(3, 16, **SIZES).double()
    features = torch.rand(1, 3, 16, dtype=torch.float64)
    source, answer = words(5), words(6)
    want = write((answer, *read[1](read[0](source, features))))
    changed = answer.clone()
    changed[0, 3] = changed[0, 3] % 29 + 1
    got = write((changed, *read[1](read[0](source, features))))
    torch.testing.assert_close(got[:, :3], want[:, :3])
    assert (got[:, 3:] - want[:, 3:]).abs().amin(dim=1).min() > 0
    other = write((answer, *read[1](read[0](source, features * 2))))
    assert (other - want).abs().amax(dim=(0, 2)).min() > 1e-6


def test_what_a_task_lacks_is_left_out() -> None:
    read = encoder(2, 16, **SIZES)
    features = torch.rand(2, 3, 16)
    rows, mask = read[1](read[0](None, None, features))
    assert rows.shape == (2, 3, 16)
    assert mask.all()
    rows, mask = read[1](read[0](words(5, 2), None, features))
    assert rows.shape == (2, 8, 16)
    assert mask.sum(dim=1).tolist() == [8, 5]
    with pytest.raises(InvalidInputError, match="neither tokens nor features"):
        read[0](None, None)


@pytest.mark.parametrize("tp", [2, 4])
def test_split_blocks_of_the_language_model_equal_whole_ones(tp: int) -> None:
    state: tuple[Any, ...] = (words(5, 2), torch.rand(2, 3, 16, dtype=torch.float64))
    for block in encoder(2, 16, **SIZES).double():
        want = block(*state)
        got = run_split_block(block, state, tp)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        state = want
    state = (words(6, 4), *state)
    for block in decoder(2, 16, **SIZES).double():
        linears = {n for n, m in block.named_modules() if isinstance(m, nn.Linear)}
        assert linears - set(block.tp_plan) <= {"head.1"}
        want = block(*state)
        got = run_split_block(block, state, tp)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        state = want if isinstance(want, tuple) else (want,)


@pytest.mark.parametrize("factory", [encoder, decoder])
def test_sizes_of_the_language_model_are_checked(factory: Callable[..., nn.Sequential]) -> None:
    with pytest.raises(InvalidInputError, match="heads 3 does not divide width 16"):
        factory(2, 16, heads=3, vocab=30, length=8)
    with pytest.raises(InvalidInputError, match="vocab is 0"):
        factory(2, 16, heads=4, vocab=0, length=8)


# --- noise ---------------------------------------------------------------------------------


def test_noise_has_the_shapes_placeholders_and_ids_that_are_asked_for() -> None:
    data = noise(
        {
            "image": {"shape": [3, 4]},
            "tokens": {"shape": [9], "vocab": 20, "rows": {19: 2, 18: 3}},
            "labels": {"shape": [9], "vocab": 18, "ignored": 5},
        },
        samples=40,
    )
    samples = [data[index] for index in range(len(data))]
    tokens = torch.stack([sample["tokens"] for sample in samples])
    assert tokens[:, :5].eq(torch.tensor([19, 19, 18, 18, 18])).all()
    assert tokens[:, 5:].min() == 1
    assert tokens[:, 5:].max() == 17
    labels = torch.stack([sample["labels"] for sample in samples])
    assert ((labels == -100).sum(dim=1) == 5).all()
    assert samples[0]["image"].shape == (3, 4)
    assert torch.equal(data[7]["tokens"], samples[7]["tokens"])
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


# --- the papers' workloads -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected", "total"),
    [
        (
            "multitask-clip",
            {"vision": 0.63, "text": 0.35, "audio": 0.086, "depth": 0.022, "thermal": 0.086},
            1.2,
        ),
        ("ofasys", {"encoder": 0.21, "decoder": 0.32, "vision": 0.088}, 0.66),
        ("qwen-val-9b", {"vision": 1.89, "audio": 0.66, "llm": 7.72}, 10.3),
        ("qwen-val-30b", {"vision": 1.9, "audio": 0.67, "llm": 32.5}, 35.1),
        ("qwen-val-70b", {"vision": 1.97, "audio": 0.72, "llm": 72.3}, 75.0),
    ],
)
def test_papers_modules_have_the_published_numbers_of_parameters(
    name: str, expected: dict[str, float], total: float
) -> None:
    workload = load_workload(PAPERS / f"{name}.yaml")
    built = parameters(
        {m: build_module(workload, m, PAPERS, device="meta") for m in workload.modules}
    )
    for module, size in expected.items():
        assert built[module] == pytest.approx(size, rel=0.02), module
    assert sum(built.values()) == pytest.approx(total, rel=0.03)


@pytest.mark.parametrize(("name", "sizes"), [("multitask-clip", [4, 7, 10]), ("ofasys", [4, 7])])
def test_the_papers_task_sets_are_those_of_the_file(name: str, sizes: list[int]) -> None:
    workload = load_workload(PAPERS / f"{name}.yaml")
    comments = (PAPERS / f"{name}.yaml").read_text().partition("version:")[0]
    sets = [found.split(",") for found in re.findall(r"--tasks (\S+)", comments)]
    for tasks in (*sets, list(workload.tasks)):
        assert len(tasks) == sizes.pop(0)
        assert set(tasks) <= set(workload.tasks)
    assert not sizes


@pytest.mark.parametrize("name", ["ofasys", "qwen-val-9b", "qwen-val-30b", "qwen-val-70b"])
def test_papers_data_fill_the_places_of_their_features(name: str) -> None:
    """What the model on its full size would refuse: the number of placeholders."""
    workload = load_workload(PAPERS / f"{name}.yaml")
    rows = {"vision": 256, "audio": 750}
    for task in resolve_tasks(workload).values():
        assert task.data is not None
        sample = build_dataset(task.data, PAPERS)[0]
        for module in task.modules:
            args = workload.modules[module].args
            for source in task.inputs[module]:
                if source.field in ("image", "speech", "poses"):
                    side = args["image"]
                    extent = [side, side] if isinstance(side, int) else side
                    want = [args.get("channels", 3), *extent]
                    assert list(sample[source.field].shape) == want
                elif source.field is not None:
                    assert sample[source.field].max() < args["vocab"]
        for place, encoder_name in enumerate(("vision", "audio")):
            if "llm" in task.modules:
                own = workload.modules["llm"].args["placeholders"][place]
                expected = rows[encoder_name] if encoder_name in task.modules else 0
                assert (sample["tokens"] == own).sum() == expected


@pytest.mark.parametrize(
    ("name", "task", "outputs"),
    [
        ("multitask-clip", "VA", {"vision": [[8, 1024]], "audio": [[8, 1024]]}),
        ("multitask-clip", "MT", {"motion": [[8, 1024]], "text": [[8, 1024]]}),
        ("ofasys", "vqa", {"encoder": [[8, 608, 1024], [8, 608]], "decoder": [[8, 16, 59457]]}),
        ("ofasys", "asr", {"audio": [[8, 375, 1024]], "encoder": [[8, 375, 1024], [8, 375]]}),
        ("qwen-val-30b", "VAL", {"vision": [[8, 256, 5120]], "audio": [[8, 750, 5120]]}),
        ("qwen-val-70b", "AL", {"audio": [[8, 750, 8192]], "llm": [[8, 2048, 152064]]}),
    ],
)
def test_papers_tasks_flow_through_their_modules(
    name: str, task: str, outputs: dict[str, list[list[int]]]
) -> None:
    """Shapes of a batch of 8, at full size, without memory."""
    workload = load_workload(PAPERS / f"{name}.yaml")
    flow = TaskFlow(workload, PAPERS, resolve_tasks(workload)[task])
    for module, shapes in outputs.items():
        flow.count_module(module, tp=1, samples=BASE)
        (output,) = flow.inputs("test", [Source(module=module)], BASE)
        found = output if isinstance(output, tuple) else (output,)
        assert [list(tensor.shape) for tensor in found] == shapes
    for loss in flow.task.loss_inputs:
        assert flow.count_loss(loss, BASE).forward.names


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "cluster", "devices"),
    [
        ("multitask-clip", "a800-8x8", 16),
        ("ofasys", "a800-8x8", 8),
        ("qwen-val-9b", "a800-8x8", 16),
        ("qwen-val-30b", "a800-32", 64),
        ("qwen-val-70b", "a800-32", 256),
    ],
)
def test_papers_workloads_are_planned_from_analytic_profiles(
    tmp_path: Path, name: str, cluster: str, devices: int
) -> None:
    workload, profiled, plan = PAPERS / f"{name}.yaml", tmp_path / "p.json", tmp_path / "plan.json"
    done = call("mmplan", "profile", workload, "--analytic", "--cluster", cluster, "-o", profiled)
    assert done.code == 0, done.err
    done = call(
        *("mmplan", "solve", workload, "--profile", profiled, "--devices", devices),
        *("--solver", "mpsp", "-o", plan),
    )
    assert done.code == 0, done.err
    assert call("mmplan", "check", plan).code == 0


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


def test_multitask_digits_equal_one_process(tmp_path: Path) -> None:
    check_equal(tmp_path, small("multitask-digits", VT=16, VA=8, DT=8, VH=12, MT=4), devices=4)


@pytest.mark.parametrize("devices", [2, 3])
def test_val_digits_equal_one_process(tmp_path: Path, devices: int) -> None:
    check_equal(tmp_path, small("val-digits", VL=8, AL=6, VAL=4), devices=devices)


def test_encoder_decoder_with_light_adaptors_equals_one_process(tmp_path: Path) -> None:
    """OFASys in small: what the encoder joins differs in every task, one has no text at all."""
    vision = {"layers": 2, "width": 16, "heads": 2, "outputs": 16, "patch": 4}
    sizes = {"blocks": 2, "width": 16, **SIZES}
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
    for command in (
        ("mmplan", "profile", workload, "-o", tmp_path / "p.json"),
        (
            *("mmplan", "solve", workload, "--profile", tmp_path / "p.json", "--devices", 3),
            *("--solver", "mpsp", "-o", plan),
        ),
        ("mmplan", "check", plan),
        ("mmlaunch", "verify", plan),
        ("mmlaunch", "run", plan, "--run-dir", tmp_path / "run", "--steps", 4),
    ):
        done = call(*command)
        assert done.code == 0, done.err
    assert (tmp_path / "run" / "final.safetensors").is_file()


def test_digits_named_by_captions_are_the_words_in_which_they_differ() -> None:
    first = digits.prompts()[:, 0]
    assert (
        first[:, (first != first[0]).any(dim=0)].flatten().tolist() == digits.digit_ids().tolist()
    )
