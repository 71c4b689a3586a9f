"""Six senses of a handwritten digit: one scan, and what other instruments would make of it.

Each field is worked out from a scan of :mod:`mmplan.zoo.digits` alone, always the same:

- ``image`` ([1, 8, 8]): the scan itself, ink in [0, 1];
- ``caption`` ([32] int64): its caption letter by letter, as bytes, 0 is padding;
- ``sound`` ([1, 256]): the scan played from left to right. Each column sounds for 32 instants,
  each of its rows as a tone of its own, as loud as its ink (:func:`sound`);
- ``distances`` ([1, 8, 8]): how far each pixel is from the edge of the ink, positive inside
  (:func:`distances`): a relief;
- ``heat`` ([1, 4, 4]): mean ink of every 2 x 2 pixels, as a coarse thermal camera sees it;
- ``strokes`` ([3, 28]): a pen's way over the ink, x, y and ink at each step (:func:`strokes`);

and ``label`` (int64). Sound loses nothing of the scan; distances and strokes keep which pixels
are dark; heat keeps a quarter of the numbers.

Shape suffixes used in this file: N = scans, R = rows, C = columns, K = pixels, T = instants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmplan.errors import InvalidInputError
from mmplan.zoo.digits import Fields, captioned, encoded_captions, nearest_class

SIDE = 8
INSTANTS = 32
# No scan has more pixels of ink.
STEPS = 28
LETTERS = 32
_INK = 0.5


def senses(split: str = "train") -> Fields:
    """The senses of one split of the captioned scans.

    Args:
        split: "train" or "test", see :func:`mmplan.zoo.digits.captioned`.

    Raises:
        InvalidInputError: no such split.
        UnfitEnvironmentError: scikit-learn, which ships the scans, is missing.
    """
    scans = captioned(split)
    image_NRC = scans.images[:, 0]
    return Fields(
        {
            "image": scans.images,
            "caption": spelled_captions()[scans.labels, scans.templates],
            "sound": sound(image_NRC),
            "distances": distances(image_NRC),
            "heat": heat(image_NRC),
            "strokes": strokes(image_NRC),
            "label": scans.labels,
        }
    )


def sound(image_NRC: Tensor) -> Tensor:
    """Scans [N, 8, 8] as waves [N, 1, 256], column after column.

    In column c at instant t of 32 the wave is sum_r ink[r, c] sin(2 pi (r + 1) t / 32): the
    tones are orthogonal, so that a Fourier transform gives the ink back.
    """
    wave_NCT = torch.einsum("nrc,rt->nct", image_NRC, tones(image_NRC))
    return wave_NCT.flatten(1)[:, None]


def tones(like: Tensor) -> Tensor:
    """The tone of each row, [8, 32], in the type of ``like``."""
    row_R = torch.arange(1, SIDE + 1, dtype=torch.float64)
    turn_T = torch.arange(INSTANTS, dtype=torch.float64) * (2 * torch.pi / INSTANTS)
    return torch.outer(row_R, turn_T).sin().to(like.dtype)


def distances(image_NRC: Tensor) -> Tensor:
    """Distance of each pixel of scans [N, 8, 8] to the edge of the ink, [N, 1, 8, 8].

    In sides of the scan; from ink to the nearest paper positive, from paper to the nearest ink
    negative.
    """
    apart_KK = _squared_distances().sqrt()
    ink_NK = is_ink(image_NRC).flatten(1)
    # A pixel of the other kind exists in every scan.
    other_NKK = ink_NK[:, :, None] != ink_NK[:, None, :]
    nearest_NK = torch.where(other_NKK, apart_KK, torch.inf).amin(dim=2)
    signed_NK = torch.where(ink_NK, nearest_NK, -nearest_NK) / SIDE
    return signed_NK.view(-1, 1, SIDE, SIDE).to(image_NRC.dtype)


def heat(image_NRC: Tensor) -> Tensor:
    """Scans [N, 8, 8] seen by a camera of 4 x 4 pixels, [N, 1, 4, 4]: no heat is lost."""
    return functional.avg_pool2d(image_NRC[:, None], 2)


def strokes(image_NRC: Tensor) -> Tensor:
    """A pen's way over the ink of scans [N, 8, 8], [N, 3, 28].

    It begins at the first pixel of ink in reading order, goes on to the nearest one that it
    has not seen (the first of equals), and rests on the last. Channels are x and y from -1 to
    1, and the pixel's ink.
    """
    place_KD = _places()
    apart_KK = _squared_distances()
    left_NK = is_ink(image_NRC).flatten(1).clone()
    num_scans = len(left_NK)
    scan_N = torch.arange(num_scans)
    here_N = left_NK.int().argmax(dim=1)
    way: list[Tensor] = []
    for _ in range(STEPS):
        way.append(here_N)
        left_NK[scan_N, here_N] = False
        far_NK = torch.where(left_NK, apart_KK[here_N], torch.inf)
        here_N = torch.where(left_NK.any(dim=1), far_NK.argmin(dim=1), here_N)
    way_NT = torch.stack(way, dim=1)
    y_NT, x_NT = (place_KD[way_NT] * (2 / (SIDE - 1)) - 1).unbind(dim=2)
    ink_NT = image_NRC.flatten(1).gather(1, way_NT)
    return torch.stack([x_NT, y_NT, ink_NT], dim=1).to(image_NRC.dtype)


def is_ink(image_NRC: Tensor) -> Tensor:
    """Pixels with more than half of the scan's darkest ink, [N, 8, 8] bool."""
    return image_NRC > _INK * image_NRC.amax(dim=(1, 2), keepdim=True)


def spell(caption: str) -> Tensor:
    """A caption's bytes padded with 0, [32] int64.

    Raises:
        InvalidInputError: more than 32 bytes.
    """
    letters = list(caption.encode())
    if len(letters) > LETTERS:
        raise InvalidInputError(
            f"a caption has {len(letters)} bytes, at most {LETTERS} are read: {caption!r}",
            hint="use a shorter one",
        )
    return torch.tensor(letters + [0] * (LETTERS - len(letters)))


def spelled_captions() -> Tensor:
    """Bytes of every caption of every digit, [10, templates, 32] int64."""
    return encoded_captions(spell)


def zero_shot_accuracies(
    towers: Mapping[str, nn.Module], fields: Mapping[str, str], *, split: str = "test"
) -> dict[str, float]:
    """How well every sense tells the digit by its nearest caption.

    Args:
        towers: one that takes captions, and those of other senses: field to features [N, E].
        fields: tower to the field that it takes.
        split: which scans; the held-out fifth by default.

    Returns:
        Tower to its accuracy in [0, 1]; chance is 0.1. None for that of the captions.
    """
    data = senses(split).fields
    text = next(name for name, taken in fields.items() if taken == "caption")
    captions, labels = spelled_captions(), data["label"]
    return {
        name: nearest_class(tower, data[fields[name]], towers[text], captions, labels)
        for name, tower in towers.items()
        if name != text
    }


def _squared_distances() -> Tensor:
    """Of all pixels to each other, [64, 64]: whole numbers, so that equals are equal."""
    place_KD = _places()
    return (place_KD[:, None] - place_KD).square().sum(dim=2)


def _places() -> Tensor:
    """Row and column of each pixel in reading order, [64, 2] float64."""
    side = torch.arange(SIDE, dtype=torch.float64)
    grid: Any = torch.cartesian_prod(side, side)
    return grid
