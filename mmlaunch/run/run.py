"""``mmlaunch run`` and ``mmlaunch verify``: start a plan's workers, collect their results."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mmlaunch.run.options import RunOptions
from mmlaunch.run.segments import Planner, Segment, first_step, make_segments, sets_of_run
from mmlaunch.session.identity import find_workload
from mmplan.errors import InvalidInputError, MMPlanError
from mmplan.proof.certificate import rank_hashes
from mmplan.schema.agreement import check_agrees
from mmplan.schema.base import file_sha256, write_text
from mmplan.schema.load import load_plan
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload, load_workload

if TYPE_CHECKING:
    from mmlaunch.launch.launch import Launcher
    from mmlaunch.launch.watch import OnEvent

# For the report and for people, beside a copy of the plan.
_RECORD = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The result of a run.

    Attributes:
        spans: rank to the (instruction index, start_s, end_s) of its last step.
        memory_bytes: rank to the peak of its steps, of ranks whose system tells.
        stopped: whether it saved and ended early on request.
        segment: the last one that ran.
    """

    segment: Segment
    run_dir: Path
    steps: int
    stopped: bool
    spans: dict[int, list[tuple[int, float, float]]]
    memory_bytes: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A plan and its workload, checked, before anything of the user's is imported."""

    plan: Plan
    workload: Workload
    workload_path: Path

    @property
    def imports(self) -> list[str]:
        """The factories that workers are about to import."""
        parts = [*self.workload.modules.values(), *self.workload.losses.values()]
        data = [t.data for t in self.workload.tasks.values()] + [self.workload.data]
        found = [p.factory for p in parts] + [d.factory for d in data if d is not None]
        return list(dict.fromkeys(found))


def prepare(options: RunOptions) -> Prepared:
    """Check plan, workload, devices and optimizer.

    Raises:
        InvalidInputError: a file is wrong or has changed, there are too few devices, or
            torch.optim has no such optimizer.
    """
    if not 0 < options.timeout_s < math.inf:
        raise InvalidInputError(
            f"--timeout {options.timeout_s:g}: not a number of seconds", hint="300 is the default"
        )
    plan = load_plan(options.plan)
    path = find_workload(plan, options.plan, options.workload)
    workload = load_workload(path)
    check_agrees(plan, workload)
    _check_devices(plan, options)
    if options.emulation is None:
        from mmlaunch.session.optimizer import check_optimizer

        cut = any(unit.tp > 1 for unit in plan.units) or bool(plan.training.zero)
        check_optimizer(workload.train, sharded=cut)
    return Prepared(plan=plan, workload=workload, workload_path=path)


