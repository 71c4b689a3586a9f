"""transformers' decoders and SigLIP against the Sequentials made of their parts."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from mmplan.errors import InvalidInputError
from mmplan.ragged import Ragged
from mmplan.schema.workload import Workload
from mmplan.zoo import hf
from mmplan.zoo.decoder import llama
from tests.programs import loss, make_plan, unit
from tests.selection import some
from tests.test_hf import load_by_source_names
from tests.verification import TOLERANCE, verify_in_process

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT_SIZES = {**SIZES, "ffn_dim": 40, "word_embed_proj_dim": 24, "dropout": 0.0}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "llama 3": {
        "model_type": "llama",
        **SIZES,
        "tie_word_embeddings": True,
        "rope_parameters": {
            **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        },
    },
    "qwen2": {"model_type": "qwen2", **SIZES},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 8},
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": None},
    "opt": {"model_type": "opt", **OPT_SIZES},
    "opt, as its model of 350M": {
        **{"model_type": "opt", **OPT_SIZES},
        **{"word_embed_proj_dim": 16, "do_layer_norm_before": False},
    },
}
SIGLIP = {
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
    },
    "text_config": {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 50},
}


def original(config: dict[str, Any]) -> Any:
    given = {k: v for k, v in config.items() if k != "model_type"}
    sizes = transformers.AutoConfig.for_model(config["model_type"], **given)
    torch.manual_seed(7)
    return transformers.AutoModelForCausalLM.from_config(sizes).double().eval()


@pytest.mark.parametrize("name", DECODERS)
def test_decoder_and_its_gradients_equal_the_model(name: str) -> None:
    model, blocks = original(DECODERS[name]), hf.causal_lm(DECODERS[name]).double()
    load_by_source_names(blocks, model.state_dict())
    tokens = torch.randint(3, 60, (3, 17))
    got, want = blocks(tokens), model(input_ids=tokens).logits
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    got.square().mean().backward()
    want.square().mean().backward()
    theirs = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}
    assert {blocks.source_names[n] for n, _ in blocks.named_parameters()} == dict(
        model.named_parameters()
    ).keys()
    for n, parameter in blocks.named_parameters():
        torch.testing.assert_close(
            parameter.grad, theirs[blocks.source_names[n]], rtol=1e-10, atol=1e-13
        )


def test_our_decoder_is_transformers_llama() -> None:
    """The same weights under other names; rotary layout, norms and grouping are Llama's."""
    model = original(DECODERS["llama"])
    ours = llama(2, 24, heads=4, kv_heads=2, ffn=40, vocab=64, eps=model.config.rms_norm_eps)
    ours.double().load_state_dict({ours_name(n): v for n, v in model.state_dict().items()})
    tokens = torch.randint(3, 60, (3, 17))
    want = model(input_ids=tokens).logits
    # transformers' norm works in float32 whatever the model's type.
    torch.testing.assert_close(ours(tokens), want, rtol=1e-6, atol=1e-6)


def ours_name(theirs: str) -> str:
    outside = {
        "model.embed_tokens.weight": "0.embed.token.weight",
        "model.norm.weight": "1.head.norm.weight",
        "lm_head.weight": "1.head.vocabulary.weight",
    }
    inside = {
        "self_attn.q_proj": "attention.query",
        "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value",
        "self_attn.o_proj": "attention.out",
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.down",
        "input_layernorm": "norm1",
        "post_attention_layernorm": "norm2",
    }
    if theirs in outside:
        return outside[theirs]
    _, _, index, *rest = theirs.split(".")
    return f"{index}.{inside['.'.join(rest[:-1])]}.weight"


def test_rules_of_a_layer_come_from_the_configuration() -> None:
    rules: Any = hf.causal_lm(DECODERS["qwen2"])[0].tp_plan
    assert rules == {
        "before.model.embed_tokens": "vocab",
        "layer.self_attn.q_proj": "colwise",
        "layer.self_attn.k_proj": "colwise",
        "layer.self_attn.v_proj": "colwise",
        "layer.self_attn.o_proj": "rowwise",
        "layer.mlp.gate_proj": "colwise",
        "layer.mlp.up_proj": "colwise",
        "layer.mlp.down_proj": "rowwise",
    }
    # The gradients of its norms of single heads are summed without a rule.
    assert hf.causal_lm(DECODERS["qwen3"])[0].tp_plan == rules


