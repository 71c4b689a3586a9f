"""The judge of a program: it runs, on threads, and must train what one process trains.

What one process trains is computed here from the workload alone, with plain autograd and
``torch.optim``. Nothing of the checker is used. A program is judged by two steps with their
updates: losses, gradients and weights on every rank, what is left over, and what NCCL would
not forgive, which threads do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import patch
from zlib import crc32

import torch
from torch import Tensor, nn

from mmlaunch.comm.inprocess import InProcessTransport, InProcessWorld
from mmlaunch.comm.transport import CommGroup
from mmlaunch.execute.batch_sync import BatchSync
from mmlaunch.execute.executor import ComputePart, Executor
from mmlaunch.execute.reductions import Reductions
from mmlaunch.model.deferred_init import UndeferrableError
from mmlaunch.session.session import Session
from mmplan.errors import MMPlanError
from mmplan.program.instructions import Collective, Compute, Message, Op, Step, Sync
from mmplan.program.model import Program
from mmplan.ragged import Ragged
from mmplan.schema.factories import build_dataset, build_loss, build_module
from mmplan.schema.plan import Plan
from mmplan.schema.workload import Workload

HERE = Path(__file__).parent
STEPS = 2
# Relative to each parameter's largest gradient, fp64: sums in another order differ by 1e-14.
RELATIVE = 1e-8
# Gradients that are zero but for rounding (a bias before a softmax, say).
ABSOLUTE = 1e-13

Verdict = Literal["same", "other", "stops"]


@dataclass(frozen=True)
class Judgement:
    """Whether a program trains the same, something else, or does not come to its end."""

    verdict: Verdict
    reason: str = ""


# --- one process -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExpectedStep:
    """One process's step: gradients by full name, weights after the update."""

    loss: float
    gradients: dict[str, Tensor | None]
    weights: dict[str, Tensor]


