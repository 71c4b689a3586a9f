"""Cases of the multimodal LLM's matrix: one or two encoders, the model, a generator."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mmplan.ragged import Ragged
from mmplan.schema.plan import Plan
from mmplan.schema.recompute import Recompute
from mmplan.schema.workload import Workload
from mmplan.zoo.interleaved import IGNORE, InterleavedDigits, digits
from tests import mllm
from tests.programs import make_plan, unit

BATCH = 12
GLANCE = 64  # placeholder of the second encoder's rows, after the vocabulary of the digits
_ROWS = 4
_SPARE = 0

# The encoder's last block projects into the model and always trains.
FREEZES: dict[str, dict[str, Any]] = {
    "none": {},
    "encoder": {"vision": [[0, 2]]},
    "llm": {"llm": True},
    "generator": {"generator": True},
    "all": {"vision": [[0, 2]], "llm": True, "generator": True},
}


class Glances(Dataset[dict[str, Tensor | Ragged]]):
    """Interleaved digits, some with one image more for a second encoder, at their end."""

    def __init__(self, sequences: InterleavedDigits) -> None:
        self._sequences = sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor | Ragged]:
        sample: dict[str, Any] = dict(self._sequences[index])
        images: Ragged = sample["images"]
        seen = int(index % 3 == 0 and len(images.values) > 0)
        sample["glances"] = Ragged(images.values[:seen], torch.tensor([seen]))
        tokens = torch.full((_ROWS,), GLANCE if seen else _SPARE)
        sample["tokens"] = torch.cat([sample["tokens"], tokens])
        sample["labels"] = torch.cat([sample["labels"], torch.full((_ROWS,), IGNORE)])
        return sample


def glances(**options: Any) -> Glances:
    """See :class:`Glances`."""
    return Glances(digits(**options))


@dataclass(frozen=True, kw_only=True)
class MllmCase:
    """One row of the matrix; ``dp`` is the model's, ``tp`` of all but the generator."""

    encoder_dp: int = 1
    dp: int = 1
    pp: int = 1
    tp: int = 1
    vpp: int = 1
    freeze: str = "none"
    zero: int = 0
    recompute: Recompute = "none"
    encoders: int = 1

    def __str__(self) -> str:
        return "-".join(f"{name}{value}" for name, value in asdict(self).items())

    def workload(self) -> Workload:
        """The workload that :meth:`plan` is for."""
        frozen = FREEZES[self.freeze]
        spec = mllm.workload(batch=BATCH, **frozen).model_dump(exclude_none=True, mode="json")
        if self.encoders == 2:
            spec["modules"]["eyes"] = spec["modules"]["vision"] | {"inputs": ["glances"]}
            spec["modules"]["llm"]["inputs"].append("eyes")
            spec["modules"]["llm"]["args"] |= {"vocab": GLANCE + 1, "placeholders": [63, GLANCE]}
            spec["data"]["factory"] = "tests.mllm_cases:glances"
        for module in spec["modules"].values():
            module["recompute"] = self.recompute
        spec["train"]["zero"] = self.zero
        return Workload.model_validate(spec)

    def plan(self, devices: int | None = None) -> Plan:
        """Micro-batches of 12 / dp / 4 samples in the model, of others elsewhere."""
        frozen = {
            name: value if value is True else tuple(map(tuple, value))
            for name, value in FREEZES[self.freeze].items()
        }
        order = "interleaved" if self.vpp > 1 else "1f1b"
        encoder: dict[str, Any] = {
            "blocks": 3,
            "kind": "1f1b",
            "frozen": frozen.get("vision", False),
        }
        model: dict[str, Any] = {
            **{"pp": self.pp, "vpp": self.vpp, "dp": self.dp, "tp": self.tp, "k": 4},
            **{"blocks": 4, "kind": order, "frozen": frozen.get("llm", False)},
        }
        generator: dict[str, Any] = {
            **{"blocks": 2, "kind": "1f1b", "k": 2, "frozen": frozen.get("generator", False)}
        }
        inputs = ["tokens", "vision", "eyes"][: 1 + self.encoders]
        units = [
            unit("vision", "images", dp=self.encoder_dp, tp=self.tp, k=3, **encoder),
            unit("llm", *inputs, **model),
            unit("generator", "llm.1", "targets", "starts", **generator),
        ]
        if self.encoders == 2:
            units.append(unit("eyes", "glances", k=2, blocks=3, kind="1f1b"))
        return make_plan(*units, losses=mllm.LOSSES, batch=BATCH, devices=devices)
