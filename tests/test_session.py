"""A session's checkpoints, weights, hooks and refusals, on the in-process transport."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mmlaunch.checkpoint.restore import open_checkpoint
from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.data.loader import step_indices
from mmlaunch.session.reference import Reference
from mmlaunch.session.session import Session, StepResult, find_workload
from mmplan.errors import InvalidInputError, RunFailedError
from mmplan.program.compile import compile_plan
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.matrix_models import WIDTH, Samples
from tests.programs import UnitSpec, loss, make_plan, trained_as, unit
from tests.selection import some
from tests.verification import HERE, make_workload

BATCH = 24
LOSSES = [
    loss("contrastive", "v", "t", "u", sync_batch=12),
    loss("regression", "v", "target", weight=0.5),
]
# Some last stages lie on lower ranks than the first ones, where tied weights are named.
PLANS: dict[str, list[UnitSpec]] = {
    "pipeline and replicas": [
        unit("v", "a", pp=2, blocks=4, k=2),
        unit("t", "b", dp=2, blocks=3, k=2),
        unit("u", "c", pp=2, blocks=2, k=2, frozen=((0, 1),)),
    ],
    "tensor parallel": [
        unit("v", "a", tp=2, dp=2, blocks=4, k=2),
        unit("t", "b", pp=3, ranks=[[[6], [5], [4]]], blocks=3, k=3),
        unit("u", "c", ranks=[[[7]]], blocks=2, k=1, frozen=((0, 1),)),
    ],
    "one rank": [
        unit("v", "a", ranks=[[[0]]], blocks=4),
        unit("t", "b", ranks=[[[0]]], blocks=3, k=2),
        unit("u", "c", ranks=[[[0]]], blocks=2, frozen=((0, 1),)),
    ],
    "everything at once": [
        unit("v", "a", pp=2, vpp=2, dp=3, blocks=4, k=2),
        unit("t", "b", pp=2, tp=2, ranks=[[[6, 7], [1, 0]]], blocks=3, k=4),
        unit("u", "c", pp=2, dp=2, ranks=[[[3], [2]], [[9], [8]]], blocks=2, frozen=((0, 1),)),
    ],
}
FACTORIES = {"t": "tied"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "NAdam": {"lr": 0.01},
    "Adagrad": {"lr": 0.01},
}


def plan_of(name: str) -> Plan:
    return make_plan(*PLANS[name], losses=LOSSES, batch=BATCH)


def workload_with(**train: Any) -> Workload:
    return make_workload(PLANS["one rank"], LOSSES, batch=BATCH, factories=FACTORIES, train=train)


ADAMW = workload_with(optimizer="AdamW", optimizer_args={"lr": 0.01})


def run_ranks(
    plan: Plan, workload: Workload, body: Callable[[Session], Any], ranks: int | None = None
) -> list[Any]:
    """``body`` with each rank's session; results by rank."""

    def entry(transport: Any) -> Any:
        with Session(
            plan=trained_as(plan, workload), workload=workload, folder=HERE, transport=transport
        ) as session:
            return body(session)

    return InProcessWorld(ranks or plan.devices).run(entry)


