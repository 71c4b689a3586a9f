"""workload.yaml: modules, losses, tasks and data; also built in Python as the same object."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from mmplan.errors import InvalidInputError
from mmplan.schema.base import (
    Bool,
    Count,
    Document,
    Float,
    Name,
    Range,
    Record,
    Str,
    ZeroStage,
    load_document,
    parse_document,
)
from mmplan.schema.evaluation import TOTAL, EvalSpec, MetricSpec
from mmplan.schema.made import Args, DataSpec, Factory
from mmplan.schema.recompute import Recompute
from mmplan.schema.train import TaskSet, TrainSpec, task_sets

Degrees = Count | tuple[Count, ...]
Frozen = Bool | tuple[Range, ...]
DEFAULT_TASK = "default"


class Pins(Record):
    """Degrees a user fixes (a number) or limits (a list of candidates), and the backward.

    Attributes:
        tp: ranks that share a block's matrices.
        pp: pipeline stages.
        vpp: chunks of blocks on each stage (interleaved); ``convex`` and ``ratio`` plan them.
        dp: replicas.
        microbatch: samples that go through a stage at once.
    """

    tp: Degrees | None = None
    pp: Degrees | None = None
    vpp: Degrees | None = None
    dp: Degrees | None = None
    microbatch: Degrees | None = None
    split_backward: Bool | Literal["auto"] = Field(
        default="auto",
        description="weight gradients after the input gradients are sent; auto: where it gains",
    )

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {value}" for name, value in self.model_dump(exclude_defaults=True).items()
        )

    def allows(self, name: str, value: int) -> bool:
        """Whether a degree is among the candidates (all are, when none is given)."""
        candidates = getattr(self, name)
        if candidates is None:
            return True
        return value == candidates if isinstance(candidates, int) else value in candidates


class ModuleSpec(Record):
    """One part of the model that is planned on its own.

    Attributes:
        factory: ``package.module:callable``; makes an ``nn.Sequential`` of blocks.
        inputs: data fields, modules' outputs (``text``), elements of them (``text.1``), or null.
        frozen: true, or half-open ranges of blocks that do not train.
        init: safetensors file or folder to start from.
        share: another module whose parameters this one uses.
        recompute: full keeps only the inputs of blocks and runs them again in backward; a number
            does so for so many blocks, spread evenly; auto lets the plan say.
        backbone: the LLM of a chain; default: the module with the most seconds per sample.
        items: its blocks treat each row (item) of their ragged input apart, so that several ranks
            may share out the items of one sample.
        zero: ZeRO stage of its parameters; default: ``train.zero``, or that of the module that it
            shares them with.
        plan: degrees that the solver must or may choose.
    """

    factory: Factory
    args: Args = Field(default_factory=dict)
    inputs: tuple[Str | None, ...] = Field(min_length=1)
    frozen: Frozen = False
    init: Str | None = None
    share: Str | None = None
    recompute: Literal["none", "full", "auto"] | Count = "none"
    backbone: Bool | None = None
    items: Bool = False
    zero: ZeroStage | None = None
    plan: Pins = Pins()


class LossSpec(Record):
    """A term of the step's loss.

    Attributes:
        factory: makes an ``nn.Module`` whose forward takes the inputs.
        inputs: modules' outputs and data fields.
        cross_sample: couples samples, so it is computed over a whole sync batch.
        sync_batch: samples that it takes at once; default: the task's batch, which it divides.
    """

    factory: Factory
    args: Args = Field(default_factory=dict)
    inputs: tuple[Str | None, ...] = Field(min_length=1)
    cross_sample: Bool = False
    sync_batch: Count | None = None
    weight: Float = 1.0


class TaskSpec(Record):
    """Modules trained together on one stream of data; what is absent is the workload's.

    Attributes:
        inputs: of modules and losses, where they differ from the workload's.
        frozen: of modules, where it differs from the workload's.
    """

    modules: tuple[Str, ...] = Field(min_length=1)
    losses: tuple[Str, ...] = Field(min_length=1)
    batch: Count | None = None
    data: DataSpec | None = None
    weight: Float = 1.0
    inputs: dict[Str, tuple[Str | None, ...]] = Field(default_factory=dict)
    frozen: dict[Str, Frozen] = Field(default_factory=dict)


class Workload(Document):
    """A whole multimodal training job.

    Attributes:
        tasks: default: one called ``default`` with every module and loss.
        data: of tasks without data of their own.
    """

    kind: ClassVar[str] = "workload"

    name: Name
    batch: Count = Field(description="samples per optimizer step")
    modules: dict[Str, ModuleSpec] = Field(min_length=1, max_length=1000)
    losses: dict[Str, LossSpec] = Field(min_length=1, max_length=1000)
    tasks: dict[Str, TaskSpec] = Field(default_factory=dict, max_length=1000)
    data: DataSpec | None = None
    train: TrainSpec = TrainSpec()

    @model_validator(mode="after")
    def _is_consistent(self) -> Workload:
        _check_names(self)
        _check_shares(self)
        for task in resolve_tasks(self).values():
            _check_task(self, task)
        task_sets(self.train.tasks_from_step, tuple(resolve_tasks(self)))
        _check_evaluation(self)
        return self

    @property
    def task_sets(self) -> tuple[TaskSet, ...]:
        """Which tasks train from which step on, in order; all of them where nothing is said."""
        return task_sets(self.train.tasks_from_step, tuple(resolve_tasks(self)))

    def zero_of(self, module: str) -> ZeroStage:
        """ZeRO stage of a module's parameters, which another module may own."""
        own = self.modules[self.modules[module].share or module].zero
        return self.train.zero if own is None else own


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSource:
    """One input of a module or loss.

    Attributes:
        module: name of the module whose output it is, or None.
        element: element of that module's output tuple, or None for the whole output.
        field: name of the data field it is, or None; all None is a ``null`` input.
    """

    module: str | None = None
    element: int | None = None
    field: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskView:
    """A task with all defaults filled in.

    Attributes:
        inputs: module to its sources, in the task's module order (producers first).
        loss_inputs: loss to its sources.
        sync_batches: cross-sample losses to their sync batch.
        frozen: module to True, False or ranges of blocks.
    """

    name: str
    batch: int
    weight: float
    data: DataSpec | None
    inputs: Mapping[str, tuple[InputSource, ...]]
    loss_inputs: Mapping[str, tuple[InputSource, ...]]
    sync_batches: Mapping[str, int]
    frozen: Mapping[str, bool | tuple[tuple[int, int], ...]]

    @property
    def modules(self) -> tuple[str, ...]:
        """The task's modules, producers before consumers."""
        return tuple(self.inputs)

    @property
    def period(self) -> int:
        """Samples after which all sync batches begin anew; the batch when there are none."""
        return math.lcm(*self.sync_batches.values()) if self.sync_batches else self.batch


