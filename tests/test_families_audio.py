"""Families of transformers cut into parts, against the whole model: SigLIP, audio, BLIP-2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mmlaunch.checkpoint.exported_weights import load_initial
from mmplan.errors import InvalidInputError
from mmplan.zoo import hf
from mmplan.zoo.sequential import LayerSequential
from tests.test_export import exported, from_pretrained, saved_run

transformers = pytest.importorskip("transformers")

Fields = dict[str, Tensor]
BATCH = 4


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model, its parts, and what each makes of a batch.

    Attributes:
        kind: the whole model's class.
        config: its config.json.
        modules: part to its factory, its arguments beside the configuration, and its inputs.
        batch: makes the data fields.
        whole: the whole model's outputs, those of the parts that ``outputs`` names.
        losses: of a workload.
    """

    kind: str
    config: dict[str, Any]
    modules: dict[str, tuple[Callable[..., LayerSequential], dict[str, Any], list[str]]]
    batch: Callable[[], Fields]
    whole: Callable[[Any, Fields], list[Tensor]]
    outputs: list[str]
    losses: dict[str, Any]

    def model(self) -> Any:
        """The whole model, every weight random: no bias or query is zero."""
        made = getattr(transformers, self.kind)
        torch.manual_seed(5)
        model = made(made.config_class(**self.config)).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.2)
        return model

    def parts(self) -> dict[str, LayerSequential]:
        return {
            name: factory(self.config, **args).double().eval()
            for name, (factory, args, _) in self.modules.items()
        }

    def spelled(self) -> dict[str, Any]:
        """The modules of a workload."""
        return {
            name: {
                "factory": f"{factory.__module__}:{factory.__name__}",
                "args": {"config": self.config, **args},
                "inputs": inputs,
            }
            for name, (factory, args, inputs) in self.modules.items()
        }

    def run(self, parts: dict[str, LayerSequential], fields: Fields) -> list[Tensor]:
        known: dict[str, Any] = dict(fields)
        for name, (_, _, inputs) in self.modules.items():
            known[name] = parts[name](*(known[item] for item in inputs))
        return [known[name] for name in self.outputs]


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {**SIZES, "num_attention_heads": 4}
IMAGE = {**HEADS, "image_size": 16, "patch_size": 8}


def tokens(length: int, vocab: int = 50) -> Tensor:
    return torch.randint(3, vocab, (BATCH, length))


def images() -> Tensor:
    return torch.randn(BATCH, 3, 16, 16, dtype=torch.float64)


def siglip_features(model: Any, fields: Fields) -> list[Tensor]:
    image = model.get_image_features(pixel_values=fields["images"])
    text = model.get_text_features(input_ids=fields["tokens"])
    return [image.pooler_output, text.pooler_output]


FAMILIES = {
    "siglip": Family(
        kind="SiglipModel",
        config={
            "vision_config": IMAGE,
            "text_config": {
                **HEADS,
                **{"vocab_size": 50, "max_position_embeddings": 9},
                **{"bos_token_id": 1, "eos_token_id": 2},
            },
        },
        modules={
            "vision": (hf.siglip_vision, {"pooled": True}, ["images"]),
            "text": (hf.siglip_text, {}, ["tokens"]),
        },
        batch=lambda: {"images": images(), "tokens": tokens(9)},
        whole=siglip_features,
        outputs=["vision", "text"],
        losses={
            "pairs": {
                "factory": "mmplan.zoo.losses:sigmoid",
                "inputs": ["vision", "text"],
                "cross_sample": True,
            }
        },
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_a_saved_model_equal_it(name: str, tmp_path: Path) -> None:
    """Outputs and every gradient; weights and gradients are found by the names in files."""
    family = FAMILIES[name]
    model, parts, fields = family.model(), family.parts(), family.batch()
    model.save_pretrained(tmp_path / "weights")
    for owner, part in parts.items():
        load_initial(part, tmp_path / "weights", owner)
    got, want = family.run(parts, fields), family.whole(model, fields)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        assert ours.std() > 1e-3
    for outputs in (got, want):
        torch.stack([output.square().sum() for output in outputs]).sum().backward()
    by_name = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.save_pretrained(tmp_path / "gradients", state_dict=by_name)
    gradients = load_file(tmp_path / "gradients" / "model.safetensors")
    compared = set[str]()
    for owner, part in parts.items():
        for own, parameter in part.named_parameters():
            if parameter.requires_grad:
                of_model = part.source_names[own]
                compared.add(of_model)
                torch.testing.assert_close(
                    parameter.grad, gradients[of_model], rtol=1e-10, atol=1e-10, msg=owner + own
                )
    assert compared == gradients.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_from_pretrained_loads_what_is_exported(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    folder = saved_run(tmp_path, family.spelled(), family.losses, steps=[1])
    (written,) = exported(folder, tmp_path / "out")["models"]
    assert written["modules"] == list(family.modules)
    assert not written["notes"]
    model: Any = from_pretrained(getattr(transformers, family.kind), tmp_path / "out")
    model.save_pretrained(tmp_path / "again")
    ours, theirs = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "again"))
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), key


def test_a_siglip_of_images_of_all_sizes_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="images of one size"):
        hf.siglip_vision({"model_type": "siglip2"})
    config = {**FAMILIES["siglip"].config, "model_type": "siglip2"}
    names = transformers.Siglip2Model(transformers.Siglip2Config(**config)).state_dict()
    text = hf.siglip_text(config)
    assert set(text.source_names.values()) == {n for n in names if n.startswith("text_model.")}
    assert text.configuration is not None
    assert text.configuration["architectures"] == ["Siglip2Model"]
