"""Sequence parallelism: planned steps against one process, with rows cut over groups."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional

import mmplan.proof.tp_states as tp_states_module
from mmlaunch.comm.inprocess import InProcessTransport, InProcessWorld
from mmlaunch.comm.strict import StrictWorld
from mmlaunch.execute import compiled_blocks
from mmlaunch.execute.blocks import StageBlocks
from mmlaunch.model.local_model import LocalModel
from mmlaunch.session.session import Session
from mmplan.errors import InvalidInputError
from mmplan.profiling.flow import TaskFlow
from mmplan.profiling.measure import measure_profile
from mmplan.proof.row_cuts import RowCuts
from mmplan.proof.tp_states import tp_states
from mmplan.schema.agreement import check_profiled
from mmplan.schema.workload import Workload, resolve_tasks
from mmplan.zoo import decoder, towers
from tests.launching import check_over_gloo
from tests.mllm_cases import MllmCase
from tests.programs import loss, make_plan, trained_as, unit
from tests.row_texts import TextCase
from tests.solving import module_profile, profile, workload
from tests.verification import HERE, TOLERANCE, verify_in_process, verify_steps

pytestmark = pytest.mark.usefixtures("one_thread")


def cut(workload: Workload, **train: Any) -> Workload:
    """The workload with sequence parallelism."""
    spec = workload.model_dump(exclude_none=True, mode="json")
    spec["train"] |= {"sequence_parallel": True, **train}
    return Workload.model_validate(spec)


CASES = [
    pytest.param(TextCase(tp=2, pp=2), marks=pytest.mark.slow),
    pytest.param(TextCase(tp=4, ragged=True), marks=pytest.mark.slow),
    TextCase(tp=4, k=4, ragged=True, split=True, pp=2),
    pytest.param(TextCase(model="qwen3", tp=2, recompute="full"), marks=pytest.mark.slow),
    TextCase(model="qwen3", tp=4, k=4, ragged=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_one_process(case: TextCase) -> None:
    world = StrictWorld(case.plan().devices)
    verdict = verify_in_process(case.plan(), case.workload(), world=world)
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= TOLERANCE["fp64"]


MLLM = [
    MllmCase(tp=2, pp=2, dp=2, zero=1, recompute="full"),
    MllmCase(tp=2, pp=2, vpp=2, freeze="encoder", encoders=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", MLLM, ids=str)
def test_several_modules(case: MllmCase) -> None:
    verdict = verify_in_process(case.plan(), cut(case.workload()))
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= TOLERANCE["fp64"]


def test_updates_clipping_and_a_reload_equal_one_process() -> None:
    case = TextCase(tp=2, dp=2, ragged=True)
    train: dict[str, Any] = {"clip_grad_norm": 0.1, "zero": 1}
    train["optimizer_args"] = {"lr": 0.01, "eps": 1e-4}
    verdict = verify_steps(case.plan(), case.workload(**train))
    assert not verdict.differences, verdict.differences[:5]


def test_ranks_have_their_own_rows_and_sum_no_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    sums: list[int] = []
    exchange = InProcessTransport._deposit

    def deposit(self: Any, group: Any, operation: str, item: Any) -> int:
        seen.add(operation)
        if operation == "sum":
            sums.append(item.dim())
        return exchange(self, group, operation, item)

    monkeypatch.setattr(InProcessTransport, "_deposit", deposit)
    case = TextCase(tp=4)
    verify_in_process(case.plan(), case.workload())
    assert "exchange" in seen
    assert max(sums) == 1, "norms' gradients and flat parameters alone"


class Residual(nn.Module):
    """A norm and a cut MLP; ``function`` is what the block does with the rows beside them."""

    tp_plan = {"mlp.up": "colwise", "mlp.down": "rowwise"}  # noqa: RUF012

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), towers.MLP(8, 16)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.mlp(self.norm(x)))


RIGHT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a residual": lambda x, y: x + y,
    "a gate of each row": lambda x, y: x + y * x.mean(-1, keepdim=True).sigmoid(),
    "dropout that is off": lambda x, y: x + functional.dropout(y, 0.5, False),
}
WRONG: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "a mean of rows": (lambda x, y: x + y.mean(-2, keepdim=True), "mean goes over the cut"),
    "a sum over them": (lambda x, y: x + y.cumsum(-2), "cumsum goes along the cut dim"),
    "the row before": (lambda x, y: x + y.roll(1, -2), "roll goes along the cut dim"),
    "places of rows": (
        lambda x, y: x + y * torch.arange(x.shape[-2])[:, None],
        "takes its size of a cut value",
    ),
    "a part of them": (lambda x, y: (x + y)[:, :4], "slice"),
    "their number": (lambda x, y: x + y / x.shape[-2], "computed of a cut size"),
    "noise": (lambda x, y: x + functional.dropout(y, 0.5), "random numbers"),
    "scores of pairs": (lambda x, y: x + (x @ x.transpose(-1, -2)).softmax(-1) @ y, "matmul"),
}


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("name", RIGHT)
def test_blocks_whose_rows_are_alone_are_cut(name: str, rows: int) -> None:
    block = Residual(RIGHT[name])
    found = tp_states(block, (_activations(rows),), 2, where="v.0", rows=True)
    assert found.obstacle is None
    assert found.rows == RowCuts(takes=True, gives=True, regions=("mlp",))
    assert found.partial == {"norm.weight", "norm.bias", "mlp.down.bias"}


@pytest.mark.parametrize("name", WRONG)
def test_blocks_that_mix_rows_keep_them_whole(name: str) -> None:
    function, reason = WRONG[name]
    found = tp_states(Residual(function), (_activations(8),), 2, where="v.0", rows=True)
    assert found.rows is None
    assert reason in str(found.obstacle)
    assert found.partial == frozenset()


def _activations(rows: int) -> Tensor:
    return torch.randn(3, rows, 8, requires_grad=True)


@pytest.mark.parametrize("without", ["regions", "scattered", "takes", "whole"])
def test_planted_cuts_are_refused(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_, last = decoder.llama(3, 16, heads=4, vocab=16)
    given = torch.zeros(2, 8, dtype=torch.int64), torch.randn(2, 8, 16, requires_grad=True)
    block, x = (first, given[0]) if without == "regions" else (last, given[1])
    if without == "scattered":
        block = towers.vision(3, 16, heads=4, image=8, patch=2)[0]
        x = torch.zeros(2, 1, 8, 8)
    if without == "whole":
        # A mean over rows; a head with logits of each row would be right without it.
        block = towers.vision(3, 16, heads=4)[-1]
    assert tp_states(block, (x,), 2, where="llm", rows=True).rows is not None
    right = tp_states_module._row_cuts
    change: dict[str, Any] = {without: False if without == "takes" else ()}
    monkeypatch.setattr(
        tp_states_module, "_row_cuts", lambda *args: replace(right(*args), **change)
    )
    assert tp_states(block, (x,), 2, where="llm", rows=True).rows is None


def test_a_norm_whose_gradient_nobody_sums_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalModel, "sum_partial", lambda *_: None)
    case = TextCase(tp=2)
    verdict = verify_in_process(case.plan(), case.workload())
    assert any("norm" in str(difference) for difference in verdict.differences)


@pytest.mark.parametrize("rows", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ranks_hold_what_is_counted(rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tp, blocks, width, batch = 4, 2, 32, 2
    workload = _vision(blocks=blocks, width=width, side=12, batch=batch, rows=rows)
    units = unit("v", "x", blocks=blocks, kind="1f1b", tp=tp)
    plan = make_plan(units, losses=[loss("l", "v", "y")], batch=batch)
    held: list[int] = []
    run = StageBlocks.run

    def counted(self: StageBlocks, *args: Any, **options: Any) -> Any:
        parameters = {
            _place(p) for block in self._model.blocks.values() for p in block.parameters()
        }
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if _place(tensor) not in parameters:
                kept[_place(tensor)] = tensor.detach()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = run(self, *args, **options)
        held.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
        return output

    monkeypatch.setattr(StageBlocks, "run", counted)

    def entry(transport: Any) -> None:
        planned = trained_as(plan, workload, None)
        Session(plan=planned, workload=workload, folder=HERE, transport=transport).step()

    InProcessWorld(tp).run(entry)
    flow = TaskFlow(workload, HERE, resolve_tasks(workload)["default"])
    count = sum(block.saved_bytes for block in flow.count_module("v", tp=tp, samples=batch))
    # A rank has one head: with several the next Linear takes a copy of attention's output on
    # accelerators, and not here.
    assert count == max(held)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _vision(*, blocks: int, width: int, side: int, batch: int, rows: bool) -> Workload:
    args = {"blocks": blocks, "width": width, "heads": 4, "image": side, "patch": 2, "embed": 8}
    fields = {"x": {"shape": [1, side, side]}, "y": {"shape": [8]}}
    noise = {"factory": "mmplan.zoo.synthetic:noise", "args": {"fields": fields, "samples": 8}}
    return Workload.model_validate(
        {
            "name": "vision",
            "batch": batch,
            "modules": {
                "v": {"factory": "mmplan.zoo.towers:vision", "args": args, "inputs": ["x"]}
            },
            "losses": {"l": {"factory": "mmplan.zoo.losses:mse", "inputs": ["v", "y"]}},
            "data": noise,
            "train": {"sequence_parallel": rows},
        }
    )


@pytest.mark.slow
def test_activations_of_a_7b_model_fall_with_the_degree() -> None:
    """To a quarter from tp 2 to 8, but for the ids of tokens, which every rank is given."""
    spec = TextCase(length=4096).workload().model_dump(exclude_none=True, mode="json")
    llm = {"blocks": 32, "width": 4096, "heads": 32, "vocab": 32000}
    spec["modules"]["llm"]["args"] = llm
    spec["train"]["precision"] = "bf16"
    workload = Workload.model_validate(spec)
    flow = TaskFlow(workload, HERE, resolve_tasks(workload)["default"])
    for samples in (1, 8):
        kept = {tp: flow.count_module("llm", tp=tp, samples=samples) for tp in (1, 2, 8)}
        of_all = {tp: sum(b.saved_bytes for b in blocks) for tp, blocks in kept.items()}
        assert of_all[2] == pytest.approx(of_all[1] / 2, rel=0.01)
        ids = 8 * 4096 * samples
        assert of_all[8] - ids <= (of_all[2] - ids) / 4


@pytest.mark.parametrize("made", [False, True])
def test_a_profile_of_the_other_kind_is_refused(made: bool) -> None:
    costs = profile({"v": module_profile(tp={1: 1.0, 2: 1.8})}, 2)
    costs = costs.model_copy(update={"sequence_parallel": made})
    job = workload({"v": {}}, batch=4, train={"sequence_parallel": not made})
    with pytest.raises(InvalidInputError, match=r"train\.sequence_parallel is"):
        check_profiled(costs, job)
    check_profiled(profile({"v": module_profile()}, 2), job)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gradients_and_a_resumed_run_over_gloo(tmp_path: Path) -> None:
    cases = [TextCase(tp=2, pp=2, ragged=True), TextCase(model="qwen3", tp=4)]
    made = [(case.plan(), case.workload()) for case in cases]
    check_over_gloo(made, tmp_path, timeout_s=500.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case",
    [
        TextCase(tp=2),
        TextCase(tp=2, split=True, pp=2),
        # A text of one token: one of the ranks has no row of it.
        TextCase(tp=2, k=4, ragged=True),
    ],
    ids=str,
)
def test_compiled_blocks_are_one_graph_each(
    case: TextCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager")
    verdict = verify_in_process(case.plan(), case.workload(compile=True))
    assert not verdict.differences, verdict.differences[:5]
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_measured_profiles_have_cut_rows(tmp_path: Path) -> None:
    """Of whole rows a rank would keep more than half."""
    job = _vision(blocks=4, width=32, side=12, batch=2, rows=True)
    (tmp_path / "workload.yaml").write_text(json.dumps(job.model_dump(mode="json")))
    found = measure_profile(
        tmp_path / "workload.yaml", device="cpu", num_processes=2, state_path=tmp_path / "state"
    )
    assert found.sequence_parallel
    held = {(p.tp, p.microbatch, p.blocks): p.activation_bytes for p in found.modules["v"].points}
    pairs = [(kept, held[1, size, n]) for (tp, size, n), kept in held.items() if tp == 2]
    assert pairs
    for half, whole in pairs:
        assert half is not None
        assert whole is not None
        assert 0.45 < half / whole < 0.55
