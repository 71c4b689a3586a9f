"""Parameters of one module under several tensor-parallel degrees, against one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from mmlaunch.checkpoint.restore import open_checkpoint
from mmlaunch.model.tensor_parallel import TPGroups
from mmlaunch.session.session import Session
from mmlaunch.session.verify import compare
from mmplan.errors import InvalidInputError, RunFailedError
from mmplan.program.checks.check import check_program
from mmplan.program.compile import compile_plan
from mmplan.program.instructions import Collective, Op
from mmplan.program.model import BlockReduction, LossReduction, Program
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload
from tests.gloo_entries import gradients, gradients_and_resume
from tests.launching import launched
from tests.mixed_tp_cases import MIXED, random_case
from tests.plants import without
from tests.programs import loss, unit
from tests.training import plain, train_alone, train_planned, worst_difference
from tests.verification import HERE, TOLERANCE, verify_in_process, verify_units

CLIP = 0.05
ADAMW: dict[str, Any] = {
    "optimizer": "AdamW",
    "optimizer_args": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4},
}
TP_3_AND_2 = "5 ranks: tp 3 and tp 2"
TP_4_AND_1 = "5 ranks: tp 4 and tp 1"
TP_2_AND_1 = "3 ranks: tp 2 and tp 1"
SEVERAL = "7 ranks: tp 2, tp 4 and tp 1"
ONE_LLM = "one model, other inputs in each task"
DP_ON_TP = "2 ranks: tp 2 and dp 2"
CROWDED = "4 ranks: tp 4, tp 2 and dp 3"


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        (name, zero) if (index + zero) % 2 else _slow(name, zero)
        for index, name in enumerate(MIXED)
        for zero in (0, 1)
    ],
)
def test_gradients_equal_one_process(name: str, zero: int) -> None:
    case = MIXED[name]
    assert not check_program(compile_plan(case.plan()))
    verdict = verify_in_process(case.plan(), case.workload(zero=zero))
    assert not verdict.differences, verdict.differences[:5]
    assert verdict.worst <= TOLERANCE["fp64"]
    assert verdict.compared > 8


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_programs_of_any_slices_have_no_faults_and_miss_none_of_their_sums(
    seed: int, crowded: bool
) -> None:
    program = compile_plan(random_case(seed, crowded=crowded).plan())
    assert check_program(program) == []
    sums = [r.index for r in program.block_reductions if len(r.ranks) > 1]
    for index in sums[:: max(1, len(sums) // 4)]:
        assert check_program(_without_reduction(program, index)), index


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("seed", [0, 1, *map(_slow, range(2, 16))])
def test_gradients_of_any_slices_equal_one_process(seed: int, crowded: bool) -> None:
    case = random_case(seed, crowded=crowded)
    verdict = verify_in_process(case.plan(), case.workload(zero=seed % 2))
    assert not verdict.differences, verdict.differences[:5]


@pytest.mark.parametrize(
    ("name", "zero"),
    [(TP_2_AND_1, 1), (CROWDED, 0), *map(_slow, (TP_3_AND_2, SEVERAL, ONE_LLM), (0, 1, 0))],
)
def test_bf16_gradients_are_as_near_as_rounding_allows(name: str, zero: int) -> None:
    case = MIXED[name]
    verdict = verify_in_process(case.plan(), case.workload(precision="bf16", zero=zero))
    assert not verdict.differences, verdict.differences[:5]
    assert 0 < verdict.share < 1


def _clipped(parameters: dict[str, nn.Parameter]) -> Callable[[int], float | None]:
    """The update of ADAMW and CLIP in torch's own words."""
    optimizer = torch.optim.AdamW(parameters.values(), **ADAMW["optimizer_args"])

    def update(_: int) -> float | None:
        norm = nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        optimizer.step()
        return norm.item()

    return update


