"""Qwen2-VL and Qwen2.5-VL of transformers against their parts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmplan.errors import InvalidInputError
from mmplan.profiling.counting import FLOPS
from mmplan.profiling.flow import BASE, TaskFlow
from mmplan.ragged import Ragged
from mmplan.schema.workload import Workload, resolve_tasks
from mmplan.zoo import qwen_vl
from mmplan.zoo.automatic.families import FAMILIES
from mmplan.zoo.automatic.pretrained import build_pretrained
from mmplan.zoo.losses import token_cross_entropy
from mmplan.zoo.sequential import LayerSequential
from tests.init_models import FAMILY_CONFIGS
from tests.programs import loss, make_plan, unit
from tests.verification import TOLERANCE, verify_in_process

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

HERE, BATCH = Path(__file__).parent, 6
IMAGE, MERGE, NUMBERS = 58, 2, 3 * 2 * 4 * 4
CONFIGS: dict[str, dict[str, Any]] = {
    name: {"architectures": [name], **config}
    for name, config in FAMILY_CONFIGS.items()
    if name.startswith("Qwen")
}
# Rows and columns of units of each sample's images: smaller than a window, whole windows, and none.
SAMPLES: dict[str, list[list[tuple[int, int]]]] = {
    "one size": [[(2, 3)]] * 3,
    "several sizes": [[(5, 3)], [(1, 1)], [(4, 4)]],
    "several images or none": [[(2, 5), (3, 1)], [], [(4, 2)]],
}


def fields_of(samples: list[list[tuple[int, int]]], length: int = 48) -> dict[str, Any]:
    """Dense where each sample has one image of one size."""
    counts = [sum(h * w for h, w in images) for images in samples]
    sides = [[[1, MERGE * h, MERGE * w] for h, w in images] for images in samples]
    grids = [torch.tensor(rows, dtype=torch.int64).view(-1, 3) for rows in sides]
    patches = torch.rand(sum(counts) * MERGE**2, NUMBERS, dtype=torch.float64)
    tokens = torch.randint(1, IMAGE, (len(samples), length))
    for row, images in enumerate(samples):
        begin = 1 + row
        for h, w in images:
            tokens[row, begin : begin + h * w] = IMAGE
            begin += h * w + 2
    same = len({tuple(images) for images in samples}) == 1
    lengths = torch.tensor([n * MERGE**2 for n in counts])
    one = all(len(images) == 1 for images in samples)
    return {
        "pixel_values": patches.unflatten(0, (len(samples), -1))
        if same
        else Ragged(patches, lengths),
        "image_grid_thw": torch.cat(grids)
        if one
        else Ragged(torch.cat(grids), torch.tensor([len(g) for g in grids])),
        "input_ids": tokens,
        "labels": torch.where(tokens == IMAGE, -100, tokens),
    }


def model_of(name: str) -> Any:
    """The whole model; no bias is zero."""
    torch.manual_seed(5)
    model = build_pretrained(CONFIGS[name]).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def parts_of(name: str, model: Any) -> tuple[LayerSequential, LayerSequential]:
    """With the weights of a model."""
    state = model.state_dict()
    parts = (qwen_vl.qwen_vl_tower(CONFIGS[name]), qwen_vl.qwen_vl_lm(CONFIGS[name]))
    for part in parts:
        part.double().load_state_dict({k: state[part.source_names[k]] for k in part.state_dict()})
    return parts


def run(parts: tuple[LayerSequential, LayerSequential], fields: dict[str, Any]) -> Any:
    tower, lm = parts
    grid = fields["image_grid_thw"]
    return lm((fields["input_ids"], tower((fields["pixel_values"], grid)), grid))


@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("name", CONFIGS)
def test_parts_and_their_gradients_equal_the_model(name: str, samples: str) -> None:
    model = model_of(name)
    parts, fields = parts_of(name, model), fields_of(SAMPLES[samples])
    want = qwen_vl.QwenVLWithLoss(model, {"use_cache": False})(**fields)
    of_tokens = token_cross_entropy()
    count = of_tokens.count({"labels": fields["labels"]}).sum()
    got = of_tokens(run(parts, fields), fields["labels"]) / count
    # Angles and norms of the model are in float32, whatever its type.
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0, check_dtype=False)
    got.backward()
    want.backward()
    theirs = dict(model.named_parameters())
    seen = set[str]()
    for part in parts:
        for own, parameter in part.named_parameters():
            its = part.source_names[own]
            seen.add(its)
            size = theirs[its].grad.abs().max()
            assert size > 0, its
            worst = (parameter.grad - theirs[its].grad).abs().max()
            assert worst <= 1e-5 * size, (its, float(worst / size))
    assert seen == theirs.keys()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_sample_is_alone(name: str) -> None:
    """A batch's logits are those of its samples, whatever their images; text may be ragged."""
    parts = parts_of(name, model_of(name))
    fields = fields_of(SAMPLES["several images or none"])
    pixels, grids = fields["pixel_values"], fields["image_grid_thw"]
    together = run(parts, fields)
    ragged_text = {**fields, "input_ids": _ragged(list(fields["input_ids"]))}
    torch.testing.assert_close(run(parts, ragged_text).values, together.flatten(0, 1))
    for index in range(3):
        own = {
            "pixel_values": _row(pixels, index),
            "image_grid_thw": _row(grids, index),
            "input_ids": fields["input_ids"][index : index + 1],
        }
        torch.testing.assert_close(run(parts, own)[0], together[index])


