"""The helper that cuts an existing model at its layers."""

from __future__ import annotations

import copy
import gc
import operator
import weakref
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from mmplan import Ragged
from mmplan.errors import InvalidInputError
from mmplan.zoo.sequential import LayerSequential, from_layers


class Layer(nn.Module):
    """A gated MLP whose strength is an input threaded through the layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor, strength: Tensor) -> Tensor:
        return hidden + strength * self.down(torch.tanh(self.up(hidden)))


class Core(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.token = nn.Embedding(10, width)
        self.layers = nn.ModuleList([Layer(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)


class LanguageModel(nn.Module):
    """Tied embedding, a bare parameter, buffers of both kinds, a frozen leftover."""

    def __init__(self, width: int = 6, depth: int = 3) -> None:
        super().__init__()
        self.core = Core(width, depth)
        self.offset = nn.Parameter(torch.randn(width))
        self.register_buffer("gain", torch.full((width,), 1.5))
        self.register_buffer("position", torch.arange(4.0)[:, None], persistent=False)
        self.out = nn.Linear(width, 10, bias=False)
        self.out.weight = self.core.token.weight
        self.unused = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, tokens: Tensor, strength: Tensor) -> Tensor:
        hidden = self.core.token(tokens) * self.gain + self.offset + self.position
        for layer in self.core.layers:
            hidden = layer(hidden, strength)
        return self.out(self.core.norm(hidden))


def embed(part: Any, tokens: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
    return part.core.token(tokens) * part.gain + part.offset + part.position, strength


def project(part: Any, hidden: Tensor, strength: Tensor) -> Tensor:
    del strength
    return part.out(part.core.norm(hidden))


FIRST = ["core.token", "offset", "gain", "position"]
LAST = ["core.norm", "out"]


def cut(model: nn.Module, **changes: Any) -> LayerSequential:
    args: dict[str, Any] = {
        "before": embed,
        "after": project,
        "first": FIRST,
        "last": LAST,
    } | changes
    return from_layers(model, "core.layers", **args)


def data() -> tuple[Tensor, Tensor]:
    return torch.randint(10, (5, 4)), torch.rand(5, 1, 1, dtype=torch.float64)


@pytest.mark.parametrize("depth", [1, 3])
def test_blocks_equal_the_model_and_its_gradients(depth: int) -> None:
    model = LanguageModel(depth=depth).double()
    blocks = cut(copy.deepcopy(model))
    inputs = data()
    assert len(blocks) == depth
    want, got = model(*inputs), blocks(inputs)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    want.square().sum().backward()
    got.square().sum().backward()
    theirs = dict(model.named_parameters())
    for name, parameter in blocks.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[blocks.source_names[name]].grad)


def test_a_layer_without_use_is_kept_and_does_not_train() -> None:
    model = LanguageModel(depth=3).double()
    kept = copy.deepcopy(model)
    del kept.core.layers[2]
    want = kept(*data_of_one_draw())
    blocks = cut(model, unused=["core.layers.2"])
    assert len(blocks) == 2
    torch.testing.assert_close(blocks(data_of_one_draw()), want, rtol=1e-13, atol=1e-13)
    still = {n for n, p in blocks.named_parameters() if not p.requires_grad}
    assert {blocks.source_names[n] for n in still} == {
        f"core.layers.2.{name}" for name in dict(model.core.layers[2].named_parameters())
    }


def data_of_one_draw() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return data()


def test_names_are_the_models_own_behind_the_block() -> None:
    blocks = cut(LanguageModel(depth=2))
    layer = ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert blocks.source_names == {
        "0.before.core.token.weight": "core.token.weight",
        "0.before.offset": "offset",
        "0.before.gain": "gain",
        **{f"0.layer.{name}": f"core.layers.0.{name}" for name in layer},
        **{f"1.layer.{name}": f"core.layers.1.{name}" for name in layer},
        "1.after.core.norm.weight": "core.norm.weight",
        "1.after.core.norm.bias": "core.norm.bias",
        "1.after.out.weight": "core.token.weight",  # tied: one tensor, the model's first name
    }
    assert set(blocks.source_names) == set(blocks.state_dict())


def test_tied_weights_stay_one_object() -> None:
    first, _, last = (cast("Any", block) for block in cut(LanguageModel()))
    assert first.before.core.token.weight is last.after.out.weight


def test_dropping_blocks_frees_the_rest_of_the_model() -> None:
    model = LanguageModel()
    gone = weakref.ref(model), weakref.ref(model.core.layers[2])
    blocks = cut(model)
    kept = blocks[0]
    del model, blocks
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    hidden, strength = kept.double()(*data())
    assert hidden.shape == (5, 4, 6)
    assert strength.shape == (5, 1, 1)


def test_a_module_can_stand_for_a_function() -> None:
    class Simple(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start = nn.Linear(3, 4)
            self.steps = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
            self.end = nn.Linear(4, 2)

    model = Simple()
    blocks = from_layers(model, "steps", before=model.start, after=model.end)
    x = torch.randn(2, 3)
    assert torch.equal(blocks(x), model.end(model.steps(model.start(x))))
    assert blocks.source_names["0.before.weight"] == "start.weight"


def test_ragged_values_are_one_element_of_the_state() -> None:
    class Shift(nn.Module):
        def forward(self, x: Ragged) -> Ragged:
            return Ragged(x.values + 1, x.lengths)

    model = nn.Module()
    model.steps = nn.ModuleList([Shift(), Shift()])
    got = from_layers(model, "steps")(Ragged(torch.zeros(3, 2), torch.tensor([1, 2])))
    assert isinstance(got, Ragged)
    assert got.values.eq(2).all()


def test_each_says_how_a_layer_is_called() -> None:
    model = LanguageModel().double()

    def halved(layer: nn.Module, hidden: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
        return layer(hidden, strength / 2), strength

    tokens, strength = data()
    got = cut(model, each=halved)((tokens, strength))
    torch.testing.assert_close(got, model(tokens, strength / 2))


def test_tp_plan_by_names_or_by_a_rule() -> None:
    names = {"up": "colwise", "down": "rowwise"}
    by_name = cut(LanguageModel(), tp_plan=names)
    by_rule = cut(LanguageModel(), tp_plan=lambda layer: names if layer.up else {})
    for block in [*by_name, *by_rule]:
        assert block.tp_plan == {"layer.up": "colwise", "layer.down": "rowwise"}
        assert isinstance(block.get_submodule("layer.up"), nn.Linear)
    assert not hasattr(cut(LanguageModel())[0], "tp_plan")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"last": ["out"]}, r"2 trainable parameters of LanguageModel: core\.norm\.weight"),
        ({"first": ["core.token", "gain", "position"]}, r"1 trainable parameters .*: offset"),
        ({"first": [*FIRST, "core.tokens"]}, "has no 'core.tokens': there is no 'tokens'"),
        ({"first": [*FIRST, "core.token.weight"]}, "'core.token.weight' is owned twice"),
        ({"first": ["core"]}, "'core' contains the layers"),
        ({"before": None}, "runs no function"),
        ({"tp_plan": {"up": "columns"}}, "'columns' for 'up' is unknown"),
        ({"tp_plan": {"mid": "colwise"}}, "'mid', which is no Linear of Layer"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        cut(LanguageModel(), **changes)


def test_what_is_ignored_may_be_left_out() -> None:
    blocks = cut(
        LanguageModel(), last=["out"], after=lambda p, h, s: p.out(h), ignore=["core.norm"]
    )
    assert not any("norm" in name for name, _ in blocks.named_parameters())


@pytest.mark.parametrize("name", ["core", "core.norm", "core.token.weight"])
def test_no_list_of_layers_is_refused_with_the_lists_there_are(name: str) -> None:
    with pytest.raises(InvalidInputError, match="is no list of layers") as caught:
        from_layers(LanguageModel(), name)
    assert "core.layers" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["decode", "core.token"])
def test_a_function_that_uses_what_its_block_does_not_own_is_told(name: str) -> None:
    def reach(part: Any, hidden: Tensor, strength: Tensor) -> Tensor:
        del strength
        return operator.attrgetter(name)(part)(hidden)

    model = LanguageModel().double()
    with pytest.raises(AttributeError, match=f"'{name.split('.')[-1]}' is not owned by this block"):
        cut(model, after=reach)(data())


def test_a_slice_is_a_sequential_of_the_same_blocks() -> None:
    model, inputs = LanguageModel().double(), data()
    blocks = cut(model)
    torch.testing.assert_close(blocks[1:](blocks[:1](inputs)), model(*inputs))