def recomputing(workload: Workload, chosen: Mapping[str, Recompute]) -> Workload:
    """The workload with ``recompute: auto`` settled: ``none`` for modules that are not here."""
    modules = {
        name: spec.model_copy(update={"recompute": chosen.get(name, "none")})
        if spec.recompute == "auto"
        else spec
        for name, spec in workload.modules.items()
    }
    return workload.model_copy(update={"modules": modules})


def parse_source(text: str | None, modules: Mapping[str, Any] | set[str]) -> InputSource:
    """What a string in ``inputs`` means: a module's output, an element of it, or a data field."""
    if text is None:
        return InputSource()
    if text in modules:
        return InputSource(module=text)
    head, _, tail = text.rpartition(".")
    if head in modules and tail.isdigit():
        return InputSource(module=head, element=int(tail))
    return InputSource(field=text)


def resolve_tasks(workload: Workload) -> dict[str, TaskView]:
    """Every task with its defaults filled in; one called "default" where none is written."""
    specs = workload.tasks or {
        DEFAULT_TASK: TaskSpec(modules=tuple(workload.modules), losses=tuple(workload.losses))
    }
    return {name: _resolve(workload, name, spec) for name, spec in specs.items()}


def check_tasks(workload: Workload, names: Sequence[str]) -> dict[str, TaskView]:
    """Some of the tasks, in the workload's order, as ``--tasks`` names them.

    Raises:
        InvalidInputError: one is unknown.
    """
    known = resolve_tasks(workload)
    for name in names:
        if name not in known:
            raise InvalidInputError(
                f"--tasks {name}: the workload has {', '.join(known)}", hint="correct the name"
            )
    return {name: view for name, view in known.items() if name in names}