class OneProcess:
    """All modules of a workload, every task of it, whole batches, no plan.

    Args:
        workload: without dropout, which a cut into micro-batches would have to seed.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._tasks = _tasks_of(workload)
        used = {name for task in self._tasks for name in task.modules}
        owners = dict.fromkeys(workload.modules[name].share or name for name in used)
        self._modules = {name: build_module(workload, name, HERE) for name in owners}
        terms = {name for task in self._tasks for name in task.losses}
        self._losses = {name: build_loss(workload, name, HERE) for name in terms}
        self._mark_frozen()
        self.parameters = dict(self._named())
        self._data = [
            build_dataset(task.data, HERE, seed=workload.train.seed) for task in self._tasks
        ]

    def steps(self, count: int) -> list[ExpectedStep]:
        """The first steps, with their updates."""
        train = self._workload.train
        trained = [p for p in self.parameters.values() if p.requires_grad]
        optimizer: Any = None
        if trained:
            optimizer = getattr(torch.optim, train.optimizer)(trained, **train.optimizer_args)
        found: list[ExpectedStep] = []
        for step in range(count):
            total = torch.zeros((), dtype=torch.float64)
            for task, dataset in zip(self._tasks, self._data, strict=True):
                total = total + task.weight * self._task_loss(
                    task, self._batch(task, dataset, step)
                )
            if total.requires_grad:
                total.backward()
            gradients = {
                name: None if p.grad is None else p.grad.clone()
                for name, p in self.parameters.items()
            }
            if train.clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(trained, train.clip_grad_norm)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            weights = {name: p.detach().clone() for name, p in self.parameters.items()}
            found.append(ExpectedStep(loss=total.item(), gradients=gradients, weights=weights))
        return found

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for owner, module in self._modules.items():
            for name, parameter in module.named_parameters():
                yield f"{owner}.{name}", parameter
        for loss, module in self._losses.items():
            for name, parameter in module.named_parameters():
                yield f"losses.{loss}.{name}", parameter

    def _mark_frozen(self) -> None:
        """Freeze the blocks that no task trains."""
        for owner, module in self._modules.items():
            for index, block in enumerate(module):
                trains = any(
                    not task.freezes(name, index)
                    for task in self._tasks
                    for name in task.modules
                    if (self._workload.modules[name].share or name) == owner
                )
                if not trains:
                    block.requires_grad_(False)

    def _batch(self, task: _Task, dataset: Any, step: int) -> dict[str, Any]:
        """The fields of a step's samples: each epoch is one permutation, cut into batches."""
        epoch, turn = divmod(step, len(dataset) // task.batch)
        order = torch.randperm(
            len(dataset), generator=torch.Generator().manual_seed(self._workload.train.seed + epoch)
        )
        indices = order[turn * task.batch : (turn + 1) * task.batch].tolist()
        samples = [dataset[index] for index in indices]
        return {name: _stacked([sample[name] for sample in samples]) for name in samples[0]}

    def _task_loss(self, task: _Task, data: Mapping[str, Any]) -> Tensor:
        made: dict[str, Any] = {}

        def value(text: str | None) -> Any:
            """What an input means: a module's output, an element of it, a field or nothing."""
            if text is None:
                return None
            head, _, element = text.rpartition(".")
            if text in task.modules:
                return output(text)
            if head in task.modules and element.isdigit():
                return output(head)[int(element)]
            return data[text]

        def output(name: str) -> Any:
            if name not in made:
                made[name] = self._run(task, name, [value(text) for text in task.inputs(name)])
            return made[name]

        for name in task.modules:
            output(name)
        total = torch.zeros((), dtype=torch.float64)
        for name in task.losses:
            arguments = [value(text) for text in task.inputs(name)]
            fields = {t: data[t] for t in task.inputs(name) if t is not None and t in data}
            term = self._loss(task, name, arguments, fields)
            total = total + self._workload.losses[name].weight * term
        return total

    def _run(self, task: _Task, name: str, arguments: list[Any]) -> Any:
        given = tuple(arguments)
        for index, block in enumerate(self._modules[self._workload.modules[name].share or name]):
            if task.freezes(name, index):
                fixed = {n: p.detach() for n, p in block.named_parameters()}
                given = (torch.func.functional_call(block, fixed, given),)
            else:
                given = (block(*given),)
        return given[0]

    def _loss(
        self, task: _Task, name: str, arguments: list[Any], fields: Mapping[str, Any]
    ) -> Tensor:
        """A loss of the whole batch: the mean of its sync batches, or divided by its count."""
        module = self._losses[name]
        spec = self._workload.losses[name]
        if not spec.cross_sample:
            count = getattr(module, "count", None)
            targets = 1.0 if count is None else max(float(count(fields).sum()), 1.0)
            return module(*arguments) / targets
        size = spec.sync_batch or task.batch
        values = [
            module(*(None if a is None else a[first : first + size] for a in arguments))
            for first in range(0, task.batch, size)
        ]
        return torch.stack(values).mean()


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A task of a workload, as it is written there."""

    workload: Workload
    name: str | None
    modules: tuple[str, ...]
    losses: tuple[str, ...]
    batch: int
    weight: float
    data: Any

    def inputs(self, name: str) -> tuple[str | None, ...]:
        """Of a module or a loss."""
        if self.name is not None and name in self.workload.tasks[self.name].inputs:
            return self.workload.tasks[self.name].inputs[name]
        known: Mapping[str, Any] = {**self.workload.modules, **self.workload.losses}
        return known[name].inputs

    def freezes(self, module: str, block: int) -> bool:
        """Whether the task leaves a block of a module as it is."""
        frozen: Any = self.workload.modules[module].frozen
        if self.name is not None:
            frozen = self.workload.tasks[self.name].frozen.get(module, frozen)
        return frozen if isinstance(frozen, bool) else any(a <= block < b for a, b in frozen)


def _tasks_of(workload: Workload) -> list[_Task]:
    if not workload.tasks:
        return [
            _Task(
                workload=workload,
                name=None,
                modules=tuple(workload.modules),
                losses=tuple(workload.losses),
                batch=workload.batch,
                weight=1.0,
                data=workload.data,
            )
        ]
    return [
        _Task(
            workload=workload,
            name=name,
            modules=task.modules,
            losses=task.losses,
            batch=task.batch or workload.batch,
            weight=task.weight,
            data=task.data or workload.data,
        )
        for name, task in workload.tasks.items()
    ]


def _stacked(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Ragged):
        return Ragged(torch.cat([v.values for v in values]), torch.cat([v.lengths for v in values]))
    return torch.stack(list(values))


_EXPECTED: dict[str, list[ExpectedStep]] = {}


def expected_steps(workload: Workload) -> list[ExpectedStep]:
    """What one process does with a workload; computed once."""
    key = workload.model_dump_json()
    if key not in _EXPECTED:
        _EXPECTED[key] = OneProcess(workload).steps(STEPS)
    return _EXPECTED[key]


# --- a program's run ---------------------------------------------------------------------


class WrongError(Exception):
    """A rank trains something else."""


class _Recording(InProcessTransport):
    """Notes the collectives that its rank begins, in their order."""

    def __init__(self, world: InProcessWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.begun: list[tuple[CommGroup, int]] = []

    def _deposit(self, group: CommGroup, operation: str, item: Any) -> int:
        if group[0] != tuple(sorted(group[0])):
            raise WrongError(f"{list(group[0])}: a communicator numbers its ranks upwards")
        sequence = super()._deposit(group, operation, item)
        if len(group[0]) > 1:
            self.begun.append((group, sequence))
        return sequence


def judge(program: Program, plan: Plan, workload: Workload) -> Judgement:
    """Run a program that stands in for a plan's and compare it with one process.

    Args:
        program: a compiled one, or a mutant.
        plan: of as many ranks.
        workload: says what is to be trained.
    """
    fault = _order_of_messages(program) or _place_of_the_update(program) or _twice(program)
    if fault:
        return Judgement("stops" if fault.startswith("NCCL") else "other", fault)
    expected = expected_steps(workload)
    world = InProcessWorld(plan.devices)
    transports = [_Recording(world, rank) for rank in range(plan.devices)]
    held: list[set[str]] = [set() for _ in transports]

    def entry(given: InProcessTransport) -> None:
        session = Session(
            plan=plan, workload=workload, folder=HERE, transport=transports[given.rank]
        )
        held[given.rank] = {name for name, _ in session.model.named_parameters()}
        for step in expected:
            _compare_step(session, step)

    try:
        with _standing_in(program):
            world.run(entry)
    except WrongError as error:
        return Judgement("other", str(error))
    except (MMPlanError, Exception) as error:
        return Judgement("stops", f"{type(error).__name__}: {error}"[:300])
    missing = sorted(set(expected[0].weights) - set().union(*held))
    if missing:
        return Judgement("other", f"nobody holds {missing[0]}")
    left = sum(map(len, world._mailbox.values()))
    if left or world._deposits:
        return Judgement("stops", f"{left} messages are left over")
    circle = _circle([transport.begun for transport in transports])
    return Judgement("stops", circle) if circle else Judgement("same")


@contextmanager
def _standing_in(program: Program) -> Generator[None]:
    """Sessions run a program in place of their plan's, and all that may meet does.

    Which blocks exchange something in their group, which losses do at their wait, and which
    count, no program tells. Here all of them do.
    """
    compute, wait, count = Executor._compute, BatchSync.wait, Reductions.count

    def meet(transport: Any, ranks: Sequence[int], item: object) -> None:
        """All ranks come, for the same instruction."""
        if len(ranks) > 1:
            mine = torch.tensor(float(crc32(str(item).encode())), dtype=torch.float64)
            total = mine.clone()
            transport.all_reduce(total, tuple(ranks))
            if total != mine * len(ranks):
                raise WrongError(f"ranks {list(ranks)} meet in {item} and in something else")

    def compute_together(self: Any, part: ComputePart) -> None:
        place = self._places.get(part.stage.index)
        if place is not None and part.op is not Op.WEIGHT:
            item = Compute(part.op, part.stage.index, part.mb)
            meet(self._transport, sorted(part.stage.ranks[place[0]]), item)
        compute(self, part)

    def wait_together(self: Any, loss: int, batch: int) -> None:
        meet(self._transport, program.losses[loss].ranks, Sync(Op.SYNC_WAIT, loss, batch))
        wait(self, loss, batch)

    def count_together(self: Any, loss: int, field_of: Any) -> None:
        meet(self._transport, program.losses[loss].ranks, Collective(Op.COUNT, loss))
        count(self, loss, field_of)

    def build_whole(*_: Any) -> None:
        raise UndeferrableError("building all of a tiny module costs less")

    with (
        patch("mmlaunch.model.local_model.MetaModule", build_whole),
        patch("mmlaunch.session.session.compile_plan", lambda _: program),
        patch("mmlaunch.session.session.check_agrees", lambda *_: None),
        patch.object(Executor, "_compute", compute_together),
        patch.object(BatchSync, "wait", wait_together),
        patch.object(Reductions, "count", count_together),
    ):
        yield


def _compare_step(session: Session, expected: ExpectedStep) -> None:
    """One step of a rank against one process's."""
    done = session.forward_backward()
    _compare("the loss", torch.tensor(done.loss), torch.tensor(expected.loss), session.rank)
    layouts = session.model.layouts
    parameters = dict(session.model.named_parameters())
    if not any(update.sharded for update in session.program.updates):
        for name, parameter in parameters.items():
            gradient = expected.gradients[name]
            wanted = torch.zeros(()) if gradient is None else gradient
            if gradient is not None and name in layouts:
                wanted = layouts[name].take(gradient)
            found = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            if gradient is None:
                wanted = torch.zeros_like(parameter)
            scale = 0.0 if gradient is None else gradient.abs().max().item()
            _compare(f"the gradient of {name}", found, wanted, session.rank, scale)
    session.update.apply(session.step_count)
    session.step_count += 1
    for name, parameter in parameters.items():
        whole = expected.weights[name]
        wanted = layouts[name].take(whole) if name in layouts else whole
        _compare(f"{name} after the update", parameter.detach(), wanted, session.rank)


def _compare(
    what: str, found: Tensor, wanted: Tensor, rank: int, scale: float | None = None
) -> None:
    if found.shape != wanted.shape:
        raise WrongError(f"rank {rank}: {what} is of {tuple(found.shape)}")
    if not wanted.numel():
        return
    largest = wanted.abs().max().item() if scale is None else scale
    error = (found.double() - wanted.double()).abs().max().item()
    if not error <= RELATIVE * largest + ABSOLUTE:
        raise WrongError(f"rank {rank}: {what} is off by {error:.3g} of {largest:.3g}")


# --- what threads forgive ----------------------------------------------------------------


def _order_of_messages(program: Program) -> str | None:
    """NCCL has no tags: a rank's n-th receive from another takes what that one sends n-th."""
    sent: defaultdict[tuple[int, int, bool], list[Any]] = defaultdict(list)
    received: defaultdict[tuple[int, int, bool], list[Any]] = defaultdict(list)
    for rank, row in enumerate(program.instructions):
        for item in row:
            if isinstance(item, Message) and item.peer != rank:
                parcel = item.edge, item.start, item.stop
                backward = item.op in (Op.SEND_B, Op.RECV_B)
                if item.is_send:
                    sent[rank, item.peer, backward].append(parcel)
                else:
                    received[item.peer, rank, backward].append(parcel)
    for route in {*sent, *received}:
        if sent[route] != received[route]:
            return f"NCCL: ranks {route[0]} > {route[1]} do not send and receive in one order"
    return None


def _place_of_the_update(program: Program) -> str | None:
    """STEP is the update: what a rank computes or sums after it comes too late."""
    for rank, row in enumerate(program.instructions):
        steps = [position for position, item in enumerate(row) if isinstance(item, Step)]
        if len(steps) != (1 if row else 0):
            return f"rank {rank} updates {len(steps)} times"
        late = row[steps[0] + 1 :] if steps else ()
        if any(not isinstance(item, Message) for item in late):
            return f"rank {rank} computes after its update"
    return None


def _twice(program: Program) -> str | None:
    """What stands twice is done twice; the executor forgives it where the graph is gone."""
    for rank, row in enumerate(program.instructions):
        if len(set(row)) < len(row):
            return f"rank {rank} does something twice"
    return None


def _circle(begun: Sequence[Sequence[tuple[CommGroup, int]]]) -> str | None:
    """NCCL wants one order of all communicators' operations over all ranks."""
    before: defaultdict[Any, set[Any]] = defaultdict(set)
    for row in begun:
        for first, second in pairwise(row):
            before[second].add(first)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        ring = cast("list[Any]", error.args[1])
        groups = [f"{list(group[0])}/{group[1]}" for group, _ in ring]
        return f"NCCL: ranks begin {' and '.join(dict.fromkeys(groups))} in several orders"
    return None
