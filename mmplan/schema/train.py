"""The ``train`` section of workload.yaml."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, Field, Strict, model_validator

from mmplan.schema.base import (
    Bool,
    Count,
    Index,
    Int,
    Positive,
    Precision,
    Record,
    Size,
    Str,
    ZeroStage,
)
from mmplan.schema.evaluation import EarlyStopSpec, EvalSpec
from mmplan.schema.made import Args, CallbackSpec


def _numbered(value: object) -> object:
    """JSON's keys are texts: "500" is taken for 500, what is no number is left to be refused."""
    if not isinstance(value, dict):
        return value
    taken: dict[object, object] = {}
    for key, names in cast("dict[object, object]", value).items():
        step = int(key) if isinstance(key, str) and re.fullmatch(r"-?[0-9]+", key) else key
        if step in taken:
            raise ValueError(f"step {step} stands twice")
        taken[step] = names
    return taken


TasksFromStep = Annotated[
    dict[Index, Annotated[tuple[Str, ...], Field(min_length=1)]], BeforeValidator(_numbered)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """Tasks that train together, and the first step (counted from 0) that they do."""

    from_step: int
    tasks: tuple[str, ...]


class RateSpec(Record):
    """Factor of every learning rate at each step (counted from 0).

    It rises linearly to 1 over the warmup, then falls from 1 to ``final_ratio`` until
    ``total_steps`` (linear, cosine) or stays (constant).

    Attributes:
        kind: of the fall.
        final_ratio: factor at ``total_steps``.
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Index = 0
    total_steps: Count | None = Field(default=None, description="default: train.steps")
    final_ratio: Size = 0.0

    @model_validator(mode="after")
    def _ends_after_its_warmup(self) -> RateSpec:
        if self.total_steps is not None and self.total_steps < self.warmup_steps:
            raise ValueError(
                f"total_steps: {self.total_steps} is less than the {self.warmup_steps} of "
                "warmup_steps"
            )
        return self


class GroupSpec(Record):
    """Parameters with arguments of their own; a parameter is in the first group it matches.

    Attributes:
        optimizer_args: that replace those of ``train``.
    """

    match: Str = Field(
        min_length=1, description='pattern of full parameter names with * and ?: "*.bias"'
    )
    optimizer_args: Args = Field(min_length=1)


# A backward begins in float32, which ends at 2^128.
LARGEST_SCALE = 2.0**64


class LossScaleSpec(Record):
    """The factor of all gradients in an fp16 backward, whose small ones would be zeros without it.

    Where a gradient overflows the batch is taken again with the scale over ``factor``.

    Attributes:
        factor: by which the scale falls after an overflow and grows after steps without one.
        growth_interval: steps without an overflow after which it grows.
    """

    initial: Annotated[float, Strict(), Field(ge=1, le=LARGEST_SCALE)] = Field(
        default=2.0**16, description="of the first step; a scale stays between 1 and 2^64"
    )
    factor: Annotated[float, Strict(), Field(gt=1)] = 2.0
    growth_interval: Count = 2000


class LossJumpSpec(Record):
    """When a loss is said to jump: it is above the median of the steps before by more than
    ``times`` their spread.

    The spread is the median distance from that median, at least a twentieth of it.

    Attributes:
        window: steps that are looked back at; from ten on.
    """

    window: Annotated[int, Strict(), Field(ge=10)] = 50
    times: Positive = 20.0


class TrainSpec(Record):
    """How parameters are updated.

    Attributes:
        seed: of weights, data order and random numbers in blocks.
        optimizer: a class of ``torch.optim``.
        optimizer_args: that it is called with.
        groups: parameters with arguments of their own.
        schedule: of all learning rates.
        precision: bf16 and fp16 are autocast; weights, gradients and optimizer state stay float32,
            with ZeRO a narrow copy of the weights, and of the rest the rank's own part.
        loss_scale: of fp16; no other type has one.
        zero: 1 cuts the optimizer's state over the ranks that sum a gradient, 2 the gradients
            too, 3 the weights too; of modules that say nothing else, and of losses' parameters.
        deterministic: refuse operations of torch whose results differ between two runs.
        compile: run blocks as ``torch.compile`` makes them; the first steps take longer.
        loss_jump: when a loss is named, in the log and in ``metrics.jsonl``; the run goes on.
        eval: held-out data, and what is computed of them every so many steps.
        early_stop: by which evaluations the run ends before its last step.
        callbacks: objects that hear of steps, evaluations and checkpoints: loggers, say.
        steps: of a run without ``--steps``.
    """

    seed: Int = 0
    optimizer: Str = "AdamW"
    optimizer_args: Args = Field(default_factory=dict)
    groups: tuple[GroupSpec, ...] = ()
    schedule: RateSpec = RateSpec()
    clip_grad_norm: Positive | None = Field(
        default=None, description="largest norm of all gradients together; larger ones are scaled"
    )
    precision: Precision = "fp32"
    loss_scale: LossScaleSpec = LossScaleSpec()
    zero: ZeroStage = 0
    narrow_gradients: Bool = Field(
        default=False,
        description="where ZeRO leaves weights of 16 bits, their gradients add up over "
        "micro-batches and ranks in that type too",
    )
    sequence_parallel: Bool = Field(
        default=False,
        description="ranks of a tensor-parallel group share out the tokens between the matrices "
        "that they cut, with what is kept of them for backward",
    )
    deterministic: Bool = False
    tf32: Bool = Field(
        default=False,
        description="float32 matrix products and convolutions in TF32 on CUDA; measured profiles "
        "take it into account, analytic ones do not",
    )
    compile: Bool = False
    reorder: Bool = Field(
        default=True,
        description="order each batch by its samples' work, where the dataset defines work(index)",
    )
    compare_replicas: Index = Field(
        default=100,
        description="after so many steps, and at each checkpoint, hold the bits of parameters "
        "against their copies on other ranks; 0: never",
    )
    non_finite: Literal["stop", "skip"] = Field(
        default="stop",
        description="where the loss or a gradient is not finite nothing is updated; then stop, or "
        "skip: go on with the next batch, at most ten times in a row",
    )
    loss_jump: LossJumpSpec = LossJumpSpec()
    eval: EvalSpec | None = None
    early_stop: EarlyStopSpec | None = None
    callbacks: tuple[Literal["tensorboard"] | CallbackSpec, ...] = ()
    steps: Index = 100
    tasks_from_step: TasksFromStep = Field(
        default_factory=dict,
        description="from which step on which tasks train, 0 first; default: always all",
    )

    @model_validator(mode="after")
    def _narrow_gradients_of_narrow_weights(self) -> TrainSpec:
        if self.narrow_gradients and self.precision not in ("bf16", "fp16"):
            raise ValueError(
                f"narrow_gradients: needs precision bf16 or fp16, it is {self.precision}"
            )
        return self

    @model_validator(mode="after")
    def _changes_in_order(self) -> TrainSpec:
        steps = list(self.tasks_from_step)
        if steps and 0 not in steps:
            raise ValueError("tasks_from_step: no entry says which tasks train from step 0 on")
        for before, step in itertools.pairwise(steps):
            if step < before:
                raise ValueError(f"tasks_from_step: {step} stands behind {before}; sort the steps")
        beyond = [step for step in steps if step and step >= self.steps]
        if beyond:
            raise ValueError(
                f"tasks_from_step: step {beyond[0]} never comes: train.steps is {self.steps}"
            )
        for step, names in self.tasks_from_step.items():
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise ValueError(f"tasks_from_step.{step} names {twice[0]} twice")
        return self


def task_sets(from_step: Mapping[int, Sequence[str]], known: Sequence[str]) -> tuple[TaskSet, ...]:
    """Who trains when: by steps, tasks in the workload's order; all of them where nothing is said.

    Raises:
        ValueError: an unknown task.
    """
    for step, names in from_step.items():
        for name in names:
            if name not in known:
                raise ValueError(
                    f"train.tasks_from_step.{step}: there is no task {name!r}, the workload has "
                    f"{', '.join(known)}"
                )
    if not from_step:
        return (TaskSet(from_step=0, tasks=tuple(known)),)
    return tuple(
        TaskSet(from_step=step, tasks=tuple(name for name in known if name in names))
        for step, names in from_step.items()
    )
