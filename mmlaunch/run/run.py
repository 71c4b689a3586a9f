"""``mmlaunch run`` and ``mmlaunch verify``: start a plan's workers, collect their results."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import TypeAdapter

from mmlaunch.run.options import RunOptions
from mmlaunch.run.segments import Planner, Segment, first_step, make_segments, sets_of_run
from mmlaunch.session.identity import find_profile, find_workload
from mmplan.errors import InvalidInputError, MMPlanError, UnfitEnvironmentError
from mmplan.proof.certificate import rank_hashes
from mmplan.schema.agreement import check_agrees, check_profiled
from mmplan.schema.base import file_sha256, parse_json, read_text, write_text
from mmplan.schema.load import load_plan
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.settings import check_settings, with_settings
from mmplan.schema.workload import Workload, load_workload
from mmplan.wording import counted, size

if TYPE_CHECKING:
    from mmlaunch.comm.inprocess import InProcessTransport, InProcessWorld
    from mmlaunch.comm.strict import StrictWorld
    from mmlaunch.launch.launch import Launcher
    from mmlaunch.launch.watch import OnEvent
    from mmlaunch.session.accelerator_check import AcceleratorVerdict
    from mmlaunch.session.original import OriginalVerdict
    from mmlaunch.session.verify import Difference, Verdict

# Weights, gradients and two moments; the reference also keeps weights while they are moved, and
# gradients of the step, of a draw and their difference.
_COPIES_OF_A_RANK = 4
_COPIES_OF_THE_REFERENCE = 8

# For the report and for people, beside a copy of the plan.
_RECORD = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The result of a run.

    Attributes:
        spans: rank to the (instruction index, start_s, end_s) of its last step.
        memory_bytes: rank to the peak of its steps, of ranks whose system tells.
        stopped: whether it saved and ended early, on request or for want of data.
        starved: whether for want of data.
        ended_early: why training ended of itself before its last step; None where it did not.
        segment: the last one that ran.
    """

    segment: Segment
    run_dir: Path
    steps: int
    stopped: bool
    starved: bool
    ended_early: str | None
    spans: dict[int, list[tuple[int, float, float]]]
    memory_bytes: dict[int, int]


