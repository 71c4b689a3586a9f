"""What the command line does, as typed calls; and results that show themselves."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import mmplan
from mmplan import errors
from mmplan.errors import InvalidInputError
from tests.commands import ROOT, call
from tests.pages import Page
from tests.solving import module_profile, profile, workload

JOB = workload({"a": {}, "b": {}}, batch=4)
NOTEBOOK = ROOT / "docs" / "planning.ipynb"


def costs(devices: int, **cluster: Any) -> mmplan.Profile:
    return profile({n: module_profile(blocks=2) for n in "ab"}, devices, **cluster)


@pytest.fixture(scope="module")
def planned() -> mmplan.Planned:
    return mmplan.solve(JOB, costs(4), solver="distmm")


def test_every_name_is_there() -> None:
    assert all(getattr(mmplan, name) is not None for name in mmplan.__all__)
    assert set(mmplan.__all__) < set(dir(mmplan))
    with pytest.raises(AttributeError, match="no attribute 'plan'"):
        mmplan.plan  # noqa: B018


def test_a_plan_made_of_objects_is_saved_with_its_sources(
    planned: mmplan.Planned, tmp_path: Path
) -> None:
    saved = planned.save(tmp_path / "plan.json")
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"plan.json", "plan.workload.json", "plan.profile.json"}
    assert saved.certificate is not None
    read = mmplan.load(tmp_path / "plan.json")
    assert isinstance(read, mmplan.Planned)
    assert read.plan == saved.plan
    for plan in (read, planned, tmp_path / "plan.json"):
        assert mmplan.check(plan).faults == ()
        assert mmplan.simulate(plan).predicted == planned.plan.predicted
    assert mmplan.diff(planned, read).changes == ()


def test_results_show_themselves(
    planned: mmplan.Planned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared = mmplan.compare(JOB, costs(4), solvers=["distmm", "megatron"])
    fewer = mmplan.solve(JOB, costs(4), devices=2, solver="distmm")
    shown = {
        "distmm": (planned, True),
        "megatron": (compared, True),
        "0.0%": (mmplan.simulate(planned), True),
        "binds": (mmplan.explain(planned), False),
        "no faults": (mmplan.check(planned), False),
        "devices": (mmplan.diff(planned, fewer), False),
    }
    for word, (result, has_picture) in shown.items():
        page = Page(result._repr_html_())
        assert page.open == []
        assert bool(page.of("svg")) == has_picture
        assert word in repr(result)
        assert word in page.text
    mmplan.report(planned, tmp_path / "report.html")
    assert "distmm" in (tmp_path / "report.html").read_text()
    assert capsys.readouterr() == ("", "")


def test_diff_of_the_command_line(planned: mmplan.Planned, tmp_path: Path) -> None:
    files = tmp_path / "a.json", tmp_path / "b.json"
    planned.save(files[0])
    mmplan.solve(JOB, costs(4), devices=2, solver="distmm").save(files[1])
    assert re.search(r"devices +4 +2", call("mmplan", "diff", *files).out)
    assert "the plans are the same" in call("mmplan", "diff", files[0], files[0]).out


def test_versions() -> None:
    for program in ("mmplan", "mmlaunch"):
        assert call(program, "--version").out == f"{program} {mmplan.__version__}\n"


def test_a_misspelt_optional_field_gets_its_suggestion(tmp_path: Path) -> None:
    document = JOB.model_dump(mode="json", exclude_none=True)
    document["modules"]["a"]["recompte"] = "full"
    (tmp_path / "w.json").write_text(json.dumps(document))
    with pytest.raises(InvalidInputError) as caught:
        mmplan.load_workload(tmp_path / "w.json")
    assert caught.value.hint == "correct its spelling: recompute"


@pytest.mark.parametrize(
    ("train", "said", "hint"),
    [
        (
            {"callbacks": ["tensorbord"]},
            "train.callbacks.0: must be 'tensorboard' or a mapping of fields, got 'tensorbord'",
            "see docs/schemas/workload.json",
        ),
        (
            {"callbacks": [{"factory": "a:B", "arg": {}}]},
            "train.callbacks.0.arg: unknown field",
            "correct its spelling: args",
        ),
        ({"evaluation": {}}, "train.evaluation: unknown field", "correct its spelling: eval"),
    ],
)
def test_faults_of_an_open_run_say_what_is_taken(
    train: dict[str, Any], said: str, hint: str, tmp_path: Path
) -> None:
    document = JOB.model_dump(mode="json", exclude_none=True)
    document["train"] |= train
    (tmp_path / "w.json").write_text(json.dumps(document))
    with pytest.raises(InvalidInputError) as caught:
        mmplan.load_workload(tmp_path / "w.json")
    assert (caught.value.message, caught.value.hint) == (f"{tmp_path / 'w.json'}: {said}", hint)


def test_a_comparison_has_one_ordinary_way() -> None:
    compared = mmplan.compare(JOB, costs(4), solvers=["distmm", "megatron", "colocated"])
    first, *others = (planned.plan.solver.ordinary for planned in compared.plans.values())
    assert first is not None
    assert all(way == first for way in others)


def test_more_than_the_peak_is_named() -> None:
    modules = {n: module_profile(blocks=2, flops_per_sample=1e15) for n in "ab"}
    shown = repr(mmplan.solve(JOB, profile(modules, 2), solver="distmm"))
    assert "times the peak_flops of a device" in " ".join(shown.split())


def test_what_needs_linux_says_so_and_planning_does_not(
    planned: mmplan.Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned.save(tmp_path / "plan.json")
    monkeypatch.setattr(errors.sys, "platform", "darwin")
    done = call("mmlaunch", "run", tmp_path / "plan.json")
    assert (done.code, done.message) == (4, "mmlaunch run needs Linux, this is darwin")
    assert call("mmplan", "show", tmp_path / "plan.json").code == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_runs_and_says_what_it_shows(tmp_path: Path) -> None:
    """``MMPLAN_GOLDEN=write`` keeps what it says now."""
    import nbformat
    from nbclient import NotebookClient

    (tmp_path / "examples").symlink_to(ROOT / "examples")
    kept = nbformat.read(NOTEBOOK, as_version=4)
    made = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(made, timeout=600, kernel_name="python3", resources=place).execute()
    if os.environ.get("MMPLAN_GOLDEN") == "write":
        for cell in made.cells:
            cell.metadata = {}
        nbformat.write(made, NOTEBOOK)
    for now, then in zip(made.cells, kept.cells, strict=True):
        assert [_headline(item) for item in now.get("outputs", [])] == [
            _headline(item) for item in then.get("outputs", [])
        ]
    assert "<svg" in str(made.cells)


def _headline(output: Any) -> str:
    """The first line: names, no times of this machine."""
    text = output.get("text") or output["data"]["text/plain"]
    return text.strip().partition("\n")[0].rstrip()
