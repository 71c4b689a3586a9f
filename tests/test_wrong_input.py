"""Wrong input: one clear line that names file, field and mend, and the right exit code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.birds import copy_workload, edited, given_profile, two_rank_plan
from tests.commands import Done, call, run
from tests.test_checkpoint import tiny_disk

Change = Callable[[dict[str, Any]], object]


class Folder:
    """A workload, its profile and a plan in files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.workload = copy_workload(root)
        (root / "plans").mkdir()
        self.profile = given_profile(root / "plans" / "profile.json")
        self.plan = two_rank_plan(self.workload, root / "plans" / "plan.json")

    def solve(self, *more: object, profile: Path | None = None) -> Done:
        files = [self.workload, "--profile", profile or self.profile, "-o", self.root / "new.json"]
        return call("mmplan", "solve", *files, *more)

    def change_plan(self, change: Change) -> Path:
        plan = json.loads(self.plan.read_text())
        change(plan)
        self.plan.write_text(json.dumps(plan))
        return self.plan


@pytest.fixture
def files(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def refused(done: Done, *parts: str, code: int = 2) -> None:
    """One error line with all parts in it, in one line, and an action as hint."""
    assert done.code == code, done.err
    for part in parts:
        assert part in done.message
    assert done.hint
    assert "pydantic" not in done.err
    assert "Value error" not in done.err


def test_the_files_are_right_as_they_are(files: Folder) -> None:
    assert files.solve().code == 0
    assert call("mmplan", "check", files.plan).code == 0
    assert call("mmplan", "simulate", files.plan, "--profile", files.profile).code == 0


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("inputs: [sound, words]", "inptus: [sound, words]", ("losses.match.inptus",)),
        ("batch: 16\n", "batch: many\n", ("batch", "whole number", "'many'")),
        ("batch: 16\n", "batch: 16.5\n", ("batch", "16.5")),
        ("batch: 16\n", "batch: -16\n", ("batch", "-16")),
        ("batch: 16\n", "batch: true\n", ("batch", "True")),
        ("batch: 16\n", "batch: 16\nbatch: 8\n", ("duplicate key", "line")),
        ("batch: 16\n", "batch: [16\n", ("not valid YAML", "line")),
        ("batch: 16\n", "", ("batch: the field is missing",)),
        ("version: 1\n", "version: 2\n", ("version 2", "up to 1")),
        ("version: 1\n", "version: one\n", ("version", "'one'")),
        ("sync_batch: 8", "sync_batch: 6", ("losses.match.sync_batch", "6", "16")),
        ("sync_batch: 8", "sync_batch: 0", ("losses.match.sync_batch", "0")),
        ("weight: 0.5", "weight: .nan", ("losses.species.weight", "nan")),
        ("weight: 0.5", "weight: .inf", ("losses.species.weight", "inf")),
        ("weight: 0.5", "sync_batch: 8", ("losses.species.sync_batch", "cross_sample")),
        ("inputs: [spectrogram]", "inputs: []", ("modules.sound.inputs",)),
        (
            "inputs: [spectrogram]",
            "inputs: [spectrogram]\n    plan: {dp: 0}",
            ("modules.sound.plan.dp: must be at least 1",),
        ),
        (
            "inputs: [spectrogram]",
            "inputs: [spectrogram]\n    plan: {split_backward: atuo}",
            ("modules.sound.plan.split_backward: must be true, false or 'auto', got 'atuo'",),
        ),
        ("inputs: [spectrogram]", "inputs: [words]\n    share: bird", ("modules.sound.share",)),
        ("inputs: [spectrogram]", "inputs: [sound]", ("sound", "circle")),
        ("inputs: [sound, words]", "inputs: [kind]", ("losses.match.inputs",)),
        ("factory: birds.towers:sound", "factory: birds.towers", ("modules.sound.factory",)),
        ("precision", "precision", ()),
    ],
)
def test_workload(files: Folder, old: str, new: str, parts: tuple[str, ...]) -> None:
    if old == "precision":
        old, new, parts = "seed: 3", "precision: fp8, seed: 3", ("train.precision", "'fp8'")
    edited(files.workload, old, new)
    done = files.solve()
    refused(done, files.workload.name, *parts)
    assert not (files.root / "new.json").exists()