def _identical(session: Session) -> None:
    """Every rank's part of every weight is that part of the gathered one, bit for bit."""
    full = session.evaluate(lambda modules: {n: m.state_dict() for n, m in modules.items()})
    full = session.transport.broadcast_object(full, 0)
    for name, parameter in session.model.named_parameters():
        owner, rest = name.split(".", 1) if not name.startswith("losses.") else ("", "")
        if owner:
            place = session.model.layouts.get(name)
            whole = full[owner][rest]
            assert torch.equal(parameter, whole if place is None else place.take(whole)), name


@pytest.mark.parametrize(
    ("name", "zero", "recompute"),
    [
        (TP_2_AND_1, 0, "full"),
        _slow(TP_2_AND_1, 1, "none"),
        _slow(TP_3_AND_2, 1, "full"),
        (SEVERAL, 1, "none"),
        _slow(SEVERAL, 0, "none"),
        _slow(ONE_LLM, 1, "full"),
        _slow("frozen in one task", 1, "none"),
        ("one degree, other partners", 1, "full"),
        (DP_ON_TP, 1, "full"),
        (CROWDED, 0, "none"),
        _slow(CROWDED, 1, "full"),
    ],
)
def test_three_steps_equal_plain_torch(name: str, zero: int, recompute: str) -> None:
    case = MIXED[name]
    workload = case.workload(zero=zero, recompute=recompute, clip_grad_norm=CLIP, **ADAMW)
    planned = train_planned(case.plan(), workload, 3, after=_identical)
    alone = train_alone(case.plan(), workload, 3, _clipped)
    assert planned.losses == pytest.approx(alone.losses, rel=1e-12)
    # Each element counts once, on whichever ranks it is held.
    assert planned.norms == pytest.approx(alone.norms, rel=1e-11)
    assert all(norm is not None and norm > CLIP for norm in alone.norms)
    assert worst_difference(planned.weights, alone.weights) < 1e-12


def _numbers(plan: Plan, workload: Workload, folder: Path) -> dict[tuple[str, str], int]:
    """Elements stored of every tensor after a step, by (kind, name); kept in ``folder``."""
    paths: list[Path] = []
    train_planned(plan, workload, 2, after=lambda s: paths.append(s.save(folder)))
    checkpoint = open_checkpoint(paths[0])
    stored = checkpoint.manifest.tensors
    checkpoint.close()
    for tensor in stored:
        assert sum(prod(box.sizes) for box in tensor.boxes) == prod(tensor.shape), tensor.name
    return {(tensor.kind, tensor.name): prod(tensor.shape) for tensor in stored}


@pytest.mark.parametrize(
    ("saved", "zero", "resumed", "later_zero"),
    [
        _slow(TP_2_AND_1, 0, "4 ranks: tp 2 and dp 2", 1),
        ("4 ranks: tp 2 and dp 2", 1, "one degree, other partners", 0),
        _slow("one degree, other partners", 1, TP_2_AND_1, 1),
        (TP_4_AND_1, 1, TP_3_AND_2, 1),
        _slow(TP_3_AND_2, 0, TP_4_AND_1, 0),
        (DP_ON_TP, 1, TP_2_AND_1, 0),
        _slow(TP_2_AND_1, 1, "2 ranks: shards in the other order", 1),
    ],
)
def test_a_checkpoint_holds_each_element_once_and_resumes_under_other_degrees(
    saved: str, zero: int, resumed: str, later_zero: int, tmp_path: Path
) -> None:
    first, then = MIXED[saved], MIXED[resumed]
    numbers = _numbers(first.plan(), first.workload(zero=zero, **ADAMW), tmp_path)
    names = {name for kind, name in numbers if kind == "param"}
    assert {name for kind, name in numbers if kind == "optim.exp_avg"} == names
    workload = then.workload(zero=later_zero, **ADAMW)
    went_on = train_planned(then.plan(), workload, 4, before=lambda s: s.load(tmp_path / "step-2"))
    alone = train_alone(then.plan(), workload, 4, plain(workload))
    assert went_on.losses == pytest.approx(alone.losses[2:], rel=1e-9)
    assert worst_difference(went_on.weights, alone.weights) < 1e-9