@pytest.mark.parametrize("pooled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_siglip_equals_the_model(pooled: bool) -> None:
    model = transformers.SiglipModel(transformers.SiglipConfig(**SIGLIP)).double().eval()
    tower = hf.siglip_vision(SIGLIP, pooled=pooled).double()
    load_by_source_names(tower, model.state_dict())
    image = torch.randn(5, 3, 16, 16, dtype=torch.float64)
    want = model.vision_model(pixel_values=image)
    expected = want.pooler_output if pooled else want.last_hidden_state
    torch.testing.assert_close(tower(image), expected, rtol=1e-12, atol=1e-12)
    lengths = torch.tensor([2, 0, 3])
    ragged = tower(Ragged(image, lengths))
    torch.testing.assert_close(ragged.values, expected, rtol=1e-12, atol=1e-12)
    assert ragged.lengths is lengths


def test_siglip_warns_of_no_text_tower(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    # Each text is said once in a process; another test may have made it said.
    transformers.utils.logging.warning_once.cache_clear()
    images_only = {"vision_config": SIGLIP["vision_config"]}
    hf.siglip_vision(images_only)
    assert not caplog.records
    # The text tower's defaults do warn, so that this would be seen.
    transformers.SiglipConfig(**images_only)
    assert caplog.records


@pytest.mark.parametrize("pooled", [False, True])
def test_siglip_takes_batches_without_images(pooled: bool) -> None:
    tower = hf.siglip_vision(SIGLIP, pooled=pooled)
    features = tower(Ragged(torch.zeros(0, 3, 16, 16), torch.tensor([0, 0])))
    assert features.values.shape == ((0, 32) if pooled else (0, 4, 32))
    features.values.sum().backward()
    gradients = [p.grad for p in tower.parameters()]
    assert all(g is not None and not g.any() for g in gradients)


@pytest.mark.parametrize("kind", some(["llama", "llama 3", "qwen2", "qwen3"], 3))
def test_siglip_into_a_decoder_on_several_ranks_equals_one_process(kind: str) -> None:
    """Gradients too: tp 2 of both, pp 2, tied embeddings across stages, samples without image."""
    batch = 6
    workload = Workload.model_validate(
        {
            "name": "hf",
            "batch": batch,
            "modules": {
                "vision": {
                    "factory": "mmplan.zoo.hf:siglip_vision",
                    "args": {"config": _siglip_of_digits()},
                    "inputs": ["images"],
                },
                "llm": {
                    "factory": "mmplan.zoo.hf:causal_lm",
                    "args": {"config": DECODERS[kind], "placeholders": [63]},
                    "inputs": ["tokens", "vision"],
                },
            },
            "losses": {
                "captions": {
                    "factory": "mmplan.zoo.losses:token_cross_entropy",
                    "inputs": ["llm", "labels"],
                }
            },
            "data": {
                "factory": "mmplan.zoo.interleaved:digits",
                "args": {
                    **{"sequences": batch, "length": 32, "sigma": 1.5},
                    "work": {"vision": "images", "llm": "sequence"},
                },
            },
            "train": {"precision": "fp64"},
        }
    )
    plan = make_plan(
        unit("vision", "images", tp=2, k=3, blocks=2, kind="1f1b"),
        unit("llm", "tokens", "vision", pp=2, tp=2, k=3, blocks=2, kind="1f1b"),
        losses=[loss("captions", "llm", "labels")],
        batch=batch,
    )
    verdict = verify_in_process(plan, workload)
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= TOLERANCE["fp64"]
    assert verdict.compared > 40


def _siglip_of_digits() -> dict[str, Any]:
    sizes = {"hidden_size": 24, "image_size": 8, "patch_size": 4, "num_channels": 1}
    return {**SIGLIP, "vision_config": {**SIGLIP["vision_config"], **sizes}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 64}, "no model_type"),
        ({"model_type": "no-such"}, "refuses this no-such configuration"),
        ({"model_type": "llama", **SIZES, "num_attention_heads": 5}, "refuses this llama"),
        ({"model_type": "gpt2"}, "not built as Llama is"),
        ({"model_type": "mistral", **SIZES, "sliding_window": 8}, "attends in windows"),
        (
            {"model_type": "qwen2", **SIZES, "use_sliding_window": True, "max_window_layers": 1},
            "attends in windows",
        ),
    ],
)
def test_models_that_cannot_be_cut_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        hf.causal_lm(config)