def _row(rows: Ragged, index: int) -> Ragged:
    part = rows.values.split(rows.lengths.tolist())[index]
    return Ragged(part, rows.lengths[index : index + 1])


def _ragged(rows: list[Tensor]) -> Ragged:
    return Ragged(torch.cat(rows), torch.tensor([len(row) for row in rows]))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_batch_without_images_has_gradients_of_zero(name: str) -> None:
    parts = parts_of(name, model_of(name))
    run(parts, fields_of([[], []])).sum().backward()
    gradients = [p.grad for p in parts[0].parameters()]
    assert all(g is not None and not g.any() for g in gradients)


def workload(name: str, *, dense: bool, precision: str = "fp64") -> Workload:
    """The parts as ``mmplan init`` names them, on its noise."""
    config, family = CONFIGS[name], FAMILIES[name]
    fields: dict[str, Any] = dict(family.fields(build_pretrained(config), {}, None))
    if dense:
        fields = {key: specs[0] for key, specs in fields.items()}
        fields["pixel_values"] = {**fields["pixel_values"], "ragged": False}
    modules = {
        part: {
            "factory": f"mmplan.zoo.qwen_vl:{of.factory.partition('.')[2]}",
            "args": {"config": config},
            "inputs": list(of.takes),
        }
        for part, of in family.parts.items()
    }
    words = {"factory": "mmplan.zoo.losses:token_cross_entropy", "inputs": ["lm", "labels"]}
    noise = {
        "factory": "mmplan.zoo.synthetic:noise",
        "args": {"samples": BATCH, "fields": fields},
    }
    return Workload.model_validate(
        {
            **{"name": "qwen", "batch": BATCH, "modules": modules, "losses": {"words": words}},
            **{"data": noise, "train": {"precision": precision}},
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dense"),
    [(name, dense) for name in CONFIGS for dense in (True, False)],
)
def test_parts_on_several_ranks_equal_one_process(name: str, dense: bool) -> None:
    """Gradients too: tp 2 and pp 2 of both parts."""
    given = "pixel_values", "image_grid_thw"
    text = "input_ids", "vision", "image_grid_thw"
    plan = make_plan(
        unit("vision", *given, pp=2, tp=2, k=3, blocks=3, kind="1f1b"),
        unit("lm", *text, pp=2, tp=2, k=3, blocks=4, kind="1f1b"),
        losses=[loss("words", "lm", "labels")],
        batch=BATCH,
    )
    verdict = verify_in_process(plan, workload(name, dense=dense))
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= TOLERANCE["fp64"]
    assert verdict.compared > 40


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_costs_the_squares_of_images_or_windows(name: str) -> None:
    job = workload(name, dense=False)
    flow = TaskFlow(job, HERE, resolve_tasks(job)["default"])
    counted = [
        block.forward.table[block.forward.names.index("mmplan::ragged_attention"), FLOPS]
        for block in flow.count_module("vision", tp=1, samples=BASE)
    ]
    # Images of 24 and 15 units, in turn; windows of 2 by 2 units.
    patches, window = (24 * 4, 15 * 4), 2 * 2 * 4
    squares = BASE / 2 * sum(n * n for n in patches)
    in_windows = BASE / 2 * sum(patches) * window
    width = 32
    expected = [squares] * 3 if name.startswith("Qwen2VL") else [in_windows, squares, in_windows]
    assert counted == pytest.approx([2 * 2 * width * pairs for pairs in expected])


def test_positions_are_those_of_the_paper() -> None:
    """Figure 3 of arXiv:2409.12191: text goes on behind the longer side of an image."""
    tokens = torch.tensor([[1, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, 2, 3]])
    places = qwen_vl.text_places(tokens, torch.tensor([[1, 4, 6]]), IMAGE, MERGE)
    assert isinstance(places, Tensor)
    assert places[0].T.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5],
        [0, 1, 1, 1, 2, 2, 2, 4, 5],
        [0, 1, 2, 3, 1, 2, 3, 4, 5],
    ]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([[1, 4, 4]], r"have \[24\] patches, and grids \[\[4, 4\]\] of \[16\]"),
        ([[2, 4, 6]], "2 frames: videos are not taken"),
        ([[1, 3, 8]], "multiples of 2"),
        ([[1, 4, 2], [1, 4, 4]], "1 images .* 2 grids"),
    ],
)
def test_grids_that_do_not_fit_are_refused(grid: list[list[int]], message: str) -> None:
    name = next(iter(CONFIGS))
    parts = qwen_vl.qwen_vl_tower(CONFIGS[name]), qwen_vl.qwen_vl_lm(CONFIGS[name])
    fields = fields_of([[(2, 3)]])
    fields = {k: v.float() if k == "pixel_values" else v for k, v in fields.items()}
    with pytest.raises(InvalidInputError) as refused:
        run(parts, fields | {"image_grid_thw": torch.tensor([grid])})
    assert re.search(message, f"{refused.value} {refused.value.hint}")


def test_other_models_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="no Qwen2-VL and no Qwen2"):
        qwen_vl.qwen_vl_lm({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