def test_frozen_blocks_that_a_module_does_not_have(files: Folder) -> None:
    edited(files.workload, "inputs: [spectrogram]", "inputs: [spectrogram]\n    frozen: [[0, 9]]")
    refused(files.solve(), "modules.sound.frozen: [0, 9]", "blocks")


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("birds.towers:sound", "birds.tower:sound", ("modules.sound.factory", "birds.tower")),
        ("birds.towers:sound", "birds.towers:noise", ("modules.sound.factory", "noise")),
        ("birds.towers:sound", "birds.towers:nn", ("modules.sound.factory", "not callable")),
        ("birds.towers:sound", "birds.towers:Mixer", ("modules.sound.args", "layers")),
        ("{layers: 2, width: 12}", "{layers: 2, width: -1}", ("modules.sound", "towers.py:")),
        ("{layers: 2, width: 12}", "{layers: 2}", ("modules.sound.args", "width")),
        ("birds.losses:PairwiseSigmoid", "birds.towers:print", ("losses.match.factory",)),
        ("birds.data:Recordings", "birds.data:nothing", ("data.factory", "nothing")),
        (
            "inputs: [spectrogram]",
            "inputs: [spectrogram]\n    frozen: [[0, 9]]",
            ("modules.sound.frozen: [0, 9]", "blocks"),
        ),
        ("{count: 80}", "{count: 0}", ("data", "without samples")),
        ("{count: 80}", "{count: 8}", ("data", "8", "16")),
    ],
)
def test_factories(files: Folder, old: str, new: str, parts: tuple[str, ...]) -> None:
    edited(files.workload, old, new)
    plan = two_rank_plan(files.workload, files.plan)
    refused(call("mmlaunch", "verify", plan, "--in-process"), *parts)


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ("raise RuntimeError('no microphone')", ("RuntimeError: no microphone", "towers.py:")),
        ("return nn.ModuleList()", ("ModuleList", "not an nn.Sequential")),
        ("return nn.Sequential()", ("empty nn.Sequential",)),
        ("return nn.Sequential(nn.Linear(10, 12), nn.BatchNorm1d(6))", ("BatchNorm1d",)),
        ("return None", ("NoneType", "not an nn.Sequential")),
    ],
)
def test_factory_that_does_not_make_a_module(
    files: Folder, body: str, parts: tuple[str, ...]
) -> None:
    towers = files.workload.parent / "birds" / "towers.py"
    text = towers.read_text()
    towers.write_text(text.replace("    return nn.Sequential(Frames", f"    {body}\n    (Frames"))
    done = call("mmlaunch", "verify", files.plan, "--in-process")
    refused(done, "modules.sound", *parts)


@pytest.mark.slow
def test_factory_that_raises_in_a_worker(files: Folder) -> None:
    towers = files.workload.parent / "birds" / "towers.py"
    towers.write_text(f"{towers.read_text()}\nraise OSError('no microphone')\n")
    where = ("--run-dir", files.root / "run")
    done = run("mmlaunch", "run", files.plan, *where, "--max-restarts", 3, cwd=files.root)
    refused(done, "modules.", "OSError: no microphone", "towers.py:")
    assert "Traceback" not in done.err
    assert not (files.root / "run" / "final.safetensors").exists()
    # Nothing was trained, so the folder holds no run: the mended workload may use it.
    assert not (files.root / "run" / "run.json").exists()


@pytest.mark.slow
def test_a_run_that_trained_nothing_leaves_its_folder_to_the_next(files: Folder) -> None:
    where = ("--run-dir", files.root / "run", "--steps", 1)
    # Seen with more samples than are tried before: the user's own lines are shown as well.
    losses = files.workload.parent / "birds" / "losses.py"
    intact = losses.read_text()
    odd = "        if len(sound) > 2:\n            raise ValueError('odd')\n        return"
    losses.write_text(intact.replace("        return", odd))
    done = run("mmlaunch", "run", files.plan, *where, cwd=files.root)
    assert done.code == 1
    assert "step 0, instruction " in done.message
    assert "ValueError: odd" in done.message
    assert f'File "{losses}", line ' in done.err
    losses.write_text(intact)
    assert run("mmlaunch", "run", files.plan, *where, cwd=files.root).code == 0


