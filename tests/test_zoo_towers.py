"""The zoo's towers: cuts, tensor-parallel shards, determinism and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmlaunch.checkpoint.boxes import shard_boxes
from mmlaunch.model.tensor_parallel import ShardLayout, shard_block
from mmplan.errors import InvalidInputError
from mmplan.zoo import towers
from tests.zoo_tp import Meeting, gradients_by_name, run_ranks, run_split_block


def images() -> Tensor:
    return torch.rand(5, 1, 8, 8, dtype=torch.float64)


def tokens() -> Tensor:
    ids = torch.randint(1, 64, (5, 8))
    for row, length in enumerate([8, 5, 1, 7, 2]):
        ids[row, length:] = 0
    return ids


Build = Callable[[], nn.Sequential]
Data = Callable[[], Tensor]

CASES = [
    pytest.param(lambda: towers.vision(3, 48, patch=2), images, id="vision"),
    pytest.param(lambda: towers.vision(1, 32, heads=8, mlp_ratio=2.5), images, id="one-block"),
    pytest.param(lambda: towers.text(3, 48, heads=8), tokens, id="text"),
]


@pytest.mark.parametrize(("build", "data"), CASES)
@pytest.mark.parametrize("tp", [2, 4])
def test_split_blocks_equal_whole_ones(build: Build, data: Data, tp: int) -> None:
    state = (data(),)
    for block in build().double():
        want = block(*state)
        got = run_split_block(block, state, tp)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        state = want if isinstance(want, tuple) else (want,)


@pytest.mark.parametrize(("build", "data"), CASES)
def test_the_launchers_shards_give_the_gradients_of_whole_blocks(build: Build, data: Data) -> None:
    """The runtime's own shards, with an all-reduce between threads."""
    state, generator = (data(),), torch.Generator().manual_seed(0)
    for block in build().double():
        want, weights = gradients(block, state, generator.get_state())
        split = [copy.deepcopy(block) for _ in range(2)]

        def run(
            rank: int,
            meeting: Meeting,
            split: list[nn.Module] = split,
            state: tuple[Tensor, ...] = state,
        ) -> tuple[Any, dict[str, Tensor]]:
            shards = shard_block(split[rank], index=rank, count=2, comm=Sum(rank, meeting))
            output, grads = gradients(split[rank], state, generator.get_state())
            return output, {
                name: grad if name not in shards else place(grad, shards[name], rank)
                for name, grad in grads.items()
            }

        for output, grads in run_ranks(2, run):
            torch.testing.assert_close(output, want, rtol=1e-12, atol=1e-12)
            for name, grad in grads.items():
                known = ~grad.isnan()
                assert known.any()
                torch.testing.assert_close(grad[known], weights[name][known], msg=name)
        state = want if isinstance(want, tuple) else (want,)


class Sum:
    """An all-reduce between threads."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self._rank, self._meeting = rank, meeting

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self._meeting.all_gather(self._rank, tensor.clone())).sum(0))


def place(grad: Tensor, shard: ShardLayout, rank: int) -> Tensor:
    """A rank's slice where it lies in the full gradient; NaN elsewhere."""
    full = grad.new_full(shard.full_shape, float("nan"))
    start = 0
    for box in shard_boxes(shard.full_shape, shard.style, rank, 2, shard.parts):
        size = box.slices[0].stop - box.slices[0].start
        full[box.slices] = grad[start : start + size]
        start += size
    return full


def gradients(
    block: nn.Module, state: tuple[Tensor, ...], rng: Tensor
) -> tuple[Any, dict[str, Tensor]]:
    """Output (detached) and gradients by name for a fixed random gradient of the output."""
    output = block(*state)
    first = output[0] if isinstance(output, tuple) else output
    generator = torch.Generator()
    generator.set_state(rng)
    first.backward(torch.randn(first.shape, generator=generator, dtype=first.dtype))
    output = (first.detach(), *output[1:]) if isinstance(output, tuple) else first.detach()
    return output, gradients_by_name(block)


