"""What the command line does, as typed calls; and results that show themselves."""

from __future__ import annotations

import ast
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


def lines_of_the_page() -> str:
    """The example of each field of each result, of docs/python.md."""
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    _, _, section = text.partition("## What results hold")
    return section.partition("```python\n")[2].partition("```")[0]


def test_the_fields_of_the_page_are_there(
    planned: mmplan.Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parts = {n: module_profile(blocks=2, flops_per_sample=1.0) for n in ("a", "b")}
    given: dict[str, Any] = {
        "mmplan": mmplan,
        "planned": planned,
        "compared": mmplan.compare(JOB, costs(4), devices=4, solvers=["distmm", "megatron"]),
        "explained": mmplan.explain(planned),
        "differing": mmplan.diff(planned, mmplan.solve(JOB, costs(4), devices=2, solver="distmm")),
        "checked": mmplan.check(planned),
        "profile": profile({**parts, "text": parts["a"]}, 4),
    }
    statements = ast.parse(lines_of_the_page()).body
    assert len(statements) > 20
    for statement in statements:
        if isinstance(statement, ast.Expr):
            value = eval(ast.unparse(statement), given)
            assert value or value in (0, (), None), ast.unparse(statement)
        else:
            exec(ast.unparse(statement), given)
    assert (tmp_path / "best.plan.json").is_file()
    step = given["predicted"].step
    whole_s = step.busy_s[0] + step.communication_s[0] + step.idle_s[0]
    assert whole_s == pytest.approx(step.iteration_s)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workload's file beside a module of its own; the current folder is another one."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "ownmodel.py").write_text(
        "from torch import nn\n\n\ndef tower(width=4):\n"
        "    return nn.Sequential(nn.Linear(64, width), nn.Linear(width, 4))\n\n\n"
        "class Data:\n    def __len__(self):\n        return 8\n\n"
        "    def __getitem__(self, index):\n        import torch\n\n"
        "        return {name: torch.ones(64) for name in ('a_data', 'b_data')}\n"
    )
    modules = {n: {"factory": "ownmodel:tower", "args": {"width": 4}} for n in "ab"}
    job = workload(modules, batch=8, data={"factory": "ownmodel:Data"})
    mmplan.save_document(job, folder / "workload.json")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def test_an_object_knows_the_file_that_it_was_read_from(own: Path) -> None:
    read = mmplan.load_workload(own / "workload.json")
    said: list[tuple[int, int, str]] = []
    known = mmplan.profile(
        read, cluster="cpu-2", analytic=True, progress=lambda *now: said.append(now)
    )
    assert [(done, total) for done, total, _ in said] == [(n, 3) for n in range(4)]
    assert [note.split()[0] for *_, note in said[:3]] == ["a", "b", "loss"]
    saved = mmplan.solve(read, known, solver="distmm").save("plan.json")
    assert saved.plan.workload.path == "../own/workload.json"
    assert saved.certificate is not None

    wider = mmplan.changed(read, {"modules.b.args.width": 8})
    with pytest.raises(InvalidInputError, match="changed since it was read cannot be measured"):
        mmplan.profile(wider)
    known = mmplan.profile(wider, cluster="cpu-2", analytic=True)
    made = mmplan.solve(wider, known, solver="distmm")
    assert mmplan.check(made, try_it=True).faults == ()
    again = made.save("plan.json")
    copy = Path(again.plan.workload.path)
    assert copy.parent == Path("../own")
    assert mmplan.load_workload(copy) == wider != read
    assert mmplan.check("plan.json", try_it=True).faults == ()
    changes = mmplan.diff(saved, again).changes
    assert [(c.what, c.before, c.after) for c in changes if c.part == "workload"] == [
        ("modules.b.args.width", 4, 8)
    ]


def test_a_file_that_changed_is_not_that_of_the_object(own: Path) -> None:
    read = mmplan.load_workload(own / "workload.json")
    mmplan.save_document(mmplan.changed(read, {"train.seed": 5}), own / "workload.json")
    saved = mmplan.solve(read, costs(2), solver="distmm").save("plan.json")
    assert mmplan.load_workload(Path(saved.plan.workload.path)) == read
    (own / "workload.json").unlink()
    assert mmplan.check(mmplan.solve(read, costs(2), solver="distmm")).faults == ()