# What the ranks are: processes; threads of this one; threads under the rules of GPUs and NCCL.
Workers = Literal["processes", "threads", "strict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was held against one process, and what differs.

    Attributes:
        devices: ranks of the plan.
        verdict: of gradients, updates and the reload; None where the steps ended early.
        failure: what ended them.
        original: the uncut model, where the cut was held against it.
        uncut: what came of that.
        device: one step of each distinct rank on an accelerator without hardware, where the rules
            of GPUs held.
        rules: those of NCCL, and what broke them.
    """

    devices: int
    verdict: Verdict | None
    failure: MMPlanError | None
    original: str | None
    uncut: OriginalVerdict | None
    device: AcceleratorVerdict | None
    rules: StrictWorld | None

    @property
    def broken_rules(self) -> list[str]:
        """What a step on GPUs fails at, and where its host waits between computes."""
        found: list[str] = []
        if self.device is not None:
            found += [
                f"device: rank {fault.rank}, {fault.instruction or 'before the step'}, "
                f"{fault.place}: {fault.kind}: {fault.detail}"
                for fault in self.device.faults
            ]
            if not found and self.device.failure is not None:
                found.append(f"device: {self.device.failure}")
        return found + [f"NCCL: {fault}" for fault in (self.rules.faults if self.rules else ())]

    @property
    def faults(self) -> list[str]:
        """A sentence for each thing that is not as it must be; none where all is."""
        found = self.broken_rules
        if self.uncut is not None:
            found += [f"differs from the original: {_words(d)}" for d in self.uncut.differences]
        if self.verdict is not None:
            if not math.isfinite(self.verdict.reference_loss):
                found.append(f"one process's own loss is {self.verdict.reference_loss:g}")
            found += [f"differs: {_words(item, self.verdict)}" for item in self.verdict.differences]
        return found


def _words(item: Difference, planned: Verdict | None = None) -> str:
    if planned is None:
        return f"{item.what} {item.name}: {item.error_words}"
    where = f"rank {item.rank}" if item.rank >= 0 else "no rank has one"
    when = "after the reload" if item.step == planned.steps else f"step {item.step}"
    return f"{item.what} {item.name} ({where}, {when}): {item.error_words}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A plan and its workload, checked, before anything of the user's is imported.

    Attributes:
        workload: with the settings.
        settings: those that the run folder has recorded, where it is resumed, and those of the
            command line, which go before them.
        profile: that the plan was made from; None where it is gone.
        notes: lines that tell the user what was not compared.
    """

    plan: Plan
    workload: Workload
    workload_path: Path
    settings: Mapping[str, Any]
    profile: Profile | None = None
    notes: tuple[str, ...] = ()

    @property
    def imports(self) -> list[str]:
        """The factories that workers are about to import."""
        workload, held_out = self.workload, self.workload.train.eval
        parts = [*workload.modules.values(), *workload.losses.values()]
        parts += [task.data for task in workload.tasks.values()] + [workload.data]
        if held_out is not None:
            parts += [held_out.data, *held_out.data_by_task.values(), *held_out.metrics.values()]
        parts += [call for call in workload.train.callbacks if not isinstance(call, str)]
        return list(dict.fromkeys(part.factory for part in parts if part is not None))


def prepare(options: RunOptions) -> Prepared:
    """Check plan, workload and devices.

    Raises:
        InvalidInputError: a file is wrong, the plan is for another workload, a setting cannot
            be made, or there are too few devices.
    """
    for name, value in (("timeout", options.timeout_s), ("start-timeout", options.start_timeout_s)):
        if not 0 < value < math.inf:
            raise InvalidInputError(
                f"--{name} {value:g}: not a number of seconds", hint="the default is long enough"
            )
    if options.data_address is not None and options.data_wait_s >= options.timeout_s:
        raise InvalidInputError(
            f"--data-wait {options.data_wait_s:g}: ranks that wait for others give up after "
            f"--timeout {options.timeout_s:g}",
            hint="make --timeout longer by more than a step takes",
        )
    plan = load_plan(options.plan)
    path = find_workload(plan, options.plan, options.workload)
    stated = load_workload(path)
    check_agrees(plan, stated)
    _check_machines(plan, options)
    recorded = _recorded(run_folder(options, plan), "set", {}) if options.resume else {}
    settings = {**recorded, **options.settings}
    workload = with_settings(stated, settings)
    check_settings(plan, workload, settings)
    profile, note = find_profile(plan, options.plan)
    if profile is not None:
        check_profiled(profile, workload)
    _check_devices(plan, options)
    _check_profiled_steps(workload, options)
    return Prepared(
        plan=plan,
        workload=workload,
        workload_path=path,
        settings=settings,
        profile=profile,
        notes=() if note is None else (note,),
    )


def try_out(prepared: Prepared, tasks: Collection[str]) -> list[str]:
    """Run the workload on two samples in this process, before any worker starts.

    Args:
        prepared: checked.
        tasks: that are to be trained.

    Returns:
        What could not be tried, in words.

    Raises:
        InvalidInputError: names the field of the workload that is wrong.
    """
    from mmplan.schema.dry_run import dry_run

    modules = prepared.profile.modules if prepared.profile else {}
    return dry_run(
        prepared.workload,
        prepared.workload_path.parent,
        tasks=tasks,
        sharded=prepared.plan.cuts_parameters,
        sizes={name: module.parameters for name, module in modules.items()},
    )


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
    from mmlaunch.run.training_worker import CHECKPOINTS, TrainJob, TrainResult

    sets = sets_of_run(prepared.plan, prepared.workload, options.tasks)
    run_dir = run_folder(options, prepared.plan)
    # A run that is under way goes on with the plans that lie there.
    check_free(run_dir, options.meeting.node_rank)
    # One machine writes what belongs to the run; the folder is everybody's.
    writes = options.meeting.node_rank == 0
    steps = prepared.workload.train.steps if options.steps is None else options.steps
    segments = make_segments(
        sets,
        start=first_step(run_dir, CHECKPOINTS, resume=options.resume),
        steps=steps,
        plan=prepared.plan,
        workload=prepared.workload,
        path=options.plan.absolute(),
        run_dir=run_dir,
        planner=planner,
        is_first_node=writes,
    )
    row_hashes = [
        rank_hashes(s.path, prepared.workload_path, is_own=s.plan is not prepared.plan)
        for s in segments
    ]
    record = RunRecord(
        run_dir,
        prepared.workload_path,
        settings=prepared.settings,
        steps=steps,
        emulated=options.emulation is not None,
    )
    if writes:
        record.write(segments[0])
    on_event({"kind": "start", "run_dir": str(run_dir)})
    if options.resume and writes and not any((run_dir / CHECKPOINTS).glob("*")):
        note = f"--resume: {run_dir} holds no checkpoint, so the run begins at step 0"
        on_event({"kind": "note", "message": note})

    def on_worker_event(event: dict[str, Any]) -> None:
        if event.get("kind") == "segment":
            segment = segments[event["segment"]]
            if writes:
                record.write(segment, step=event["step"])
            event = {"kind": "segment", "segment": segment, "of": len(segments)}
        elif event.get("launcher") == "restart" and writes:
            record.restart(event["cause"])
        elif event.get("kind") == "slow" and writes:
            record.slow({key: event[key] for key in ("step", "rank", "instruction", "times")})
        elif event.get("kind") in ("checkpoint", "resumed") and writes:
            record.good(event["step"])
        on_event(event)

    try:
        with _data_node(options.data_address) as data_node:
            job = TrainJob(
                segments=segments,
                row_hashes=row_hashes,
                workload=prepared.workload_path.absolute(),
                settings=prepared.settings,
                steps=steps,
                options=options,
                data_node=data_node,
            )
            told = _launcher()(
                entry="mmlaunch.run.training_worker:train",
                args=(job,),
                num_ranks=prepared.plan.devices,
                run_dir=run_dir,
                timeout_s=options.timeout_s,
                start_timeout_s=options.start_timeout_s,
                max_restarts=options.max_restarts,
                meeting=options.meeting,
                per_node=_per_node(prepared.plan, options),
                on_event=on_worker_event,
            )
    except (MMPlanError, KeyboardInterrupt) as error:
        if writes and not options.resume and not _holds_steps(run_dir, CHECKPOINTS):
            # Nothing was trained: the folder is free for the next try.
            (run_dir / _RECORD).unlink(missing_ok=True)
        elif writes:
            with suppress(
                MMPlanError, OSError, ValueError
            ):  # the error's own cause may be the disk
                record.finish("failed", cause=str(error) or "interrupted")
        raise
    results = TypeAdapter(list[TrainResult]).validate_python(told)
    held = {r.rank: r.memory_bytes for r in results if r.memory_bytes is not None}
    if writes:
        record.finish(
            "stopped" if results[0].stopped else "done",
            cause=results[0].ended_early,
            memory_bytes=held if options.emulation is None else None,
        )
    return RunSummary(
        run_dir=run_dir,
        steps=results[0].step,
        stopped=results[0].stopped,
        starved=results[0].starved,
        ended_early=results[0].ended_early,
        segment=segments[results[0].segment],
        spans={result.rank: result.spans for result in results},
        memory_bytes=held,
    )


def verify(
    options: RunOptions,
    prepared: Prepared,
    *,
    steps: int,
    workers: Workers = "processes",
    originals: Sequence[str] = (),
) -> Verified:
    """Planned steps and a reload held against one process.

    Args:
        options: of the command line.
        prepared: checked.
        steps: of the optimizer.
        workers: what the ranks are.
        originals: ``[module=]package.module:callable`` of the uncut model, or of several.

    Raises:
        WorkerFailedError: a rank as a process died or hung.
    """
    from mmlaunch.comm.inprocess import InProcessWorld
    from mmlaunch.comm.strict import StrictWorld

    uncut = _verify_originals(prepared, originals) if originals else None
    devices, strict = prepared.plan.devices, workers == "strict"
    rules = StrictWorld(devices) if strict else None
    device = _check_device(prepared) if strict else None
    world = rules or (InProcessWorld(devices) if workers == "threads" else None)
    verdict = failure = None
    try:
        verdict = _verdict(options, prepared, steps=steps, world=world)
    except MMPlanError as error:
        if rules is None:
            raise
        failure = error
    return Verified(
        devices=devices,
        verdict=verdict,
        failure=failure,
        original=", ".join(originals) or None,
        uncut=uncut,
        device=device,
        rules=rules,
    )


def _verdict(
    options: RunOptions, prepared: Prepared, *, steps: int, world: InProcessWorld | None
) -> Verdict:
    from mmlaunch.session.verify import judge

    folder = prepared.workload_path.parent
    with tempfile.TemporaryDirectory(prefix="mmlaunch-verify-") as run_dir:
        records = Path(run_dir) / "records"
        records.mkdir()
        if world is not None:
            _verify_threads(prepared, folder, steps, records, world)
        else:
            _launcher()(
                entry="mmlaunch.run.training_worker:verify",
                args=(
                    str(options.plan.absolute()),
                    str(prepared.workload_path.absolute()),
                    steps,
                    records,
                ),
                num_ranks=prepared.plan.devices,
                run_dir=Path(run_dir),
                timeout_s=options.timeout_s,
                start_timeout_s=options.start_timeout_s,
                stops_in_order=False,
            )
        return judge(prepared.workload, folder, prepared.plan, records, steps)


def shrunk(prepared: Prepared) -> Prepared:
    """The small likeness of a plan, and the workload with its batches.

    Raises:
        UnfitEnvironmentError: the memory does not hold it and the reference in one process.
    """
    from mmlaunch.measure.machine import memory_bytes
    from mmlaunch.session.smaller_plans import likeness
    from mmplan.schema.factories import build_module

    plan, workload = likeness(prepared.plan, prepared.workload)
    held = weights = 0.0
    for unit in plan.units:
        module = build_module(workload, unit.module, prepared.workload_path.parent, device="meta")
        own_bytes = sum(parameter.nbytes for parameter in module.parameters())
        blocks = sum(high - low for low, high in unit.blocks)
        part_bytes = own_bytes * blocks / plan.tasks[unit.task].modules[unit.module].blocks
        weights += part_bytes
        held += unit.dp * part_bytes
    needed = _COPIES_OF_A_RANK * held + _COPIES_OF_THE_REFERENCE * weights
    there = memory_bytes(1)
    if needed > there:
        raise UnfitEnvironmentError(
            f"--shrink: {plan.devices} ranks and the reference hold {size(needed)} in one process "
            f"(weights alone {size(weights)}), this machine has {size(there)}",
            hint="lower blocks and widths in the workload's args, profile and solve that",
        )
    return replace(prepared, plan=plan, workload=workload)


def _check_device(prepared: Prepared) -> AcceleratorVerdict:
    """One step of each distinct rank on an accelerator without hardware."""
    from mmlaunch.session.accelerator_check import check_on_accelerator

    folder = prepared.workload_path.parent
    return check_on_accelerator(prepared.plan, prepared.workload, folder)


def _verify_originals(prepared: Prepared, originals: Sequence[str]) -> OriginalVerdict:
    """The workload's cut modules against the models before they were cut."""
    from mmlaunch.session.original import OriginalVerdict, compare_original
    from mmplan.program.compile import compile_plan

    program, folder = compile_plan(prepared.plan), prepared.workload_path.parent
    found = [compare_original(prepared.workload, folder, program, each) for each in originals]
    return OriginalVerdict(
        compared=sum(each.compared for each in found),
        share=max(each.share for each in found),
        differences=tuple(item for each in found for item in each.differences),
    )


def _data_node(address: str | None) -> AbstractContextManager[Path | None]:
    """This machine in the cluster that prepares data."""
    if address is None:
        return nullcontext()
    from mmlaunch.data.ray_node import joined

    return joined(address)


def _launcher() -> Launcher:
    """The launcher of this machine; a batch system's own would be chosen here."""
    from mmlaunch.launch.launch import launch

    return launch


def _verify_threads(
    prepared: Prepared, folder: Path, steps: int, records: Path, world: InProcessWorld
) -> None:
    import torch

    from mmlaunch.session.session import Session
    from mmlaunch.session.verify import planned_steps

    def entry(transport: InProcessTransport) -> None:
        session = Session(
            plan=prepared.plan,
            workload=prepared.workload,
            folder=folder,
            transport=transport,
            heartbeat=transport.heartbeat,
            profile=prepared.profile,
        )
        planned_steps(session, steps, records)

    torch.set_num_threads(1)
    world.run(entry)


class RunRecord:
    """The record of a run folder: at any time the segment that runs and those before it.

    Args:
        run_dir: the run's folder.
        workload_path: the workload's file.
        settings: that the run has beside it.
        steps: at which it ends.
        emulated: whether computes are waits, so that times are no measurement of computing.
    """

    def __init__(
        self,
        run_dir: Path,
        workload_path: Path,
        *,
        settings: Mapping[str, Any] | None = None,
        steps: int | None = None,
        emulated: bool = False,
    ) -> None:
        self._emulated, self._settings = emulated, dict(settings or {})
        self._run_dir, self._workload_path = run_dir, workload_path
        self._started_at = _now()
        self._steps = steps
        self._first_step: int | None = None

    def write(self, segment: Segment, *, step: int | None = None) -> None:
        """Say that a segment's plan trains from a step on.

        Args:
            segment: that runs.
            step: where it began; None before that is known.
        """
        prediction = segment.plan.predicted
        sha256 = file_sha256(segment.path)
        history = self._history()
        found = _recorded(self._run_dir, "restarts", [])
        restarts = [cast("dict[str, Any]", entry) for entry in found if isinstance(entry, dict)]
        others = {name: _recorded(self._run_dir, name, []) for name in ("slow_ranks", "resizes")}
        good = _recorded(self._run_dir, "last_good", -1)
        if self._first_step is None:
            self._first_step = step
        if step is not None and restarts and "from_step" not in restarts[-1]:
            restarts[-1]["from_step"] = step
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
            **({"set": self._settings} if self._settings else {}),
            "devices": segment.plan.devices,
            "started_at": self._started_at,
            **({} if self._first_step is None else {"started_step": self._first_step}),
            **({} if self._steps is None else {"steps": self._steps}),
            "cores": os.cpu_count(),
            **({"emulated": True} if self._emulated else {}),
            "predicted_iteration_s": prediction.iteration_s,
            "segments": history,
            **({"restarts": restarts} if restarts else {}),
            **{name: entries for name, entries in others.items() if entries},
            **({"last_good": good} if good >= 0 else {}),
        }
        _store_record(self._run_dir, record)
        write_text(self._run_dir / "plan.json", segment.path.read_text(encoding="utf-8"))

    def restart(self, cause: str) -> None:
        """Add that all workers start anew, when and why; :meth:`write` adds from which step."""
        self._append("restarts", {"at": _now(), "cause": cause})

    def slow(self, rank: Mapping[str, Any]) -> None:
        """Add a rank that was found to be slow."""
        self._append("slow_ranks", {"at": _now(), **rank})

    def good(self, step: int) -> None:
        """Mark the last good checkpoint: it was saved just now, or a start has gone on from it."""
        _store_meanwhile(self._run_dir, _read_record(self._run_dir) | {"last_good": step})

    def _append(self, field: str, entry: Mapping[str, Any]) -> None:
        add_to_record(self._run_dir, field, entry)

    def finish(
        self, how: str, *, cause: str | None = None, memory_bytes: Mapping[int, int] | None = None
    ) -> None:
        """Add that the run is over.

        Args:
            how: done, stopped or failed.
            cause: of a failure, or why training ended early.
            memory_bytes: peak of the last segment's steps, by rank; None where none counts.
        """
        record = _read_record(self._run_dir)
        record["ended"] = {"at": _now(), "how": how, **({"cause": cause} if cause else {})}
        if memory_bytes is not None:
            held = sorted(memory_bytes.items())
            record["memory_bytes"] = {str(rank): num_bytes for rank, num_bytes in held}
        _store_record(self._run_dir, record)

    def _history(self) -> list[dict[str, Any]]:
        """Segments that the folder's record has; none where it cannot be read."""
        found = _recorded(self._run_dir, "segments", [])
        try:
            entries = [cast("dict[str, Any]", dict(entry)) for entry in found]
            return [e for e in entries if isinstance(e["from_step"], int) and e["plan_sha256"]]
        except (ValueError, KeyError, TypeError):
            return []


