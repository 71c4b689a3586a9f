"""The command line as the contract has it: options, documents on stdout, exit codes, pipes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from safetensors import safe_open
from torch import Tensor, nn

import cli
import mmplan
from mmlaunch.comm.strict import StrictTransport
from mmplan.reporting.terminal.console import Output
from mmplan.schema.base import document_text
from mmplan.schema.workload import load_workload
from tests.birds import copy_workload, edited, given_profile, two_rank_plan
from tests.commands import ROOT, Done, Program, call, command, environment, run, start
from tests.selection import some

GOLDEN = ROOT / "tests" / "golden" / "command-line.txt"


class Files:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.workload = copy_workload(root)
        (root / "plans").mkdir()
        self.profile = given_profile(root / "plans" / "profile.json")
        self.plan = two_rank_plan(self.workload, root / "plans" / "plan.json")
        self.solved = root / "plans" / "solved.json"

    @property
    def job(self) -> tuple[object, ...]:
        return self.workload, "--profile", self.profile


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    made = Files(tmp_path_factory.mktemp("cli"))
    assert call("mmplan", "solve", *made.job, "-o", made.solved).code == 0
    return made


# ---- options ----


def options_of(app: typer.Typer, program: str) -> list[str]:
    lines: list[str] = []
    group: Any = typer.main.get_command(app)
    for name, sub in sorted(group.commands.items()):
        words = sorted("/".join(p.opts) if p.opts[0][0] == "-" else p.name for p in sub.params)
        lines.append(f"{program} {name}: {' '.join(words)}")
    return lines


def test_golden_options() -> None:
    """Users script against these names: one that goes away or changes is a breaking change."""
    got = [*options_of(cli.mmplan_app, "mmplan"), *options_of(cli.mmlaunch_app, "mmlaunch")]
    text = "\n".join(got) + "\n"
    if os.environ.get("MMPLAN_GOLDEN"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_every_command_explains_itself_and_takes_json() -> None:
    apps: dict[Program, Any] = {"mmplan": cli.mmplan_app, "mmlaunch": cli.mmlaunch_app}
    for program, app in apps.items():
        group: Any = typer.main.get_command(app)
        assert call(program, "--help").out.count("...") == 1  # in "[ARGS]...": no line is cut
        for name, sub in group.commands.items():
            done = call(program, name, "--help")
            assert done.code == 0
            assert sub.help
            assert "--json" in done.out
            assert all(getattr(p, "help", None) or p.opts[0][0] != "-" for p in sub.params)


# ---- --json ----


def test_json_is_the_only_thing_on_stdout(files: Files) -> None:
    folder, trace = files.root, files.root / "trace.json"
    plan = call("mmplan", "solve", *files.job, "-o", folder / "n.json", "--json").document
    assert plan == json.loads((folder / "n.json").read_text())
    for shown in (files.workload, files.profile, files.solved):
        done = call("mmplan", "show", shown, "--json")
        assert done.document["name"] == "birds"
        assert done.err
    checked = call("mmplan", "check", files.solved, "--json").document
    compared = str(files.solved.parent / "../birds/workload.yaml")
    assert checked.pop("most_held_blocks") > 0
    assert checked.pop("most_communicators") > 0
    assert checked == {"plan": str(files.solved), "workload": compared, "faults": []}
    simulated = call("mmplan", "simulate", files.solved, "--trace", trace, "--json").document
    assert simulated["iteration_s"] == pytest.approx(plan["predicted"]["iteration_s"])
    assert json.loads(trace.read_text())["traceEvents"]
    compared = call("mmplan", "compare", *files.job, "--json").document
    assert {p["solver"]["name"] for p in compared} >= {"distmm", "colocated"}
    rates = [p["predicted"]["samples_per_s"] for p in compared]
    assert rates == sorted(rates, reverse=True)
    page = folder / "page.html"
    reported = call("mmplan", "report", files.solved, "-o", page, "--json")
    assert reported.document == {"report": str(page)}
    assert page.stat().st_size < 5e6


def test_json_of_profile_and_doctor(files: Files) -> None:
    made = files.root / "analytic.json"
    where = ("--cluster", "p3-8", "-o", made)
    done = call("mmplan", "profile", files.workload, "--analytic", *where, "--json")
    assert done.document["source"] == "analytic"
    assert json.loads(made.read_text())["cluster"]["name"] == "p3-8"
    examined = call("mmplan", "doctor", "--json")
    assert examined.code in (0, 4)
    assert {"name", "ok", "detail"} <= examined.document[0].keys()


def test_json_of_runs(files: Files) -> None:
    verdict = call("mmlaunch", "verify", files.plan, "--strict", "--json")
    assert verdict.code == 0, verdict.err
    assert verdict.document["differences"] == []
    assert verdict.document["compared"] > 20
    done = call(
        "mmlaunch", "run", files.plan, "--steps", 2, "--run-dir", files.root / "r", "--json"
    )
    assert done.code == 0, done.err
    assert done.document == {"run_dir": str(files.root / "r"), "steps": 2, "stopped": False}


def test_what_breaks_on_gpus_is_named(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.Linear.forward

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return plain(self, x) + 0 * x.detach().sum().item()

    monkeypatch.setattr(nn.Linear, "forward", forward)
    monkeypatch.setattr(StrictTransport, "prepare", lambda *_: None)
    done = call("mmlaunch", "verify", files.plan, "--strict", "--steps", "1")
    assert done.code == 1
    line = forward.__code__.co_firstlineno + 1
    assert f"device: rank 0, 0F0, {__file__}:{line}: host synchronisation: reads" in done.out
    assert "NCCL: rank 0, step 0, instruction " in done.out + done.err
    assert "which was not made before the steps" in done.out + done.err
    assert "faults on GPUs" in done.err


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("mmplan", "solve"), 2),
        (("mmplan", "solve", "nowhere.yaml", "--profile", "p.json"), 2),
        (("mmplan", "solve", "w", "--profile", "p", "--devices", "two"), 2),
        (("mmplan", "profile", "nowhere.yaml"), 2),
        (("mmplan", "show", "nowhere"), 2),
        (("mmplan", "check", "nowhere"), 2),
        (("mmplan", "simulate", "nowhere"), 2),
        (("mmplan", "compare", "nowhere", "--profile", "p"), 2),
        (("mmplan", "report", "nowhere"), 2),
        (("mmplan", "doctor", "--colour"), 2),
        (("mmplan", "frobnicate"), 2),
        (("mmlaunch", "run", "nowhere"), 2),
        (("mmlaunch", "verify", "nowhere"), 2),
    ],
)
def test_errors_are_one_document_too(args: tuple[Any, ...], code: int) -> None:
    done = call(*args, "--json")
    assert done.code == code
    assert done.document["error"]["exit_code"] == code
    assert done.document["error"]["message"] == done.message
    assert done.document["error"]["hint"] == done.hint


def test_a_found_fault_is_a_document_and_exit_1(files: Files) -> None:
    plan = json.loads(files.plan.read_text())
    plan["units"].pop()
    broken = files.root / "plans" / "broken.json"
    broken.write_text(json.dumps(plan))
    done = call("mmplan", "check", broken, "--json")
    assert done.code == 1
    assert done.document["faults"]
    assert "fault" in done.message


# ---- terminals, pipes, signals ----


def test_piping_to_head_shows_no_traceback(files: Files) -> None:
    shown = subprocess.Popen(
        command("mmplan", "show", files.solved, "--program"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert shown.stdout is not None
    assert shown.stderr is not None
    shown.stdout.close()
    err = shown.stderr.read().decode()
    assert shown.wait(60) == 0
    assert err == ""


def test_a_full_disk_behind_stdout_is_said_on_stderr(files: Files) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command("mmplan", "show", files.solved),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            check=False,
        )
    assert done.returncode == 4
    assert "error: the output cannot be written: No space left" in done.stderr


def terminal_output(files: Files, **env: str) -> str:
    """What ``show`` writes to a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command("mmplan", "show", files.profile),
        stdout=theirs,
        stderr=theirs,
        env=environment(TERM="xterm-256color", COLUMNS="120", **env),
    ) as shown:
        os.close(theirs)
        pieces: list[bytes] = []
        with contextlib.suppress(OSError):  # EIO is how a terminal's other end says it is gone
            while piece := os.read(ours, 65536):
                pieces.append(piece)
        os.close(ours)
    assert shown.returncode == 0
    return b"".join(pieces).decode()


