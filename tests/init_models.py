"""Tiny models for tests of ``mmplan init``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_TEXT: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 1}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_CLASSES = {"id2label": {str(i): f"class {i}" for i in range(5)}}
_GPT2 = {"vocab_size": 60, "n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 24}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0}
_T5 = {"vocab_size": 60, "d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 2, "num_heads": 2}
_BART = {
    "vocab_size": 60,
    "d_model": 32,
    "max_position_embeddings": 24,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
}
_DIT = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 4, "norm_num_groups": 4}

# Class to its config.json.
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"model_type": "gpt2", **_GPT2, "bos_token_id": 1, "eos_token_id": 2},
    "LlamaForCausalLM": {"model_type": "llama", **_GROUPED},
    "Qwen2ForCausalLM": {"model_type": "qwen2", **_GROUPED, "tie_word_embeddings": True},
    "MistralForCausalLM": {"model_type": "mistral", **_GROUPED, "sliding_window": 8},
    "Gemma2ForCausalLM": {
        "model_type": "gemma2",
        **_GROUPED,
        "head_dim": 16,
        "sliding_window": 8,
    },
    "OPTForCausalLM": {
        "model_type": "opt",
        **_TEXT,
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
    },
    "GPTNeoXForCausalLM": {"model_type": "gpt_neox", **_TEXT},
    "BertForMaskedLM": {"model_type": "bert", **_TEXT},
    "RobertaForMaskedLM": {"model_type": "roberta", **_TEXT, "pad_token_id": 1, "bos_token_id": 0},
    "ViTForImageClassification": {"model_type": "vit", **_VISION, **_CLASSES},
    "Dinov2ForImageClassification": {"model_type": "dinov2", **_VISION, **_CLASSES},
    "T5ForConditionalGeneration": {"model_type": "t5", **_T5, **_ENDS},
    "BartForConditionalGeneration": {"model_type": "bart", **_BART, **_ENDS},
    "DiTTransformer2DModel": {"sample_size": 8, "in_channels": 4, "out_channels": 4, **_DIT},
}


class UNet(nn.Module):
    """A U-Net without any list of layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1 = _convolutions(3, width)
        self.down2 = _convolutions(width, 2 * width)
        self.middle = _convolutions(2 * width, 2 * width)
        self.up2 = _convolutions(4 * width, width)
        self.up1 = _convolutions(2 * width, 3)

    def forward(self, image: Tensor) -> Tensor:
        pool, grow = nn.functional.avg_pool2d, nn.functional.interpolate
        first = self.down1(image)
        second = self.down2(pool(first, 2))
        middle = grow(self.middle(pool(second, 2)), scale_factor=2)
        x = grow(self.up2(torch.cat([second, middle], 1)), scale_factor=2)
        return self.up1(torch.cat([first, x], 1))


def _convolutions(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.GELU())


def unet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return UNet(), (torch.rand(3, 3, 16, 16),)


class Translator(nn.Module):
    """An encoder and a decoder of torch, with one embedding for both and the head."""

    def __init__(self, words: int = 50, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        options: dict[str, Any] = {"batch_first": True, "dropout": 0.1}
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 48, **options) for _ in range(2)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 2, 48, **options) for _ in range(2)
        )
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, x = self.embed(source), self.embed(target)
        for layer in self.encoder:
            memory = layer(memory)
        length = target.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask)
        return self.head(x)


def sentences() -> dict[str, Tensor]:
    return {"source": torch.randint(0, 50, (3, 7)), "target": torch.randint(0, 50, (3, 5))}