def add_to_record(run_dir: Path, field: str, entry: Mapping[str, Any]) -> None:
    """Append to a list of a run folder's record, while the run goes on."""
    record = _read_record(run_dir)
    record.setdefault(field, []).append(entry)
    _store_meanwhile(run_dir, record)


def _store_meanwhile(run_dir: Path, record: Mapping[str, Any]) -> None:
    # A disk that is full for a moment is no reason to end a run.
    with suppress(UnfitEnvironmentError):
        _store_record(run_dir, record)


def _read_record(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / _RECORD).read_text(encoding="utf-8"))


def _store_record(run_dir: Path, record: Mapping[str, Any]) -> None:
    write_text(run_dir / _RECORD, json.dumps(record, indent=1) + "\n")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _recorded(run_dir: Path, field: str, default: Any) -> Any:
    """A field of a run folder's record; the default where it has none of that type."""
    path = run_dir / _RECORD
    try:
        record = parse_json(read_text(path), path)
    except InvalidInputError:
        return default
    found = cast("dict[str, Any]", record).get(field) if isinstance(record, dict) else None
    return found if isinstance(found, type(default)) else default


def _check_devices(plan: Plan, options: RunOptions) -> None:
    if plan.cluster.device.is_cpu or os.environ.get("MMLAUNCH_DEVICE", "").lower() == "cpu":
        return
    import torch

    needed = _per_node(plan, options)
    available = torch.cuda.device_count()
    if available < needed:
        raise InvalidInputError(
            f"{options.plan}: planned for {needed} {plan.cluster.device.name} devices on this "
            f"machine, which has {available}",
            hint=f"solve with --devices {max(available, 1)}, or run all ranks as processes: "
            "MMLAUNCH_DEVICE=cpu",
        )


