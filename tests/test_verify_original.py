"""``verify --original``: a cut held against the uncut model."""

from __future__ import annotations

import pytest

from mmlaunch.session.original import OriginalVerdict, compare_original
from mmplan.errors import InvalidInputError
from mmplan.program.compile import compile_plan
from tests.programs import loss, make_plan, unit
from tests.verification import HERE, make_workload

UNITS = [unit("v", "a", blocks=3, dp=2, k=2), unit("t", "b", blocks=3)]
LOSSES = [
    loss("contrastive", "v", "t", sync_batch=8),
    loss("regression", "v", "target", weight=0.5),
]


def held(original: str, *, v: str = "encoder", precision: str = "fp32") -> OriginalVerdict:
    """The workload, of which ``v`` is cut in some way, against an original."""
    workload = make_workload(UNITS, LOSSES, batch=16, precision=precision)
    modules = {
        name: spec.model_copy(update={"factory": f"tests.uncut_models:{factory}"})
        for (name, spec), factory in zip(workload.modules.items(), (v, "encoder"), strict=True)
    }
    program = compile_plan(make_plan(*UNITS, losses=LOSSES, batch=16))
    return compare_original(
        workload.model_copy(update={"modules": modules}), HERE, program, original
    )


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("original", ["v=tests.uncut_models:Encoder", "tests.uncut_models:Model"])
def test_a_right_cut_equals_its_original(original: str, precision: str) -> None:
    verdict = held(original, precision=precision)
    assert not verdict.differences, verdict.differences[:5]
    # 12 parameters of a tower; of the whole model both, three of losses, and two losses.
    assert verdict.compared == (13 if "=" in original else 24 + 3 + 2)
    assert verdict.share < 0.5


def test_a_loss_alone_is_the_weighted_sum() -> None:
    assert not held("tests.uncut_models:Total").differences


@pytest.mark.parametrize("cut", ["without_norm", "norm_behind"])
@pytest.mark.parametrize("original", ["v=tests.uncut_models:Encoder", "tests.uncut_models:Model"])
def test_a_wrong_after_is_found(original: str, cut: str) -> None:
    found = held(original, v=cut).differences
    assert {"output", "loss"} & {d.what for d in found}
    wrong = {d.name for d in found if d.what == "gradient"}
    assert "v.2.after.norm.weight" in wrong
    assert not any(name.startswith("t.") for name in wrong) or "=" not in original


@pytest.mark.parametrize(
    ("original", "message"),
    [
        ("w=tests.uncut_models:Encoder", "no module 'w'"),
        ("tests.uncut_models", "no package.module:callable"),
        ("v=tests.uncut_models:Missing", "has no 'Missing'"),
        ("tests.uncut_models:encoder", "raised TypeError"),
        ("v=tests.matrix_models:mean_rows", "raised TypeError"),
        ("v=tests.uncut_models:Narrow", "no parameter of shape .* for v.0.before.embed.weight"),
        ("v=tests.uncut_models:Random", "draws random numbers"),
        ("tests.uncut_models:Encoder", "for t|are both its|no parameter"),
    ],
)
def test_what_cannot_be_compared_is_refused(original: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        held(original)
