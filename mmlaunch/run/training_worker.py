"""Entries of the processes of ``mmlaunch run`` and ``mmlaunch verify``."""

from __future__ import annotations

import gc
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmlaunch.checkpoint.background import Saved
from mmlaunch.checkpoint.folder import clean, step_folders
from mmlaunch.checkpoint.restore import prove
from mmlaunch.comm.transport import DistTransport
from mmlaunch.data.producers import Producers
from mmlaunch.launch import failures
from mmlaunch.launch.worker_main import WorkerContext
from mmlaunch.process.device import garbage_steps
from mmlaunch.process.garbage import PacedGarbage
from mmlaunch.process.peak_memory import PeakMemory
from mmlaunch.run.callbacks import Callbacks, RunInfo
from mmlaunch.run.data_watch import DataWatch
from mmlaunch.run.loss_jumps import LossJumps
from mmlaunch.run.metrics_log import MetricsLog
from mmlaunch.run.options import RunOptions
from mmlaunch.run.segments import Segment
from mmlaunch.run.slow_ranks import slow_ranks_of
from mmlaunch.run.step_profile import FOLDER, StepProfile
from mmlaunch.session.session import NotFiniteStep, Session
from mmlaunch.session.verify import planned_steps
from mmplan.errors import InvalidInputError, RunFailedError, UnfitEnvironmentError
from mmplan.schema.base import write_text

CHECKPOINTS = "checkpoints"
WEIGHTS = "final.safetensors"
NOT_FINITE = "not-finite"
# Steps on an accelerator of which one is timed.
_TIMED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """The job of every worker of a run.

    Attributes:
        segments: of the run, one after another; the last one ends with the run.
        row_hashes: of each segment, the hash of the row that each rank must execute.
        workload: path of the workload.
        settings: fields of the workload with other values, dotted.
        steps: optimizer steps in all.
        options: of the command line.
        data_node: folder of this machine's node of the cluster that prepares data.
    """

    segments: Sequence[Segment]
    row_hashes: Sequence[Sequence[str | None]]
    workload: Path
    settings: Mapping[str, Any]
    steps: int
    options: RunOptions
    data_node: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """A worker's result.

    Attributes:
        step: steps done.
        stopped: whether it ended early, on request or for want of data.
        starved: whether for want of data.
        ended_early: why training ended before its last step, of itself; None where it did not.
        segment: index of the segment that it ended in.
        spans: (instruction index, start_s, end_s) of the last step on this rank.
        memory_bytes: the peak of the segment's steps; None where the system does not tell.
    """

    rank: int
    step: int
    stopped: bool
    starved: bool = False
    ended_early: str | None = None
    segment: int
    spans: list[tuple[int, float, float]]
    memory_bytes: int | None = None


def train(ctx: WorkerContext, job: TrainJob) -> TrainResult:
    """Train until the last step or a request to stop; save and write the weights.

    Where another segment begins, a checkpoint is saved and loaded under that segment's plan, in
    the same processes.
    """
    _report(ctx, {"kind": "note", "message": ctx.device.note()})
    transport = DistTransport(ctx.device.device, ctx.heartbeat, ctx.timeout_s)
    folder = ctx.run_dir / CHECKPOINTS
    # A worker that is started anew after a failure always goes on from the last save.
    going_on = job.options.resume or ctx.attempt > 0
    skip_damaged = job.options.skip_damaged
    newest = _newest(ctx, transport, folder, skip_damaged=skip_damaged) if going_on else None
    if newest is not None:
        _report(ctx, {"kind": "resumed", "step": int(newest.name.removeprefix("step-"))})
    if ctx.attempt:
        # Not "of N": restarts are counted within an hour.
        from_ = "step 0" if newest is None else newest.name
        _report(ctx, {"kind": "note", "message": f"attempt {ctx.attempt + 1}, from {from_}"})
    trainer = _Trainer(ctx, job, transport)
    index = _segment_at(job, newest)
    result = trainer.train(index, newest, proven=True)
    while not (result.stopped or result.ended_early) and result.step < job.steps:
        # The last plan's model and groups must be gone before the next ones come.
        gc.collect()
        if ctx.device.device.type == "cuda":
            torch.cuda.empty_cache()
        transport.forget_groups()
        index += 1
        result = trainer.train(index, folder / f"step-{result.step}")
    trainer.end(result)
    return result