def test_no_color_leaves_no_colours(files: Files) -> None:
    colours = [f"\x1b[{code}" for code in (*range(30, 38), *range(90, 98))]
    plain = terminal_output(files, NO_COLOR="1")
    assert "sound" in plain
    assert not any(colour in plain for colour in colours)


def test_a_terminal_breaks_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    text = "one of three words: otorhinolaryngologist-like"
    for is_terminal, lines in ((True, ["one of three words:", text[20:]]), (False, [text])):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda here=is_terminal: here)
        monkeypatch.setattr(sys, "stdout", stream)
        Output().text(text)
        assert stream.getvalue().splitlines() == lines


def test_a_note_stands_below_its_bar_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream)
    note = "loss 5.5687  1504 samples/s  iteration 170.2 ms (predicted 77.1)"
    with Output().progress("training") as bar:
        bar.update(7, 120, note)
    shown = stream.getvalue()
    assert "7/120" in shown
    assert note in shown.replace("\x1b[0m", "")
    assert "…" not in shown


def test_output_survives_a_terminal_without_unicode(files: Files) -> None:
    done = run("mmplan", "show", files.solved, cwd=files.root, PYTHONIOENCODING="ascii")
    assert done.code == 0, done.err
    assert "sound" in done.out


def interrupted(busy: subprocess.Popen[str], there: Path) -> str:
    """Stdout of a command that gets one SIGINT once a file is there."""
    deadline_s = time.monotonic() + 60
    while not there.exists():
        assert busy.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    busy.send_signal(signal.SIGINT)
    out, err = busy.communicate(timeout=30)
    assert busy.returncode == 130, err
    assert "Traceback" not in err
    return out


