"""Weights of a run, loaded by the libraries that its models come from."""

from __future__ import annotations

import importlib
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from mmlaunch.checkpoint.exported_weights import load_initial, targets
from mmlaunch.checkpoint.save import Content, Entry, save
from mmplan.errors import InvalidInputError
from mmplan.schema.base import document_text, file_sha256
from mmplan.schema.factories import build_dataset, build_loss, build_module
from mmplan.schema.plan import FileReference, Plan
from mmplan.schema.workload import load_workload
from mmplan.zoo.sequential import LayerSequential, from_layers
from tests.commands import Done, call, run
from tests.programs import loss, make_plan, trained_as, unit
from tests.test_checkpoint import tiny_disk
from tests.test_hf import CONFIG as CLIP
from tests.test_hf_mllm import DECODERS

transformers = pytest.importorskip("transformers")
# Of torch.distributed.checkpoint, where nothing is distributed.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

BATCH = 4
STEPS = 3
SQUARE = [[[0, 1], [2, 3]]]


class Run:
    """A run of a few steps under tp 2 x pp 2; each step takes all samples."""

    def __init__(self, folder: Path, plan: Plan, workload: dict[str, Any]) -> None:
        self.file = folder / "workload.yaml"
        self.file.write_text(json.dumps(workload))
        stated = load_workload(self.file)
        named = {
            "workload": FileReference(path=self.file.name, sha256=file_sha256(self.file)),
            "profile": FileReference(path="profile.json", sha256="0" * 64),
        }
        planned = trained_as(plan, stated, folder=folder).model_copy(update=named)
        (folder / "plan.json").write_text(document_text(planned))
        self.folder = folder / "run"
        where = ["--run-dir", self.folder, "--save-every", 1]
        done = run("mmlaunch", "run", folder / "plan.json", *where, cwd=folder)
        assert done.code == 0, done.err
        rows = (self.folder / "metrics.jsonl").read_text().splitlines()
        self.losses = [json.loads(row)["loss"] for row in rows]
        assert stated.data is not None
        data = build_dataset(stated.data, folder)
        samples = [data[index] for index in range(BATCH)]
        self.batch: dict[str, Tensor] = {
            name: torch.stack([sample[name] for sample in samples]) for name in samples[0]
        }

    def export(self, output: Path, *more: object) -> Any:
        return exported(self.folder, output, *more)


def exported(path: Path, output: Path, *more: object) -> Any:
    done = call("mmlaunch", "export", path, "-o", output, "--json", *more)
    assert done.code == 0, done.err
    return done.document