def _resolve(workload: Workload, name: str, spec: TaskSpec) -> TaskView:
    for field, keys in (("inputs", spec.inputs), ("frozen", spec.frozen)):
        for key in keys:
            if key not in spec.modules and (field == "frozen" or key not in spec.losses):
                raise ValueError(f"tasks.{name}.{field}: {key!r} is not part of the task")
    for kind, used, known in (
        ("module", spec.modules, workload.modules),
        ("loss", spec.losses, workload.losses),
    ):
        for item in used:
            if item not in known:
                raise ValueError(f"task {name} uses the {kind} {item!r}, which is not defined")
    batch = spec.batch or workload.batch
    inputs = {
        module: input_sources(workload, spec.inputs.get(module, workload.modules[module].inputs))
        for module in spec.modules
    }
    losses = {loss: workload.losses[loss] for loss in spec.losses}
    return TaskView(
        name=name,
        batch=batch,
        weight=spec.weight,
        data=spec.data or workload.data,
        inputs=producers_first(name, inputs),
        loss_inputs={
            loss: input_sources(workload, spec.inputs.get(loss, item.inputs))
            for loss, item in losses.items()
        },
        sync_batches={
            loss: item.sync_batch or batch for loss, item in losses.items() if item.cross_sample
        },
        frozen={
            module: spec.frozen.get(module, workload.modules[module].frozen)
            for module in spec.modules
        },
    )


def input_sources(workload: Workload, inputs: tuple[str | None, ...]) -> tuple[InputSource, ...]:
    """Where the inputs of a module, a loss or a metric come from."""
    return tuple(parse_source(text, workload.modules) for text in inputs)


def producers_first(
    task: str, inputs: Mapping[str, tuple[InputSource, ...]]
) -> dict[str, tuple[InputSource, ...]]:
    """Stable topological order of a task's modules.

    Raises:
        ValueError: some take each other's output in a circle.
    """
    ordered: dict[str, tuple[InputSource, ...]] = {}
    while len(ordered) < len(inputs):
        ready = next(
            (
                name
                for name, sources in inputs.items()
                if name not in ordered
                and all(
                    s.module is None or s.module in ordered or s.module not in inputs
                    for s in sources
                )
            ),
            None,
        )
        if ready is None:
            stuck = ", ".join(name for name in inputs if name not in ordered)
            raise ValueError(
                f"task {task}: the modules {stuck} take each other's output in a circle"
            )
        ordered[ready] = inputs[ready]
    return ordered


def crossing_elements(task: TaskView, module: str) -> tuple[int, ...] | None:
    """Elements of a module's output tuple that leave its last stage; None for all of it.

    What only a per-sample loss of this one module takes is used where it is made: a language
    model's logits, say. An output that nobody else takes counts whole.
    """
    consumers = [
        *task.inputs.values(),
        *(
            sources
            for loss, sources in task.loss_inputs.items()
            if loss in task.sync_batches or len({s.module for s in sources if s.module}) > 1
        ),
    ]
    found = {s.element for sources in consumers for s in sources if s.module == module}
    elements = sorted(element for element in found if element is not None)
    return None if None in found or not elements else tuple(elements)


def takes_own_logits(task: TaskView, module: str, takes_shards: Callable[[str], bool]) -> bool:
    """Whether nobody needs the whole of a module's first output, which a group may cut then.

    Per-sample losses alone take it, as their first input, beside data.

    Args:
        task: the task.
        module: its module.
        takes_shards: whether a loss can do with shards of the vocabulary.
    """

    def is_it(source: InputSource) -> bool:
        return source.module == module and not source.element

    takers = {n: inputs for n, inputs in task.loss_inputs.items() if any(map(is_it, inputs))}
    return (
        bool(takers)
        and not any(is_it(source) for inputs in task.inputs.values() for source in inputs)
        and all(
            loss not in task.sync_batches
            and is_it(inputs[0])
            and all(source.module is None for source in inputs[1:])
            and takes_shards(loss)
            for loss, inputs in takers.items()
        )
    )


