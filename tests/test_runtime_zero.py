"""ZeRO-1: state cut over replicas, the same training, checkpoints for any other plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.session.session import Session
from mmlaunch.session.verify import compare
from mmplan.errors import InvalidInputError
from mmplan.program.compile import compile_plan
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.gloo_entries import gradients_and_resume
from tests.launching import launched
from tests.matrix_cases import Case, small_case
from tests.programs import loss, make_plan, trained_as, unit
from tests.selection import some
from tests.training import plain, train_alone, train_planned, worst_difference
from tests.verification import HERE, make_workload, verify_in_process

ADAMW = {"optimizer": "AdamW", "optimizer_args": {"lr": 0.01, "weight_decay": 0.1}}


pytestmark = pytest.mark.usefixtures("small_buckets")


def _workload(case: Case, **train: Any) -> Workload:
    workload = case.workload()
    fields = {**ADAMW, "zero": 1, **train}
    return workload.model_copy(update={"train": workload.train.model_copy(update=fields)})


# Both towers on the same two replicas; and bf16 in messages and in sums of tensor parallelism.
_REPLICAS = small_case(dp=2, feature="colocated")
_CUT = small_case(tp=2, feature="colocated")
_PIPELINE = small_case(pp=2, feature="colocated")
GLOO = [
    (_REPLICAS.plan(), _workload(_REPLICAS)),
    (_CUT.plan(), _workload(_CUT, precision="bf16")),
    (_PIPELINE.plan(), _workload(_PIPELINE, precision="bf16")),
]


@pytest.mark.parametrize(
    ("feature", "dp", "tp"),
    some(
        [
            ("plain", 1, 1),
            ("tied", 2, 1),
            ("tied", 3, 1),
            ("frozen-range", 2, 2),
            ("frozen-tower", 3, 1),
            ("shared", 2, 2),
            ("regression", 3, 2),
            ("ragged", 2, 1),
        ],
        *(2, 3, 5, 7),
    ),
)
def test_gradients_of_all_slices_equal_one_process(feature: str, dp: int, tp: int) -> None:
    case = small_case(dp=dp, tp=tp, feature=feature)
    verdict = verify_in_process(case.plan(), _workload(case))
    assert not verdict.differences, verdict.differences[:5]


@pytest.mark.parametrize(
    ("optimizer", "dp", "tp"),
    some([("AdamW", 3, 2), ("Adagrad", 2, 2), ("SGD", 3, 1), ("NAdam", 2, 1)], 0),
)
def test_three_steps_equal_plain_torch(optimizer: str, dp: int, tp: int) -> None:
    case = small_case(dp=dp, tp=tp, feature="regression")
    workload = _workload(case, optimizer=optimizer, optimizer_args={"lr": 0.01})
    sliced = train_planned(case.plan(), workload, 3)
    alone = train_alone(case.plan(), workload, 3, plain(workload))
    # Steps divide by the gradient's size: where that is tiny, rounding grows.
    assert worst_difference(sliced.weights, alone.weights) < 1e-9
    whole = train_planned(case.plan(), _workload(case, zero=0, **_only(workload)), 3)
    assert worst_difference(sliced.weights, whole.weights) == 0.0
    assert sliced.losses == whole.losses


def _only(workload: Workload) -> dict[str, Any]:
    train = workload.train
    return {"optimizer": train.optimizer, "optimizer_args": train.optimizer_args}


def test_each_rank_holds_its_share_of_the_state() -> None:
    case = small_case(dp=3, others="single")
    held: list[int] = []

    def count(session: Session) -> None:
        names = {part.name for part in session.update.slices if part.name.startswith("v.")}
        state = {} if session.optimizer is None else session.optimizer.state
        sizes = [
            state[part.tensor]["exp_avg"].numel()
            for part in session.update.slices
            if part.name in names and part.tensor in state
        ]
        if any(stage.module == "v" for stage in session.program.stages_of(session.rank)):
            held.append(sum(sizes))

    train_planned(case.plan(), _workload(case), 1, after=count)
    sizes = [
        p.numel()
        for name, p in _parameters(case).items()
        if name.startswith("v.") and p.requires_grad
    ]
    total = sum(sizes)
    assert len(held) == 3
    assert sum(held) == total
    # Each bucket is cut apart, so a share may be larger by an element of each.
    assert max(held) <= total // 3 + len(sizes)


def _parameters(case: Case) -> dict[str, Any]:
    from mmlaunch.session.reference import Reference

    program = compile_plan(case.plan())
    return Reference(workload=case.workload(), folder=HERE, program=program).named_parameters()


def _towers(options: dict[str, Any]) -> tuple[Plan, Workload]:
    """Two towers of three blocks, of which the first one has a tie, in any degrees."""
    degrees: dict[str, Any] = {name: value for name, value in options.items() if name != "zero"}
    untied: dict[str, Any] = {**degrees, "tp": 1}
    units = [
        unit("v", "a", blocks=3, k=2, **untied),
        unit("t", "b", blocks=3, k=2, **degrees),
    ]
    losses = [
        loss("contrastive", "v", "t", sync_batch=12),
        loss("regression", "t", "target", weight=0.7),
    ]
    workload = make_workload(
        units, losses, batch=12, factories={"v": "tied"}, train={**ADAMW, "zero": options["zero"]}
    )
    return make_plan(*units, losses=losses, batch=12), workload


def _save_after(plan: Plan, workload: Workload, steps: int, folder: Path) -> Path:
    paths: list[Path] = []
    train_planned(plan, workload, steps, after=lambda s: paths.append(s.save(folder)))
    return paths[0]


@pytest.mark.parametrize(
    ("saved", "resumed"),
    some(
        [
            ({"dp": 3, "zero": 1}, {"dp": 2, "zero": 0}),
            ({"dp": 2, "zero": 0}, {"dp": 3, "zero": 1}),
            ({"dp": 3, "zero": 1, "tp": 2}, {"dp": 2, "zero": 1, "pp": 2}),
            ({"dp": 2, "zero": 1, "pp": 2}, {"dp": 3, "zero": 1, "tp": 2}),
        ],
        2,
    ),
)
def test_a_checkpoint_of_slices_resumes_under_any_other_plan(
    saved: dict[str, Any], resumed: dict[str, Any], tmp_path: Path
) -> None:
    path = _save_after(*_towers(saved), 2, tmp_path / "checkpoints")
    plan, workload = _towers(resumed)
    went_on = train_planned(plan, workload, 4, before=lambda s: s.load(path))
    # The order of samples in replicas is the plan's: the sum differs in its last bits.
    alone = train_alone(plan, workload, 4, plain(workload))
    assert went_on.losses == pytest.approx(alone.losses[2:], rel=1e-9)
    assert worst_difference(went_on.weights, alone.weights) < 1e-9


def test_a_checkpoint_of_slices_goes_on_bit_for_bit_without_them(tmp_path: Path) -> None:
    case = small_case(dp=3, tp=2, feature="regression")
    path = _save_after(case.plan(), _workload(case), 2, tmp_path / "checkpoints")
    unbroken = train_planned(case.plan(), _workload(case), 4)
    for stage in (0, 1):
        went_on = train_planned(
            case.plan(), _workload(case, zero=stage), 4, before=lambda s: s.load(path)
        )
        assert went_on.losses == unbroken.losses[2:]
        assert worst_difference(went_on.weights, unbroken.weights) == 0.0


def test_an_optimizer_that_needs_whole_parameters_is_refused() -> None:
    case = small_case(dp=2)
    workload = _workload(case, optimizer="Adafactor", optimizer_args={})
    with pytest.raises(InvalidInputError, match="Adafactor needs whole parameters"):
        InProcessWorld(case.plan().devices).run(
            lambda transport: Session(
                plan=trained_as(case.plan(), workload),
                workload=workload,
                folder=HERE,
                transport=transport,
            )
        )


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any], Path]:
    """``[rank][case]`` gradients, and a run that is saved and resumed, on two processes."""
    folder = tmp_path_factory.mktemp("gloo")
    found = launched(
        gradients_and_resume,
        (GLOO, folder / "checkpoints"),
        num_ranks=2,
        run_dir=folder / "run",
        timeout_s=120.0,
    )
    return [f[0] for f in found], [f[1] for f in found], folder / "checkpoints"


@pytest.mark.parametrize("index", [0, 1, 2])
def test_two_processes_over_gloo_equal_one(
    index: int, over_gloo: tuple[list[Any], list[Any], Path]
) -> None:
    gradients, _, _ = over_gloo
    plan, workload = GLOO[index]
    verdict = compare(workload, HERE, compile_plan(plan), [rank[index] for rank in gradients])
    assert not verdict.differences, verdict.differences[:5]
    if index == 0:
        assert all(any(w.span for w in rank[index].elements.values()) for rank in gradients)


def test_slices_over_gloo_train_and_resume(
    over_gloo: tuple[list[Any], list[Any], Path],
) -> None:
    _, reports, folder = over_gloo
    for report in reports:
        assert report["losses"][0] == report["losses"][1]
        assert report["step"] == 3
    plan, workload = GLOO[0]
    alone = train_alone(plan, workload, 3, plain(workload))
    weights = load_file(folder / "resumed.safetensors")
    assert worst_difference(weights, alone.weights) < 1e-9
