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
TINY_TEXT = {**_TEXT, "num_key_value_heads": 1}
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
_SPEECH = {**_BART, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 24}
_SPEECH.pop("max_position_embeddings")
TINY_AUDIO: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_mel_bins": 8,
    "max_source_positions": 12,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_WAVE = {
    "conv_dim": [16, 16],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "mask_time_prob": 0.0,
}
_UNET = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}
_DIT = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 4, "norm_num_groups": 4}

# Class to its config.json.
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"model_type": "gpt2", **_GPT2, "bos_token_id": 1, "eos_token_id": 2},
    "LlamaForCausalLM": {"model_type": "llama", **TINY_TEXT},
    "Qwen2ForCausalLM": {"model_type": "qwen2", **TINY_TEXT, "tie_word_embeddings": True},
    "MistralForCausalLM": {"model_type": "mistral", **TINY_TEXT, "sliding_window": 8},
    "Gemma2ForCausalLM": {
        "model_type": "gemma2",
        **TINY_TEXT,
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
    "Qwen3ForCausalLM": {"model_type": "qwen3", **TINY_TEXT, "head_dim": 16},
    "PhiForCausalLM": {"model_type": "phi", **_TEXT},
    "Gemma3ForCausalLM": {
        "model_type": "gemma3_text",
        **TINY_TEXT,
        "head_dim": 16,
        "sliding_window": 8,
    },
    "MixtralForCausalLM": {"model_type": "mixtral", **TINY_TEXT, **_EXPERTS},
    "BertForSequenceClassification": {"model_type": "bert", **_TEXT, **_CLASSES},
    "LlamaForSequenceClassification": {"model_type": "llama", **TINY_TEXT, **_CLASSES},
    "WhisperForConditionalGeneration": {"model_type": "whisper", **_SPEECH, **_ENDS},
    "VoxtralForConditionalGeneration": {
        "model_type": "voxtral",
        "audio_token_id": 59,
        "text_config": {"model_type": "llama", **TINY_TEXT},
        "audio_config": {
            "model_type": "voxtral_encoder",
            "hidden_size": 32,
            "intermediate_size": 64,
            **TINY_AUDIO,
        },
    },
    "Wav2Vec2ForSequenceClassification": {
        "model_type": "wav2vec2",
        **_TEXT,
        **_WAVE,
        **_CLASSES,
    },
    "ASTForAudioClassification": {
        "model_type": "audio-spectrogram-transformer",
        **_VISION,
        **_CLASSES,
        "max_length": 32,
        "num_mel_bins": 16,
    },
    "DiTTransformer2DModel": {"sample_size": 8, "in_channels": 4, "out_channels": 4, **_DIT},
    "PixArtTransformer2DModel": {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 8,
        **_DIT,
        "caption_channels": 12,
        "cross_attention_dim": 32,
    },
    "SD3Transformer2DModel": {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 3,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "caption_projection_dim": 32,
        "joint_attention_dim": 12,
        "pooled_projection_dim": 10,
        "pos_embed_max_size": 8,
    },
    "UNet2DModel": {
        **_UNET,
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
        "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    },
    "UNet2DConditionModel": {
        **_UNET,
        "cross_attention_dim": 12,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    },
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
    """An encoder and a decoder of torch, with one embedding for both and the head, and a mask."""

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

    def forward(self, source: Tensor, padding: Tensor, target: Tensor) -> Tensor:
        memory, x = self.embed(source), self.embed(target)
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=padding)
        length = target.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask, memory_key_padding_mask=padding)
        return self.head(x)


def sentences() -> dict[str, Tensor]:
    return {
        "source": torch.randint(0, 50, (3, 7)),
        "padding": torch.arange(7).expand(3, 7) > 4,
        "target": torch.randint(0, 50, (3, 5)),
    }


class Branching(nn.Module):
    """Looks at a value: no trace follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x[0].sum() > 1e9:
                x = -x
        return x


class Centred(Branching):
    """Each sample's output depends on the others."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x - x.mean(0))
        return x


