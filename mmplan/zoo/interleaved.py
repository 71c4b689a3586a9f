"""Sequences that interleave text and images, of very different numbers: real digits, or noise.

Data fields of both data sets, for one sample:

- ``tokens`` ([T] int64, padded with 0 at the end) and ``labels`` ([T] int64, -100 where
  nothing is to be predicted: images, what is asked, padding);
- ``images`` (ragged, every image of the sequence; its rows stand at placeholder tokens);
- ``targets`` (ragged, those images that are to be drawn from the text before them) and
  ``starts`` (ragged int64, the position of the first placeholder of each).

``work(index)`` is the relative cost of a sample by module: its number of images, 1 where
sequences are what counts (they are padded to one length), or its number of targets. Which
module is which says the argument ``work``, by default ``WORK``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from mmplan.errors import InvalidInputError
from mmplan.ragged import Ragged
from mmplan.zoo.digits import TEMPLATES, CaptionedDigits, captioned, digit_ids, prompts
from mmplan.zoo.sizes import check_sizes

# Ids 1 to 60 are words of mmplan.zoo.digits, so the vocabulary has 64.
DRAW = 61
BEGIN = 62
IMAGE = 63
# The label of tokens that no loss counts, torch's default.
IGNORE = -100
WORK = {"vision": "images", "llm": "sequence", "generator": "targets"}
InterleavedSample = dict[str, Tensor | Ragged]
# The sequences are part of the data: they do not follow train.seed.
_DATA_SEED = 20240611
# The parts of a sequence: an image to read, an image to draw, text only.
_READ = 0
_DRAW = 1
_TEXT = 2


@dataclass(slots=True)
class _Sequence:
    """A sample while it is written."""

    tokens: list[int] = field(default_factory=lambda: [])
    labels: list[int] = field(default_factory=lambda: [])
    images: list[Tensor] = field(default_factory=lambda: [])
    targets: list[Tensor] = field(default_factory=lambda: [])
    starts: list[int] = field(default_factory=lambda: [])

    def write(self, tokens: Sequence[int], *, learn: bool) -> None:
        self.tokens += tokens
        self.labels += tokens if learn else [IGNORE] * len(tokens)

    def show(self, image: Tensor, rows: int, placeholder: int, *, target: bool) -> None:
        if target:
            self.targets.append(image)
            self.starts.append(len(self.tokens))
        self.images.append(image)
        self.write([placeholder] * rows, learn=False)

    def finish(self, length: int | None, shape: tuple[int, int, int]) -> InterleavedSample:
        """The fields; tokens and labels padded to a length, or ragged where there is none."""
        padding = 0 if length is None else length - len(self.tokens)
        tokens = torch.tensor(self.tokens + [0] * padding)
        labels = torch.tensor(self.labels + [IGNORE] * padding)
        own = torch.tensor([len(tokens)])
        return {
            "tokens": tokens if length is not None else Ragged(tokens, own),
            "labels": labels if length is not None else Ragged(labels, own),
            "images": _ragged(self.images, shape),
            "targets": _ragged(self.targets, shape),
            "starts": Ragged(
                torch.tensor(self.starts, dtype=torch.int64), torch.tensor([len(self.starts)])
            ),
        }


class Interleaved(Dataset[InterleavedSample]):
    """Sequences by the kinds of their parts; a class of its own writes the parts of each data set.

    Raises:
        InvalidInputError: work of an unknown kind.
    """

    def __init__(
        self,
        *,
        kinds: list[list[int]],
        shape: tuple[int, int, int],
        length: int,
        rows: int,
        work: Mapping[str, str],
        ragged: bool = False,
    ) -> None:
        unknown = [what for what in work.values() if what not in WORK.values()]
        if unknown:
            raise InvalidInputError(
                f"a module's work cannot go with {unknown[0]!r}",
                hint=f"choose of {', '.join(WORK.values())}",
            )
        self._kinds, self._work = kinds, dict(work)
        self._shape, self._length, self._rows = shape, length, rows
        self._ragged = ragged
        if ragged:
            self.lengths = self._lengths
        else:
            self.work = self._cost

    def __len__(self) -> int:
        return len(self._kinds)

    def __getitem__(self, index: int) -> InterleavedSample:
        sequence = _Sequence()
        generator = torch.Generator().manual_seed(_DATA_SEED + index)
        self._write(sequence, self._kinds[index], generator)
        return sequence.finish(None if self._ragged else self._length, self._shape)

    def _lengths(self, field: str) -> list[int]:
        """Rows of a ragged field of every sample."""
        return [
            len(cast("Ragged", sample[field]).values)
            for sample in map(self.__getitem__, range(len(self)))
        ]

    def _cost(self, index: int) -> dict[str, float]:
        """Relative cost of a sample by module."""
        kinds = self._kinds[index]
        targets = kinds.count(_DRAW)
        images = targets + kinds.count(_READ)
        costs = {"images": float(images), "sequence": 1.0, "targets": float(targets)}
        return {module: costs[what] for module, what in self._work.items()}

    def _write(self, sequence: _Sequence, kinds: Sequence[int], generator: torch.Generator) -> None:
        raise NotImplementedError


class InterleavedDigits(Interleaved):
    """Sequences of scanned digits and their captions.

    An image before its caption is to be read, one after it to be drawn; some sequences are
    text alone. See :func:`digits`.
    """

    def __init__(self, scans: CaptionedDigits, **options: Any) -> None:
        super().__init__(shape=(1, 8, 8), **options)
        self._scans = scans
        self._prompts = prompts()

    def _write(self, sequence: _Sequence, kinds: Sequence[int], generator: torch.Generator) -> None:
        sequence.write([BEGIN], learn=False)
        for kind in kinds:
            scan = int(torch.randint(len(self._scans), (1,), generator=generator))
            template = int(torch.randint(len(TEMPLATES), (1,), generator=generator))
            prompt = self._prompts[self._scans.labels[scan], template]
            image = self._scans.images[scan]
            if kind == _READ:
                sequence.show(image, self._rows, IMAGE, target=False)
            if kind == _DRAW:
                sequence.write([DRAW], learn=False)
            sequence.write(prompt[prompt != 0].tolist(), learn=kind != _DRAW)
            if kind == _DRAW:
                sequence.show(image, self._rows, IMAGE, target=True)


class SyntheticSequences(Interleaved):
    """Noise of a given size and skew; see :func:`synthetic`."""

    def __init__(self, vocab: int, **options: Any) -> None:
        super().__init__(**options)
        self._vocab = vocab

    def _write(self, sequence: _Sequence, kinds: Sequence[int], generator: torch.Generator) -> None:
        # Text before, between and after the images, in pieces of one length but for a token.
        num_words, longer = divmod(self._length - len(kinds) * self._rows, len(kinds) + 1)
        for number in range(len(kinds) + 1):
            words = (num_words + (number < longer),)
            ids = torch.randint(1, self._vocab - 1, words, generator=generator)
            sequence.write(ids.tolist(), learn=True)
            if number < len(kinds):
                image = torch.rand(self._shape, generator=generator)
                target = kinds[number] == _DRAW
                sequence.show(image, self._rows, self._vocab - 1, target=target)


def digits(
    split: str = "train",
    *,
    sequences: int = 1024,
    length: int = 96,
    rows: int = 4,
    sigma: float = 0.8,
    work: Mapping[str, str] = WORK,
    ragged: bool = False,
) -> InterleavedDigits:
    """Captioned scans of one split, interleaved; the number of images is log-normal.

    Args:
        split: "train" or "test", see :func:`mmplan.zoo.digits.captioned`.
        sequences: samples; scans are used several times.
        length: tokens of a sequence, at least 32.
        rows: tokens that the encoder makes of an image.
        sigma: of the logarithm of the number of images; the median is two.
        work: module to what its cost goes with: "images", "sequence" or "targets".
        ragged: whether tokens and labels are ragged, without padding; a sample's work is then
            its rows, and ``lengths(field)`` says them for packing.

    Raises:
        InvalidInputError: a split that does not exist, or sizes that are too small.
    """
    check_sizes(sequences=sequences, rows=rows)
    longest = 2 + rows + max(len(line.split()) for line in TEMPLATES)
    if length < longest:
        raise InvalidInputError(
            f"an image with its caption takes up to {longest} tokens, a sequence has {length}",
            hint=f"choose a length of {longest} or more",
        )
    generator = torch.Generator().manual_seed(_DATA_SEED)
    counts = _counts(
        sequences, median=2, sigma=sigma, most=length // longest, generator=generator
    ).clamp(min=1)
    kinds: list[list[int]] = []
    for count in counts.tolist():
        text_only, *draws = torch.rand(count + 1, generator=generator).tolist()
        kinds.append(
            [_TEXT if text_only < 0.1 else _DRAW if draw < 0.4 else _READ for draw in draws]
        )
    return InterleavedDigits(
        captioned(split), kinds=kinds, length=length, rows=rows, work=work, ragged=ragged
    )


def synthetic(
    *,
    samples: int = 4096,
    length: int = 8192,
    rows: int = 1024,
    image: int = 512,
    vocab: int = 32_000,
    median: float = 2.0,
    sigma: float = 0.8,
    work: Mapping[str, str] = WORK,
) -> SyntheticSequences:
    """Noise in the shape of a multimodal LLM's data; every second image is to be drawn.

    The last token id is the placeholder. The number of images is log-normal, as that of
    web pages, cut where a sequence is full; it may be zero.

    Args:
        samples: in the data set.
        length: tokens of a sequence, all used.
        rows: tokens that the encoder makes of an image.
        image: side of the images in pixels.
        vocab: number of token ids.
        median: images of a sample.
        sigma: of the logarithm of their number.
        work: module to what its cost goes with: "images", "sequence" or "targets".

    Raises:
        InvalidInputError: a sequence that has no room for an image.
    """
    check_sizes(samples=samples, length=length, rows=rows, image=image, vocab=vocab)
    if rows >= length:
        raise InvalidInputError(
            f"an image takes {rows} tokens, a sequence has {length}",
            hint="choose a larger length, or merge more patches into a row",
        )
    generator = torch.Generator().manual_seed(_DATA_SEED)
    counts = _counts(
        samples, median=median, sigma=sigma, most=(length - 1) // rows, generator=generator
    )
    kinds = [[_READ if number % 2 else _DRAW for number in range(n)] for n in counts.tolist()]
    return SyntheticSequences(
        vocab, kinds=kinds, shape=(3, image, image), length=length, rows=rows, work=work
    )


@torch.no_grad()
def caption_accuracy(
    vision: nn.Sequential, llm: nn.Sequential, *, split: str = "test", **args: Any
) -> dict[str, float]:
    """How often the most likely next token is the right one, on sequences of held-out scans.

    Args:
        vision: takes the images.
        llm: takes tokens and image features, gives (logits, activations); two blocks or more.
        split: which scans.
        args: of :func:`digits`.

    Returns:
        Shares in [0, 1]: "tokens" over all words of captions after an image, "digits" over
        those words that name the digit (chance is 0.1).
    """
    wanted, right = [torch.empty(0)], [torch.empty(0)]
    dataset = digits(split, **args)
    for index in range(len(dataset)):
        sample: Any = dataset[index]
        if not len(sample["images"].values):
            continue
        state = llm[0](sample["tokens"][None], vision(sample["images"]))
        logits = llm[1:](state)[0]
        labels, found = sample["labels"][1:], logits[0, :-1].argmax(dim=-1)
        wanted.append(labels[labels != IGNORE])
        right.append((found == labels)[labels != IGNORE])
    of_digits = torch.isin(torch.cat(wanted), digit_ids())
    chosen = {"tokens": torch.cat(right), "digits": torch.cat(right)[of_digits]}
    return {name: float(hits.sum()) / max(len(hits), 1) for name, hits in chosen.items()}


def _counts(
    samples: int, *, median: float, sigma: float, most: int, generator: torch.Generator
) -> Tensor:
    """Log-normal whole numbers from 0 to ``most``, [samples] int64."""
    normal = torch.randn(samples, generator=generator, dtype=torch.float64)
    return (median * (sigma * normal).exp()).round().long().clamp(0, most)


def _ragged(images: Sequence[Tensor], shape: tuple[int, int, int]) -> Ragged:
    values = torch.stack(list(images)) if images else torch.zeros((0, *shape))
    return Ragged(values, torch.tensor([len(images)]))