def spelled(modules: Any, losses: Any, fields: Any) -> dict[str, Any]:
    noise = {"factory": "mmplan.zoo.synthetic:noise", "args": {"samples": BATCH, "fields": fields}}
    return {
        "name": "export",
        "batch": BATCH,
        "modules": modules,
        "losses": losses,
        "data": noise,
        # A large eps: gradients that are zero but for rounding do not become steps.
        "train": {
            "steps": STEPS,
            "optimizer": "AdamW",
            "optimizer_args": {"lr": 1e-2, "eps": 1e-2},
        },
    }


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Llama with tied embeddings and biased attention."""
    config = {**DECODERS["llama 3"], "attention_bias": True}
    llm = {
        "factory": "mmplan.zoo.hf:causal_lm",
        "args": {"config": config},
        "inputs": ["tokens"],
    }
    captions = {
        "factory": "mmplan.zoo.losses:token_cross_entropy",
        "inputs": ["llm", "labels"],
    }
    field = {"shape": [8], "vocab": 64}
    return Run(
        tmp_path_factory.mktemp("decoder"),
        make_plan(
            unit("llm", "tokens", pp=2, tp=2, k=2, blocks=2, ranks=SQUARE, kind="1f1b"),
            losses=[loss("captions", "llm", "labels")],
            batch=BATCH,
        ),
        spelled({"llm": llm}, {"captions": captions}, {"tokens": field, "labels": field}),
    )


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Run:
    factories = {"vision": "images", "text": "tokens"}
    modules = {
        name: {
            "factory": f"mmplan.zoo.hf:clip_{name}",
            "args": {"config": CLIP},
            "inputs": [inputs],
        }
        for name, inputs in factories.items()
    }
    pairs = {
        "factory": "mmplan.zoo.losses:clip",
        "inputs": ["vision", "text"],
        "cross_sample": True,
    }
    fields = {"images": {"shape": [3, 16, 16]}, "tokens": {"shape": [9], "vocab": 50}}
    return Run(
        tmp_path_factory.mktemp("clip"),
        make_plan(
            unit("vision", "images", pp=2, tp=2, k=2, blocks=3, ranks=SQUARE),
            unit("text", "tokens", pp=2, tp=2, k=2, blocks=2, ranks=SQUARE),
            losses=[loss("pairs", "vision", "text", sync_batch=BATCH)],
            batch=BATCH,
        ),
        spelled(modules, {"pairs": pairs}, fields),
    )


def from_pretrained(kind: Any, folder: Path) -> nn.Module:
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def loss_of_decoder(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(input_ids=batch["tokens"], labels=batch["labels"]).loss


def loss_of_clip(model: Any, batch: dict[str, Tensor]) -> Tensor:
    found = model(input_ids=batch["tokens"], pixel_values=batch["images"], return_loss=True)
    return found.loss


@pytest.mark.slow
def test_a_decoder_has_the_loss_that_the_run_had_next(decoder: Run, tmp_path: Path) -> None:
    document = decoder.export(tmp_path / "out", "--step", 2)
    assert document["step"] == 2
    assert not document["models"][0]["notes"]
    model = from_pretrained(transformers.AutoModelForCausalLM, tmp_path / "out")
    found = loss_of_decoder(model, decoder.batch).item()
    assert found == pytest.approx(decoder.losses[2], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "clip"])
def test_plain_torch_goes_on_from_a_distributed_checkpoint(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The next step of one process, with moments and rates of the run, is the run's next."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    trained: Run = request.getfixturevalue(kind)
    trained.export(tmp_path / "dcp", "--step", 2, "--format", "dcp")
    trained.export(tmp_path / "after", "--step", 3)
    is_clip = kind == "clip"
    of = transformers.CLIPModel if is_clip else transformers.AutoModelForCausalLM
    after = from_pretrained(of, tmp_path / "after")
    model: Any = of.from_pretrained(tmp_path / "after")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=1.0)
    weights, state = get_state_dict(model, optimizer)
    load({"model": weights, "optim": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    (loss_of_clip if is_clip else loss_of_decoder)(model, trained.batch).backward()
    optimizer.step()
    wanted = dict(after.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, wanted[name], rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.slow
def test_two_towers_and_the_scale_of_their_loss_are_one_model(clip: Run, tmp_path: Path) -> None:
    document = clip.export(tmp_path / "out", "--step", 2)
    (model,) = document["models"]
    assert model["modules"] == ["vision", "text"]
    assert not model["notes"]
    found = loss_of_clip(from_pretrained(transformers.CLIPModel, tmp_path / "out"), clip.batch)
    assert found.item() == pytest.approx(clip.losses[2], rel=1e-6)


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {**SIZES, "num_attention_heads": 4}
TOWER = {**HEADS, "image_size": 16, "patch_size": 8}
TEXT = {**HEADS, "vocab_size": 64, "model_type": "llama", "num_key_value_heads": 2}
SIGLIP = {"vision_config": TOWER, "text_config": {**HEADS, "vocab_size": 64}}
WHISPER = {
    **{f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "ffn_dim")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{"d_model": 32, "vocab_size": 64, "num_mel_bins": 8, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"max_source_positions": 16, "max_target_positions": 16},
}
UNET = {
    **{"sample_size": 8, "block_out_channels": [32, 32]},
    **{f"{way}_block_types": [f"{way.title()}Block2D"] * 2 for way in ("down", "up")},
}


def whole(library: str, kind: str, config: dict[str, Any]) -> LayerSequential:
    """A model as one block."""
    of = getattr(importlib.import_module(library), kind)
    model = of(**config) if library == "diffusers" else of(of.config_class(**config))
    cut = LayerSequential(model)
    cut.remember(model)
    return cut


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "kind", "config"),
    [
        ("transformers", "MixtralForCausalLM", {**TEXT, "num_local_experts": 2}),
        ("transformers", "SiglipModel", SIGLIP),
        ("transformers", "WhisperForConditionalGeneration", WHISPER),
        (
            *("transformers", "LlavaForConditionalGeneration"),
            {"vision_config": {**TOWER, "model_type": "clip_vision_model"}, "text_config": TEXT},
        ),
        ("diffusers", "UNet2DModel", UNET),
    ],
)
def test_other_kinds_are_loaded_as_they_were(
    library: str, kind: str, config: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip(library)
    args = {"library": library, "kind": kind, "config": config}
    module = {"factory": f"{__name__}:whole", "args": args, "inputs": ["ids"]}
    losses = {"none": {"factory": "torch.nn:Identity", "inputs": ["model"]}}
    folder = saved_run(tmp_path, {"model": module}, losses, steps=[1])
    (model,) = exported(folder, tmp_path / "out")["models"]
    assert model["architecture"] == kind
    assert not model["notes"]
    loaded = from_pretrained(getattr(importlib.import_module(library), kind), tmp_path / "out")
    file = next((tmp_path / "out").glob("*.safetensors"))
    stored = load_file(file)
    assert stored.keys() >= dict(loaded.named_parameters()).keys()
    for name, tensor in loaded.state_dict().items():
        assert name not in stored or torch.equal(tensor, stored[name]), name


@pytest.mark.slow
def test_final_weights_of_a_run_without_checkpoints(decoder: Run, tmp_path: Path) -> None:
    decoder.export(tmp_path / "kept", "--step", STEPS)
    (decoder.folder / "checkpoints").rename(decoder.folder / "away")
    try:
        document = decoder.export(tmp_path / "final")
    finally:
        (decoder.folder / "away").rename(decoder.folder / "checkpoints")
    assert document["step"] == STEPS
    kept, final = (load_file(tmp_path / name / "model.safetensors") for name in ("kept", "final"))
    assert kept.keys() == final.keys()
    assert all(torch.equal(kept[name], final[name]) for name in kept)


@pytest.mark.slow
def test_a_run_starts_from_a_distributed_checkpoint(clip: Run, tmp_path: Path) -> None:
    """Of torch's own, in three chunks of three ranks, and of ours."""
    clip.export(tmp_path / "ours", "--format", "dcp")
    clip.export(tmp_path / "whole")
    script = tmp_path / "save.py"
    script.write_text(SHARDED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "3", "--log-dir", str(tmp_path), str(script)]
    given = map(str, [*torchrun, tmp_path / "whole" / "model.safetensors", tmp_path / "theirs"])
    subprocess.run(list(given), check=True, timeout=100, capture_output=True)
    workload = load_workload(clip.file)
    for owner in workload.modules:
        for folder in ("ours", "theirs"):
            started = build_module(workload, owner, clip.file.parent)
            load_initial(started, tmp_path / folder, owner)
            wanted = build_module(workload, owner, clip.file.parent)
            load_initial(wanted, tmp_path / "whole", owner)
            for name, tensor in started.state_dict().items():
                assert torch.equal(tensor, wanted.state_dict()[name]), name