class Normed(nn.Sequential):
    """With running statistics, which micro-batches would each change."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def rows() -> Tensor:
    return torch.rand(3, 4)


# Of several parts: class to its config.json.
_TOWER = {"num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 2}
_QWEN_VISION: dict[str, Any] = {
    "depth": 3,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN_TEXT: dict[str, Any] = {
    **TINY_TEXT,
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
    # Halves of a head's 8 channels that turn by time, height and width.
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}
_QWEN_TOKENS = {
    "image_token_id": 58,
    "video_token_id": 59,
    "vision_start_token_id": 56,
    "vision_end_token_id": 57,
}
_PATCHES: dict[str, Any] = {
    "image_token_id": 59,
    "scale_factor": 2,
    "vision_config": {**_TOWER, "hidden_size": 32, "image_size": 16, "patch_size": 4},
    "text_config": {"model_type": "llama", **TINY_TEXT, "tie_word_embeddings": True},
    "tie_word_embeddings": True,
}
_SIGLIP_TEXT = {
    **_TOWER,
    "hidden_size": 32,
    "projection_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 9,
    "bos_token_id": 48,
    "eos_token_id": 49,
}
FAMILY_CONFIGS: dict[str, dict[str, Any]] = {
    "CLIPModel": {
        "model_type": "clip",
        "projection_dim": 12,
        "vision_config": {**_TOWER, "hidden_size": 32, "image_size": 16, "patch_size": 8},
        "text_config": {
            **_TOWER,
            "hidden_size": 24,
            "vocab_size": 50,
            "max_position_embeddings": 9,
            "bos_token_id": 48,
            "eos_token_id": 49,
        },
    },
    "SiglipModel": {
        "model_type": "siglip",
        "vision_config": {**_TOWER, "hidden_size": 32, "image_size": 16, "patch_size": 8},
        "text_config": _SIGLIP_TEXT,
    },
    "Siglip2Model": {
        "model_type": "siglip2",
        "vision_config": {**_TOWER, "hidden_size": 32, "num_patches": 16, "patch_size": 4},
        "text_config": _SIGLIP_TEXT,
    },
    "LlavaForConditionalGeneration": {
        "model_type": "llava",
        "image_token_index": 59,
        "vision_config": {
            "model_type": "clip_vision_model",
            **{**_TOWER, "num_hidden_layers": 3, "hidden_size": 32},
            **{"image_size": 16, "patch_size": 8},
        },
        "text_config": {"model_type": "llama", **TINY_TEXT},
    },
    "Idefics3ForConditionalGeneration": {"model_type": "idefics3", **_PATCHES},
    "SmolVLMForConditionalGeneration": {"model_type": "smolvlm", **_PATCHES},
    "Qwen2VLForConditionalGeneration": {
        "model_type": "qwen2_vl",
        **_QWEN_TOKENS,
        "vision_config": {**_QWEN_VISION, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
        "text_config": _QWEN_TEXT,
        "tie_word_embeddings": True,
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "model_type": "qwen2_5_vl",
        **_QWEN_TOKENS,
        "vision_config": {
            **_QWEN_VISION,
            **{"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48},
            **{"window_size": 16, "fullatt_block_indexes": [1]},
        },
        "text_config": _QWEN_TEXT,
    },
    "Blip2ForConditionalGeneration": {
        "model_type": "blip-2",
        "image_token_index": 59,
        "num_query_tokens": 5,
        # As published ones have it.
        "dtype": "bfloat16",
        "vision_config": {
            **_TOWER,
            "hidden_size": 32,
            "image_size": 16,
            "patch_size": 8,
            "dtype": "bfloat16",
        },
        "qformer_config": {**_TOWER, "hidden_size": 24, "dtype": "bfloat16"},
        "text_config": {
            "model_type": "opt",
            **_TEXT,
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
            "dtype": "bfloat16",
        },
    },
}
