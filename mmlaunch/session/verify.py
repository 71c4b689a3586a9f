"""Planned steps against one process: samples, gradients, update and reload, by name.

Every step is compared from equal weights. Its samples must be those of the documented order; each
rank's gradients must equal the reference's, up to rounding; its update must be what one process
makes of these gradients, to the last places. So rounding does not pile up, and where an optimizer
makes large steps of small gradients, as Adam does, a difference is still one of gradients.

*Rounding* is measured, for each parameter: the difference between the reference and itself when
it adds up in another order and its weights move by at most one unit in the last place.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmlaunch.checkpoint.boxes import Box
from mmlaunch.comm.inprocess import InProcessWorld
from mmlaunch.comm.transport import Transport
from mmlaunch.data.loader import StepData
from mmlaunch.model.shard_layout import ShardLayout
from mmlaunch.session.reference import Reference, ReferenceUpdate
from mmlaunch.session.session import Session
from mmlaunch.session.smaller_plans import on_one_rank
from mmplan.errors import NotFiniteError
from mmplan.program.compile import compile_plan
from mmplan.program.model import Program
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload

# Draws of the rounding. In a narrow type one alone may be lucky for a parameter of one number.
_DRAWS = {"fp64": 1, "fp32": 1, "bf16": 3, "fp16": 3}
# A gradient may lie this many times as far from the reference as the draws do. Narrow types have
# several roundings in a row where a draw has one in each block; in wide types any wrong sum is
# larger by orders of magnitude, so the factor leaves room for long sums.
_FACTOR = {"fp64": 50.0, "fp32": 50.0, "bf16": 4.0, "fp16": 4.0}
# Units in the last place of a gradient's size that are always allowed: a draw may leave a
# gradient as it is.
_UNITS = {"fp64": 64.0, "fp32": 64.0, "bf16": 2.0, "fp16": 2.0}
_NARROW_UNITS = {"bf16": 2.0**-8, "fp16": 2.0**-11}
# The update follows elementwise from the gradients, with the same operations: a few units for
# sums of the norm in another order, and as many again for each step before.
_UPDATE_UNITS = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedElements:
    """The elements of a full parameter that a rank reports.

    Attributes:
        name: the parameter's full name.
        layout: of the local parameter, where tensor parallelism cuts it.
        span: elements of that, flattened, of which only those are reported.
        box: elements of the full parameter of which only those are reported.
    """

    name: str
    layout: ShardLayout | None = None
    span: tuple[int, int] | None = None
    box: Box | None = None

    def take(self, full: Tensor) -> Tensor:
        """These elements of a tensor like the full parameter."""
        if self.box is not None:
            return full[self.box.slices]
        local = full if self.layout is None else self.layout.take(full)
        if self.span is None:
            return local
        low, high = self.span
        return local.reshape(-1)[low:high].reshape((high - low,) if local.dim() else ())

    def put(self, full: Tensor, values: Tensor) -> None:
        """Set these elements of a tensor like the full parameter."""
        if self.layout is None and self.span is None and self.box is None:
            full.copy_(values)
        else:
            full.view(-1)[self.positions(full.shape)] = values.reshape(-1)

    def positions(self, shape: torch.Size) -> Tensor:
        """The places of these elements in the flat parameter."""
        return self.take(torch.arange(shape.numel()).view(shape)).reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSamples:
    """The samples of a task's batch that a rank loaded.

    Attributes:
        ranges: batch positions.
        indices: dataset indices, one after another.
    """

    ranges: Sequence[tuple[int, int]]
    indices: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGradients:
    """The forward and backward of one rank's step.

    Attributes:
        loss: the step's loss.
        gradients: by label (:attr:`mmlaunch.execute.gradient_buckets.UpdatedSlice.label`).
        elements: of the full parameters, by label.
        samples: by task.
        step: its number.
    """

    rank: int
    loss: float
    gradients: dict[str, Tensor]
    elements: dict[str, ReportedElements]
    samples: dict[str, LoadedSamples] = field(default_factory=dict[str, LoadedSamples])
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalUpdate:
    """The update of one rank's step.

    Attributes:
        norm: of all gradients, before they were clipped; None without clipping.
        weights: by name, with their elements of the full parameter.
        wide: by label the float32 values of the narrow ones among them, of which a rank has a part,
            and of those that are gathered, which it has no whole of.
        state: the optimizer's by label; None where it was not asked for.
    """

    norm: float | None
    weights: dict[str, tuple[ReportedElements, Tensor]]
    state: dict[str, dict[str, Any]] | None
    wide: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStep:
    """One rank's step; no update where the loss or a gradient is not finite."""

    forward_backward: LocalGradients
    update: LocalUpdate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A value that differs from one process's.

    Attributes:
        name: parameter, ``loss``, ``norm``, or a task.
        what: gradient, loss, norm, weight, samples, or a name of the optimizer's state.
        rank: where; -1 where no rank has it.
        step: of it.
        error: over the value's own size; infinite where one side has none.
        allowed: for it.
    """

    name: str
    rank: int
    error: float
    what: str = "gradient"
    step: int = 0
    allowed: float = 0.0

    @property
    def share(self) -> float:
        """Part of what is allowed."""
        return self.error / self.allowed if self.allowed else (math.inf if self.error else 0.0)

    @property
    def error_words(self) -> str:
        """The error beside what is allowed."""
        return f"{self.error:.3g} of its size, allowed {self.allowed:.2g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of a verification.

    Attributes:
        compared: number of gradients, by parameter, rank and step, and of losses.
        updates: number of weights and optimizer states, likewise.
        steps: compared.
        worst: the largest difference of a gradient or loss, over the largest gradient of the
            model or over the loss.
        share: the largest part of what is allowed that any difference takes.
        differences: those above what is allowed, largest share first.
        loss, reference_loss: of the first planned step and of the single process.
    """

    compared: int
    updates: int
    steps: int
    worst: float
    share: float
    differences: tuple[Difference, ...]
    loss: float
    reference_loss: float


