"""SigLIP 2's tower for images of any size against the model, which takes them padded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mmplan.errors import InvalidInputError
from mmplan.ragged import Ragged
from mmplan.schema.workload import Workload
from mmplan.zoo.automatic.families import FAMILIES
from mmplan.zoo.automatic.pretrained import build_pretrained
from mmplan.zoo.losses import sigmoid
from mmplan.zoo.parts.image_grids import units_of
from mmplan.zoo.sequential import LayerSequential
from mmplan.zoo.siglip2 import Siglip2WithLoss, resized, siglip2_vision
from tests.init_models import FAMILY_CONFIGS
from tests.programs import loss, make_plan, unit
from tests.verification import TOLERANCE, verify_in_process

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

NAME, NUMBERS, HERE = "Siglip2Model", 3 * 4 * 4, Path(__file__).parent
CONFIG: dict[str, Any] = {"architectures": [NAME], **FAMILY_CONFIGS[NAME]}
GRIDS = [(2, 5), (4, 4), (1, 3), (6, 2)]


def model_of() -> Any:
    """The whole model; no bias is zero."""
    torch.manual_seed(5)
    model = build_pretrained(CONFIG).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def with_weights(part: LayerSequential, model: Any) -> LayerSequential:
    state = model.state_dict()
    part.double().load_state_dict({k: state[part.source_names[k]] for k in part.state_dict()})
    return part


def images(grids: list[tuple[int, int]]) -> tuple[Ragged, Tensor]:
    lengths = torch.tensor([h * w for h, w in grids], dtype=torch.int64)
    pixels = torch.rand(int(lengths.sum()), NUMBERS, dtype=torch.float64)
    return Ragged(pixels, lengths), torch.tensor(grids, dtype=torch.int64).view(-1, 2)


def test_the_loss_and_its_gradients_equal_the_model() -> None:
    model, parts = model_of(), {k: p.build(CONFIG) for k, p in FAMILIES[NAME].parts.items()}
    for part in parts.values():
        with_weights(part, model)
    pixels, shapes = images(GRIDS)
    tokens = torch.randint(3, 48, (len(GRIDS), 9))
    fields = {"pixel_values": pixels, "spatial_shapes": shapes, "input_ids": tokens}
    want = Siglip2WithLoss(model, {"return_loss": True})(**fields)
    of_pairs = sigmoid().double()
    of_pairs.load_state_dict({n: model.state_dict()[n][0] for n in ("logit_scale", "logit_bias")})
    got = of_pairs(parts["vision"]((pixels, shapes)), parts["text"](tokens))
    # Positions are resized in float32, whatever the model's type.
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    got.backward()
    want.backward()
    theirs = dict(model.named_parameters())
    seen = {"logit_scale", "logit_bias"}
    for part in parts.values():
        for own, parameter in part.named_parameters():
            its = part.source_names[own]
            seen.add(its)
            size = theirs[its].grad.abs().max()
            worst = (parameter.grad - theirs[its].grad).abs().max()
            # Of a key's bias it is zero.
            assert worst <= 1e-5 * size + 1e-15, (its, float(worst / size))
    assert seen == theirs.keys()


@pytest.mark.parametrize("pooled", [True, False])
def test_images_of_one_size_several_or_none(pooled: bool) -> None:
    """The same features, whatever samples the images are in."""
    tower = with_weights(siglip2_vision(CONFIG, pooled=pooled), model_of())
    pixels, shapes = images([(2, 3)] * 4)
    want = tower((pixels, shapes)).values if not pooled else tower((pixels, shapes))
    dense = tower((pixels.values.view(2, 12, -1), shapes.view(2, 2, 2)))
    torch.testing.assert_close(dense.flatten(0, 1), want)
    counts, lengths = torch.tensor([3, 0, 1]), torch.tensor([18, 0, 6])
    several = tower((Ragged(pixels.values, lengths), Ragged(shapes, counts)))
    torch.testing.assert_close(several.values, want)
    assert several.lengths.tolist() == (counts if pooled else lengths).tolist()
    tower.zero_grad()
    none = torch.tensor([0, 0])
    features = tower((Ragged(pixels.values[:0], none), Ragged(shapes[:0], none)))
    features.values.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in tower.parameters())


@pytest.mark.parametrize("grid", [(7, 3), (2, 9)])
def test_positions_are_resized_as_torch_does(grid: tuple[int, int]) -> None:
    table = torch.randn(16, 5)
    found = resized(table, 4, units_of(torch.tensor([grid]), grid[0] * grid[1]))
    want = functional.interpolate(
        table.view(1, 4, 4, 5).permute(0, 3, 1, 2), size=grid, mode="bilinear", antialias=True
    )
    torch.testing.assert_close(found, want[0].flatten(1).T)


@pytest.mark.slow
def test_parts_on_several_ranks_equal_one_process() -> None:
    """Gradients too: tp 2 and pp 2."""
    fields = FAMILIES[NAME].fields(build_pretrained(CONFIG), {}, None)
    takes = "pixel_values", "spatial_shapes"
    modules = {
        "vision": {
            "factory": "mmplan.zoo.siglip2:siglip2_vision",
            "args": {"config": CONFIG, "pooled": True},
            "inputs": list(takes),
        },
        "text": {
            "factory": "mmplan.zoo.hf:siglip_text",
            "args": {"config": CONFIG},
            "inputs": ["input_ids"],
        },
    }
    pairs = {
        **{"factory": "mmplan.zoo.losses:sigmoid", "inputs": ["vision", "text"]},
        **{"cross_sample": True, "sync_batch": 6},
    }
    noise = {"factory": "mmplan.zoo.synthetic:noise", "args": {"samples": 6, "fields": fields}}
    workload = Workload.model_validate(
        {
            **{"name": "siglip2", "batch": 6, "modules": modules, "losses": {"pairs": pairs}},
            **{"data": noise, "train": {"precision": "fp64"}},
        }
    )
    plan = make_plan(
        unit("vision", *takes, pp=2, tp=2, k=3, blocks=2),
        unit("text", "input_ids", k=3, blocks=2),
        losses=[loss("pairs", "vision", "text", sync_batch=6)],
        batch=6,
    )
    verdict = verify_in_process(plan, workload)
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= TOLERANCE["fp64"]


def test_what_does_not_fit_is_refused() -> None:
    pixels, shapes = images([(2, 3), (1, 4)])
    with pytest.raises(InvalidInputError, match=r"have \[6, 4\] patches"):
        siglip2_vision(CONFIG).double()((pixels, shapes.flip(0)))
    with pytest.raises(InvalidInputError, match="no SigLIP 2 for images of any size"):
        siglip2_vision({"architectures": ["SiglipModel"], "model_type": "siglip"})
    dropout = {**CONFIG["vision_config"], "attention_dropout": 0.1}
    with pytest.raises(InvalidInputError, match="no attention dropout"):
        siglip2_vision({**CONFIG, "vision_config": dropout})
