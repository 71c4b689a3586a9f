"""What a sample of the shards is made of."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmplan.zoo.digits import tokenize


def decode(members: dict[str, Any]) -> dict[str, Tensor]:
    """The fields of examples/clip-digits: ``image``, ``tokens`` and ``label``."""
    image = np.load(io.BytesIO(members["image.npy"]), allow_pickle=False)
    return {
        "image": torch.from_numpy(image),
        "tokens": tokenize(members["txt"].decode()),
        "label": torch.tensor(int(members["cls"])),
    }
