"""The captioned scans: what they hold, and that two small towers learn them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from mmplan.errors import InvalidInputError, UnfitEnvironmentError
from mmplan.zoo import digits, losses, towers

pytest.importorskip("sklearn")


def test_fields_of_a_sample() -> None:
    sample = digits.captioned()[3]
    assert {k: (tuple(v.shape), v.dtype) for k, v in sample.items()} == {
        "image": ((1, 8, 8), torch.float32),
        "tokens": ((digits.LENGTH,), torch.int64),
        "label": ((), torch.int64),
    }


def test_a_fifth_is_held_out_and_all_scans_are_used_once() -> None:
    from sklearn.datasets import load_digits

    train, test = digits.captioned("train"), digits.captioned("test")
    assert (len(train), len(test)) == (1438, 359)
    scans = torch.cat([train.images, test.images]).flatten(1)
    labels = torch.cat([train.labels, test.labels]).double()
    got = torch.cat([scans.double() * 16, labels[:, None]], dim=1)
    raw = load_digits()
    want = torch.cat([torch.tensor(raw.data), torch.tensor(raw.target)[:, None].double()], dim=1)
    assert sorted(got.tolist()) == sorted(want.tolist())
    assert scans.min() == 0
    assert scans.max() == 1


def test_the_data_are_the_same_every_time() -> None:
    torch.manual_seed(1)
    first = digits.captioned()
    torch.manual_seed(2)
    again = digits.captioned()
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.tokens, again.tokens)


def test_captions_name_the_label_and_vary() -> None:
    data, prompts = digits.captioned(), digits.prompts()
    assert prompts.shape == (10, len(digits.TEMPLATES), digits.LENGTH)
    words = [digits.tokenize(name)[0] for name in digits.DIGITS]
    for tokens, label in zip(data.tokens, data.labels, strict=True):
        assert words[label] in tokens
    assert len(data.tokens.unique(dim=0)) == 10 * len(digits.TEMPLATES)


def test_tokens_fit_the_text_towers_defaults() -> None:
    prompts = digits.prompts().flatten(0, 1)
    assert prompts.max() < 64
    assert towers.text(1, 8)(prompts).shape == (70, 64)


def test_unknown_words_and_splits_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="does not know 'cat'"):
        digits.tokenize("a photo of the cat")
    with pytest.raises(InvalidInputError, match="takes 8 words"):
        digits.tokenize("a a a a a a a a a")
    with pytest.raises(InvalidInputError, match="no split 'valid'"):
        digits.captioned("valid")


def test_missing_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UnfitEnvironmentError, match="scikit-learn") as caught:
        digits.captioned()
    assert caught.value.hint == "pip install scikit-learn"


class Oracle(nn.Module):
    """Features that point at a digit: right for the captions, shifted for the images."""

    def __init__(self, keys: Tensor, values: Tensor, shift_every: int) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.table = {
            tuple(k.flatten().tolist()): v.item() for k, v in zip(keys, values, strict=True)
        }
        self.shift_every = shift_every

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        found = torch.tensor([self.table[tuple(row.flatten().tolist())] for row in x])
        if self.shift_every:
            found[:: self.shift_every] = (found[:: self.shift_every] + 1) % 10
        return torch.eye(10)[found] * 3


@pytest.mark.parametrize(("shift_every", "right"), [(0, 359), (2, 179), (1, 0)])
def test_accuracy_counts_the_scans_whose_digit_is_named(shift_every: int, right: int) -> None:
    data, prompts = digits.captioned("test"), digits.prompts()
    labels = torch.arange(10).repeat_interleave(prompts.shape[1])
    text = Oracle(prompts.flatten(0, 1), labels, 0)
    vision = Oracle(data.images, data.labels, shift_every)
    assert digits.zero_shot_accuracy(vision, text) == pytest.approx(right / 359)
    assert vision.training
    assert text.training


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that outnumber the free cores wait for one another at every matrix product."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("one_thread")
def test_two_small_towers_learn_the_digits() -> None:
    """The example's sizes at half its steps (about 15 CPU seconds)."""
    torch.manual_seed(0)
    vision, text, loss = towers.vision(6, 96), towers.text(4, 64), losses.clip()
    modules = nn.ModuleList([vision, text, loss])
    optimizer = torch.optim.AdamW(modules.parameters(), lr=5e-4)
    data = digits.captioned()
    for _ in range(100):
        batch = torch.randperm(len(data))[:256]
        optimizer.zero_grad()
        loss(vision(data.images[batch]), text(data.tokens[batch])).backward()
        optimizer.step()
    assert digits.zero_shot_accuracy(vision, text) >= 0.9