def test_a_loss_that_is_no_number_is_no_difference(files: Folder) -> None:
    data = files.workload.parent / "birds" / "data.py"
    data.write_text(data.read_text().replace("0.3 * noise", "float('nan') * noise"))
    done = call("mmlaunch", "verify", files.plan, "--in-process", "--json")
    assert done.code == 1
    assert "one process's own loss is nan" in done.message
    assert done.document["reference_loss"] is None


def test_block_count_that_is_not_the_plans(files: Folder) -> None:
    edited(files.workload, "{layers: 2, width: 12}", "{layers: 5, width: 12}")
    plan = two_rank_plan(files.workload, files.plan)
    refused(call("mmlaunch", "verify", plan, "--in-process"), "sound", "7", "4")


@pytest.mark.parametrize(
    ("new", "parts"),
    [
        ("optimizer: Adamm,", ("train.optimizer", "'Adamm'")),
        ("optimizer: Optimizer,", ("train.optimizer_args", "Optimizer")),
        ("optimizer: LBFGS,", ("train.optimizer", "LBFGS needs whole parameters")),
        ("optimizer: SGD, groups: [{match: '*', optimizer_args: {rl: 1}}],", ("groups[0]", "'rl'")),
    ],
)
def test_optimizer_is_refused_before_anything_starts(
    files: Folder, new: str, parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("mmlaunch.launch.launch.launch")
    edited(files.workload, "optimizer: SGD,", new)
    plan = two_rank_plan(files.workload, files.plan)
    refused(call("mmlaunch", "run", plan, "--run-dir", files.root / "run"), *parts)
    refused(call("mmlaunch", "verify", plan), *parts)
    assert not (files.root / "run").exists()


def set_point(field: str, value: object) -> Change:
    return lambda p: p["modules"]["sound"]["points"][0].update({field: value})


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda p: p["modules"].pop("words"), ("no module 'words'", "sound")),
        (set_point("forward_s", float("nan")), ("modules.sound.points.0.forward_s", "finite")),
        (set_point("forward_s", float("inf")), ("modules.sound.points.0.forward_s", "finite")),
        (set_point("backward_s", -1.0), ("modules.sound.points.0.backward_s", "-1")),
        (set_point("forward_s", "fast"), ("modules.sound.points.0.forward_s", "'fast'")),
        (set_point("blocks", 9), ("modules.sound", "points.0.blocks", "9 of 4")),
        (set_point("speed", 1), ("modules.sound.points.0.speed", "unknown field")),
        (lambda p: p["modules"]["sound"].update(points=[]), ("modules.sound.points",)),
        (lambda p: p["modules"]["sound"].update(block_work=[1, 2]), ("block_work", "4 blocks")),
        (
            lambda p: p["modules"]["sound"].update(tied_blocks=[[0, 9]]),
            ("modules.sound", "tied_blocks.0: [0, 9] are not several of the blocks 0..3"),
        ),
        (lambda p: p["cluster"]["device"].update(memory_bytes=0), ("cluster.device.memory_bytes",)),
        (lambda p: p.update(version=7), ("version 7", "up to 1")),
        (lambda p: p.update(source="guessed"), ("source", "'guessed'")),
        (lambda p: p.update(tasks={"default": {"birds": {}}}), ("tasks.default.birds",)),
        (
            lambda p: p.update(tasks={"default": {"sound": {"parameters": -1}}}),
            ("tasks.default.sound", "parameters"),
        ),
    ],
)
def test_profile(files: Folder, change: Change, parts: tuple[str, ...]) -> None:
    (files.root / "new.json").write_text("kept")
    given_profile(files.profile, change)
    refused(files.solve(), *parts)
    assert (files.root / "new.json").read_text() == "kept"


