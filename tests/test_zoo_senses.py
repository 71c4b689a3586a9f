"""Senses of the scanned digits, and what is said about them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmplan.errors import InvalidInputError
from mmplan.zoo import digits
from mmplan.zoo.decoder import llama
from mmplan.zoo.dialogues import BEGIN, IGNORE, IMAGE, SOUND, dialogues, digits_told
from mmplan.zoo.encoder import vit
from mmplan.zoo.senses import (
    STEPS,
    is_ink,
    senses,
    sound,
    spell,
    spelled_captions,
    tones,
    zero_shot_accuracies,
)

pytest.importorskip("sklearn")

pytestmark = pytest.mark.usefixtures("one_thread")


def test_fields_of_a_sample() -> None:
    sample = senses("test")[3]
    assert {name: (tuple(value.shape), value.dtype) for name, value in sample.items()} == {
        "image": ((1, 8, 8), torch.float32),
        "caption": ((32,), torch.int64),
        "sound": ((1, 256), torch.float32),
        "distances": ((1, 8, 8), torch.float32),
        "heat": ((1, 4, 4), torch.float32),
        "strokes": ((3, STEPS), torch.float32),
        "label": ((), torch.int64),
    }


def test_the_senses_are_the_same_every_time_and_of_the_same_scan() -> None:
    torch.manual_seed(1)
    first = senses()
    torch.manual_seed(2)
    again, scans = senses(), digits.captioned()
    for name, values in first.fields.items():
        assert torch.equal(values, again.fields[name]), name
    assert torch.equal(first.fields["image"], scans.images)
    assert torch.equal(first.fields["label"], scans.labels)


def test_captions_are_those_of_the_scan_letter_by_letter() -> None:
    data, scans = senses("test").fields, digits.captioned("test")
    for letters, label, tokens in zip(
        data["caption"], data["label"], scans.fields["tokens"], strict=True
    ):
        text = bytes(letters[letters > 0].tolist()).decode()
        assert digits.DIGITS[label] in text
        assert torch.equal(digits.tokenize(text), tokens)
    assert spelled_captions().shape == (10, len(digits.TEMPLATES), 32)
    with pytest.raises(InvalidInputError, match="a caption has 33 bytes"):
        spell(33 * "a")


def test_the_scan_can_be_heard() -> None:
    """The tones are orthogonal: their share in each part of the wave is the ink."""
    data = senses("test").fields
    image = data["image"][:, 0]
    parts = data["sound"].unflatten(2, (8, 32))[:, 0]
    heard = torch.einsum("nct,rt->nrc", parts, tones(image)) / 16
    torch.testing.assert_close(heard, image, rtol=0, atol=1e-5)
    # Columns are played from left to right: a scan with ink in column 2 alone.
    single = torch.zeros(1, 8, 8)
    single[0, 5, 2] = 1
    wave = sound(single)[0, 0]
    assert wave.nonzero().min() > 64
    assert wave.nonzero().max() < 96


def test_distances_are_those_to_the_edge_of_the_ink() -> None:
    data = senses("test").fields
    ink = is_ink(data["image"][:, 0])
    far = data["distances"][:, 0] * 8
    assert torch.equal(far > 0, ink)
    for scan in (0, 100, 300):
        for row, column in ((0, 0), (3, 4), (7, 7)):
            other = (ink[scan] != ink[scan, row, column]).nonzero().double()
            here = torch.tensor([row, column]).double()
            want = (other - here).norm(dim=1).min().item()
            assert abs(far[scan, row, column]) == pytest.approx(want, rel=1e-6)


def test_no_heat_is_lost() -> None:
    data = senses("test").fields
    total = data["image"].sum(dim=(1, 2, 3))
    torch.testing.assert_close(4 * data["heat"].sum(dim=(1, 2, 3)), total)
    assert data["heat"][0, 0, 1, 2] == data["image"][0, 0, 2:4, 4:6].mean()


def test_the_pen_passes_every_pixel_of_ink_once_and_then_rests() -> None:
    data = senses()
    image = data.fields["image"][:, 0]
    x, y = ((data.fields["strokes"][:, axis] + 1) * 3.5 for axis in (0, 1))
    pixel = (y.round() * 8 + x.round()).long()
    ink = is_ink(image).flatten(1)
    assert ink.sum(dim=1).max() < STEPS
    for way, own, shades, scan in zip(
        pixel, ink, data.fields["strokes"][:, 2], image.flatten(1), strict=True
    ):
        steps = int(own.sum())
        assert sorted(way[:steps].tolist()) == own.nonzero()[:, 0].tolist()
        assert (way[steps:] == way[steps - 1]).all()
        assert torch.equal(shades, scan[way])
    # It goes to the nearest pixel that is left.
    way = [divmod(p, 8) for p in pixel[0].tolist()]
    left = {divmod(p, 8) for p in ink[0].nonzero()[:, 0].tolist()} - {way[0]}
    for (row, column), after in itertools.pairwise(way):
        if left:
            apart = {p: (p[0] - row) ** 2 + (p[1] - column) ** 2 for p in left}
            assert apart[after] == min(apart.values())
            left.remove(after)


class Told(nn.Module):
    """Says which digit it is, from the label hidden in the first number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (
            torch.nn.functional.one_hot(x.reshape(len(x), -1)[:, 0].long(), 10).float() * self.scale
        )


