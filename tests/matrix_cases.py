"""One case of the matrix: degrees, a feature, and the plan and workload they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.programs import Kind, LossSpec, UnitSpec, loss, make_plan, unit
from tests.verification import make_workload


@dataclass(frozen=True, kw_only=True)
class Case:
    """Degrees of the first module ``v``; the others' follow from ``others``.

    Attributes:
        syncs: sync batches in a step.
        samples: of one sync batch; 64 gives three replicas 22, 21 and 21.
        others: "rotated" has other degrees than v in every axis, "same" the same ones,
            "single" one rank.
        feature: a key of :data:`FEATURES`.
        backward: of every unit; "even" is split, with as much in flight on every stage.
        per_node: ranks of a node; None where all are on one.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    k: int = 1
    syncs: int = 1
    samples: int = 64
    modalities: int = 2
    others: Literal["rotated", "same", "single"] = "rotated"
    feature: str = "plain"
    kind: Kind = "batch-sync"
    lead: int = 1
    sync_lead: int = 0
    vpp: int = 1
    backward: Literal["whole", "split", "even"] = "whole"
    precision: Literal["fp64", "fp32"] = "fp64"
    per_node: int | None = None

    def __str__(self) -> str:
        degrees = f"pp{self.pp}-dp{self.dp}-tp{self.tp}-k{self.k}-syncs{self.syncs}"
        order = f"{self.kind}-lead{self.lead}-{self.sync_lead}-vpp{self.vpp}-{self.backward}"
        place = f"{self.others}-node{self.per_node or ''}"
        return f"{self.feature}-{self.modalities}-{degrees}-{place}-{order}-{self.precision}"

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.samples * self.syncs

    def plan(self, devices: int | None = None) -> Plan:
        """The plan; with ``devices`` the ranks that it does not use stay idle."""
        built = FEATURES[self.feature](self)
        return make_plan(
            *built.units,
            losses=built.losses,
            batch=self.batch,
            devices=devices,
            per_node=self.per_node,
        )

    def workload(self) -> Workload:
        """The workload that the plan is for."""
        built = FEATURES[self.feature](self)
        return make_workload(
            built.units,
            built.losses,
            batch=self.batch,
            precision=self.precision,
            args=built.args,
            factories=built.factories,
        )

    def first(self, *inputs: str, blocks: int = 0, **changes: Any) -> UnitSpec:
        """The unit of v."""
        degrees = {"pp": self.pp, "dp": self.dp, "tp": self.tp, "k": self.k, "vpp": self.vpp}
        return self._unit("v", inputs or ("a",), blocks, {**degrees, **changes})

    def other(self, name: str, *inputs: str | None, blocks: int = 0, **changes: Any) -> UnitSpec:
        """The unit of another module."""
        degrees = {"pp": self.pp, "dp": self.dp, "tp": self.tp, "k": self.k}
        if self.others == "single":
            degrees = {"k": self.k}
        elif self.others == "rotated":
            degrees = {
                "pp": self.pp % 3 + 1,
                "dp": (self.dp + 1) % 3 + 1,
                "tp": 3 - self.tp,
                "k": {1: 2, 2: 4, 4: 1}[self.k],
            }
        return self._unit(name, inputs, blocks, {**degrees, **changes})

    def _unit(
        self, name: str, inputs: tuple[str | None, ...], blocks: int, degrees: dict[str, Any]
    ) -> UnitSpec:
        chunks = degrees.get("pp", 1) * degrees.get("vpp", 1)
        return unit(
            name,
            *inputs,
            blocks=max(chunks, blocks),
            kind=self.kind,
            lead=self.lead,
            sync_lead=self.sync_lead,
            split=self.backward != "whole",
            even=self.backward == "even",
            **degrees,
        )


@dataclass(kw_only=True)
class Built:
    """What a feature makes of a case."""

    units: list[UnitSpec]
    losses: list[LossSpec]
    args: dict[str, dict[str, Any]] = field(default_factory=dict)
    factories: dict[str, str] = field(default_factory=dict)


def _towers(case: Case, **changes: Any) -> Built:
    """v, t and (with three modalities) u under one contrastive loss, which has a parameter."""
    names = ["v", "t", "u"][: case.modalities]
    fields = {"t": "b", "u": "c"}
    units = [case.first(), *(case.other(name, fields[name], **changes) for name in names[1:])]
    return Built(units=units, losses=[loss("contrastive", *names, sync_batch=case.samples)])


def _frozen_tower(case: Case) -> Built:
    return _towers(case, frozen=True)


def _frozen_range(case: Case) -> Built:
    built = _towers(case)
    # Blocks 0 and 2 are frozen, 1 trains: gradients stop inside v and pass through its end.
    built.units[0] = case.first(blocks=4, frozen=((0, 1), (2, 3)))
    return built


def _regression(case: Case) -> Built:
    built = _towers(case)
    built.losses.append(loss("regression", "v", "target", weight=0.7))
    return built


