"""Plans of several tasks whose slices of one module differ in their tensor parallelism."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.programs import LossSpec, UnitSpec, loss, make_plan, unit
from tests.verification import make_workload

Ranks = list[list[list[int]]]


@dataclass(frozen=True, kw_only=True)
class MixedCase:
    """Units and losses of some tasks, with batches of their own."""

    units: list[UnitSpec]
    losses: list[LossSpec]
    batch: dict[str, int]
    factories: dict[str, str] = field(default_factory=dict)

    def plan(self, devices: int | None = None) -> Plan:
        """The plan; ranks that it does not use stay idle."""
        return make_plan(*self.units, losses=self.losses, batch=self.batch, devices=devices)

    def workload(self, *, recompute: str = "none", **train: Any) -> Workload:
        """The workload that the plan is for."""
        return make_workload(
            self.units,
            self.losses,
            batch=max(self.batch.values()),
            precision=train.pop("precision", "fp64"),
            factories=self.factories,
            train=train,
            task_batches=self.batch,
            recompute=recompute,
        )


def _wave(module: str, *inputs: str | None, ranks: Ranks, **more: Any) -> UnitSpec:
    """A slice of a module on given ranks."""
    return unit(
        module,
        *inputs,
        dp=len(ranks),
        tp=len(ranks[0][0]),
        ranks=ranks,
        kind="wave",
        **more,
    )


def _pair(first: Ranks, second: Ranks, *, factory: str = "tower") -> MixedCase:
    """Two contrastive tasks over one encoder, with other degrees, batches and sync batches."""
    return MixedCase(
        units=[
            _wave("v", "a", task="VT", blocks=2, ranks=first, k=2),
            _wave("t", "b", task="VT", ranks=[[[first[0][0][0]]]]),
            _wave("v", "a", task="VU", blocks=2, ranks=second),
            _wave("u", "c", task="VU", ranks=[[[second[-1][0][-1]]]], k=2),
        ],
        losses=[
            loss("contrastive", "v", "t", sync_batch=12, task="VT"),
            loss("contrastive2", "v", "u", sync_batch=8, task="VU", weight=0.5),
        ],
        batch={"VT": 12, "VU": 16},
        factories={"v": factory},
    )


def _one_llm() -> MixedCase:
    """VL, AL and VAL over one decoder, which takes other inputs and degrees in each.

    VL has no audio and AL no images: the decoder's input is null there.
    """
    return MixedCase(
        units=[
            _wave("v", "a", task="VL", ranks=[[[0]], [[1]]]),
            _wave("l", "v", None, "c", task="VL", blocks=3, ranks=[[[0, 1]]], k=2),
            _wave("u", "b", task="AL", ranks=[[[3]]]),
            _wave("l", None, "u", "c", task="AL", blocks=3, ranks=[[[2]], [[3]]]),
            _wave("v", "a", task="VAL", ranks=[[[2, 3]]], k=3),
            _wave("u", "b", task="VAL", ranks=[[[0]], [[1]]]),
            _wave("l", "v", "u", "c", task="VAL", blocks=3, cuts=[(0, 1)], ranks=[[[0, 1]]]),
            _wave(
                "l",
                "v",
                "u",
                "c",
                name="VAL.l.1",
                task="VAL",
                blocks=3,
                cuts=[(1, 3)],
                ranks=[[[2]], [[3]]],
                k=2,
            ),
        ],
        losses=[
            loss("regression", "l", "target", task="VL"),
            loss("counted", "l", "mask", task="AL", weight=0.8),
            loss("regression2", "l", "target", task="VAL", weight=1.3),
        ],
        batch={"VL": 12, "AL": 8, "VAL": 6},
    )


def _missing_modality() -> MixedCase:
    """One task sees ``a`` alone, the other ``b`` too, through one encoder."""
    return MixedCase(
        units=[
            _wave("v", "a", None, task="A", blocks=2, ranks=[[[0, 1]]]),
            _wave("v", "a", "b", task="AB", blocks=2, ranks=[[[2]]], k=2),
        ],
        losses=[
            loss("regression", "v", "target", task="A"),
            loss("regression2", "v", "target", task="AB"),
        ],
        batch={"A": 8, "AB": 6},
    )


def _frozen_in_one() -> MixedCase:
    """A task with tp 2 trains what another one with tp 1 only uses."""
    return MixedCase(
        units=[
            _wave("v", "a", task="A", blocks=2, ranks=[[[0, 1]]]),
            _wave("v", "b", task="B", blocks=2, ranks=[[[2]]], frozen=((0, 1),)),
        ],
        losses=[
            loss("regression", "v", "target", task="A"),
            loss("regression2", "v", "target", task="B"),
        ],
        batch={"A": 8, "B": 6},
    )


def _other_groups() -> MixedCase:
    """One degree, but a rank that meets another partner in each task."""
    return _pair([[[0, 1]]], [[[0, 2]]])


MIXED: dict[str, MixedCase] = {
    "2 ranks: a slice each, dp 2 in the middle": MixedCase(
        units=[
            _wave("v", "a", task="A", blocks=3, cuts=[(0, 1)], ranks=[[[0, 1]]]),
            _wave(
                "v", "a", name="A.1", task="A", blocks=3, cuts=[(1, 3)], ranks=[[[0]], [[1]]], k=2
            ),
            _wave("v", "b", task="B", blocks=3, cuts=[(0, 1)], ranks=[[[0, 1]]], k=2),
            _wave("v", "b", name="B.1", task="B", blocks=3, cuts=[(1, 3)], ranks=[[[1]], [[0]]]),
        ],
        losses=[
            loss("regression", "v", "target", task="A"),
            loss("regression2", "v", "target", task="B", weight=0.7),
        ],
        batch={"A": 12, "B": 8},
    ),
    "3 ranks: tp 2 and tp 1": _pair([[[0, 1]]], [[[2]]]),
    "4 ranks: tp 2 and dp 2": _pair([[[0, 1]]], [[[2]], [[3]]]),
    "5 ranks: tp 4 and tp 1": _pair([[[0, 1, 2, 3]]], [[[4]]], factory="gated"),
    "5 ranks: tp 3 and tp 2": _pair([[[0, 1, 2]]], [[[3, 4]]], factory="gated"),
    "7 ranks: tp 2, tp 4 and tp 1": MixedCase(
        units=[
            _wave("v", "a", task="A", blocks=2, ranks=[[[0, 1]]], k=2),
            _wave("v", "b", task="B", blocks=2, ranks=[[[5, 3, 2, 4]]]),
            _wave("v", "c", task="C", blocks=2, ranks=[[[6]]], k=2),
        ],
        losses=[
            loss("regression", "v", "target", task="A"),
            loss("regression2", "v", "target", task="B"),
            loss("counted", "v", "mask", task="C", weight=0.3),
        ],
        batch={"A": 12, "B": 8, "C": 4},
        factories={"v": "gated"},
    ),
    "one model, other inputs in each task": _one_llm(),
    "a modality that another task lacks": _missing_modality(),
    "frozen in one task": _frozen_in_one(),
    "one degree, other partners": _other_groups(),
    "2 ranks: tp 2 and dp 2": _pair([[[0, 1]]], [[[0]], [[1]]]),
    "2 ranks: shards in the other order": _pair([[[0, 1]]], [[[1, 0]]]),
    "4 ranks: tp 4, tp 2 and dp 3": MixedCase(
        units=[
            _wave("v", "a", task="A", blocks=2, ranks=[[[0, 1, 2, 3]]], k=2),
            _wave("v", "b", task="B", blocks=2, ranks=[[[1, 0]], [[2, 3]]]),
            _wave("v", "c", task="C", blocks=2, ranks=[[[1]], [[2]], [[3]]], frozen=((0, 1),)),
        ],
        losses=[
            loss("regression", "v", "target", task="A"),
            loss("regression2", "v", "target", task="B"),
            loss("counted", "v", "mask", task="C", weight=0.3),
        ],
        batch={"A": 12, "B": 8, "C": 6},
        factories={"v": "gated"},
    ),
}


def random_case(seed: int, *, crowded: bool = False) -> MixedCase:
    """Three tasks whose slices of one module lie anywhere on 5 ranks, with any degrees that fit.

    Unless it is crowded no rank runs a block as two different shards.
    """
    rng, devices = random.Random(seed), 5
    held: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
    case = MixedCase(units=[], losses=[], batch={}, factories={"v": "gated"})
    for task, (term, target) in zip("ABC", _TERMS, strict=True):
        inner = [b for b in (1, 2) if rng.random() < 0.4]
        for start, end in pairwise([0, *inner, 3]):
            blocks = [] if crowded else [held[b] for b in range(start, end)]
            ranks = _random_ranks(rng, devices, (1, 2, 3, 4), blocks, devices + len(case.units))
            inputs = ("abc"["ABC".index(task)], *(["a"] if rng.random() < 0.3 else [None]))
            name, k = f"{task}.{start}", rng.choice([1, 2])
            frozen = ((0, rng.choice([1, 2])),) if rng.random() < 0.2 else False
            more: dict[str, Any] = {"name": name, "cuts": [(start, end)], "frozen": frozen, "k": k}
            case.units.append(_wave("v", *inputs, task=task, blocks=3, ranks=ranks, **more))
        case.losses.append(loss(term, "v", target, task=task, weight=rng.choice([0.5, 1.0])))
        case.batch[task] = rng.choice([6, 8, 12])
    return case


_TERMS = (("regression", "target"), ("regression2", "target"), ("counted", "mask"))


def _random_ranks(
    rng: random.Random,
    devices: int,
    degrees: tuple[int, ...],
    held: list[dict[int, tuple[int, int]]],
    fresh: int,
) -> Ranks:
    """Groups of one degree, all of whose ranks have room for their shard of every block.

    Where none is found a fresh rank takes the blocks whole.
    """
    for _ in range(50):
        tp, dp = rng.choice(degrees), rng.choice([1, 1, 2])
        if tp * dp > devices:
            continue
        order = rng.sample(range(devices), tp * dp)
        shards = {rank: (i % tp, tp) for i, rank in enumerate(order)}
        if all(block.get(rank, shard) == shard for block in held for rank, shard in shards.items()):
            for block in held:
                block.update(shards)
            return [[order[d * tp : (d + 1) * tp]] for d in range(dp)]
    return [[[fresh]]]
