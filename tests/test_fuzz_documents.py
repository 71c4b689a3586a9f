"""Any document, however changed, ends a command with a code of the contract, in time and memory."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import resource
import shutil
import signal
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mmlaunch.checkpoint.folder import step_folders
from mmlaunch.comm.inprocess import InProcessTransport, InProcessWorld
from mmlaunch.run.run import RunRecord
from mmlaunch.run.segments import Segment
from mmlaunch.run.training_worker import TrainJob, TrainResult
from mmlaunch.session.session import Session
from mmplan.program.trace import trace_events, write_trace
from mmplan.reporting import report_page
from mmplan.schema.base import file_sha256
from mmplan.schema.cluster import load_cluster
from mmplan.schema.load import load_plan
from mmplan.schema.profile import load_profile
from mmplan.schema.workload import load_workload
from mmplan.simulation.predict import costs_of
from mmplan.simulation.step import simulate
from tests.birds import copy_workload, given_profile, two_rank_plan
from tests.commands import Program, call
from tests.test_odd_input import ODD, dumped
from tests.test_schema_mutations import parent_of, places, value_at

# Of the whole process while a command reads one document.
MOST_S = 5.0
MOST_BYTES = 500e6
# A command that does not come back by itself is stopped.
HUNG_S = 20.0
CODES = {0, 1, 2, 3, 4}
LARGE = (2**31, 2**63, 10**6, 10**9, 10**12, 10**18, 1e-300, 5e-324, 1e18)
TEXTS = (
    "\u202e",
    "\ufeff",
    "\U0001f426",
    "\x00",
    "\x1b[2J\x9b",
    "a\nerror: b",
    "%s{0}",
    "<b>",
    "=1",
)
CASES = {
    "workload": 2000,
    "profile": 2000,
    "plan": 2500,
    "cluster": 1000,
    "manifest": 700,
    "run.json": 700,
    "metrics": 300,
    "trace": 800,
}

# Those whose pages have pictures take half a second each.
QUICK = dict.fromkeys(CASES, 3) | {"manifest": 2, "run.json": 2, "metrics": 1, "trace": 2}
# That once ended in a traceback.
FOUND = {"workload": (1843,), "profile": (1079, 1492)}


class Job:
    """Valid documents of one small run, and the commands that read each of them.

    Args:
        root: an empty folder.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.run_dir = root, root / "run"
        workload = copy_workload(root)
        (root / "plans").mkdir()
        profile = given_profile(root / "plans" / "profile.json")
        self.plan = two_rank_plan(workload, root / "plans" / "plan.json")
        text = self.plan.read_text().replace("0" * 64, file_sha256(profile))
        self.plan.write_text(text)
        cluster = root / "cluster.json"
        cluster.write_text(load_cluster("p3-8").model_dump_json(exclude_none=True))
        self.run_dir.mkdir()
        plan = load_plan(self.plan)
        segment = Segment(from_step=0, until=2, plan=plan, path=self.plan)
        record = RunRecord(self.run_dir, workload)
        record.write(segment, step=0)
        record.finish("done", memory_bytes={0: 1 << 28, 1: 1 << 28})
        costs = costs_of(plan, load_profile(profile))
        simulated = simulate(costs.program, costs)
        events = [
            trace_events(costs.program, simulated.events(), process_name=name)
            for name in ("predicted", "measured")
        ]
        write_trace(self.run_dir / "trace.json", *events)
        steps = [
            {
                "step": step,
                "loss": 1.5,
                "iteration_s": 0.1,
                "data_s": 0.01,
                "data_s_by_rank": {"1": 0.02, "0": 0.01},
                "samples_per_s": 160.0,
            }
            for step in range(8)
        ]
        lines = "".join(f"{json.dumps(step)}\n" for step in steps)
        (self.run_dir / "metrics.jsonl").write_text(lines)
        self._save(load_workload(workload), workload.parent)
        self.files = {
            "workload": workload,
            "profile": profile,
            "plan": self.plan,
            "cluster": cluster,
            "manifest": self.run_dir / "checkpoints" / "step-1" / "manifest.json",
            "run.json": self.run_dir / "run.json",
            "metrics": self.run_dir / "metrics.jsonl",
            "trace": self.run_dir / "trace.json",
        }
        self._whole = {path: path.read_bytes() for path in root.rglob("*.js*") if path.is_file()}
        self._whole[workload] = workload.read_bytes()
        loaded = load_workload(workload).model_dump(mode="json", exclude_none=True)
        self.documents: dict[str, Any] = {
            name: json.loads(path.read_text())
            for name, path in self.files.items()
            if path.suffix == ".json"
        }
        self.documents |= {"workload": loaded, "metrics": steps}

    def _save(self, workload: Any, folder: Path) -> None:
        plan = load_plan(self.plan)

        def entry(transport: InProcessTransport) -> None:
            session = Session(plan=plan, workload=workload, folder=folder, transport=transport)
            session.step()
            session.save(self.run_dir / "checkpoints")

        InProcessWorld(plan.devices).run(entry)

    def restore(self) -> None:
        """Every document as it was, and no other run."""
        shutil.rmtree(self.root / "new", ignore_errors=True)
        for path, data in self._whole.items():
            path.write_bytes(data)

    def commands(self, kind: str) -> list[tuple[Program, Sequence[object]]]:
        """Those that read a kind of document."""
        file, profile = self.files[kind], self.files["profile"]
        out = self.root / "out.json"
        solving = ["--top", 2, "--budget", 0.05, "-o", out]
        solve = ["solve", self.files["workload"], "--profile", profile, *solving]
        report = ["report", self.run_dir, "-o", self.root / "report.html"]
        status = ("mmlaunch", ["status", self.run_dir, "--json"])
        resume = ["run", self.plan, "--run-dir", self.run_dir, "--steps", 1, "--resume"]
        found: dict[str, list[tuple[Program, Sequence[object]]]] = {
            "workload": [("mmplan", solve), ("mmplan", ["show", file]), ("mmlaunch", resume)],
            "profile": [
                ("mmplan", solve),
                ("mmplan", ["show", file]),
                ("mmplan", ["simulate", self.plan, "--profile", file]),
                ("mmplan", ["explain", self.plan, "--profile", file]),
            ],
            "plan": [
                *(("mmplan", [name, file]) for name in ("show", "check", "simulate", "explain")),
                ("mmplan", ["report", file, "-o", self.root / "report.html"]),
                ("mmlaunch", ["run", file, "--run-dir", self.root / "new"]),
            ],
            "cluster": [("mmplan", ["show", file]), ("mmplan", [*solve, "--cluster", file])],
            "manifest": [("mmlaunch", resume)],
            "run.json": [("mmplan", report), ("mmlaunch", resume), status],
            "metrics": [("mmplan", report), status],
            "trace": [("mmplan", report)],
        }
        return found[kind]