class Read(Told):
    """Says which digit a caption names."""

    def forward(self, x: Tensor) -> Tensor:
        names = [bytes(row[row > 0].tolist()).decode() for row in x]
        named = [next(i for i, d in enumerate(digits.DIGITS) if d in name) for name in names]
        return torch.nn.functional.one_hot(torch.tensor(named), 10).float() * self.scale


def test_accuracy_is_one_for_towers_that_know_and_chance_for_others() -> None:
    fields = {"text": "caption", "label": "label", "heat": "heat"}
    towers = {"text": Read(), "label": Told(), "heat": Told()}
    found = zero_shot_accuracies(towers, fields)
    assert list(found) == ["label", "heat"]
    assert found["label"] == 1.0
    assert found["heat"] < 0.2


# --- dialogues -----------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [("image",), ("sound",), ("image", "sound")])
def test_every_sense_has_its_places_and_its_caption(chosen: tuple[str, ...]) -> None:
    data = dialogues("test", senses=chosen, rows=3)
    scans, names = digits.captioned("test"), digits.digit_ids()
    assert len(data) == len(scans)
    assert set(data[0]) == {*chosen, "tokens", "labels"}
    tokens, labels = data.fields["tokens"], data.fields["labels"]
    ids = {"image": IMAGE, "sound": SOUND}
    begin = [BEGIN, *(ids[sense] for sense in chosen for _ in range(3))]
    assert (tokens[:, : len(begin)] == torch.tensor(begin)).all()
    said = tokens[:, len(begin) :]
    # Words, then padding; words are learned, nothing else is.
    assert ((said == 0).long().diff(dim=1) >= 0).all()
    assert (labels[:, : len(begin)] == IGNORE).all()
    assert torch.equal(labels[:, len(begin) :], said.masked_fill(said == 0, IGNORE))
    # The captions name the digits of what is shown and played, in this order.
    named = said[torch.isin(said, names)].view(len(said), len(chosen))
    told = [scans.labels[nearest_scan(scans, data.fields[sense], sense)] for sense in chosen]
    assert torch.equal(names[torch.stack(told, dim=1)], named)
    if len(chosen) == 2:
        assert (told[0] != told[1]).any()


def nearest_scan(scans: digits.CaptionedDigits, given: Tensor, sense: str) -> Tensor:
    own = scans.images if sense == "image" else sound(scans.images[:, 0])
    return torch.cdist(given.flatten(1), own.flatten(1)).argmin(dim=1)


@pytest.mark.parametrize("chosen", [(), ("image", "smell"), ("sound", "sound")], ids=str)
def test_dialogues_about_other_things_are_refused(chosen: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInputError, match="dialogues about"):
        dialogues(senses=chosen)


def test_an_untrained_model_tells_digits_by_chance_and_a_parrot_all_of_one() -> None:
    torch.manual_seed(0)
    sizes = {"heads": 2, "outputs": 16, "channels": 1, "merge": 2}
    encoders = {
        "image": vit(1, 16, image=8, patch=2, **sizes),
        "sound": vit(1, 16, image=[256], patch=[32], **sizes),
    }
    llm = llama(2, 16, heads=2, vocab=64, placeholders=[IMAGE, SOUND])
    inputs = ("image", "sound")
    untrained = digits_told(encoders, llm, inputs=inputs)
    assert 0 <= untrained < 0.3
    seven = int(digits.digit_ids()[7])
    head: Any = llm[-1].head
    with torch.no_grad():
        head.norm.weight.zero_()
        head.vocabulary = Constant(seven)
    told = digits_told({"sound": encoders["sound"]}, llm, inputs=inputs)
    labels = digits.captioned("test").labels
    assert told == pytest.approx((labels == 7).double().mean().item())


class Constant(nn.Module):
    """Logits that always name one id."""

    def __init__(self, id_: int) -> None:
        super().__init__()
        self.id = id_

    def forward(self, x: Tensor) -> Tensor:
        logits = x.new_zeros(*x.shape[:-1], 64)
        logits[..., self.id] = 1
        return logits