SHARDED = """
import sys
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

mesh = init_device_mesh("cpu", (3,))
weights = load_file(sys.argv[1])
cut = {k: distribute_tensor(v, mesh, [Shard(0)]) if v.dim() else v for k, v in weights.items()}
moments = {"state": {k: {"exp_avg": v} for k, v in cut.items()}}
dcp.save({"app": {"model": cut, "optim": moments}}, checkpoint_id=sys.argv[2])
dist.destroy_process_group()
"""


# ---- plain modules, from a checkpoint that no run had to write ----


class Plain(nn.Module):
    """Two layers between an embedding and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def plain() -> LayerSequential:
    return from_layers(
        Plain(),
        "layers",
        before=lambda part, ids: part.embed(ids) * part.scale,
        after=lambda part, x: part.head(x),
        first=["embed", "scale"],
        last=["head"],
    )


def head() -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 3))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))


def saved_run(folder: Path, modules: Any, losses: Any, *, steps: list[int]) -> Path:
    """A run's folder with checkpoints of random weights, and of moments."""
    file = folder / "workload.yaml"
    file.write_text(json.dumps(spelled(modules, losses, {})))
    workload, run_dir = load_workload(file), folder / "run"
    run_dir.mkdir()
    (run_dir / "run.json").write_text(json.dumps({"workload": "../workload.yaml"}))
    parts = {owner: build_module(workload, owner, folder) for owner in modules}
    parts |= {f"losses.{name}": build_loss(workload, name, folder) for name in losses}
    for step in steps:
        torch.manual_seed(step)
        entries = [
            Entry(
                name=f"{owner}.{name}",
                kind=kind,
                full_shape=tuple(tensor.shape),
                boxes=[((0,) * tensor.dim(), torch.rand(tensor.shape).to(tensor.dtype))],
            )
            for owner, part in parts.items()
            for name, tensor in targets(part)
            for kind in ("param", "optim.exp_avg")[: 1 + tensor.requires_grad]
        ]
        content = Content(root=run_dir / "checkpoints", step=step, state={}, meta={})
        save(content, entries, rank=0, gather=lambda item, *_, **__: [item])
    return run_dir


@pytest.fixture
def plain_run(tmp_path: Path) -> Path:
    """A run's folder with checkpoints of steps 2 and 4."""
    modules = {
        "body": {"factory": f"{__name__}:plain", "inputs": ["ids"]},
        "head": {"factory": f"{__name__}:head", "inputs": ["body"]},
    }
    losses = {"scaled": {"factory": f"{__name__}:Scaled", "inputs": ["head"]}}
    return saved_run(tmp_path, modules, losses, steps=[2, 4])


