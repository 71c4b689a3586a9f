"""The training loop as a small API: a plan in, steps out.

Under torchrun, in a script of your own::

    import mmlaunch

    with mmlaunch.Session.from_plan("plan.json") as session:
        for result in session.steps(200):
            if session.rank == 0 and result.step % 50 == 0:
                print(result.step, result.loss)
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmlaunch.checkpoint.background import BackgroundSaves, Saved
from mmlaunch.checkpoint.restore import open_checkpoint, prove
from mmlaunch.checkpoint.save import Content, Entry
from mmlaunch.checkpoint.save import save as save_together
from mmlaunch.comm.batches import Tree, map_tensors
from mmlaunch.comm.row_exchange import RowExchange
from mmlaunch.comm.transport import DistTransport, Pieces, Transport, Work
from mmlaunch.data.loader import StepData
from mmlaunch.data.producers import Producers
from mmlaunch.data.task_data import TaskData
from mmlaunch.execute.blocks import StageBlocks
from mmlaunch.execute.compiled_blocks import CompiledBlocks
from mmlaunch.execute.emulate import EmulatedBlocks
from mmlaunch.execute.executor import Executor, InstructionSpan
from mmlaunch.execute.reductions import Reductions
from mmlaunch.execute.warm_up import warm_up
from mmlaunch.model.local_model import LocalModel
from mmlaunch.model.precision import TrainingPrecision
from mmlaunch.model.seeds import Seeds
from mmlaunch.model.shape_inference import infer_shapes
from mmlaunch.model.whole_modules import whole_modules
from mmlaunch.process import process_group
from mmlaunch.process.device import async_tp_note, pick, set_numerics, warms_up
from mmlaunch.process.heartbeat import Heartbeat
from mmlaunch.session.early_stop import EarlyStop
from mmlaunch.session.evaluation import Evaluation
from mmlaunch.session.identity import (
    check_same_run,
    check_same_workload,
    find_profile,
    find_workload,
    identity_of,
)
from mmlaunch.session.inactive_tasks import InactiveTasks, check_holds, trained_by_others
from mmlaunch.session.own_times import OwnTimes
from mmlaunch.session.replicas import ParameterCopies
from mmlaunch.session.state import LocalState, gather_weights, write_final_weights
from mmlaunch.session.update import Update
from mmplan.errors import InvalidInputError, NotFiniteError
from mmplan.program.communicators import Channels, communicators
from mmplan.program.compile import compile_plan
from mmplan.program.model import Program, Timings
from mmplan.program.shards import Ranks
from mmplan.proof.rows import check_row
from mmplan.schema.agreement import check_agrees
from mmplan.schema.base import file_sha256
from mmplan.schema.factories import dtype_of
from mmplan.schema.fingerprints import check_model
from mmplan.schema.load import load_plan
from mmplan.schema.plan import Plan
from mmplan.schema.profile import Profile
from mmplan.schema.settings import with_settings
from mmplan.schema.workload import Workload, load_workload, resolve_tasks, value_name
from mmplan.wording import counted

T = TypeVar("T")

# Steps in a row that may be left out: more are no chance any more.
MOST_SKIPPED = 10


class _GroupSum(RowExchange):
    """A tensor-parallel group by a transport."""

    def __init__(self, transport: Transport, ranks: Ranks) -> None:
        super().__init__(ranks.index(transport.rank), len(ranks))
        self._transport, self._ranks = transport, ranks

    def all_reduce_large(self, tensor: Tensor) -> None:
        """See :class:`mmlaunch.comm.row_exchange.RowExchange`."""
        self._transport.all_reduce(tensor, self._ranks)

    def start_gather_flat(self, full: Tensor, mine: Tensor) -> Work:
        """See :class:`mmlaunch.comm.row_exchange.RowExchange`."""
        return self._transport.start_gather_flat(full, mine, self._ranks)

    def reduce_scatter_flat(self, mine: Tensor, full: Tensor) -> None:
        """See :class:`mmlaunch.comm.row_exchange.RowExchange`."""
        self._transport.start_reduce_scatter(mine, full, self._ranks).wait()

    def start_exchange(self, received: Pieces, sent: Pieces) -> Work:
        """See :class:`mmlaunch.comm.row_exchange.RowExchange`."""
        return self._transport.exchange(received, sent, self._ranks)


class Session:
    """One rank's part of a planned training run.

    Args:
        plan: the plan.
        workload: the workload that it was made for.
        folder: the workload file's folder.
        transport: this rank's; its world has as many ranks as the plan.
        heartbeat: told of every instruction.
        num_workers: data loading processes of this rank.
        producers: prepare the data in their place.
        meta: kept in checkpoints: the plan's hash.
        should_stop: asked once a step; see :class:`StepResult`.
        emulation: compute nothing, wait for such times instead; then nothing is updated.
        profile: of the plan; this rank's modules and losses must be those that it is of.
        row_sha256: of the row that this rank must execute, from the plan's certificate.

    Attributes:
        step_count: steps done, which is the number of the next one.
        update: this rank's optimizer and its parameters.
        evaluation: of the plan's tasks; None where the workload has none.
        early_stop: ends the run by evaluations; None where the workload does not ask for it.
        own_times: which kinds of instructions are timed, of every rank.
        loss_scale: of all modules' gradients in fp16; None for other types.
        hooks: functions to call on steps, losses and checkpoints.
        notes: lines that tell the user how this run works and why.

    Raises:
        InvalidInputError: the plan needs another number of ranks, a factory is wrong, or it
            builds another model than was profiled.
        RunFailedError: this rank would execute another row than the certificate has.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        workload: Workload,
        folder: Path,
        transport: Transport,
        heartbeat: Heartbeat | None = None,
        num_workers: int = 0,
        producers: Producers | None = None,
        meta: dict[str, Any] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        emulation: Timings | None = None,
        profile: Profile | None = None,
        row_sha256: str | None = None,
    ) -> None:
        check_agrees(plan, workload)
        if transport.world_size != plan.devices:
            raise InvalidInputError(
                f"the plan is for {counted(plan.devices, 'rank')}, {transport.world_size} were "
                "started",
                hint=f"start {counted(plan.devices, 'rank')}, or solve with --devices "
                f"{transport.world_size}",
            )
        check_same_workload(workload, transport)
        self.plan, self.workload, self.folder = plan, workload, folder
        self.transport = transport
        self.hooks = Hooks()
        self.step_count = 0
        # Steps left out in a row, and the dataset indices of this rank's samples by task.
        self._skipped = 0
        self._samples: dict[str, list[int]] = {}
        self._meta = meta or {}
        self._should_stop = should_stop
        self._heartbeat = heartbeat or Heartbeat.detached()
        self._owns_process_group = False
        self._emulation = emulation
        self.program = compile_plan(plan)
        if row_sha256 is not None:
            check_row(self.program, transport.rank, row_sha256)
        self._loss_weights = [
            (value_name(workload, loss.task, loss.name), float(loss.weight))
            for loss in self.program.losses
        ]
        self.own_times = OwnTimes(self.program, transport.rank)
        self._dtype = dtype_of(workload.train.precision)
        self._heartbeat.phase("building the model")
        if profile is not None:
            parts = _parts_of(self.program, transport.rank)
            check_model(profile, workload, folder, parts=parts)
        self.model = LocalModel(
            workload=workload,
            folder=folder,
            program=self.program,
            rank=transport.rank,
            device=transport.device,
            comm=cache(lambda ranks: _GroupSum(transport, ranks)),
        )
        channels = Channels(self.program)
        # All ranks add up the loss and the norm.
        everyone = tuple(range(transport.world_size)), 0
        self._heartbeat.phase("joining")
        transport.prepare([everyone, *communicators(self.program)], channels.links)
        tasks = resolve_tasks(workload)
        self._heartbeat.phase("loading data")
        self._data = TaskData(
            program=self.program,
            workload=workload,
            folder=folder,
            tasks={n: v for n, v in tasks.items() if n in plan.tasks},
            rank=transport.rank,
            num_workers=num_workers,
            pin_memory=transport.device.type == "cuda",
            producers=producers,
        )
        precision = TrainingPrecision(workload.train, transport.device)
        self.loss_scale = precision.loss_scale
        self._heartbeat.phase("building the model")
        specs = infer_shapes(
            self.program,
            self.model,
            transport,
            data=lambda task: self._data.of_task(task, 0),
            prepare=self._prepare,
            precision=precision,
            sequence_parallel=plan.training.sequence_parallel,
        )
        self._data.close()
        self._reductions = Reductions(
            self.program,
            self.model,
            transport,
            precision.narrow,
            narrow_gradients=workload.train.narrow_gradients,
        )
        gathered = self._reductions.gathered
        seeds = Seeds(workload.train.seed, transport.device)
        blocks = (
            StageBlocks(
                self.model,
                seeds,
                plan.recomputed_blocks,
                CompiledBlocks(transport.device) if workload.train.compile else None,
                gathered=gathered,
            )
            if emulation is None
            else EmulatedBlocks(self.model, seeds, specs, emulation, gathered=gathered)
        )

        def executor(kind: type[Executor], through: Transport, told: Heartbeat) -> Executor:
            return kind(
                program=self.program,
                model=self.model,
                transport=through,
                specs=specs,
                channels=channels,
                blocks=blocks,
                seeds=seeds,
                precision=precision,
                reductions=self._reductions,
                prepare=self._prepare,
                heartbeat=told,
            )

        warm = emulation is None and warms_up(transport.device, compiled=workload.train.compile)
        if warm:
            self._heartbeat.phase("loading data")
            warm_up(
                executor,
                model=self.model,
                seeds=seeds,
                transport=transport,
                heartbeat=self._heartbeat,
                data=self._data.step(0),
            )
            self._data.close()
            self._heartbeat.phase("building the model")
        self.executor = executor(Executor, transport, self._heartbeat)
        self._state = LocalState(self.program, self.model, transport.rank, self._reductions)
        # Where the plan is for every task of the workload all state is the session's own.
        self._inactive = (
            None
            if set(self.program.batches) == set(tasks)
            else InactiveTasks(
                workload=workload, folder=folder, program=self.program, transport=transport
            )
        )
        self.update = Update(
            workload.train,
            self._reductions,
            transport,
            sharded=plan.cuts_parameters,
            inactive=trained_by_others(self._inactive, self.model),
        )
        # Emulated steps update nothing.
        every = 0 if emulation is not None else workload.train.compare_replicas
        train = workload.train
        self.evaluation = (
            None
            if train.eval is None or emulation is not None
            else Evaluation(
                plan=plan,
                workload=workload,
                folder=folder,
                model=self.model,
                transport=transport,
                seeds=seeds,
                precision=precision,
                gathered=gathered,
                prepare=self._prepare,
                heartbeat=self._heartbeat,
                num_workers=num_workers,
            )
        )
        self.early_stop = EarlyStop(train.early_stop) if train.early_stop else None
        self._saves: BackgroundSaves | None = None
        self._replicas = (
            ParameterCopies(self.program, self.model, transport, without=gathered.names)
            if every
            else None
        )
        is_tensor_parallel = any(stage.tp > 1 for stage in self.program.stages)
        notes = [async_tp_note(transport.device)] if is_tensor_parallel else []
        if warm:
            notes.append("warmed up: each rank has taken step 0 alone, without an update")
        elif workload.train.compile and emulation is None:
            notes.append("blocks are compiled: the first steps take longer")
        everyone = transport.gather_objects(notes + self.model.notes)
        self.notes = list(dict.fromkeys(note for found in everyone for note in found))

    @classmethod
    def from_plan(
        cls,
        plan: str | Path,
        *,
        workload: str | Path | None = None,
        settings: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        transport: Transport | None = None,
        heartbeat: Heartbeat | None = None,
        num_workers: int = 0,
        producers: Producers | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        emulation: Timings | None = None,
        row_sha256: str | None = None,
    ) -> Session:
        """A session of this process, as started by torchrun or ``mmlaunch run``.

        Args:
            plan: path of plan.json.
            workload: path of the workload; default: the one that the plan names.
            settings: fields of the workload with other values: {"train.optimizer_args.lr": 1e-3}.
            timeout_s: longest wait for another rank; used when this call creates the
                process group.
            transport: of the process group; default: one of the session's own.
            heartbeat: told of every instruction.
            num_workers: data loading processes of this rank.
            producers: prepare the data in their place.
            should_stop: asked once a step.
            emulation: compute nothing, wait for such times instead.
            row_sha256: of the row that this rank must execute.

        The session trains the plan's tasks; changing them by ``train.tasks_from_step`` is what
        ``mmlaunch run`` does.

        Raises:
            InvalidInputError: a file is wrong, or the plan is for another workload.
        """
        path = Path(plan)
        loaded = load_plan(path)
        workload_path = find_workload(loaded, path, workload)
        device = pick(int(os.environ.get("LOCAL_RANK", "0")))
        if not loaded.cluster.device.is_cpu:
            process_group.check_planned(device, loaded.cluster.device.name)
        owns = not dist.is_initialized()
        if owns:
            alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
            device.apply(interface="lo" if alone else None)
            process_group.join_from_environment(device, timedelta(seconds=timeout_s))
        watch = heartbeat or Heartbeat.detached()
        trained = with_settings(load_workload(workload_path), settings or {})
        numerics = set_numerics(
            deterministic=trained.train.deterministic,
            tf32=trained.train.tf32,
            device=device.device,
        )
        if owns and device.device.type == "cuda":
            watch.follow(device.mark)
        try:
            session = cls(
                plan=loaded,
                workload=trained,
                folder=workload_path.parent,
                transport=transport or DistTransport(device.device, watch, timeout_s),
                heartbeat=watch,
                num_workers=num_workers,
                producers=producers,
                should_stop=should_stop,
                emulation=emulation,
                row_sha256=row_sha256,
                profile=find_profile(loaded, path)[0],
                meta={"plan_sha256": file_sha256(path)},
            )
        except BaseException:
            if owns:
                process_group.leave(failed=True)
            raise
        session._owns_process_group = owns
        if owns:
            session.notes.insert(0, device.note())
        session.notes += [device.settings(), numerics]
        return session

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """This rank's optimizer; None where it updates nothing."""
        return self.update.optimizer

    @property
    def data(self) -> TaskData:
        """This rank's loading of samples."""
        return self._data

    @property
    def gathered_names(self) -> set[str]:
        """Names of parameters of which this rank keeps a part only (ZeRO-3)."""
        return self._reductions.gathered.names

    @property
    def rank(self) -> int:
        """This rank."""
        return self.transport.rank

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def close(self, *, failed: bool = False) -> None:
        """Stop loading data, and leave the process group if this session created it.

        Args:
            failed: leave without a wait for messages that are under way. The end of a ``with``
                block by an exception does so.
        """
        self._data.close()
        if self.evaluation is not None:
            self.evaluation.close()
        if self._saves is not None:
            self._saves.close(failed=failed)
        if self._owns_process_group:
            self._heartbeat.done()
            process_group.leave(failed=failed)

    def steps(self, until: int) -> Iterator[StepResult]:
        """Train until ``until`` steps are done in all."""
        while self.step_count < until:
            yield self.step()

    def step(self, *, timed: bool = False) -> StepResult:
        """One whole forward, backward and update on the next batch.

        Args:
            timed: note when each instruction ran.

        Raises:
            NotFiniteError: the loss or a gradient is not finite and ``train.non_finite`` is stop,
                or there were too many in a row; the parameters are as before.
            RunFailedError: copies of a parameter differ (``train.compare_replicas``).
        """
        done = self.forward_backward(timed=timed)
        if done.starved:
            self.update.skip()
            return done
        if not (done.finite or self._emulation):
            return self._skip(done)
        self._skipped = 0
        # Before the update: with ZeRO-1 that overwrites copies from the rank that owns the part.
        if self._replicas and (done.step + 1) % self.workload.train.compare_replicas == 0:
            self._replicas.compare(done.step)
        for hook in self.hooks.on_loss:
            hook(self, done.loss)
        marks = [self.transport.mark()]
        norm = None if self._emulation else self.update.apply(self.step_count)
        marks.append(self.transport.mark())
        if self.loss_scale is not None:
            self.loss_scale.stepped()
        update_s = self.transport.seconds_of(marks)[-1]
        result = replace(done, grad_norm=norm, update_s=update_s)
        self.step_count += 1
        for hook in self.hooks.on_step:
            hook(self, result)
        return result

    def forward_backward(self, *, timed: bool = False) -> StepResult:
        """A step without its update; the gradients are left in ``.grad``.

        Where a gradient overflows in fp16 the same batch is taken again with a smaller scale.
        """
        asked = time.perf_counter()
        self._heartbeat.phase("loading data", self.step_count, slow=False)
        data = self._data.step(self.step_count)
        self._samples = {task: [*part.indices] for task, part in data.items()}
        for hook in self.hooks.on_data:
            hook(self, data)
        began = time.perf_counter()
        done = self._attempt(data, asked, began, timed=timed)
        scale = self.loss_scale
        if scale is None or done.starved:
            return done
        first = scale.state()
        while not done.finite and math.isfinite(done.loss) and scale.shrink():
            self.update.skip()
            done = self._attempt(data, asked, began, timed=timed)
        if done.finite:
            self.update.unscale(scale.value)
        else:
            # What no scale makes finite is no overflow.
            scale.load(first)
        return done

    def _attempt(
        self, data: Mapping[str, StepData], asked: float, began: float, *, timed: bool
    ) -> StepResult:
        """Forward, backward and sums of one batch, and what all ranks know of them.

        Args:
            data: this rank's samples by task.
            asked: when they were asked for.
            began: when they were there.
            timed: note when each instruction ran.
        """
        terms, marks = self.executor.run(self.step_count, data, timed=timed)
        part = terms.sum()
        vote = torch.full_like(part, self._should_stop())
        ranks, own = self.transport.world_size, self.own_times
        # Own times are of the last step: those of this one are not known before the device is done.
        times = part.new_zeros(ranks + len(own.cells))
        mine = [(self.rank, began - asked), *enumerate(own.seconds, ranks + own.first)]
        for index, seconds in mine:
            # Assigned as an item, a number would be copied to the device, and the copy waited for.
            if seconds:
                times[index].fill_(seconds)
        starved = torch.full_like(part, self._data.starved is not None)
        said = torch.stack([part, vote, starved, self.update.has_faults()])
        total = torch.cat([said, terms, times])
        self.transport.all_reduce(total, tuple(range(self.transport.world_size)))
        # All that the host must know of the step in one wait for the device.
        found = torch.cat([total, self._reductions.num_ranks()]).tolist()
        loss, votes, starving, faults = found[: len(said)]
        values = found[len(said) : len(said) + len(terms)]
        self._reductions.drop_missing(found[len(total) :])
        iteration_s = time.perf_counter() - began
        of_ranks = found[len(said) + len(terms) : len(total)]
        # Behind the wait: the device has come to all marks.
        spans = marks.spans()
        own.note(spans)
        return StepResult(
            step=self.step_count,
            loss=loss,
            losses=self._unweighted(values),
            grad_norm=None,
            iteration_s=iteration_s,
            update_s=0.0,
            data_s=began - asked,
            data_s_by_rank=of_ranks[:ranks],
            last_own_s=of_ranks[ranks:] if any(of_ranks[ranks:]) else [],
            stop=votes + starving > 0,
            starved=starving > 0,
            finite=math.isfinite(loss) and not faults,
            loss_scale=None if self.loss_scale is None else self.loss_scale.value,
            spans=spans,
        )

    def _unweighted(self, terms: Sequence[float]) -> dict[str, float]:
        """A step's terms without their weights; a loss of the weight 0 is left out."""
        named = zip(self._loss_weights, terms, strict=True)
        return {name: term / weight for (name, weight), term in named if weight}

    def _skip(self, done: StepResult) -> StepResult:
        """Leave a step out that is not finite, or end the run, as the workload says."""
        step = NotFiniteStep(
            step=done.step,
            loss=done.loss,
            gradients=self.update.faults(),
            samples=self.transport.gather_objects(self._samples),
        )
        for hook in self.hooks.on_not_finite:
            hook(self, step)
        error = step.error()
        if self.workload.train.non_finite == "stop":
            raise error
        self._skipped += 1
        if self._skipped > MOST_SKIPPED:
            raise NotFiniteError(
                f"{error.message}, as were the {MOST_SKIPPED} steps before", hint=error.hint
            )
        self.update.skip()
        self.step_count += 1
        for hook in self.hooks.on_step:
            hook(self, done)
        return done

    def run_evaluation(self) -> dict[str, float]:
        """Losses and metrics of the held-out data with the current weights, the same on all ranks.

        Ranks run the plan's forward passes; no rank holds more of the model than in a step.

        Raises:
            InvalidInputError: the workload has no ``train.eval``.
        """
        if self.evaluation is None:
            raise InvalidInputError(
                "the workload has no train.eval", hint="add train: {eval: {data: {factory: ...}}}"
            )
        return self.evaluation.run(self.step_count)

    def evaluate(self, function: Callable[[dict[str, nn.Module]], T]) -> T:
        """Call a function on rank 0 with whole modules and losses; all ranks get its result.

        Args:
            function: takes a dictionary: the modules by name, each called with its inputs, and
                the losses as ``losses.NAME``; in evaluation mode, with the current weights, on the
                CPU.
        """
        weights = gather_weights(self._state, self.transport)
        result = None
        if self.rank == 0:
            with torch.no_grad():
                result = function(whole_modules(self.workload, self.folder, self.program, weights))
        answer: Any = self.transport.broadcast_object(result, 0)
        return answer

    def save(self, folder: str | Path, *, keep: int = 2, keep_every_s: float | None = None) -> Path:
        """Write ``folder/step-N``, complete or not at all.

        Args:
            folder: of the checkpoints.
            keep: how many of the newest stay, at least 1.
            keep_every_s: beside them one of each so many seconds stays; None for none.

        Raises:
            UnfitEnvironmentError: the disk is full; earlier checkpoints stay.
            RunFailedError: copies of a parameter differ (``train.compare_replicas``).
        """
        content, entries = self._to_save(folder, keep, keep_every_s)
        gather = self.transport.gather_objects
        path = save_together(content, entries, rank=self.rank, gather=gather)
        for hook in self.hooks.on_checkpoint:
            hook(self, path)
        return path

    def begin_save(
        self, folder: str | Path, *, keep: int = 2, keep_every_s: float | None = None
    ) -> None:
        """As :meth:`save`, but written while training goes on; :meth:`saved` says how it ended."""
        if self._saves is None:
            self._saves = BackgroundSaves(self.transport)
        self._saves.begin(*self._to_save(folder, keep, keep_every_s))

    def saved(self, *, wait: bool = False) -> Saved | None:
        """How the save that :meth:`begin_save` began has ended, once; None where none has.

        Args:
            wait: until it has.
        """
        if self._saves is None:
            return None
        if wait:
            self._heartbeat.phase("saving", self.step_count)
        found = self._saves.ended(wait=wait)
        if found is not None and found.path is not None:
            for hook in self.hooks.on_checkpoint:
                hook(self, found.path)
        return found

    def _to_save(
        self, folder: str | Path, keep: int, keep_every_s: float | None
    ) -> tuple[Content, list[Entry]]:
        self._heartbeat.phase("saving", self.step_count)
        # One copy is written: it must be that of all.
        if self._replicas:
            self._replicas.compare(self.step_count)
        state = {
            "step": self.step_count,
            "seed": self.workload.train.seed,
            "optimizer": self.workload.train.optimizer,
            "identity": identity_of(self.workload),
        }
        if self.early_stop is not None:
            state["early_stop"] = self.early_stop.state()
        if self.loss_scale is not None:
            state["loss_scale"] = self.loss_scale.state()
        content = Content(
            root=Path(folder),
            step=self.step_count,
            state=state,
            meta=self._meta,
            keep=keep,
            keep_every_s=keep_every_s,
        )
        entries = self._state.entries(self.optimizer)
        return content, [*entries, *(self._inactive.entries() if self._inactive else [])]

    def load(self, path: str | Path, *, anyway: bool = False, proven: bool = False) -> list[str]:
        """Take parameters, optimizer state and step count from a checkpoint of any plan.

        Args:
            path: the checkpoint's folder.
            anyway: also go on from a run with another batch, seed or learning rate.
            proven: :func:`mmlaunch.checkpoint.restore.prove` has found its files whole. Else
                each rank hashes its share of them first.

        Returns:
            The differences in what that run trained, in words.

        Raises:
            InvalidInputError: it is damaged, of another workload's shapes or optimizer, or of a
                run that trained otherwise.
        """
        self._heartbeat.phase(f"loading {Path(path).name}")
        if not proven:
            ranks, gather = self.transport.world_size, self.transport.gather_objects
            prove(Path(path), rank=self.rank, num_ranks=ranks, gather=gather)
        checkpoint = open_checkpoint(Path(path), proven=True)
        try:
            self.update.check_state(checkpoint)
            written = [spec[0] for spec in self._state.specs()]
            check_holds(checkpoint, written)
            self._state.load(checkpoint, self.optimizer)
            if self._inactive is not None:
                trained = [item.name for item in self.update.slices]
                self._inactive.load(checkpoint, written=written, trained=trained)
            # Last: that a tensor has another shape says more.
            saved = checkpoint.manifest.state.get("identity")
            others = check_same_run(checkpoint.path, saved, self.workload, anyway=anyway)
        finally:
            checkpoint.close()
        if self.early_stop is not None:
            self.early_stop.load(checkpoint.manifest.state.get("early_stop"))
        if self.loss_scale is not None:
            self.loss_scale.load(checkpoint.manifest.state.get("loss_scale"))
        self.step_count = checkpoint.manifest.step
        self._data.close()
        return others

    def write_weights(self, path: str | Path) -> list[Path]:
        """Write ``final.safetensors`` (rank 0): every weight, unsharded, by full name."""
        self._heartbeat.phase("saving", self.step_count)
        holders = [self._state, *([self._inactive] if self._inactive else [])]
        return write_final_weights(Path(path), holders, self.transport)

    def gradients(self) -> dict[str, Tensor]:
        """This rank's summed gradients by full parameter name (shards of cut parameters).

        With ``train.zero: 1`` flat slices: each rank has a shard of every sum over ranks. Of a
        parameter that other ranks hold under another tp degree these are boxes, and the box is
        part of the name: ``vision.0.up.weight[0:4, 0:8]``.
        """
        return self.update.gradients()

    def _prepare(self, tree: Tree) -> Tree:
        return map_tensors(tree, self._moved)

    def _moved(self, tensor: Tensor) -> Tensor:
        dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(self.transport.device, dtype, non_blocking=True)


