"""Small language models whose rows are cut over tensor-parallel groups: data, workloads, plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mmplan.ragged import Ragged
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.programs import Kind, loss, make_plan, unit

# No degree divides the vocabulary.
VOCAB, BATCH = 19, 4
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "factory": "mmplan.zoo.decoder:llama",
        "args": {"width": 16, "heads": 4, "vocab": VOCAB, "ffn": 24, "blocks": 3},
    },
    "tied": {
        "factory": "mmplan.zoo.hf:causal_lm",
        "args": {
            "config": {
                **{"model_type": "qwen3", "hidden_size": 16, "num_attention_heads": 4},
                **{"num_key_value_heads": 4, "num_hidden_layers": 3, "head_dim": 4},
                **{"intermediate_size": 24, "vocab_size": VOCAB, "tie_word_embeddings": True},
            }
        },
    },
    "qwen3": {
        "factory": "mmplan.zoo.hf:causal_lm",
        "args": {
            "config": {
                **{"model_type": "qwen3", "hidden_size": 16, "num_attention_heads": 4},
                **{"num_key_value_heads": 4, "num_hidden_layers": 3, "head_dim": 4},
                **{"intermediate_size": 24, "vocab_size": VOCAB},
            }
        },
    },
}


class Texts(Dataset[dict[str, Tensor | Ragged]]):
    """Random texts: of ``length`` tokens, or ragged ones of 0 to ``length``."""

    def __init__(self, length: int, ragged: bool) -> None:
        self._length, self._ragged = length, ragged

    def __len__(self) -> int:
        return 2 * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor | Ragged]:
        draw = torch.Generator().manual_seed(index)
        # The first has no token, the second one: fewer than ranks.
        count = index * 5 % (self._length + 1) if self._ragged and index != 1 else self._length
        count = 1 if self._ragged and index == 1 else count
        tokens = torch.randint(1, VOCAB, (count,), generator=draw)
        if not self._ragged:
            return {"tokens": tokens, "labels": tokens}
        lengths = torch.tensor([count])
        return {"tokens": Ragged(tokens, lengths), "labels": Ragged(tokens.clone(), lengths)}


def texts(*, length: int, ragged: bool) -> Texts:
    """See :class:`Texts`."""
    return Texts(length, ragged)


@dataclass(frozen=True, kw_only=True)
class TextCase:
    """A decoder on texts, and its degrees."""

    model: str = "llama"
    ragged: bool = False
    length: int = 7
    tp: int = 2
    dp: int = 1
    pp: int = 1
    k: int = 2
    split: bool = False
    recompute: str = "none"

    def workload(self, *, rows: bool = True, **train: Any) -> Workload:
        """The workload; ``rows``: with sequence parallelism."""
        model = MODELS[self.model]
        return Workload.model_validate(
            {
                "name": "texts",
                "batch": BATCH,
                "modules": {
                    "llm": {**model, "inputs": ["tokens"], "recompute": self.recompute},
                },
                "losses": {
                    "next": {
                        "factory": "mmplan.zoo.losses:token_cross_entropy",
                        "args": {"shift": True},
                        "inputs": ["llm", "labels"],
                    }
                },
                "data": {
                    "factory": "tests.row_texts:texts",
                    "args": {"length": self.length, "ragged": self.ragged},
                },
                "train": {"precision": "fp64", "sequence_parallel": rows, **train},
            }
        )

    def plan(self) -> Plan:
        """The plan that it is for."""
        kind: Kind = "1f1b"
        degrees: dict[str, Any] = {"tp": self.tp, "dp": self.dp, "pp": self.pp, "k": self.k}
        part = unit("llm", "tokens", blocks=3, kind=kind, split=self.split, **degrees)
        return make_plan(part, losses=[loss("next", "llm", "labels")], batch=BATCH)