@pytest.mark.parametrize("name", [TP_2_AND_1, _slow(TP_3_AND_2), _slow(SEVERAL)])
def test_zero_spreads_the_state_over_all_holders_of_a_part(name: str) -> None:
    case = MIXED[name]
    held: Counter[str] = Counter()

    def count(session: Session) -> None:
        for part in session.update.slices:
            if part.name.startswith("v.") and part.name in session.model.layouts:
                assert session.optimizer is not None
                held[part.name] += session.optimizer.state[part.tensor]["exp_avg"].numel()

    train_planned(case.plan(), case.workload(zero=1, **ADAMW), 1, after=count)
    full: dict[str, int] = {}

    def sizes(session: Session) -> None:
        full.update(
            {n: prod(p.full_shape) for n, p in session.model.layouts.items() if n[:2] == "v."}
        )

    train_planned(case.plan(), case.workload(), 1, after=sizes)
    assert held == full


def _without_reduction(program: Program, index: int) -> Program:
    """No rank runs it: nobody waits, and only its sums are missing."""
    gone = Collective(Op.REDUCE, index)
    program = without(program, lambda _, item: item == gone)
    # A stand-in, so that the others keep their numbers.
    reductions = list(program.reductions)
    reductions[index] = LossReduction(index=index, owner="none", ranks=())
    return replace(program, reductions=tuple(reductions))


def _changed(program: Program, index: int, **changes: Any) -> Program:
    reductions = list(program.reductions)
    reductions[index] = replace(reductions[index], **changes)
    return replace(program, reductions=tuple(reductions))


@pytest.mark.parametrize("name", [_slow(TP_3_AND_2), "4 ranks: tp 2 and dp 2"])
def test_one_dropped_sum_is_seen_by_check_and_by_verify(name: str) -> None:
    case = MIXED[name]
    program = compile_plan(case.plan())
    sums = [r for r in program.block_reductions if r.owner == "v"]
    assert {r.parameters for r in sums} == {"cut", "whole"}
    for index in (r.index for r in sums):
        planted = _without_reduction(program, index)
        assert any("blocks [0,2) of v" in fault for fault in check_program(planted)), index
        verdict = verify_in_process(
            case.plan(), case.workload(), change=lambda p, i=index: _without_reduction(p, i)
        )
        wrong = {difference.name.split(".", 2)[2] for difference in verdict.differences}
        reduction = program.reductions[index]
        assert isinstance(reduction, BlockReduction)
        cut = reduction.parameters == "cut"
        assert wrong & ({"gate_up.weight", "up.weight"} if cut else {"norm.weight"}), index


@pytest.mark.parametrize("name", [TP_2_AND_1, _slow(SEVERAL)])
def test_a_whole_parameter_brought_twice_is_seen_by_check_and_by_verify(name: str) -> None:
    case = MIXED[name]
    program = compile_plan(case.plan())
    whole = [r for r in program.block_reductions if r.parameters == "whole"]
    assert all(set(r.contributors) < set(r.ranks) for r in whole)
    for found in whole:
        for ranks in (found.ranks, found.contributors[1:]):
            planted = _changed(program, found.index, contributors=ranks)
            assert any("tp leaves whole" in fault for fault in check_program(planted))
            verdict = verify_in_process(
                case.plan(),
                case.workload(),
                change=lambda p, i=found.index, r=ranks: _changed(p, i, contributors=r),
            )
            assert any("norm.weight" in item.name for item in verdict.differences)


@pytest.mark.parametrize("name", [DP_ON_TP, _slow(CROWDED)])
def test_whole_parameters_that_later_ranks_bring_too_are_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TPGroups, "leave_out", lambda *_: None)
    verdict = verify_in_process(MIXED[name].plan(), MIXED[name].workload())
    assert any("norm.weight" in item.name for item in verdict.differences)
    assert not any("down.weight" in item.name for item in verdict.differences)


def test_a_tie_over_a_block_that_a_rank_runs_as_two_shards_is_refused() -> None:
    case = MIXED[DP_ON_TP]
    units = [replace(u, blocks=3, cuts=None) if u.module == "v" else u for u in case.units]
    tied = replace(case, units=units, factories={"v": "tied"})
    with pytest.raises(InvalidInputError, match=r"modules\.v: blocks 0, 2 share a parameter"):
        verify_in_process(tied.plan(), tied.workload())


