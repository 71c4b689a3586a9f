"""Ragged and packed text through the decoders, held against the same text padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from mmlaunch.comm.strict import StrictWorld
from mmlaunch.measure.sample_work import WorkSampler
from mmplan.errors import InvalidInputError
from mmplan.profiling.counting import FLOPS
from mmplan.profiling.flow import BASE, TaskFlow
from mmplan.ragged import Ragged
from mmplan.schema.factories import build_dataset
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload, resolve_tasks
from mmplan.zoo import hf
from mmplan.zoo.decoder import llama
from mmplan.zoo.diffusion import generator
from mmplan.zoo.parts.ragged_attention import attend_samples
from tests.programs import loss, make_plan, unit
from tests.test_hf_mllm import DECODERS
from tests.training import plain, train_alone, train_planned, worst_difference
from tests.verification import TOLERANCE, verify_in_process

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

# Of texts, one of them empty, and how many are in each pack.
LENGTHS = [5, 0, 9, 1, 9, 9]
PACKS = [3, 2, 1]
OURS = {"blocks": 2, "width": 24, "heads": 4, "kv_heads": 2, "vocab": 64, "ffn": 40}
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
KINDS = [*DECODERS, "ours"]


def decoder(kind: str, **options: Any) -> nn.Sequential:
    torch.manual_seed(3)
    if kind == "ours":
        return llama(**OURS, **options).double()
    return hf.causal_lm(DECODERS[kind], **options).double()


def gradients(module: nn.Module, outputs: Tensor) -> dict[str, Tensor]:
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view_as(outputs)
    (outputs * weights).sum().backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_text_trains_as_padded_text(kind: str, packed: bool) -> None:
    lengths = torch.tensor(LENGTHS)
    is_text = torch.arange(max(LENGTHS)) < lengths[:, None]
    tokens = torch.randint(3, 60, (sum(LENGTHS),))
    padded = torch.zeros(is_text.shape, dtype=torch.int64).masked_scatter(is_text, tokens)
    module = decoder(kind)
    want = module(padded)[is_text]
    expected = gradients(module, want)

    other = decoder(kind, packed=packed)
    counts = torch.tensor(PACKS)
    rows = torch.stack([part.sum() for part in lengths.split(PACKS)])
    given = (Ragged(tokens, rows), Ragged(lengths, counts)) if packed else Ragged(tokens, lengths)
    found = other(given)
    torch.testing.assert_close(found.values, want, **EXACT)
    torch.testing.assert_close(found.lengths, rows if packed else lengths)
    torch.testing.assert_close(gradients(other, found.values), expected, **EXACT)


def test_no_text_has_gradients_of_zero() -> None:
    for kind in ("qwen3", "ours"):
        module = decoder(kind)
        found = module(Ragged(torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0])))
        assert found.values.shape == (0, 64)
        assert not any(map(torch.any, gradients(module, found.values).values()))


@pytest.mark.parametrize("causal", [True, False])
def test_the_operator_of_compiled_blocks_is_the_same_attention(causal: bool) -> None:
    lengths = torch.tensor(LENGTHS)
    given = [
        torch.randn(1, sum(LENGTHS), heads, 8, dtype=torch.float64).transpose(1, 2).requires_grad_()
        for heads in (4, 2, 2)
    ]
    query, key, value = given
    want = attend_samples(query, key, value, lengths, scale=0.3, causal=causal)
    alone = [x.split(LENGTHS, 2) for x in given]
    apart = [
        functional.scaled_dot_product_attention(
            *(q, k, v), is_causal=causal, scale=0.3, enable_gqa=True
        )
        for q, k, v in zip(*alone, strict=True)
    ]
    torch.testing.assert_close(want, torch.cat(apart, 2), **EXACT)
    gradient = torch.randn_like(want)
    expected = torch.autograd.grad(want, given, gradient)
    operator = torch.ops.mmplan.ragged_attention
    found = operator(*given, lengths, 0.3, causal)
    torch.testing.assert_close(found, want, **EXACT)
    torch.testing.assert_close(torch.autograd.grad(found, given, gradient), expected, **EXACT)
    tried = "test_schema", "test_autograd_registration", "test_faketensor"
    arguments = (*given, lengths, 0.3, causal)
    torch.library.opcheck(operator.default, arguments, test_utils=tried)
    back: Any = torch.ops.mmplan.ragged_attention_backward
    # It runs in backwards, where no gradient of it is wanted.
    plain = [gradient, *(x.detach() for x in given), lengths]
    torch.testing.assert_close(back(*plain, 0.3, causal), expected, **EXACT)
    with FakeTensorMode() as mode:
        shapes = back(*map(mode.from_tensor, plain), 0.3, causal)
    for like, real in zip(shapes, back(*plain, 0.3, causal), strict=True):
        assert (like.shape, like.stride()) == (real.shape, real.stride())


def test_images_are_drawn_from_ragged_text_as_from_padded() -> None:
    module = generator(
        2, 16, heads=2, hidden=24, image=8, patch=4, channels=1, condition=3
    ).double()
    lengths, images = torch.tensor([4, 0, 7]), torch.tensor([2, 0, 1])
    rows = torch.randn(11, 24, dtype=torch.float64)
    is_text = torch.arange(7) < lengths[:, None]
    padded = torch.zeros(3, 7, 24, dtype=torch.float64).masked_scatter(is_text[..., None], rows)
    drawn = Ragged(torch.rand(3, 1, 8, 8, dtype=torch.float64), images)
    starts = Ragged(torch.tensor([0, 3, 6]), images)

    def noise(hidden: Tensor | Ragged) -> Tensor:
        torch.manual_seed(1)
        return module[1](module[0](hidden, drawn, starts))[0].values

    torch.testing.assert_close(noise(Ragged(rows, lengths)), noise(padded), **EXACT)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rotary angles depend on the longest text",
        ),
        ({"attention_dropout": 0.1}, "has attention_dropout 0.1"),
    ],
)
def test_decoders_whose_texts_meet_are_refused(change: dict[str, Any], message: str) -> None:
    module = hf.causal_lm(DECODERS["llama"] | change)
    assert module(torch.ones(1, 3, dtype=torch.int64)).shape == (1, 3, 64)
    with pytest.raises(InvalidInputError, match=message):
        module(Ragged(torch.ones(3, dtype=torch.int64), torch.tensor([3])))


# ---- what it costs ----

HERE = Path(__file__).parent


def texts_of(dataset: Any, index: int) -> list[int]:
    sample = dataset[index]
    packed: Ragged | None = sample.get("tokens_lengths")
    return (sample["tokens"].lengths if packed is None else packed.values).tolist()


@pytest.mark.parametrize("data", [pytest.param("ragged", marks=pytest.mark.slow), "packed"])
def test_attention_costs_the_squares_of_lengths(data: str) -> None:
    job = workload("ours", data)
    assert job.data is not None
    dataset: Any = build_dataset(job.data, HERE, seed=4)
    flow = TaskFlow(job, HERE, resolve_tasks(job)["default"])
    (kernels, *_) = [block.forward for block in flow.count_module("llm", tp=1, samples=BASE)]
    counted = kernels.table[kernels.names.index("mmplan::ragged_attention"), FLOPS]
    # Samples spread over the data, of which the flow has the mean number of tokens.
    spread = sorted({i * len(dataset) // 32 for i in range(32)})
    lengths = [length for index in spread for length in texts_of(dataset, index)]
    scale = round(BASE * sum(lengths) / len(spread)) / sum(lengths)
    # Two products of all heads' channels, half of the pairs.
    assert counted == pytest.approx(2 * 2 * 24 * 0.5 * sum(n * n for n in lengths) * scale)


@pytest.mark.parametrize("data", ["ragged", "packed"])
def test_work_of_samples_has_the_squares_of_lengths(data: str) -> None:
    job = workload("ours", data)
    assert job.data is not None
    dataset: Any = build_dataset(job.data, HERE, seed=4)
    point = {"task": "default", "order": "spread", "samples": 5}
    found = WorkSampler(job, HERE).work(point)["work"]["llm"]
    # FLOPs of a token in two layers and the logits, and of half a pair in two layers.
    width, ffn, vocab = OURS["width"], OURS["ffn"], OURS["vocab"]
    token = 2 * 2 * width * (width + width // 2 + width // 2 + width + 3 * ffn) + 2 * width * vocab
    pair = 2 * 2 * 2 * width * 0.5
    for number, work in enumerate(found):
        lengths = texts_of(dataset, number * len(dataset) // 5)
        assert work == pytest.approx(sum(lengths) + pair / token * sum(n * n for n in lengths))


# ---- plans ----

BATCH = 6


def workload(kind: str, data: str) -> Workload:
    """An encoder of images under a decoder of padded, ragged or packed text."""
    args: dict[str, Any] = {"sequences": 48, "length": 40, "sigma": 1.5, "ragged": data != "padded"}
    source: dict[str, Any] = {"factory": "mmplan.zoo.interleaved:digits", "args": args}
    packs = {"source": source, "field": "tokens", "budget": 48}
    packed = data == "packed"
    config = {} if kind == "ours" else {"config": DECODERS[kind]}
    # What stands in the place of a token is as wide as an embedded token.
    embedded = DECODERS.get(kind, {}).get("word_embed_proj_dim", 24)
    return Workload.model_validate(
        {
            "name": "ragged",
            "batch": BATCH,
            "modules": {
                "vision": {
                    "factory": "mmplan.zoo.encoder:vit",
                    "args": {
                        **{"layers": 1, "width": 16, "heads": 2, "outputs": embedded},
                        **{"image": 8, "patch": 2, "channels": 1, "merge": 2},
                    },
                    "inputs": ["images"],
                },
                "llm": {
                    "factory": "mmplan.zoo." + ("decoder:llama" if not config else "hf:causal_lm"),
                    "args": {"placeholders": [63], "packed": packed, **(config or OURS)},
                    "inputs": ["tokens", *(["tokens_lengths"] if packed else []), "vision"],
                },
            },
            "losses": {
                "captions": {
                    "factory": "mmplan.zoo.losses:token_cross_entropy",
                    "inputs": ["llm", "labels", *(["labels_lengths"] if packed else [])],
                }
            },
            "data": {"factory": "mmplan.sources.packing:packed", "args": packs}
            if packed
            else source,
            "train": {
                "precision": "fp64",
                "seed": 4,
                "optimizer": "SGD",
                "optimizer_args": {"lr": 1.0},
            },
        }
    )


def plan(data: str) -> Plan:
    """Both modules split by tensors, the decoder over two stages."""
    packed = data == "packed"
    texts = ["tokens", *(["tokens_lengths"] if packed else [])]
    labels = ["labels", *(["labels_lengths"] if packed else [])]
    return make_plan(
        unit("vision", "images", tp=2, k=3, blocks=2, kind="1f1b"),
        unit("llm", *texts, "vision", pp=2, tp=2, k=3, blocks=2, kind="1f1b"),
        losses=[loss("captions", "llm", *labels)],
        batch=BATCH,
        seed=4,
    )


@pytest.mark.parametrize(
    ("kind", "data", "strict"),
    [
        ("qwen3", "packed", True),
        *[
            pytest.param(kind, data, strict, marks=pytest.mark.slow)
            for kind in KINDS
            for data in ("ragged", "packed")
            for strict in (False, True)
        ],
    ],
)
def test_plans_train_as_one_process(kind: str, data: str, strict: bool) -> None:
    planned = plan(data)
    world = StrictWorld(planned.devices, seed=0, mode="channels") if strict else None
    verdict = verify_in_process(planned, workload(kind, data), world=world)
    assert world is None or world.faults == []
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= TOLERANCE["fp64"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_of_ragged_text_trains_as_one_process_on_padded_text(kind: str) -> None:
    """Two steps of SGD with a rate of 1: weights differ by gradients alone."""
    padded = workload(kind, "padded")
    want = train_alone(plan("padded"), padded, 2, plain(padded))
    found = train_planned(plan("ragged"), workload(kind, "ragged"), 2)
    assert worst_difference(found.weights, want.weights) < 1e-12