def weights_of(modules: dict[str, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": parameter.detach().clone()
        for name, module in modules.items()
        for key, parameter in module.named_parameters()
    }


def finish(session: Session, until: int) -> dict[str, Tensor]:
    """All weights after that many steps."""
    for _ in session.steps(until):
        pass
    return session.evaluate(weights_of)


@pytest.mark.parametrize(
    ("first", "optimizer"),
    [
        pytest.param("pipeline and replicas", "AdamW", marks=pytest.mark.slow),
        ("everything at once", "AdamW"),
        *(
            pytest.param("everything at once", name, marks=pytest.mark.slow)
            for name in OPTIMIZERS
            if name != "AdamW"
        ),
    ],
)
def test_a_run_goes_on_under_any_other_plan(first: str, optimizer: str, tmp_path: Path) -> None:
    workload = workload_with(optimizer=optimizer, optimizer_args=OPTIMIZERS[optimizer])

    def save_and_finish(session: Session) -> tuple[Path, dict[str, Tensor]]:
        for _ in session.steps(2):
            pass
        return session.save(tmp_path), finish(session, 4)

    def resume(session: Session) -> dict[str, Tensor]:
        session.load(path)
        assert session.step_count == 2
        return finish(session, 4)

    path, unbroken = run_ranks(plan_of(first), workload, save_and_finish)[0]
    for name in PLANS:
        resumed = run_ranks(plan_of(name), workload, resume)[0]
        assert resumed.keys() == unbroken.keys()
        for key, value in unbroken.items():
            if name == first:
                assert torch.equal(resumed[key], value), key
            torch.testing.assert_close(resumed[key], value, rtol=1e-12, atol=1e-12, msg=key)


@pytest.mark.parametrize("name", some(PLANS, 0, 3))
def test_what_is_saved_is_saved_again_bit_for_bit(name: str, tmp_path: Path) -> None:
    def save(session: Session) -> Path:
        for _ in session.steps(2):
            pass
        return session.save(tmp_path / "first")

    def load_and_save(session: Session) -> Path:
        session.load(tmp_path / "first" / "step-2")
        return session.save(tmp_path / "second")

    first = open_checkpoint(run_ranks(plan_of(name), ADAMW, save)[0])
    second = open_checkpoint(run_ranks(plan_of(name), ADAMW, load_and_save)[0])
    assert first.names() == second.names()
    kinds = {kind for key in first.names() for kind in first.kinds(key)}
    assert kinds == {"param", "optim.step", "optim.exp_avg", "optim.exp_avg_sq"}
    for key in first.names():
        assert first.kinds(key) == second.kinds(key)
        for kind in first.kinds(key):
            stored, again = first.load_whole(key, kind), second.load_whole(key, kind)
            assert stored.dtype == again.dtype
            assert torch.equal(stored, again), (key, kind)
    # u's first block is frozen; a scalar parameter has a state like any other.
    assert first.kinds("u.0.up.weight") == ["param"]
    assert first.load_whole("losses.contrastive.scale", "optim.step").item() == 2
    assert first.load_whole("losses.contrastive.scale", "optim.exp_avg").abs() > 0


@pytest.mark.parametrize("name", PLANS)
def test_final_weights_have_a_single_process_s_names_and_values(name: str, tmp_path: Path) -> None:
    path = tmp_path / "final.safetensors"
    plan = plan_of(name)
    run_ranks(plan, ADAMW, lambda session: session.write_weights(path))
    written = load_file(path)
    reference = Reference(workload=ADAMW, folder=HERE, program=compile_plan(plan))
    expected = reference.named_parameters()
    assert written.keys() == expected.keys()
    assert {"v.0.up.weight", "t.0.0.weight", "losses.contrastive.scale"} <= written.keys()
    assert "t.2.0.weight" not in written
    for key, value in expected.items():
        assert torch.equal(written[key], value), key


def test_every_rank_knows_how_long_each_waited_for_data() -> None:
    def body(session: Session) -> StepResult:
        if session.rank == 2:
            session.hooks.on_data.append(lambda *_: time.sleep(0.05))
        return session.step()

    results = run_ranks(plan_of("pipeline and replicas"), ADAMW, body)
    assert len(results) == len(results[0].data_s_by_rank) > 2
    for rank, result in enumerate(results):
        assert result.data_s_by_rank == results[0].data_s_by_rank
        assert result.data_s_by_rank[rank] == result.data_s
    assert results[2].data_s >= 0.05


def test_evaluate_gives_every_rank_what_rank_0_computes() -> None:
    def body(session: Session) -> Any:
        def function(modules: dict[str, nn.Module]) -> Any:
            assert not any(m.training for m in modules.values())
            assert not torch.is_grad_enabled()
            called.append(session.rank)
            return sorted(modules), float(modules["v"](torch.ones(1, 8, dtype=torch.float64)).sum())

        session.step()
        return session.evaluate(function)

    called: list[int] = []
    results = run_ranks(plan_of("everything at once"), ADAMW, body)
    assert called == [0]
    assert results[0][0] == ["losses.contrastive", "losses.regression", "t", "u", "v"]
    assert all(result == results[0] for result in results)
    alone = run_ranks(plan_of("one rank"), ADAMW, body)[0]
    assert alone[1] == pytest.approx(results[0][1], rel=1e-12)


def test_a_module_that_shares_parameters_is_evaluated_under_its_own_name() -> None:
    units = [unit("v", "a", blocks=2, pp=2), unit("t", "b", blocks=2, dp=2, share="v")]
    losses = [loss("contrastive", "v", "t", sync_batch=12)]
    plan = make_plan(*units, losses=losses, batch=BATCH)
    workload = make_workload(units, losses, batch=BATCH)
    found = run_ranks(
        plan, workload, lambda s: s.evaluate(lambda modules: modules["t"] is modules["v"])
    )
    assert found == [True] * plan.devices


def test_hooks_see_gradients_before_the_update_and_the_result_after_it(tmp_path: Path) -> None:
    def body(session: Session) -> list[Any]:
        events: list[Any] = []
        name, parameter = session.model.trained()[0]
        before = parameter.detach().clone()

        def on_loss(it: Session, value: float) -> None:
            events.append(("loss", value, name in it.gradients(), torch.equal(parameter, before)))

        def on_step(it: Session, result: StepResult) -> None:
            moved = not torch.equal(parameter, before)
            events.append(("step", result.loss, result.step, it.step_count, moved))
            assert it.gradients() == {}

        session.hooks.on_loss.append(on_loss)
        session.hooks.on_step.append(on_step)
        session.hooks.on_checkpoint.append(lambda _, path: events.append(("saved", path)))
        result = session.step()
        session.save(tmp_path)
        assert events == [
            ("loss", result.loss, True, True),
            ("step", result.loss, 0, 1, True),
            ("saved", tmp_path / "step-1"),
        ]
        return [result.loss]

    losses = run_ranks(plan_of("tensor parallel"), ADAMW, body)
    assert all(value == losses[0] for value in losses)


def test_a_gradient_changed_by_a_hook_is_what_the_optimizer_gets() -> None:
    def body(session: Session) -> bool:
        before = [p.detach().clone() for _, p in session.model.trained()]

        def silence(it: Session, _: float) -> None:
            for grad in it.gradients().values():
                grad.zero_()

        session.hooks.on_loss.append(silence)
        session.step()
        after = [p for _, p in session.model.trained()]
        return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    workload = workload_with(optimizer="SGD", optimizer_args={"lr": 1.0})
    assert all(run_ranks(plan_of("pipeline and replicas"), workload, body))


def test_a_stop_that_one_rank_wishes_is_seen_by_all_after_the_same_step() -> None:
    plan = plan_of("pipeline and replicas")

    def entry(transport: Any) -> list[bool]:
        session = Session(
            plan=trained_as(plan, ADAMW),
            workload=ADAMW,
            folder=HERE,
            transport=transport,
            should_stop=lambda: transport.rank == 3 and session.step_count == 1,
        )
        return [result.stop for result in session.steps(3)]

    assert InProcessWorld(plan.devices).run(entry) == [[False, True, False]] * plan.devices


def test_spans_tell_when_each_instruction_ran() -> None:
    def body(session: Session) -> None:
        result = session.step(timed=True)
        row = session.program.instructions[session.rank]
        assert [span.index for span in result.spans] == list(range(len(row)))
        times = [t for span in result.spans for t in (span.start_s, span.end_s)]
        assert times == sorted(times)
        assert session.step().spans == []

    run_ranks(plan_of("pipeline and replicas"), ADAMW, body)


# --- refusals -------------------------------------------------------------------------------


def nothing(_: Session) -> None:
    pass


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(
        InvalidInputError, match="the plan is for 6 ranks, 7 were started"
    ) as caught:
        run_ranks(plan_of("pipeline and replicas"), ADAMW, nothing, ranks=7)
    assert caught.value.hint == "start 6 ranks, or solve with --devices 7"


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"optimizer": "AdamX"}, "torch.optim has no optimizer 'AdamX'"),
        ({"optimizer": "Optimizer2"}, "has no optimizer 'Optimizer2'"),
        ({"optimizer": "lr_scheduler"}, "has no optimizer 'lr_scheduler'"),
        ({"optimizer": "LBFGS"}, "LBFGS needs whole parameters on every rank"),
        ({"optimizer": "Adafactor"}, "Adafactor needs whole parameters on every rank"),
        ({"optimizer_args": {"rate": 1}}, r"train.optimizer_args: AdamW takes no 'rate'"),
        ({"optimizer_args": {"lr": -1.0}}, "train.optimizer_args: AdamW: Invalid learning rate"),
    ],
)
def test_a_wrong_optimizer_is_one_clear_error(train: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        run_ranks(plan_of("tensor parallel"), workload_with(**train), nothing)
    assert caught.value.hint


def test_a_factory_with_another_number_of_blocks_is_refused() -> None:
    modules = dict(ADAMW.modules)
    modules["v"] = modules["v"].model_copy(update={"args": {"blocks": 5}})
    workload = ADAMW.model_copy(update={"modules": modules})
    message = r"modules\.v: the factory makes 5 blocks, the plan has 4"
    with pytest.raises(InvalidInputError, match=message):
        run_ranks(plan_of("one rank"), workload, nothing)


def test_a_checkpoint_of_another_workload_is_refused_by_name(tmp_path: Path) -> None:
    units = [unit("v", "a", blocks=2), unit("w", "b")]
    losses = [loss("contrastive", "v", "w", sync_batch=12)]
    plan = make_plan(*units, losses=losses, batch=BATCH)
    workload = make_workload(units, losses, batch=BATCH)
    path = run_ranks(plan, workload, lambda session: session.save(tmp_path))[0]
    with pytest.raises(InvalidInputError, match=r"holds no t\.0\.0\.weight \(param\)"):
        run_ranks(plan_of("one rank"), ADAMW, lambda session: session.load(path))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["v.1", "t", "u"], r"v\.1 is asked for, but v returns no tuple"),
        (["v", "t.0", "u"], r"t\.0 is asked for, but t returns no tuple"),
    ],
)
def test_an_element_that_does_not_exist_is_named(inputs: list[str], message: str) -> None:
    losses = [loss("contrastive", *inputs, sync_batch=12)]
    units = PLANS["pipeline and replicas"]
    workload = make_workload(units, losses, batch=BATCH, factories=FACTORIES)
    plan = make_plan(*units, losses=losses, batch=BATCH)
    with pytest.raises(RunFailedError, match=message):
        run_ranks(plan, workload, lambda session: session.step())


