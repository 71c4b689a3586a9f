"""Activation recomputation: less is kept, and the step is the same to the bit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmlaunch.comm.batches import tensors_of
from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.execute.blocks import StageBlocks
from mmlaunch.measure.memory import kept_bytes
from mmlaunch.session.session import Session
from mmplan.costs.cost_model import CostModel
from mmplan.program.model import Stage
from mmplan.schema.recompute import Recompute
from mmplan.schema.workload import Workload
from mmplan.zoo.decoder import llama
from tests.matrix_cases import Case, small_case
from tests.matrix_models import WIDTH
from tests.programs import loss, make_plan, trained_as, unit
from tests.selection import some
from tests.solving import module_profile, profile
from tests.training import train_planned, worst_difference
from tests.verification import HERE, make_workload, verify_in_process


def _workload(case: Case, *modules: str, recompute: Recompute = "full", **train: Any) -> Workload:
    """The case's workload with the named modules recomputed."""
    workload = case.workload()
    specs = {
        name: spec.model_copy(update={"recompute": recompute if name in modules else "none"})
        for name, spec in workload.modules.items()
    }
    changed = workload.train.model_copy(update=train)
    return workload.model_copy(update={"modules": specs, "train": changed})


def _left_to_the_plan(workload: Workload) -> Workload:
    specs = workload.modules.items()
    auto = {name: spec.model_copy(update={"recompute": "auto"}) for name, spec in specs}
    return workload.model_copy(update={"modules": auto})


@pytest.mark.parametrize(
    "case",
    [
        small_case(dp=2, tp=2),
        small_case(dp=3, pp=2, feature="dropout"),
        small_case(dp=2, tp=2, feature="frozen-range"),
        small_case(dp=2, feature="frozen-tower"),
        small_case(dp=2, tp=2, feature="shared"),
        small_case(feature="tied", dp=2),
        small_case(feature="ragged", tp=2),
        small_case(feature="chain", dp=2, kind="1f1b"),
    ],
    ids=str,
)
@pytest.mark.parametrize("zero", some([0, 1], 1))
def test_gradients_equal_one_process_and_those_without(case: Case, zero: int) -> None:
    workload = _workload(case, "v", "t", zero=zero)
    verdict = verify_in_process(case.plan(), workload)
    assert not verdict.differences, verdict.differences[:5]


def test_three_steps_with_dropout_are_the_same_to_the_bit() -> None:
    case = small_case(dp=2, tp=2, pp=2, feature="dropout")
    again = train_planned(case.plan(), _workload(case, "v", "t"), 3)
    kept = train_planned(case.plan(), _workload(case), 3)
    assert again.losses == kept.losses
    assert worst_difference(again.weights, kept.weights) == 0.0


def test_bf16_is_recomputed_in_bf16() -> None:
    case = small_case(dp=2, feature="dropout")
    again = train_planned(case.plan(), _workload(case, "v", "t", precision="bf16"), 2)
    kept = train_planned(case.plan(), _workload(case, precision="bf16"), 2)
    assert again.losses == kept.losses
    assert worst_difference(again.weights, kept.weights) == 0.0


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_a_module_that_two_tasks_train_differently_keeps_its_freezes(
    precision: str,
) -> None:
    """In backward a parameter that this task freezes trains again: the second run must not.

    Nor may a narrow copy that leads to the weight be used where the weight is frozen.
    """
    units = [
        unit("v", "a", task="x", blocks=3, k=2, dp=2, frozen=((1, 2),)),
        unit("v", "b", task="y", name="y.v", blocks=3, k=2, dp=2, ranks=[[[0]], [[1]]]),
    ]
    losses = [
        loss("regression", "v", "target", task="x"),
        loss("counted", "v", "mask", task="y"),
    ]
    plan = make_plan(*units, losses=losses, batch=12)
    workload = make_workload(units, losses, batch=12, precision=precision)
    module = workload.modules["v"].model_copy(update={"recompute": "full"})
    workload = workload.model_copy(update={"modules": {"v": module}})
    verdict = verify_in_process(plan, workload)
    assert not verdict.differences, verdict.differences[:5]


@pytest.mark.parametrize("said", ["by the workload", "by the plan"])
@pytest.mark.parametrize(("modules", "recompute"), [((), "full"), (("v",), "full"), (("v",), 1)])
def test_blocks_save_only_their_inputs_where_they_run_again(
    modules: tuple[str, ...], recompute: Recompute, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = small_case(others="single")
    saved: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    original = StageBlocks.run

    def noted(self: StageBlocks, stage: Stage, *args: Any) -> Any:
        def pack(tensor: Tensor) -> Tensor:
            saved[stage.module] += tensor.numel()
            return tensor

        # What a recomputed block saves inside itself does not come by here.
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return original(self, stage, *args)

    monkeypatch.setattr(StageBlocks, "run", noted)

    def entry(transport: Any) -> None:
        workload = _workload(case, *modules, recompute=recompute)
        session = Session(
            plan=trained_as(case.plan(), workload),
            workload=_left_to_the_plan(workload) if said == "by the plan" else workload,
            folder=HERE,
            transport=transport,
        )
        for (owner, _), block in session.model.blocks.items():
            # The parameter binds the module's name now.
            block.register_forward_pre_hook(lambda *_, owner=owner: runs.update([owner]))
        session.forward_backward()

    InProcessWorld(case.plan().devices).run(entry)
    blocks = {unit.module: unit.blocks[-1][1] for unit in case.plan().units}
    for name, count in blocks.items():
        inputs = count * case.samples * WIDTH
        if name in modules and recompute == "full":
            assert saved[name] == inputs
        else:
            assert saved[name] > 3 * inputs * (count - (name in modules)) / count
    again = {name: count if recompute == "full" else 1 for name, count in blocks.items()}
    assert runs == {
        name: case.k * (count + (again[name] if name in modules else 0))
        for name, count in blocks.items()
    }


def test_what_recomputed_blocks_are_predicted_to_hold_is_held() -> None:
    """The first one takes token ids, and the last one gives more than the others."""
    samples, blocks = 4, llama(4, 64, heads=4, kv_heads=2, ffn=128, vocab=64, hidden=True)
    ids, outputs = torch.randint(0, 64, (samples, 56)), list[float]()

    def run() -> Any:
        value: Any = (ids,)
        for block in blocks:
            output = checkpoint(block, *value, use_reentrant=False)
            outputs.append(sum(t.nbytes for t in tensors_of(output)) / samples)
            value = (output,)
        return value[0]

    held = kept_bytes(
        run, [*blocks.parameters(), *blocks.buffers(), ids], torch.device("cpu"), False
    )
    module = module_profile(
        blocks=4, block_boundary_bytes=outputs, output_bytes_per_sample=outputs[3]
    )
    costs = CostModel(profile({"m": module}, 1))
    full = costs.activation_bytes(
        task="default", module="m", tp=1, samples=samples, recompute="full"
    )
    assert full == pytest.approx(held, rel=1e-3)