def run(
    options: RunOptions,
    prepared: Prepared,
    on_event: OnEvent,
    planner: Planner,
) -> RunSummary:
    """Train in one process per rank and write the run folder.

    Args:
        options: of the command line.
        prepared: checked.
        on_event: gets events of steps, of segments and of the launcher.
        planner: plans for task sets that the given plan is not for.

    Raises:
        MMPlanError: from the planner.
        WorkerFailedError: a worker died or hung.
        InvalidInputError: the run folder holds another run, or a plan's certificate does not hold.
        RunFailedError: a plan without a certificate cannot be proven.
    """
    from mmlaunch.launch.launch import check_free
    from mmlaunch.run.training_worker import CHECKPOINTS, TrainJob

    sets = sets_of_run(prepared.plan, prepared.workload, options.tasks)
    run_dir = _run_dir(options, prepared.plan)
    # A run that is under way goes on with the plans that lie there.
    check_free(run_dir, options.node_rank)
    steps = prepared.workload.train.steps if options.steps is None else options.steps
    segments = make_segments(
        sets,
        start=first_step(run_dir, CHECKPOINTS, resume=options.resume),
        steps=steps,
        plan=prepared.plan,
        path=options.plan.absolute(),
        run_dir=run_dir,
        planner=planner,
        is_first_node=options.node_rank == 0,
    )
    row_hashes = [
        rank_hashes(s.path, prepared.workload_path, is_own=s.plan is not prepared.plan)
        for s in segments
    ]
    record = RunRecord(run_dir, prepared.workload_path, emulated=options.emulation is not None)
    record.write(segments[0])
    on_event({"kind": "start", "run_dir": str(run_dir)})
    if options.resume and options.node_rank == 0 and not any((run_dir / CHECKPOINTS).glob("*")):
        note = f"--resume: {run_dir} holds no checkpoint, so the run begins at step 0"
        on_event({"kind": "note", "message": note})

    def on_worker_event(event: dict[str, Any]) -> None:
        if event.get("kind") == "segment":
            segment = segments[event["segment"]]
            record.write(segment, step=event["step"])
            event = {"kind": "segment", "segment": segment, "of": len(segments)}
        on_event(event)

    job = TrainJob(
        segments=segments,
        row_hashes=row_hashes,
        workload=prepared.workload_path.absolute(),
        steps=steps,
        options=options,
    )
    try:
        results = _launcher()(
            entry="mmlaunch.run.training_worker:train",
            args=(job,),
            num_ranks=prepared.plan.devices,
            run_dir=run_dir,
            timeout_s=options.timeout_s,
            max_restarts=options.max_restarts,
            nnodes=options.nnodes,
            node_rank=options.node_rank,
            rdzv_endpoint=options.rdzv_endpoint,
            on_event=on_worker_event,
        )
    except MMPlanError:
        if not options.resume and not _holds_steps(run_dir, CHECKPOINTS):
            # Nothing was trained: the folder is free for the next try.
            (run_dir / _RECORD).unlink(missing_ok=True)
        raise
    held = {r.rank: r.memory_bytes for r in results if r.memory_bytes is not None}
    if options.emulation is None:
        record.finish(held)
    return RunSummary(
        run_dir=run_dir,
        steps=results[0].step,
        stopped=results[0].stopped,
        segment=segments[results[0].segment],
        spans={result.rank: result.spans for result in results},
        memory_bytes=held,
    )


def verify(options: RunOptions, prepared: Prepared, *, in_process: bool) -> Any:
    """One planned step held against one process: a :class:`mmlaunch.session.verify.Verdict`."""
    from mmlaunch.session.verify import compare
    from mmplan.program.compile import compile_plan

    folder = prepared.workload_path.parent
    if in_process:
        found = _verify_threads(prepared, folder)
    else:
        with tempfile.TemporaryDirectory(prefix="mmlaunch-verify-") as run_dir:
            found = _launcher()(
                entry="mmlaunch.run.training_worker:verify",
                args=(str(options.plan.absolute()), str(prepared.workload_path.absolute())),
                num_ranks=prepared.plan.devices,
                run_dir=Path(run_dir),
                timeout_s=options.timeout_s,
                stops_in_order=False,
            )
    return compare(prepared.workload, folder, compile_plan(prepared.plan), found)


def _launcher() -> Launcher:
    """The launcher of this machine; a batch system's own would be chosen here."""
    from mmlaunch.launch.launch import launch

    return launch


def _verify_threads(prepared: Prepared, folder: Path) -> list[Any]:
    import torch

    from mmlaunch.comm.inprocess import InProcessWorld
    from mmlaunch.session.session import Session
    from mmlaunch.session.verify import planned_step

    torch.set_num_threads(1)
    return InProcessWorld(prepared.plan.devices).run(
        lambda transport: planned_step(
            Session(
                plan=prepared.plan,
                workload=prepared.workload,
                folder=folder,
                transport=transport,
            )
        )
    )


