"""What ``train`` says of evaluation: its data, its metrics, and when training ends by them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mmplan.schema.base import Bool, Count, Record, Size, Str
from mmplan.schema.made import Args, DataSpec, Factory

# The name of the weighted sum of a task's losses, or of all tasks', in an evaluation.
TOTAL = "loss"


class MetricSpec(Record):
    """A number beside the losses: a module like a loss, of which nothing is trained.

    Its values of micro-batches are averaged as a loss's are: over samples, or over what its
    ``count`` counts.

    Attributes:
        factory: makes an ``nn.Module`` whose forward takes the inputs and returns the mean.
        inputs: modules' outputs and data fields.
        cross_sample: compares samples, so it is computed over a whole sync batch.
        sync_batch: samples that it takes at once; default: the task's batch, which it divides.
        task: whose outputs it takes; needed where the workload has several.
    """

    factory: Factory
    args: Args = Field(default_factory=dict)
    inputs: tuple[Str | None, ...] = Field(min_length=1)
    cross_sample: Bool = False
    sync_batch: Count | None = None
    task: Str | None = None


class EvalSpec(Record):
    """Evaluation while training, and once at the end, by the plan's own forward passes.

    Attributes:
        data: held-out samples of tasks without an entry in ``data_by_task``.
        every: steps between evaluations.
        batches: of each task's batch; default: as many as the data have. Always the same ones.
        metrics: beside the losses.
    """

    data: DataSpec | None = None
    data_by_task: dict[Str, DataSpec] = Field(default_factory=dict)
    every: Count = 100
    batches: Count | None = None
    metrics: dict[Str, MetricSpec] = Field(default_factory=dict)


class EarlyStopSpec(Record):
    """The end of a run whose evaluations do not get better any more.

    Attributes:
        metric: of the evaluation; "loss" is the weighted sum of the losses.
        mode: whether less is better, or more.
        patience: evaluations without a better value, after which the run ends.
        min_delta: a value must be better by more than this.
    """

    metric: Str = TOTAL
    mode: Literal["min", "max"] = "min"
    patience: Count = 3
    min_delta: Size = 0.0