def test_cluster_that_contradicts_a_measured_profile(files: Folder) -> None:
    given_profile(files.profile, lambda p: p.update(source="measured"))
    refused(files.solve("--cluster", "p3-8"), "measured", "cpu", "V100-16GB")


def test_fewer_devices_than_asked_for(files: Folder) -> None:
    given_profile(files.profile, lambda p: p["cluster"]["device"].update(name="gpu"))
    refused(files.solve("--devices", 3), "--devices 3", "has 2")
    refused(files.solve("--devices", 0), "--devices")


def test_any_number_of_devices_on_a_cpu_cluster(files: Folder) -> None:
    assert files.solve("--devices", 5).code == 0
    assert json.loads((files.root / "new.json").read_text())["devices"] == 5


def test_too_little_memory_is_infeasible(files: Folder) -> None:
    given_profile(files.profile, lambda p: p["cluster"]["device"].update(memory_bytes=100.0))
    done = files.solve()
    refused(done, "100", code=3)
    assert not (files.root / "new.json").exists()


UNIT: Callable[[Any], Any] = lambda p: p["units"][0]  # noqa: E731


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda p: UNIT(p).update(ranks=[[[0], [0]]]), ("units.sound.ranks", "rank 0", "2 times")),
        (lambda p: UNIT(p).update(ranks=[[[0], [7]]]), ("units.sound.ranks", "rank 7 of 2")),
        (lambda p: UNIT(p).update(ranks=[[[0]]]), ("units.sound.ranks", "stage is missing")),
        (lambda p: UNIT(p).update(ranks=[]), ("units.sound.ranks", "0 replicas")),
        (lambda p: UNIT(p).update(blocks=[[0, 2]]), ("units.sound.blocks", "1 chunks")),
        (lambda p: UNIT(p).update(blocks=[[0, 2], [3, 4]]), ("module sound", "stage is missing")),
        (lambda p: UNIT(p).update(blocks=[[0, 2], [2, 3]]), ("module sound", "3 of 4 blocks")),
        (lambda p: p["units"].pop(), ("module words", "no unit")),
        (lambda p: p["units"].append(UNIT(p)), ("2 units are called 'sound'",)),
        (lambda p: UNIT(p).update(samples=[15]), ("units.sound.samples", "15", "16")),
        (lambda p: UNIT(p).update(microbatches=[[3, 4]]), ("units.sound.microbatches", "7", "16")),
        (lambda p: UNIT(p).update(microbatches=[]), ("units.sound.microbatches", "0 replicas")),
        (lambda p: UNIT(p).update(task="other"), ("units.sound.task", "'other'")),
        (lambda p: UNIT(p).update(module="other"), ("units.sound.module", "'other'")),
        (lambda p: p["losses"].pop(), ("losses", "species", "0 times")),
        (lambda p: p.update(devices=3), ("devices: 3", "2")),
    ],
)
def test_plan_edited_by_hand(files: Folder, change: Change, parts: tuple[str, ...]) -> None:
    files.change_plan(lambda p: p["cluster"]["device"].update(name="gpu"))
    plan = files.change_plan(change)
    found = call("mmplan", "check", plan, "--json")
    assert found.code == 1
    assert any(all(part in fault for part in parts) for fault in found.document["faults"])
    # Every other command refuses it before it does anything.
    refused(call("mmplan", "simulate", plan), plan.name, code=2)
    refused(call("mmlaunch", "run", plan, "--run-dir", files.root / "run"), plan.name, code=2)
    assert not (files.root / "run").exists()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda p: p.update(version=2), ("version 2", "up to 1")),
        (lambda p: UNIT(p).update(colour="red"), ("units.0.colour", "unknown field")),
        (lambda p: UNIT(p).update(tp="1"), ("units.0.tp", "'1'")),
        (lambda p: UNIT(p)["schedule"].update(kind="zigzag"), ("units.0.schedule.kind", "zigzag")),
        (lambda p: p.pop("cluster"), ("cluster: the field is missing",)),
        (lambda p: p["predicted"].update(iteration_s=float("nan")), ("predicted.iteration_s",)),
    ],
)
def test_check_exits_2_on_fields(files: Folder, change: Change, parts: tuple[str, ...]) -> None:
    refused(call("mmplan", "check", files.change_plan(change)), files.plan.name, *parts)