class _Trainer:
    """Trains the segments of a run on one rank.

    Args:
        ctx: the worker's.
        job: the run.
        transport: of all segments.
    """

    def __init__(self, ctx: WorkerContext, job: TrainJob, transport: DistTransport) -> None:
        self._ctx, self._job, self._transport = ctx, job, transport
        self._log: MetricsLog | None = None
        self._callbacks: Callbacks | None = None
        self._profile = StepProfile(job.options.profile, ctx.run_dir / FOLDER, ctx.rank)
        self._data_watch = DataWatch(ctx, job.options.num_workers)

    def train(self, index: int, checkpoint: Path | None, *, proven: bool = False) -> TrainResult:
        """Train one segment to its end, from a checkpoint or from the initial weights.

        At its end there is a checkpoint, or after the last segment the weights.

        Args:
            index: of the segment.
            checkpoint: to go on from.
            proven: whether its files were found whole.
        """
        ctx, job, options = self._ctx, self._job, self._job.options
        segment = job.segments[index]
        with Session.from_plan(
            segment.path,
            workload=job.workload,
            settings=job.settings,
            timeout_s=ctx.timeout_s,
            transport=self._transport,
            heartbeat=ctx.heartbeat,
            num_workers=options.num_workers or 0,
            producers=_producers(ctx, job),
            should_stop=ctx.should_stop,
            emulation=options.emulation,
            row_sha256=job.row_hashes[index][ctx.rank],
        ) as session:
            if ctx.rank == 0:
                session.hooks.on_not_finite.append(partial(_keep_not_finite, ctx))
            if job.data_node is None:
                self._data_watch.follow(session, segment.until)
            for note in session.notes:
                _report(ctx, {"kind": "note", "message": note})
            # Before any state is there, and after all imports: optimizers' are large too.
            memory = PeakMemory(ctx.device.device)
            memory.begin(session.model.tensors())
            if checkpoint is not None:
                anyway = options.resume_anyway
                for change in session.load(checkpoint, anyway=anyway, proven=proven):
                    _report(ctx, {"kind": "note", "message": f"resuming anyway: {change}"})
                # Who loads for longer than others is waited for here: a step has less time.
                self._transport.gather_objects(None)
            _report(ctx, {"kind": "segment", "segment": index, "step": session.step_count})
            with PacedGarbage(garbage_steps()) as garbage:
                stopped, starved, spans = self._steps(session, segment, memory, garbage)
            stop, early = session.early_stop, None
            if stop is not None and stop.is_over and not stopped:
                early = f"after step {session.step_count}: {stop.reason()}"
                _report(ctx, {"kind": "note", "message": f"training ends early, {early}"})
            is_done = early is not None or session.step_count >= job.steps
            if not stopped and is_done and options.emulation is None:
                session.write_weights(ctx.run_dir / WEIGHTS)
            return TrainResult(
                rank=ctx.rank,
                step=session.step_count,
                stopped=stopped,
                starved=starved,
                ended_early=early,
                segment=index,
                spans=spans,
                memory_bytes=memory.most_bytes,
            )

    def _steps(
        self, session: Session, segment: Segment, memory: PeakMemory, garbage: PacedGarbage
    ) -> tuple[bool, bool, list[tuple[int, float, float]]]:
        """Train and save; whether it stopped early, for want of data, and the last step's times."""
        job, save_every = self._job, self._job.options.save_every
        if self._log is None and session.rank == 0:
            self._log = self._begin(session)
        if self._log is not None:
            given = segment.path == job.options.plan.absolute()
            predicted = job.options.predicted if given else None
            self._log.watch(slow_ranks_of(session, predicted), session.step_count)
        # On CUDA that takes two events for each instruction and wait.
        timed = 1 if self._ctx.device.device.type == "cpu" else _TIMED
        stopped, starved, spans = False, False, []
        memory.forget()
        while session.step_count < segment.until and not (stopped or _is_over(session)):
            step = session.step_count
            self._profile.before_step(step)
            result = session.step(timed=step % timed == 0 or step == job.steps - 1)
            memory.note()
            spans = [(s.index, s.start_s, s.end_s) for s in result.spans] or spans
            starved = result.starved
            if self._log is not None and not starved:
                self._log.add(session, result)
            step = session.step_count
            garbage.after_step(step)
            self._tell_profile(self._profile.after_step(step))
            stopped = result.stop and step < job.steps
            if not starved:
                self._evaluate(session, last=step == job.steps)
            at_end = stopped or step == segment.until or _is_over(session)
            if at_end:
                memory.end(_tensors(session))
            # The last step is saved too: a later run may go on from it with more --steps.
            due = save_every and (step == job.steps or step % save_every == 0)
            self._hear_of(session.saved(wait=bool(due or at_end)))
            if due or (at_end and step < job.steps):
                self._save(session, at_end=at_end)
                memory.forget()
        self._tell_profile(self._profile.end())
        return stopped, starved, spans

    def _begin(self, session: Session) -> MetricsLog:
        """On rank 0, before its first step."""
        job, workload = self._job, session.workload
        self._callbacks = Callbacks(workload, session.folder)
        info = RunInfo(
            name=workload.name,
            run_dir=self._ctx.run_dir,
            step=session.step_count,
            workload=workload.model_dump(mode="json"),
        )
        self._callbacks.on_begin(info)
        if session.evaluation is not None and (left := session.evaluation.left_out):
            _report(self._ctx, {"kind": "note", "message": f"train.eval: {left}"})
        return MetricsLog(
            self._ctx,
            session.step_count,
            LossJumps(workload.train.loss_jump),
            self._callbacks,
            emulated=job.options.emulation is not None,
        )

    def end(self, result: TrainResult) -> None:
        """Tell callbacks that training is over, in order."""
        if self._callbacks is not None:
            done = "stopped" if result.stopped else "done"
            self._callbacks.on_end(result.step, result.ended_early or done)

    def _evaluate(self, session: Session, *, last: bool) -> None:
        """Evaluate where it is time to."""
        if session.evaluation is None or session.workload.train.eval is None:
            return
        step = session.step_count
        if not last and step % session.workload.train.eval.every:
            return
        values = session.run_evaluation()
        if session.early_stop is not None:
            session.early_stop.add(step, values)
        if self._log is not None:
            self._log.evaluated(step, values)

    def _tell_profile(self, path: Path | None) -> None:
        if path is not None:
            first, end = self._job.options.profile or (0, 0)
            steps = f"step {first}" if end == first + 1 else f"steps {first} to {end - 1}"
            message = f"profile of {steps}, counted from 0: {path}, and one of each other rank"
            _report(self._ctx, {"kind": "note", "message": message})

    def _save(self, session: Session, *, at_end: bool) -> None:
        """Save, or begin to; a failure ends training only where there is no later save."""
        folder, options = self._ctx.run_dir / CHECKPOINTS, self._job.options
        step, keep_s = session.step_count, options.keep_every_s
        try:
            if options.async_save and not at_end:
                session.begin_save(folder, keep_every_s=keep_s)
            else:
                path = session.save(folder, keep_every_s=keep_s)
                self._hear_of(Saved(step=step, path=path))
        except UnfitEnvironmentError as error:
            # The same on all ranks.
            if at_end:
                raise
            self._hear_of(Saved(step=step, error=error))

    def _hear_of(self, saved: Saved | None) -> None:
        """Tell the launcher how a save has ended."""
        if saved is None:
            return
        if saved.error is not None:
            message = f"step {saved.step} is not saved, training goes on: {saved.error.message}"
            _report(self._ctx, {"kind": "note", "message": message})
        else:
            event = {"kind": "checkpoint", "step": saved.step, "path": str(saved.path)}
            _report(self._ctx, event)
            if self._callbacks is not None and saved.path is not None:
                self._callbacks.on_checkpoint(saved.step, saved.path)


