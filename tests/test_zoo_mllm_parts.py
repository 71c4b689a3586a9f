"""Decoder, encoder, generator and their data by themselves, and their analytic profiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmplan.errors import InvalidInputError
from mmplan.profiling.analytic import analytic_profile
from mmplan.profiling.counting import Counter
from mmplan.profiling.flow import BASE, TaskFlow
from mmplan.ragged import Ragged
from mmplan.schema.cluster import load_cluster
from mmplan.schema.workload import crossing_elements, load_workload, resolve_tasks
from mmplan.zoo.decoder import llama
from mmplan.zoo.diffusion import Noising, denoising, generator
from mmplan.zoo.encoder import Projector, vit
from mmplan.zoo.interleaved import IGNORE, IMAGE, digits, synthetic
from tests import mllm
from tests.verification import HERE

PAPERS = Path(__file__).parent.parent / "examples" / "papers"


def count(module: nn.Module) -> float:
    """Parameters in 1e9."""
    return sum(p.numel() for p in module.parameters()) / 1e9


@pytest.mark.parametrize(
    ("name", "llm", "vit_"), [("9b", 6.74, 0.65), ("15b", 13.02, 0.66), ("72b", 68.98, 0.74)]
)
def test_models_of_the_paper_have_its_sizes(name: str, llm: float, vit_: float) -> None:
    workload = load_workload(PAPERS / f"mllm-{name}.yaml")
    with torch.device("meta"):
        assert count(llama(**workload.modules["llm"].args)) == pytest.approx(llm, abs=0.01)
        assert count(vit(**workload.modules["vision"].args)) == pytest.approx(vit_, abs=0.01)
        drawn = count(generator(**workload.modules["generator"].args))
    assert drawn == pytest.approx(1.0, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 32])
def test_a_paper_s_workload_is_profiled_on_the_meta_device(layers: int) -> None:
    """At its full width and length; at its full depth in the slow case."""
    workload = load_workload(PAPERS / "mllm-9b.yaml")
    assert workload.data is not None
    if layers < 32:
        depth = {"vision": {"layers": layers}, "llm": {"blocks": layers}}
        depth["generator"] = {"blocks": layers}
        modules = {
            name: spec.model_copy(update={"args": {**spec.args, **depth[name]}})
            for name, spec in workload.modules.items()
        }
        workload = workload.model_copy(update={"modules": modules})
    profile = analytic_profile(workload, PAPERS, load_cluster("a800-162"))
    llm = profile.modules["llm"]
    # 2 FLOPs a weight and token, and the causal half of the scores.
    tokens, width = 8192, 4096
    weights = layers * (4 * width**2 + 3 * width * 11008) + width * 32000
    scores = layers * 2 * tokens * width
    assert llm.flops_per_sample == pytest.approx(2 * tokens * weights + scores * tokens, rel=1e-6)
    assert {point.tp for point in llm.points} == {1, 2, 4, 8}
    # The activations go to the generator; the logits stay where the loss is.
    assert llm.output_bytes_per_sample == tokens * width * 2


def test_ragged_fields_count_with_their_mean_rows() -> None:
    workload = mllm.workload(batch=32)
    task = resolve_tasks(workload)["default"]
    flow = TaskFlow(workload, HERE, task)
    data: Any = digits(sequences=64, length=32, sigma=1.5)
    chosen = range(0, 64, 2)
    mean = sum(len(data[i]["images"].values) for i in chosen) / len(chosen)
    (images,) = flow.shapes.inputs("vision", task.inputs["vision"], BASE)
    assert len(images.values) == round(BASE * mean)
    assert images.values.is_meta
    assert len(images.lengths) == BASE


def test_elements_that_cross_the_cut_after_a_module() -> None:
    task = resolve_tasks(mllm.workload(batch=4))["default"]
    assert crossing_elements(task, "llm") == (1,)
    assert crossing_elements(task, "vision") is None
    assert crossing_elements(task, "generator") is None


def test_a_norm_keeps_its_input_and_a_number_per_row() -> None:
    """As the kernel of accelerators does; on meta it would be seven kernels and float32 copies."""
    with torch.device("meta"):
        norm = nn.RMSNorm(16).bfloat16()
        x = torch.zeros(3, 5, 16, dtype=torch.bfloat16)
    counted, _ = Counter(norm).count(norm, [x])
    assert counted.forward.names == ("rms_norm",)
    assert counted.saved_bytes == 3 * 5 * (16 + 1) * 2
    assert counted.backward.table[:, 1].sum() == 5 * 3 * 5 * 16 * 2


def test_features_take_the_places_of_their_placeholders_in_order() -> None:
    embed: Any = llama(2, 8, heads=2, vocab=10, placeholders=[9, 8])[0].embed
    tokens = torch.tensor([[1, 9, 9, 8], [2, 3, 4, 5], [9, 1, 9, 1]])
    images = torch.arange(32.0).view(2, 2, 8)
    sounds = -torch.ones(1, 8)
    x = embed(tokens, Ragged(images, torch.tensor([1, 0, 1])), sounds)
    want = embed.token(tokens)
    want[0, 1:3], want[2, 0], want[2, 2], want[0, 3] = images[0], images[1, 0], images[1, 1], -1.0
    assert torch.equal(x, want)


def test_rows_that_do_not_fill_the_places_are_refused() -> None:
    decoder = llama(2, 8, heads=2, vocab=10, placeholders=[9])
    with pytest.raises(InvalidInputError, match=r"2 tokens are placeholder 9.*3 rows"):
        decoder[0](torch.tensor([[9, 1, 9]]), torch.zeros(3, 8))
    with pytest.raises(InvalidInputError, match=r"1 placeholders and gets 0 features"):
        decoder[0](torch.tensor([[1, 1, 1]]))


def test_later_tokens_change_nothing_before_them() -> None:
    decoder = llama(2, 16, heads=4, kv_heads=2, vocab=10).double()
    tokens = torch.randint(0, 10, (2, 9))
    changed = torch.cat([tokens[:, :5], (tokens[:, 5:] + 1) % 10], dim=1)
    a, b = decoder(tokens), decoder(changed)
    torch.testing.assert_close(a[:, :5], b[:, :5], rtol=0, atol=1e-14)
    assert not torch.allclose(a[:, 5:], b[:, 5:])


def test_fused_gate_and_up_equal_separate_ones() -> None:
    apart = llama(2, 8, heads=2, vocab=10, ffn=16).double()
    fused = llama(2, 8, heads=2, vocab=10, ffn=16, fused_mlp=True).double()
    state = apart.state_dict()
    for block in range(2):
        gate, up = (state.pop(f"{block}.mlp.{name}.weight") for name in ("gate", "up"))
        state[f"{block}.mlp.gate_up.weight"] = torch.cat([gate, up])
    fused.load_state_dict(state)
    tokens = torch.randint(0, 10, (2, 5))
    torch.testing.assert_close(fused(tokens), apart(tokens), rtol=1e-13, atol=1e-13)
    first: Any = fused[0]
    assert first.tp_plan["mlp.gate_up"] == "packed_colwise"


def test_the_projector_joins_neighbouring_patches() -> None:
    projector = Projector(width=1, merge=2, grid=4, outputs=4)
    seen: list[Tensor] = []
    projector.set_submodule("norm", nn.Identity())
    projector.up.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    projector(torch.arange(16.0).view(1, 16, 1))
    assert seen[0][0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


def test_an_image_is_drawn_from_the_tokens_right_before_it() -> None:
    sizes = {"width": 6, "hidden": 6, "condition": 3, "patch": 2}
    noising = Noising(**sizes, shape=(1, 4, 4))
    for name in ("condition_norm", "condition_project"):
        noising.set_submodule(name, nn.Identity())
    hidden = torch.arange(2 * 5).float().view(2, 5, 1).expand(2, 5, 6)
    images = Ragged(torch.zeros(3, 1, 4, 4), torch.tensor([1, 2]))
    starts = Ragged(torch.tensor([4, 1, 5]), torch.tensor([1, 2]))
    _, condition, *_ = noising(hidden, images, starts)
    before = noising.before[0].item()
    got = condition.values[:, :, 0].tolist()
    assert got == [[1, 2, 3], [before, before, 5], [7, 8, 9]]


def test_the_drawing_loss_is_a_sum_over_images_with_their_count() -> None:
    lengths = torch.tensor([2, 0, 1])
    images = Ragged(torch.zeros(3, 1, 4, 4), lengths)
    noise, found = torch.randn(3, 4, 5), torch.randn(3, 4, 5)
    loss = denoising()
    total = loss(Ragged(found, lengths), Ragged(noise, lengths), images)
    torch.testing.assert_close(total, ((found - noise) ** 2).mean(dim=(1, 2)).sum())
    assert loss.count({"targets": images}).tolist() == [2, 0, 1]
    with pytest.raises(InvalidInputError, match="no images"):
        loss.count({"targets": torch.zeros(3)})


def test_sequences_of_digits_say_what_is_to_be_learned() -> None:
    data = digits(sequences=40, length=48, rows=2)
    counts: set[int] = set()
    for index in range(len(data)):
        sample: dict[str, Any] = data[index]
        tokens, images, starts = sample["tokens"], sample["images"], sample["starts"]
        assert int((tokens == IMAGE).sum()) == 2 * len(images.values)
        assert all(tokens[s] == IMAGE != tokens[s - 1] for s in starts.values.tolist())
        assert not (sample["labels"][tokens == IMAGE] != IGNORE).any()
        work = data.work(index)
        assert work == {
            "vision": len(images.values),
            "llm": 1.0,
            "generator": len(sample["targets"].values),
        }
        counts.add(len(images.values))
    assert 0 in counts
    assert max(counts) >= 4


def test_synthetic_sequences_are_full_and_skewed() -> None:
    data = synthetic(samples=200, length=64, rows=8, image=4, vocab=50)
    images = torch.tensor([data.work(i)["vision"] for i in range(len(data))])
    assert images.min() == 0
    assert images.max() == 7
    sample: dict[str, Any] = data[int(images.argmax())]
    assert int((sample["tokens"] == 49).sum()) == 56
    assert len(sample["targets"].values) == 4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: llama(1, 10, heads=4, vocab=8), "heads 4 does not divide width 10"),
        (lambda: llama(1, 8, heads=4, kv_heads=3, vocab=8), "kv_heads 3 does not divide heads 4"),
        (lambda: llama(1, 8, heads=8, vocab=8), "does not divide width of a head 1"),
        (lambda: llama(0, 8, heads=4, vocab=8), "blocks is 0"),
        (lambda: llama(1, 8, heads=4, vocab=8, placeholders=[8]), "placeholder 8 is no token id"),
        (lambda: llama(1, 8, heads=4, vocab=8, placeholders=[1, 1]), "has an id twice"),
        (lambda: vit(1, 8, heads=2, outputs=8, image=12, patch=4, merge=2), "merge 2 does not"),
        (lambda: generator(1, 8, heads=2, hidden=8, image=12, patch=8), "patch 8 does not divide"),
        (lambda: digits(length=8), "a sequence has 8"),
        (lambda: digits(work={"vision": "pixels"}), "cannot go with 'pixels'"),
        (lambda: synthetic(length=8, rows=8), "a sequence has 8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        build()
