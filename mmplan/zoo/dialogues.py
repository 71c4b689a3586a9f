"""Captions of what is seen and heard: scanned digits as images, as sounds, or one of each.

Data fields of one sample, with ``rows`` placeholders for what an encoder makes of each sense:

- ``image`` ([1, 8, 8]) and ``sound`` ([1, 256], see :mod:`mmplan.zoo.senses`), those of the
  two that are asked for; with both, they are of different scans;
- ``tokens`` ([T] int64): begin, the placeholders of each sense, then a caption for each, in
  the same order, padded with 0 at the end;
- ``labels`` ([T] int64): the captions, -100 elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from mmplan.errors import InvalidInputError
from mmplan.zoo.digits import TEMPLATES, Fields, captioned, digit_ids, prompts
from mmplan.zoo.senses import sound
from mmplan.zoo.sizes import check_sizes

# Ids 1 to 60 are words of mmplan.zoo.digits, so the vocabulary has 64.
SOUND = 61
BEGIN = 62
IMAGE = 63
# The label of tokens that no loss counts, torch's default.
IGNORE = -100
PLACEHOLDERS = {"image": IMAGE, "sound": SOUND}
# The pairs and the captions are part of the data: they do not follow train.seed.
_DATA_SEED = 20241018


def dialogues(
    split: str = "train", *, senses: Sequence[str] = ("image", "sound"), rows: int = 4
) -> Fields:
    """As many samples as the split has scans; each scan is used once for each sense.

    Args:
        split: "train" or "test", see :func:`mmplan.zoo.digits.captioned`.
        senses: "image", "sound" or both.
        rows: that an encoder makes of each sense.

    Raises:
        InvalidInputError: no such split or sense, or a sense twice.
        UnfitEnvironmentError: scikit-learn, which ships the scans, is missing.
    """
    check_sizes(rows=rows)
    if not senses or set(senses) - set(PLACEHOLDERS) or len(set(senses)) < len(senses):
        raise InvalidInputError(
            f"dialogues about {', '.join(senses) or 'nothing'}",
            hint="senses are image, sound or both of them",
        )
    scans = captioned(split)
    generator = torch.Generator().manual_seed(_DATA_SEED)
    images, labels = scans.images, scans.labels
    order = {"image": torch.arange(len(labels))}
    order["sound"] = torch.randperm(len(labels), generator=generator)
    given = {"image": images, "sound": sound(images[:, 0])}
    captions: list[Tensor] = []
    for sense in senses:
        templates = torch.randint(len(TEMPLATES), (len(labels),), generator=generator)
        captions.append(prompts()[labels[order[sense]], templates])
    said = _packed(torch.cat(captions, dim=1))
    begin = torch.tensor([BEGIN] + [PLACEHOLDERS[sense] for sense in senses for _ in range(rows)])
    begin = begin.expand(len(said), -1)
    learned = [torch.full_like(begin, IGNORE), said.masked_fill(said == 0, IGNORE)]
    return Fields(
        {sense: given[sense][order[sense]] for sense in senses}
        | {"tokens": torch.cat([begin, said], dim=1), "labels": torch.cat(learned, dim=1)}
    )


@torch.no_grad()
def digits_told(
    encoders: Mapping[str, nn.Module],
    llm: nn.Sequential,
    *,
    inputs: Sequence[str],
    split: str = "test",
    rows: int = 4,
) -> float:
    """How often the most likely next word is the right one where a digit is to be named.

    Args:
        encoders: sense to what makes rows of it; those present are given to the model.
        llm: takes tokens and features in the order of ``inputs``, gives logits; two blocks or
            more.
        inputs: all senses that the model takes, present or not.
        split: which scans.
        rows: that an encoder makes of each sense.

    Returns:
        A share in [0, 1]; chance is 0.1.
    """
    present = [sense for sense in inputs if sense in encoders]
    fields = dialogues(split, senses=present, rows=rows).fields
    features = [encoders[sense](fields[sense]) if sense in encoders else None for sense in inputs]
    logits = llm[1:](llm[0](fields["tokens"], *features))
    asked = torch.isin(fields["labels"][:, 1:], digit_ids())
    right = logits[:, :-1].argmax(dim=-1) == fields["labels"][:, 1:]
    return right[asked].double().mean().item()


def _packed(words_NT: Tensor) -> Tensor:
    """The words of each row without the padding between them, padded at the end."""
    order = (words_NT == 0).long().argsort(dim=1, stable=True)
    return words_NT.gather(1, order)
