"""Scalability curves and the imbalance of memory in the report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmplan.errors import InvalidInputError
from mmplan.reporting.report_page import write_report
from mmplan.reporting.sections.scaling import envelope, envelope_s
from mmplan.reporting.source import load_source
from mmplan.schema.base import save_document
from mmplan.schema.load import load_plan
from mmplan.schema.plan import Plan, ScalingCurve
from tests.solving import run_solve
from tests.test_mpsp_plans import shared_encoder_costs, shared_encoders


def made(folder: Path, **options: object) -> Plan:
    plan = run_solve(folder, shared_encoders(), shared_encoder_costs(4), budget_s=0.1, **options)
    save_document(plan, folder / "plan.json")
    return plan


def page(folder: Path) -> str:
    write_report(load_source(folder / "plan.json"), folder / "report.html")
    return (folder / "report.html").read_text(encoding="utf-8")


def test_every_metaop_has_a_picture_with_its_breaks(tmp_path: Path) -> None:
    plan = made(tmp_path, solver="mpsp")
    names = {f"{unit.task}.{unit.module}" for unit in plan.units}
    assert {own.name for own in plan.solver.curves} == names
    for own in plan.solver.curves:
        assert list(own.seconds) == sorted(own.seconds, reverse=True)
    text = page(tmp_path)
    for name in names:
        assert re.search(rf"aria-label=\"{name}: seconds on each number of devices; breaks", text)


def test_plans_of_other_solvers_have_no_curves(tmp_path: Path) -> None:
    plan = made(tmp_path, solver="distmm", tasks=["VT"])
    assert not plan.solver.curves
    assert "Scalability of every MetaOp" not in page(tmp_path)


def test_memory_says_how_uneven_it_is(tmp_path: Path) -> None:
    plan = made(tmp_path, solver="mpsp")
    held = plan.predicted.memory_bytes
    imbalance = max(held) / (sum(held) / len(held)) if sum(held) else 1.0
    assert f"{imbalance:.2f} times the mean of all ranks (imbalance)" in page(tmp_path)


def test_the_envelope_skips_numbers_that_time_sharing_beats() -> None:
    """On 2 devices hardly faster, on 4 much: 2 is no corner. Speed 1/2 on 4, 1/8 a device."""
    own = ScalingCurve(name="t.m", devices=(1, 2, 4), seconds=(8.0, 7.9, 2.0))
    assert envelope(own) == ([4.0], [pytest.approx(2.0)])
    assert envelope_s(own, 2) == pytest.approx(4.0)
    bent = ScalingCurve(name="t.m", devices=(1, 2, 4), seconds=(8.0, 4.0, 3.0))
    assert envelope(bent)[0] == [2.0, 4.0]
    assert envelope_s(bent, 3) == pytest.approx(1 / ((1 / 4 + 1 / 3) / 2))


@pytest.mark.parametrize(
    ("curve", "text"),
    [
        ({"name": "a", "devices": [1, 2], "seconds": [3.0]}, "2 devices, 1 seconds"),
        ({"name": "a", "devices": [2, 2], "seconds": [3.0, 2.0]}, "devices must increase"),
        ({"name": "a", "devices": [], "seconds": []}, "devices"),
        ({"name": "a", "devices": [1], "seconds": [0.0]}, "seconds"),
    ],
)
def test_wrong_curves_are_refused(tmp_path: Path, curve: dict[str, object], text: str) -> None:
    import json

    made(tmp_path, solver="mpsp")
    document = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    document["solver"]["curves"] = [curve]
    (tmp_path / "plan.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(InvalidInputError, match=text):
        load_plan(tmp_path / "plan.json")