class RunRecord:
    """The record of a run folder: at any time the segment that runs and those before it.

    Args:
        run_dir: the run's folder.
        workload_path: the workload's file.
        emulated: whether computes are waits, so that times are no measurement of computing.
    """

    def __init__(self, run_dir: Path, workload_path: Path, *, emulated: bool = False) -> None:
        self._emulated = emulated
        self._run_dir, self._workload_path = run_dir, workload_path
        self._started_at = time.strftime("%Y-%m-%dT%H:%M:%S%z")

    def write(self, segment: Segment, *, step: int | None = None) -> None:
        """Say that a segment's plan trains from a step on.

        Args:
            segment: that runs.
            step: where it began; None before that is known.
        """
        prediction = segment.plan.predicted
        sha256 = file_sha256(segment.path)
        history = self._history()
        if step is not None:
            history = [entry for entry in history if entry["from_step"] < step]
            if not history or history[-1]["plan_sha256"] != sha256:
                history.append(
                    {
                        "from_step": step,
                        "tasks": list(segment.plan.tasks),
                        "devices": segment.plan.devices,
                        "plan_sha256": sha256,
                        "predicted_iteration_s": prediction.iteration_s,
                        "predicted_samples_per_s": prediction.samples_per_s,
                    }
                )
        record = {
            "plan": os.path.relpath(segment.path, self._run_dir),
            "plan_sha256": sha256,
            "workload": os.path.relpath(self._workload_path, self._run_dir),
            "devices": segment.plan.devices,
            "started_at": self._started_at,
            "cores": os.cpu_count(),
            **({"emulated": True} if self._emulated else {}),
            "predicted_iteration_s": prediction.iteration_s,
            "segments": history,
        }
        write_text(self._run_dir / _RECORD, json.dumps(record, indent=1) + "\n")
        write_text(self._run_dir / "plan.json", segment.path.read_text(encoding="utf-8"))

    def finish(self, memory_bytes: Mapping[int, int]) -> None:
        """Add the peak memory of the last segment's steps, by rank."""
        path = self._run_dir / _RECORD
        record = json.loads(path.read_text(encoding="utf-8"))
        record["memory_bytes"] = {str(rank): held for rank, held in sorted(memory_bytes.items())}
        write_text(path, json.dumps(record, indent=1) + "\n")

    def _history(self) -> list[dict[str, Any]]:
        """Segments that the folder's record has; none where it cannot be read."""
        try:
            found = json.loads((self._run_dir / _RECORD).read_text(encoding="utf-8"))["segments"]
            entries = [cast("dict[str, Any]", dict(entry)) for entry in found]
            return [e for e in entries if isinstance(e["from_step"], int) and e["plan_sha256"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []


def _check_devices(plan: Plan, options: RunOptions) -> None:
    if plan.cluster.device.is_cpu or os.environ.get("MMLAUNCH_DEVICE", "").lower() == "cpu":
        return
    import torch

    needed = -(-plan.devices // options.nnodes)
    available = torch.cuda.device_count()
    if available < needed:
        raise InvalidInputError(
            f"{options.plan}: planned for {needed} {plan.cluster.device.name} devices on this "
            f"machine, which has {available}",
            hint=f"solve with --devices {max(available, 1)}, or run all ranks as processes: "
            "MMLAUNCH_DEVICE=cpu",
        )


def _run_dir(options: RunOptions, plan: Plan) -> Path:
    if options.run_dir is not None:
        return _claimed(options.run_dir, options)
    base = Path("runs") / plan.name
    taken = [base, *(base.with_name(f"{base.name}-{n}") for n in range(2, 1000))]
    used = [path for path in taken if _holds_run(path)]
    if options.resume:
        if not used:
            raise InvalidInputError(
                f"--resume: there is no run of {plan.name} in runs/",
                hint="name its folder with --run-dir",
            )
        return _claimed(used[-1], options)
    return next(path for path in taken if path not in used)


def _holds_steps(path: Path, checkpoints: str) -> bool:
    metrics = path / "metrics.jsonl"
    measured = metrics.exists() and metrics.stat().st_size > 0
    return measured or any((path / checkpoints).glob("*"))


def _holds_run(path: Path) -> bool:
    return (path / _RECORD).exists()


def _claimed(path: Path, options: RunOptions) -> Path:
    """The folder, unless it holds another run or is a file."""
    if path.exists() and not path.is_dir():
        raise InvalidInputError(f"--run-dir {path}: is a file", hint="name a folder")
    if not _holds_run(path):
        return path
    if not options.resume:
        raise InvalidInputError(
            f"{path} already holds a run",
            hint="go on with it: --resume, or name another --run-dir",
        )
    return path
