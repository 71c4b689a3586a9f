"""transformers' CLIPModel against the two Sequentials made of its parts."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from mmplan.errors import InvalidInputError, UnfitEnvironmentError
from mmplan.zoo import hf
from mmplan.zoo.sequential import LayerSequential
from tests.zoo_tp import run_split_block

transformers = pytest.importorskip("transformers")

CONFIG: dict[str, Any] = {
    "projection_dim": 12,
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
    },
    "text_config": {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 50,
        "max_position_embeddings": 9,
        "eos_token_id": 49,
    },
}


@pytest.fixture(scope="module")
def clip_model() -> Any:
    torch.manual_seed(3)
    return transformers.CLIPModel(transformers.CLIPConfig(**CONFIG)).double().eval()


def load_by_source_names(blocks: LayerSequential, state: dict[str, Tensor]) -> None:
    names = blocks.source_names
    blocks.load_state_dict({name: state[names[name]] for name in blocks.state_dict()})


def captions() -> Tensor:
    """End of text in different places, then padding with an id of its own."""
    tokens = torch.randint(3, 49, (5, 9), generator=torch.Generator().manual_seed(0))
    for row, end in enumerate([8, 3, 5, 0, 7]):
        tokens[row, end] = 49
        tokens[row, end + 1 :] = 1
    return tokens


def test_image_tower_equals_get_image_features(clip_model: Any) -> None:
    tower = hf.clip_vision(CONFIG).double()
    load_by_source_names(tower, clip_model.state_dict())
    image = torch.randn(5, 3, 16, 16, dtype=torch.float64)
    want = clip_model.get_image_features(pixel_values=image).pooler_output
    assert len(tower) == 3
    torch.testing.assert_close(tower(image), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("end_id", [49, 2])
def test_text_tower_equals_get_text_features(end_id: int) -> None:
    config = {**CONFIG, "text_config": {**CONFIG["text_config"], "eos_token_id": end_id}}
    model = transformers.CLIPModel(transformers.CLIPConfig(**config)).double().eval()
    tower = hf.clip_text(config).double()
    load_by_source_names(tower, model.state_dict())
    # With id 2 the original checkpoints mark the end by the largest id.
    tokens = captions()
    want = model.get_text_features(input_ids=tokens).pooler_output
    assert len(tower) == 2
    torch.testing.assert_close(tower(tokens), want, rtol=1e-12, atol=1e-12)


def test_gradients_equal_those_of_the_model_by_name(clip_model: Any) -> None:
    clip_model.zero_grad()
    tower = hf.clip_text(CONFIG).double()
    load_by_source_names(tower, clip_model.state_dict())
    tokens = captions()
    clip_model.get_text_features(input_ids=tokens).pooler_output.square().sum().backward()
    tower(tokens).square().sum().backward()
    theirs = dict(clip_model.named_parameters())
    for name, parameter in tower.named_parameters():
        want = theirs[tower.source_names[name]].grad
        torch.testing.assert_close(parameter.grad, want, rtol=1e-11, atol=1e-12, msg=name)


def test_the_towers_and_the_scale_are_the_whole_model(clip_model: Any) -> None:
    towers = [hf.clip_vision(CONFIG), hf.clip_text(CONFIG)]
    covered = {tower.source_names[name] for tower in towers for name, _ in tower.named_parameters()}
    assert covered | {"logit_scale"} == {name for name, _ in clip_model.named_parameters()}


def test_names_fit_a_saved_clip_model(clip_model: Any, tmp_path: object) -> None:
    from safetensors.torch import load_file

    clip_model.save_pretrained(tmp_path)
    saved = load_file(f"{tmp_path}/model.safetensors")
    for tower in (hf.clip_vision(CONFIG), hf.clip_text(CONFIG)):
        for name, tensor in tower.state_dict().items():
            assert saved[tower.source_names[name]].shape == tensor.shape


@pytest.mark.parametrize("tp", [2, 4])
def test_split_layers_equal_whole_ones(tp: int) -> None:
    tower = hf.clip_vision(CONFIG).double()
    x = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    for block in tower:
        want = block(x)
        torch.testing.assert_close(run_split_block(block, (x,), tp), want, rtol=1e-12, atol=1e-12)
        x = want.detach()


def test_split_causal_layers_equal_whole_ones() -> None:
    tower = hf.clip_text(CONFIG).double()
    state = (captions(),)
    for block in tower:
        want = block(*state)
        torch.testing.assert_close(run_split_block(block, state, 2), want, rtol=1e-12, atol=1e-12)
        state = want


def test_same_seed_same_weights() -> None:
    weights: list[dict[str, Tensor]] = []
    for _ in range(2):
        torch.manual_seed(11)
        weights.append(hf.clip_text(CONFIG).state_dict())
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def test_builds_at_full_size_on_the_meta_device() -> None:
    with torch.device("meta"):
        tower = hf.clip_vision()
    assert len(tower) == 12
    assert {p.device.type for p in tower.parameters()} == {"meta"}


def test_missing_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnfitEnvironmentError, match="transformers") as caught:
        hf.clip_text(CONFIG)
    assert "pip install" in str(caught.value.hint)


def test_a_configuration_that_does_not_fit_is_the_users_error() -> None:
    bad = {**CONFIG, "vision_config": {**CONFIG["vision_config"], "num_attention_heads": 5}}
    with pytest.raises(
        InvalidInputError, match=r"refuses this CLIP configuration.*attention heads"
    ):
        hf.clip_vision(bad)


def test_several_end_ids_are_refused() -> None:
    config = {"text_config": {**CONFIG["text_config"], "eos_token_id": [2, 49]}}
    with pytest.raises(InvalidInputError, match="one end-of-text id"):
        hf.clip_text(config)