def test_interrupt_is_130(tmp_path: Path) -> None:
    data = copy_workload(tmp_path).parent / "birds" / "towers.py"
    data.write_text(
        f"import pathlib, time\npathlib.Path({str(tmp_path / 'here')!r}).touch()\ntime.sleep(60)\n"
    )
    where = ("--cluster", "p3-8", "-o", tmp_path / "p.json")
    busy = start(
        "mmplan", "profile", tmp_path / "birds/workload.yaml", "--analytic", *where, cwd=tmp_path
    )
    assert interrupted(busy, tmp_path / "here") == "interrupted\n"
    assert not (tmp_path / "p.json").exists()


# The signal comes when a module is looked for: a library, one of ours, one of a command's.
@pytest.mark.parametrize(
    ("program", "module"),
    some(
        [
            ("mmplan", "typer"),
            ("mmlaunch", "mmplan.reporting.terminal.console"),
            ("mmplan", "mmplan.planning.planner"),
            ("mmlaunch", "mmlaunch.run.run"),
        ],
        0,
        3,
    ),
)
def test_ctrl_c_while_modules_load_is_130_without_a_traceback(
    files: Files, program: Program, module: str
) -> None:
    hook = (
        "import os, signal, sys\n"
        "class Hook:\n"
        "    def find_spec(self, name, *more):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Hook())\n"
    )
    job = ("solve", *files.job) if program == "mmplan" else ("run", files.plan)
    python, flag, code, *args = command(program, *job)
    done = subprocess.run(
        [python, flag, hook + code, *args],
        cwd=files.root,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_one_ctrl_c_ends_a_verification(tmp_path: Path) -> None:
    # Files of its own: whoever imports these towers waits for a minute.
    files = Files(tmp_path)
    towers = files.workload.parent / "birds" / "towers.py"
    towers.write_text(
        f"{towers.read_text()}\nimport pathlib, time\n"
        f"pathlib.Path({str(tmp_path / 'here')!r}).touch()\ntime.sleep(60)\n"
    )
    busy = start("mmlaunch", "verify", files.plan, cwd=tmp_path)
    assert interrupted(busy, tmp_path / "here").endswith("interrupted\n")


# ---- files ----


def test_numbers_are_yaml_1_2_and_json_is_accepted(tmp_path: Path) -> None:
    workload = edited(copy_workload(tmp_path), "lr: 5.0e-2", "lr: 1e-5, weight_decay: 1.6e10")
    loaded = load_workload(workload)
    assert loaded.train.optimizer_args["lr"] == 1e-5
    assert loaded.train.optimizer_args["weight_decay"] == 1.6e10
    as_json = tmp_path / "birds" / "workload.json"
    as_json.write_text(document_text(loaded))
    assert load_workload(as_json) == loaded
    assert call("mmplan", "show", as_json).code == 0


def test_a_workload_built_in_python_is_the_loaded_one(files: Files) -> None:
    from mmplan.schema.workload import DataSpec, LossSpec, ModuleSpec, TrainSpec

    built = mmplan.Workload(
        name="birds",
        batch=16,
        modules={
            "sound": ModuleSpec(
                factory="birds.towers:sound",
                args={"layers": 2, "width": 12},
                inputs=("spectrogram",),
            ),
            "words": ModuleSpec(
                factory="birds.towers:words",
                args={"layers": 1, "width": 12},
                inputs=("description",),
            ),
        },
        losses={
            "match": LossSpec(
                factory="birds.losses:PairwiseSigmoid",
                inputs=("sound", "words"),
                cross_sample=True,
                sync_batch=8,
            ),
            "species": LossSpec(
                factory="birds.losses:Species",
                args={"width": 12, "kinds": 5},
                inputs=("sound", "kind"),
                weight=0.5,
            ),
        },
        data=DataSpec(factory="birds.data:Recordings", args={"count": 80}),
        train=TrainSpec(
            seed=3, optimizer="SGD", optimizer_args={"lr": 5e-2, "momentum": 0.9}, steps=8
        ),
    )
    assert built == load_workload(files.workload)


def test_a_plan_of_an_older_version_is_read(files: Files) -> None:
    """Its bound was the formula's, under another name."""
    plan = json.loads(files.solved.read_text())
    solver = plan["solver"]
    was = solver.pop("formula_bound_s"), solver.pop("formula_gap")
    solver["lower_bound_s"], solver["gap"] = was
    older = files.solved.with_name("older.json")
    older.write_text(json.dumps(plan))
    shown = call("mmplan", "show", older, "--json").document["solver"]
    assert (shown["formula_bound_s"], shown["formula_gap"]) == was
    assert shown["lower_bound_s"] is None


def test_plan_has_the_fields_that_stay(files: Files) -> None:
    plan = json.loads(files.solved.read_text())
    assert plan["version"] == 1
    assert plan["workload"].keys() == plan["profile"].keys() == {"path", "sha256"}
    assert (files.solved.parent / plan["workload"]["path"]).samefile(files.workload)
    solver = {"name", "method", "seconds", "objective_s", "formula_bound_s", "formula_gap"}
    assert plan["solver"].keys() >= solver
    found = plan["solver"]
    gap = found["objective_s"] / found["formula_bound_s"] - 1
    assert found["formula_gap"] == pytest.approx(gap)
    least_s, step_s = found["lower_bound_s"], plan["predicted"]["iteration_s"]
    assert found["gap"] == pytest.approx(step_s / least_s - 1)
    assert 0 < least_s <= step_s
    unit = {"name", "task", "module", "tp", "pp", "vpp", "dp", "ranks", "blocks", "samples"}
    for planned in plan["units"]:
        assert planned.keys() >= unit | {"microbatches", "schedule"}
        assert {"kind", "lead"} <= planned["schedule"].keys()
    assert all({"name", "task", "ranks"} <= loss.keys() for loss in plan["losses"])
    predicted = {"iteration_s", "samples_per_s", "mfu", "bubble_fraction", "memory_bytes"}
    assert plan["predicted"].keys() >= predicted | {"devices_used"}
    assert len(plan["predicted"]["memory_bytes"]) == plan["devices"]


def test_steps_0_writes_the_initial_weights_under_their_names(files: Files) -> None:
    folder = files.root / "initial"
    done = call("mmlaunch", "run", files.plan, "--steps", 0, "--run-dir", folder)
    assert done.code == 0, done.err
    from mmplan.schema.factories import build_loss, build_module

    workload = load_workload(files.workload)
    expected: dict[str, Any] = {}
    for name in workload.modules:
        built = build_module(workload, name, files.workload.parent)
        expected |= {f"{name}.{key}": value for key, value in built.state_dict().items()}
    for name in workload.losses:
        loss = build_loss(workload, name, files.workload.parent)
        expected |= {f"losses.{name}.{key}": value for key, value in loss.state_dict().items()}
    assert {"sound.0.lift.weight", "losses.match.scale"} <= expected.keys()
    with safe_open(folder / "final.safetensors", framework="pt") as written:
        assert set(written.keys()) == expected.keys()
        for name, value in expected.items():
            assert written.get_tensor(name).equal(value)


def assert_unknown_field_is_named(done: Done, field: str) -> None:
    assert done.code == 2
    assert field in done.message
    assert "unknown field" in done.message


def test_shipped_cluster_by_name_and_by_path(files: Files, tmp_path: Path) -> None:
    shipped = ROOT / "profiles" / "clusters" / "p3-8.yaml"
    own = tmp_path / "cluster.yaml"
    own.write_text(shipped.read_text() + "colour: red\n")
    done = call("mmplan", "show", shipped, "--json")
    assert done.document["name"] == "p3-8"
    assert_unknown_field_is_named(call("mmplan", "show", own), "colour")
    made = ("--analytic", "-o", tmp_path / "p.json", "--cluster")
    assert_unknown_field_is_named(call("mmplan", "profile", files.workload, *made, own), "colour")
