"""Every block of the zoo, with batches whose sizes vary, and a count of what is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from mmlaunch.comm.batches import Tree, map_tensors, tensors_of
from mmlaunch.execute import compiled_blocks
from mmlaunch.execute.compiled_blocks import CompiledBlocks
from mmlaunch.execute.weight_gradients import SplitBackward
from mmlaunch.model.tensor_parallel import shard_block
from mmplan.ragged import Ragged
from mmplan.zoo import coca, decoder, diffusion, encoder, hf, qwen_vl, seq2seq, towers

Inputs = tuple[Tree, ...]
WIDTH, VOCAB, PLACEHOLDER = 32, 64, 63
BATCHES = [(2, 8), (3, 6), (4, 5), (2, 7)]
# Images of each sample; a micro-batch may have one, or none.
IMAGES = [(2, 3), (1, 4), (3, 3), (0, 1), (0, 0), (2, 0)]
_VISION = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
_TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
}
_CLIP_TEXT = {"max_position_embeddings": 8, "eos_token_id": 63, "bos_token_id": 1}
_QWEN = {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8, **_TEXT}


_SEEN: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "image_token_id": PLACEHOLDER,
    "vision_config": {
        **{"depth": 2, "hidden_size": WIDTH, "out_hidden_size": WIDTH, "intermediate_size": 64},
        **{"num_heads": 4, "patch_size": 4, "temporal_patch_size": 1, "window_size": 16},
        "fullatt_block_indexes": [1],
    },
    "text_config": {
        **_TEXT,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
}


class Alone:
    """A group whose sum is what this rank has."""

    def __init__(self) -> None:
        self.sums = 0

    def all_reduce(self, tensor: Tensor) -> None:
        self.sums += 1


def _images(channels: int) -> list[Inputs]:
    return [(torch.rand(batch, channels, 8, 8),) for batch, _ in BATCHES]


def _tokens(*others: int) -> list[Inputs]:
    """Token ids, and activations of so many rows."""
    return [(_ids(b, t), *(torch.rand(b, n, WIDTH) for n in others)) for b, t in BATCHES]


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(1, PLACEHOLDER, (batch, length))


def _ragged(lengths: Sequence[int], *shape: int) -> Ragged:
    return Ragged(torch.rand(sum(lengths), *shape), torch.tensor(lengths))


def _many(channels: int) -> list[Inputs]:
    return [(_ragged(lengths, channels, 8, 8),) for lengths in IMAGES]


def _told() -> list[Inputs]:
    """Token ids with two placeholders for each image, and rows for them."""
    found: list[Inputs] = []
    for lengths in IMAGES:
        ids = _ids(len(lengths), 12)
        for sample, images in enumerate(lengths):
            ids[sample, : 2 * images] = PLACEHOLDER
        found.append((ids, _ragged(lengths, 2, WIDTH)))
    return found


def _seen(text: bool) -> list[Inputs]:
    """Patches of an image of 2 rows of units for each sample; or rows of them, and tokens."""
    found: list[Inputs] = []
    for lengths in [(3, 1), (2, 4), (1, 5), (3, 3)]:
        grid = torch.tensor([[1, 4, 2 * n] for n in lengths])
        if text:
            ids = _ids(2, 14)
            for sample, columns in enumerate(lengths):
                ids[sample, 1 : 1 + 2 * columns] = PLACEHOLDER
            found.append((ids, _ragged([2 * n for n in lengths], WIDTH), grid))
        else:
            found.append((_ragged([8 * n for n in lengths], 48), grid))
    return found


def _texts(packed: bool) -> list[Inputs]:
    """Ragged token ids, or packs of one and two texts."""
    found: list[Inputs] = []
    for lengths in [(5, 9), (3, 1, 4), (0, 7), (2, 2), (6, 8)]:
        ids, texts = torch.randint(1, PLACEHOLDER, (sum(lengths),)), torch.tensor(lengths)
        if packed:
            packs = torch.tensor([lengths[0], sum(lengths[1:])])
            numbers = torch.tensor([1, len(lengths) - 1])
            found.append((Ragged(ids, packs), Ragged(texts, numbers)))
        else:
            found.append((Ragged(ids, texts),))
    return found


def _drawn() -> list[Inputs]:
    """Activations, images to draw, and where they stand."""
    found: list[Inputs] = []
    for lengths in IMAGES:
        starts = Ragged(torch.arange(sum(lengths)) % 7, torch.tensor(lengths))
        hidden = torch.rand(len(lengths), 12, WIDTH)
        found.append((hidden, _ragged(lengths, 1, 8, 8), starts))
    return found


ZOO: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], list[Inputs]]]] = {
    "towers.vision": (lambda: towers.vision(2, WIDTH), lambda: _images(1)),
    "towers.text": (lambda: towers.text(2, WIDTH), _tokens),
    "decoder.llama": (
        lambda: decoder.llama(3, WIDTH, heads=4, kv_heads=2, ffn=64, vocab=VOCAB),
        _tokens,
    ),
    "decoder.llama ragged": (
        lambda: decoder.llama(3, WIDTH, heads=4, kv_heads=2, ffn=64, vocab=VOCAB),
        lambda: _texts(packed=False),
    ),
    "decoder.llama told": (
        lambda: decoder.llama(
            2,
            WIDTH,
            heads=4,
            ffn=64,
            vocab=VOCAB,
            placeholders=[PLACEHOLDER],
            fused_mlp=True,
            hidden=True,
        ),
        _told,
    ),
    "encoder.vit": (
        lambda: encoder.vit(
            2, WIDTH, heads=4, outputs=WIDTH, image=8, patch=2, channels=1, merge=2
        ),
        lambda: _many(1),
    ),
    "diffusion.generator": (
        lambda: diffusion.generator(
            2, WIDTH, heads=4, hidden=WIDTH, image=8, patch=4, channels=1, condition=4
        ),
        _drawn,
    ),
    "coca.image": (
        lambda: coca.image(2, WIDTH, heads=4, image=8, patch=4, channels=1, queries=4, embed=16),
        lambda: _images(1),
    ),
    "coca.words": (
        lambda: coca.words(2, WIDTH, heads=4, vocab=VOCAB, length=8, embed=16),
        _tokens,
    ),
    "coca.captioner": (
        lambda: coca.captioner(2, WIDTH, heads=4, vocab=VOCAB),
        lambda: [(torch.rand(b, t, WIDTH), torch.rand(b, 4, WIDTH)) for b, t in BATCHES],
    ),
    "seq2seq.encoder": (
        lambda: seq2seq.encoder(2, WIDTH, heads=4, vocab=VOCAB, length=8),
        lambda: _tokens(4),
    ),
    "seq2seq.decoder": (
        lambda: seq2seq.decoder(2, WIDTH, heads=4, vocab=VOCAB, length=8),
        lambda: [
            (*given, torch.ones(batch, 4, dtype=torch.bool))
            for given, (batch, _) in zip(_tokens(4), BATCHES, strict=True)
        ],
    ),
    "hf.clip_vision": (
        lambda: hf.clip_vision({"vision_config": _VISION, "projection_dim": 16}),
        lambda: _images(3),
    ),
    "hf.clip_text": (
        lambda: hf.clip_text({"text_config": {**_TEXT, **_CLIP_TEXT}, "projection_dim": 16}),
        _tokens,
    ),
    "hf.siglip_vision": (
        lambda: hf.siglip_vision({"vision_config": _VISION}, pooled=True),
        lambda: _many(3),
    ),
    "hf.causal_lm": (
        lambda: hf.causal_lm(_QWEN, placeholders=[PLACEHOLDER], hidden=True),
        _told,
    ),
    "qwen_vl.qwen_vl_tower": (
        lambda: qwen_vl.qwen_vl_tower(_SEEN),
        lambda: _seen(text=False),
    ),
    "qwen_vl.qwen_vl_lm": (lambda: qwen_vl.qwen_vl_lm(_SEEN), lambda: _seen(text=True)),
    "hf.causal_lm packed": (
        lambda: hf.causal_lm(_QWEN, packed=True),
        lambda: _texts(packed=True),
    ),
}


@dataclass(kw_only=True)
class Compiled:
    """What a rank's blocks were compiled to.

    Attributes:
        graphs: compiled until the end of each micro-batch.
        breaks: reasons for which a graph ended inside a block.
        sums: over the group, in the last micro-batch.
        error: largest difference of a gradient from that of the block as it is.
    """

    graphs: list[int] = field(default_factory=lambda: [])
    breaks: list[str] = field(default_factory=lambda: [])
    sums: int = 0
    error: float = 0.0


class Backend:
    """Compiles nothing but the graphs, and counts them."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._name, self.graphs = name, 0
        torch.compiler.reset()
        counters.clear()
        monkeypatch.setattr(compiled_blocks, "BACKEND", self)

    def __call__(self, graph: Any, inputs: list[Tensor], options: Any = None) -> Any:
        self.graphs += 1
        # Typed for its decorator alone.
        lookup: Any = torch._dynamo.lookup_backend  # pyright: ignore[reportPrivateImportUsage]
        return lookup(self._name)(graph, inputs)