class Recorder:
    """Takes the steps of a session and notes what each did.

    Args:
        session: of this rank.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._elements = {
            item.label: ReportedElements(
                name=item.name,
                layout=session.model.layouts.get(item.name),
                span=item.span,
                box=item.box,
            )
            for item in session.update.slices
        }
        self._samples: dict[str, LoadedSamples] = {}
        self._found: LocalGradients | None = None
        session.hooks.on_data.append(self._note_samples)
        session.hooks.on_loss.append(self._on_loss)

    def _note_samples(self, _: Session, data: Mapping[str, StepData]) -> None:
        self._samples = {
            task: LoadedSamples(ranges=list(item.ranges), indices=list(item.indices))
            for task, item in data.items()
        }

    def _on_loss(self, _: Session, loss: float) -> None:
        self._found = self._note_gradients(loss)

    def _note_gradients(self, loss: float) -> LocalGradients:
        return LocalGradients(
            rank=self._session.rank,
            step=self._session.step_count,
            loss=loss,
            # A gradient that never came counts as zero: its parameter would stay on this rank.
            gradients={
                item.label: _copied(torch.zeros_like(p) if p.grad is None else p.grad)
                for item in self._session.update.slices
                for p in [item.tensor]
            },
            elements=self._elements,
            samples=self._samples,
        )

    def without_update(self, *, timed: bool) -> LocalGradients:
        """A step that ends before its update."""
        loss = self._session.forward_backward(timed=timed).loss
        return self._note_gradients(loss)

    def step(self, *, state: bool) -> LocalStep:
        """A whole step.

        Args:
            state: whether to note the optimizer's state after it.
        """
        self._found = None
        try:
            norm = self._session.step().grad_norm
        except NotFiniteError:
            return LocalStep(forward_backward=self._note_gradients(math.nan), update=None)
        found = self._found or self._note_gradients(math.nan)
        model, optimizer = self._session.model, self._session.optimizer
        states = {} if optimizer is None else optimizer.state
        cut = self._session.gathered_names
        weights = {name: p for name, p in model.named_parameters() if name not in cut}
        update = LocalUpdate(
            norm=norm,
            weights={
                name: (ReportedElements(name=name, layout=model.layouts.get(name)), _copied(p))
                for name, p in weights.items()
            },
            wide={
                item.label: _copied(item.tensor)
                for item in self._session.update.slices
                if item.name in cut or item.tensor.dtype != weights[item.name].dtype
            },
            state={
                item.label: {
                    key: _copied(value) if isinstance(value, Tensor) else value
                    for key, value in states.get(item.tensor, {}).items()
                }
                for item in self._session.update.slices
            }
            if state
            else None,
        )
        return LocalStep(forward_backward=found, update=update)


def planned_step(session: Session, *, timed: bool = False) -> LocalGradients:
    """Run one step of a session, without the update, and report its gradients."""
    return Recorder(session).without_update(timed=timed)


def planned_steps(session: Session, steps: int, folder: Path) -> None:
    """Take some steps and save a checkpoint; the records lie in the folder.

    The folder is one that :func:`judge` reads: steps stand in files, so that no process holds
    more than one.
    """
    recorder = Recorder(session)
    for step in range(steps):
        record = recorder.step(state=step == steps - 1)
        torch.save(record, _file(folder, session.rank, step))
        if record.update is None:
            return
    session.save(folder)


def compare(
    workload: Workload, folder: Path, program: Program, found: Sequence[LocalGradients]
) -> Verdict:
    """Hold the ranks' gradients of a step against one process's, computed here."""
    judge = Judge(workload=workload, folder=folder, program=program)
    judge.gradients(found)
    return judge.verdict()


def judge(workload: Workload, folder: Path, plan: Plan, records: Path, steps: int) -> Verdict:
    """Hold the steps that :func:`planned_steps` recorded against one process's.

    Then the checkpoint is loaded under a plan of one rank, which takes one step more.

    Args:
        workload: of the plan.
        folder: the workload file's folder.
        plan: of the ranks.
        records: the folder of the records and of the checkpoint.
        steps: that were taken.
    """
    found = Judge(workload=workload, folder=folder, program=compile_plan(plan))
    for step in range(steps):
        if not found.step(list(_records(records, plan.devices, step))):
            return found.verdict()
    other = on_one_rank(plan)

    def go_on(transport: Transport) -> LocalStep:
        session = Session(plan=other, workload=workload, folder=folder, transport=transport)
        session.load(records / f"step-{steps}")
        return Recorder(session).step(state=True)

    after = InProcessWorld(1).run(go_on)
    found.reference.take_microbatches(compile_plan(other))
    found.step(after)
    return found.verdict()


class Judge:
    """Holds steps against one process's, one after another.

    Args:
        workload: of the steps.
        folder: the workload file's folder.
        program: of the plan, for its micro-batches.
    """

    def __init__(self, *, workload: Workload, folder: Path, program: Program) -> None:
        self.reference = Reference(workload=workload, folder=folder, program=program)
        self._parameters = self.reference.named_parameters()
        self._update = ReferenceUpdate(workload.train, self._parameters)
        self._clips = workload.train.clip_grad_norm is not None
        self._precision = workload.train.precision
        self._draws = torch.Generator().manual_seed(0)
        self._found: list[Difference] = []
        self._compared = self._updates = self._steps = 0
        self._worst = self._share = 0.0
        self._losses: list[tuple[float, float]] = []

    def step(self, found: Sequence[LocalStep]) -> bool:
        """Compare one step of all ranks; whether there may be another."""
        self.gradients([item.forward_backward for item in found])
        updates = [(item.forward_backward, item.update) for item in found]
        whole = [(given, update) for given, update in updates if update is not None]
        if len(whole) == len(updates):
            self._compare_updates(whole)
        return len(whole) == len(updates) and math.isfinite(self._losses[-1][1])

    def verdict(self) -> Verdict:
        """The result of all steps."""
        return Verdict(
            compared=self._compared,
            updates=self._updates,
            steps=self._steps,
            worst=self._worst,
            share=self._share,
            differences=tuple(sorted(self._found, key=lambda item: -item.share)),
            loss=self._losses[0][0],
            reference_loss=self._losses[0][1],
        )

    def gradients(self, found: Sequence[LocalGradients]) -> None:
        """Compare the samples, the loss and the gradients of one step."""
        step = found[0].step
        self._steps += 1
        order = {task: self._order(task, step, found) for task in self.reference.tasks}
        loss = self.reference.step(step, order)
        expected = {name: p.grad for name, p in self._parameters.items()}
        self._losses.append((found[0].loss, loss))
        rounding = Rounding.measured(
            self.reference,
            expected,
            loss,
            precision=self._precision,
            draws=self._draws,
            again=self.reference.again,
        )
        for name, gradient in expected.items():
            self._parameters[name].grad = gradient
        covered: defaultdict[str, list[ReportedElements]] = defaultdict(list)
        for rank in found:
            self._compared += 1 + len(rank.gradients)
            error = abs(rank.loss - loss)
            self._note("loss", "loss", rank, error / max(abs(loss), 1e-300), rounding.loss)
            self._worst = max(self._worst, error / max(abs(loss), 1e-300))
            for label, gradient in rank.gradients.items():
                where = rank.elements[label]
                covered[where.name].append(where)
                error, allowed, absolute = rounding.judge(gradient, where)
                self._worst = max(self._worst, absolute / rounding.largest)
                self._note(label, "gradient", rank, error, allowed)
        for name, gradient in expected.items():
            if gradient is not None and not _is_whole(gradient, covered[name]):
                missing = Difference(name=name, rank=-1, step=step, error=math.inf)
                self._found.append(missing)
                self._share = self._worst = math.inf

    def _note(
        self, name: str, what: str, where: LocalGradients, error: float, allowed: float
    ) -> None:
        if math.isnan(error):
            error = math.inf
        item = Difference(
            name=name, what=what, rank=where.rank, step=where.step, error=error, allowed=allowed
        )
        self._share = max(self._share, item.share)
        if item.share > 1:
            self._found.append(item)

    def _order(self, task: str, step: int, found: Sequence[LocalGradients]) -> list[int]:
        """The dataset indices of a step's batch, in the order that the ranks loaded them.

        What the ranks disagree in, or what is not the documented batch, is a difference.
        """
        documented = self.reference.indices(task, step)
        loaded = dict[int, int]()
        for rank in found:
            samples = rank.samples.get(task)
            if samples is None or not samples.indices:
                continue
            positions = [p for low, high in samples.ranges for p in range(low, high)]
            pairs = list(zip(positions, samples.indices, strict=False))
            wrong = len(positions) != len(samples.indices)
            wrong |= any(loaded.setdefault(p, index) != index for p, index in pairs)
            if not self.reference.may_reorder(task):
                wrong |= any(documented[p] != index for p, index in pairs)
            self._note(task, "samples", rank, math.inf if wrong else 0.0, 0.0)
        if not self.reference.may_reorder(task):
            return documented
        view = self.reference.tasks[task]
        # No sample leaves the sync batches that it is in.
        cuts = {c for size in view.sync_batches.values() for c in range(0, view.batch, size)}
        bounds = sorted({0, view.batch, *cuts})
        order = list(documented)
        for low, high in pairwise(bounds):
            held = {p: loaded[p] for p in range(low, high) if p in loaded}
            left = list(documented[low:high])
            try:
                for index in held.values():
                    left.remove(index)
            except ValueError:
                self._note(task, "samples", found[0], math.inf, 0.0)
                return documented
            rest = iter(left)
            order[low:high] = [held[p] if p in held else next(rest) for p in range(low, high)]
        return order

    def _compare_updates(self, found: Sequence[tuple[LocalGradients, LocalUpdate]]) -> None:
        """Update the reference by the ranks' own gradients, and compare what came of it."""
        step = found[0][0].step
        self._take_gradients([given for given, _ in found])
        norm = self._update.apply(step)
        wide: dict[str, Tensor] = {}
        for given, update in found:
            for label, values in update.wide.items():
                where = given.elements[label]
                full = self._parameters[where.name].detach()
                self._compare_exactly(label, "weight", given, values, where.take(full), step)
                where.put(wide.setdefault(where.name, full.clone()), values)
        for given, update in found:
            if self._clips or update.norm is not None:
                error = math.inf if update.norm is None else abs(update.norm - norm)
                self._note("norm", "norm", given, error / max(norm, 1e-300), self._exact(step))
            for name, (where, weight) in update.weights.items():
                self._updates += 1
                # A narrow weight is its float32 values rounded, wherever these are.
                full = wide.get(name, self._parameters[name].detach()).to(weight.dtype)
                self._compare_exactly(name, "weight", given, weight, where.take(full), step)
            for label, state in (update.state or {}).items():
                where = given.elements[label]
                whole = self._update.state(where.name)
                for key in sorted({*state, *whole}):
                    self._updates += 1
                    one = _state_part(whole.get(key), where, self._parameters[where.name])
                    self._compare_exactly(label, key, given, state.get(key), one, step)

    def _take_gradients(self, found: Sequence[LocalGradients]) -> None:
        """Put the ranks' gradients, of each element the first that came, where one has some."""
        taken = {name: torch.zeros_like(p) for name, p in self._parameters.items()}
        for rank in reversed(found):
            for label, gradient in rank.gradients.items():
                where = rank.elements[label]
                where.put(taken[where.name], gradient)
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                parameter.grad = taken[name]

    def _exact(self, step: int) -> float:
        wide = torch.float64 if self._precision == "fp64" else torch.float32
        return _UPDATE_UNITS * (step + 1) * torch.finfo(wide).eps

    def _compare_exactly(
        self, name: str, what: str, where: LocalGradients, value: Any, expected: Any, step: int
    ) -> None:
        if value is None or expected is None:
            error = 0.0 if value is expected else math.inf
        else:
            mine, its = torch.as_tensor(expected), torch.as_tensor(value)
            same = mine.shape == its.shape
            size = _largest(mine) or 1.0
            error = _largest(its.double() - mine.double()) / size if same else math.inf
        self._note(name, what, where, error, self._exact(step))


