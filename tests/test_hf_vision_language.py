"""Vision-language models of transformers against their parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mmlaunch.checkpoint.exported_weights import load_initial
from mmplan.errors import InvalidInputError
from mmplan.ragged import Ragged
from mmplan.schema.workload import Workload
from mmplan.zoo import hf_vision_language as vl
from mmplan.zoo.automatic.families import FAMILIES
from mmplan.zoo.automatic.pretrained import build_pretrained
from mmplan.zoo.sequential import LayerSequential
from tests.init_models import FAMILY_CONFIGS
from tests.programs import loss, make_plan, unit
from tests.verification import TOLERANCE, verify_in_process

pytest.importorskip("transformers")

SLOW = pytest.mark.slow
IMAGE_TOKEN = 59
BATCH = 4


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """A tiny configuration, with changes of the whole or, as dicts, of a part."""
    config: dict[str, Any] = {"architectures": [name], **FAMILY_CONFIGS[name]}
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    return config


LLAVA, BLIP2 = "LlavaForConditionalGeneration", "Blip2ForConditionalGeneration"
LLAMA = FAMILY_CONFIGS[LLAVA]["text_config"]
CONFIGS = {
    **{
        name: config_of(name)
        for name, family in FAMILIES.items()
        if any(part.factory.startswith("hf_vision_language.") for part in family.parts.values())
    },
    "siglip, its last layer, with its first row": config_of(
        LLAVA,
        vision_config={"model_type": "siglip_vision_model"},
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    "first layer, tied": config_of(
        LLAVA,
        vision_feature_layer=1,
        tie_word_embeddings=True,
        text_config={"model_type": "qwen2", "tie_word_embeddings": True},
    ),
    "queries into a llama": config_of(BLIP2, text_config=LLAMA),
}


# The others take minutes together on a busy machine.
EACH = [name if name in (LLAVA, BLIP2) else pytest.param(name, marks=SLOW) for name in CONFIGS]


def parts_of(config: dict[str, Any]) -> dict[str, LayerSequential]:
    family = FAMILIES[config["architectures"][0]]
    return {name: part.build(config).double().eval() for name, part in family.parts.items()}


def fields_of(config: dict[str, Any], parts: dict[str, LayerSequential]) -> dict[str, Any]:
    """Images, and texts with a place for each row that is made of them."""
    several = "scale_factor" in config
    images = torch.rand(BATCH, *([2] if several else []), 3, 16, 16, dtype=torch.float64)
    with torch.no_grad():
        features = images
        for part in list(parts.values())[:-1]:
            features = part(features)
    rows = features[0, ..., 0].numel()
    tokens = torch.randint(3, IMAGE_TOKEN, (BATCH, rows + 6))
    tokens[:, 2 : 2 + rows] = IMAGE_TOKEN
    labels = torch.where(tokens == IMAGE_TOKEN, -100, tokens)
    return {"pixel_values": images, "input_ids": tokens, "labels": labels}


def run_parts(parts: dict[str, LayerSequential], fields: dict[str, Any]) -> Any:
    features = fields["pixel_values"]
    *ahead, lm = parts.values()
    for part in ahead:
        features = part(features)
    return lm((fields["input_ids"], features))


def randomised(config: dict[str, Any]) -> Any:
    """The whole model, no bias or query of which is zero."""
    torch.manual_seed(5)
    model = build_pretrained(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


@pytest.mark.parametrize("name", EACH)
def test_parts_equal_the_model(name: str, tmp_path: Path) -> None:
    """Logits and every gradient; the weights are found in the file that transformers saves."""
    config = CONFIGS[name]
    model, parts = randomised(config), parts_of(config)
    model.save_pretrained(tmp_path)
    for owner, part in parts.items():
        load_initial(part, tmp_path, owner)
    fields = fields_of(config, parts)
    got, want = run_parts(parts, fields), model(**fields).logits
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert got.std() > 1e-2
    for logits in (got, want):
        logits.square().mean().backward()
    theirs = dict(model.named_parameters())
    seen = set[str]()
    for part in parts.values():
        for own, parameter in part.named_parameters():
            its = theirs[part.source_names[own]]
            seen.add(part.source_names[own])
            assert parameter.requires_grad == (its.grad is not None), own
            if its.grad is not None:
                torch.testing.assert_close(parameter.grad, its.grad, rtol=1e-8, atol=1e-10)
    assert seen == theirs.keys()


def test_weights_of_an_older_version_are_found(tmp_path: Path) -> None:
    """As the published LLaVA 1.5 has them."""
    config = CONFIGS[LLAVA]
    model, parts = randomised(config), parts_of(config)
    older = {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    }
    state = {
        next(old + name.removeprefix(new) for new, old in older.items() if name.startswith(new)): x
        for name, x in model.state_dict().items()
    }
    save_file(state, tmp_path / "model.safetensors")
    for owner, part in parts.items():
        load_initial(part, tmp_path, owner)
        for own, tensor in part.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[part.source_names[own]])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_samples_with_several_images_or_none(name: str) -> None:
    config = CONFIGS[name]
    torch.manual_seed(3)
    parts = parts_of(config)
    fields = fields_of(config, parts)
    images, counts = fields["pixel_values"].flatten(0, -4), [2, 0, 1]
    text, place = torch.tensor([5, 6, 7, 8]), fields["input_ids"] == IMAGE_TOKEN
    rows = int(place[0].sum()) * BATCH // len(images)

    def logits(images: Tensor, counts: list[int]) -> Any:
        texts = [torch.cat([torch.full([n * rows], IMAGE_TOKEN), text]) for n in counts]
        lengths = torch.tensor([len(item) for item in texts])
        given = {
            "pixel_values": Ragged(images, torch.tensor(counts)),
            "input_ids": Ragged(torch.cat(texts), lengths),
        }
        return run_parts(parts, given).values

    together = logits(images[:3], counts)
    apart = [logits(images[:2], [2]), logits(images[:0], [0]), logits(images[2:3], [1])]
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-9, atol=1e-9)
    logits(images[:0], [0, 0]).square().sum().backward()
    trained = [p for p in parts["vision"][0].parameters() if p.requires_grad]
    assert not any(p.grad is None or p.grad.any() for p in trained)


@pytest.mark.slow
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("name", list(CONFIGS)[:4])
def test_parts_on_several_ranks_equal_one_process(name: str, is_frozen: bool) -> None:
    """Gradients too: tp 2 of all, pp 2, layers without use."""
    config = CONFIGS[name]
    if "qformer_config" in config:
        # With dropout between cut Linears a tensor-parallel group is refused.
        config = config_of(name, qformer_config={"attention_probs_dropout_prob": 0.0})
    else:
        config = config_of(name, text_config={"num_key_value_heads": 2})
    fields = FAMILIES[name].fields(build_pretrained(config), parts_of_float(config), 24)
    queries = "queries" in FAMILIES[name].parts
    # As the first stage of LLaVA's training and as BLIP-2's.
    frozen = ["vision", "lm"] if queries else ["vision"]
    modules = {
        part: {
            "factory": f"mmplan.zoo.hf_vision_language:{of.factory.partition('.')[2]}",
            "args": {"config": config},
            "inputs": list(of.takes),
            "frozen": is_frozen and part in frozen,
        }
        for part, of in FAMILIES[name].parts.items()
    }
    workload = Workload.model_validate(
        {
            "name": "vl",
            "batch": 6,
            "modules": modules,
            "losses": {
                "words": {
                    "factory": "mmplan.zoo.losses:token_cross_entropy",
                    "inputs": ["lm", "labels"],
                }
            },
            "data": {
                "factory": "mmplan.zoo.synthetic:noise",
                "args": {"samples": 6, "fields": fields},
            },
            "train": {"precision": "fp64"},
        }
    )
    taken = "queries" if queries else "vision"
    pipelined: dict[str, Any] = {"k": 3, "kind": "1f1b"}
    units = [
        unit("vision", "pixel_values", tp=2, blocks=2, frozen=is_frozen, **pipelined),
        *([unit("queries", "vision", tp=2, blocks=2, **pipelined)] if queries else []),
        unit(
            *("lm", "input_ids", taken),
            pp=2,
            tp=2,
            blocks=4,
            frozen=is_frozen and "lm" in frozen,
            **pipelined,
        ),
    ]
    plan = make_plan(*units, losses=[loss("words", "lm", "labels")], batch=6)
    verdict = verify_in_process(plan, workload)
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= TOLERANCE["fp64"]


def parts_of_float(config: dict[str, Any]) -> dict[str, LayerSequential]:
    return {name: part.float() for name, part in parts_of(config).items()}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "no vision-language model"),
        (config_of(LLAVA, vision_feature_layer=[-2, -1]), "features come from one of 3 layers"),
        (config_of(LLAVA, vision_feature_layer=-4), "features come from one of 3 layers"),
        (config_of(BLIP2, image_token_index=None), "has no image_token_index"),
        (
            config_of(BLIP2, text_config={"model_type": "t5", "d_model": 32, "vocab_size": 60}),
            "an encoder and a decoder",
        ),
        (
            config_of(LLAVA, vision_config={"model_type": "dinov2"}),
            "is a dinov2, which image_tower does not cut",
        ),
    ],
)
def test_what_is_not_cut_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        vl.image_tower(config)


def test_only_blip2_has_queries() -> None:
    with pytest.raises(InvalidInputError, match="has no Q-Former"):
        vl.query_former(CONFIGS[LLAVA])