def compiled(
    name: str, *, tp: int, split: bool, backend: Backend, steps: int | None = None
) -> Compiled:
    """Run a module of the zoo on micro-batches of many sizes, as it is and compiled."""
    make, batches = ZOO[name]
    torch.manual_seed(0)
    module, group = make(), Alone()
    for index, block in enumerate(module):
        shard_block(block, index=0, count=tp, comm=group, where=str(index))
    module.double()
    blocks, found = CompiledBlocks(torch.device("cpu")), Compiled()
    rank = SplitBackward() if split else None
    for batch in batches()[:steps]:
        given = tuple(map_tensors(item, _double) for item in batch)
        want = _gradients(module, given, None, rank)
        group.sums = 0
        got = _gradients(module, given, blocks, rank)
        found.sums = group.sums
        found.graphs.append(backend.graphs)
        assert got.keys() == want.keys()
        found.error = max(found.error, *(float((got[k] - want[k]).abs().max()) for k in want))
    found.breaks = [str(reason) for reason in counters["graph_break"]]
    return found


def _double(tensor: Tensor) -> Tensor:
    return tensor.double().requires_grad_() if tensor.is_floating_point() else tensor


def _gradients(
    module: nn.Sequential,
    batch: Inputs,
    blocks: CompiledBlocks | None,
    split: SplitBackward | None,
) -> dict[str, Tensor]:
    module.zero_grad()
    torch.manual_seed(5)
    given: Inputs = batch
    for block in module:
        with nullcontext() if split is None else split.during(block):
            call: Any = nn.Module.__call__
            if blocks is not None:
                call = blocks.of(block, given, split=split is not None)
            given = (call(block, *given),)
    outputs = [leaf for leaf in tensors_of(given[0]) if leaf.requires_grad]
    ramps = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape).cos() for x in outputs]
    later = None if split is None else split.microbatch()
    with nullcontext() if later is None else later.collect():
        torch.autograd.backward(outputs, ramps)
    if split is not None and later is not None:
        assert len(later)
        later.compute()
        split.forget()
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