def test_a_cross_sample_loss_over_a_tuple_is_refused() -> None:
    units = [unit("v", "a", blocks=2, k=2), unit("t", "b")]
    losses = [loss("contrastive", "v", "t", sync_batch=12)]
    args = {"v": {"tuple_output": True}}
    workload = make_workload(units, losses, batch=BATCH, args=args)
    plan = make_plan(*units, losses=losses, batch=BATCH)
    message = r"losses\.contrastive takes v, which does not return one tensor"
    with pytest.raises(RunFailedError, match=message):
        run_ranks(plan, workload, lambda session: session.step())


def test_a_workload_that_is_gone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "workload.yaml"
    plan = plan_of("one rank")
    with pytest.raises(InvalidInputError, match=r"its workload .* is not there"):
        find_workload(plan, tmp_path / "plan.json", None)
    path.write_text("{}")
    assert find_workload(plan, tmp_path / "plan.json", None) == path


@pytest.mark.parametrize("tp", [1, 2])
def test_a_run_with_tensor_parallelism_says_that_async_tp_is_off(tp: int) -> None:
    units = [unit("v", "a", blocks=2, tp=tp)]
    losses = [loss("regression", "v", "target")]
    workload = make_workload(units, losses, batch=BATCH)
    plan = make_plan(*units, losses=losses, batch=BATCH)
    for notes in run_ranks(plan, workload, lambda session: session.notes):
        assert len(notes) == tp - 1
        assert all(note.startswith("async TP off: ") and "cpu" in note for note in notes)