def _check_profiled_steps(workload: Workload, options: RunOptions) -> None:
    steps = workload.train.steps if options.steps is None else options.steps
    if options.profile is not None and options.profile[0] >= steps:
        first, end = options.profile
        raise InvalidInputError(
            f"--profile {first}:{end}: the run has {counted(steps, 'step')}, counted from 0",
            hint="name steps that are trained, or train more of them: --steps",
        )


def _per_node(plan: Plan, options: RunOptions) -> int:
    """Ranks of a machine: the cluster's, or all of them on one."""
    return plan.devices if options.meeting.num_nodes == 1 else plan.cluster.devices_per_node


def _check_machines(plan: Plan, options: RunOptions) -> None:
    asked = options.meeting.num_nodes
    if asked == 1:
        return
    planned = -(-plan.devices // plan.cluster.devices_per_node)
    if asked != planned:
        raise InvalidInputError(
            f"--nnodes {asked}: {options.plan} is for {counted(planned, 'node')} with "
            f"{counted(plan.cluster.devices_per_node, 'device')} each",
            hint=f"give --nnodes {planned}, or solve for a --cluster of {asked} nodes",
        )
    if options.run_dir is None:
        raise InvalidInputError(
            f"{counted(asked, 'node')} and no run folder",
            hint="give --run-dir, a folder that all of them share",
        )


def run_folder(options: RunOptions, plan: Plan) -> Path:
    """The run's folder: the one that is named, or the next free one of ``runs``.

    Raises:
        InvalidInputError: it holds another run, or none where one is resumed.
    """
    if options.run_dir is not None:
        if options.meeting.node_rank > 0:
            # Machine 0 has claimed it, or will.
            return options.run_dir
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