def _parts_of(program: Program, rank: int) -> list[str]:
    """The modules and losses that a rank builds, as a profile's fingerprints are called."""
    modules = dict.fromkeys(f"modules.{stage.module}" for stage in program.stages_of(rank))
    return [*modules, *(f"losses.{loss.name}" for loss in program.losses if rank in loss.ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step.

    Attributes:
        step: its number, from 0.
        loss: the whole step's loss, the same on all ranks.
        losses: of it each loss by name (``task.loss`` of several tasks), without its weight.
        grad_norm: norm of all gradients before they were clipped; None without clipping.
        iteration_s: forward, backward, communication and losses.
        update_s: the optimizer's update.
        data_s: waiting for the batch's data before that.
        data_s_by_rank: the same of every rank.
        last_own_s: of the step before, the seconds of each of ``own_times.cells`` of the session;
            empty unless it was timed.
        stop: whether any rank's ``should_stop`` said so; the same on all ranks.
        starved: whether a rank had no data: the step is not done, and stop is set.
        finite: whether the loss and all summed gradients are numbers; else nothing was updated.
        loss_scale: with which the gradients were computed; None but in fp16.
        spans: when each instruction of this rank ran; empty unless asked for.
    """

    step: int
    loss: float
    losses: dict[str, float]
    grad_norm: float | None
    iteration_s: float
    update_s: float
    data_s: float
    data_s_by_rank: list[float]
    last_own_s: list[float]
    stop: bool
    starved: bool
    finite: bool
    loss_scale: float | None
    spans: list[InstructionSpan]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFiniteStep:
    """A step whose loss or gradients are not finite; the same on all ranks.

    Attributes:
        step: its number, from 0.
        loss: the whole step's.
        gradients: names of the parameters whose summed gradients are not finite.
        samples: of each rank, the dataset indices that it read, by task.
    """

    step: int
    loss: float
    gradients: list[str]
    samples: list[dict[str, list[int]]]

    def error(self) -> NotFiniteError:
        """What ends a run that must not leave it out."""
        what = f"the loss of step {self.step} is {self.loss}"
        if math.isfinite(self.loss):
            first, *others = self.gradients
            more = f" and of {len(others)} other parameters" if others else ""
            what = f"step {self.step}: the gradient of {first}{more} is not finite"
        return NotFiniteError(
            what, hint="lower the learning rate, or look for bad samples in that step's batch"
        )


@dataclass(slots=True)
class Hooks:
    """Functions called with the session and an event's result; all ranks call them.

    Attributes:
        on_data: before forward, with this rank's samples by task.
        on_step: after each update, with its :class:`StepResult`; after a step that is left out too.
        on_not_finite: before such a step is left out or ends the run, with its
            :class:`NotFiniteStep`.
        on_loss: after backward and before the update, with the loss; gradients are whole.
        on_checkpoint: after a checkpoint is complete, with its folder.
    """

    on_data: list[Callable[[Session, Mapping[str, StepData]], None]] = field(default_factory=list)
    on_step: list[Callable[[Session, StepResult], None]] = field(default_factory=list)
    on_not_finite: list[Callable[[Session, NotFiniteStep], None]] = field(default_factory=list)
    on_loss: list[Callable[[Session, float], None]] = field(default_factory=list)
    on_checkpoint: list[Callable[[Session, Path], None]] = field(default_factory=list)