@pytest.mark.parametrize(("build", "data"), CASES)
def test_a_tp_plan_names_linears_and_covers_all_of_the_layer(build: Build, data: Data) -> None:
    for block in build():
        rules: Any = block.tp_plan
        for name in rules:
            assert isinstance(block.get_submodule(name), nn.Linear)
        linears = {n for n, m in block.named_modules() if isinstance(m, nn.Linear)}
        outside = {n for n in linears if n.startswith(("embed.", "head."))}
        assert linears - outside == set(rules)


@pytest.mark.parametrize(("build", "data"), CASES)
def test_samples_do_not_see_one_another(build: Build, data: Data) -> None:
    tower, x = build().double(), data()
    want = torch.cat([tower(part) for part in x.split([2, 3])])
    torch.testing.assert_close(tower(x), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("build", "data"), CASES)
def test_every_parameter_has_a_gradient(build: Build, data: Data) -> None:
    tower = build().double()
    tower(data()).square().sum().backward()
    # (The keys' third of a qkv bias has none: it moves all logits of a row alike.)
    assert all(grad.abs().max() > 0 for grad in gradients_by_name(tower).values())


@pytest.mark.parametrize(("build", "data"), CASES)
def test_same_seed_same_weights(build: Build, data: Data) -> None:
    states: list[dict[str, Tensor]] = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        states.append(build().state_dict())
    same, again, other = (torch.cat([t.flatten() for t in s.values()]) for s in states)
    assert torch.equal(same, again)
    assert not torch.equal(same, other)


@pytest.mark.parametrize("blocks", [1, 2, 6])
def test_blocks_counts_the_children(blocks: int) -> None:
    assert len(towers.vision(blocks, 32)) == len(towers.text(blocks, 32)) == blocks


def test_text_blocks_take_a_tuple_or_its_elements() -> None:
    first, second = towers.text(2, 32).double()
    state = first(tokens())
    assert torch.equal(second(state), second(*state))
    assert state[1].dtype == torch.bool


def test_padding_does_not_change_a_text() -> None:
    tower = towers.text(3, 32).double()
    short = torch.tensor([[7, 3, 9]])
    padded = torch.tensor([[7, 3, 9, 0, 0, 0, 0, 0]])
    torch.testing.assert_close(tower(short), tower(padded), rtol=1e-12, atol=1e-12)
    assert tower(torch.zeros(2, 8, dtype=torch.int64)).isfinite().all()


def test_patches_are_the_pixels_of_a_convolution() -> None:
    embedding = towers.PatchEmbedding(width=6, patch=4, image=8, channels=3).double()
    weight = embedding.project.weight.reshape(6, 3, 4, 4)
    image = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    want = nn.functional.conv2d(image, weight, embedding.project.bias, stride=4)
    got = embedding(image) - embedding.position
    torch.testing.assert_close(got, want.flatten(2).transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_dropout_acts_in_training_only_and_follows_the_seed() -> None:
    tower, image = towers.vision(2, 32, dropout=0.5).double(), images()
    outputs: list[Tensor] = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(tower(image))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    tower.eval()
    assert torch.equal(tower(image), tower(image))


def test_meta_device_gives_shapes_without_weights() -> None:
    with torch.device("meta"):
        tower = towers.text(24, 1024, heads=16, vocab=49408, length=77)
        features = tower(torch.zeros(2, 77, dtype=torch.int64))
    assert features.shape == (2, 64)
    assert features.device.type == "meta"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"blocks": 0, "width": 32}, "blocks is 0"),
        ({"blocks": 2, "width": 30}, "heads 4 does not divide width 30"),
        ({"blocks": 2, "width": 32, "patch": 3}, "patch 3 does not divide image 8"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(args: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        towers.vision(**args)


def test_wrong_images_and_long_texts_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"images \[1, 8, 8\], got \[3, 8, 8\]"):
        towers.vision(2, 32)(torch.rand(2, 3, 8, 8))
    with pytest.raises(InvalidInputError, match="8 positions, got 9 tokens"):
        towers.text(2, 32)(torch.ones(2, 9, dtype=torch.int64))


def test_a_tp_that_cuts_a_head_is_refused() -> None:
    block = towers.vision(2, 48, heads=2)[1].double()
    with pytest.raises(InvalidInputError, match="12 channels of attention, heads are 24 wide"):
        run_split_block(block, (torch.rand(2, 4, 48, dtype=torch.float64),), 4)