def test_a_run_says_once_which_module_was_built_whole() -> None:
    units = [unit("v", "a", blocks=3, pp=3)]
    losses = [loss("regression", "v", "target")]
    workload = make_workload(units, losses, batch=BATCH)
    module = workload.modules["v"].model_copy(
        update={"factory": "tests.deferred_models:looks", "args": {"width": WIDTH}}
    )
    workload = workload.model_copy(update={"modules": {"v": module}})
    plan = make_plan(*units, losses=losses, batch=BATCH)
    for notes in run_ranks(plan, workload, lambda session: session.notes):
        (note,) = notes
        assert note.startswith("modules.v: ")
        assert note.endswith("it looks at random numbers")


def test_a_session_is_made_on_the_ranks_own_device() -> None:
    """Shapes are inferred where the weights are, which need not be the CPU."""
    plan = plan_of("pipeline and replicas")

    def entry(transport: Any) -> set[str]:
        transport.device = torch.device("meta")
        plan_, workload = trained_as(plan, ADAMW), ADAMW
        session = Session(plan=plan_, workload=workload, folder=HERE, transport=transport)
        return {tensor.device.type for tensor in session.model.tensors()}

    assert InProcessWorld(plan.devices).run(entry) == [{"meta"}] * plan.devices


def test_times_are_the_transports_and_asked_for_once_a_step() -> None:
    """On CUDA they are events: to wait inside a step can hang it."""
    plan = plan_of("pipeline and replicas")

    def entry(transport: Any) -> tuple[list[int], int, int]:
        marks, asked = list[int](), list[int]()
        transport.mark = lambda: marks.append(len(marks)) or marks[-1]
        transport.seconds_of = lambda found: (
            asked.append(len(found)) or [0.5 * mark for mark in found]
        )
        session = Session(
            plan=trained_as(plan, ADAMW), workload=ADAMW, folder=HERE, transport=transport
        )
        assert session.step().spans == []
        # The update's.
        assert (len(marks), asked) == (2, [2])
        marks.clear()
        asked.clear()
        spans = session.forward_backward(timed=True).spans
        row = session.program.instructions[transport.rank]
        assert [(s.start_s, s.end_s) for s in spans] == [
            (0.5 + index, 1.0 + index) for index in range(len(row))
        ]
        return asked, len(marks), 1 + 2 * len(row)

    for asked, marks, expected in InProcessWorld(plan.devices).run(entry):
        assert asked == [marks] == [expected]


def test_an_error_of_the_data_names_rank_and_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, load = step_indices(range(2 * BATCH), BATCH, 3, 0)[-1], Samples.__getitem__

    def broken(samples: Samples, index: int) -> Any:
        if index == bad:
            raise ValueError("bad jpeg")
        return load(samples, index)

    monkeypatch.setattr(Samples, "__getitem__", broken)
    said = rf"^rank 0: dataset\[{bad}\] raised ValueError: bad jpeg$"
    with pytest.raises(RunFailedError, match=said):
        run_ranks(plan_of("one rank"), ADAMW, Session.step)
