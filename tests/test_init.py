"""``mmplan init``: from a model's configuration to a run and back, without a line of code."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mmlaunch.checkpoint.exported_weights import load_initial
from mmplan.errors import InvalidInputError
from mmplan.ragged import Ragged
from mmplan.schema.factories import build_dataset, build_loss, build_module
from mmplan.schema.workload import load_workload
from mmplan.zoo.automatic.blocks import CutStep
from mmplan.zoo.automatic.denoisers import denoiser_fields
from mmplan.zoo.losses import TokenCrossEntropy
from tests.commands import call, run
from tests.init_models import CONFIGS, FAMILY_CONFIGS, TINY_AUDIO, TINY_TEXT

transformers = pytest.importorskip("transformers")
PLAIN = {"unet": (), "Translator": ("--sample", "tests.init_models:sentences")}


def configuration(name: str, folder: Path) -> Path:
    config = (CONFIGS | FAMILY_CONFIGS)[name]
    which = {"architectures": [name]} if "model_type" in config else {"_class_name": name}
    file = folder / "config.json"
    file.write_text(json.dumps({**config, **which}))
    return file


def is_of_diffusers(name: str) -> bool:
    return "model_type" not in CONFIGS.get(name, {"model_type": None})


def planned(folder: Path, devices: int = 4) -> Path:
    """Profile, plan and check a folder that init wrote."""
    workload, profile, plan = (folder / n for n in ("workload.yaml", "profile.json", "plan.json"))
    for words in (
        ("profile", workload, "--analytic", "--cluster", f"cpu-{devices}", "-o", profile),
        ("solve", workload, "--profile", profile, "--devices", devices, "-o", plan),
        ("check", plan),
    ):
        done = call("mmplan", *words)
        assert done.code == 0, done.err
    return plan


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [*CONFIGS, *PLAIN])
def test_from_a_model_to_its_trained_weights(name: str, tmp_path: Path) -> None:
    folder, out = tmp_path / "work", tmp_path / "out"
    if is_of_diffusers(name):
        pytest.importorskip("diffusers")
    is_plain = name in PLAIN
    source = f"tests.init_models:{name}" if is_plain else configuration(name, tmp_path)
    done = run("mmplan", "init", source, "-o", folder, *PLAIN.get(name, ()), cwd=Path.cwd())
    assert done.code == 0, done.err
    assert "equal the model's own" in done.out
    plan = planned(folder)
    held = run(
        "mmlaunch", "verify", plan, "--steps", 1, "--original", "model=model:original", cwd=tmp_path
    )
    assert held.code == 0, held.err
    trained = tmp_path / "run"
    done = run("mmlaunch", "run", plan, "--steps", 3, "--run-dir", trained, cwd=tmp_path)
    assert done.code == 0, done.err
    done = call("mmlaunch", "export", trained, "-o", out)
    assert done.code == 0, done.err
    model = loaded(name, out)
    workload = load_workload(folder / "workload.yaml")
    cut = build_module(workload, "model", folder)
    load_initial(cut, trained / "final.safetensors", "model")
    module: Any = importlib.import_module("model")
    uncut = module.original()
    uncut.model = model
    assert workload.data is not None
    data = build_dataset(workload.data, folder)
    samples = [data[i] for i in range(3)]
    inputs = [torch.stack([s[str(f)] for s in samples]) for f in workload.modules["model"].inputs]
    with torch.no_grad():
        given: Any = tuple(inputs) if len(inputs) > 1 else inputs[0]
        torch.testing.assert_close(cut.eval()(given), uncut.eval()(*inputs), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_from_a_model_of_several_parts_to_its_trained_weights(name: str, tmp_path: Path) -> None:
    folder, trained, out = tmp_path / "work", tmp_path / "run", tmp_path / "out"
    assert "equal the model's own" in done_by(
        "mmplan", "init", configuration(name, tmp_path), "-o", folder
    )
    plan = planned(folder)
    done_by("mmlaunch", "verify", plan, "--steps", 1, "--original", "model:original")
    done_by("mmlaunch", "run", plan, "--steps", 3, "--run-dir", trained)
    assert call("mmlaunch", "export", trained, "-o", out).code == 0
    model = loaded(name, out)
    workload = load_workload(folder / "workload.yaml")
    modules = {part: build_module(workload, part, folder).eval() for part in workload.modules}
    losses = {loss: build_loss(workload, loss, folder) for loss in workload.losses}
    for part, module in (modules | losses).items():
        owner = part if part in modules else f"losses.{part}"
        load_initial(cast(Any, module), trained / "final.safetensors", owner)
    assert workload.data is not None
    data = build_dataset(workload.data, folder)
    samples = [data[i] for i in range(6)]
    fields = {key: joined([s[key] for s in samples]) for key in samples[0]}
    whole: Any = importlib.import_module("model")
    uncut = whole.original()
    uncut.model = model.eval()
    with torch.no_grad():
        known: dict[str, Any] = dict(fields)
        for part, module in modules.items():
            inputs = [known[str(name)] for name in workload.modules[part].inputs]
            known[part] = module(tuple(inputs) if len(inputs) > 1 else inputs[0])
        ((of_loss, loss),) = losses.items()
        found = loss(*(known[str(name)] for name in workload.losses[of_loss].inputs))
        if isinstance(loss, TokenCrossEntropy):
            found = found / loss.count({"labels": fields["labels"]}).sum()
        torch.testing.assert_close(found, uncut(**fields), rtol=1e-6, atol=0)
    # The trained weights are a start too, the loss's scale among them.
    again = tmp_path / "again"
    assert call("mmplan", "init", out, "-o", again, "--no-check").code == 0
    text = (again / "workload.yaml").read_text()
    assert text.count("init: ") == len(modules)
    assert ("init_scale" in text) == workload.losses[of_loss].cross_sample


def test_parts_of_a_model_are_modules_of_the_workload(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    source = configuration("SiglipModel", tmp_path)
    done = call("mmplan", "init", source, "-o", folder, "--layers", "text_model.encoder.layers")
    assert done.code == 2
    assert "is cut at the layers of its parts" in done.message
    assert call("mmplan", "init", source, "-o", folder, "--no-check").code == 0
    workload = load_workload(folder / "workload.yaml")
    assert list(workload.modules) == ["vision", "text"]
    assert workload.losses["sigmoid"].cross_sample


def joined(values: list[Any]) -> Any:
    """A field of some samples as one of a batch."""
    if isinstance(values[0], Ragged):
        return Ragged(*map(torch.cat, zip(*values, strict=True)))
    return torch.stack(values)


def done_by(*words: Any) -> str:
    """What a command printed that ended well."""
    done = run(*words, cwd=Path.cwd())
    assert done.code == 0, done.err
    return done.out


def loaded(name: str, folder: Path) -> nn.Module:
    """The exported model as its own library loads it: nothing is missing, nothing left over."""
    if name in PLAIN:
        made = getattr(importlib.import_module("tests.init_models"), name)()
        model: nn.Module = made[0] if isinstance(made, tuple) else made
        stored = load_file(folder / "model.safetensors")
        shared = {n for n, _ in model.named_parameters(remove_duplicate=False)} - set(stored)
        assert shared <= {"head.weight"}
        model.load_state_dict(stored, strict=False)
        return model
    if is_of_diffusers(name):
        return getattr(importlib.import_module("diffusers"), name).from_pretrained(folder)
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "nowhere: No such file or directory"),
        ("tests.init_models:Translator", "whose inputs are not known"),
        ("tests.init_models:sentences", "whose inputs are not known"),
        ("tests.init_models:nothing", "has no 'nothing'"),
    ],
)
def test_what_is_no_model_is_refused(source: str, message: str, tmp_path: Path) -> None:
    done = call("mmplan", "init", source, "-o", tmp_path / "work")
    assert done.code == 2
    assert message in done.message
    assert not (tmp_path / "work").exists()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen2AudioForConditionalGeneration": (
        {
            "model_type": "qwen2_audio",
            "text_config": {"model_type": "qwen2", **TINY_TEXT},
            "audio_config": {"model_type": "qwen2_audio_encoder", **TINY_AUDIO},
        },
        "selects its frames by their values",
    ),
    "VipLlavaForConditionalGeneration": (
        {**FAMILY_CONFIGS["LlavaForConditionalGeneration"], "model_type": "vipllava"},
        "takes beside images",
    ),
    "Wav2Vec2ForCTC": (CONFIGS["Wav2Vec2ForSequenceClassification"], "returns ['logits'], and how"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_cut_says_why(name: str, tmp_path: Path) -> None:
    config, message = REFUSED[name]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, "architectures": [name]}))
    done = call("mmplan", "init", file, "-o", tmp_path / "work")
    assert done.code == 2
    assert name in done.message
    assert message in done.message
    assert not (tmp_path / "work").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Branching", "Branching cannot be traced at"),
        ("Centred", "output for a sample depends on the other samples"),
        ("Normed", "running_mean"),
    ],
)
def test_a_plain_model_that_cannot_be_cut_says_why_and_leaves_nothing(
    name: str, message: str, tmp_path: Path
) -> None:
    words = (f"tests.init_models:{name}", "--sample", "tests.init_models:rows")
    done = run("mmplan", "init", *words, "-o", tmp_path / "work", cwd=Path.cwd())
    assert done.code == 2
    assert message in done.err
    assert "aten" not in done.err + done.out  # torch's graph is no message
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("AutoencoderKL", {}, "how AutoencoderKL is called is not known"),
        (
            "UNet2DConditionModel",
            {"addition_embed_type": "text_time"},
            "with addition_embed_type 'text_time' takes more",
        ),
    ],
)
def test_a_denoiser_that_takes_more_is_refused(
    name: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        denoiser_fields(name, config, None)


def test_ragged_samples_are_refused() -> None:
    block = CutStep(lambda part, x: part.layer(x), nn.Module(), ())
    block.layer = nn.Linear(4, 4)
    block.expect([[(4, 4)]])
    assert block(torch.zeros(2, 4)).shape == (2, 4)
    with pytest.raises(InvalidInputError, match="samples of several lengths"):
        block(Ragged(torch.zeros(3, 4), torch.tensor([1, 2])))


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    done = call("mmplan", "init", configuration("BertForMaskedLM", tmp_path), "-o", tmp_path)
    assert done.code == 2
    assert "is not empty" in done.message


@pytest.mark.slow
def test_a_wrong_cut_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    source = configuration("T5ForConditionalGeneration", tmp_path)
    assert call("mmplan", "init", source, "-o", folder, "--no-check").code == 0
    text = (folder / "model.py").read_text()
    wrong = text.replace("aten.mul.Tensor(", "aten.div.Tensor(")
    assert wrong != text
    (folder / "model.py").write_text(wrong)
    words = ("--steps", 1, "--original", "model=model:original")
    done = run("mmlaunch", "verify", planned(folder, 1), *words, cwd=tmp_path)
    assert done.code != 0
    assert "differ from model=model:original" in done.err