def test_duplicate_keys_and_cut_off_files(files: Folder) -> None:
    text = files.plan.read_text()
    files.plan.write_text(text.replace('"name": "birds"', '"name": "birds", "name": "frogs"', 1))
    refused(call("mmplan", "check", files.plan), "'name'", "twice")
    files.plan.write_text(text[: len(text) // 2])
    refused(call("mmplan", "check", files.plan), "not valid JSON", "line")
    files.plan.write_bytes(b"\xff\xfe\x00")
    refused(call("mmplan", "check", files.plan), "UTF-8")
    files.plan.write_text("[1, 2]")
    refused(call("mmplan", "check", files.plan), "mapping", "list")
    files.workload.write_text("")
    refused(call("mmplan", "show", files.workload), files.workload.name, "it is empty")
    files.plan.write_text("[" * 100_000)
    refused(call("mmplan", "check", files.plan), files.plan.name)
    files.plan.unlink()
    refused(call("mmplan", "check", files.plan), "No such file")


def test_a_file_of_another_kind_is_called_what_it_is(files: Folder) -> None:
    refused(files.solve(profile=files.workload), "this is a workload, not a profile")
    refused(call("mmplan", "check", files.profile), "this is a profile, not a plan")


def test_workload_that_is_gone(files: Folder) -> None:
    shutil.rmtree(files.workload.parent)
    refused(call("mmlaunch", "run", files.plan, "--run-dir", files.root / "run"), "is not there")
    assert not (files.root / "run").exists()


def test_more_ranks_than_devices(files: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMLAUNCH_DEVICE", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    plan = files.change_plan(lambda p: p["cluster"]["device"].update(name="A100"))
    refused(call("mmlaunch", "run", plan), "2 A100", "has 1")


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("--steps", "-1"), ("--steps",)),
        (("--nnodes", "2"), ("--nnodes 2", "1 node with")),
        (("--node-rank", "1"), ("node rank 1 of 1",)),
        (("--tasks", "other"), ("--tasks other", "default")),
        (("--tasks", ","), ("names nothing",)),
        (("--timeout", "nan"), ("--timeout",)),
        (("--timeout", "0"), ("--timeout",)),
        (("--workload", "nowhere.yaml"), ("nowhere.yaml",)),
        (("--resume", "--max-restarts", "x"), ("--max-restarts",)),
    ],
)
def test_options_of_run(files: Folder, args: tuple[str, ...], parts: tuple[str, ...]) -> None:
    where = ("--run-dir", files.root / "run")
    refused(call("mmlaunch", "run", files.plan, *where, *args), *parts)


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("--budget", "nan"), ("--budget",)),
        (("--budget", "-1"), ("--budget",)),
        (("--top", "0"), ("--top",)),
        (("--solver", "magic"), ("--solver magic", "distmm")),
        (("--solver", "distmm", "--method", "magic"), ("--method magic", "exact")),
        (("--tasks", "A"), ("--tasks A", "default")),
        (("--cluster", "atlantis"), ("atlantis",)),
    ],
)
def test_options_of_solve(files: Folder, args: tuple[str, ...], parts: tuple[str, ...]) -> None:
    refused(files.solve(*args), *parts)


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("solve", "WORKLOAD", "--profile", "PROFILE", "-o"), 2, "--output FOLDER: is a folder"),
        (("compare", "WORKLOAD", "--profile", "PROFILE", "-o"), 2, "--output FOLDER: is a folder"),
        (("profile", "WORKLOAD", "-o"), 2, "--output FOLDER: is a folder"),
        (("report", "PLAN", "-o"), 2, "--output FOLDER: is a folder"),
        (("simulate", "PLAN", "--profile", "PROFILE", "--trace"), 2, "--trace FOLDER: is a folder"),
        (("run", "PLAN", "--run-dir"), 2, "--run-dir FOLDER: is a file"),
    ],
)
def test_where_nothing_can_be_written_is_said_before_the_work(
    files: Folder, args: tuple[str, ...], code: int, said: str
) -> None:
    folder = files.root / "plans"
    if args[0] == "run":
        folder = files.plan
    named = {"WORKLOAD": files.workload, "PROFILE": files.profile, "PLAN": files.plan}
    program = "mmlaunch" if args[0] == "run" else "mmplan"
    done = call(program, *(named.get(word, word) for word in args), folder)
    refused(done, said.replace("FOLDER", str(folder)), code=code)
    assert "planning:" not in done.err