class Rounding:
    """What rounding allows of every parameter's gradient, and of the loss.

    A gradient is held by its largest difference and by the root of the mean square: the one sees
    a single wrong element, the other a small error of all.

    Args:
        precision: of the training.
        gradients: the reference's, by parameter.
        loss: the reference's.

    Attributes:
        largest: gradient of the model.
    """

    def __init__(self, precision: str, gradients: Mapping[str, Tensor | None], loss: float) -> None:
        self._factor, self._gradients, self._of_loss = _FACTOR[precision], gradients, loss
        wide = torch.float64 if precision == "fp64" else torch.float32
        unit = _NARROW_UNITS.get(precision, torch.finfo(wide).eps)
        self._floor = _UNITS[precision] * unit
        sizes = [_largest(g) for g in gradients.values() if g is not None]
        self.largest = max(sizes, default=0.0) or 1.0
        # Below this part of the model's largest gradient everything is zero.
        self._zero = torch.finfo(wide).eps * self.largest
        # Differences of references that round otherwise.
        self._draws: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._loss_noise = 0.0

    @classmethod
    def measured(
        cls,
        reference: Reference,
        gradients: Mapping[str, Tensor | None],
        loss: float,
        *,
        precision: str,
        draws: torch.Generator,
        again: Callable[[], float],
    ) -> Rounding:
        """Measure it on a reference, whose ``.grad`` are gone afterwards.

        Args:
            reference: that made the gradients.
            gradients: by parameter.
            loss: beside them.
            precision: of the training.
            draws: of the roundings.
            again: makes the loss and the gradients once more.
        """
        found = cls(precision, gradients, loss)
        parameters = reference.named_parameters()
        for _ in range(_DRAWS[precision] if math.isfinite(loss) else 0):
            _forget_gradients(parameters)
            with reference.rounded_otherwise(draws):
                other = again()
            found._loss_noise = max(found._loss_noise, abs(other - loss))
            for name, gradient in gradients.items():
                moved = parameters[name].grad
                if gradient is not None and moved is not None:
                    found._draws[name].append(moved - gradient)
        _forget_gradients(parameters)
        return found

    @property
    def loss(self) -> float:
        """Allowed for the loss, over its size."""
        return self._floor + self._factor * self._loss_noise / max(abs(self._of_loss), 1e-300)

    def judge(self, gradient: Tensor, where: ReportedElements) -> tuple[float, float, float]:
        """(error, allowed) over the parameter's own size, and the largest absolute error."""
        whole = self._gradients[where.name]
        if whole is None:
            # Zeros where one process has no gradient at all are no difference to the optimizer's
            # sums, anything else is.
            size = _largest(gradient)
            return (math.inf, 0.0, size) if size else (0.0, 0.0, 0.0)
        difference = gradient.double() - where.take(whole).double()
        draws = self._draws[where.name]
        worst = (0.0, 0.0)
        for measure in (_largest, _mean_size):
            size = measure(whole) or self._zero
            noise = max((max(measure(d), measure(where.take(d))) for d in draws), default=0.0)
            allowed = (self._factor * noise + self._zero) / size + self._floor
            error = measure(difference) / size
            if not error / allowed <= (worst[0] / worst[1] if worst[1] else 0.0):
                worst = error, allowed
        return *worst, _largest(difference)


