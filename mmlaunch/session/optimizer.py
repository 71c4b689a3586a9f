"""The optimizer of one rank: a class of torch.optim over the parameters that it holds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from mmplan.schema.optimizers import check_optimizer
from mmplan.schema.workload import TrainSpec


def build_optimizer(
    train: TrainSpec, parameters: Sequence[tuple[str, nn.Parameter]], *, sharded: bool
) -> torch.optim.Optimizer | None:
    """Make the workload's optimizer; None for a rank that trains nothing.

    Args:
        train: class and arguments.
        parameters: this rank's trained parameters by name.
        sharded: whether tensor parallelism cuts parameters anywhere in the run.

    Raises:
        InvalidInputError: see :func:`mmplan.schema.optimizers.check_optimizer`.
    """
    kind = check_optimizer(train, sharded=sharded)
    if not parameters:
        return None
    members: defaultdict[int | None, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in parameters:
        members[group_of(train, name)].append(parameter)
    groups = [
        {"params": found, **({} if index is None else train.groups[index].optimizer_args)}
        for index, found in members.items()
    ]
    return kind(
        groups, **_implementation(train, [p for _, p in parameters]), **train.optimizer_args
    )


def _implementation(train: TrainSpec, parameters: Sequence[nn.Parameter]) -> dict[str, bool]:
    """How torch is to run the update, where the workload leaves that to us."""
    # Fused, an update reads and writes everything once; foreach keeps temporaries as large as
    # the parameters. Elsewhere than on CUDA torch's own choice stands: its fused kernel for CPUs
    # rounds an element by its place in the tensor, so that slices would differ from the whole.
    given = {name for args in (train, *train.groups) for name in args.optimizer_args}
    # The kernel goes through memory as through a tensor without gaps; shards of columns have some.
    dense = all(parameter.is_contiguous() for parameter in parameters)
    fused = parameters[0].is_cuda and dense and train.optimizer in ("Adam", "AdamW")
    chosen = given & {"fused", "foreach", "capturable", "differentiable"}
    return {"fused": True} if fused and not chosen else {}


def group_of(train: TrainSpec, name: str) -> int | None:
    """Index of the first of the workload's groups that a parameter's full name matches."""
    for index, group in enumerate(train.groups):
        if fnmatchcase(name, group.match):
            return index
    return None


def state_of(train: TrainSpec, name: str) -> frozenset[str]:
    """Names of the optimizer's state of a parameter, seen on a small one of our own."""
    index = group_of(train, name)
    extra = {} if index is None else train.groups[index].optimizer_args
    parameter = nn.Parameter(torch.zeros(2, 2))
    kind: Any = getattr(torch.optim, train.optimizer)
    optimizer = kind([parameter], **{**train.optimizer_args, **extra})
    parameter.grad = torch.zeros(2, 2)
    optimizer.step()
    return frozenset(k for k, v in optimizer.state[parameter].items() if v is not None)


def rate_factor(train: TrainSpec, step: int) -> float:
    """The factor of every learning rate at a step (counted from 0)."""
    schedule = train.schedule
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    falling_steps = (schedule.total_steps or train.steps) - schedule.warmup_steps
    done = min((step - schedule.warmup_steps) / falling_steps, 1.0) if falling_steps > 0 else 1.0
    left = 1.0 - done if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.final_ratio + (1.0 - schedule.final_ratio) * left
