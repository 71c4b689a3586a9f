"""Captioned handwritten digits: real scans, small enough to train on one core.

The images are scikit-learn's copy of the test set of the UCI "Optical Recognition
of Handwritten Digits": 1,797 scans of 8 x 8 pixels with 17 grey levels. Each has
one caption, such as "a photo of the digit seven". Data fields: ``image``
([1, 8, 8] float32 in [0, 1]), ``tokens`` ([8] int64, one id per word, 0 is
padding) and ``label`` (scalar int64).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from mmplan.errors import InvalidInputError, UnfitEnvironmentError

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = (
    "a photo of the digit {}",
    "a scan of the number {}",
    "the digit {} written by hand",
    "a handwritten {}",
    "someone wrote the number {}",
    "this is a {}",
    "{} in ink on paper",
)
LENGTH = 8

_WORDS = sorted({word for line in (*TEMPLATES, *DIGITS) for word in line.split() if word != "{}"})
_WORD_IDS = {word: index for index, word in enumerate(_WORDS, start=1)}
# The split and the captions are part of the data: they do not follow train.seed.
_DATA_SEED = 20240416


class Fields(Dataset[dict[str, Tensor]]):
    """Samples whole in memory, entry i of every field being of sample i."""

    def __init__(self, fields: Mapping[str, Tensor]) -> None:
        self.fields = fields

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.fields.items()}


class CaptionedDigits(Fields):
    """One split of the captioned scans (0.6 MB).

    Args:
        images: [N, 1, 8, 8] float32.
        labels: [N] int64, 0 to 9.
        templates: [N] int64, the caption's index in ``TEMPLATES``.
    """

    def __init__(self, *, images: Tensor, labels: Tensor, templates: Tensor) -> None:
        super().__init__({"image": images, "tokens": prompts()[labels, templates], "label": labels})
        self.images = images
        self.labels = labels
        self.templates = templates


def captioned(split: str = "train") -> CaptionedDigits:
    """The captioned scans: 1,438 to train on or the 359 held out.

    A fixed shuffle decides which fifth is held out, and each scan's caption.

    Args:
        split: "train" or "test".

    Raises:
        InvalidInputError: no such split.
        UnfitEnvironmentError: scikit-learn, which ships the scans, is missing.
    """
    if split not in ("train", "test"):
        raise InvalidInputError(
            f"captioned digits have no split {split!r}", hint="choose train or test"
        )
    images, labels = _load()
    generator = torch.Generator().manual_seed(_DATA_SEED)
    order = torch.randperm(len(labels), generator=generator)
    templates = torch.randint(len(TEMPLATES), (len(labels),), generator=generator)
    num_held_out = len(labels) // 5
    chosen = order[:num_held_out] if split == "test" else order[num_held_out:]
    return CaptionedDigits(
        images=images[chosen], labels=labels[chosen], templates=templates[chosen]
    )


def tokenize(caption: str) -> Tensor:
    """Word ids of a caption, padded with 0: [8] int64.

    Raises:
        InvalidInputError: a word that no caption of this data has, or more than 8 words.
    """
    words = caption.split()
    unknown = [word for word in words if word not in _WORD_IDS]
    if unknown or len(words) > LENGTH:
        problem = f"does not know {unknown[0]!r}" if unknown else f"takes {LENGTH} words"
        raise InvalidInputError(
            f"the digits' vocabulary {problem}: {caption!r}",
            hint=f"use the words {', '.join(_WORDS)}",
        )
    ids = [_WORD_IDS[word] for word in words]
    return torch.tensor(ids + [0] * (LENGTH - len(ids)))


def prompts() -> Tensor:
    """Tokens of every caption of every digit: [10, templates, 8] int64."""
    return encoded_captions(tokenize)


def encoded_captions(encode: Callable[[str], Tensor]) -> Tensor:
    """Every caption of every digit, [10, templates, ...]."""
    return torch.stack(
        [torch.stack([encode(line.format(digit)) for line in TEMPLATES]) for digit in DIGITS]
    )


def digit_ids() -> Tensor:
    """Ids of the ten words that name a digit, [10] int64."""
    return torch.tensor([_WORD_IDS[digit] for digit in DIGITS])


def zero_shot_accuracy(vision: nn.Module, text: nn.Module, *, split: str = "test") -> float:
    """Share of scans whose nearest caption, averaged over templates, names their digit.

    Args:
        vision: images [B, 1, 8, 8] to features [B, E].
        text: tokens [B, 8] to features [B, E].
        split: which scans; the held-out fifth by default.

    Returns:
        Accuracy in [0, 1]. The modules are evaluated without dropout and given
        back in the mode that they were in.
    """
    data = captioned(split)
    return nearest_class(vision, data.images, text, prompts(), data.labels)


def nearest_class(
    tower: nn.Module, inputs: Tensor, text: nn.Module, captions: Tensor, labels: Tensor
) -> float:
    """Share of samples whose nearest captions, averaged over templates, are of their class.

    Args:
        tower: inputs [N, ...] to features [N, E].
        inputs: of the samples.
        text: captions [B, T] to features [B, E].
        captions: [classes, templates, T] int64.
        labels: [N] int64.

    Returns:
        As :func:`zero_shot_accuracy`.
    """
    parameter = next(tower.parameters())
    inputs = inputs.to(device=parameter.device, dtype=parameter.dtype)
    text_features = _evaluate(text, captions.flatten(0, 1).to(parameter.device))
    per_template = functional.normalize(text_features, dim=-1).unflatten(0, captions.shape[:2])
    classes = functional.normalize(per_template.mean(dim=1), dim=-1)
    # The norm of a sample's features does not change which class is nearest.
    nearest = (_evaluate(tower, inputs) @ classes.T).argmax(dim=1).cpu()
    return (nearest == labels).double().mean().item()


@torch.no_grad()
def _evaluate(module: nn.Module, inputs: Tensor) -> Tensor:
    was_training = module.training
    module.eval()
    try:
        return module(inputs)
    finally:
        module.train(was_training)


@cache
def _load() -> tuple[Tensor, Tensor]:
    """All images [1797, 1, 8, 8] in [0, 1] and labels [1797]."""
    # To import scikit-learn takes each process two seconds; only one of its files is read.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise UnfitEnvironmentError(
            "the captioned digits need scikit-learn, which is not installed",
            hint="pip install scikit-learn",
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        rows = torch.as_tensor(np.loadtxt(path, delimiter=",", dtype=np.float32))
    except (OSError, ValueError) as error:
        raise UnfitEnvironmentError(
            f"{path}: no scanned digits: {error}", hint="pip install --force-reinstall scikit-learn"
        ) from error
    return rows[:, :-1].reshape(-1, 1, 8, 8) / 16, rows[:, -1].long()