def test_plain_modules_have_their_own_names(plain_run: Path, tmp_path: Path) -> None:
    document = exported(plain_run, tmp_path / "out")
    assert document["step"] == 4
    assert [model["modules"] for model in document["models"]] == [["body"], ["head"], []]
    body, other = Plain(), nn.Linear(7, 3)
    load_model(body, tmp_path / "out" / "body" / "model.safetensors")
    assert torch.equal(body.head.weight, body.embed.weight)
    stored = load_file(tmp_path / "out" / "head" / "model.safetensors")
    assert stored.keys() == head().state_dict().keys()
    left = load_file(tmp_path / "out" / "losses" / "model.safetensors")
    assert list(left) == ["losses.scaled.temperature"]
    # An earlier checkpoint by its own folder, or by its step, is another one.
    exported(plain_run / "checkpoints" / "step-2", tmp_path / "two")
    exported(plain_run, tmp_path / "by-step", "--step", 2)
    two = Plain()
    load_model(two, tmp_path / "two" / "body" / "model.safetensors")
    assert not torch.equal(two.embed.weight, body.embed.weight)
    again = load_file(tmp_path / "by-step" / "body" / "model.safetensors")
    assert torch.equal(again["embed.weight"], two.embed.weight)
    assert other.weight.shape == stored["0.weight"].shape


@pytest.mark.slow
def test_plain_modules_start_from_what_was_exported(plain_run: Path, tmp_path: Path) -> None:
    exported(plain_run, tmp_path / "st")
    exported(plain_run, tmp_path / "dcp", "--format", "dcp")
    for kind in ("st", "dcp"):
        started = plain()
        load_initial(started, tmp_path / kind / "body", "body")
        stored = load_file(tmp_path / "st" / "body" / "model.safetensors")
        for name, tensor in started.state_dict().items():
            assert torch.equal(tensor, stored[started.source_names[name]]), name


class Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("touched"),)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"a": Evil()}), r"names \w+.*, which is not read"),
        (pickle.dumps({"a": 1}), "no metadata"),
        (b"not a pickle", "no metadata"),
        (b"", "no metadata"),
    ],
)
def test_metadata_that_is_no_metadata_is_refused(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(InvalidInputError, match=message):
        load_initial(head(), tmp_path, "head")
    assert not (tmp_path / "touched").exists()


@pytest.mark.slow
def test_a_damaged_distributed_checkpoint_is_refused(plain_run: Path, tmp_path: Path) -> None:
    exported(plain_run, tmp_path / "dcp", "--format", "dcp")
    file = tmp_path / "dcp" / "head" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:700])
    with pytest.raises(InvalidInputError, match="cannot be read"):
        load_initial(head(), file.parent, "head")
    file.unlink()
    with pytest.raises(InvalidInputError, match="No such file"):
        load_initial(head(), file.parent, "head")


def refused(path: Path, output: Path, *more: object) -> Done:
    done = call("mmlaunch", "export", path, "-o", output, *more)
    assert done.code in (2, 4), done.err
    return done


def test_what_cannot_be_exported_is_one_line(plain_run: Path, tmp_path: Path) -> None:
    out, second = tmp_path / "out", plain_run / "checkpoints" / "step-2"
    assert "neither a run's folder nor a checkpoint" in refused(tmp_path, out).message
    done = refused(plain_run, out, "--step", 3)
    assert "no checkpoint of step 3" in done.message
    assert done.hint == "its checkpoints: 2, 4"
    assert "is one checkpoint" in refused(second, out, "--step", 2).message
    assert "--format pickle: unknown" in refused(plain_run, out, "--format", "pickle").message
    assert "is not empty" in refused(plain_run, plain_run).message
    assert "is a file" in refused(plain_run, tmp_path / "workload.yaml").message
    (tmp_path / "workload.yaml").rename(tmp_path / "moved.yaml")
    assert "--workload" in refused(plain_run, out).hint
    moved = ["--workload", tmp_path / "moved.yaml"]
    file = second / "rank-0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "SHA-256" in refused(second, out, *moved).message
    (second / "manifest.json").unlink()
    assert "manifest.json" in refused(second, out, *moved).message
    assert not list(tmp_path.glob(".out*"))
    exported(plain_run, out, *moved)


@pytest.mark.slow
def test_another_workload_is_refused(plain_run: Path, tmp_path: Path) -> None:
    workload = json.loads((tmp_path / "workload.yaml").read_text())
    workload["modules"]["head"] = {**workload["modules"]["head"], "factory": f"{__name__}:plain"}
    (tmp_path / "other.yaml").write_text(json.dumps(workload))
    done = refused(plain_run, tmp_path / "out", "--workload", tmp_path / "other.yaml")
    assert "holds no head.0.before." in done.message
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transformers", "dcp"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    kind: str, plain_run: Path, tmp_path: Path
) -> None:
    with tiny_disk(tmp_path / "disk", "8k"):
        done = refused(plain_run, tmp_path / "disk" / "out", "--format", kind)
        assert "disk full" in done.message
        assert done.hint == "make room, then export again"
        assert not list((tmp_path / "disk").iterdir())