def _counted(case: Case) -> Built:
    built = _towers(case)
    built.losses.append(loss("counted", "t", "mask", weight=1.5))
    return built


def _two_consumers(case: Case) -> Built:
    """Element 0 of v's output goes to the loss, element 1 to t."""
    built = _towers(case)
    built.units[1] = case.other("t", "v.1", "b")
    built.losses = [
        loss("contrastive", *["v.0", "t", "u"][: case.modalities], sync_batch=case.samples),
        loss("regression", "v.0", "target"),
    ]
    built.args = {"v": {"tuple_output": True}}
    return built


def _unused_element(case: Case) -> Built:
    built = _towers(case)
    names = ["v.0", "t", "u"][: case.modalities]
    built.losses = [loss("contrastive", *names, sync_batch=case.samples)]
    built.args = {"v": {"tuple_output": True}}
    return built


def _unused_module(case: Case) -> Built:
    built = _towers(case)
    built.units.append(case.other("idle", "v", "c"))
    return built


def _colocated(case: Case) -> Built:
    """All units on the ranks of v."""
    built = _towers(case)
    shape = {"pp": case.pp, "dp": case.dp, "tp": case.tp, "k": case.k}
    grid = tuple(
        tuple(
            tuple((d * case.pp + p) * case.tp + t for t in range(case.tp)) for p in range(case.pp)
        )
        for d in range(case.dp)
    )
    built.units[1:] = [
        case.other(u.module, *u.inputs, **shape, ranks=grid) for u in built.units[1:]
    ]
    return built


def _sharded(case: Case) -> Built:
    built = _towers(case)
    names = ["v", "t", "u"][: case.modalities]
    built.losses = [loss("clip", *names, sync_batch=case.samples)]
    built.factories = {"clip": "mmplan.zoo.losses:clip"}
    return built


def _chain(case: Case) -> Built:
    """v (and u) into t, which ends in a per-sample loss: no sync at all."""
    feeds = ["v", "u", "b"] if case.modalities == 3 else ["v", "b"]
    units = [case.first(), case.other("t", *feeds)]
    if case.modalities == 3:
        units.insert(0, case.other("u", "c"))
    return Built(
        units=units, losses=[loss("regression", "t", "target"), loss("counted", "t", "mask")]
    )


def _tied(case: Case) -> Built:
    built = _towers(case)
    built.units[0] = case.first(blocks=3)
    built.factories = {"v": "tied"}
    return built


def _shared(case: Case) -> Built:
    """t runs v's parameters on other inputs, with degrees of its own (but one tp)."""
    built = _towers(case)
    blocks = max(case.pp * case.vpp, 3)
    built.units[0] = case.first(blocks=blocks)
    built.units[1] = case.other("t", "b", blocks=blocks, tp=case.tp, share="v")
    return built


def _dropout(case: Case) -> Built:
    built = _towers(case)
    built.args = {"v": {"dropout": 0.2}, "t": {"dropout": 0.4}}
    return built


def _ragged(case: Case) -> Built:
    """v passes (Ragged, tensor) between its blocks and to t."""
    built = _towers(case)
    built.units[0] = case.first("rows")
    built.units[1] = case.other("t", "v", "b")
    names = ["v.1", "t", "u"][: case.modalities]
    built.losses = [loss("contrastive", *names, sync_batch=case.samples)]
    built.factories = {"v": "ragged", "t": "reader"}
    return built


def _null_input(case: Case) -> Built:
    built = _towers(case)
    built.units[1] = case.other("t", None, "b", None)
    return built


def _two_syncs(case: Case) -> Built:
    """Two cross-sample losses; micro-batches straddle the smaller sync batch."""
    built = _towers(case)
    built.losses.append(loss("contrastive2", "t", "v", sync_batch=case.samples // 2, weight=0.3))
    return built


FEATURES: dict[str, Callable[[Case], Built]] = {
    "plain": _towers,
    "frozen-tower": _frozen_tower,
    "frozen-range": _frozen_range,
    "regression": _regression,
    "counted": _counted,
    "two-consumers": _two_consumers,
    "unused-element": _unused_element,
    "unused-module": _unused_module,
    "colocated": _colocated,
    "sharded": _sharded,
    "chain": _chain,
    "tied": _tied,
    "shared": _shared,
    "dropout": _dropout,
    "ragged": _ragged,
    "null-input": _null_input,
    "two-syncs": _two_syncs,
}


# Some of the features quickly; the rest come with `make test-all`, and in the pairwise cases.
_QUICK = ("ragged", "tied")
SOME_FEATURES = [
    name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FEATURES
]


def small_case(**changes: Any) -> Case:
    """Twelve samples in two micro-batches: enough where what is tested is not the order."""
    fields: dict[str, Any] = {"samples": 12, "k": 2, **changes}
    return Case(**fields)