def test_a_split_backward_of_a_block_that_a_rank_runs_as_two_shards() -> None:
    units = [
        unit("v", "a", tp=2, ranks=[[[0, 1]]], blocks=2, k=2, kind="1f1b", split=True),
        unit("t", "v", share="v", dp=2, ranks=[[[0]], [[1]]], blocks=2, kind="1f1b", split=True),
    ]
    verdict = verify_units(units, [loss("regression", "t", "target")], batch=8)
    assert not verdict.differences, verdict.differences[:5]


def test_a_sum_over_a_rank_that_lacks_the_shard_is_seen() -> None:
    program = compile_plan(MIXED[TP_2_AND_1].plan())
    found = next(r for r in program.block_reductions if r.parameters == "cut")
    planted = _changed(program, found.index, ranks=(0, 1, 2))
    assert any("ranks [1] do not hold blocks [0,2) of v" in x for x in check_program(planted))


def test_blocks_that_kept_their_first_partners_would_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the case of other partners is there for."""
    monkeypatch.setattr(TPGroups, "enter", lambda *_: None)
    case = MIXED["one degree, other partners"]
    with pytest.raises(RunFailedError, match=r"wait for each other|different tensors"):
        verify_in_process(case.plan(), case.workload())


@pytest.mark.slow
def test_three_processes_over_gloo_equal_one(tmp_path: Path) -> None:
    names = [(TP_2_AND_1, 0), ("a modality that another task lacks", 1), (DP_ON_TP, 1)]
    cases = [(MIXED[name].plan(3), MIXED[name].workload(zero=zero)) for name, zero in names]
    found = launched(gradients, (cases,), num_ranks=3, run_dir=tmp_path / "run", timeout_s=90.0)
    for index, (plan, workload) in enumerate(cases):
        verdict = compare(workload, HERE, compile_plan(plan), [rank[index] for rank in found])
        assert not verdict.differences, verdict.differences[:5]


GLOO: list[tuple[str, dict[str, Any]]] = [
    ("4 ranks: tp 2 and dp 2", {"zero": 0, **ADAMW}),
    (ONE_LLM, {"zero": 1, **ADAMW}),
    (TP_2_AND_1, {"zero": 1, "precision": "bf16"}),
    ("2 ranks: a slice each, dp 2 in the middle", {"zero": 0}),
    (CROWDED, {"zero": 1}),
    (DP_ON_TP, {"zero": 0}),
]


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any], Path]:
    """``[rank][case]`` gradients, and a run that is saved and resumed, on four processes."""
    folder = tmp_path_factory.mktemp("gloo")
    cases = [(MIXED[name].plan(4), MIXED[name].workload(**train)) for name, train in GLOO]
    found = launched(
        gradients_and_resume,
        (cases, folder / "checkpoints"),
        num_ranks=4,
        run_dir=folder / "run",
        timeout_s=120.0,
    )
    return [f[0] for f in found], [f[1] for f in found], folder / "checkpoints"


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(GLOO)))
def test_processes_over_gloo_equal_one(
    index: int, over_gloo: tuple[list[Any], list[Any], Path]
) -> None:
    name, train = GLOO[index]
    workload, program = MIXED[name].workload(**train), compile_plan(MIXED[name].plan(4))
    verdict = compare(workload, HERE, program, [rank[index] for rank in over_gloo[0]])
    assert not verdict.differences, verdict.differences[:5]


@pytest.mark.slow
def test_processes_over_gloo_train_and_resume(
    over_gloo: tuple[list[Any], list[Any], Path],
) -> None:
    _, reports, folder = over_gloo
    for report in reports:
        assert report["losses"][0] == report["losses"][1]
    name, train = GLOO[0]
    workload = MIXED[name].workload(**train)
    alone = train_alone(MIXED[name].plan(4), workload, 3, plain(workload))
    weights = load_file(folder / "resumed.safetensors")
    assert worst_difference(weights, alone.weights) < 1e-9