def _is_over(session: Session) -> bool:
    """Whether early stop ends the run; the same on all ranks."""
    return session.early_stop is not None and session.early_stop.is_over


def _producers(ctx: WorkerContext, job: TrainJob) -> Producers | None:
    if job.data_node is None:
        return None
    return Producers(
        address=str(job.options.data_address),
        folder=job.data_node,
        # The address of the run's store, which no other run has while this one is on.
        run=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}-{ctx.run_dir}",
        wait_s=job.options.data_wait_s,
        tell=lambda line: ctx.report({"kind": "note", "message": line}),
        should_stop=ctx.should_stop,
    )


def _tensors(session: Session) -> Iterator[Tensor]:
    """A rank's tensors between two steps: parameters, buffers and optimizer state."""
    yield from session.model.tensors()
    states = session.optimizer.state.values() if session.optimizer is not None else ()
    yield from (item for state in states for item in state.values() if torch.is_tensor(item))


def verify(ctx: WorkerContext, plan: str, workload: str | None, steps: int, records: Path) -> None:
    """Some planned steps; this rank's records and a checkpoint lie in a folder."""
    with Session.from_plan(
        plan, workload=workload, timeout_s=ctx.timeout_s, heartbeat=ctx.heartbeat
    ) as session:
        planned_steps(session, steps, records)