def resumed(*, args: tuple[TrainJob], num_ranks: int, run_dir: Path, **_: Any) -> list[TrainResult]:
    """Stands for the launcher: ranks are threads, load the newest checkpoint and end."""
    (job,) = args
    segment = job.segments[0]

    def entry(transport: InProcessTransport) -> TrainResult:
        session = Session(
            plan=segment.plan,
            workload=load_workload(job.workload),
            folder=job.workload.parent,
            transport=transport,
            row_sha256=job.row_hashes[0][transport.rank],
        )
        for _, path in step_folders(run_dir / "checkpoints")[-1:] if job.options.resume else ():
            session.load(path)
        return TrainResult(
            rank=transport.rank, step=session.step_count, stopped=False, segment=0, spans=[]
        )

    return InProcessWorld(num_ranks).run(entry)


def changed(document: Any, draw: random.Random) -> Any:
    """One to three fields or entries dropped, replaced, doubled, copied, renamed or scaled."""
    document = copy.deepcopy(document)
    for _ in range(draw.choice((1, 1, 2, 3))):
        every = list(places(document))
        if not every:
            break
        place = draw.choice(every)
        parent, key = parent_of(document, place), place[-1]
        match draw.randrange(8):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, list):
                parent.extend(
                    copy.deepcopy(value_at(document, place)) for _ in range(draw.choice((1, 100)))
                )
            case 2:
                parent[key] = copy.deepcopy(value_at(document, draw.choice(every)))
            case 3 if isinstance(parent, dict):
                parent[draw.choice(TEXTS)] = parent.pop(key)
            case 4 if isinstance(parent[key], int | float):
                parent[key] *= draw.choice((-1, 0, 2, 3, 0.5, 1e6))
            case 5:
                parent[key] = draw.choice(LARGE)
            case 6:
                parent[key] = draw.choice(TEXTS)
            case _:
                parent[key] = copy.deepcopy(draw.choice(ODD))
    return document


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Bytes cut off, flipped, doubled or put in."""
    at = draw.randrange(len(data))
    match draw.randrange(4):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        case 2:
            return data[:at] + data[at // 2 :]
        case _:
            odd = (b"\xff", b"\x00", b"{", b"[" * 5000, b"- " * 500, b"&a *a", b"9" * 5000, b"\n")
            return data[:at] + draw.choice(odd) + data[at:]


def mutant(job: Job, kind: str, draw: random.Random) -> bytes:
    """A document's file with something changed; a manifest's checksum is right."""
    data = job.files[kind].read_bytes()
    document = job.documents[kind]
    if kind == "metrics":
        lines = [dumped(changed(line, draw)) for line in document]
        data = "\n".join(lines).encode()
    elif draw.random() < 0.75:
        data = dumped(changed(document, draw)).encode()
    if draw.random() < 0.25:
        data = damaged(data, draw)
    if kind == "manifest":
        document = data.replace(b"\n", b" ").partition(b'",')[2]
        data = b'{"sha256": "' + hashlib.sha256(document).hexdigest().encode() + b'",\n' + document
    return data


def fault_of(program: Program, args: Sequence[object]) -> str | None:
    """What is wrong with the end of a command."""
    began_s, held_before = time.process_time(), peak_bytes()
    try:
        with stopped_after(HUNG_S):
            done = call(program, *args)
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    took_s = time.process_time() - began_s
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    held = peak_bytes() - held_before
    checks = {
        f"exit code {done.code}": done.code not in CODES,
        f"{took_s:.1f} s": took_s > MOST_S,
        f"{held / 1e6:.0f} MB": held > MOST_BYTES,
        f"{len(errors)} error lines": len(errors) != (done.code != 0),
        "a line without end": bool(errors) and len(errors[0]) > 2000,
        "control characters": any(ord(c) < 32 and c not in "\n\t" for c in done.out + done.err),
    }
    return "; ".join(text for text, is_wrong in checks.items() if is_wrong) or None


def peak_bytes() -> int:
    """The most that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def stopped_after(seconds: float) -> Generator[None]:
    """Raise where a command takes longer, by the processor's clock."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("fuzz"))


def fuzz(job: Job, kind: str, cases: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmlaunch.run.run._launcher", lambda: resumed)
    # Pictures of a profile take a second, and of the same profile are always the same.
    monkeypatch.delitem(report_page.SECTIONS, "profile")
    monkeypatch.chdir(job.root)
    commands = job.commands(kind)
    for program, args in commands:
        job.restore()
        done = call(program, *args)
        assert done.code == 0, done.err
    found: list[str] = []
    for number in cases:
        draw = random.Random(f"{kind} {number}")
        job.restore()
        if kind in ("trace", "run.json") and number % 4:
            job.files["metrics"].unlink()  # whose pictures take long
        job.files[kind].write_bytes(mutant(job, kind, draw))
        program, args = draw.choice(commands)
        fault = fault_of(program, args)
        if fault is not None:
            found.append(f"{kind} {number}: {program} {args[0]}: {fault}")
    job.restore()
    assert found == []


@pytest.mark.parametrize("kind", CASES)
def test_some_mutants(job: Job, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz(job, kind, [*range(QUICK[kind]), *FOUND.get(kind, ())], monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", CASES)
def test_ten_thousand_mutants(job: Job, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz(job, kind, range(CASES[kind]), monkeypatch)