@pytest.mark.parametrize("call_of", [mmplan.solve, mmplan.compare])
@pytest.mark.parametrize(
    ("update", "said"),
    [
        ({"batch": 6}, "losses.contrastive.sync_batch: 4 does not divide the batch of 6"),
        ({"batch": "8"}, "batch: must be a whole number, got '8'"),
        ({"btach": 8}, "btach: unknown field"),
        ({"data": object()}, "a value cannot stand in a file"),
    ],
)
def test_a_copy_is_held_against_the_rules(call_of: Any, update: Any, said: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        call_of(JOB.model_copy(update=update), costs(4))
    assert caught.value.message.startswith(f"the workload in Python: {said}")


def test_a_workload_is_changed_into_another() -> None:
    other = mmplan.changed(JOB, {"batch": 8, "modules.a.args.blocks": 12, "train.seed": 3})
    assert (other.batch, other.modules["a"].args, other.train.seed) == (8, {"blocks": 12}, 3)
    assert (JOB.batch, JOB.modules["a"].args) == (4, {})
    for settings, said in (
        ({"batch": 6}, "changed: losses.contrastive.sync_batch: 4 does not divide"),
        ({"modules.c.args.blocks": 2}, "changed modules.c.args.blocks: modules has no field 'c'"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            mmplan.changed(JOB, settings)
    for record, name in ((JOB, "batch"), (JOB.train, "seed")):
        with pytest.raises(InvalidInputError, match=f"{name} of a .* cannot be set"):
            setattr(record, name, 8)


def test_numbers_of_devices_are_one_or_several() -> None:
    compared = mmplan.compare(JOB, costs(4), devices=2, solvers=["distmm"])
    assert compared.best.plan.devices == 2
    for wrong in ([4], "4", True, 4.0):
        with pytest.raises(InvalidInputError, match=r"devices=.* must be a whole number"):
            mmplan.solve(JOB, costs(4), devices=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidInputError, match=r"devices=4\.0: must be a whole number"):
        mmplan.compare(JOB, costs(4), devices=[2, 4.0])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("ddp", "--solver megatron"), ("FSDP", "--solver deepspeed"), ("colocatd", "colocated?")],
)
def test_systems_that_are_no_solvers_are_named(name: str, hint: str) -> None:
    for call_of, option in ((mmplan.solve, "solver"), (mmplan.compare, "baseline")):
        with pytest.raises(InvalidInputError) as caught:
            call_of(JOB, costs(4), **{option: name})  # pyright: ignore[reportArgumentType]
        assert hint in (caught.value.hint or "")


def test_figures_of_a_step_say_what_no_letter_shows() -> None:
    """A reduction that began inside the backward is waited for without an instruction."""
    slow = {"latency_s": 0.0, "bandwidth_bytes_per_s": 40.0}
    parts = {n: module_profile(blocks=2, parameters=40.0) for n in "ab"}
    made = mmplan.solve(JOB, profile(parts, 2, intra=slow), solver="colocated")
    shown = repr(mmplan.simulate(made))
    assert len(re.findall(r"^rank +\d \|F+B+\.{5,}\|$", shown, flags=re.MULTILINE)) == 2
    assert "waiting for messages or for a reduction" in shown
    assert re.search(r"idle 0\.0%, communication [1-9]\d\.\d%.* memory \S+ kB of 1 TB", shown)


def test_plans_of_different_solvers_are_compared_by_module(tmp_path: Path) -> None:
    """Waves call a module's slices by other names, and YAML has other bytes than JSON."""
    tower = module_profile(fixed_s=20.0)
    job = workload({"a": {}, "b": {}, "c": {}}, batch=10)
    known = profile(dict.fromkeys("abc", tower), 4)
    mmplan.save_document(job, tmp_path / "job.json")
    (tmp_path / "job.yaml").write_text("# a remark\n" + (tmp_path / "job.json").read_text())
    first = mmplan.solve(tmp_path / "job.json", known, solver="distmm").save(tmp_path / "1.json")
    other = mmplan.solve(tmp_path / "job.yaml", known, solver="mpsp").save(tmp_path / "2.json")
    assert first.plan.workload.sha256 != other.plan.workload.sha256
    assert {unit.name for unit in other.plan.units} > {"default.a.0", "default.b.0"}
    changes = mmplan.diff(first.path, other.path).changes
    parts = {change.part.partition(".")[0] for change in changes}
    assert parts == {"plan", "a", "b", "c", "predicted"}
    assert "workload" not in {change.what for change in changes}
    assert all(change.before or change.after for change in changes)
    kinds = [
        c for c in changes if (c.part, c.what) in {("a", "schedule.kind"), ("a.0", "schedule.kind")}
    ]
    assert [(c.before, c.after) for c in kinds] == [("batch-sync", "wave")]


def test_fields_that_differ_are_known_where_a_file_is_gone(tmp_path: Path) -> None:
    plans: list[mmplan.Planned] = []
    for width in (1, 2):
        job = mmplan.changed(JOB, {"modules.a.args.width": width, "train.seed": width})
        mmplan.save_document(job, tmp_path / "job.json")
        made = mmplan.solve(tmp_path / "job.json", costs(4), solver="distmm")
        plans.append(made.save(tmp_path / f"{width}.json"))
    shown = repr(mmplan.diff(*(plan.path for plan in plans)))
    assert re.search(r"workload +modules.a.args.width +1 +2", shown)
    assert re.search(r"plan +training.seed +1 +2", shown)


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