@pytest.mark.slow
def test_a_resumed_run_that_is_none_says_so(files: Folder) -> None:
    where = ("--run-dir", files.root / "run", "--steps", 1)
    done = call("mmlaunch", "run", files.plan, "--resume", *where)
    assert done.code == 0, done.err
    assert "holds no checkpoint, so the run begins at step 0" in done.out


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with tiny_disk(tmp_path / "tiny", size="16k"):
        yield tmp_path / "tiny"


def test_full_disk_leaves_the_old_plan_whole(files: Folder, small: Path) -> None:
    old = small / "plan.json"
    old.write_text("{}")
    with pytest.raises(OSError, match="No space"):
        (small / "filling").write_bytes(b"x" * 16384)
    done = call("mmplan", "solve", files.workload, "--profile", files.profile, "-o", old)
    refused(done, str(old), "No space left", code=4)
    assert old.read_text() == "{}"
    assert sorted(path.name for path in small.iterdir()) == ["filling", "plan.json"]


def test_full_disk_during_a_run(files: Folder, small: Path) -> None:
    (small / "filling").write_bytes(b"x" * 8192)
    done = call("mmlaunch", "run", files.plan, "--run-dir", small / "run")
    refused(done, "No space left", code=4)


def test_folder_that_cannot_be_written(files: Folder) -> None:
    (files.root / "file").write_text("")
    done = files.solve("-o", files.root / "file" / "plan.json")
    refused(done, "cannot be written", code=4)
    done = call("mmlaunch", "run", files.plan, "--run-dir", files.root / "file")
    assert done.code in (2, 4)
    assert done.message


def _two_hosts(document: dict[str, Any]) -> None:
    """One process on each, 1 MB/s between them."""
    document["cluster"] |= {"nodes": 2, "devices_per_node": 1}
    slow = {"latency_s": 1e-3, "bandwidth_bytes_per_s": 1e6}
    document["cluster"]["links"]["inter_node"] = slow


def test_a_cpu_cluster_of_several_nodes_keeps_them(files: Folder) -> None:
    slow = given_profile(files.root / "plans" / "hosts.json", _two_hosts)
    found: dict[str, dict[str, Any]] = {}
    for devices in ((), ("--devices", 2), ("--devices", 1)):
        path = files.root / "plans" / "hosts.plan.json"
        command = ("solve", files.workload, "--profile", slow, *devices, "-o", path)
        done = call("mmplan", *command, "--budget", 0.1, "--json")
        assert done.code == 0, done.err
        found[str(devices)] = done.document
    all_of_it, two, one = found.values()
    assert all_of_it["cluster"] == two["cluster"]
    assert two["cluster"]["nodes"] == 2
    assert two["predicted"] == all_of_it["predicted"]
    assert one["cluster"]["nodes"] == one["cluster"]["devices_per_node"] == 1
    done = call("mmplan", "compare", files.workload, "--profile", slow, "--json")
    assert all(plan["cluster"]["nodes"] == 2 for plan in done.document)
    path = files.root / "plans" / "never.json"
    done = call("mmplan", "solve", files.workload, "--profile", slow, "--devices", 3, "-o", path)
    assert done.code == 2
    assert "--devices 3: cluster cpu-2 has 2" in done.message


def test_an_error_that_all_solvers_meet_is_said_once(files: Folder) -> None:
    def without_words(document: dict[str, Any]) -> None:
        del document["modules"]["words"]

    other = given_profile(files.root / "plans" / "half.json", without_words)
    done = call("mmplan", "compare", files.workload, "--profile", other)
    assert done.code == 2
    assert done.message == "profile birds has no module 'words'; it has sound"