def _check_names(workload: Workload) -> None:
    for name in (*workload.modules, *workload.losses, *workload.tasks):
        if not name.replace("_", "").replace("-", "").isalnum():
            raise ValueError(
                f"{name!r} is not a usable name: letters, digits, _ and - only (it names files)"
            )
    both = sorted(set(workload.modules) & set(workload.losses))
    if both:
        raise ValueError(f"{both[0]!r} names a module and a loss; rename one of them")
    if "losses" in workload.modules:
        raise ValueError("'losses' cannot name a module: weights of losses are saved under it")
    backbones = [name for name, spec in workload.modules.items() if spec.backbone]
    if len(backbones) > 1:
        raise ValueError(f"backbone is true for {', '.join(backbones)}; at most one can be it")


def _check_shares(workload: Workload) -> None:
    for name, spec in workload.modules.items():
        if spec.share is None:
            continue
        owner = workload.modules.get(spec.share)
        if owner is None or spec.share == name:
            raise ValueError(f"modules.{name}.share: {spec.share!r} is not another module")
        if owner.share is not None:
            raise ValueError(
                f"modules.{name}.share: {spec.share} itself shares {owner.share}; name that one"
            )
        if (owner.factory, owner.args) != (spec.factory, spec.args):
            raise ValueError(
                f"modules.{name}.share: {spec.share} has another factory or other args, "
                "so their parameters differ"
            )
        if spec.zero not in (None, workload.zero_of(name)):
            raise ValueError(
                f"modules.{name}.zero: {spec.zero}, and {workload.zero_of(name)} of {spec.share}, "
                "whose parameters it uses"
            )


def _check_task(workload: Workload, task: TaskView) -> None:
    where = f"task {task.name}: " if workload.tasks else ""
    for consumer, sources in (*task.inputs.items(), *task.loss_inputs.items()):
        for source in sources:
            if source.module is not None and source.module not in task.inputs:
                raise ValueError(
                    f"{where}{consumer} takes the output of {source.module}, "
                    "which is not among the task's modules"
                )
    for loss, sources in task.loss_inputs.items():
        if not any(source.module for source in sources):
            raise ValueError(f"{where}losses.{loss}.inputs names no module, so nothing is trained")
    for loss, sync_batch in task.sync_batches.items():
        if task.batch % sync_batch:
            raise ValueError(
                f"{where}losses.{loss}.sync_batch: {sync_batch} does not divide the batch of "
                f"{task.batch}"
            )
    for loss in task.loss_inputs:
        spec = workload.losses[loss]
        if spec.sync_batch is not None and not spec.cross_sample:
            raise ValueError(f"losses.{loss}.sync_batch needs cross_sample: true")


def _check_evaluation(workload: Workload) -> None:
    train, tasks = workload.train, resolve_tasks(workload)
    if train.early_stop is not None and train.eval is None:
        raise ValueError("train.early_stop needs train.eval: it looks at evaluations")
    if train.eval is None:
        return
    for name in train.eval.data_by_task:
        if name not in tasks:
            raise ValueError(
                f"train.eval.data_by_task: there is no task {name!r}, the workload has "
                f"{', '.join(tasks)}"
            )
    for name in tasks:
        if train.eval.data is None and name not in train.eval.data_by_task:
            of = f" of task {name}" if workload.tasks else ""
            raise ValueError(f"train.eval: data{of} are missing; add data: {{factory: ...}}")
    for name, metric in train.eval.metrics.items():
        _check_metric(workload, tasks, name, metric)
    stop = train.early_stop
    values = evaluated_values(workload)
    if stop is not None and stop.metric not in values:
        similar = get_close_matches(stop.metric, values, n=1)
        meant = f"; did you mean {similar[0]}?" if similar else ""
        raise ValueError(
            f"train.early_stop.metric: {stop.metric!r} is not evaluated, {', '.join(values)} "
            f"are{meant}"
        )