def _newest(
    ctx: WorkerContext, transport: DistTransport, folder: Path, *, skip_damaged: bool
) -> Path | None:
    """The newest checkpoint that is whole and on which no earlier attempt died; for all ranks.

    Raises:
        InvalidInputError: the newest one is damaged, and a person has asked for it.
        RunFailedError: there are some, and none is left.
    """
    damaged: set[int] = set()
    while True:
        step = None
        # The others must look after the cleaning, and all must take the same one.
        if transport.rank == 0:
            step = _choose(ctx, folder, damaged)
        step = transport.broadcast_object(step, 0)
        if step is None:
            return None
        path = folder / f"step-{step}"
        ranks, gather = transport.world_size, transport.gather_objects
        try:
            prove(path, rank=transport.rank, num_ranks=ranks, gather=gather)
        except InvalidInputError as error:
            if not (ctx.attempt or skip_damaged):
                raise
            _report(ctx, {"kind": "note", "message": f"{error.message}: trying the one before"})
            damaged.add(step)
        else:
            return path


def _choose(ctx: WorkerContext, folder: Path, damaged: set[int]) -> int | None:
    """The step of the newest checkpoint but for those that are damaged or killed attempts."""
    clean(folder)
    saved = [step for step, _ in step_folders(folder)]
    fatal = failures.died_on(ctx.failures_dir, attempt=ctx.attempt, saved=saved)
    left = [step for step in saved if step not in damaged | fatal]
    if saved and not left:
        raise RunFailedError(
            f"every checkpoint in {folder} is damaged, or restarts died on it",
            hint="the records beside it say of what; move these away to begin anew",
        )
    for step in saved:
        if step in fatal and step > left[-1] and not damaged:
            message = f"earlier attempts died on step-{step}: it is passed over"
            _report(ctx, {"kind": "note", "message": message})
    if left:
        failures.write_start(ctx.failures_dir, attempt=ctx.attempt, step=left[-1])
    return left[-1] if left else None


def _segment_at(job: TrainJob, checkpoint: Path | None) -> int:
    """Index of the segment that a checkpoint goes on with."""
    step = 0 if checkpoint is None else int(checkpoint.name.removeprefix("step-"))
    if step < job.segments[0].from_step:
        raise RunFailedError(
            f"the newest checkpoint is of step {step}, a later one is gone since this run started",
            hint="run again with --resume",
        )
    return max(i for i, segment in enumerate(job.segments) if segment.from_step <= step)


def _keep_not_finite(ctx: WorkerContext, session: Session, step: NotFiniteStep) -> None:
    """Write which samples and parameters a step that is not finite had."""
    path = ctx.run_dir / NOT_FINITE / f"step-{step.step}.json"
    path.parent.mkdir(exist_ok=True)
    fields = asdict(step) | {"loss": step.loss if math.isfinite(step.loss) else None}
    write_text(path, json.dumps(fields) + "\n")
    skips = session.workload.train.non_finite == "skip"
    why = f"nothing is updated: {step.error().message}; " if skips else ""
    message = f"{why}the samples of step {step.step} stand in {path}"
    _report(ctx, {"kind": "note", "message": message})


def _report(ctx: WorkerContext, event: dict[str, Any]) -> None:
    if ctx.rank == 0:
        ctx.report(event)
