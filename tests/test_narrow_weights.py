"""ZeRO-1 in 16 bits: ranks hold narrow weights whole, and float32 values of their shard alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.comm.strict import StrictWorld
from mmlaunch.execute.gradient_buckets import FlatShards, whole_slice
from mmlaunch.model.precision import matrix_names, widen_rows
from mmlaunch.session.session import Session
from mmplan.costs.cost_model import CostModel
from mmplan.schema.plan import Plan, PlannedTraining
from mmplan.schema.profile import Profile
from mmplan.schema.train import TrainSpec
from mmplan.schema.workload import Workload
from mmplan.simulation.predict import costs_of
from tests.matrix_cases import Case, small_case
from tests.matrix_models import wide
from tests.mixed_tp_cases import MIXED
from tests.programs import loss, make_plan, trained_as, unit
from tests.selection import some
from tests.solving import module_profile, profile
from tests.training import train_planned, worst_difference
from tests.verification import HERE, make_workload, verify_in_process, verify_steps

ADAMW = {"optimizer": "AdamW", "optimizer_args": {"lr": 0.01, "weight_decay": 0.1}}
TP_2_AND_1 = "3 ranks: tp 2 and tp 1"


pytestmark = pytest.mark.usefixtures("small_buckets")


def _changed(workload: Workload, **train: Any) -> Workload:
    fields = {**ADAMW, "precision": "bf16", "zero": 1, **train}
    return workload.model_copy(update={"train": workload.train.model_copy(update=fields)})


@pytest.mark.parametrize(
    ("case", "precision"),
    some(
        [
            (small_case(dp=3, feature="regression"), "fp16"),
            (small_case(dp=2, tp=2, feature="regression"), "bf16"),
            (small_case(dp=2, pp=2, feature="chain", kind="1f1b", backward="split"), "bf16"),
            (small_case(dp=2, feature="shared"), "fp16"),
        ],
        *(0, 2),
    ),
    ids=str,
)
def test_steps_are_those_of_float32_weights_bit_for_bit(case: Case, precision: str) -> None:
    """Autocast rounds the same weights to the same ones, and gradients add up in float32."""
    train = {"precision": precision, "clip_grad_norm": 0.5}
    narrow = train_planned(case.plan(), _changed(case.workload(), **train), 3)
    wide = train_planned(case.plan(), _changed(case.workload(), zero=0, **train), 3)
    assert narrow.losses == wide.losses
    # The norm is added up in another order.
    assert narrow.norms == pytest.approx(wide.norms, rel=1e-6)
    assert worst_difference(narrow.weights, wide.weights) < 1e-6


@pytest.mark.parametrize(
    ("name", "recompute"),
    [(TP_2_AND_1, "full"), *(pytest.param(n, "none", marks=pytest.mark.slow) for n in MIXED)],
)
def test_mixed_degrees_equal_one_process_and_reload(name: str, recompute: str) -> None:
    case = MIXED[name]
    workload = case.workload(precision="bf16", zero=1, recompute=recompute, **ADAMW)
    verdict = verify_steps(case.plan(), workload, steps=2)
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.updates > 0


@pytest.mark.parametrize(
    ("saved", "resumed"),
    some(
        [
            ({"dp": 3, "zero": 1}, {"dp": 2, "zero": 0}),
            ({"dp": 2, "zero": 0}, {"dp": 3, "zero": 1, "tp": 2}),
            ({"dp": 2, "zero": 1, "tp": 2}, {"dp": 3, "zero": 1, "pp": 2}),
        ],
        2,
    ),
)
def test_a_checkpoint_has_the_float32_values_for_any_plan(
    saved: dict[str, Any], resumed: dict[str, Any], tmp_path: Path
) -> None:
    plan, workload = _towers(saved)
    paths: list[Path] = []
    trained = train_planned(plan, workload, 2, after=lambda s: paths.append(s.save(tmp_path)))
    then, later = _towers(resumed)
    loaded = train_planned(then, later, 2, before=lambda s: s.load(paths[0]))
    assert not loaded.losses
    assert worst_difference(loaded.weights, trained.weights) == 0.0
    went_on = train_planned(then, later, 3, before=lambda s: s.load(paths[0]))
    unbroken = train_planned(plan, workload, 3)
    assert went_on.losses == pytest.approx(unbroken.losses[2:], rel=2**-8)


def _towers(options: dict[str, Any]) -> tuple[Plan, Workload]:
    degrees: dict[str, Any] = {name: value for name, value in options.items() if name != "zero"}
    untied: dict[str, Any] = {**degrees, "tp": 1}
    units = [unit("v", "a", blocks=3, k=2, **untied), unit("t", "b", blocks=3, k=2, **degrees)]
    losses = [
        loss("contrastive", "v", "t", sync_batch=12),
        loss("regression", "t", "target", weight=0.7),
    ]
    workload = make_workload(units, losses, batch=12, factories={"v": "tied"})
    plan = make_plan(*units, losses=losses, batch=12)
    return plan, _changed(workload, zero=options["zero"])


def test_narrow_gradients_are_those_of_one_process_as_near_as_rounding_allows() -> None:
    case = small_case(dp=2, feature="regression")
    sent: set[torch.dtype] = set()
    begin = FlatShards.begin

    def noted(self: FlatShards, transport: Any, begun: set[str]) -> None:
        if self.narrow:
            sent.update(i.parameter.grad.dtype for i in self.slices if i.parameter.grad is not None)
        begin(self, transport, begun)

    workload = _changed(case.workload(), narrow_gradients=True, clip_grad_norm=0.5)
    with patch.object(FlatShards, "begin", noted):
        verdict = verify_steps(case.plan(), workload, steps=2)
    assert not verdict.differences, verdict.differences[:5]
    assert sent == {torch.bfloat16}


def test_narrow_gradients_without_narrow_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="narrow_gradients: needs precision bf16 or fp16"):
        TrainSpec(narrow_gradients=True)


def test_the_rules_of_gpus_are_kept() -> None:
    case = small_case(dp=2, pp=2, feature="chain", kind="1f1b")
    world = StrictWorld(case.plan().devices)
    verdict = verify_in_process(case.plan(), _changed(case.workload()), world=world)
    assert world.faults == []
    assert not verdict.differences, verdict.differences[:5]


def test_a_weight_that_is_not_gathered_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small_case(dp=2, feature="regression")
    monkeypatch.setattr(FlatShards, "gather", lambda *_: None)
    verdict = verify_steps(case.plan(), _changed(case.workload(), compare_replicas=0), steps=1)
    assert any(item.what == "weight" for item in verdict.differences)


# --- memory ----------------------------------------------------------------------------


def _profile(parameters: float, blocks: int) -> Profile:
    return profile(
        {"v": module_profile(blocks=blocks, parameters=parameters, tp={1: 1.0, 2: 1.0})}, 16
    )


def _stored(tensors: Iterable[Tensor]) -> int:
    """Bytes of their storages, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(
    ("precision", "tp", "gradient"), [("bf16", 1, 4), ("fp16", 2, 4), ("bf16", 1, 2)]
)
def test_a_rank_holds_what_the_plan_counts(
    precision: str, tp: int, gradient: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, blocks = 64, 2
    units, losses = (
        [unit("v", "a", dp=4, tp=tp, blocks=blocks)],
        [loss("regression", "v", "target")],
    )
    workload = make_workload(
        units, losses, batch=12, factories={"v": "wide"}, args={"v": {"width": width}}
    )
    workload = _changed(workload, precision=precision, narrow_gradients=gradient == 2)
    plan = trained_as(make_plan(*units, losses=losses, batch=12), workload)
    gradients: defaultdict[int, int] = defaultdict(int)
    begin = FlatShards.begin

    def noted(self: FlatShards, transport: Any, begun: set[str]) -> None:
        for item in self.slices:
            given = item.parameter.grad
            gradients[transport.rank] += 0 if given is None else given.nbytes
        begin(self, transport, begun)

    monkeypatch.setattr(FlatShards, "begin", noted)

    def held(transport: Any) -> int:
        session = Session(plan=plan, workload=workload, folder=HERE, transport=transport)
        session.step()
        states = session.optimizer.state.values() if session.optimizer else ()
        return gradients[session.rank] + _stored(
            [
                *(parameter for _, parameter in session.model.named_parameters()),
                *(item.tensor for item in session.update.slices),
                *(value for state in states for value in state.values() if value.dim()),
            ]
        )

    numbers = sum(p.numel() for p in wide(blocks, width).parameters())
    costs = costs_of(plan, _profile(numbers, blocks))
    counted = [costs.static_bytes(rank) for rank in range(plan.devices)]
    assert counted == pytest.approx([numbers / tp * (2 + gradient + 12 / 4)] * plan.devices)
    assert InProcessWorld(plan.devices).run(held) == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("dp", [2, 8, 64])
def test_a_layer_of_full_size_takes_what_is_counted(dp: int) -> None:
    """A decoder layer of Qwen-7B, and its table of tokens, on the meta device."""
    with torch.device("meta"):
        layer = nn.ModuleList(
            [
                nn.Embedding(151936, 4096),
                nn.RMSNorm(4096),
                nn.Linear(4096, 3 * 4096),
                nn.Linear(4096, 4096, bias=False),
                nn.RMSNorm(4096),
                *(nn.Linear(4096, 11008, bias=False) for _ in range(2)),
                nn.Linear(11008, 4096, bias=False),
            ]
        )
    narrow = matrix_names(layer)
    numbers = {name: p.numel() for name, p in layer.named_parameters()}
    assert {name for name in numbers if name not in narrow} == {"1.weight", "2.bias", "4.weight"}
    held = 0
    for name, parameter in layer.named_parameters():
        kind = torch.bfloat16 if name in narrow else None
        item = whole_slice(name, parameter)
        sums = FlatShards([item], tuple(range(dp)), dp - 1, counted=frozenset(), narrow=kind)
        sums.make_narrow()
        shard = sum(updated.tensor.numel() for updated in sums.updated)
        # Two moments beside what the optimizer updates.
        held += _stored([parameter, *(updated.tensor for updated in sums.updated)]) + 8 * shard
    costs = CostModel(_profile(1, 1), training=PlannedTraining(precision="bf16"))
    each = costs.bytes_per_parameter(trainable=True, zero=1, dp=dp) - costs.gradient_bytes(1)
    assert held == pytest.approx(each * sum(numbers.values()), rel=0.05)


# --- embeddings ------------------------------------------------------------------------


def test_rows_of_a_narrow_table_are_float32_and_so_is_their_gradient() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(5, 4, padding_idx=2)
    plain = nn.Embedding(5, 4, padding_idx=2, _weight=table.weight.detach().bfloat16().float())
    weight = cast(nn.Parameter, table.weight)
    sums = FlatShards(
        [whole_slice("weight", weight)], (0,), 0, counted=frozenset(), narrow=torch.bfloat16
    )
    sums.make_narrow()
    widen_rows([nn.Sequential(table)], {weight})
    index = torch.tensor([[0, 1, 2], [1, 1, 4]])
    factor = torch.randn(2, 3, 4)
    for layer in (table, plain):
        out = layer(index)
        assert out.dtype == torch.float32
        (out * factor).sum().backward()
    assert torch.equal(table(index), plain(index))
    assert table.weight.dtype == torch.bfloat16
    assert torch.equal(cast(Tensor, table.weight.grad), cast(Tensor, plain.weight.grad))


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (nn.Linear(2, 2), ("weight",)),
        (nn.Conv2d(2, 2, 1), ("weight",)),
        (nn.MultiheadAttention(4, 2), ("in_proj_weight", "out_proj.weight")),
        (nn.Embedding(2, 2), ("weight",)),
        (nn.Embedding(2, 2, max_norm=1.0), ()),
        (nn.LayerNorm([2, 2, 2]), ()),
        (
            nn.ParameterDict({"experts": torch.ones(2, 2, 2), "position": torch.ones(1, 2, 2)}),
            ("experts",),
        ),
        (nn.Bilinear(2, 2, 1), ()),
    ],
)
def test_weights_are_narrow_where_autocast_computes_with_them_alone(
    layer: nn.Module, names: tuple[str, ...]
) -> None:
    assert matrix_names(layer) == {*names}


def test_a_weight_that_another_layer_uses_too_stays_as_it_is() -> None:
    linear, other = nn.Linear(2, 2, bias=False), nn.PReLU(2)
    other.weight = cast(nn.Parameter, linear.weight)
    assert matrix_names(nn.Sequential(linear, other)) == set()