def _check_metric(
    workload: Workload, tasks: Mapping[str, TaskView], name: str, metric: MetricSpec
) -> None:
    where = f"train.eval.metrics.{name}"
    if not name.replace("_", "").replace("-", "").isalnum():
        raise ValueError(f"{where}: its name may have letters, digits, _ and - only")
    if name == TOTAL or name in workload.losses or name in workload.modules:
        raise ValueError(f"{where}: {name!r} is the name of a loss or a module; rename the metric")
    if metric.task is None and len(tasks) > 1:
        raise ValueError(f"{where}.task is missing; it is one of {', '.join(tasks)}")
    task = tasks.get(metric.task or next(iter(tasks)))
    if task is None:
        raise ValueError(f"{where}.task: {metric.task!r} is not one of {', '.join(tasks)}")
    sources = input_sources(workload, metric.inputs)
    for source in sources:
        if source.module is not None and source.module not in task.inputs:
            raise ValueError(f"{where}.inputs: {source.module} is no module of task {task.name}")
    if not any(source.module for source in sources):
        raise ValueError(f"{where}.inputs names no module, so there is nothing to evaluate")
    if metric.sync_batch is not None and not metric.cross_sample:
        raise ValueError(f"{where}.sync_batch needs cross_sample: true")
    if metric.sync_batch is not None and task.batch % metric.sync_batch:
        raise ValueError(
            f"{where}.sync_batch: {metric.sync_batch} does not divide the batch of {task.batch}"
        )


def with_metrics(workload: Workload, spec: EvalSpec) -> Workload:
    """The workload with the held-out data, and with metrics among its losses."""
    metrics = {
        name: LossSpec(factory=metric.factory, args=metric.args, inputs=metric.inputs)
        for name, metric in spec.metrics.items()
    }
    tasks = {
        name: task.model_copy(update={"data": spec.data_by_task.get(name, spec.data)})
        for name, task in workload.tasks.items()
    }
    data = spec.data or next(iter(spec.data_by_task.values()), None)
    # Its order of samples needs no thought: nothing follows from it.
    train = workload.train.model_copy(update={"reorder": False})
    changed = {"losses": {**workload.losses, **metrics}, "data": data, "tasks": tasks}
    return workload.model_copy(update={**changed, "train": train})


def value_name(workload: Workload, task: str, name: str) -> str:
    """The name of a task's loss or metric in logs and evaluations."""
    return f"{task}.{name}" if len(resolve_tasks(workload)) > 1 else name


def evaluated_values(workload: Workload) -> list[str]:
    """Names of what an evaluation computes: the total, every loss, every metric."""
    tasks = resolve_tasks(workload)
    metrics = workload.train.eval.metrics if workload.train.eval else {}
    first = next(iter(tasks))
    return [
        TOTAL,
        *(value_name(workload, task, loss) for task in tasks for loss in tasks[task].loss_inputs),
        *(value_name(workload, m.task or first, name) for name, m in metrics.items()),
    ]


def exact(weight: float) -> Fraction:
    """A weight as it is written: 0.3 is three tenths, not the float beside them."""
    return Fraction(repr(weight))


def unused_modules(workload: Workload) -> list[str]:
    """Modules that no task uses: ignored, with a warning."""
    used = {module for task in resolve_tasks(workload).values() for module in task.modules}
    return [name for name in workload.modules if name not in used]


def load_workload(path: str | Path) -> Workload:
    """Read workload.yaml.

    Raises:
        InvalidInputError: the file or its contents are wrong; names file and field.
    """
    return load_document(Workload, path)


def with_batch(workload: Workload, batch: int, *, scale_sync: bool = False) -> Workload:
    """The workload with another batch; batches of tasks change in the same ratio.

    Args:
        workload: to change.
        batch: samples per step.
        scale_sync: also change sync batches that would not divide their batch, in that ratio.

    Raises:
        InvalidInputError: a task's batch would be no whole number, or a sync batch does not
            divide its batch.
    """
    document = workload.model_dump(mode="json", exclude_unset=True)
    now, source = workload.batch, f"batch {batch}"
    owners = [(None, document), *document.get("tasks", {}).items()]
    with_own = [(name, owner) for name, owner in owners if owner.get("batch")]
    for name, owner in with_own:
        owner["batch"] = _scaled(owner["batch"], batch, now, source, f"task {name}'s batch")
    for name, loss in document["losses"].items():
        sync_batch = loss.get("sync_batch")
        if scale_sync and sync_batch and any(o["batch"] % sync_batch for _, o in with_own):
            what = f"loss {name}'s sync batch"
            loss["sync_batch"] = _scaled(sync_batch, batch, now, source, what)
    return parse_document(Workload, document, source=source)


def _scaled(value: int, batch: int, now: int, source: str, what: str) -> int:
    scaled, rest = divmod(value * batch, now)
    if rest or scaled < 1:
        raise InvalidInputError(
            f"{source}: {what} of {value} times {batch}/{now} is no whole number",
            hint="choose a batch that divides evenly",
        )
    return scaled