def _forget_gradients(parameters: Mapping[str, Tensor]) -> None:
    for parameter in parameters.values():
        parameter.grad = None


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _mean_size(tensor: Tensor) -> float:
    """Root of the mean square."""
    return math.sqrt(tensor.double().square().mean().item()) if tensor.numel() else 0.0


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _state_part(value: Any, where: ReportedElements, parameter: Tensor) -> Any:
    """A rank's elements of a state like the parameter; a number is the same everywhere."""
    like = isinstance(value, Tensor) and value.shape == parameter.shape and bool(value.dim())
    return where.take(value) if like else value


def _is_whole(gradient: Tensor, reported: Sequence[ReportedElements]) -> bool:
    """Whether every element that is not zero is among the reported ones."""
    if any(item.layout is None and item.span is None and item.box is None for item in reported):
        return True
    missing = gradient.reshape(-1) != 0
    for where in reported:
        missing[where.positions(gradient.shape)] = False
    return not bool(missing.any())


def _file(folder: Path, rank: int, step: int) -> Path:
    return folder / f"rank-{rank}.step-{step}.pt"


_RECORDED: list[Any] = [
    LocalStep,
    LocalGradients,
    LocalUpdate,
    LoadedSamples,
    ReportedElements,
    ShardLayout,
    Box,
]


def _records(folder: Path, ranks: int, step: int) -> Iterator[LocalStep]:
    for rank in range(ranks):
        path = _file(folder, rank, step)
        if path.exists():
            # Mapped, so that only what is compared is read; no other class than these is made.
            with torch.serialization.safe_globals(_RECORDED):
                yield torch.load(path, weights_only=True, mmap=True)
